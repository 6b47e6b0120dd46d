// The 16-lane vectors as one AVX-512 register. Included by vec.h only.
#pragma once

namespace pelton {

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};
struct F64 {
  __m512d lo, hi;
};

PELTON_INLINE F32 splat(float x) { return {_mm512_set1_ps(x)}; }
PELTON_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PELTON_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
// A whole cache line, past the caches. Other threads see it after store_fence() and a barrier.
PELTON_INLINE void store_past(float* p, F32 a) { _mm512_stream_ps(p, a.v); }
PELTON_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
PELTON_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PELTON_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PELTON_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c and c - a * b, rounded once.
PELTON_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PELTON_INLINE F32 fnma(F32 a, F32 b, F32 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// min and max return b when either operand is NaN.
PELTON_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
PELTON_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
PELTON_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
PELTON_INLINE F32 round_even(F32 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
PELTON_INLINE F32 floor(F32 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}

PELTON_INLINE Mask operator<(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PELTON_INLINE Mask operator<=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
PELTON_INLINE Mask operator>(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
PELTON_INLINE Mask operator>=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
PELTON_INLINE Mask operator==(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
PELTON_INLINE Mask operator!=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
PELTON_INLINE Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.v & b.v)}; }
PELTON_INLINE Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.v | b.v)}; }
PELTON_INLINE Mask operator~(Mask a) { return {static_cast<__mmask16>(~a.v)}; }
PELTON_INLINE uint32_t mask_bits(Mask m) { return m.v; }
PELTON_INLINE Mask first_n(int n) {
  return {static_cast<__mmask16>(n >= kLanes ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u)};
}
// m ? a : b, lane by lane.
PELTON_INLINE F32 select(Mask m, F32 a, F32 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
PELTON_INLINE F32 load_masked(const float* p, Mask m) { return {_mm512_maskz_loadu_ps(m.v, p)}; }
PELTON_INLINE void store_masked(float* p, F32 a, Mask m) { _mm512_mask_storeu_ps(p, m.v, a.v); }

PELTON_INLINE I32 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
PELTON_INLINE I32 load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
// Loads that are followed by this stay in their order.
PELTON_INLINE void stay_in_order(I32& a) { asm volatile("" : "+v"(a.v)); }
PELTON_INLINE void store_int(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
PELTON_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PELTON_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PELTON_INLINE I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
PELTON_INLINE I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
PELTON_INLINE I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
PELTON_INLINE I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
PELTON_INLINE I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
PELTON_INLINE I32 shift_right(I32 a) {  // logical
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
PELTON_INLINE I32 shift_right_signed(I32 a) {
  return {_mm512_srai_epi32(a.v, N)};
}
PELTON_INLINE Mask operator<(I32 a, I32 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
PELTON_INLINE Mask operator>(I32 a, I32 b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
PELTON_INLINE Mask operator==(I32 a, I32 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
PELTON_INLINE I32 select(Mask m, I32 a, I32 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }

// The 64 bytes of a vector. Lookups and interleaving stay within 16 bytes each: a table has 16
// entries and is there four times (index: 0..15); the low or high 8 of 16 bytes of a and b take
// turns.
PELTON_INLINE I32 repeat_16_bytes(const void* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
PELTON_INLINE I32 lookup_bytes(I32 table, I32 index) {
  return {_mm512_shuffle_epi8(table.v, index.v)};
}
PELTON_INLINE I32 interleave_low(I32 a, I32 b) { return {_mm512_unpacklo_epi8(a.v, b.v)}; }
PELTON_INLINE I32 interleave_high(I32 a, I32 b) { return {_mm512_unpackhi_epi8(a.v, b.v)}; }
PELTON_INLINE I32 set_byte(I32 a, int at, uint8_t value) {  // none if `at` is not 0..63
  const __mmask64 one = at >= 0 && at < 64 ? uint64_t{1} << at : 0;
  return {_mm512_mask_set1_epi8(a.v, one, static_cast<char>(value))};
}

PELTON_INLINE I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
PELTON_INLINE F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
PELTON_INLINE I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }         // nearest even
PELTON_INLINE I32 truncate_int(F32 a) { return {_mm512_cvttps_epi32(a.v)}; }  // towards zero
PELTON_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PELTON_INLINE float first_lane(F32 a) { return _mm512_cvtss_f32(a.v); }

PELTON_INLINE I32 load_u16(const uint16_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PELTON_INLINE void store_u16(uint16_t* p, I32 a) {  // the low halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
PELTON_INLINE F32 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PELTON_INLINE void store_half(uint16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 16 pairs of f16, interleaved: lane i of even and odd gets elements 2i and 2i + 1.
PELTON_INLINE void load_half_pairs(const uint16_t* p, F32* even, F32* odd) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                      22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                      13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i split = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), _mm512_loadu_si512(p));
  even->v = _mm512_cvtph_ps(_mm512_castsi512_si256(split));
  odd->v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(split, 1));
}
PELTON_INLINE F32 round_f16(F32 a) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}

PELTON_INLINE __m256 low_half(F32 a) { return _mm512_castps512_ps256(a.v); }
PELTON_INLINE __m256 high_half(F32 a) { return _mm512_extractf32x8_ps(a.v, 1); }

PELTON_INLINE F64 splat64(double x) { return {_mm512_set1_pd(x), _mm512_set1_pd(x)}; }
PELTON_INLINE void store(double* p, F64 a) {
  _mm512_storeu_pd(p, a.lo);
  _mm512_storeu_pd(p + 8, a.hi);
}
PELTON_INLINE F64 widen(F32 a) {
  return {_mm512_cvtps_pd(low_half(a)), _mm512_cvtps_pd(high_half(a))};
}
PELTON_INLINE F32 narrow(F64 a) {
  return {
      _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.lo)), _mm512_cvtpd_ps(a.hi), 1)};
}
PELTON_INLINE F64 operator+(F64 a, F64 b) {
  return {_mm512_add_pd(a.lo, b.lo), _mm512_add_pd(a.hi, b.hi)};
}
PELTON_INLINE F64 operator-(F64 a, F64 b) {
  return {_mm512_sub_pd(a.lo, b.lo), _mm512_sub_pd(a.hi, b.hi)};
}
PELTON_INLINE F64 operator*(F64 a, F64 b) {
  return {_mm512_mul_pd(a.lo, b.lo), _mm512_mul_pd(a.hi, b.hi)};
}
PELTON_INLINE F64 fma(F64 a, F64 b, F64 c) {
  return {_mm512_fmadd_pd(a.lo, b.lo, c.lo), _mm512_fmadd_pd(a.hi, b.hi, c.hi)};
}
PELTON_INLINE F64 round_even(F64 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm512_roundscale_pd(a.lo, kMode), _mm512_roundscale_pd(a.hi, kMode)};
}
// Nearest integers of doubles within the int32 range.
PELTON_INLINE I32 to_int(F64 a) {
  return {_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtpd_epi32(a.lo)),
                             _mm512_cvtpd_epi32(a.hi), 1)};
}

}  // namespace pelton
