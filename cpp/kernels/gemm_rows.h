// What surrounds the dot products of a GEMM: where operands lie, how rows are made ready (norm,
// rounding) and what becomes of the sums. Shared by all ways to multiply (gemm.h, gemm_amx.h).
#pragma once
#include "dot.h"
#include "math.h"
#include "norm.h"
#include "packed12.h"
#include "work.h"

namespace pelton {

// What a Config C must have. Types In, Compute, Out; kN, kK, kOut; kPacked: the weight's layout is
// packed12, not panel16; kNorm, kEps; kBias; kGated; kSoftcap (0 = none); kScale; kResidual; and
// static F32 activation(F32). And the tactic, which
// changes no result: kTileRows, kTilePanels; kSuperRows: rows that pass by before the next group
// of panels; kBlockSteps: steps of k done for all of these rows before the next ones.
//
// What a dot policy must have: X, the type in which a row is staged, and kStep, how many values of
// k one step takes; staged rows are padded with zeros to whole steps, panels only to whole pairs.
template <class C, class Policy>
struct GemmRows {
  using Config = C;
  using In = typename C::In;
  using Out = typename C::Out;
  using Compute = typename C::Compute;
  using Dot = Policy;
  using X = typename Dot::X;

  static constexpr int64_t kSteps = divide_up(C::kK, Dot::kStep);
  static constexpr int64_t kAdvance = kLanes * Dot::kStep;  // elements of a panel in one step
  // Elements of one panel: 16-bit types are stored in pairs of k.
  static constexpr int64_t kPanel = round_up(C::kK, sizeof(Compute) == 2 ? 2 : 1) * kLanes;
  static constexpr int64_t kPanels = divide_up(C::kN, kLanes);
  static constexpr int kUnit = C::kGated ? 2 : 1;  // panels that make 16 outputs
  static constexpr int64_t kUnits = kPanels / kUnit;
  // Panels that a stream takes together; two are one of a packed12 weight.
  static constexpr int kStreamPanels = C::kPacked ? 2 : kUnit;
  static constexpr int64_t kStreams = divide_up(kPanels, kStreamPanels);
  static constexpr int64_t kRedundantRows = 4;

  // Rows may be used where they lie if they are in the staged type already and need no padding.
  static constexpr bool kDirect =
      !C::kNorm && __is_same(In, X) && sizeof(X) == sizeof(Compute) && C::kK % Dot::kStep == 0;
  // Elements between staged rows: whole cache lines. A tile takes 16 rows at once, which lie in as
  // many sets of the first-level cache if that is an odd number of lines; for vectors it is never a
  // multiple of 1 KiB. (To copy rows for this alone would cost more than it gains.)
  static constexpr bool kTiles = Dot::kStep >= 16;
  static constexpr int64_t kLineElements = 64 / sizeof(X);
  static constexpr int64_t kTight = round_up(kSteps * Dot::kStep, kLineElements);
  static constexpr int64_t kCrowded = kTiles ? 128 : 1024;  // bytes
  static constexpr int64_t kStride = kDirect                              ? C::kK
                                     : kTight * sizeof(X) % kCrowded == 0 ? kTight + kLineElements
                                                                          : kTight;

  // Whether outputs are stored past the caches: logits, whose rows are so long that few of them,
  // and a weight beside them, leave the second-level cache before they are read. Their lines need
  // not come from memory first: with 16 rows on AMX that was a fifth of the head's time.
  static constexpr bool kPast = __is_same(Out, float) && !C::kGated && !C::kResidual &&
                                C::kOut % kLanes == 0 && C::kOut * sizeof(Out) >= 128 * 1024;

  // The tactic: tiles of M rows and P panels, in groups of panels, in blocks of k.
  // Those of a packed12 weight go by two panels and by its blocks of k.
  static constexpr int M = C::kTileRows, P = round_up(C::kTilePanels, C::kPacked ? 2 : 1);
  static constexpr int kSummed = P == C::kTilePanels ? P : 1;  // panels in registers at once
  static constexpr int64_t kStepUnit =
      C::kPacked ? larger<int64_t>(kPackedDepth / Dot::kStep, 1) : 1;
  static constexpr int64_t kBlockSteps =
      smaller<int64_t>(round_up(C::kBlockSteps, kStepUnit), kSteps);
  static constexpr bool kOneBlock = kBlockSteps == kSteps;
  static constexpr int64_t kLastSteps = kSteps - (divide_up(kSteps, kBlockSteps) - 1) * kBlockSteps;
  static constexpr int64_t kGroup = larger<int64_t>(P / kUnit, 1);  // units of a group
  static constexpr int64_t kGroups = divide_up(kUnits, kGroup);
  static constexpr int64_t kSuperBlocks = divide_up(C::kSuperRows, M);
  // A tile of one panel, or of half a unit, would gain nothing over a stream.
  static constexpr bool kTiled = P > 1 && P % kUnit == 0;
  // A tile's next group: the first row blocks read it ahead, each some of its panels.
  static constexpr int kAhead = divide_up(P, 2);
  // Sums of the rows of a group, between blocks of k.
  using Sums = F32[kOneBlock ? 1 : kSuperBlocks][M][P];

  const In* x;
  const Compute* weight;
  const float *norm = nullptr, *bias = nullptr, *residual = nullptr;
  Out* out;
  X* scratch = nullptr;
  int64_t rows;

  PELTON_INLINE GemmRows(void* const* args, int64_t row_count) : rows(row_count) {
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

  // Where panel p of a group lies, from step `from` on, to be read ahead. (The two halves of a
  // packed12 panel lie together: each stands for one part, and these cover a little more.)
  PELTON_INLINE const char* stored_at(int64_t group, int64_t from, int64_t p) const {
    if constexpr (C::kPacked) {
      using Layout = Packed12<C::kK>;
      const uint8_t* at = Layout::panel(weight, (group * P + p) / 2);
      const int64_t block = from * Dot::kStep / kPackedDepth;
      if (block > 0) at += Layout::kFirstBlock + block * kPackedBlock;
      return reinterpret_cast<const char*>(at) + p % 2 * (kBlockSteps * kAdvance * 2);
    } else {
      return reinterpret_cast<const char*>(weight + (group * P + p) * kPanel + from * kAdvance);
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
    if constexpr (kPast) {
      store_past(out + at, v);
    } else {
      store_n(out + at, v, n);
    }
  }

  // The same for a stream's panels.
  template <int COUNT>
  PELTON_INLINE void finish_stream(const F32 (&sums)[COUNT][kStreamPanels], int64_t first_row,
                                   int64_t number) const {
    for (int m = 0; m < COUNT && first_row + m < rows; ++m) {
      if constexpr (C::kGated) {
        finish(sums[m][0], sums[m][1], number, first_row + m);
      } else {
        for (int p = 0; p < kStreamPanels; ++p) {
          const int64_t unit = number * kStreamPanels + p;
          if (unit < kUnits) finish(sums[m][p], sums[m][p], unit, first_row + m);
        }
      }
    }
  }
  // And for a tile whose sums are complete.
  PELTON_INLINE void finish_tile(const F32 (&sums)[M][P], int64_t first_row, int64_t group) const {
    for (int p = 0; p < P; p += kUnit) {
      for (int m = 0; m < M && first_row + m < rows; ++m) {
        finish(sums[m][p], sums[m][p + kUnit - 1], group * kGroup + p / kUnit, first_row + m);
      }
    }
  }
};

}  // namespace pelton
