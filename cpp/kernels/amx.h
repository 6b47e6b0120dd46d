// The tile instructions (AMX) that kernels use: eight registers of up to 16 rows x 64 bytes.
//
// A thread must hold a configuration while it uses tiles and release it afterwards: the operating
// system saves 8 KiB more at every switch of a thread whose tiles are live.
#pragma once
#include "vec.h"

namespace pelton {

inline constexpr int kTileRegisters = 8;
inline constexpr int kTileHeight = 16;     // rows at most
inline constexpr int kTileRowBytes = 64;   // bytes of a row at most
inline constexpr int kTileBf16Depth = 32;  // values of k in one dot product of full tiles

// What LDTILECFG reads: palette 1, and rows and bytes of a row by register (both 0: unused).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  PELTON_INLINE void shape(int tile, int64_t height) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = height == 0 ? 0 : kTileRowBytes;
  }
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace pelton

#if defined(PELTON_EMULATED_AMX)  // only tests compile so
#include "amx_emulated.h"
#else

namespace pelton {

// Not the compiler's intrinsics: g++ 12's take the register as a literal token, and its tile load
// does not say that it reads memory, so that stores before it may be dropped.
PELTON_INLINE void tile_config(const TileConfig* config) {
  asm volatile("ldtilecfg %0" ::"m"(*config));
}
PELTON_INLINE void tile_release() { asm volatile("tilerelease"); }
template <int TILE>
PELTON_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
// Rows `stride` bytes apart.
template <int TILE>
PELTON_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}
// The same of rows that are not to stay in the first-level cache (a hint).
template <int TILE>
PELTON_INLINE void tile_load_past(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}
template <int TILE>
PELTON_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(stride) : "memory");
}
// sums[m][n] (fp32) += a[m][k] . b[k][n] over pairs of bf16.
template <int SUMS, int A, int B>
PELTON_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

}  // namespace pelton

#endif

namespace pelton {

// A thread's tile registers, live from the first shape() to release().
class LiveTiles {
 public:
  LiveTiles() = default;
  LiveTiles(const LiveTiles&) = delete;
  PELTON_INLINE ~LiveTiles() { release(); }

  // Shapes the registers for `rows` rows, as fill(config) says, if they are not.
  template <class F>
  PELTON_INLINE void shape(int64_t rows, const F& fill) {
    if (rows == rows_) return;
    TileConfig config;
    fill(config);
    tile_config(&config);
    rows_ = rows;
  }
  PELTON_INLINE void release() {
    if (rows_ != 0) tile_release();
    rows_ = 0;
  }

 private:
  int64_t rows_ = 0;  // 0: there is no configuration
};

}  // namespace pelton
