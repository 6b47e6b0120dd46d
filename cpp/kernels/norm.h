// RMS normalisation of rows, in fp32.
#pragma once
#include "vec.h"
#include "work.h"

namespace pelton {

// 1 / sqrt(mean(x^2) + eps) over n values: four partial sums of 16 lanes, combined in a fixed
// order.
template <class T>
PELTON_INLINE float rms_scale(const T* x, int64_t n, float eps) {
  F32 part[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(x + i + j * kLanes);
      part[j] = fma(v, v, part[j]);
    }
  }
  for (int j = 0; i < n; i += kLanes, ++j) {
    const F32 v = load_n(x + i, static_cast<int>(smaller<int64_t>(n - i, kLanes)));
    part[j] = fma(v, v, part[j]);
  }
  const float total = sum((part[0] + part[1]) + (part[2] + part[3]));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
}

// The 16 (or n) normalised values from i on.
template <class T>
PELTON_INLINE F32 rms_values(const T* x, const float* weight, float scale, int64_t i, int n) {
  return (load_n(x + i, n) * splat(scale)) * load_n(weight + i, n);
}

// args: x, weight, (residual), out. C: In, Out, kN, kEps, kResidual.
template <class C>
PELTON_INLINE void rms_norm(void* const* args, pelton_worker* worker, int64_t rows) {
  using In = typename C::In;
  using Out = typename C::Out;
  const float* weight = static_cast<const float*>(args[1]);
  const Range mine = share(rows, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t at = row * C::kN;
    const In* x = static_cast<const In*>(args[0]) + at;
    Out* out = static_cast<Out*>(args[C::kResidual ? 3 : 2]) + at;
    const float scale = rms_scale(x, C::kN, C::kEps);
    for (int64_t i = 0; i < C::kN; i += kLanes) {
      const int n = static_cast<int>(smaller<int64_t>(C::kN - i, kLanes));
      F32 v = rms_values(x, weight, scale, i, n);
      if constexpr (C::kResidual) v += load_n(static_cast<const float*>(args[2]) + at + i, n);
      store_n(out + i, v, n);
    }
  }
}

}  // namespace pelton
