// Attention of packed tokens over paged keys and values, in one pass with a running softmax.
//
// Keys lie on an absolute grid from position 0: panels of 16, steps of 64, splits of 256. A query
// visits its steps in order; maximum, sum and output start anew at each split, and splits are
// merged in order. So a query's arithmetic is fixed by its position and the window alone: not by
// the tile it is in, the chunk, its mates, or which worker does which split. Keys and values
// outside a query's range are never part of its arithmetic, not even times zero.
#pragma once
#include "attention_tile.h"
#include "claims.h"

namespace pelton {

template <class C>
struct Attention {
  using Tile = AttentionTile<C>;
  using Out = typename C::Out;
  static constexpr int kPieces = C::kKvHeads * Tile::kHeadTiles;  // per query
  static constexpr int kWidth = Tile::Softmax::kWidth;
  static constexpr int64_t kPartFloats = kLanes + kWidth;  // max, sum, padding, output

  const pelton_step* step;
  const typename C::Compute* q;
  Out* out;
  float* scratch;
  Tile* tile;

  static PELTON_INLINE int first_split(int position) {
    return Tile::first_key(position) / kSplitKeys;
  }
  PELTON_INLINE int splits_of(int64_t token) const {
    const int position = step->positions[token];
    return position / kSplitKeys - first_split(position) + 1;
  }
  PELTON_INLINE Out* out_row(int64_t token, int head) const {
    return out + (token * C::kHeads + head) * C::kDim;
  }

  PELTON_INLINE void whole_tile(int64_t token, int count, int which) const {
    tile->begin(q, token, count, which);
    const int from = first_split(tile->position), to = (tile->position + count - 1) / kSplitKeys;
    for (int split = from; split <= to; ++split) {
      if (split != from) tile->softmax.clear_part(tile->rows());
      tile->attend_split(split);
      tile->softmax.merge_part(tile->rows());
    }
    for (int r = 0; r < tile->rows(); ++r) {
      tile->softmax.finish(r, out_row(token + r / tile->heads, tile->head + r % tile->heads));
    }
  }

  // Tiles of queries, in order of head, sequence and token: workers begin with heads of their own,
  // each with its long sequences and its short ones, and claim tile by tile.
  PELTON_INLINE void by_tiles(pelton_worker* worker) const {
    int64_t tiles = 0;  // of a head
    for (int s = 0; s < step->num_seqs; ++s) tiles += tiles_of(s);
    Claims claims(tiles * kPieces, worker, 1, 1);
    struct {
      int64_t token;
      int count, which;
    } last = {0, 0, 0};
    int64_t before = 0;  // tiles before those of sequence s
    int s = 0;
    for (Range mine = claims.take(); mine.begin < mine.end; mine = claims.take()) {
      for (int64_t i = mine.begin; i < mine.end; ++i) {
        const int64_t at = i % tiles;
        if (at < before) s = 0, before = 0;
        while (at >= before + tiles_of(s)) before += tiles_of(s++);
        const int64_t token = step->query_start[s] + (at - before) * Tile::kTileQueries;
        const int count = smaller<int>(Tile::kTileQueries, step->query_start[s + 1] - token);
        const int which = static_cast<int>(i / tiles);
        // Done one late: so that a tile knows what comes after it.
        if (last.count > 0) {
          tile->after = tile->keys_of(token, count, which);
          whole_tile(last.token, last.count, last.which);
          tile->before = tile->keys_of(last.token, last.count, last.which);
        }
        last = {token, count, which};
      }
    }
    tile->after = {};
    if (last.count > 0) whole_tile(last.token, last.count, last.which);
  }
  PELTON_INLINE int64_t tiles_of(int seq) const {
    return divide_up(step->query_start[seq + 1] - step->query_start[seq], Tile::kTileQueries);
  }

  // A split of one query's keys at a time: partial results go through scratch, then are merged in
  // order. For few queries over many keys.
  PELTON_INLINE void by_splits(pelton_worker* worker, int64_t parts) const {
    const Range mine = share(parts * kPieces, worker);
    int64_t before = 0;
    for (int64_t t = 0; t < step->num_tokens; ++t) {
      const int from = first_split(step->positions[t]), count = splits_of(t);
      for (int which = 0; which < kPieces; ++which) {
        for (int i = 0; i < count; ++i, ++before) {
          if (before < mine.begin || before >= mine.end) continue;
          tile->begin(q, t, 1, which);
          tile->attend_split(from + i);
          float* to = part_of(before);
          for (int r = 0; r < tile->rows(); ++r, to += kPartFloats) {
            to[0] = tile->softmax.part_max[r];
            to[1] = tile->softmax.part_total(r);
            for (int d = 0; d < kWidth; d += kLanes) {
              store(to + kLanes + d, load(tile->softmax.part_out[r] + d));
            }
          }
        }
      }
    }
    if constexpr (C::kTiles) tile->tiles.release();  // no thread waits with live tiles
    meet(worker);
    merge_splits(worker);
  }
  PELTON_INLINE float* part_of(int64_t part) const {
    return scratch + part * Tile::kTileHeads * kPartFloats;
  }
  PELTON_INLINE void merge_splits(const pelton_worker* worker) const {
    const Range mine = share(int64_t{step->num_tokens} * kPieces, worker);
    int64_t part = 0;
    for (int64_t t = 0; t < step->num_tokens; ++t) {
      const int count = splits_of(t);
      for (int which = 0; which < kPieces; ++which, part += count) {
        const int64_t index = t * kPieces + which;
        if (index >= mine.begin && index < mine.end) merge_rows(t, which, part, count);
      }
    }
  }
  PELTON_INLINE void merge_rows(int64_t token, int which, int64_t part, int count) const {
    const int skipped = which % Tile::kHeadTiles * Tile::kTileHeads;
    const int head = which / Tile::kHeadTiles * Tile::kHeadsPerKv + skipped;
    const int heads = smaller<int>(Tile::kTileHeads, Tile::kHeadsPerKv - skipped);
    auto& softmax = tile->softmax;
    softmax.clear_total(heads);
    alignas(64) float maxima[Tile::Softmax::kRoom] = {}, sums[Tile::Softmax::kRoom] = {};
    for (int i = 0; i < count; ++i) {
      const float* from = part_of(part + i);
      for (int h = 0; h < heads; ++h) {
        maxima[h] = from[h * kPartFloats];
        sums[h] = from[h * kPartFloats + 1];
      }
      softmax.merge(heads, maxima, sums, [&](int h) { return from + h * kPartFloats + kLanes; });
    }
    for (int h = 0; h < heads; ++h) softmax.finish(h, out_row(token, head + h));
  }

  PELTON_INLINE void operator()(pelton_worker* worker) const {
    if (step->num_tokens == 0) return;
    if (worker->count > 1 && step->num_tokens * kPieces < 4 * worker->count) {
      int64_t parts = 0;
      for (int64_t t = 0; t < step->num_tokens; ++t) parts += splits_of(t);
      if (parts > step->num_tokens && parts <= C::kParts) return by_splits(worker, parts);
    }
    by_tiles(worker);
  }
};

// args: q, (token), out, state, scratch. The tile lives on the worker's stack: about 250 KB at
// head_dim 256, and 64 KB for copies of keys and values where it works on AMX tiles.
template <class C>
PELTON_INLINE void paged_attention(const pelton_step* step, void* const* args,
                                   pelton_worker* worker) {
  AttentionTile<C> tile;
  tile.step = step;
  tile.state = static_cast<typename C::Kv*>(args[3]);
  Attention<C>{step, static_cast<const typename C::Compute*>(args[0]),
               static_cast<typename C::Out*>(args[2]), static_cast<float*>(args[4]), &tile}(worker);
}

}  // namespace pelton
