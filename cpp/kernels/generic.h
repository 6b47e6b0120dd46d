// Loops for ops that have no kernel of their own: any rank, any strides, one element at a time or
// 16 floats at a time. The emitter (plugins/generic) writes the dims and strides, most of them as
// constants; dims that depend on the step (T, C, ...) are run-time values.
//
// An element's bits depend on its inputs alone, so the division among workers does not matter.
#pragma once
#include "math.h"
#include "vec.h"
#include "work.h"

namespace pelton {

// Visits every point of an iteration space in row-major order: body(offset of each operand).
template <int kRank, int kOperands, class Body>
PELTON_INLINE void for_points(const pelton_worker* worker, const int64_t (&dims)[kRank],
                              const int64_t (&strides)[kOperands][kRank], Body body) {
  int64_t total = 1;
  for (int64_t d : dims) total *= d;
  const Range range = share(total, worker);
  if (range.begin >= range.end) return;
  int64_t at[kRank];
  int64_t offset[kOperands] = {};
  int64_t rest = range.begin;
  for (int a = kRank - 1; a >= 0; --a) {
    at[a] = rest % dims[a];
    rest /= dims[a];
    for (int k = 0; k < kOperands; ++k) offset[k] += at[a] * strides[k][a];
  }
  for (int64_t i = range.begin; i < range.end; ++i) {
    body(offset);
    for (int a = kRank - 1; a >= 0; --a) {
      for (int k = 0; k < kOperands; ++k) offset[k] += strides[k][a];
      if (++at[a] < dims[a]) break;
      for (int k = 0; k < kOperands; ++k) offset[k] -= dims[a] * strides[k][a];
      at[a] = 0;
    }
  }
}

// Visits the rows of a space whose last axis is given apart: body(offset of each operand, length).
// Long rows are cut in pieces, so that one row too is work for all.
template <int kRank, int kOperands, class Body>
PELTON_INLINE void for_rows(const pelton_worker* worker, const int64_t (&dims)[kRank],
                            const int64_t (&strides)[kOperands][kRank], int64_t length,
                            const int64_t (&inner)[kOperands], Body body) {
  constexpr int64_t kPiece = 1024;
  int64_t cut_dims[kRank + 1];
  int64_t cut_strides[kOperands + 1][kRank + 1] = {};
  for (int a = 0; a < kRank; ++a) {
    cut_dims[a] = dims[a];
    for (int k = 0; k < kOperands; ++k) cut_strides[k][a] = strides[k][a];
  }
  cut_dims[kRank] = divide_up(length, kPiece);
  for (int k = 0; k < kOperands; ++k) cut_strides[k][kRank] = inner[k] * kPiece;
  cut_strides[kOperands][kRank] = kPiece;  // an operand more: where in its row the piece starts
  for_points(worker, cut_dims, cut_strides, [&](const int64_t* offset) {
    body(offset, smaller<int64_t>(length - offset[kOperands], kPiece));
  });
}

// --- 16 floats with any stride -------------------------------------------------------------------

template <class T>
PELTON_INLINE F32 load_strided(const T* p, int64_t stride, int n) {
  if (stride == 1) return load_n(p, n);
  if (stride == 0) return splat(to_float(*p));
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = i < n ? to_float(p[i * stride]) : 0.0f;
  return load(lane);
}
template <class T>
PELTON_INLINE void store_strided(T* p, F32 a, int64_t stride, int n) {
  if (stride == 1) return store_n(p, a, n);
  float lane[kLanes];
  store(lane, a);
  for (int i = 0; i < n; ++i) p[i * stride] = round_to<T>(lane[i]);
}
PELTON_INLINE int lanes_left(int64_t n, int64_t i) {
  return static_cast<int>(smaller<int64_t>(n - i, kLanes));
}

// --- elementwise functions beyond math.h ---------------------------------------------------------

PELTON_INLINE F32 reciprocal(F32 x) { return splat(1.0f) / x; }
PELTON_INLINE F32 square(F32 x) { return x * x; }
PELTON_INLINE F32 is_zero(F32 x) { return select(x == zero(), splat(1.0f), zero()); }
PELTON_INLINE F32 maximum(F32 a, F32 b) { return select((a > b) | is_nan(a), a, b); }
PELTON_INLINE F32 minimum(F32 a, F32 b) { return select((a < b) | is_nan(a), a, b); }

// log2 of a positive finite double, relative error about 2^-50.
inline double log2_positive(double x) {
  uint64_t u = __builtin_bit_cast(uint64_t, x);
  int64_t e = static_cast<int64_t>(u >> 52) - 1023;
  double m = __builtin_bit_cast(double, (u & 0xfffffffffffffu) | 0x3ff0000000000000u);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  const double s = (m - 1) / (m + 1);
  const double z = s * s;
  double series = 0;
  for (int k = 21; k >= 3; k -= 2) series = (series + 1.0 / k) * z;
  return static_cast<double>(e) + 2 * (s + s * series) * 1.4426950408889634;
}

// 2^x for |x| < 200, relative error about 2^-50.
inline double exp2_small(double x) {
  const double n = static_cast<double>(static_cast<int64_t>(x + (x < 0 ? -0.5 : 0.5)));
  const double r = (x - n) * 0.6931471805599453;
  double p = 1;
  for (int k = 14; k >= 1; --k) p = 1 + p * r / k;
  const uint64_t scale = static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52;
  return p * __builtin_bit_cast(double, scale);
}

// x^y with C's special cases; correctly rounded but for near ties.
inline float power(float x, float y) {
  constexpr float kInfinity = __builtin_huge_valf();
  if (y == 0.0f || x == 1.0f) return 1.0f;
  if (x != x || y != y) return __builtin_nanf("");
  const float size = x < 0 ? -x : x;
  const float size_y = y < 0 ? -y : y;
  const bool whole = size_y >= 8388608.0f || y == static_cast<float>(static_cast<int32_t>(y));
  const bool odd = whole && size_y < 16777216.0f && (static_cast<int32_t>(y) & 1) != 0;
  const bool negative = (__builtin_bit_cast(uint32_t, x) >> 31) != 0 && odd;
  float result;
  if (size_y == kInfinity) {
    if (size == 1.0f) return 1.0f;
    result = (size > 1.0f) == (y > 0) ? kInfinity : 0.0f;
  } else if (size == 0.0f || size == kInfinity) {
    result = (size == 0.0f) == (y > 0) ? 0.0f : kInfinity;
  } else if (x < 0 && !whole) {
    return __builtin_nanf("");
  } else {
    const double t = static_cast<double>(y) * log2_positive(static_cast<double>(size));
    result = t > 129.0 ? kInfinity : t < -155.0 ? 0.0f : static_cast<float>(exp2_small(t));
  }
  return negative ? -result : result;
}
PELTON_INLINE F32 power(F32 x, F32 y) {
  float a[kLanes], b[kLanes];
  store(a, x);
  store(b, y);
  for (int i = 0; i < kLanes; ++i) a[i] = power(a[i], b[i]);
  return load(a);
}

// --- integers: arithmetic wraps, as in numpy
// ------------------------------------------------------

template <class T>
PELTON_INLINE T wrap_add(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <class T>
PELTON_INLINE T wrap_sub(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
template <class T>
PELTON_INLINE T wrap_mul(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
// x^y, and 0 for a negative y.
template <class T>
PELTON_INLINE T wrap_pow(T x, T y) {
  if (y < 0) return 0;
  T result = 1;
  for (; y != 0; y = static_cast<T>(y >> 1)) {
    if ((y & 1) != 0) result = wrap_mul(result, x);
    x = wrap_mul(x, x);
  }
  return result;
}
// The quotient in fp64, cut to an integer.
template <class T>
PELTON_INLINE T cut_div(T a, T b) {
  return static_cast<T>(static_cast<int64_t>(static_cast<double>(a) / static_cast<double>(b)));
}

// Conversion between any two element types; bool has values 0 and 1. Floats are cut towards zero.
template <class To, bool kToBool, class From>
PELTON_INLINE To convert(From x) {
  if constexpr (sizeof(From) < 4 && __is_class(From)) {
    return convert<To, kToBool>(to_float(x));
  } else if constexpr (kToBool) {
    return static_cast<To>(x != 0);
  } else if constexpr (__is_same(To, bf16) || __is_same(To, f16)) {
    return round_to<To>(static_cast<float>(x));
  } else if constexpr (__is_same(From, float) && sizeof(To) < 8 && !__is_same(To, float) &&
                       !__is_same(To, int32_t)) {
    return static_cast<To>(static_cast<int64_t>(x));
  } else {
    return static_cast<To>(x);
  }
}

// --- softmax and products ------------------------------------------------------------------------

// Softmax of n elements at a stride; lanes are summed in a fixed order.
template <class T>
inline void softmax_line(const T* x, T* y, int64_t n, int64_t in_stride, int64_t out_stride) {
  constexpr float kLowest = -__builtin_huge_valf();
  F32 top = splat(kLowest);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = lanes_left(n, i);
    const F32 v = load_strided(x + i * in_stride, in_stride, lanes);
    top = max(top, select(first_n(lanes), v, splat(kLowest)));
  }
  const F32 highest = splat(max_lane(top));
  F32 total = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = lanes_left(n, i);
    const F32 e = exp(load_strided(x + i * in_stride, in_stride, lanes) - highest);
    total += select(first_n(lanes), e, zero());
  }
  const F32 scale = splat(sum(total));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = lanes_left(n, i);
    const F32 e = exp(load_strided(x + i * in_stride, in_stride, lanes) - highest);
    store_strided(y + i * out_stride, e / scale, out_stride, lanes);
  }
}

// One row of a matrix product: y[n] = sum over k, in order, of a[k] * b[k][n]; every step rounds.
template <class T>
inline void matmul_row(const T* a, const T* b, T* y, int64_t n, int64_t k, int64_t b_stride) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = lanes_left(n, i);
    F32 total = splat(to_float(a[0])) * load_n(b + i, lanes);
    for (int64_t j = 1; j < k; ++j) {
      total += splat(to_float(a[j])) * load_n(b + j * b_stride + i, lanes);
    }
    store_n(y + i, total, lanes);
  }
}

template <class X, class W>
PELTON_INLINE float dot(const X* x, const W* w, int64_t k) {
  F32 total = zero();
  for (int64_t j = 0; j < k; j += kLanes) {
    const int lanes = lanes_left(k, j);
    total = fma(load_n(x + j, lanes), load_n(w + j, lanes), total);
  }
  return sum(total);
}

// y[rows][N] = x[rows][K] w[N][K]^T (+ bias[N]): workers take outputs, so weights are read once.
template <int64_t kN, int64_t kK, class X, class W, class B>
inline void linear(const pelton_worker* worker, int64_t rows, const X* x, const W* w, const B* bias,
                   X* y) {
  const Range range = share(kN, worker);
  for (int64_t n = range.begin; n < range.end; ++n) {
    for (int64_t r = 0; r < rows; ++r) {
      float value = dot(x + r * kK, w + n * kK, kK);
      if (bias != nullptr) value += to_float(bias[n]);
      y[r * kN + n] = round_to<X>(value);
    }
  }
}

}  // namespace pelton
