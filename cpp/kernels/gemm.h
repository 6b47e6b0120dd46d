// x [rows, K] times a panel16 weight [N, K], with what comes before (norm, rounding) and after it,
// in vectors: a sum of 16 outputs is a vector, and every SKU's dot product in dot.h will do.
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
  using Rows::finish, Rows::finish_tile, Rows::rows, Rows::weight, Rows::M, Rows::P;
  using Rows::GemmRows;
  using Rows::kAdvance, Rows::kAhead, Rows::kBlockSteps, Rows::kLastSteps;
  using Rows::kPanel, Rows::kSteps, Rows::kStride, Rows::kUnit;
  using typename Rows::Compute, typename Rows::Dot, typename Rows::X;
  // How many bytes a stream is read ahead; with more rows a line takes longer.
  static constexpr int kNear = 3072, kFar = 6144;
  // As many rows as a tile has sums stream, too, where tiles would have as many: each panel then
  // comes from memory once and in order, not once for each block of rows from the cache. Not if
  // the rows would crowd into one or two sets of the first-level cache.
  static constexpr int kStreamRows = kStride * sizeof(X) % 2048 == 0 ? M : M * P;

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
    dot_block<Dot, kAdvance>(rows_of, panel, kSteps, acc, ahead);
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
    const Compute* panels[P];
    for (int p = 0; p < P; ++p) panels[p] = blocks.tile_panel(group, from, p);
    F32 acc[M][P];
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) acc[m][p] = FIRST ? zero() : sums[m][p];
    }
    dot_block<Dot, kAdvance>(rows_of, panels, LAST ? kLastSteps : kBlockSteps, acc, ahead);
    if constexpr (LAST) {
      finish_tile(acc, first_row, group);
    } else {
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] = acc[m][p];
      }
    }
  }
};

template <class Blocks>
PELTON_INLINE void gemm_rows(Blocks& blocks, pelton_worker* worker, int64_t rows) {
  constexpr int kTile = Blocks::M, kStream = Blocks::kStreamRows;
  const auto* ready = blocks.staged(worker);
  if (rows <= 1) {
    if (rows == 1) run_streams<1>(blocks, ready, worker);
  } else if (rows == 2) {
    run_streams<2>(blocks, ready, worker);
  } else if (rows <= 4) {
    run_streams<4>(blocks, ready, worker);
  } else if (rows <= kTile) {
    run_streams<kTile>(blocks, ready, worker);
  } else if (rows > kStream - kTile && rows <= kStream) {
    run_streams<kStream>(blocks, ready, worker);
  } else {
    run_tiles(blocks, ready, worker);
  }
}

template <class C>
PELTON_INLINE void gemm(void* const* args, pelton_worker* worker, int64_t rows) {
  VectorBlocks<C> blocks(args, rows);
  gemm_rows(blocks, worker, rows);
}

}  // namespace pelton
