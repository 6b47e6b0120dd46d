// Rotary position embedding: the table of cosines and sines, and rotating heads by it.
#pragma once
#include "math.h"
#include "work.h"

namespace pelton {

// args: positions, inv_freq, cos, sin. C: kHalf (frequencies), kScale.
template <class C>
PELTON_INLINE void rope_table(void* const* args, pelton_worker* worker, int64_t tokens) {
  const int32_t* positions = static_cast<const int32_t*>(args[0]);
  const float* frequency = static_cast<const float*>(args[1]);
  float* cosines = static_cast<float*>(args[2]);
  float* sines = static_cast<float*>(args[3]);
  const Range mine = share(tokens, worker);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const F32 position = splat(static_cast<float>(positions[t]));
    for (int64_t i = 0; i < C::kHalf; i += kLanes) {
      const int n = static_cast<int>(smaller<int64_t>(C::kHalf - i, kLanes));
      F32 sine, cosine;
      sin_cos(position * load_n(frequency + i, n), &sine, &cosine);
      store_n(cosines + t * C::kHalf + i, cosine * splat(C::kScale), n);
      store_n(sines + t * C::kHalf + i, sine * splat(C::kScale), n);
    }
  }
}

// One head of D values; the first R are rotated, in pairs (i, i + R/2) or (2i, 2i + 1). Products
// are rounded before they are added, as everywhere where no fma is written.
template <int D, int R, bool INTERLEAVED>
PELTON_INLINE void rotate(const float* x, const float* cosine, const float* sine, float* out) {
  constexpr int kHalf = R / 2;
  if constexpr (INTERLEAVED) {
    for (int i = 0; i < kHalf; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      out[2 * i] = a * cosine[i] - b * sine[i];
      out[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
  } else {
    for (int i = 0; i < kHalf; i += kLanes) {
      const int n = smaller<int>(kHalf - i, kLanes);
      const F32 a = load_n(x + i, n), b = load_n(x + kHalf + i, n);
      const F32 c = load_n(cosine + i, n), s = load_n(sine + i, n);
      store_n(out + i, a * c - b * s, n);
      store_n(out + kHalf + i, b * c + a * s, n);
    }
  }
  for (int i = R; i < D; ++i) out[i] = x[i];
}

// args: x, cos, sin, out. C: kHeads, kDim, kRotary, kInterleaved.
template <class C>
PELTON_INLINE void rope(void* const* args, pelton_worker* worker, int64_t tokens) {
  constexpr int64_t kHalf = C::kRotary / 2;
  const Range mine = share(tokens * C::kHeads, worker);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t t = i / C::kHeads;
    rotate<C::kDim, C::kRotary, C::kInterleaved>(static_cast<const float*>(args[0]) + i * C::kDim,
                                                 static_cast<const float*>(args[1]) + t * kHalf,
                                                 static_cast<const float*>(args[2]) + t * kHalf,
                                                 static_cast<float*>(args[3]) + i * C::kDim);
  }
}

}  // namespace pelton
