// The keys and values of one step of the attention grid, as the dot products want them.
#pragma once
#include "dot.h"
#include "kv.h"
#include "work.h"

namespace pelton {

inline constexpr int kStepKeys = 64;

// C as in attention_tile.h.
template <class C>
struct AttentionKeys {
  using Place = KvPlace<C>;
  using Kv = typename C::Kv;
  static constexpr int kPair = Place::kPair;
  static constexpr int kDim = C::kDim;
  static constexpr int kChunks = kDim / kLanes;  // whole vectors of a head
  static constexpr int kTail = kDim % kLanes;    // values after them
  static constexpr int kPanels = kStepKeys / kLanes;

  const Kv* key[kPanels];
  // Runs of value steps in order: where they start, at which key, and how many steps.
  struct Run {
    const Kv* value;
    const Kv* tail;
    int key, steps;
  } run[kPanels + 2];
  int runs, tail_steps;
  alignas(64) Kv edge[2][kDim * kPair];
  alignas(64) Kv tails[kTail == 0 ? 1 : (kPanels * kLanes + 4) * kLanes];

  // Find keys first..last, counted within the step at `base`.
  PELTON_INLINE void find(const pelton_step* step, Kv* state, int64_t sequence, int kv_head,
                          int base, int first, int last) {
    runs = 0;
    tail_steps = 0;
    for (int p = first / kLanes; p <= last / kLanes; ++p) {
      const int at = base + p * kLanes, slot = at % static_cast<int>(C::kTokens);
      const Kv* block = Place::block(step, state, sequence, at);
      key[p] = block + Place::Layout::k_index(C::kTokens, kDim, kv_head, slot, 0);
      const Kv* value =
          block + Place::Layout::v_index(C::kKvHeads, C::kTokens, kDim, kv_head, slot, 0);
      int begin = larger(first - p * kLanes, 0), end = smaller(last - p * kLanes + 1, kLanes);
      if (kPair == 2 && begin % 2 == 1) {
        add_half(value + (begin - 1) * kDim, p * kLanes + begin - 1, 1);
        ++begin;
      }
      const bool half = kPair == 2 && end % 2 == 1 && begin < end;
      if (half) --end;
      if (begin < end) add_run(value + begin * kDim, p * kLanes + begin, (end - begin) / kPair);
      if (half) add_half(value + end * kDim, p * kLanes + end, 0);
    }
  }

 private:
  // Values that follow the last run in memory lengthen it: a block is one run.
  PELTON_INLINE void add_run(const Kv* value, int first, int steps) {
    Run* last = runs > 0 ? &run[runs - 1] : nullptr;
    if (last != nullptr && last->value + last->steps * kDim * kPair == value) {
      last->steps += steps;
    } else {
      run[runs++] = {value, tails + tail_steps * kLanes * kPair, first, steps};
    }
    if constexpr (kTail != 0) {
      for (int s = 0; s < steps; ++s, ++tail_steps) {
        Kv* to = tails + tail_steps * kLanes * kPair;
        for (int i = 0; i < kLanes * kPair; ++i) {
          to[i] = i < kTail * kPair ? value[(s * kDim + kChunks * kLanes) * kPair + i] : Kv{};
        }
      }
    }
  }
  // A pair of keys of which only one counts; the other's values are replaced by zeros.
  PELTON_INLINE void add_half(const Kv* value, int first, int which) {
    for (int i = 0; i < kDim * kPair; ++i) edge[which][i] = i % 2 == which ? value[i] : Kv{};
    add_run(edge[which], first, 1);
  }
};

}  // namespace pelton
