// Many rows on tiles. Pairs of panels are brought into a buffer while rows pass by the pair before,
// and a tile's outputs are finished while the next tile is summed: the tile unit works by itself,
// and what the vectors do meanwhile costs little if it is spread out between its instructions.
#pragma once
#include "gemm_amx_step.h"

namespace pelton {

// Of the tactic: kSuperRows pass by a pair of panels, kBlockSteps of k at a time; kBatchPairs go
// by a block of k before the next block, so that its rows are still in L2.
//
// Lives on the worker's stack, which is the caller's for worker 0: three quarters of a MiB with the
// tactics that the model chooses.
template <class C>
struct AmxTiles : AmxRows<C> {
  using Base = AmxRows<C>;
  using Base::AmxRows, Base::finish_rows, Base::rows, Base::weight;
  using Base::kBlockSteps, Base::kOneBlock, Base::kPairs, Base::kRows, Base::kSteps;
  using Base::kStepPieces, Base::kStride, Base::kTile;
  using typename Base::Compute, typename Base::Feed, typename Base::Sums, typename Base::X;
  static constexpr int64_t kBlocks = divide_up(kSteps, kBlockSteps);
  static constexpr int64_t kSuperBlocks = divide_up(C::kSuperRows, kRows);
  static constexpr int64_t kBatch = kOneBlock ? 1 : smaller<int64_t>(C::kBatchPairs, kPairs);

  // A block of k of a pair of panels.
  struct Job {
    int64_t batch, block, pair;  // batch: its first pair
    PELTON_INLINE int64_t steps() const {
      return smaller<int64_t>(kBlockSteps, kSteps - block * kBlockSteps);
    }
    PELTON_INLINE Job next(int64_t end) const {  // of pairs
      if (pair + 1 < smaller(batch + kBatch, end)) return {batch, block, pair + 1};
      if (block + 1 < kBlocks) return {batch, block + 1, batch};
      return {batch + kBatch, 0, batch + kBatch};
    }
  };

  const X* ready;
  Feed feed{weight};
  Compute* feed_to = nullptr;  // the first panel's place; the second's is half a buffer further
  int64_t feed_left = 0, feed_rate = 0;  // pieces in all, and of each step
  static constexpr int64_t kPanelBlock = kBlockSteps * kTile;
  alignas(64) Compute near[2][2 * kPanelBlock];
  Sums partial[kBatch][kOneBlock ? 1 : kSuperBlocks];  // between blocks of k

  PELTON_INLINE void bring(int64_t pieces) {
    for (; pieces > 0 && feed_left > 0; --pieces, --feed_left, feed_to += Feed::kPiece) {
      feed.take(feed_to, feed_to + kPanelBlock);
    }
  }
  // In between two steps.
  PELTON_INLINE void beside() {
    finish_rows(divide_up(kRows, kBlockSteps));
    bring(feed_rate);
  }

  // The rows from first_row on, USED tiles of them, times a job's panels.
  template <int USED>
  __attribute__((noinline)) void tile(const Job& job, const Compute* panels, int64_t first_row,
                                      Sums& sums) {
    const X* from = ready + first_row * kStride + job.block * kBlockSteps * kTileBf16Depth;
    if (kOneBlock || job.block == 0) {
      Base::template clear_sums<USED>();
    } else {
      Base::template load_sums<USED>(sums);
    }
    const int64_t steps = kOneBlock ? kSteps : job.steps();
    for (int64_t s = 0; s < steps; ++s, panels += kTile, from += kTileBf16Depth) {
      Base::template step<USED>(from, panels, panels + kPanelBlock);
      beside();
    }
    if (kOneBlock || job.block == kBlocks - 1) {
      Base::template leave_sums<USED>(job.pair, first_row,
                                      smaller<int64_t>(rows - first_row, kRows));
    } else {
      Base::template store_sums<USED>(sums);
    }
  }

  PELTON_INLINE void begin_feed(const Job& job, Compute* to, int64_t beside_steps) {
    feed.begin(job.pair, job.block * kBlockSteps * kStepPieces);
    feed_to = to;
    feed_left = job.steps() * kStepPieces;
    feed_rate = divide_up(feed_left, beside_steps);
  }

  // Row blocks from `above` on, `here` of them; tiles begin .. end - 1 in order of pair, row block.
  PELTON_INLINE void super_rows(int64_t above, int64_t here, int64_t begin, int64_t end) {
    const int64_t first = begin / here, stop = divide_up(end, here);
    Job job = {first, 0, first};
    begin_feed(job, near[0], 1);
    bring(feed_left);
    for (int which = 0; job.pair < stop; which ^= 1) {
      const Job next = job.next(stop);
      const int64_t from = larger<int64_t>(begin - job.pair * here, 0);
      const int64_t to = smaller<int64_t>(end - job.pair * here, here);
      if (next.pair < stop) begin_feed(next, near[which ^ 1], (to - from) * job.steps());
      for (int64_t b = from; b < to; ++b) {
        const int64_t row = (above + b) * kRows, count = smaller<int64_t>(rows - row, kRows);
        Sums& sums = partial[job.pair - job.batch][kOneBlock ? 0 : b];
        this->shape(count);
        if (count > kTileHeight) {
          tile<2>(job, near[which], row, sums);
        } else {
          tile<1>(job, near[which], row, sums);
        }
      }
      bring(feed_left);
      job = next;
    }
  }

  // Tiles in order: super rows, pair, row block. This worker does a contiguous part of them.
  PELTON_INLINE void run(const X* staged_rows, const pelton_worker* worker) {
    static_assert(sizeof(AmxTiles) <= 1536 << 10, "the stack may be smaller");
    ready = staged_rows;
    const int64_t row_blocks = divide_up(rows, kRows);
    const Range mine = share(kPairs * row_blocks, worker);
    for (int64_t i = mine.begin; i < mine.end;) {
      const int64_t above = i / (kPairs * kSuperBlocks) * kSuperBlocks;  // blocks before
      const int64_t here = smaller(kSuperBlocks, row_blocks - above), base = above * kPairs;
      const int64_t end = smaller(mine.end - base, kPairs * here);
      super_rows(above, here, i - base, end);
      i = base + end;
    }
    finish_rows(kRows);
  }
};

}  // namespace pelton
