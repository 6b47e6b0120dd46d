// A tile of attention rows (some queries of some heads of one kv head) and what it does with keys
// and values: find them, score, weigh, mix, merge. See attention.h for the grid they lie on.
#pragma once
#include "dot.h"
#include "kv.h"
#include "math.h"
#include "work.h"

namespace pelton {

inline constexpr int kStepKeys = 64;
inline constexpr int kSplitKeys = 256;
inline constexpr int kTileRows = 32;

// C: Compute (type of q), Kv, Out; kHeads, kKvHeads, kDim, kTokens, kGroup (block table), kWindow
// (0 = none), kScale, kSoftcap (0 = none), kParts (partial results that scratch can hold).
template <class C>
struct AttentionTile {
  using Place = KvPlace<C>;
  using Kv = typename C::Kv;
  using Dot = typename DotFor<Kv, Place::kPair == 2, typename C::Compute>::Type;
  using X = typename Dot::X;
  static constexpr int kPair = Place::kPair;
  static constexpr int kDim = C::kDim;
  static constexpr int kChunks = kDim / kLanes;          // whole vectors of a head
  static constexpr int kTail = kDim % kLanes;            // values after them
  static constexpr int kWidth = round_up(kDim, kLanes);  // floats of an output row in here
  static constexpr int kPanels = kStepKeys / kLanes;
  static constexpr int kHeadsPerKv = C::kHeads / C::kKvHeads;
  static constexpr int kTileHeads = smaller<int>(kHeadsPerKv, kTileRows);
  static constexpr int kHeadTiles = divide_up(kHeadsPerKv, kTileHeads);
  static constexpr int kTileQueries = kTileRows / kTileHeads;

  // Running results of one row (a query of one head).
  struct State {
    float max, sum;
  };

  const pelton_step* step;
  Kv* state;
  int64_t sequence, token;  // the first query's token
  int position;             // and its position; further queries follow
  int queries, heads;       // rows = queries x heads, heads fastest
  int head, kv_head;        // the first query head
  State part[kTileRows], total[kTileRows];
  alignas(64) X query[kTileRows][kWidth];
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
      total[r] = {-__builtin_huge_valf(), 0.0f};
    }
    clear_part();
  }
  PELTON_INLINE void clear_part() {
    for (int r = 0; r < rows(); ++r) {
      part[r] = {-__builtin_huge_valf(), 0.0f};
      for (int d = 0; d < kWidth; d += kLanes) store(part_out[r] + d, zero());
    }
  }

  // Keys and values of up to one step, as the dot products want them.
  struct Keys {
    const Kv* key[kPanels];
    // Runs of value steps in order: where they start, at which key, and how many steps.
    struct Run {
      const Kv* value;
      const Kv* tail;
      int key, steps;
    } run[kPanels + 2];
    int runs;
    alignas(64) Kv edge[2][kDim * kPair];
    alignas(64) Kv tails[kTail == 0 ? 1 : (kPanels * kLanes + 4) * kLanes];
    int tail_steps;
  };

  PELTON_INLINE void add_run(Keys& keys, const Kv* value, int key, int steps) const {
    typename Keys::Run& run = keys.run[keys.runs++];
    run = {value, keys.tails + keys.tail_steps * kLanes * kPair, key, steps};
    if constexpr (kTail != 0) {
      for (int s = 0; s < steps; ++s, ++keys.tail_steps) {
        Kv* to = keys.tails + keys.tail_steps * kLanes * kPair;
        for (int i = 0; i < kLanes * kPair; ++i) {
          to[i] = i < kTail * kPair ? value[(s * kDim + kChunks * kLanes) * kPair + i] : Kv{};
        }
      }
    }
  }
  // A pair of keys of which only one counts; the other's values are replaced by zeros.
  PELTON_INLINE void add_half(Keys& keys, const Kv* value, int key, int which) const {
    Kv* edge = keys.edge[which];
    for (int i = 0; i < kDim * kPair; ++i) edge[i] = i % 2 == which ? value[i] : Kv{};
    add_run(keys, edge, key, 1);
  }

  // Find keys first..last (counted within the step at `base`).
  PELTON_INLINE void find(Keys& keys, int base, int first, int last) const {
    keys.runs = 0;
    keys.tail_steps = 0;
    for (int p = first / kLanes; p <= last / kLanes; ++p) {
      const int at = base + p * kLanes, slot = at % static_cast<int>(C::kTokens);
      const Kv* block = Place::block(step, state, sequence, at);
      keys.key[p] = block + Place::Layout::k_index(C::kTokens, kDim, kv_head, slot, 0);
      const Kv* value =
          block + Place::Layout::v_index(C::kKvHeads, C::kTokens, kDim, kv_head, slot, 0);
      int begin = larger(first - p * kLanes, 0), end = smaller(last - p * kLanes + 1, kLanes);
      if (kPair == 2 && begin % 2 == 1) {
        add_half(keys, value + (begin - 1) * kDim, p * kLanes + begin - 1, 1);
        ++begin;
      }
      const bool half = kPair == 2 && end % 2 == 1 && begin < end;
      if (half) --end;
      if (begin < end)
        add_run(keys, value + begin * kDim, p * kLanes + begin, (end - begin) / kPair);
      if (half) add_half(keys, value + end * kDim, p * kLanes + end, 0);
    }
  }

  template <int M>
  PELTON_INLINE void block_rows(const X* base, int64_t stride, int first, int count,
                                const X* (&x)[M]) const {
    for (int m = 0; m < M; ++m) x[m] = base + (first + smaller(m, count - 1)) * stride;
  }

  // Raw scores of rows row..row+count-1 with panels from..to.
  template <int M>
  __attribute__((noinline)) void score(const Keys& keys, int from, int to, int row, int count) {
    constexpr int64_t kSteps = kDim / Dot::kStep, kAdvance = kLanes * Dot::kStep;
    const X* x[M];
    block_rows<M>(query[0], kWidth, row, count, x);
    if (kPanels * M <= kAccumulators && from == 0 && to == kPanels - 1) {
      F32 acc[M][kPanels];
      clear(acc);
      dot_block<Dot, kAdvance>(x, keys.key, kSteps, acc);
      for (int m = 0; m < count; ++m) {
        for (int p = 0; p < kPanels; ++p) store(scores[row + m] + p * kLanes, acc[m][p]);
      }
      return;
    }
    for (int p = from; p <= to; ++p) {
      const Kv* key[1] = {keys.key[p]};
      F32 acc[M][1];
      clear(acc);
      dot_block<Dot, kAdvance>(x, key, kSteps, acc);
      for (int m = 0; m < count; ++m) store(scores[row + m] + p * kLanes, acc[m][0]);
    }
  }

  // Turn a row's raw scores into weights of keys first..last; rescale what came before.
  __attribute__((noinline)) void weigh(int row, int first, int last) {
    F32 s[kPanels];
    Mask valid[kPanels];
    F32 top = splat(-__builtin_huge_valf());
    for (int p = 0; p < kPanels; ++p) {
      valid[p] = first_n(last + 1 - p * kLanes) & ~first_n(first - p * kLanes);
      s[p] = load(scores[row] + p * kLanes) * splat(C::kScale);
      if constexpr (C::kSoftcap != 0.0f)
        s[p] = splat(C::kSoftcap) * tanh(s[p] / splat(C::kSoftcap));
      s[p] = select(valid[p], s[p], splat(-__builtin_huge_valf()));
      top = max(s[p], top);
    }
    State& mine = part[row];
    const float highest = larger(mine.max, max_lane(top));
    F32 w[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      w[p] = select(valid[p], exp(s[p] - splat(highest)), zero());
      if constexpr (sizeof(X) == 2) {
        w[p] = round_through<bf16>(w[p]);
      }
      store(weights[row] + p * kLanes, w[p]);
    }
    const float added = sum((w[0] + w[1]) + (w[2] + w[3]));
    if (mine.max == highest) {
      mine.sum += added;
      return;
    }
    const F32 shrink = exp(splat(mine.max - highest));
    mine = {highest, mine.sum * lane0(shrink) + added};
    for (int d = 0; d < kWidth; d += kLanes) {
      store(part_out[row] + d, load(part_out[row] + d) * shrink);
    }
  }

  // Outputs CHUNK.. of M rows += weights times values.
  template <int M, int CHUNK>
  PELTON_INLINE void mix_chunks(const Keys& keys, int row, int count) {
    constexpr int kWant = M * 4 <= kAccumulators ? 4 : 2;
    if constexpr (CHUNK < kChunks) {
      constexpr int kNow = smaller(kWant, kChunks - CHUNK);
      F32 acc[M][kNow];
      for (int m = 0; m < M; ++m) {
        const float* out = part_out[row + smaller(m, count - 1)] + CHUNK * kLanes;
        for (int c = 0; c < kNow; ++c) acc[m][c] = load(out + c * kLanes);
      }
      for (int i = 0; i < keys.runs; ++i) {
        const typename Keys::Run& run = keys.run[i];
        const X* x[M];
        block_rows<M>(weights[0] + run.key, kStepKeys, row, count, x);
        const Kv* value[kNow];
        for (int c = 0; c < kNow; ++c) value[c] = run.value + (CHUNK + c) * kLanes * kPair;
        dot_block<Dot, kDim * kPair>(x, value, run.steps, acc);
      }
      for (int m = 0; m < count; ++m) {
        for (int c = 0; c < kNow; ++c) store(part_out[row + m] + (CHUNK + c) * kLanes, acc[m][c]);
      }
      mix_chunks<M, CHUNK + kNow>(keys, row, count);
    } else if constexpr (kTail != 0) {
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
  __attribute__((noinline)) void mix(const Keys& keys, int row, int count) {
    mix_chunks<M, 0>(keys, row, count);
  }

#if defined(__AVX512F__)
  static constexpr int kBlockRows = 4, kAccumulators = 16;
#else
  static constexpr int kBlockRows = 2, kAccumulators = 4;
#endif

  // Rows row..row+count-1 attend to keys first..last of the step at `base`.
  PELTON_INLINE void attend(int base, int first, int last, int row, int count) {
    Keys keys;
    find(keys, base, first, last);
    const int from = first / kLanes, to = last / kLanes;
    for (int done = 0; done < count; done += kBlockRows) {
      const int now = smaller(kBlockRows, count - done);
      if (now == 1) {
        score<1>(keys, from, to, row + done, now);
      } else {
        score<kBlockRows>(keys, from, to, row + done, now);
      }
    }
    for (int r = row; r < row + count; ++r) weigh(r, first, last);
    for (int done = 0; done < count; done += kBlockRows) {
      const int now = smaller(kBlockRows, count - done);
      if (now == 1) {
        mix<1>(keys, row + done, now);
      } else {
        mix<kBlockRows>(keys, row + done, now);
      }
    }
  }

  // All rows attend to their keys of one split, into `part`.
  PELTON_INLINE void attend_split(int split) {
    const int last_query = position + queries - 1;
    const int begin = larger(split * kSplitKeys, first_key(position) / kStepKeys * kStepKeys);
    const int end = smaller((split + 1) * kSplitKeys, last_query + 1);
    for (int base = begin; base < end; base += kStepKeys) {
      if (base >= first_key(last_query) && base + kStepKeys - 1 <= position) {
        attend(base, 0, kStepKeys - 1, 0, rows());
        continue;
      }
      for (int q = 0; q < queries; ++q) {
        const int first = larger(first_key(position + q) - base, 0);
        const int last = smaller(position + q - base, kStepKeys - 1);
        if (first <= last) attend(base, first, last, q * heads, heads);
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
    const F32 a = exp(splat(into.max - highest)), b = exp(splat(from.max - highest));
    into = {highest, into.sum * lane0(a) + from.sum * lane0(b)};
    for (int d = 0; d < kWidth; d += kLanes) {
      store(out + d, load(out + d) * a + load(added + d) * b);
    }
  }
  PELTON_INLINE void merge_part() {
    for (int r = 0; r < rows(); ++r) merge(total[r], total_out[r], part[r], part_out[r]);
  }

  static PELTON_INLINE void finish(State state, const float* from, typename C::Out* to) {
    const F32 share_of = splat(1.0f / state.sum);
    for (int d = 0; d < kDim; d += kLanes) {
      store_n(to + d, load(from + d) * share_of, smaller<int>(kDim - d, kLanes));
    }
  }
};

}  // namespace pelton
