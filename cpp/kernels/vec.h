// Vectors of 16 lanes on every x86 SKU: one 512-bit register with AVX-512, two 256-bit registers
// with AVX2.
//
// The lane count never changes, so a kernel's order of operations, tails and horizontal sums are
// the same on every SKU. 16 is also the width of a weight panel. Types: F32, I32, Mask (16 lanes),
// F64 (16 doubles, for argument reduction); bf16 and f16 are storage types that convert on load and
// store (round to nearest even; bf16 by integer arithmetic, so subnormals are kept).
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "inline.h"

namespace pelton {

inline constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

}  // namespace pelton

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#error "pelton kernels need AVX2, FMA and F16C at least"
#endif

namespace pelton {

// --- derived operations, the same for both register widths ---------------------------------------

PELTON_INLINE F32 zero() { return splat(0.0f); }
PELTON_INLINE void store_fence() { _mm_sfence(); }  // what was stored past the caches comes before
PELTON_INLINE F32& operator+=(F32& a, F32 b) { return a = a + b; }
PELTON_INLINE F32& operator*=(F32& a, F32 b) { return a = a * b; }
PELTON_INLINE F32 operator-(F32 a) { return from_bits(bits(a) ^ splat_int(INT32_MIN)); }
PELTON_INLINE F32 abs(F32 a) { return from_bits(bits(a) & splat_int(INT32_MAX)); }
PELTON_INLINE Mask is_nan(F32 a) { return ~(a == a); }

// The bit patterns of 16 floats rounded to bf16, in the low halves of the lanes. NaN stays NaN.
PELTON_INLINE I32 round_bf16_bits(F32 a) {
  const I32 x = bits(a);
  const I32 odd = shift_right<16>(x) & splat_int(1);
  const I32 rounded = shift_right<16>(x + (odd + splat_int(0x7fff)));
  const I32 quiet = shift_right<16>(x) | splat_int(0x40);
  return select(is_nan(a), quiet, rounded);
}

PELTON_INLINE F32 load(const bf16* p) { return from_bits(shift_left<16>(load_u16(&p->bits))); }
PELTON_INLINE F32 load(const f16* p) { return load_half(&p->bits); }
PELTON_INLINE void store(bf16* p, F32 a) { store_u16(&p->bits, round_bf16_bits(a)); }
PELTON_INLINE void store(f16* p, F32 a) { store_half(&p->bits, a); }

// Partial access: the first n lanes (0 <= n <= 16); other lanes load as zero and are not stored.
template <class T>
PELTON_INLINE F32 load_n(const T* p, int n) {
  if (n >= kLanes) return load(p);
  if constexpr (sizeof(T) == 4) {
    return load_masked(p, first_n(n));
  } else {
    T whole[kLanes];
    for (int i = 0; i < kLanes; ++i) whole[i].bits = i < n ? p[i].bits : uint16_t{0};
    return load(whole);
  }
}
template <class T>
PELTON_INLINE void store_n(T* p, F32 a, int n) {
  if (n >= kLanes) return store(p, a);
  if constexpr (sizeof(T) == 4) {
    store_masked(p, a, first_n(n));
  } else {
    T whole[kLanes];
    store(whole, a);
    for (int i = 0; i < n; ++i) p[i] = whole[i];
  }
}

// Round to a storage type and widen again.
template <class T>
PELTON_INLINE F32 round_through(F32 a) {
  if constexpr (__is_same(T, bf16)) {
    return from_bits(shift_left<16>(round_bf16_bits(a)));
  } else if constexpr (__is_same(T, f16)) {
    return round_f16(a);
  } else {
    return a;
  }
}

// Horizontal sum and maximum by halves: lanes i and i+8, then i+4, i+2, i+1. Same order on every
// SKU.
PELTON_INLINE float sum(F32 a) {
  const __m256 h8 = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}
PELTON_INLINE float max_lane(F32 a) {
  const __m256 h8 = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 h4 = _mm_max_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_max_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_max_ss(h2, _mm_movehdup_ps(h2)));
}

// Of a stream that has come to `from`: the line FAR bytes ahead into the second-level cache, the
// one NEAR bytes ahead into the first.
template <int FAR, int NEAR>
PELTON_INLINE void prefetch_far_and_near(const void* from) {
  __builtin_prefetch(static_cast<const char*>(from) + FAR, 0, 2);
  __builtin_prefetch(static_cast<const char*>(from) + NEAR, 0, 3);
}

// --- scalars
// --------------------------------------------------------------------------------------

PELTON_INLINE float to_float(float x) { return x; }
PELTON_INLINE float to_float(bf16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }
PELTON_INLINE float to_float(f16 x) { return _cvtsh_ss(x.bits); }

// round_to<T>(x): x in storage type T, to nearest even.
template <class T>
PELTON_INLINE T round_to(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (__is_same(T, f16)) {
    return f16{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  } else {
    const uint32_t u = __builtin_bit_cast(uint32_t, x);
    if (x != x) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
    return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
}

}  // namespace pelton
