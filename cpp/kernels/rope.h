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

// One head of D values; the first R are rotated, in pairs (i, i + R/2) or (2i, 2i + 1).
template <int D, int R, bool INTERLEAVED>
PELTON_INLINE void rotate(const float* __restrict x, const float* __restrict cosine,
                          const float* __restrict sine, float* __restrict out) {
  for (int i = 0; i < R / 2; ++i) {
    const int first = INTERLEAVED ? 2 * i : i;
    const int second = INTERLEAVED ? 2 * i + 1 : i + R / 2;
    const float a = x[first], b = x[second];
    out[first] = a * cosine[i] - b * sine[i];
    out[second] = b * cosine[i] + a * sine[i];
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
