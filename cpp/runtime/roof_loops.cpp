#include "roof_loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include "error.h"
#include "tiles.h"
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pelton {
namespace {

// Independent accumulators hide the latency of an instruction: up to 5 cycles x 2 a cycle.
constexpr int kChains = 12;
// Bytes that a prefetch runs ahead, into the second-level cache: a core has more reads under way
// there than into the first.
constexpr size_t kAhead = 4096;

// The compiler may not know what is in a register: neither drop what nobody reads, nor notice
// that the chains of a loop are all alike.
#if defined(__x86_64__)
#define KEEP(value) asm volatile("" : "+v"(value))
#else
#define KEEP(value) asm volatile("" : "+w"(value))
#endif

// One instruction on two constants, into kChains accumulators ``sum``. A macro, because a lambda
// would not have the target's instructions.
#define PEAK_LOOP(name, target, Sum, Operand, first, second, instruction) \
  target void name(int64_t iterations) {                                  \
    Sum sums[kChains] = {};                                               \
    for (Sum& sum : sums) KEEP(sum);                                      \
    Operand a = first, b = second;                                        \
    KEEP(a);                                                              \
    KEEP(b);                                                              \
    for (int64_t i = 0; i < iterations; ++i) {                            \
      for (Sum& sum : sums) sum = instruction;                            \
    }                                                                     \
    for (Sum& sum : sums) KEEP(sum);                                      \
  }

[[maybe_unused]] void read_words(const void* data, size_t nbytes) {
  const auto* p = static_cast<const uint64_t*>(data);
  uint64_t sums[16] = {};
  for (size_t i = 0; i < nbytes / 8; i += 16) {
    for (size_t j = 0; j < 16; ++j) sums[j] += p[i + j];
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all += sum;
  asm volatile("" : "+r"(all));
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))
#define AVX512_VNNI __attribute__((target("avx512f,avx512vnni")))

AVX2 void read_avx2(const void* data, size_t nbytes) {
  const auto* p = static_cast<const char*>(data);
  __m256i sums[8] = {};
  for (size_t i = 0; i < nbytes; i += 256) {
    for (size_t j = 0; j < 8; ++j) {
      if (j % 2 == 0) _mm_prefetch(p + i + j * 32 + kAhead, _MM_HINT_T1);
      const auto* at = reinterpret_cast<const __m256i*>(p + i + j * 32);
      sums[j] = _mm256_add_epi64(sums[j], _mm256_load_si256(at));
    }
  }
  for (__m256i& sum : sums) KEEP(sum);
}

AVX512 void read_avx512(const void* data, size_t nbytes) {
  const auto* p = static_cast<const char*>(data);
  __m512i sums[8] = {};
  for (size_t i = 0; i < nbytes; i += 512) {
    for (size_t j = 0; j < 8; ++j) {
      _mm_prefetch(p + i + j * 64 + kAhead, _MM_HINT_T1);
      sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(p + i + j * 64));
    }
  }
  for (__m512i& sum : sums) KEEP(sum);
}

PEAK_LOOP(fma_avx2, AVX2, __m256, __m256, _mm256_set1_ps(1.5f), _mm256_set1_ps(0.5f),
          _mm256_fmadd_ps(a, b, sum))
PEAK_LOOP(fma_avx512, AVX512, __m512, __m512, _mm512_set1_ps(1.5f), _mm512_set1_ps(0.5f),
          _mm512_fmadd_ps(a, b, sum))
PEAK_LOOP(dot_bf16, AVX512_BF16, __m512, __m512i, _mm512_set1_epi32(0x3FC03FC0),  // 1.5
          _mm512_set1_epi32(0x3F003F00),                                          // 0.5
          _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)))
PEAK_LOOP(dot_int8, AVX512_VNNI, __m512i, __m512i, _mm512_set1_epi8(3), _mm512_set1_epi8(-5),
          _mm512_dpbusd_epi32(sum, a, b))

// What LDTILECFG reads: palette 1, and by register 16 rows of 64 bytes for all eight.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kTileConfig;

// An iteration is four dot products of full tiles, each into sums of its own: the unit begins one
// every 16 cycles, and four of them are longer than its latency. Of zeros, which take as long as
// other values. In assembly, which the compiler leaves in this order and around which it uses no
// tiles. Released at the end: the operating system saves live tiles at every switch of the thread.
constexpr int64_t kTileDots = 4;
#define TILE_LOOP(name, instruction)                    \
  void name(int64_t iterations) {                       \
    asm volatile("ldtilecfg %0" ::"m"(kTileConfig));    \
    asm volatile("tilezero %tmm0");                     \
    asm volatile("tilezero %tmm1");                     \
    asm volatile("tilezero %tmm2");                     \
    asm volatile("tilezero %tmm3");                     \
    asm volatile("tilezero %tmm4");                     \
    asm volatile("tilezero %tmm5");                     \
    asm volatile("tilezero %tmm6");                     \
    asm volatile("tilezero %tmm7");                     \
    for (int64_t i = 0; i < iterations; ++i) {          \
      asm volatile(instruction " %tmm6, %tmm4, %tmm0"); \
      asm volatile(instruction " %tmm7, %tmm4, %tmm1"); \
      asm volatile(instruction " %tmm6, %tmm5, %tmm2"); \
      asm volatile(instruction " %tmm7, %tmm5, %tmm3"); \
    }                                                   \
    asm volatile("tilerelease");                        \
  }
TILE_LOOP(tiles_bf16, "tdpbf16ps")
TILE_LOOP(tiles_int8, "tdpbssd")

// Operations of one iteration: 16 x 16 sums over k, each a multiplication and an addition.
constexpr int64_t tile_operations(int64_t k) { return kTileDots * 16 * 16 * k * 2; }
constexpr int64_t kTileIterations = 1 << 17;  // of 64 cycles each, those of vectors take 6 to 12

// By CPUID, because clang 16's __builtin_cpu_supports knows no tiles.
constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
bool has_tiles(unsigned products) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const unsigned wanted = kAmxTile | products;
  return (d & wanted) == wanted;
}

// Asked once, so that the instruction named and the one measured are the same.
bool tiles_granted() {
  static const bool granted = [] {
    try {
      request_tile_permission();
      return true;
    } catch (const Error&) {
      return false;
    }
  }();
  return granted;
}

#elif defined(__aarch64__)

PEAK_LOOP(fma_neon, , float32x4_t, float32x4_t, vdupq_n_f32(1.5f), vdupq_n_f32(0.5f),
          vfmaq_f32(sum, a, b))

#endif

// Operations of one iteration: lanes of 4 bytes, each ``per_lane`` multiplications and as many
// additions.
[[maybe_unused]] constexpr int64_t operations(int64_t vector_bytes, int64_t per_lane) {
  return kChains * (vector_bytes / 4) * 2 * per_lane;
}

}  // namespace

ReadLoop read_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_words;
}

PeakLoop peak_loop(Peak peak) {
#if defined(__x86_64__)
  if (peak == Peak::kFmaF32 && __builtin_cpu_supports("avx512f")) {
    return {fma_avx512, operations(64, 1), "avx512 vfmadd231ps"};
  }
  if (peak == Peak::kFmaF32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {fma_avx2, operations(32, 1), "avx2 vfmadd231ps"};
  }
  if (peak == Peak::kDotBf16 && has_tiles(kAmxBf16) && tiles_granted()) {
    return {tiles_bf16, tile_operations(32), "amx tdpbf16ps", kTileIterations};
  }
  if (peak == Peak::kDotInt8 && has_tiles(kAmxInt8) && tiles_granted()) {
    return {tiles_int8, tile_operations(64), "amx tdpbssd", kTileIterations};
  }
  if (peak == Peak::kDotBf16 && __builtin_cpu_supports("avx512bf16")) {
    return {dot_bf16, operations(64, 2), "avx512 vdpbf16ps"};
  }
  if (peak == Peak::kDotInt8 && __builtin_cpu_supports("avx512vnni")) {
    return {dot_int8, operations(64, 4), "avx512 vpdpbusd"};
  }
#elif defined(__aarch64__)
  if (peak == Peak::kFmaF32) return {fma_neon, operations(16, 1), "neon fmla"};
#else
  (void)peak;
#endif
  return {};
}

}  // namespace pelton
