// x [rows, K] times a weight [N, K] in bf16, on tiles: 16 pairs of k of 16 outputs are one tile.
//
// An output's sum starts at zero and takes 32 values of k at a time, in order, whatever the shape
// of the tiles and however many of their rows are in use; the instruction itself treats each row
// alike. So few rows are tiles of few rows, and results depend on (N, K) alone.
#pragma once
#include "claims.h"
#include "gemm_amx_tiles.h"

namespace pelton {

// Few rows: the panels stream by, each step of two of them brought into a ring in the first-level
// cache shortly before it is multiplied. More than two tiles of rows are gone through two by two,
// all after the first ones with panels from L2.
template <class C>
struct AmxStream : AmxRows<C> {
  using Base = AmxRows<C>;
  using Base::finish_rows, Base::rows, Base::weight;
  using Base::kPairs, Base::kRows, Base::kStepPieces, Base::kSteps, Base::kStride, Base::kTile;
  using typename Base::Compute, typename Base::Feed, typename Base::X;
  // Steps that are brought before one is multiplied, also across pairs: a tile is not loaded as
  // soon as it is written, and memory has no pause between two pairs.
  static constexpr int64_t kLead = 2, kRing = 4;

  const X* ready;
  Feed feed{weight};
  Claims claims;  // of pairs
  Range claimed;  // what is left of the last ones
  // The feed's next step is step `at` of the first pair claimed, for the rows from `row` on.
  int64_t row = 0, at = 0;
  int64_t brought = 0, taken = 0;  // steps in all
  int64_t pair_of[kRing];          // the pair of each step in the ring
  alignas(64) Compute ring[kRing][2][kTile];

  PELTON_INLINE AmxStream(void* const* args, int64_t row_count, pelton_worker* worker)
      : Base(args, row_count),
        ready(Base::staged(worker)),
        claims(kPairs, worker),
        claimed(claims.take()) {}

  // Brings the next step, if there is one; a pair's steps come once for each two tiles of rows.
  PELTON_INLINE void bring() {
    if (claimed.begin >= claimed.end) return;
    if (at == 0) feed.begin(claimed.begin, 0);
    pair_of[brought % kRing] = claimed.begin;
    Compute(&to)[2][kTile] = ring[brought++ % kRing];
    for (int64_t i = 0; i < kStepPieces; ++i) {
      feed.take(to[0] + i * Feed::kPiece, to[1] + i * Feed::kPiece);
    }
    if (++at < kSteps) return;
    at = 0, row += kRows;
    if (row < rows) return;
    row = 0;
    if (++claimed.begin >= claimed.end) claimed = claims.take();
  }
  // `count` rows from first_row on, USED tiles of them.
  template <int USED>
  __attribute__((noinline)) void multiply(int64_t of_pair, int64_t first_row, int64_t count) {
    this->shape(count);
    Base::template clear_sums<USED>();
    const X* from = ready + first_row * kStride;
    for (int64_t s = 0; s < kSteps; ++s, from += kTileBf16Depth) {
      bring();
      const Compute(&panels)[2][kTile] = ring[taken++ % kRing];
      Base::template step<USED>(from, panels[0], panels[1]);
      // Of the tile before. All at once, unlike beside many rows (gemm_amx_tiles.h): the lines that
      // they go to come from far away, and are waited for together.
      if (s == 0) finish_rows(kRows);
    }
    Base::template leave_sums<USED>(of_pair, first_row, count);
  }
  PELTON_INLINE void run() {
    for (int64_t i = 0; i < kLead; ++i) bring();
    while (taken < brought) {
      const int64_t pair = pair_of[taken % kRing];
      for (int64_t first = 0; first < rows; first += kRows) {
        const int64_t count = smaller<int64_t>(rows - first, kRows);
        if (count > kTileHeight) {
          multiply<2>(pair, first, count);
        } else {
          multiply<1>(pair, first, count);
        }
      }
    }
    finish_rows(kRows);
  }
};

// With more, unpacking panels once for each two tiles of rows takes longer than bringing them to a
// buffer once.
inline constexpr int64_t kMostStreamRows = 64;

template <class C>
PELTON_INLINE void gemm_amx(void* const* args, pelton_worker* worker, int64_t rows) {
  if (rows <= 0) return;
  if (rows <= kMostStreamRows) {
    AmxStream<C> stream(args, rows, worker);
    stream.run();
  } else {
    AmxTiles<C> tiles(args, rows);
    tiles.run(tiles.staged(worker), worker);
  }
}

}  // namespace pelton
