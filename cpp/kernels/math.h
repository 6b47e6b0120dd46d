// Elementary functions on 16 lanes, without a math library.
//
// A function's bits depend on the value alone: not on the lane, the SKU, or whether it came from a
// whole vector or a tail (scalars go through a vector). Multiply-adds are explicit, so the compiler
// has nothing to contract. Coefficients are minimax fits made for pelton. Accuracy against the
// exact value, over all finite inputs unless a range is given:
//
//   exp      1 ulp (subnormal results too), 0 below -103.98, inf above 88.72
//   exp2_below  2.1 ulp for x in [-126, 0], 2^-126 below
//   log      1 ulp; log(0) = -inf, NaN below
//   tanh     2 ulp
//   erf      3 ulp
//   sigmoid  3 ulp
//   sin, cos 2 ulp for |x| <= 2^30 (argument reduction in fp64), NaN beyond
//   silu     4 ulp above -87 (below, the true value is under 2e-36)
//   gelu_*   absolute error at most 2^-22 max(1, |x|)
//   rsqrt    correctly rounded square root, then correctly rounded division
//
// NaN gives NaN everywhere.
#pragma once
#include "vec.h"

namespace pelton {

// c0 + c1 x + c2 x^2 + ..., Horner's rule with fused multiply-adds.
PELTON_INLINE F32 polynomial(F32, float c0) { return splat(c0); }
template <class... C>
PELTON_INLINE F32 polynomial(F32 x, float c0, C... rest) {
  return fma(polynomial(x, rest...), x, splat(c0));
}

// 2^n for integers n in [-126, 127].
PELTON_INLINE F32 exp2_int(I32 n) { return from_bits(shift_left<23>(n + splat_int(127))); }

// p * 2^n for integers n, as floats, from -252 to 254. The result is rounded once, also if it is
// subnormal: without an instruction for it, 2^n is taken in two factors that are normal numbers.
PELTON_INLINE F32 times_exp2(F32 p, F32 n) {
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.v, n.v)};
#else
  const I32 k = to_int(n);
  const I32 half = shift_right_signed<1>(k);
  return (p * exp2_int(half)) * exp2_int(k - half);
#endif
}

PELTON_INLINE F32 exp(F32 x) {
  x = max(splat(-110.0f), min(splat(110.0f), x));  // this operand order keeps NaN
  const F32 n = round_even(x * splat(1.44269504f));
  F32 r = fnma(n, splat(0.693145752f), x);  // ln 2 in two parts, the first of 17 bits
  r = fnma(n, splat(1.42860677e-6f), r);
  const F32 q = polynomial(r, 0.49999994f, 0.1666652f, 0.041668393f, 0.008368781f, 0.0013814467f);
  return times_exp2(fma(r * r, q, r) + splat(1.0f), n);
}

// 2^x for x that are not positive (or by rounding errors only).
PELTON_INLINE F32 exp2_below(F32 x) {
  x = max(splat(-126.0f), x);  // this operand order keeps NaN
  const F32 n = round_even(x);
  const F32 p = polynomial(x - n, 1.0f, 0.693147004f, 0.240222424f, 0.0555073358f, 0.00967151299f,
                           0.00132647273f);
  return times_exp2(p, n);
}

PELTON_INLINE F32 log(F32 x) {
  constexpr float kInf = __builtin_huge_valf();
  const Mask tiny = x < splat(1.17549435e-38f);
  const F32 scaled = select(tiny, x * splat(8388608.0f), x);
  // scaled = m * 2^e with m in [sqrt(1/2), sqrt(2))
  const I32 shifted = bits(scaled) - splat_int(0x3f3504f3);
  const I32 e = shift_right_signed<23>(shifted);
  const F32 m = from_bits(bits(scaled) - shift_left<23>(e));
  const F32 exponent = to_f32(e) - select(tiny, splat(23.0f), zero());
  // log m = log((1 + s) / (1 - s)) = f - f^2/2 + s (f^2/2 + R(s^2)), where f = m - 1, s = f / (2 +
  // f)
  const F32 f = m - splat(1.0f);
  const F32 s = f / (splat(2.0f) + f);
  const F32 z = s * s;
  const F32 series = z * polynomial(z, 2.0f / 3, 2.0f / 5, 2.0f / 7, 2.0f / 9, 2.0f / 11);
  const F32 half = splat(0.5f) * f * f;
  const F32 low = fma(exponent, splat(1.42860677e-6f), s * (half + series));
  F32 y = fma(exponent, splat(0.693145752f), f - (half - low));
  y = select(x == splat(kInf), x, y);
  y = select(x == zero(), splat(-kInf), y);
  return select((x < zero()) | is_nan(x), splat(__builtin_nanf("")), y);
}

PELTON_INLINE F32 sigmoid(F32 x) {
  const F32 e = exp(-abs(x));
  const F32 denominator = splat(1.0f) + e;
  return select(x < zero(), e, splat(1.0f)) / denominator;
}

// a with the sign of b (a >= 0).
PELTON_INLINE F32 with_sign(F32 a, F32 b) {
  return from_bits(bits(a) | (bits(b) & splat_int(INT32_MIN)));
}

PELTON_INLINE F32 tanh(F32 x) {
  const F32 a = abs(x);
  const F32 z = x * x;
  const F32 small = fma(
      a * z, polynomial(z, -0.33333278f, 0.13331331f, -0.05373f, 0.020606177f, -0.005666977f), a);
  const F32 large = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  return with_sign(select(a < splat(0.63f), small, large), x);
}

PELTON_INLINE F32 erf(F32 x) {
  const F32 a = abs(x);
  const F32 z = x * x;
  const F32 small = fma(a,
                        polynomial(z, 0.12837917f, -0.37612632f, 0.11283676f, -0.026858317f,
                                   0.0051984116f, -0.00081135891f, 8.2494182e-5f),
                        a);
  // log(erfc) is smooth; from 3.95 on erfc is under half an ulp of 1
  const F32 d = min(splat(4.0f), a) - splat(2.4f);
  const F32 tail = exp(polynomial(d, -7.2809753f, -5.1642370f, -0.94050175f, -0.011761980f,
                                  0.0023992746f, -0.00046458235f, 8.1022983e-5f, -2.0909469e-5f));
  return with_sign(select(a < splat(0.92f), small, splat(1.0f) - tail), x);
}

// Both at once: they share the argument reduction.
PELTON_INLINE void sin_cos(F32 x, F32* sine, F32* cosine) {
  x = select(abs(x) <= splat(1073741824.0f), x, splat(__builtin_nanf("")));
  const F64 wide = widen(x);
  const F64 n = round_even(wide * splat64(0.6366197723675814));
  F64 r = fma(n, splat64(-1.5707963267948966), wide);
  r = fma(n, splat64(-6.123233995736766e-17), r);
  const F32 t = narrow(r);
  const F32 z = t * t;
  const F32 s =
      fma(t * z, polynomial(z, -0.16666667f, 0.0083333291f, -0.00019839304f, 2.7180465e-6f), t);
  const F32 c =
      fma(z * z, polynomial(z, 0.041666668f, -0.0013888883f, 2.4799452e-5f, -2.7205047e-7f),
          fma(z, splat(-0.5f), splat(1.0f)));
  const I32 quadrant = to_int(n);
  const Mask swap = (quadrant & splat_int(1)) == splat_int(1);
  const I32 sine_sign = shift_left<31>(shift_right<1>(quadrant));
  const I32 cosine_sign = shift_left<31>(shift_right<1>(quadrant + splat_int(1)));
  *sine = from_bits(bits(select(swap, c, s)) ^ sine_sign);
  *cosine = from_bits(bits(select(swap, s, c)) ^ cosine_sign);
}
PELTON_INLINE F32 sin(F32 x) {
  F32 s, c;
  sin_cos(x, &s, &c);
  return s;
}
PELTON_INLINE F32 cos(F32 x) {
  F32 s, c;
  sin_cos(x, &s, &c);
  return c;
}

PELTON_INLINE F32 rsqrt(F32 x) { return splat(1.0f) / sqrt(x); }
PELTON_INLINE F32 relu(F32 x) { return select(x < zero(), zero(), x); }
PELTON_INLINE F32 silu(F32 x) { return x / (splat(1.0f) + exp(-x)); }
PELTON_INLINE F32 gelu_erf(F32 x) {
  return (splat(0.5f) * x) * (splat(1.0f) + erf(x * splat(0.70710678f)));
}
PELTON_INLINE F32 gelu_tanh(F32 x) {
  const F32 inner = splat(0.79788456f) * fma(splat(0.044715f) * x, x * x, x);
  return (splat(0.5f) * x) * (splat(1.0f) + tanh(inner));
}

// Scalars, with the same bits as a lane of a vector.
#define PELTON_SCALAR(function) \
  PELTON_INLINE float function(float x) { return first_lane(function(splat(x))); }
PELTON_SCALAR(exp)
PELTON_SCALAR(exp2_below)
PELTON_SCALAR(log)
PELTON_SCALAR(sigmoid)
PELTON_SCALAR(tanh)
PELTON_SCALAR(erf)
PELTON_SCALAR(sin)
PELTON_SCALAR(cos)
PELTON_SCALAR(sqrt)
PELTON_SCALAR(rsqrt)
PELTON_SCALAR(silu)
PELTON_SCALAR(gelu_erf)
PELTON_SCALAR(gelu_tanh)
#undef PELTON_SCALAR

}  // namespace pelton
