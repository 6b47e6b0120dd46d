// Products with a panel16 weight in vectors: a sum of 16 outputs is a vector, and every SKU's dot
// product in dot.h will do.
#pragma once
#include "gemm_walk.h"

namespace pelton {

template <class C>
using VectorRows =
    GemmRows<C, typename DotFor<typename C::Compute, sizeof(typename C::Compute) == 2,
                                typename C::Compute>::Type>;

template <class C>
struct VectorBlocks : VectorRows<C> {
  using Rows = VectorRows<C>;
  using Rows::finish_stream, Rows::finish_tile, Rows::rows, Rows::weight, Rows::M, Rows::P;
  using Rows::GemmRows;
  using Rows::kAdvance, Rows::kAhead, Rows::kBlockSteps, Rows::kLastSteps;
  using Rows::kPanel, Rows::kSteps, Rows::kStride, Rows::kSummed, Rows::kUnit;
  using typename Rows::Compute, typename Rows::Dot, typename Rows::X;
  // How many bytes a stream is read ahead; with more rows a line takes longer.
  static constexpr int kNear = 3072, kFar = 6144;
  // As many rows as a tile has sums stream, too, where tiles would have as many: each panel then
  // comes from memory once and in order, not once for each block of rows from the cache. Not if
  // the rows would crowd into one or two sets of the first-level cache.
  static constexpr int kStreamRows = kStride * sizeof(X) % 2048 == 0 ? M : M * kSummed;

  template <int M>
  PELTON_INLINE void row_block(const X* ready, int64_t first, const X* (&rows_of)[M]) const {
    for (int m = 0; m < M; ++m) rows_of[m] = ready + smaller(first + m, rows - 1) * kStride;
  }

  // M rows (those past the end repeat the last one and are not stored) times one panel.
  template <int M>
  PELTON_INLINE void stream_panel(const X* const (&rows_of)[M], int64_t number,
                                  F32 (&acc)[M][1]) const {
    const Compute* panel[1] = {weight + number * kPanel};
    const char* const ahead[1] = {reinterpret_cast<const char*>(panel[0]) +
                                  (M <= 4 ? kNear : kFar)};
    clear(acc);
    dot_block<Dot, kAdvance>(rows_of, panel, kSteps, acc, ahead);
  }
  // The same times one unit.
  template <int M>
  __attribute__((noinline)) void stream(const X* ready, int64_t first_row, int64_t unit) const {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    F32 sums[M][kUnit];
    each<kUnit>([&]<int PART>() {
      F32 acc[M][1];
      stream_panel(rows_of, unit * kUnit + PART, acc);
      for (int m = 0; m < M; ++m) sums[m][PART] = acc[m][0];
    });
    finish_stream(sums, first_row, unit);
  }

  // Panel p of a tile, from step `from` on.
  PELTON_INLINE const Compute* tile_panel(int64_t group, int64_t from, int p) const {
    return weight + (group * P + p) * kPanel + from * kAdvance;
  }
  // Steps `from`.. of one tile.
  template <bool FIRST, bool LAST>
  PELTON_INLINE void tile(const X* ready, int64_t first_row, int64_t group, int64_t from,
                          F32 (&sums)[M][P], const char* const (&ahead)[kAhead], bool) const {
    tile_on<FIRST, LAST>(*this, ready, first_row, group, from, sums, ahead);
  }
  // The same, with the panels that Blocks, which is a kind of this, has for the tile.
  template <bool FIRST, bool LAST, class Blocks>
  __attribute__((noinline)) void tile_on(const Blocks& blocks, const X* ready, int64_t first_row,
                                         int64_t group, int64_t from, F32 (&sums)[M][P],
                                         const char* const (&ahead)[kAhead]) const {
    const X* rows_of[M];
    row_block(ready, first_row, rows_of);
    for (int m = 0; m < M; ++m) rows_of[m] += from * Dot::kStep;
    constexpr int64_t kTaken = LAST ? kLastSteps : kBlockSteps;
    F32 whole[M][P];
    each<P / kSummed>([&]<int PART>() {
      constexpr int kFirst = PART * kSummed;
      const Compute* panels[kSummed];
      F32 acc[M][kSummed];
      for (int p = 0; p < kSummed; ++p) {
        panels[p] = blocks.tile_panel(group, from, kFirst + p);
        for (int m = 0; m < M; ++m) acc[m][p] = FIRST ? zero() : sums[m][kFirst + p];
      }
      if constexpr (PART == 0) {
        dot_block<Dot, Rows::kAdvance>(rows_of, panels, kTaken, acc, ahead);
      } else {
        dot_block<Dot, Rows::kAdvance>(rows_of, panels, kTaken, acc);
      }
      for (int p = 0; p < kSummed; ++p) {
        for (int m = 0; m < M; ++m) whole[m][kFirst + p] = acc[m][p];
      }
    });
    leave<LAST>(whole, first_row, group, sums);
  }
  // What becomes of a tile's sums.
  template <bool LAST>
  PELTON_INLINE void leave(const F32 (&whole)[M][P], int64_t first_row, int64_t group,
                           F32 (&sums)[M][P]) const {
    if constexpr (LAST) {
      finish_tile(whole, first_row, group);
    } else {
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] = whole[m][p];
      }
    }
  }
};

}  // namespace pelton
