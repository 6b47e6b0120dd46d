// x [rows, K] times a panel16 weight [N, K], with what comes before (norm, rounding) and after it.
//
// Few rows walk the panels one at a time: one sequential stream per worker, read ahead. More rows
// keep kTileRows x kTilePanels accumulators in registers: a group of panels stays in the L2 cache
// while the rows pass by, and the next group is brought there meanwhile. An output's arithmetic is
// the same in all of these (see dot.h); workers split (group, row block) tiles, so results never
// depend on them.
#pragma once
#include "dot.h"
#include "math.h"
#include "norm.h"
#include "work.h"

namespace pelton {

// What a Config C must have. Types In, Compute, Out; kN, kK, kOut; kNorm, kEps; kBias; kGated;
// kSoftcap (0 = none); kScale; kResidual; and static F32 activation(F32). And the tactic, which
// changes no result: kTileRows, kTilePanels; kSuperRows: rows that pass by before the next group
// of panels; kBlockSteps: steps of k done for all of these rows before the next ones.
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
  static constexpr int64_t kAdvance = kLanes * Dot::kStep;  // elements of a panel in one step
  // How many bytes a stream is read ahead, and into which cache. With more rows a line takes
  // longer, and the first-level cache is wanted for the rows.
  static constexpr int kNear = 1536, kFar = 6144;
  // A tile's next group: the first row blocks read it ahead, each some of its panels.
  static constexpr int kAhead = divide_up(C::kTilePanels, 2);
  static constexpr int64_t kBlockSteps = smaller<int64_t>(C::kBlockSteps, kSteps);
  static constexpr bool kOneBlock = kBlockSteps == kSteps;

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

  template <int M>
  PELTON_INLINE void row_block(const X* ready, int64_t first, const X* (&rows_of)[M]) const {
    for (int m = 0; m < M; ++m) rows_of[m] = ready + smaller(first + m, rows - 1) * kStride;
  }

  // M rows (those past the end repeat the last one and are not stored) times one unit.
  template <int M>
  PELTON_INLINE void stream_panel(const X* const (&rows_of)[M], int64_t number,
                                  F32 (&acc)[M][1]) const {
    const Compute* panel[1] = {weight + number * kPanel};
    const char* const ahead[1] = {reinterpret_cast<const char*>(panel[0]) +
                                  (M <= 4 ? kNear : kFar)};
    clear(acc);
    dot_block<Dot, kAdvance, M <= 4 ? 3 : 2>(rows_of, panel, kSteps, acc, ahead);
  }
  template <int M>
  __attribute__((noinline)) void stream(const X* ready, int64_t first_row, int64_t unit) const {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    F32 first[M][1], second[M][1];
    stream_panel(rows_of, unit * kUnit, first);
    if constexpr (C::kGated) stream_panel(rows_of, unit * kUnit + 1, second);
    for (int m = 0; m < M && first_row + m < rows; ++m) {
      finish(first[m][0], C::kGated ? second[m][0] : first[m][0], unit, first_row + m);
    }
  }
  template <int M>
  PELTON_INLINE void run_streams(const X* ready, const pelton_worker* worker) const {
    const Range mine = share(kUnits, worker);
    for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
      for (int64_t row = 0; row < rows; row += M) stream<M>(ready, row, unit);
    }
  }

  static constexpr int M = C::kTileRows, P = C::kTilePanels;
  static constexpr int64_t kGroup = larger<int64_t>(P / kUnit, 1);  // units of a group
  static constexpr int64_t kGroups = divide_up(kUnits, kGroup);
  static constexpr int64_t kSuperBlocks = divide_up(C::kSuperRows, M);
  // A tile of one panel, or of half a unit, would gain nothing over a stream.
  static constexpr bool kTiled = P > 1 && P % kUnit == 0;
  // Sums of the rows of a group, between blocks of k.
  using Sums = F32[kOneBlock ? 1 : kSuperBlocks][M][P];

  // Steps `from`.. of one tile.
  template <bool FIRST, bool LAST>
  __attribute__((noinline)) void tile(const X* ready, int64_t first_row, int64_t group,
                                      int64_t from, F32 (&sums)[M][P],
                                      const char* const (&ahead)[kAhead]) const {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    for (int m = 0; m < M; ++m) rows_of[m] += from * Dot::kStep;
    const Compute* panels[P];
    for (int p = 0; p < P; ++p) panels[p] = weight + (group * P + p) * kPanel + from * kAdvance;
    F32 acc[M][P];
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) acc[m][p] = FIRST ? zero() : sums[m][p];
    }
    const int64_t steps =
        LAST ? kSteps - (divide_up(kSteps, kBlockSteps) - 1) * kBlockSteps : kBlockSteps;
    dot_block<Dot, kAdvance, 2>(rows_of, panels, steps, acc, ahead);
    if constexpr (LAST) {
      for (int p = 0; p < P; p += kUnit) {
        for (int m = 0; m < M && first_row + m < rows; ++m) {
          finish(acc[m][p], acc[m][p + kUnit - 1], group * kGroup + p / kUnit, first_row + m);
        }
      }
    } else {
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] = acc[m][p];
      }
    }
  }

  // Row blocks [begin, end), none further than kSuperBlocks from the first, times a group.
  PELTON_INLINE void group_rows(const X* ready, int64_t group, int64_t begin, int64_t end,
                                Sums& sums) const {
    for (int64_t from = 0; from < kSteps; from += kBlockSteps) {
      const bool last = kOneBlock || from + kBlockSteps >= kSteps;
      // What comes next: the following steps of these panels, or the first ones of the next group.
      const int64_t next = last ? (smaller(group + 1, kGroups - 1) * P) * kPanel
                                : group * P * kPanel + (from + kBlockSteps) * kAdvance;
      for (int64_t b = begin; b < end; ++b) {
        const char* ahead[kAhead];
        for (int a = 0; a < kAhead; ++a) {
          const int64_t panel = smaller<int64_t>((b - begin) * kAhead + a, P - 1);
          ahead[a] = reinterpret_cast<const char*>(weight + next + panel * kPanel);
        }
        auto& own = sums[kOneBlock ? 0 : b - begin];
        if constexpr (kOneBlock) {
          tile<true, true>(ready, b * M, group, 0, own, ahead);
        } else if (from == 0) {
          tile<true, false>(ready, b * M, group, from, own, ahead);
        } else if (!last) {
          tile<false, false>(ready, b * M, group, from, own, ahead);
        } else {
          tile<false, true>(ready, b * M, group, from, own, ahead);
        }
      }
    }
  }

  // Tiles in order: super rows, group, row block. This worker does a contiguous part of them.
  PELTON_INLINE void run_tiles(const X* ready, const pelton_worker* worker) const {
    const int64_t blocks = divide_up(rows, M);
    const Range mine = share(kGroups * blocks, worker);
    Sums sums;
    for (int64_t i = mine.begin; i < mine.end;) {
      const int64_t above = i / (kGroups * kSuperBlocks) * kSuperBlocks;  // row blocks before
      const int64_t here = smaller(kSuperBlocks, blocks - above);
      const int64_t at = i - above * kGroups, group = at / here, begin = at % here;
      const int64_t end = smaller(here, begin + mine.end - i);
      const int64_t unit = group * kGroup, units = smaller(kGroup, kUnits - unit);
      if constexpr (kTiled) {
        if (units == kGroup) group_rows(ready, group, above + begin, above + end, sums);
      }
      if (!kTiled || units != kGroup) {
        for (int64_t u = unit; u < unit + units; ++u) {
          for (int64_t b = begin; b < end; ++b) stream<M>(ready, (above + b) * M, u);
        }
      }
      i += end - begin;
    }
  }

  PELTON_INLINE void operator()(pelton_worker* worker) const {
    const X* ready = staged(worker);
    if (rows <= 1) {
      if (rows == 1) run_streams<1>(ready, worker);
    } else if (rows == 2) {
      run_streams<2>(ready, worker);
    } else if (rows <= 4) {
      run_streams<4>(ready, worker);
    } else if (rows <= M) {
      run_streams<M>(ready, worker);
    } else {
      run_tiles(ready, worker);
    }
  }
};

template <class C>
PELTON_INLINE void gemm(void* const* args, pelton_worker* worker, int64_t rows) {
  Gemm<C>(args, rows)(worker);
}

}  // namespace pelton
