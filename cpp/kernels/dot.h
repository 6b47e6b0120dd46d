// Dot products of a few rows with panels of 16 outputs, K ascending in one accumulator per output.
//
// A policy names the stored type W, the type X in which a row is staged, and one step over kStep
// values of k. Which policy runs depends on the types and the SKU alone, never on the row count, so
// a row's result has the same bits in every block shape.
#pragma once
#include "vec.h"
#include "work.h"

namespace pelton {

// acc[m][p] += one step: kStep products per output.
//
// W bf16 in pairs [k/2][16][2], on the bf16 dot product. The instruction rounds as it does; a
// staged row is bf16.
#if defined(__AVX512BF16__)
struct DotBf16 {
  using W = bf16;
  using X = bf16;
  static constexpr int kStep = 2;
  template <int M, int P>
  static PELTON_INLINE void step(const X* const (&x)[M], int64_t s, const W* const (&w)[P],
                                 int64_t at, F32 (&acc)[M][P]) {
    I32 panel[P];
    for (int p = 0; p < P; ++p) panel[p] = load_int(reinterpret_cast<const int32_t*>(w[p] + at));
    times(x, s, panel, acc);
  }
  // The same with the panels' pairs in registers.
  template <int M, int P>
  static PELTON_INLINE void times(const X* const (&x)[M], int64_t s, const I32 (&panel)[P],
                                  F32 (&acc)[M][P]) {
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      __builtin_memcpy(&pair, x[m] + 2 * s, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < P; ++p) {
        acc[m][p].v = _mm512_dpbf16_ps(acc[m][p].v, both, (__m512bh)panel[p].v);
      }
    }
  }
  // Store 32 values as a staged row has them (the dot product takes subnormals for zero anyway, so
  // it does not matter that this rounding does), and return acc + their sum, lane by lane.
  static PELTON_INLINE F32 keep_sum(X* to, F32 a, F32 b, F32 acc) {
    const __m512bh both = _mm512_cvtne2ps_pbh(b.v, a.v);
    _mm512_storeu_si512(to, (__m512i)both);
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    return {_mm512_dpbf16_ps(acc.v, both, ones)};
  }
};
#endif

// W 16-bit in pairs, widened: the even k first, then the odd one. A staged row is fp32.
template <class Stored>
struct DotPair {
  using W = Stored;
  using X = float;
  static constexpr int kStep = 2;
  static PELTON_INLINE void widen_pair(const W* w, F32* even, F32* odd) {
    if constexpr (__is_same(W, bf16)) {
      widen_pair(load_int(reinterpret_cast<const int32_t*>(w)), even, odd);
    } else {
      load_half_pairs(&w->bits, even, odd);
    }
  }
  static PELTON_INLINE void widen_pair(I32 pairs, F32* even, F32* odd) {  // of bf16
    *even = from_bits(shift_left<16>(pairs));
    *odd = from_bits(pairs & splat_int(static_cast<int32_t>(0xffff0000u)));
  }
  template <int M, int P>
  static PELTON_INLINE void step(const X* const (&x)[M], int64_t s, const W* const (&w)[P],
                                 int64_t at, F32 (&acc)[M][P]) {
    for (int p = 0; p < P; ++p) {
      F32 even, odd;
      widen_pair(w[p] + at, &even, &odd);
      add(x, s, even, odd, p, acc);
    }
  }
  // The same with the panels' pairs, bf16, in registers.
  template <int M, int P>
  static PELTON_INLINE void times(const X* const (&x)[M], int64_t s, const I32 (&panel)[P],
                                  F32 (&acc)[M][P]) {
    for (int p = 0; p < P; ++p) {
      F32 even, odd;
      widen_pair(panel[p], &even, &odd);
      add(x, s, even, odd, p, acc);
    }
  }

 private:
  template <int M, int P>
  static PELTON_INLINE void add(const X* const (&x)[M], int64_t s, F32 even, F32 odd, int p,
                                F32 (&acc)[M][P]) {
    for (int m = 0; m < M; ++m) acc[m][p] = fma(splat(x[m][2 * s]), even, acc[m][p]);
    for (int m = 0; m < M; ++m) acc[m][p] = fma(splat(x[m][2 * s + 1]), odd, acc[m][p]);
  }
};

// W one k at a time [k][16], widened to fp32.
template <class Stored>
struct DotSingle {
  using W = Stored;
  using X = float;
  static constexpr int kStep = 1;
  template <int M, int P>
  static PELTON_INLINE void step(const X* const (&x)[M], int64_t s, const W* const (&w)[P],
                                 int64_t at, F32 (&acc)[M][P]) {
    F32 panel[P];
    for (int p = 0; p < P; ++p) panel[p] = load(w[p] + at);
    for (int m = 0; m < M; ++m) {
      const F32 value = splat(x[m][s]);
      for (int p = 0; p < P; ++p) acc[m][p] = fma(value, panel[p], acc[m][p]);
    }
  }
};

// The policy for a stored type, its pairing, and the type operands are rounded to.
template <class Stored, bool PAIRED, class Compute>
struct DotFor {
  using Type = typename Choose<DotPair<Stored>, DotSingle<Stored>, PAIRED>::Type;
};
#if defined(__AVX512BF16__)
template <>
struct DotFor<bf16, true, bf16> {
  using Type = DotBf16;
};
#endif

// acc[m][p] += row m . panel p over `steps` steps, ADVANCE stored elements apart in the panel.
// Meanwhile the lines of A other panels, at `ahead`, are brought into the second-level cache: a
// core has more reads under way there than into the first. Addresses past the end of anything do
// no harm.
template <class Dot, int64_t ADVANCE, int M, int P, int A>
PELTON_INLINE void dot_block(const typename Dot::X* const (&x)[M],
                             const typename Dot::W* const (&w)[P], int64_t steps, F32 (&acc)[M][P],
                             const char* const (&ahead)[A]) {
  constexpr int64_t kBytes = ADVANCE * sizeof(typename Dot::W);
#pragma GCC unroll 4
  for (int64_t s = 0; s < steps; ++s) {
    for (int a = 0; a < A; ++a) __builtin_prefetch(ahead[a] + s * kBytes, 0, 2);
    Dot::template step<M, P>(x, s, w, s * ADVANCE, acc);
  }
}
template <class Dot, int64_t ADVANCE, int M, int P>
PELTON_INLINE void dot_block(const typename Dot::X* const (&x)[M],
                             const typename Dot::W* const (&w)[P], int64_t steps,
                             F32 (&acc)[M][P]) {
#pragma GCC unroll 4
  for (int64_t s = 0; s < steps; ++s) Dot::template step<M, P>(x, s, w, s * ADVANCE, acc);
}

template <int M, int P>
PELTON_INLINE void clear(F32 (&acc)[M][P]) {
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) acc[m][p] = zero();
  }
}

}  // namespace pelton
