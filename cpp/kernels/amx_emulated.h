// The tile instructions in plain C++, after Intel's manual, so that tests can run the very kernels
// on a CPU without them. What the CPU would refuse (#UD, #GP) traps. Included by amx.h only.
#pragma once

namespace pelton {

// A thread's tile registers, from its tile_config to its tile_release. Not thread_local: an object
// has no libc, and thread-local memory of this size needs one.
struct EmulatedTiles {
  uintptr_t thread;  // 0: not in use
  TileConfig config;
  alignas(64) uint8_t bytes[kTileRegisters][kTileHeight][kTileRowBytes];
};
inline EmulatedTiles emulated_tiles[128];

inline uintptr_t this_thread() {
  uintptr_t pointer;
  asm("mov %%fs:0, %0" : "=r"(pointer));
  return pointer;
}
inline EmulatedTiles* tiles_of(uintptr_t thread) {
  for (EmulatedTiles& tiles : emulated_tiles) {
    if (__atomic_load_n(&tiles.thread, __ATOMIC_ACQUIRE) == thread) return &tiles;
  }
  return nullptr;
}
// The registers of this thread, with this one valid.
inline EmulatedTiles& tiles_with(int tile) {
  EmulatedTiles* tiles = tiles_of(this_thread());
  if (tiles == nullptr || tile < 0 || tile >= kTileRegisters) __builtin_trap();
  if (tiles->config.rows[tile] == 0 || tiles->config.row_bytes[tile] % 4 != 0) __builtin_trap();
  return *tiles;
}
inline void clear_tile(EmulatedTiles& tiles, int tile) {
  __builtin_memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]);
}

inline void release_tiles() {
  EmulatedTiles* tiles = tiles_of(this_thread());
  if (tiles != nullptr) __atomic_store_n(&tiles->thread, 0, __ATOMIC_RELEASE);
}

inline void configure_tiles(const TileConfig* config) {
  if (config->palette != 1 || config->start_row != 0) __builtin_trap();
  for (uint8_t byte : config->reserved) {
    if (byte != 0) __builtin_trap();
  }
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = config->rows[tile], row_bytes = config->row_bytes[tile];
    if (rows > kTileHeight || row_bytes > kTileRowBytes) __builtin_trap();
    if ((rows == 0) != (row_bytes == 0)) __builtin_trap();
    if (tile >= kTileRegisters && rows != 0) __builtin_trap();
  }
  EmulatedTiles* tiles = tiles_of(this_thread());
  for (EmulatedTiles& candidate : emulated_tiles) {
    if (tiles != nullptr) break;
    uintptr_t none = 0;
    if (__atomic_compare_exchange_n(&candidate.thread, &none, this_thread(), false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      tiles = &candidate;
    }
  }
  if (tiles == nullptr) __builtin_trap();
  tiles->config = *config;
  for (int tile = 0; tile < kTileRegisters; ++tile) clear_tile(*tiles, tile);
}

inline void zero_tile(int tile) { clear_tile(tiles_with(tile), tile); }

inline void load_tile(int tile, const void* from, int64_t stride) {
  EmulatedTiles& tiles = tiles_with(tile);
  clear_tile(tiles, tile);
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    __builtin_memcpy(tiles.bytes[tile][row], static_cast<const char*>(from) + row * stride,
                     tiles.config.row_bytes[tile]);
  }
}

inline void store_tile(int tile, void* to, int64_t stride) {
  const EmulatedTiles& tiles = tiles_with(tile);
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tiles.bytes[tile][row],
                     tiles.config.row_bytes[tile]);
  }
}

inline constexpr float kLeastNormal = 0x1p-126f;

inline float flush_input(float x) {
  return __builtin_fabsf(x) < kLeastNormal ? __builtin_copysignf(0.0f, x) : x;
}

// a * b + c, rounded once to nearest even; subnormal operands count as zero. A result that is tiny
// becomes zero, where tiny is asked after rounding as if exponents had no limit: at the least
// normal number only the same sum, scaled out of the way, can tell.
inline float fma_flushed(float a, float b, float c) {
  a = flush_input(a), b = flush_input(b), c = flush_input(c);
  const float result = __builtin_fmaf(a, b, c);
  if (!(__builtin_fabsf(result) <= kLeastNormal) || result == 0.0f) return result;
  const float scaled = __builtin_fmaf(a * 0x1p40f, b, c * 0x1p40f);
  return __builtin_fabsf(scaled) < kLeastNormal * 0x1p40f ? __builtin_copysignf(0.0f, result)
                                                          : result;
}
inline float add_flushed(float a, float b) { return fma_flushed(a, 1.0f, b); }

// One row of 16 columns: even and odd k in a chain of their own, from zero; then both to the sum.
inline void dot_row_bf16(float* sums, const uint16_t* a, const uint16_t (*b)[32], int pairs,
                         int columns) {
  const auto widen = [](uint16_t x) { return __builtin_bit_cast(float, uint32_t{x} << 16); };
  for (int n = 0; n < columns; ++n) {
    float even = 0.0f, odd = 0.0f;
    for (int k = 0; k < pairs; ++k) {
      even = fma_flushed(widen(a[2 * k]), widen(b[k][2 * n]), even);
      odd = fma_flushed(widen(a[2 * k + 1]), widen(b[k][2 * n + 1]), odd);
    }
    sums[n] = add_flushed(sums[n], add_flushed(even, odd));
  }
}

inline void dot_tiles_bf16(int to, int left, int right) {
  if (to == left || to == right || left == right) __builtin_trap();
  EmulatedTiles& tiles = tiles_with(to);
  tiles_with(left), tiles_with(right);
  const uint8_t* rows = tiles.config.rows;
  const int columns = tiles.config.row_bytes[to] / 4, pairs = rows[right];
  if (rows[left] != rows[to] || tiles.config.row_bytes[left] / 4 != pairs) __builtin_trap();
  if (tiles.config.row_bytes[right] != tiles.config.row_bytes[to]) __builtin_trap();
  uint16_t a[kTileHeight][32], b[kTileHeight][32];
  float sums[kTileHeight][16];
  __builtin_memcpy(a, tiles.bytes[left], sizeof a);
  __builtin_memcpy(b, tiles.bytes[right], sizeof b);
  __builtin_memcpy(sums, tiles.bytes[to], sizeof sums);
  for (int row = 0; row < rows[to]; ++row) dot_row_bf16(sums[row], a[row], b, pairs, columns);
  __builtin_memcpy(tiles.bytes[to], sums, sizeof sums);
}

// --- as kernels call them, see amx.h
// --------------------------------------------------------------

inline void tile_config(const TileConfig* config) { configure_tiles(config); }
inline void tile_release() { release_tiles(); }
template <int TILE>
void tile_zero() {
  zero_tile(TILE);
}
template <int TILE>
void tile_load(const void* from, int64_t stride) {
  load_tile(TILE, from, stride);
}
template <int TILE>
void tile_load_past(const void* from, int64_t stride) {
  load_tile(TILE, from, stride);
}
template <int TILE>
void tile_store(void* to, int64_t stride) {
  store_tile(TILE, to, stride);
}
template <int SUMS, int A, int B>
void tile_dot_bf16() {
  dot_tiles_bf16(SUMS, A, B);
}

}  // namespace pelton

// How many threads of this object hold tiles: none, once kernels have returned.
extern "C" inline __attribute__((used, visibility("default"))) int32_t pelton_tiles_in_use() {
  int32_t count = 0;
  for (pelton::EmulatedTiles& tiles : pelton::emulated_tiles) {
    count += __atomic_load_n(&tiles.thread, __ATOMIC_ACQUIRE) != 0;
  }
  return count;
}
