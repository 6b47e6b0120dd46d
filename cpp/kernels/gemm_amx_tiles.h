// Many rows on tiles. Pairs of panels are brought into a buffer while rows pass by the pair before,
// and a tile's outputs are finished while the next tile is summed: the tile unit works by itself,
// and what the vectors do meanwhile costs little if it is spread out between its instructions.
#pragma once
#include "claims.h"
#include "gemm_amx_step.h"

namespace pelton {

// Of the tactic: kSuperRows pass by a pair of panels, kBlockSteps of k at a time; kBatchPairs go
// by a block of k before the next block, so that its rows are still in L2.
//
// Lives on the worker's stack, which is the caller's for worker 0: a little over half a MiB with
// the tactics that the model chooses.
template <class C>
struct AmxTiles : AmxRows<C> {
  using Base = AmxRows<C>;
  using Base::AmxRows, Base::finish_pair, Base::rows, Base::weight;
  using Base::kBlockSteps, Base::kOneBlock, Base::kPairs, Base::kRows, Base::kSteps;
  using Base::kStepPieces, Base::kStride, Base::kTile;
  using typename Base::Compute, typename Base::Feed, typename Base::Sums, typename Base::X;
  static constexpr int64_t kBlocks = divide_up(kSteps, kBlockSteps);
  static constexpr int64_t kSuperBlocks = divide_up(C::kSuperRows, kRows);
  static constexpr int64_t kBatch = kOneBlock ? 1 : smaller<int64_t>(C::kBatchPairs, kPairs);

  // Tiles begin .. end - 1, in order of pair and row block, of the `here` row blocks from `above`
  // on.
  struct Piece {
    int64_t above, here, begin, end;
    PELTON_INLINE int64_t first_pair() const { return begin / here; }
    PELTON_INLINE int64_t end_pair() const { return divide_up(end, here); }
  };
  // A block of k of a pair of panels, for the row blocks of a piece that want it.
  struct Job {
    Piece piece;
    int64_t batch, block, pair;  // batch: its first pair

    static PELTON_INLINE Job first(const Piece& piece) {
      return {piece, piece.first_pair(), 0, piece.first_pair()};
    }
    // The next of the piece, or one at its end.
    PELTON_INLINE Job next() const {
      const int64_t end = piece.end_pair();
      if (pair + 1 < smaller(batch + kBatch, end)) return {piece, batch, block, pair + 1};
      if (block + 1 < kBlocks) return {piece, batch, block + 1, batch};
      const int64_t after = smaller(batch + kBatch, end);
      return {piece, after, 0, after};
    }
    PELTON_INLINE bool any() const { return pair < piece.end_pair(); }
    PELTON_INLINE int64_t steps() const {
      return smaller<int64_t>(kBlockSteps, kSteps - block * kBlockSteps);
    }
    PELTON_INLINE Range row_blocks() const {
      return {larger<int64_t>(piece.begin - pair * piece.here, 0),
              smaller<int64_t>(piece.end - pair * piece.here, piece.here)};
    }
  };

  const X* ready;
  Feed feed{weight};
  Compute* feed_to = nullptr;  // the first panel's place; the second's is half a buffer further
  int64_t feed_left = 0, feed_rate = 0;  // pieces in all, and of each step
  static constexpr int64_t kPanelBlock = kBlockSteps * kTile;
  alignas(64) Compute near[2][2 * kPanelBlock];
  Sums partial[kBatch][kOneBlock ? 1 : kSuperBlocks];  // between blocks of k
  // The sums of a tile whose outputs are still to be finished: rows next .. end - 1 of it.
  Sums done;
  int64_t done_pair = 0, done_row = 0;
  int done_next = 0, done_end = 0;

  // Leaves the sums of `count` rows from first_row on, USED tiles of them, to be finished.
  template <int USED>
  PELTON_INLINE void leave_sums(int64_t pair, int64_t first_row, int64_t count) {
    finish_rows(kRows);
    Base::template store_sums<USED>(done);
    done_pair = pair, done_row = first_row, done_next = 0, done_end = static_cast<int>(count);
  }
  // At most `count` rows more, beside steps of the next tile: the tile unit works by itself.
  PELTON_INLINE void finish_rows(int count) {
    for (; count > 0 && done_next < done_end; --count, ++done_next) {
      finish_pair(done[done_next], done_pair, done_row + done_next);
    }
  }

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
      leave_sums<USED>(job.pair, first_row, smaller<int64_t>(rows - first_row, kRows));
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

  // The next piece of this worker's; empty when all is claimed.
  PELTON_INLINE Piece next_piece(Claims& claims, Range& claimed) const {
    if (claimed.begin >= claimed.end) claimed = claims.take();
    if (claimed.begin >= claimed.end) return {0, 1, 0, 0};
    const int64_t above = claimed.begin / (kPairs * kSuperBlocks) * kSuperBlocks;
    const int64_t here = smaller(kSuperBlocks, divide_up(rows, kRows) - above);
    const int64_t base = above * kPairs, end = smaller(claimed.end - base, kPairs * here);
    const Piece piece = {above, here, claimed.begin - base, end};
    claimed.begin = base + end;
    return piece;
  }

  // Tiles in order: super rows, pair, row block.
  PELTON_INLINE void run(const X* staged_rows, pelton_worker* worker) {
    static_assert(sizeof(AmxTiles) <= 1536 << 10, "the stack may be smaller");
    ready = staged_rows;
    const int64_t row_blocks = divide_up(rows, kRows);
    // Whole batches, unless they are more than half of a worker's part: some must be left for
    // others.
    const int64_t pairs = smaller<int64_t>(kBatch, larger<int64_t>(kPairs / worker->count / 2, 1));
    Claims claims(kPairs * row_blocks, worker, pairs * smaller(kSuperBlocks, row_blocks));
    Range claimed = {0, 0};
    Job job = Job::first(next_piece(claims, claimed));
    if (!job.any()) return;
    begin_feed(job, near[0], 1);
    bring(feed_left);
    for (int which = 0; job.any(); which ^= 1) {
      Job next = job.next();
      if (!next.any()) next = Job::first(next_piece(claims, claimed));
      const Range blocks = job.row_blocks();
      if (next.any()) {
        begin_feed(next, near[which ^ 1], (blocks.end - blocks.begin) * job.steps());
      }
      for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const int64_t row = (job.piece.above + b) * kRows;
        const int64_t count = smaller<int64_t>(rows - row, kRows);
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
    finish_rows(kRows);
  }
};

}  // namespace pelton
