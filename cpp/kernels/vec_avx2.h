// The 16-lane vectors as two AVX2 registers. Included by vec.h only.
#pragma once

namespace pelton {

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};
struct Mask {
  __m256 lo, hi;  // all ones or all zeros per lane
};
struct F64 {
  __m256d q0, q1, q2, q3;
};

PELTON_INLINE F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PELTON_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PELTON_INLINE void store(float* p, F32 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
// A whole cache line, past the caches. Other threads see it after store_fence() and a barrier.
PELTON_INLINE void store_past(float* p, F32 a) {
  _mm256_stream_ps(p, a.lo);
  _mm256_stream_ps(p + 8, a.hi);
}
PELTON_INLINE F32 operator+(F32 a, F32 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
PELTON_INLINE F32 operator-(F32 a, F32 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
PELTON_INLINE F32 operator*(F32 a, F32 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
PELTON_INLINE F32 operator/(F32 a, F32 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// a * b + c and c - a * b, rounded once.
PELTON_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PELTON_INLINE F32 fnma(F32 a, F32 b, F32 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
// min and max return b when either operand is NaN.
PELTON_INLINE F32 min(F32 a, F32 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
PELTON_INLINE F32 max(F32 a, F32 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
PELTON_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
PELTON_INLINE F32 round_even(F32 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
PELTON_INLINE F32 floor(F32 a) { return {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}; }

#define PELTON_COMPARE(symbol, predicate)                                                \
  PELTON_INLINE Mask operator symbol(F32 a, F32 b) {                                     \
    return {_mm256_cmp_ps(a.lo, b.lo, predicate), _mm256_cmp_ps(a.hi, b.hi, predicate)}; \
  }
PELTON_COMPARE(<, _CMP_LT_OQ)
PELTON_COMPARE(<=, _CMP_LE_OQ)
PELTON_COMPARE(>, _CMP_GT_OQ)
PELTON_COMPARE(>=, _CMP_GE_OQ)
PELTON_COMPARE(==, _CMP_EQ_OQ)
PELTON_COMPARE(!=, _CMP_NEQ_UQ)
#undef PELTON_COMPARE
PELTON_INLINE Mask operator&(Mask a, Mask b) {
  return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)};
}
PELTON_INLINE Mask operator|(Mask a, Mask b) {
  return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)};
}
PELTON_INLINE Mask operator~(Mask a) {
  const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return {_mm256_xor_ps(a.lo, ones), _mm256_xor_ps(a.hi, ones)};
}
PELTON_INLINE uint32_t mask_bits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.lo)) |
         (static_cast<uint32_t>(_mm256_movemask_ps(m.hi)) << 8);
}
PELTON_INLINE Mask first_n(int n) {
  const __m256i count = _mm256_set1_epi32(n);
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high))};
}
// m ? a : b, lane by lane.
PELTON_INLINE F32 select(Mask m, F32 a, F32 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
PELTON_INLINE F32 load_masked(const float* p, Mask m) {
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
          _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
PELTON_INLINE void store_masked(float* p, F32 a, Mask m) {
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}

PELTON_INLINE I32 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PELTON_INLINE I32 load_int(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
PELTON_INLINE void stay_in_order(I32& a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }
PELTON_INLINE void store_int(int32_t* p, I32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
PELTON_INLINE I32 operator+(I32 a, I32 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
PELTON_INLINE I32 operator-(I32 a, I32 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
PELTON_INLINE I32 operator*(I32 a, I32 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
PELTON_INLINE I32 operator&(I32 a, I32 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
PELTON_INLINE I32 operator|(I32 a, I32 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
PELTON_INLINE I32 operator^(I32 a, I32 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int N>
PELTON_INLINE I32 shift_left(I32 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
PELTON_INLINE I32 shift_right(I32 a) {  // logical
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
PELTON_INLINE I32 shift_right_signed(I32 a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
PELTON_INLINE Mask operator>(I32 a, I32 b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.lo, b.lo)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.hi, b.hi))};
}
PELTON_INLINE Mask operator<(I32 a, I32 b) { return b > a; }
PELTON_INLINE Mask operator==(I32 a, I32 b) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}

// The 64 bytes of a vector. Lookups and interleaving stay within 16 bytes each: a table has 16
// entries and is there four times (index: 0..15); the low or high 8 of 16 bytes of a and b take
// turns.
PELTON_INLINE I32 repeat_16_bytes(const void* p) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return {all, all};
}
PELTON_INLINE I32 lookup_bytes(I32 table, I32 index) {
  return {_mm256_shuffle_epi8(table.lo, index.lo), _mm256_shuffle_epi8(table.hi, index.hi)};
}
PELTON_INLINE I32 interleave_low(I32 a, I32 b) {
  return {_mm256_unpacklo_epi8(a.lo, b.lo), _mm256_unpacklo_epi8(a.hi, b.hi)};
}
PELTON_INLINE I32 interleave_high(I32 a, I32 b) {
  return {_mm256_unpackhi_epi8(a.lo, b.lo), _mm256_unpackhi_epi8(a.hi, b.hi)};
}
PELTON_INLINE I32 set_byte(I32 a, int at, uint8_t value) {  // none if `at` is not 0..63
  alignas(32) uint8_t bytes[64];
  __builtin_memcpy(bytes, &a, sizeof bytes);
  if (at >= 0 && at < 64) bytes[at] = value;
  __builtin_memcpy(&a, bytes, sizeof bytes);
  return a;
}

PELTON_INLINE I32 bits(F32 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
PELTON_INLINE F32 from_bits(I32 a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
PELTON_INLINE I32 select(Mask m, I32 a, I32 b) {
  return bits(select(m, from_bits(a), from_bits(b)));
}
PELTON_INLINE I32 to_int(F32 a) {
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}  // nearest even
PELTON_INLINE I32 truncate_int(F32 a) {
  return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)};
}  // towards zero
PELTON_INLINE F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PELTON_INLINE float first_lane(F32 a) { return _mm256_cvtss_f32(a.lo); }

PELTON_INLINE I32 load_u16(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
PELTON_INLINE void store_u16(uint16_t* p, I32 a) {  // the low halves
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed =
      _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
PELTON_INLINE F32 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
PELTON_INLINE void store_half(uint16_t* p, F32 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, kMode));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, kMode));
}

// 16 pairs of f16, interleaved: lane i of even and odd gets elements 2i and 2i + 1.
PELTON_INLINE void load_half_pairs(const uint16_t* p, F32* even, F32* odd) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i a =
      _mm256_permute4x64_epi64(_mm256_shuffle_epi8(_mm256_loadu_si256(q), order), 0xd8);
  const __m256i b =
      _mm256_permute4x64_epi64(_mm256_shuffle_epi8(_mm256_loadu_si256(q + 1), order), 0xd8);
  *even = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_castsi256_si128(b))};
  *odd = {_mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1))};
}
PELTON_INLINE F32 round_f16(F32 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.lo, kMode)),
          _mm256_cvtph_ps(_mm256_cvtps_ph(a.hi, kMode))};
}

PELTON_INLINE __m256 low_half(F32 a) { return a.lo; }
PELTON_INLINE __m256 high_half(F32 a) { return a.hi; }

PELTON_INLINE F64 splat64(double x) {
  const __m256d v = _mm256_set1_pd(x);
  return {v, v, v, v};
}
PELTON_INLINE void store(double* p, F64 a) {
  _mm256_storeu_pd(p, a.q0);
  _mm256_storeu_pd(p + 4, a.q1);
  _mm256_storeu_pd(p + 8, a.q2);
  _mm256_storeu_pd(p + 12, a.q3);
}
PELTON_INLINE F64 widen(F32 a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.lo)),
          _mm256_cvtps_pd(_mm256_extractf128_ps(a.lo, 1)),
          _mm256_cvtps_pd(_mm256_castps256_ps128(a.hi)),
          _mm256_cvtps_pd(_mm256_extractf128_ps(a.hi, 1))};
}
PELTON_INLINE F32 narrow(F64 a) {
  return {_mm256_set_m128(_mm256_cvtpd_ps(a.q1), _mm256_cvtpd_ps(a.q0)),
          _mm256_set_m128(_mm256_cvtpd_ps(a.q3), _mm256_cvtpd_ps(a.q2))};
}
PELTON_INLINE F64 operator+(F64 a, F64 b) {
  return {_mm256_add_pd(a.q0, b.q0), _mm256_add_pd(a.q1, b.q1), _mm256_add_pd(a.q2, b.q2),
          _mm256_add_pd(a.q3, b.q3)};
}
PELTON_INLINE F64 operator-(F64 a, F64 b) {
  return {_mm256_sub_pd(a.q0, b.q0), _mm256_sub_pd(a.q1, b.q1), _mm256_sub_pd(a.q2, b.q2),
          _mm256_sub_pd(a.q3, b.q3)};
}
PELTON_INLINE F64 operator*(F64 a, F64 b) {
  return {_mm256_mul_pd(a.q0, b.q0), _mm256_mul_pd(a.q1, b.q1), _mm256_mul_pd(a.q2, b.q2),
          _mm256_mul_pd(a.q3, b.q3)};
}
PELTON_INLINE F64 fma(F64 a, F64 b, F64 c) {
  return {_mm256_fmadd_pd(a.q0, b.q0, c.q0), _mm256_fmadd_pd(a.q1, b.q1, c.q1),
          _mm256_fmadd_pd(a.q2, b.q2, c.q2), _mm256_fmadd_pd(a.q3, b.q3, c.q3)};
}
PELTON_INLINE F64 round_even(F64 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_pd(a.q0, kMode), _mm256_round_pd(a.q1, kMode), _mm256_round_pd(a.q2, kMode),
          _mm256_round_pd(a.q3, kMode)};
}
// Nearest integers of doubles within the int32 range.
PELTON_INLINE I32 to_int(F64 a) {
  return {_mm256_set_m128i(_mm256_cvtpd_epi32(a.q1), _mm256_cvtpd_epi32(a.q0)),
          _mm256_set_m128i(_mm256_cvtpd_epi32(a.q3), _mm256_cvtpd_epi32(a.q2))};
}

}  // namespace pelton
