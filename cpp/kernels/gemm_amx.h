// x [rows, K] times a weight [N, K] in bf16, on tiles: 16 pairs of k of 16 outputs are one tile.
//
// An output's sum starts at zero and takes 32 values of k at a time, in order, whatever the shape
// of the tiles and however many of their rows are in use; the instruction itself treats each row
// alike. So few rows are tiles of few rows, and results depend on (N, K) alone.
#pragma once
#include "gemm_amx_tiles.h"

namespace pelton {

// Rows that are one tile or two: the panels stream by, each step of two of them brought into a ring
// in the first-level cache shortly before it is multiplied.
template <class C>
struct AmxStream : AmxRows<C> {
  using Base = AmxRows<C>;
  using Base::AmxRows, Base::rows, Base::weight;
  using Base::kPairs, Base::kStepPieces, Base::kSteps, Base::kTile;
  using typename Base::Compute, typename Base::Feed, typename Base::Sums, typename Base::X;
  // Steps ahead: a tile is not loaded as soon as it is written.
  static constexpr int64_t kLead = smaller<int64_t>(2, kSteps), kRing = 4;

  template <int USED>
  __attribute__((noinline)) void pair_of_panels(const X* ready, Feed& feed, int64_t pair) {
    alignas(64) Compute ring[kRing][2][kTile];
    const auto bring = [&](int64_t s) {
      Compute(&to)[2][kTile] = ring[s % kRing];
      for (int64_t i = 0; i < kStepPieces; ++i) {
        feed.take(to[0] + i * Feed::kPiece, to[1] + i * Feed::kPiece);
      }
    };
    Base::template clear_sums<USED>();
    feed.begin(pair, 0);
    for (int64_t s = 0; s < kLead; ++s) bring(s);
    for (int64_t s = 0; s < kSteps; ++s, ready += kTileBf16Depth) {
      if (s + kLead < kSteps) bring(s + kLead);
      Base::template step<USED>(ready, ring[s % kRing][0], ring[s % kRing][1]);
    }
    Sums sums;
    Base::template store_sums<USED>(sums);
    for (int64_t row = 0; row < rows; ++row) Base::finish_pair(sums[row], pair, row);
  }
  template <int USED>
  PELTON_INLINE void run(const X* ready, const pelton_worker* worker) {
    const Range mine = share(kPairs, worker);
    Feed feed{weight};
    this->shape(rows);
    for (int64_t pair = mine.begin; pair < mine.end; ++pair) {
      pair_of_panels<USED>(ready, feed, pair);
    }
  }
};

template <class C>
PELTON_INLINE void gemm_amx(void* const* args, pelton_worker* worker, int64_t rows) {
  if (rows <= 0) return;
  if (rows <= 2 * kTileHeight) {
    AmxStream<C> stream(args, rows);
    const bf16* ready = stream.staged(worker);
    if (rows <= kTileHeight) {
      stream.template run<1>(ready, worker);
    } else {
      stream.template run<2>(ready, worker);
    }
  } else {
    AmxTiles<C> tiles(args, rows);
    tiles.run(tiles.staged(worker), worker);
  }
}

}  // namespace pelton
