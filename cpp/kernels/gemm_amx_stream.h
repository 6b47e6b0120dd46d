// Few rows on tiles: the panels stream by, each step of two of them brought into a ring in the
// first-level cache shortly before it is multiplied.
#pragma once
#include "claims.h"
#include "gemm_amx_step.h"

namespace pelton {

// PARTS = 1: up to 32 rows, whose sums have registers. 2: twice as many, in two parts that take
// turns, so that each step is brought once and is still near when the second part wants it. PAST:
// rows go past the first-level cache.
template <class C, int PARTS, bool PAST = false>
struct AmxStream : AmxRows<C> {
  using Base = AmxRows<C>;
  using Base::finish_pair, Base::rows, Base::weight;
  using Base::kPairs, Base::kRows, Base::kStepPieces, Base::kSteps, Base::kStride, Base::kTile;
  using typename Base::Compute, typename Base::Feed, typename Base::Sums, typename Base::X;
  static constexpr int64_t kMostRows = PARTS * kRows;
  // Steps of a turn. Short ones: what is brought meanwhile and the sums of both parts must stay in
  // the first-level cache while rows pass through it (or past it).
  static constexpr int64_t kTurn = PARTS == 1 ? kSteps : smaller<int64_t>(4, kSteps);
  // Steps that are brought before one is multiplied, also across pairs: a tile is not loaded as
  // soon as it is written, every part finds the steps of its turn, and memory has no pause.
  static constexpr int64_t kLead = PARTS == 1 ? 2 : kTurn, kRing = 2 * kLead;
  static constexpr int64_t kBeside = kStepPieces / PARTS;  // pieces brought beside a step of a part
  static_assert(kStepPieces % PARTS == 0);

  const X* ready;
  int64_t part_rows;  // with an odd number of rows, both of two parts have the one in the middle
  Feed feed{weight};
  Claims claims;  // of pairs
  Range claimed;  // what is left of the last ones
  // Next comes part `part_of_step` of PARTS of step `at` of the first pair claimed.
  int64_t at = 0, part_of_step = 0;
  int64_t brought = 0, taken = 0;  // steps in all
  int64_t pair_of[kRing];          // the pair of each step in the ring
  int64_t done_pair = -1;          // the last one multiplied, whose outputs are to be finished
  alignas(64) Compute ring[kRing][2][kTile];
  Sums sums[PARTS];

  PELTON_INLINE AmxStream(void* const* args, int64_t row_count, pelton_worker* worker)
      : Base(args, row_count),
        ready(Base::staged(worker)),
        part_rows(divide_up(row_count, PARTS)),
        claims(kPairs, worker),
        claimed(claims.take()) {}

  PELTON_INLINE int64_t first_row(int part) const { return part == 0 ? 0 : rows - part_rows; }

  // Brings part of the next step, if there is one.
  PELTON_INLINE void bring() {
    if (claimed.begin >= claimed.end) return;
    const int64_t slot = brought % kRing, first = PARTS == 1 ? 0 : part_of_step * kBeside;
    if (first == 0) {
      if (at == 0) feed.begin(claimed.begin, 0);
      pair_of[slot] = claimed.begin;
    }
    for (int64_t i = first; i < first + kBeside; ++i) {
      feed.take(ring[slot][0] + i * Feed::kPiece, ring[slot][1] + i * Feed::kPiece);
    }
    if (PARTS > 1 && ++part_of_step < PARTS) return;
    part_of_step = 0, ++brought;
    if (++at < kSteps) return;
    at = 0;
    if (++claimed.begin >= claimed.end) claimed = claims.take();
  }

  // One turn of a part: `count` steps of k from `from` on, USED tiles of rows.
  template <int USED>
  __attribute__((noinline)) void multiply(int part, int64_t from, int64_t count) {
    const X* row = ready + first_row(part) * kStride + from * kTileBf16Depth;
    if (from == 0) {
      Base::template clear_sums<USED>();
    } else {
      Base::template load_sums<USED>(sums[part]);
    }
    for (int64_t s = 0; s < count; ++s, row += kTileBf16Depth) {
      if (PARTS == 1) bring();
      const Compute(&panels)[2][kTile] = ring[(taken + s) % kRing];
      Base::template step<USED, PAST>(row, panels[0], panels[1]);
      if (PARTS > 1) bring();
      // Of the pair before. All at once, unlike beside many rows (gemm_amx_tiles.h): the lines that
      // they go to come from far away, and are waited for together.
      if (from == 0 && s == 0) finish(part);
    }
    Base::template store_sums<USED>(sums[part]);
  }

  PELTON_INLINE void finish(int part) const {
    if (done_pair < 0) return;
    const int64_t first = first_row(part);
    for (int64_t row = part == 0 ? 0 : part_rows; row < first + part_rows; ++row) {
      finish_pair(sums[part][row - first], done_pair, row);
    }
  }

  PELTON_INLINE void run() {
    this->shape(part_rows);
    for (int64_t i = 0; i < kLead * PARTS; ++i) bring();
    while (taken < brought) {
      const int64_t pair = pair_of[taken % kRing];
      for (int64_t from = 0; from < kSteps; from += kTurn) {
        const int64_t count = smaller(kTurn, kSteps - from);
        for (int part = 0; part < PARTS; ++part) {
          if (PARTS > 1 || part_rows > kTileHeight) {
            multiply<2>(part, from, count);
          } else {
            multiply<1>(part, from, count);
          }
        }
        taken += count;
      }
      done_pair = pair;
    }
    for (int part = 0; part < PARTS; ++part) finish(part);
  }
};

}  // namespace pelton
