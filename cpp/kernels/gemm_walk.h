// How a GEMM's rows and panels are gone through by vectors, whatever multiplies them. (Tiles have
// their own walk in gemm_amx_tiles.h.)
//
// Few rows, or just as many as sums fit, walk the panels one at a time: one sequential stream per
// worker, read ahead. Others keep kTileRows x kTilePanels sums in registers: a group of panels
// stays in the cache while the rows pass by, and the next group is brought there meanwhile. Workers
// claim (group, row block) tiles. An output's arithmetic is the same in all of these, so results
// never depend on them.
//
// Blocks is a GemmRows with two more functions, for a block of rows from first_row on (those past
// the end are not stored):
//   stream<M>(ready, first_row, number): M rows times kStreamPanels panels, all of k.
//   tile<FIRST, LAST>(ready, first_row, group, from, sums, ahead, fresh): a tile of the tactic, the
//     block of k from step `from` on; FIRST starts at zero, else at `sums`; LAST finishes the
//     outputs, else `sums` are left for the next block. Meanwhile memory at `ahead` is read ahead.
//     fresh: no tile before this one needed this block of k of these panels.
#pragma once
#include "claims.h"
#include "gemm_rows.h"

namespace pelton {

template <int M, class Blocks>
PELTON_INLINE void run_streams(Blocks& blocks, const typename Blocks::X* ready,
                               pelton_worker* worker) {
  Claims claims(Blocks::kStreams, worker);
  for (Range mine = claims.take(); mine.begin < mine.end; mine = claims.take()) {
    for (int64_t number = mine.begin; number < mine.end; ++number) {
      for (int64_t row = 0; row < blocks.rows; row += M) {
        blocks.template stream<M>(ready, row, number);
      }
    }
  }
}

// Row blocks [begin, end), none further than kSuperBlocks from the first, times a group.
template <class B>
PELTON_INLINE void group_rows(B& blocks, const typename B::X* ready, int64_t group, int64_t begin,
                              int64_t end, typename B::Sums& sums) {
  constexpr int M = B::M, P = B::P, kAhead = B::kAhead;
  for (int64_t from = 0; from < B::kSteps; from += B::kBlockSteps) {
    const bool last = B::kOneBlock || from + B::kBlockSteps >= B::kSteps;
    // What comes next: the following steps of these panels, or the first ones of the next group.
    const int64_t next_group = last ? smaller(group + 1, B::kGroups - 1) : group;
    const int64_t next_from = last ? 0 : from + B::kBlockSteps;
    for (int64_t b = begin; b < end; ++b) {
      const char* ahead[kAhead];
      for (int a = 0; a < kAhead; ++a) {
        const int64_t panel = smaller<int64_t>((b - begin) * kAhead + a, P - 1);
        ahead[a] = blocks.stored_at(next_group, next_from, panel);
      }
      const bool fresh = b == begin;
      auto& own = sums[B::kOneBlock ? 0 : b - begin];
      if constexpr (B::kOneBlock) {
        blocks.template tile<true, true>(ready, b * M, group, 0, own, ahead, fresh);
      } else if (from == 0) {
        blocks.template tile<true, false>(ready, b * M, group, from, own, ahead, fresh);
      } else if (!last) {
        blocks.template tile<false, false>(ready, b * M, group, from, own, ahead, fresh);
      } else {
        blocks.template tile<false, true>(ready, b * M, group, from, own, ahead, fresh);
      }
    }
  }
}

// Tiles in order: super rows, group, row block.
template <class B>
PELTON_INLINE void run_tiles(B& blocks, const typename B::X* ready, pelton_worker* worker) {
  constexpr int M = B::M;
  const int64_t row_blocks = divide_up(blocks.rows, M);
  // Whole groups where possible: one worker brings their panels to its cache for all of the rows.
  Claims claims(B::kGroups * row_blocks, worker, smaller(B::kSuperBlocks, row_blocks));
  typename B::Sums sums;
  for (Range mine = claims.take(); mine.begin < mine.end;) {
    const int64_t i = mine.begin;
    const int64_t above = i / (B::kGroups * B::kSuperBlocks) * B::kSuperBlocks;  // blocks before
    const int64_t here = smaller(B::kSuperBlocks, row_blocks - above);
    const int64_t at = i - above * B::kGroups, group = at / here, begin = at % here;
    const int64_t end = smaller(here, begin + mine.end - i);
    const int64_t unit = group * B::kGroup, units = smaller(B::kGroup, B::kUnits - unit);
    if constexpr (B::kTiled) {
      if (units == B::kGroup) group_rows(blocks, ready, group, above + begin, above + end, sums);
    }
    if (!B::kTiled || units != B::kGroup) {
      const int64_t stop = divide_up((unit + units) * B::kUnit, B::kStreamPanels);
      for (int64_t number = unit * B::kUnit / B::kStreamPanels; number < stop; ++number) {
        for (int64_t b = begin; b < end; ++b) {
          blocks.template stream<M>(ready, (above + b) * M, number);
        }
      }
    }
    mine.begin += end - begin;
    if (mine.begin >= mine.end) mine = claims.take();
  }
}

}  // namespace pelton
