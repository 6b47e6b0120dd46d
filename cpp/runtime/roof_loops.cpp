#include "roof_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pelton {
namespace {

// Independent accumulators hide the latency of an instruction: up to 5 cycles x 2 a cycle.
constexpr int kChains = 12;
constexpr size_t kAhead = 4096;  // bytes that a prefetch runs ahead

// The compiler may not know what is in a register: neither drop what nobody reads, nor notice
// that the chains of a loop are all alike.
#if defined(__x86_64__)
#define KEEP(value) asm volatile("" : "+v"(value))
#else
#define KEEP(value) asm volatile("" : "+w"(value))
#endif

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
      if (j % 2 == 0) _mm_prefetch(p + i + j * 32 + kAhead, _MM_HINT_T0);
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
      _mm_prefetch(p + i + j * 64 + kAhead, _MM_HINT_T0);
      sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(p + i + j * 64));
    }
  }
  for (__m512i& sum : sums) KEEP(sum);
}

AVX2 void fma_avx2(int64_t iterations) {
  __m256 sums[kChains] = {};
  for (__m256& sum : sums) KEEP(sum);
  __m256 a = _mm256_set1_ps(1.5f), b = _mm256_set1_ps(0.5f);
  KEEP(a);
  KEEP(b);
  for (int64_t i = 0; i < iterations; ++i) {
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(a, b, sum);
  }
  for (__m256& sum : sums) KEEP(sum);
}

AVX512 void fma_avx512(int64_t iterations) {
  __m512 sums[kChains] = {};
  for (__m512& sum : sums) KEEP(sum);
  __m512 a = _mm512_set1_ps(1.5f), b = _mm512_set1_ps(0.5f);
  KEEP(a);
  KEEP(b);
  for (int64_t i = 0; i < iterations; ++i) {
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(a, b, sum);
  }
  for (__m512& sum : sums) KEEP(sum);
}

AVX512_BF16 void dot_bf16(int64_t iterations) {
  __m512 sums[kChains] = {};
  for (__m512& sum : sums) KEEP(sum);
  __m512i a = _mm512_set1_epi32(0x3FC03FC0), b = _mm512_set1_epi32(0x3F003F00);  // 1.5, 0.5
  KEEP(a);
  KEEP(b);
  for (int64_t i = 0; i < iterations; ++i) {
    for (__m512& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
  }
  for (__m512& sum : sums) KEEP(sum);
}

AVX512_VNNI void dot_int8(int64_t iterations) {
  __m512i sums[kChains] = {};
  for (__m512i& sum : sums) KEEP(sum);
  __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
  KEEP(a);
  KEEP(b);
  for (int64_t i = 0; i < iterations; ++i) {
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
  }
  for (__m512i& sum : sums) KEEP(sum);
}

#elif defined(__aarch64__)

void fma_neon(int64_t iterations) {
  float32x4_t sums[kChains] = {};
  for (float32x4_t& sum : sums) KEEP(sum);
  float32x4_t a = vdupq_n_f32(1.5f), b = vdupq_n_f32(0.5f);
  KEEP(a);
  KEEP(b);
  for (int64_t i = 0; i < iterations; ++i) {
    for (float32x4_t& sum : sums) sum = vfmaq_f32(sum, a, b);
  }
  for (float32x4_t& sum : sums) KEEP(sum);
}

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
