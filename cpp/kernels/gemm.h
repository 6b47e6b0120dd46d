// x [rows, K] times a panel16 weight [N, K], with what comes before (norm, rounding) and after it.
//
// One row walks the panels one at a time: one sequential stream per worker, read ahead. More rows
// keep kManyRows x kManyPanels accumulators in registers. An output's arithmetic is the same in all
// of these (see dot.h); workers split (panel, row block) tiles, so results never depend on them.
#pragma once
#include "dot.h"
#include "math.h"
#include "norm.h"
#include "work.h"

namespace pelton {

// What a Config C must have. Types In, Compute, Out; kN, kK, kOut; kNorm, kEps; kBias; kGated;
// kSoftcap (0 = none); kScale; kResidual; and static F32 activation(F32).
template <class C>
struct Gemm {
  using In = typename C::In;
  using Out = typename C::Out;
  using Compute = typename C::Compute;
  static constexpr bool kPaired = sizeof(Compute) == 2;
  using Dot = typename DotFor<Compute, kPaired, Compute>::Type;
  using X = typename Dot::X;

  static constexpr int64_t kSteps = divide_up(C::kK, Dot::kStep);
  static constexpr int64_t kPanel = kSteps * Dot::kStep * kLanes;  // elements of one panel
  static constexpr int64_t kPanels = divide_up(C::kN, kLanes);
  static constexpr int kUnit = C::kGated ? 2 : 1;  // panels that make 16 outputs
  static constexpr int64_t kUnits = kPanels / kUnit;
  static constexpr int64_t kRedundantRows = 4;
  static constexpr int kPrefetch = 1536;
#if defined(__AVX512F__)
  static constexpr int kManyRows = 8, kManyPanels = 2;
#else
  static constexpr int kManyRows = 6, kManyPanels = 1;
#endif

  // Rows may be used where they lie if they are in the staged type already and need no padding.
  static constexpr bool kDirect =
      !C::kNorm && __is_same(In, X) && sizeof(X) == sizeof(Compute) && C::kK % Dot::kStep == 0;
  // Elements between staged rows: whole cache lines, and never a multiple of 1 KiB (L1 sets).
  static constexpr int64_t kLineElements = 64 / sizeof(X);
  static constexpr int64_t kTight = round_up(kSteps * Dot::kStep, kLineElements);
  static constexpr int64_t kStride = kDirect                          ? C::kK
                                     : kTight * sizeof(X) % 1024 == 0 ? kTight + kLineElements
                                                                      : kTight;

  const In* x;
  const Compute* weight;
  const float *norm = nullptr, *bias = nullptr, *residual = nullptr;
  Out* out;
  X* scratch = nullptr;
  int64_t rows;

  PELTON_INLINE Gemm(void* const* args, int64_t row_count) : rows(row_count) {
    x = static_cast<const In*>(*args++);
    weight = static_cast<const Compute*>(*args++);
    if (C::kNorm) norm = static_cast<const float*>(*args++);
    if (C::kBias) bias = static_cast<const float*>(*args++);
    if (C::kResidual) residual = static_cast<const float*>(*args++);
    out = static_cast<Out*>(*args++);
    if (!kDirect) scratch = static_cast<X*>(*args);
  }

  // Steps 1 and 2 for one row: normalise, round to compute, pad with zeros to whole steps.
  PELTON_INLINE void stage(const In* from, X* to) const {
    const float scale = C::kNorm ? rms_scale(from, C::kK, C::kEps) : 1.0f;
    for (int64_t k = 0; k < C::kK; k += kLanes) {
      const int n = static_cast<int>(smaller<int64_t>(C::kK - k, kLanes));
      const F32 v = C::kNorm ? rms_values(from, norm, scale, k, n) : load_n(from + k, n);
      if constexpr (sizeof(X) == sizeof(Compute)) {
        store_n(to + k, v, n);
      } else {
        store_n(to + k, round_through<Compute>(v), n);
      }
    }
    for (int64_t k = C::kK; k < kSteps * Dot::kStep; ++k) to[k] = X{};
  }

  // Rows ready for the dot products. Few rows: every worker stages all of them for itself. Many:
  // the workers share them out and meet.
  PELTON_INLINE const X* staged(pelton_worker* worker) const {
    if constexpr (kDirect) {
      return x;
    } else if (rows <= kRedundantRows) {
      X* own = scratch + worker->index * kRedundantRows * kStride;
      for (int64_t row = 0; row < rows; ++row) stage(x + row * C::kK, own + row * kStride);
      return own;
    } else {
      const Range mine = share(rows, worker);
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        stage(x + row * C::kK, scratch + row * kStride);
      }
      meet(worker);
      return scratch;
    }
  }

  // Steps 3 to 8 for 16 outputs of one row. `first` is gate (or all there is), `second` is up.
  PELTON_INLINE void finish(F32 first, F32 second, int64_t unit, int64_t row) const {
    const int64_t column = unit * kLanes;
    const int n = C::kOut % kLanes == 0
                      ? kLanes
                      : static_cast<int>(smaller<int64_t>(C::kOut - column, kLanes));
    if constexpr (C::kBias) {
      if constexpr (C::kGated) {
        first += load(bias + 2 * column);
        second += load(bias + 2 * column + kLanes);
      } else {
        first += load_n(bias + column, n);
      }
    }
    F32 v = C::activation(first);
    if constexpr (C::kGated) v *= second;
    if constexpr (C::kSoftcap != 0.0f) v = splat(C::kSoftcap) * tanh(v / splat(C::kSoftcap));
    if constexpr (C::kScale != 1.0f) v *= splat(C::kScale);
    const int64_t at = row * C::kOut + column;
    if constexpr (C::kResidual) v += load_n(residual + at, n);
    store_n(out + at, v, n);
  }

  // One row block (its rows past the end repeat the last one and are not stored) times P panels.
  template <int M, int P, int PREFETCH>
  PELTON_INLINE void block(const X* const (&rows_of)[M], int64_t panel, F32 (&acc)[M][P]) const {
    const Compute* panels[P];
    for (int p = 0; p < P; ++p) panels[p] = weight + (panel + p) * kPanel;
    clear(acc);
    if constexpr (PREFETCH > 0) {  // one sequential stream: read it ahead
      const char* const ahead[1] = {reinterpret_cast<const char*>(panels[0]) + PREFETCH};
      dot_block<Dot, kLanes * Dot::kStep, 3>(rows_of, panels, kSteps, acc, ahead);
    } else {
      dot_block<Dot, kLanes * Dot::kStep>(rows_of, panels, kSteps, acc);
    }
  }
  template <int M, int P>
  __attribute__((noinline)) void tile(const X* ready, int64_t first_row, int64_t unit) const {
    const X* rows_of[M];
    for (int m = 0; m < M; ++m) rows_of[m] = ready + smaller(first_row + m, rows - 1) * kStride;
    const int count = static_cast<int>(smaller<int64_t>(M, rows - first_row));
    if constexpr (P == 1) {
      F32 first[M][1], second[M][1];
      block<M, 1, kPrefetch>(rows_of, unit * kUnit, first);
      if constexpr (C::kGated) block<M, 1, kPrefetch>(rows_of, unit * kUnit + 1, second);
      for (int m = 0; m < M; ++m) {
        if (m < count)
          finish(first[m][0], C::kGated ? second[m][0] : first[m][0], unit, first_row + m);
      }
    } else {
      F32 acc[M][P];
      block<M, P, 0>(rows_of, unit * kUnit, acc);
      for (int p = 0; p < P; p += kUnit) {
        for (int m = 0; m < M; ++m) {
          if (m < count) finish(acc[m][p], acc[m][p + kUnit - 1], unit + p / kUnit, first_row + m);
        }
      }
    }
  }

  // All tiles of M rows x P panels, panel by panel; this worker does a contiguous part of them.
  template <int M, int P>
  PELTON_INLINE void run(const X* ready, const pelton_worker* worker) const {
    constexpr int64_t kGroup = larger<int64_t>(P / kUnit, 1);  // units of one tile
    const int64_t blocks = divide_up(rows, M);
    const Range mine = share(divide_up(kUnits, kGroup) * blocks, worker);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t unit = i / blocks * kGroup, row = i % blocks * M;
      if (kUnits % kGroup == 0 || unit + kGroup <= kUnits) {
        tile<M, P>(ready, row, unit);
      } else {
        for (int64_t u = unit; u < kUnits; ++u) tile<M, 1>(ready, row, u);
      }
    }
  }

  PELTON_INLINE void operator()(pelton_worker* worker) const {
    const X* ready = staged(worker);
    if (rows <= 1) {
      if (rows == 1) run<1, 1>(ready, worker);
    } else if (rows == 2) {
      run<2, 1>(ready, worker);
    } else if (rows <= 4) {
      run<4, 1>(ready, worker);
    } else if (rows <= kManyRows) {
      run<kManyRows, 1>(ready, worker);
    } else {
      run<kManyRows, kManyPanels>(ready, worker);
    }
  }
};

template <class C>
PELTON_INLINE void gemm(void* const* args, pelton_worker* worker, int64_t rows) {
  Gemm<C>(args, rows)(worker);
}

}  // namespace pelton
