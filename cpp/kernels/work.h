// Static division of work among the workers of a team.
#pragma once
#include "inline.h"
#include "pelton/abi.h"

namespace pelton {

struct Range {
  int64_t begin, end;
};

// This worker's contiguous part of [0, total), in equal parts give or take one.
PELTON_INLINE Range share(int64_t total, const pelton_worker* worker) {
  return {total * worker->index / worker->count, total * (worker->index + 1) / worker->count};
}

PELTON_INLINE void meet(pelton_worker* worker) {
  if (worker->count > 1) worker->barrier(worker);
}

PELTON_INLINE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
PELTON_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// f<0>(), f<1>(), ... f<COUNT - 1>(): for what must be constants, or must stay in registers.
template <int COUNT, int I = 0, class F>
PELTON_INLINE void each(const F& f) {
  if constexpr (I < COUNT) {
    f.template operator()<I>();
    each<COUNT, I + 1>(f);
  }
}

// The type A if FIRST, else B.
template <class A, class B, bool FIRST>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<A, B, false> {
  using Type = B;
};

template <class T>
PELTON_INLINE constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
PELTON_INLINE constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

}  // namespace pelton
