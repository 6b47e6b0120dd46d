// A tile of attention rows (some queries of some heads of one kv head) and what it does with keys
// and values: find them, score, weigh, mix, merge. See attention.h for the grid they lie on.
#pragma once
#include "attention_amx.h"
#include "attention_keys.h"
#include "attention_softmax.h"

namespace pelton {

inline constexpr int kSplitKeys = 256;

// C: Compute (type of q), Kv, Out; kHeads, kKvHeads, kDim, kTokens, kGroup (block table), kWindow
// (0 = none), kScale > 0, kSoftcap (0 = none), kParts (partial results that scratch can hold),
// kTiles (products on tiles, else in vectors); and the tactic, which changes no result: kTileHeads
// x kTileQueries rows make a tile, of which blocks of kBlockRows (kHeadRows where few are left) x
// kBlockPanels are in registers at a time.
template <class C>
struct AttentionTile {
  using Keys = AttentionKeys<C>;
  using Kv = typename C::Kv;
  using Dot = typename DotFor<Kv, Keys::kPair == 2, typename C::Compute>::Type;
  using X = typename Dot::X;
  static constexpr int kPair = Keys::kPair;
  static constexpr int kDim = C::kDim;
  static constexpr int kChunks = Keys::kChunks;
  static constexpr int kPanels = Keys::kPanels;
  static constexpr int kHeadsPerKv = C::kHeads / C::kKvHeads;
  static constexpr int kTileHeads = C::kTileHeads;
  static constexpr int kHeadTiles = divide_up(kHeadsPerKv, kTileHeads);
  static constexpr int kTileQueries = C::kTileQueries;
  static constexpr int kTileRows = kTileHeads * kTileQueries;
  static constexpr int kQueryWidth = round_up(kDim, C::kTiles ? kTileBf16Depth : kLanes);

  using Softmax = RunningSoftmax<C, Dot, kTileRows>;

  struct NoTiles {};
  [[no_unique_address]] typename Choose<AmxAttention, NoTiles, C::kTiles>::Type tiles;
  const pelton_step* step;
  Kv* state;
  int64_t sequence, token;  // the first query's token
  int position;             // and its position; further queries follow
  int queries, heads;       // rows = queries x heads, heads fastest
  int head, kv_head;        // the first query head
  alignas(64) X query[kTileRows][kQueryWidth];
  Softmax softmax;

  static PELTON_INLINE int first_key(int query_position) {
    return C::kWindow == 0 ? 0 : larger<int>(0, query_position - static_cast<int>(C::kWindow) + 1);
  }
  PELTON_INLINE int rows() const { return queries * heads; }

  // Load the queries (`which` counts kv heads and tiles of their heads) and forget earlier results.
  PELTON_INLINE void begin(const typename C::Compute* q, int64_t first_token, int count,
                           int which) {
    token = first_token;
    queries = count;
    position = step->positions[token];
    sequence = step->token_seq[token];
    kv_head = which / kHeadTiles;
    const int skipped = which % kHeadTiles * kTileHeads;
    head = kv_head * kHeadsPerKv + skipped;
    heads = smaller<int>(kTileHeads, kHeadsPerKv - skipped);
    for (int r = 0; r < rows(); ++r) {
      const auto* from = q + ((token + r / heads) * C::kHeads + head + r % heads) * kDim;
      for (int d = 0; d < kDim; d += kLanes) {
        const int n = smaller<int>(kDim - d, kLanes);
        store_n(query[r] + d, load_n(from + d, n), n);
      }
      for (int d = kDim; d < kQueryWidth; ++d) query[r][d] = X{};
    }
    softmax.clear_part(rows());
    softmax.clear_total(rows());
  }

  // The keys of the tiles that this worker does before and after this one; by default none.
  struct KeyRange {
    int64_t sequence = 0;
    int kv_head = 0, first = 0, last = -1;
  } before, after;
  PELTON_INLINE KeyRange keys_of(int64_t first_token, int count, int which) const {
    const int from = step->positions[first_token];
    return {step->token_seq[first_token], which / kHeadTiles,
            first_key(from) / kStepKeys * kStepKeys, from + count - 1};
  }
  PELTON_INLINE bool has_keys_of(const KeyRange& other) const {
    return other.last >= 0 && other.sequence == sequence && other.kv_head == kv_head;
  }

  // Where the keys and values of the next step lie, behind the last ones those of the next tile:
  // read ahead while this step is computed. (Null blocks and no keys at all: of no use, no harm.)
  struct Ahead {
    const char* key[kPanels];
    const char* value[kPanels];
  };
  // False if that is of no use: the tile before has left them in the second-level cache (tiles of
  // AMX mind it; vectors always read ahead).
  PELTON_INLINE bool look(Ahead& ahead, int base) const {
    using Layout = typename Keys::Place::Layout;
    const int last = position + queries - 1;
    for (int p = 0; p < kPanels; ++p) {
      int64_t where = sequence;
      int at = base + p * kLanes, of = kv_head;
      if (at > last) {
        const int key = after.first + at - round_up(last + 1, kLanes);
        if (key <= after.last) {
          where = after.sequence;
          of = after.kv_head;
        }
        at = key <= after.last ? key : last;
      }
      const int slot = at % static_cast<int>(C::kTokens) / kLanes * kLanes;
      const Kv* block = Keys::Place::block(step, state, where, at);
      const int64_t k = Layout::k_index(C::kTokens, kDim, of, slot, 0);
      const int64_t v = Layout::v_index(C::kKvHeads, C::kTokens, kDim, of, slot, 0);
      ahead.key[p] = reinterpret_cast<const char*>(block + k);
      ahead.value[p] = reinterpret_cast<const char*>(block + v);
    }
    // Half of a core's second-level cache, where there are tiles.
    constexpr int kNear = (1 << 20) / (2 * kDim * static_cast<int>(sizeof(Kv)));  // keys
    const bool own_are_near =
        base > last || (has_keys_of(before) && base <= before.last && last - before.first < kNear);
    const bool next_are_near =
        base + kStepKeys - 1 <= last || (has_keys_of(after) && last - after.first < kNear);
    return !own_are_near || !next_are_near;
  }

  template <int M>
  PELTON_INLINE void block_rows(const X* base, int64_t stride, int first, int count,
                                const X* (&x)[M]) const {
    for (int m = 0; m < M; ++m) x[m] = base + (first + smaller(m, count - 1)) * stride;
  }

  // Raw scores of rows row..row+count-1 with panels from..to.
  template <int M, int P>
  PELTON_INLINE void score_panels(const Keys& keys, const Ahead& ahead, int first, int row,
                                  int count) {
    const X* x[M];
    block_rows<M>(query[0], kQueryWidth, row, count, x);
    const Kv* key[P];
    const char* next[P];
    for (int p = 0; p < P; ++p) {
      key[p] = keys.key[first + p];
      next[p] = ahead.key[first + p];
    }
    F32 acc[M][P];
    clear(acc);
    dot_block<Dot, kLanes * Dot::kStep>(x, key, kDim / Dot::kStep, acc, next);
    for (int m = 0; m < count; ++m) {
      for (int p = 0; p < P; ++p) store(softmax.scores[row + m] + (first + p) * kLanes, acc[m][p]);
    }
  }
  template <int M>
  __attribute__((noinline)) void score(const Keys& keys, const Ahead& ahead, int from, int to,
                                       int row, int count) {
    constexpr int P = smaller<int>(C::kBlockPanels, kPanels);
    int p = from;
    for (; p + P - 1 <= to; p += P) score_panels<M, P>(keys, ahead, p, row, count);
    for (; p <= to; ++p) score_panels<M, 1>(keys, ahead, p, row, count);
  }

  // Outputs CHUNK.. of M rows += weights times values.
  template <int M, int CHUNK>
  PELTON_INLINE void mix_chunks(const Keys& keys, const Ahead& ahead, int row, int count) {
    if constexpr (CHUNK < kChunks) {
      constexpr int P = smaller<int>(C::kBlockPanels, kChunks - CHUNK);
      F32 acc[M][P];
      for (int m = 0; m < M; ++m) {
        const float* out = softmax.part_out[row + smaller(m, count - 1)] + CHUNK * kLanes;
        for (int c = 0; c < P; ++c) acc[m][c] = load(out + c * kLanes);
      }
      for (int i = 0; i < keys.runs; ++i) {
        const typename Keys::Run& run = keys.run[i];
        const X* x[M];
        block_rows<M>(softmax.weights[0] + run.key, kStepKeys, row, count, x);
        const Kv* value[P];
        const char* next[P];
        for (int c = 0; c < P; ++c) {
          value[c] = run.value + (CHUNK + c) * kLanes * kPair;
          next[c] = ahead.value[run.key / kLanes] + (CHUNK + c) * kLanes * kPair * sizeof(Kv);
        }
        dot_block<Dot, kDim * kPair>(x, value, run.steps, acc, next);
      }
      for (int m = 0; m < count; ++m) {
        for (int c = 0; c < P; ++c)
          store(softmax.part_out[row + m] + (CHUNK + c) * kLanes, acc[m][c]);
      }
      mix_chunks<M, CHUNK + P>(keys, ahead, row, count);
    } else if constexpr (Keys::kTail != 0) {
      F32 acc[M][1];
      for (int m = 0; m < M; ++m) {
        acc[m][0] = load(softmax.part_out[row + smaller(m, count - 1)] + kChunks * kLanes);
      }
      for (int i = 0; i < keys.runs; ++i) {
        const X* x[M];
        block_rows<M>(softmax.weights[0] + keys.run[i].key, kStepKeys, row, count, x);
        const Kv* tail[1] = {keys.run[i].tail};
        dot_block<Dot, kLanes * kPair>(x, tail, keys.run[i].steps, acc);
      }
      for (int m = 0; m < count; ++m)
        store(softmax.part_out[row + m] + kChunks * kLanes, acc[m][0]);
    }
  }
  template <int M>
  __attribute__((noinline)) void mix(const Keys& keys, const Ahead& ahead, int row, int count) {
    mix_chunks<M, 0>(keys, ahead, row, count);
  }

  // The same on tiles.
  using TileKeys = AmxKeys<C, kStepKeys>;
  template <class Beside>
  PELTON_INLINE void score_on_tiles(const TileKeys& keys, int from, int to, int row, int count,
                                    const Beside& beside) {
    const auto of = [&]<int PANELS>(int p) {
      tiles.template score<PANELS, TileKeys::kDepth>(query[row], sizeof query[0], keys.key + p,
                                                     softmax.scores[row] + p * kLanes,
                                                     sizeof softmax.scores[0], count, beside);
    };
    if (to - from == kPanels - 1) return of.template operator()<kPanels>(0);
    for (int p = from; p <= to; ++p) of.template operator()<1>(p);
  }
  template <int CHUNK = 0, class Beside>
  PELTON_INLINE void mix_on_tiles(const TileKeys& keys, int from, int to, int row, int count,
                                  const Beside& beside) {
    if constexpr (CHUNK < TileKeys::kChunks) {
      constexpr int kNow = smaller(AmxAttention::kSums, TileKeys::kChunks - CHUNK);
      tiles.template mix<kNow>(softmax.weights[row], sizeof softmax.weights[0], keys, from, to,
                               CHUNK, softmax.part_out[row], sizeof softmax.part_out[0], count,
                               beside);
      mix_on_tiles<CHUNK + kNow>(keys, from, to, row, count, beside);
    }
  }
  // Reads ahead beside products, after each of them the next few lines of the keys and values of
  // every second panel from FIRST on (the same lines again beside each single panel's scores, where
  // a step has few keys). The hardware, too, reads ahead of places that are read in order, but
  // falls behind if lines of one place are asked for in a burst. (No lambda: g++ takes calls of a
  // function that only prefetches for calls without effect.)
  template <int FIRST>
  struct Fetch {
    const Ahead* ahead;  // null: there is nothing to read
    static constexpr int64_t kBytes = 256, kPanelBytes = kDim * kLanes * sizeof(Kv);
    static constexpr int kTurns = divide_up(kPanelBytes, kBytes);

    PELTON_INLINE void operator()(int turn) const {
      if (ahead == nullptr || turn >= kTurns) return;
      for (int p = FIRST; p < kPanels; p += 2) lines(ahead->key[p] + turn * kBytes);
      for (int p = FIRST; p < kPanels; p += 2) lines(ahead->value[p] + turn * kBytes);
    }
    static PELTON_INLINE void lines(const char* from) {
      for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(from + at, 0, 2);
    }
  };

  // work.template operator()<M>(row, rows) for blocks of rows row..row+count-1; the last may have
  // fewer than M rows.
  template <class Work>
  static PELTON_INLINE void in_blocks(int row, int count, const Work& work) {
    while (count > 0) {
      int now = smaller<int>(C::kBlockRows, count);
      if (count >= C::kBlockRows || count > C::kHeadRows) {
        work.template operator()<C::kBlockRows>(row, now);
      } else if (count > 1) {
        work.template operator()<C::kHeadRows>(row, now);
      } else {
        work.template operator()<1>(row, now);
      }
      row += now;
      count -= now;
    }
  }

  // Rows row..row+count-1 attend to keys first..last of the step at `base`.
  PELTON_INLINE void attend(const Ahead& ahead, int base, int first, int last, int row, int count) {
    Keys keys;
    keys.find(step, state, sequence, kv_head, base, first, last);
    in_blocks(row, count, [&]<int M>(int r, int n) {
      score<M>(keys, ahead, first / kLanes, last / kLanes, r, n);
    });
    const typename Softmax::Span span = {first, last};
    for (int done = 0; done < count; done += kLanes) {
      const int now = smaller<int>(kLanes, count - done);
      if (first == 0 && last == kStepKeys - 1) {
        softmax.template weigh<true>(row + done, now, [](int) { return typename Softmax::Span{}; });
      } else {
        softmax.template weigh<false>(row + done, now, [&](int) { return span; });
      }
    }
    in_blocks(row, count, [&]<int M>(int r, int n) { mix<M>(keys, ahead, r, n); });
  }

  // All rows attend to their keys of the step at `base`, on tiles. FULL: to all of them.
  static_assert(!C::kTiles || __is_same(X, bf16));
  template <bool FULL>
  __attribute__((noinline)) void attend_on_tiles(const Ahead* ahead, int base) {
    typename Softmax::Span spans[kTileQueries];
    for (int q = 0; q < queries; ++q) {
      spans[q] = {larger(first_key(position + q) - base, 0),
                  smaller(position + q - base, kStepKeys - 1)};
    }
    const int from = FULL ? 0 : larger(base - position, 0);  // queries before it have no key here
    const int first = spans[from].first, last = spans[queries - 1].last;
    TileKeys keys;
    keys.find_keys(step, state, sequence, kv_head, base, first, last);
    // Where no window begins in this step; else each query has values of its own.
    const bool same_first = spans[queries - 1].first == 0;
    if (same_first) keys.find_values(step, state, sequence, kv_head, base, first, last);
    const RowBlocks blocks(from * heads, (queries - from) * heads);
    for (int b = 0; b < blocks.count; ++b) {
      score_on_tiles(keys, first / kLanes, last / kLanes, blocks.first(b), blocks.rows(b),
                     Fetch<0>{b == 0 ? ahead : nullptr});
    }
    for (int b = 0; b < blocks.count; ++b) {
      softmax.template weigh<FULL>(blocks.first(b), blocks.rows(b),
                                   [&](int row) { return spans[row / heads]; });
    }
    if constexpr (FULL) {
      for (int b = 0; b < blocks.count; ++b) {
        mix_on_tiles(keys, 0, TileKeys::kHalves - 1, blocks.first(b), blocks.rows(b),
                     Fetch<1>{b == 0 ? ahead : nullptr});
      }
      return;
    }
    // From the last query to the first: the values of a key are out as soon as it does not count.
    for (int q = queries - 1; q >= from; --q) {
      if (spans[q].first > spans[q].last) continue;  // its window begins further on
      if (same_first) {
        keys.end_at(spans[q].last);
      } else {
        keys.find_values(step, state, sequence, kv_head, base, spans[q].first, spans[q].last);
      }
      const RowBlocks own(q * heads, heads);
      for (int b = 0; b < own.count; ++b) {
        mix_on_tiles(keys, spans[q].first / kTileBf16Depth, spans[q].last / kTileBf16Depth,
                     own.first(b), own.rows(b),
                     Fetch<1>{q == queries - 1 && b == 0 ? ahead : nullptr});
      }
    }
  }

  // All rows attend to their keys of one split, into `part`.
  PELTON_INLINE void attend_split(int split) {
    const int last_query = position + queries - 1;
    const int begin = larger(split * kSplitKeys, first_key(position) / kStepKeys * kStepKeys);
    const int end = smaller((split + 1) * kSplitKeys, last_query + 1);
    Ahead ahead;
    for (int base = begin; base < end; base += kStepKeys) {
      const bool far = look(ahead, base + kStepKeys);
      const bool full = base >= first_key(last_query) && base + kStepKeys - 1 <= position;
      if constexpr (C::kTiles) {
        if (full) {
          attend_on_tiles<true>(far ? &ahead : nullptr, base);
        } else {
          attend_on_tiles<false>(far ? &ahead : nullptr, base);
        }
        continue;
      }
      if (full) {
        attend(ahead, base, 0, kStepKeys - 1, 0, rows());
        continue;
      }
      for (int q = 0; q < queries; ++q) {
        const int first = larger(first_key(position + q) - base, 0);
        const int last = smaller(position + q - base, kStepKeys - 1);
        if (first <= last) attend(ahead, base, first, last, q * heads, heads);
      }
    }
  }
};

}  // namespace pelton
