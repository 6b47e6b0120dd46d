// x [rows, K] times a weight [N, K] in bf16, on tiles: 16 pairs of k of 16 outputs are one tile.
//
// An output's sum starts at zero and takes 32 values of k at a time, in order, whatever the shape
// of the tiles and however many of their rows are in use; the instruction itself treats each row
// alike. So few rows are tiles of few rows, and results depend on (N, K) alone.
#pragma once
#include "gemm_amx_tiles.h"

namespace pelton {

// Few rows: the panels stream by, each step of two of them brought into a ring in the first-level
// cache shortly before it is multiplied. More than two tiles of rows are gone through two by two,
// all after the first ones with panels from L2.
template <class C>
struct AmxStream : AmxRows<C> {
  using Base = AmxRows<C>;
  using Base::AmxRows, Base::rows, Base::weight;
  using Base::kPairs, Base::kRows, Base::kStepPieces, Base::kSteps, Base::kStride, Base::kTile;
  using typename Base::Compute, typename Base::Feed, typename Base::Sums, typename Base::X;
  // Steps ahead: a tile is not loaded as soon as it is written.
  static constexpr int64_t kLead = smaller<int64_t>(2, kSteps), kRing = 4;

  // `count` rows from first_row on, USED tiles of them.
  template <int USED>
  __attribute__((noinline)) void multiply(const X* ready, Feed& feed, int64_t pair,
                                          int64_t first_row, int64_t count) {
    alignas(64) Compute ring[kRing][2][kTile];
    const auto bring = [&](int64_t s) {
      Compute(&to)[2][kTile] = ring[s % kRing];
      for (int64_t i = 0; i < kStepPieces; ++i) {
        feed.take(to[0] + i * Feed::kPiece, to[1] + i * Feed::kPiece);
      }
    };
    this->shape(count);
    Base::template clear_sums<USED>();
    feed.begin(pair, 0);
    const X* from = ready + first_row * kStride;
    for (int64_t s = 0; s < kLead; ++s) bring(s);
    for (int64_t s = 0; s < kSteps; ++s, from += kTileBf16Depth) {
      if (s + kLead < kSteps) bring(s + kLead);
      Base::template step<USED>(from, ring[s % kRing][0], ring[s % kRing][1]);
    }
    Sums sums;
    Base::template store_sums<USED>(sums);
    for (int64_t row = 0; row < count; ++row) Base::finish_pair(sums[row], pair, first_row + row);
  }
  PELTON_INLINE void run(const X* ready, const pelton_worker* worker) {
    const Range mine = share(kPairs, worker);
    Feed feed{weight};
    for (int64_t pair = mine.begin; pair < mine.end; ++pair) {
      for (int64_t row = 0; row < rows; row += kRows) {
        const int64_t count = smaller<int64_t>(rows - row, kRows);
        if (count > kTileHeight) {
          multiply<2>(ready, feed, pair, row, count);
        } else {
          multiply<1>(ready, feed, pair, row, count);
        }
      }
    }
  }
};

// With more, unpacking panels once for each two tiles of rows takes longer than bringing them to a
// buffer once.
inline constexpr int64_t kMostStreamRows = 64;

template <class C>
PELTON_INLINE void gemm_amx(void* const* args, pelton_worker* worker, int64_t rows) {
  if (rows <= 0) return;
  if (rows <= kMostStreamRows) {
    AmxStream<C> stream(args, rows);
    stream.run(stream.staged(worker), worker);
  } else {
    AmxTiles<C> tiles(args, rows);
    tiles.run(tiles.staged(worker), worker);
  }
}

}  // namespace pelton
