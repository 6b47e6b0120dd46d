// A tile of attention rows (some queries of some heads of one kv head) and what it does with keys
// and values: find them, score, weigh, mix, merge. See attention.h for the grid they lie on.
#pragma once
#include "attention_amx.h"
#include "attention_keys.h"
#include "math.h"

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
  static constexpr int kWidth = round_up(kDim, kLanes);  // floats of an output row in here
  static constexpr int kPanels = Keys::kPanels;
  static constexpr int kHeadsPerKv = C::kHeads / C::kKvHeads;
  static constexpr int kTileHeads = C::kTileHeads;
  static constexpr int kHeadTiles = divide_up(kHeadsPerKv, kTileHeads);
  static constexpr int kTileQueries = C::kTileQueries;
  static constexpr int kTileRows = kTileHeads * kTileQueries;
  static constexpr int kQueryWidth = round_up(kDim, C::kTiles ? kTileBf16Depth : kLanes);

  // Running results of one row (a query of one head): the largest raw score, and the sum of
  // weights.
  struct State {
    float max, sum;
  };

  struct NoTiles {};
  [[no_unique_address]] typename Choose<AmxAttention, NoTiles, C::kTiles>::Type tiles;
  const pelton_step* step;
  Kv* state;
  int64_t sequence, token;  // the first query's token
  int position;             // and its position; further queries follow
  int queries, heads;       // rows = queries x heads, heads fastest
  int head, kv_head;        // the first query head
  float part_max[kTileRows];
  State total[kTileRows];
  alignas(64) float part_sum[kTileRows][kLanes];  // sums of weights, still spread over lanes
  alignas(64) X query[kTileRows][kQueryWidth];
  alignas(64) float scores[kTileRows][kStepKeys];
  alignas(64) X weights[kTileRows][kStepKeys];
  alignas(64) float part_out[kTileRows][kWidth], total_out[kTileRows][kWidth];

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
      total[r] = {-__builtin_huge_valf(), 0.0f};
    }
    clear_part();
  }
  PELTON_INLINE void clear_part() {
    for (int r = 0; r < rows(); ++r) {
      part_max[r] = -__builtin_huge_valf();
      store(part_sum[r], zero());
      for (int d = 0; d < kWidth; d += kLanes) store(part_out[r] + d, zero());
    }
  }
  PELTON_INLINE State part(int row) const { return {part_max[row], sum(load(part_sum[row]))}; }

  // The first keys of the tile that this worker does after this one; by default none.
  struct After {
    int64_t sequence = 0;
    int kv_head = 0, first = 0, last = -1;
  } after;
  PELTON_INLINE After keys_of(int64_t first_token, int count, int which) const {
    const int from = step->positions[first_token];
    return {step->token_seq[first_token], which / kHeadTiles,
            first_key(from) / kStepKeys * kStepKeys, from + count - 1};
  }

  // Where the keys and values of the next step lie, behind the last ones those of the next tile:
  // read ahead while this step is computed. (Null blocks and no keys at all: of no use, no harm.)
  struct Ahead {
    const char* key[kPanels];
    const char* value[kPanels];
  };
  PELTON_INLINE void look(Ahead& ahead, int base) const {
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
      for (int p = 0; p < P; ++p) store(scores[row + m] + (first + p) * kLanes, acc[m][p]);
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

  // Weights are powers of two: the scale and log2(e) are one factor of a score.
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kFactor = C::kSoftcap != 0.0f ? kLog2E : C::kScale * kLog2E;
  static PELTON_INLINE F32 decay(float below) { return exp2_below(splat(below * kFactor)); }

  // Turn a row's raw scores into weights of keys first..last (FULL: of all); rescale what came
  // before.
  template <bool FULL>
  __attribute__((noinline)) void weigh(int row, int first, int last) {
    F32 s[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      s[p] = load(scores[row] + p * kLanes);
      if constexpr (C::kSoftcap != 0.0f) {
        s[p] = splat(C::kSoftcap) * tanh(s[p] * splat(C::kScale) / splat(C::kSoftcap));
      }
      if constexpr (!FULL) {
        s[p] = select(within(p, first, last), s[p], splat(-__builtin_huge_valf()));
      }
    }
    const F32 top = max(max(s[0], s[1]), max(s[2], s[3]));
    const float before = part_max[row], highest = larger(before, max_lane(top));
    const F32 offset = splat(-highest * kFactor);
    F32 w[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      w[p] = exp2_below(fma(s[p], splat(kFactor), offset));
      if constexpr (!FULL) w[p] = select(within(p, first, last), w[p], zero());
    }
    const F32 added = keep_weights(weights[row], w);
    if (before == highest) {
      store(part_sum[row], load(part_sum[row]) + added);
      return;
    }
    const F32 shrink = decay(before - highest);
    part_max[row] = highest;
    store(part_sum[row], fma(load(part_sum[row]), shrink, added));
    for (int d = 0; d < kWidth; d += kLanes) {
      store(part_out[row] + d, load(part_out[row] + d) * shrink);
    }
  }
  static PELTON_INLINE Mask within(int panel, int first, int last) {
    return first_n(last + 1 - panel * kLanes) & ~first_n(first - panel * kLanes);
  }
  // Store weights as the dot product takes them, and add them up so, lane by lane.
  static PELTON_INLINE F32 keep_weights(X* to, const F32 (&w)[kPanels]) {
    if constexpr (sizeof(X) == 2) {
      F32 added = zero();
      for (int p = 0; p < kPanels; p += 2)
        added = Dot::keep_sum(to + p * kLanes, w[p], w[p + 1], added);
      return added;
    } else {
      for (int p = 0; p < kPanels; ++p) store(to + p * kLanes, w[p]);
      return (w[0] + w[1]) + (w[2] + w[3]);
    }
  }

  // Outputs CHUNK.. of M rows += weights times values.
  template <int M, int CHUNK>
  PELTON_INLINE void mix_chunks(const Keys& keys, const Ahead& ahead, int row, int count) {
    if constexpr (CHUNK < kChunks) {
      constexpr int P = smaller<int>(C::kBlockPanels, kChunks - CHUNK);
      F32 acc[M][P];
      for (int m = 0; m < M; ++m) {
        const float* out = part_out[row + smaller(m, count - 1)] + CHUNK * kLanes;
        for (int c = 0; c < P; ++c) acc[m][c] = load(out + c * kLanes);
      }
      for (int i = 0; i < keys.runs; ++i) {
        const typename Keys::Run& run = keys.run[i];
        const X* x[M];
        block_rows<M>(weights[0] + run.key, kStepKeys, row, count, x);
        const Kv* value[P];
        const char* next[P];
        for (int c = 0; c < P; ++c) {
          value[c] = run.value + (CHUNK + c) * kLanes * kPair;
          next[c] = ahead.value[run.key / kLanes] + (CHUNK + c) * kLanes * kPair * sizeof(Kv);
        }
        dot_block<Dot, kDim * kPair>(x, value, run.steps, acc, next);
      }
      for (int m = 0; m < count; ++m) {
        for (int c = 0; c < P; ++c) store(part_out[row + m] + (CHUNK + c) * kLanes, acc[m][c]);
      }
      mix_chunks<M, CHUNK + P>(keys, ahead, row, count);
    } else if constexpr (Keys::kTail != 0) {
      F32 acc[M][1];
      for (int m = 0; m < M; ++m) {
        acc[m][0] = load(part_out[row + smaller(m, count - 1)] + kChunks * kLanes);
      }
      for (int i = 0; i < keys.runs; ++i) {
        const X* x[M];
        block_rows<M>(weights[0] + keys.run[i].key, kStepKeys, row, count, x);
        const Kv* tail[1] = {keys.run[i].tail};
        dot_block<Dot, kLanes * kPair>(x, tail, keys.run[i].steps, acc);
      }
      for (int m = 0; m < count; ++m) store(part_out[row + m] + kChunks * kLanes, acc[m][0]);
    }
  }
  template <int M>
  __attribute__((noinline)) void mix(const Keys& keys, const Ahead& ahead, int row, int count) {
    mix_chunks<M, 0>(keys, ahead, row, count);
  }

  // The same on tiles; `ahead` is null where others read ahead already.
  using TileKeys = AmxKeys<C, kStepKeys>;
  PELTON_INLINE void score_on_tiles(const TileKeys& keys, const Ahead* ahead, int from, int to,
                                    int row, int count) {
    const auto of = [&]<int PANELS>(int p) {
      tiles.template score<PANELS, TileKeys::kDepth>(query[row], sizeof query[0], keys.key + p,
                                                     scores[row] + p * kLanes, sizeof scores[0],
                                                     count, ahead ? ahead->key + p : nullptr);
    };
    if (to - from == kPanels - 1) return of.template operator()<kPanels>(0);
    for (int p = from; p <= to; ++p) of.template operator()<1>(p);
  }
  template <int CHUNK>
  PELTON_INLINE void mix_on_tiles(const TileKeys& keys, const Ahead* ahead, int from, int to,
                                  int row, int count) {
    if constexpr (CHUNK < TileKeys::kChunks) {
      constexpr int kNow = smaller(AmxAttention::kSums, TileKeys::kChunks - CHUNK);
      tiles.template mix<kNow>(weights[row], sizeof weights[0], keys, from, to, CHUNK,
                               part_out[row], sizeof part_out[0], count,
                               ahead ? ahead->value : nullptr);
      mix_on_tiles<CHUNK + kNow>(keys, ahead, from, to, row, count);
    }
  }

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
    weigh_rows(row, count, first, last);
    in_blocks(row, count, [&]<int M>(int r, int n) { mix<M>(keys, ahead, r, n); });
  }
  PELTON_INLINE void weigh_rows(int row, int count, int first, int last) {
    const bool full = first == 0 && last == kStepKeys - 1;
    for (int r = row; r < row + count; ++r) {
      if (full) {
        weigh<true>(r, first, last);
      } else {
        weigh<false>(r, first, last);
      }
    }
  }

  // All rows attend to their keys of the step at `base`, on tiles. FULL: to all of them.
  static_assert(!C::kTiles || __is_same(X, bf16));
  template <bool FULL>
  __attribute__((noinline)) void attend_on_tiles(const Ahead& ahead, int base) {
    const auto first_of = [&](int q) { return larger(first_key(position + q) - base, 0); };
    const auto last_of = [&](int q) { return smaller(position + q - base, kStepKeys - 1); };
    const int from = FULL ? 0 : larger(base - position, 0);  // queries before it have no key here
    const int first = first_of(from), last = last_of(queries - 1);
    TileKeys keys;
    keys.find_keys(step, state, sequence, kv_head, base, first, last);
    // Where no window begins in this step; else each query has values of its own.
    const bool same_first = first_of(queries - 1) == 0;
    if (same_first) keys.find_values(step, state, sequence, kv_head, base, first, last);
    const int row = from * heads, count = rows() - row;
    tiles.in_blocks(row, count, [&](int r, int n) {
      score_on_tiles(keys, r == row ? &ahead : nullptr, first / kLanes, last / kLanes, r, n);
    });
    if constexpr (FULL) {
      weigh_rows(row, count, first, last);
      tiles.in_blocks(row, count, [&](int r, int n) {
        mix_on_tiles<0>(keys, r == row ? &ahead : nullptr, 0, TileKeys::kHalves - 1, r, n);
      });
    } else {
      for (int q = from; q < queries; ++q) {
        if (first_of(q) <= last_of(q)) weigh_rows(q * heads, heads, first_of(q), last_of(q));
      }
      // From the last query to the first: the values of a key are out as soon as it does not count.
      for (int q = queries - 1; q >= from; --q) {
        if (first_of(q) > last_of(q)) continue;  // its window begins further on
        if (same_first) {
          keys.end_at(last_of(q));
        } else {
          keys.find_values(step, state, sequence, kv_head, base, first_of(q), last_of(q));
        }
        tiles.in_blocks(q * heads, heads, [&](int r, int n) {
          mix_on_tiles<0>(keys, q == queries - 1 && r == q * heads ? &ahead : nullptr,
                          first_of(q) / kTileBf16Depth, last_of(q) / kTileBf16Depth, r, n);
        });
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
      look(ahead, base + kStepKeys);
      const bool full = base >= first_key(last_query) && base + kStepKeys - 1 <= position;
      if constexpr (C::kTiles) {
        if (full) {
          attend_on_tiles<true>(ahead, base);
        } else {
          attend_on_tiles<false>(ahead, base);
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

  // total = total and part together, for one row; `out` and `added` are their outputs.
  static PELTON_INLINE void merge(State& into, float* out, State from, const float* added) {
    if (from.sum == 0.0f) return;
    if (into.sum == 0.0f) {
      into = from;
      for (int d = 0; d < kWidth; d += kLanes) store(out + d, load(added + d));
      return;
    }
    const float highest = larger(into.max, from.max);
    const F32 a = decay(into.max - highest), b = decay(from.max - highest);
    into = {highest, into.sum * first_lane(a) + from.sum * first_lane(b)};
    for (int d = 0; d < kWidth; d += kLanes) {
      store(out + d, load(out + d) * a + load(added + d) * b);
    }
  }
  PELTON_INLINE void merge_part() {
    for (int r = 0; r < rows(); ++r) merge(total[r], total_out[r], part(r), part_out[r]);
  }

  static PELTON_INLINE void finish(State state, const float* from, typename C::Out* to) {
    const F32 share_of = splat(1.0f / state.sum);
    for (int d = 0; d < kDim; d += kLanes) {
      store_n(to + d, load(from + d) * share_of, smaller<int>(kDim - d, kLanes));
    }
  }
};

}  // namespace pelton
