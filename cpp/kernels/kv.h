// Writing keys and values into paged state, alone or fused with QK norm and rotation.
#pragma once
#include "norm.h"
#include "pelton/kv_layout.h"
#include "rope.h"
#include "vec.h"
#include "work.h"

namespace pelton {

// Where one head of one token lies. C: Kv (stored type), kKvHeads, kDim, kTokens (per block),
// kGroup.
template <class C>
struct KvPlace {
  using Kv = typename C::Kv;
  static constexpr int kPair = __is_same(Kv, bf16) ? 2 : 1;
  using Layout = KV16<kPair>;
  static constexpr int64_t kBlock = Layout::block_elems(C::kKvHeads, C::kTokens, C::kDim);

  // The block that holds a position of a sequence, or null if the table has none there.
  static PELTON_INLINE Kv* block(const pelton_step* step, void* state, int64_t sequence,
                                 int64_t position) {
    const int32_t id =
        step->block_tables[C::kGroup][sequence * step->max_blocks + position / C::kTokens];
    return id < 0 ? nullptr : static_cast<Kv*>(state) + id * kBlock;
  }
  static PELTON_INLINE void write_key(Kv* block, int head, int token, const float* x) {
    Kv* to = block + Layout::k_index(C::kTokens, C::kDim, head, token, 0);
    Kv rounded[kWidth];
    round_all(x, rounded);
    for (int d = 0; d < C::kDim; d += kPair) {
      __builtin_memcpy(to + d * kLanes, rounded + d, kPair * sizeof(Kv));
    }
  }
  static PELTON_INLINE void write_value(Kv* block, int head, int token, const float* x) {
    Kv* to = block + Layout::v_index(C::kKvHeads, C::kTokens, C::kDim, head, token, 0);
    Kv rounded[kWidth];
    round_all(x, rounded);
    for (int d = 0; d < C::kDim; ++d) to[d * kPair] = rounded[d];
  }
  // Ask for the lines that a head's key or value goes to. They come from memory: weights have
  // displaced them since the last step.
  static PELTON_INLINE void fetch_key(const Kv* block, int head, int token) {
    const Kv* key = block + Layout::k_index(C::kTokens, C::kDim, head, token, 0);
    for (int d = 0; d < C::kDim; d += kPair) __builtin_prefetch(key + d * kLanes, 1);
  }
  static PELTON_INLINE void fetch_value(const Kv* block, int head, int token) {
    constexpr int64_t kLine = 64 / sizeof(Kv);
    const Kv* value = block + Layout::v_index(C::kKvHeads, C::kTokens, C::kDim, head, token, 0);
    for (int64_t d = 0; d < C::kDim * kPair; d += kLine) __builtin_prefetch(value + d, 1);
  }
  static constexpr int kWidth = round_up(C::kDim, kLanes);
  static PELTON_INLINE void round_all(const float* x, Kv* out) {
    for (int d = 0; d < C::kDim; d += kLanes) {
      store(out + d, load_n(x + d, smaller<int>(C::kDim - d, kLanes)));
    }
  }
};

// args: k, v, (token), state.
template <class C>
PELTON_INLINE void kv_write(const pelton_step* step, void* const* args, pelton_worker* worker) {
  using Place = KvPlace<C>;
  const Range mine = share(int64_t{step->num_tokens} * C::kKvHeads, worker);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t t = i / C::kKvHeads;
    const int head = static_cast<int>(i % C::kKvHeads);
    const int64_t position = step->positions[t];
    auto* block = Place::block(step, args[3], step->token_seq[t], position);
    if (block == nullptr) continue;
    const int slot = static_cast<int>(position % C::kTokens);
    Place::write_key(block, head, slot, static_cast<const float*>(args[0]) + i * C::kDim);
    Place::write_value(block, head, slot, static_cast<const float*>(args[1]) + i * C::kDim);
  }
}

// args: qkv, cos, sin[, q_norm, k_norm], q, (token), state. C also: Q (type of q), kHeads, kRotary,
// kInterleaved, kNorm, kEps. One piece of work is one head of one token: queries, keys, values.
template <class C>
struct QkvRopeWrite {
  using Q = typename C::Q;
  using Place = KvPlace<C>;
  static constexpr int kAll = C::kHeads + 2 * C::kKvHeads;
  static constexpr int kOut = C::kNorm ? 5 : 3;

  // Where keys and values among heads first .. last - 1 of a token go: asked for before its queries
  // are rotated, for the first token of a sequence in this step, or in a block. Those that follow
  // it find most lines there.
  static PELTON_INLINE void fetch(const pelton_step* step, void* const* args, int64_t t,
                                  int64_t first, int64_t last) {
    const int64_t position = step->positions[t];
    if (t > 0 && step->token_seq[t] == step->token_seq[t - 1] && position % C::kTokens != 0) return;
    const auto* block = Place::block(step, args[kOut + 2], step->token_seq[t], position);
    if (block == nullptr) return;
    const int slot = static_cast<int>(position % C::kTokens);
    for (int h = static_cast<int>(larger<int64_t>(first, C::kHeads)); h < last; ++h) {
      const int kv_head = h - C::kHeads;
      if (kv_head < C::kKvHeads) {
        Place::fetch_key(block, kv_head, slot);
      } else {
        Place::fetch_value(block, kv_head - C::kKvHeads, slot);
      }
    }
  }

  static PELTON_INLINE void head(const pelton_step* step, void* const* args, int64_t t, int h) {
    const float* x = static_cast<const float*>(args[0]) + (t * kAll + h) * C::kDim;
    const int64_t position = step->positions[t];
    const int slot = static_cast<int>(position % C::kTokens);
    auto* block = Place::block(step, args[kOut + 2], step->token_seq[t], position);
    if (h >= C::kHeads + C::kKvHeads) {
      if (block != nullptr) Place::write_value(block, h - C::kHeads - C::kKvHeads, slot, x);
      return;
    }
    alignas(64) float normed[C::kDim], turned[C::kDim];
    if constexpr (C::kNorm) {
      const float* weight = static_cast<const float*>(args[h < C::kHeads ? 3 : 4]);
      const float scale = rms_scale(x, C::kDim, C::kEps);
      for (int i = 0; i < C::kDim; i += kLanes) {
        const int n = smaller<int>(C::kDim - i, kLanes);
        store_n(normed + i, rms_values(x, weight, scale, i, n), n);
      }
      x = normed;
    }
    constexpr int64_t kHalf = C::kRotary / 2;
    rotate<C::kDim, C::kRotary, C::kInterleaved>(x, static_cast<const float*>(args[1]) + t * kHalf,
                                                 static_cast<const float*>(args[2]) + t * kHalf,
                                                 turned);
    if (h < C::kHeads) {
      Q* q = static_cast<Q*>(args[kOut]) + (t * C::kHeads + h) * C::kDim;
      for (int i = 0; i < C::kDim; i += kLanes) {
        const int n = smaller<int>(C::kDim - i, kLanes);
        store_n(q + i, load_n(turned + i, n), n);
      }
    } else if (block != nullptr) {
      Place::write_key(block, h - C::kHeads, slot, turned);
    }
  }
};

template <class C>
PELTON_INLINE void qkv_rope_write(const pelton_step* step, void* const* args,
                                  pelton_worker* worker) {
  using Work = QkvRopeWrite<C>;
  const Range mine = share(int64_t{step->num_tokens} * Work::kAll, worker);
  for (int64_t i = mine.begin; i < mine.end;) {
    const int64_t t = i / Work::kAll, before = t * Work::kAll;
    const int64_t end = smaller(before + Work::kAll, mine.end);
    Work::fetch(step, args, t, i - before, end - before);
    for (; i < end; ++i) Work::head(step, args, t, static_cast<int>(i - before));
  }
}

}  // namespace pelton
