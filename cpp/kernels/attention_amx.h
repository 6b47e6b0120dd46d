// Scores and mixed values of attention on tiles: rows are a few queries' heads, a panel of 16 keys
// is a tile for each 32 values of a head, and 32 keys' values are one for each 16.
//
// A score takes 32 values of a head at a time, an output 32 keys, in order: fixed by the grid of
// attention.h, whatever the tile's rows. Keys and values outside a query's range are left out of
// scores, or are zeros in a copy.
#pragma once
#include "amx.h"
#include "kv.h"
#include "work.h"

namespace pelton {

// C as in attention_tile.h.
template <class C, int STEP_KEYS>
struct AmxKeys {
  using Place = KvPlace<C>;
  using Layout = typename Place::Layout;
  using Kv = typename C::Kv;
  static constexpr int kDim = C::kDim, kTokens = static_cast<int>(C::kTokens);
  static constexpr int kPanels = STEP_KEYS / kLanes, kHalves = STEP_KEYS / kTileBf16Depth;
  static constexpr int kDepth = divide_up(kDim, kTileBf16Depth);  // steps of a head
  static constexpr int kChunks = divide_up(kDim, kLanes);         // of a head's values
  static constexpr bool kWholeKeys = kDim % kTileBf16Depth == 0;
  static constexpr bool kWholeValues = kDim % kLanes == 0 && kTokens % kTileBf16Depth == 0;
  static constexpr int kPairs = kTileBf16Depth / 2;     // of keys in a half
  static constexpr int kCopied = kChunks * kLanes * 2;  // elements of a pair of keys, padded

  const Kv* key[kPanels];
  const Kv* value[kHalves];
  int64_t value_bytes[kHalves];  // from a pair of keys to the next
  alignas(64) Kv keys[kWholeKeys ? 1 : kPanels][kDepth * kTileBf16Depth * kLanes];
  alignas(64) Kv values[kHalves][kPairs * kCopied];

  // Find keys first..last, counted within the step at `base`.
  PELTON_INLINE void find_keys(const pelton_step* step, Kv* state, int64_t sequence, int kv_head,
                               int base, int first, int last) {
    for (int p = first / kLanes; p <= last / kLanes; ++p) {
      const int at = base + p * kLanes;
      const Kv* block = Place::block(step, state, sequence, at);
      key[p] = block + Layout::k_index(kTokens, kDim, kv_head, at % kTokens, 0);
      if constexpr (!kWholeKeys) {
        // A vector is a pair of values of 16 keys.
        for (int d = 0; d < kDepth * kTileBf16Depth; d += 2) {
          const I32 pair = d < kDim
                               ? load_int(reinterpret_cast<const int32_t*>(key[p] + d * kLanes))
                               : splat_int(0);
          store_int(reinterpret_cast<int32_t*>(keys[p] + d * kLanes), pair);
        }
        key[p] = keys[p];
      }
    }
  }
  // Find the values of keys first..last.
  PELTON_INLINE void find_values(const pelton_step* step, Kv* state, int64_t sequence, int kv_head,
                                 int base, int first, int last) {
    last_ = last;
    for (int h = first / kTileBf16Depth; h <= last / kTileBf16Depth; ++h) {
      const int at = base + h * kTileBf16Depth;
      value_bytes[h] = kDim * 2 * sizeof(Kv);
      if (kWholeValues && first <= h * kTileBf16Depth && last >= (h + 1) * kTileBf16Depth - 1) {
        value[h] = value_of(step, state, sequence, kv_head, at);
        continue;
      }
      for (int pair = 0; pair < kPairs; ++pair) {
        const int key_at = h * kTileBf16Depth + 2 * pair;
        const bool even = first <= key_at && key_at <= last;
        const bool odd = first <= key_at + 1 && key_at + 1 <= last;
        const Kv* from = nullptr;
        if (even || odd) from = value_of(step, state, sequence, kv_head, base + key_at);
        copy_pair(from, even, odd, values[h] + pair * kCopied);
      }
      use_copy(h);
    }
  }
  // Of the values that were found those of keys after `last` count no more.
  PELTON_INLINE void end_at(int last) {
    for (; last_ > last; --last_) {
      const int h = last_ / kTileBf16Depth, pair = last_ % kTileBf16Depth / 2;
      Kv* to = values[h] + pair * kCopied;
      if (value[h] != values[h]) {
        for (int i = 0; i < kPairs; ++i) {
          copy_pair(value[h] + i * kDim * 2, true, true, values[h] + i * kCopied);
        }
        use_copy(h);
      }
      copy_pair(to, last_ % 2 == 1, false, to);
    }
  }

 private:
  int last_;  // of the keys whose values count

  static PELTON_INLINE const Kv* value_of(const pelton_step* step, Kv* state, int64_t sequence,
                                          int kv_head, int position) {
    return Place::block(step, state, sequence, position) +
           Layout::v_index(C::kKvHeads, kTokens, kDim, kv_head, position % kTokens, 0);
  }
  PELTON_INLINE void use_copy(int half) {
    value[half] = values[half];
    value_bytes[half] = kCopied * sizeof(Kv);
  }
  // Values of two keys, those that count; the rest are zeros.
  static PELTON_INLINE void copy_pair(const Kv* from, bool even, bool odd, Kv* to) {
    const I32 mask = splat_int(static_cast<int32_t>((even ? 0xffffu : 0u) | (odd ? ~0xffffu : 0u)));
    for (int d = 0; d < kDim; d += kLanes) {
      alignas(64) Kv some[2 * kLanes] = {};
      const Kv* at = from == nullptr ? some : from + 2 * d;
      if (from != nullptr && kDim - d < kLanes) {
        for (int i = 0; i < 2 * (kDim - d); ++i) some[i] = from[2 * d + i];
        at = some;
      }
      store_int(reinterpret_cast<int32_t*>(to + 2 * d),
                load_int(reinterpret_cast<const int32_t*>(at)) & mask);
    }
  }
};

// `rows` rows from `row` on in blocks of about equal size, each at most a tile's.
struct RowBlocks {
  int row, total, count, size;
  PELTON_INLINE RowBlocks(int row, int rows)
      : row(row),
        total(rows),
        count(static_cast<int>(divide_up(rows, kTileHeight))),
        size(static_cast<int>(divide_up(rows, count))) {}
  PELTON_INLINE int first(int block) const { return row + block * size; }
  PELTON_INLINE int rows(int block) const { return smaller(size, total - block * size); }
};

// Registers: four tiles of sums, one of rows, two of keys or values in turns.
struct AmxAttention {
  static constexpr int kSums = 4, kRowTile = 4, kOther = 5;
  LiveTiles tiles;

  PELTON_INLINE void shape(int64_t rows) {
    tiles.shape(rows, [&](TileConfig& config) {
      for (int t = 0; t <= kRowTile; ++t) config.shape(t, rows);
      for (int t = 0; t < 2; ++t) config.shape(kOther + t, kTileHeight);
    });
  }
  PELTON_INLINE void release() { tiles.release(); }

  // scores[row][key] of `rows` rows with PANELS panels. beside(turn) is called after each product.
  template <int PANELS, int DEPTH, class Kv, class Beside>
  PELTON_INLINE void score(const Kv* query, int64_t query_bytes, const Kv* const* key,
                           float* scores, int64_t score_bytes, int rows, const Beside& beside) {
    shape(rows);
    each<PANELS>([]<int P>() { tile_zero<P>(); });
    for (int d = 0; d < DEPTH; ++d) {
      tile_load<kRowTile>(query + d * kTileBf16Depth, query_bytes);
      each<PANELS>([&]<int P>() {
        constexpr int64_t kBytes = kTileHeight * kTileRowBytes;
        tile_load<kOther + P % 2>(reinterpret_cast<const char*>(key[P]) + d * kBytes,
                                  kTileRowBytes);
        tile_dot_bf16<P, kRowTile, kOther + P % 2>();
        beside(d * PANELS + P);
      });
    }
    each<PANELS>([&]<int P>() { tile_store<P>(scores + P * kLanes, score_bytes); });
  }

  // out[row] += weights[row] . values for CHUNKS times 16 values of a head, from `chunk` on, and
  // the halves of the step from..to.
  template <int CHUNKS, class Keys, class Kv, class Beside>
  PELTON_INLINE void mix(const Kv* weights, int64_t weight_bytes, const Keys& keys, int from,
                         int to, int chunk, float* out, int64_t out_bytes, int rows,
                         const Beside& beside) {
    shape(rows);
    each<CHUNKS>([&]<int I>() { tile_load<I>(out + (chunk + I) * kLanes, out_bytes); });
    for (int h = from; h <= to; ++h) {
      tile_load<kRowTile>(weights + h * kTileBf16Depth, weight_bytes);
      each<CHUNKS>([&]<int I>() {
        tile_load<kOther + I % 2>(
            reinterpret_cast<const char*>(keys.value[h]) + (chunk + I) * kTileRowBytes,
            keys.value_bytes[h]);
        tile_dot_bf16<I, kRowTile, kOther + I % 2>();
        beside(h * Keys::kChunks + chunk + I);
      });
    }
    each<CHUNKS>([&]<int I>() { tile_store<I>(out + (chunk + I) * kLanes, out_bytes); });
  }
};

}  // namespace pelton
