// The running softmax of attention's rows (a query of one head each): scores become weights,
// weights and outputs are summed up under the largest score so far, parts are merged.
//
// A row's arithmetic is its own. Rows are taken in blocks so that what is one number a row
// (maximum, offset, decay) is computed for 16 rows at once, and by no branch that depends on
// scores: a CPU would guess it wrong every few rows.
#pragma once
#include "attention_keys.h"
#include "math.h"

namespace pelton {

// C as in attention_tile.h; Dot takes the weights; MOST rows.
template <class C, class Dot, int MOST>
struct RunningSoftmax {
  using X = typename Dot::X;
  static constexpr int kPanels = AttentionKeys<C>::kPanels;
  static constexpr int kWidth = round_up(C::kDim, kLanes);  // floats of an output row in here
  static constexpr int kRoom = round_up(MOST, kLanes);      // for numbers that are one a row
  static constexpr float kInfinity = __builtin_huge_valf();

  // Of the part (a split's keys so far): the largest raw score, sums of weights, still spread over
  // lanes, and outputs.
  alignas(64) float part_max[kRoom];
  alignas(64) float part_sum[MOST][kLanes];
  alignas(64) float part_out[MOST][kWidth];
  // Of the parts that were merged; a sum of 0 is of none.
  alignas(64) float total_max[kRoom], total_sum[kRoom];
  alignas(64) float total_out[MOST][kWidth];
  // Of the step.
  alignas(64) float scores[MOST][kStepKeys];
  alignas(64) X weights[MOST][kStepKeys];

  PELTON_INLINE void clear_part(int rows) {
    for (int r = 0; r < rows; r += kLanes) store(part_max + r, splat(-kInfinity));
    for (int r = 0; r < rows; ++r) {
      store(part_sum[r], zero());
      for (int d = 0; d < kWidth; d += kLanes) store(part_out[r] + d, zero());
    }
  }
  PELTON_INLINE void clear_total(int rows) {
    for (int r = 0; r < rows; r += kLanes) {
      store(total_max + r, splat(-kInfinity));
      store(total_sum + r, zero());
    }
  }

  // Keys first..last of a step.
  struct Span {
    int first, last;
    PELTON_INLINE Mask in(int panel) const {
      return first_n(last + 1 - panel * kLanes) & ~first_n(first - panel * kLanes);
    }
  };

  // Turn raw scores of rows row..row+count-1 (at most 16) into weights, of all keys of a step
  // (FULL) or of those in span(row); rescale what came before.
  template <bool FULL, class SpanOf>
  __attribute__((noinline)) void weigh(int row, int count, const SpanOf& span) {
    alignas(64) float highest[kLanes], offset[kLanes], shrink[kLanes];
    for (int r = 0; r < count; ++r) {
      if constexpr (C::kSoftcap != 0.0f) cap_scores(row + r);
      F32 s[kPanels];
      read_scores<FULL>(row + r, span, s);
      highest[r] = max_lane(max(max(s[0], s[1]), max(s[2], s[3])));
    }
    const Mask some = first_n(count);
    const F32 before = load_masked(part_max + row, some);
    const F32 now = max(before, load_masked(highest, some));
    store_masked(part_max + row, now, some);
    store(offset, now * splat(-kFactor));
    // Not by the difference alone: it is no number where both are infinite.
    store(shrink, select(before == now, splat(1.0f), decay(before - now)));
    for (int r = 0; r < count; ++r) {
      weigh_row<FULL>(row + r, span, splat(offset[r]), splat(shrink[r]));
    }
  }

  // The part's sum of weights.
  PELTON_INLINE float part_total(int row) const { return sum(load(part_sum[row])); }

  // total = total and part together.
  PELTON_INLINE void merge_part(int rows) {
    alignas(64) float sums[kRoom] = {};
    for (int r = 0; r < rows; ++r) sums[r] = part_total(r);
    merge(rows, part_max, sums, [&](int r) { return part_out[r]; });
  }
  // The same with a part that lies elsewhere: its maxima and sums (of 0 up to a whole vector), and
  // outputs from(row). A row without keys in it has a sum of 0 and a maximum of -infinity.
  template <class From>
  PELTON_INLINE void merge(int rows, const float* maxima, const float* sums, const From& from) {
    alignas(64) float keep[kRoom], add[kRoom];  // factors; 0: leave it, or take it, as it is
    for (int r = 0; r < rows; r += kLanes) {
      const F32 old_max = load(total_max + r), old_sum = load(total_sum + r);
      const F32 new_max = load(maxima + r), new_sum = load(sums + r);
      const Mask first = old_sum == zero(), none = new_sum == zero();
      const F32 highest = max(old_max, new_max);
      const F32 a = decay(old_max - highest), b = decay(new_max - highest);
      store(total_max + r, select(first, new_max, highest));
      store(total_sum + r, select(first, new_sum, old_sum * a + new_sum * b));
      store(keep + r, select(first, zero(), a));
      store(add + r, select(none, zero(), b));
    }
    for (int r = 0; r < rows; ++r) {
      if (add[r] == 0.0f) continue;
      const float* added = from(r);
      float* out = total_out[r];
      if (keep[r] == 0.0f) {
        for (int d = 0; d < kWidth; d += kLanes) store(out + d, load(added + d));
        continue;
      }
      const F32 a = splat(keep[r]), b = splat(add[r]);
      for (int d = 0; d < kWidth; d += kLanes) {
        store(out + d, load(out + d) * a + load(added + d) * b);
      }
    }
  }

  PELTON_INLINE void finish(int row, typename C::Out* to) const {
    const F32 share_of = splat(1.0f / total_sum[row]);
    for (int d = 0; d < C::kDim; d += kLanes) {
      store_n(to + d, load(total_out[row] + d) * share_of, smaller<int>(C::kDim - d, kLanes));
    }
  }

 private:
  // Weights are powers of two: the scale and log2(e) are one factor of a score.
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kFactor = C::kSoftcap != 0.0f ? kLog2E : C::kScale * kLog2E;
  static PELTON_INLINE F32 decay(F32 below) { return exp2_below(below * splat(kFactor)); }

  PELTON_INLINE void cap_scores(int row) {
    for (int k = 0; k < kStepKeys; k += kLanes) {
      const F32 s = load(scores[row] + k);
      store(scores[row] + k, splat(C::kSoftcap) * tanh(s * splat(C::kScale) / splat(C::kSoftcap)));
    }
  }
  template <bool FULL, class SpanOf>
  PELTON_INLINE void read_scores(int row, const SpanOf& span, F32 (&s)[kPanels]) const {
    for (int p = 0; p < kPanels; ++p) {
      s[p] = load(scores[row] + p * kLanes);
      if constexpr (!FULL) s[p] = select(span(row).in(p), s[p], splat(-kInfinity));
    }
  }
  template <bool FULL, class SpanOf>
  PELTON_INLINE void weigh_row(int row, const SpanOf& span, F32 offset, F32 shrink) {
    F32 w[kPanels];
    read_scores<FULL>(row, span, w);
    for (int p = 0; p < kPanels; ++p) {
      w[p] = exp2_below(fma(w[p], splat(kFactor), offset));
      if constexpr (!FULL) w[p] = select(span(row).in(p), w[p], zero());
    }
    store(part_sum[row], fma(load(part_sum[row]), shrink, keep_weights(weights[row], w)));
    for (int d = 0; d < kWidth; d += kLanes) {
      store(part_out[row] + d, load(part_out[row] + d) * shrink);
    }
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
};

}  // namespace pelton
