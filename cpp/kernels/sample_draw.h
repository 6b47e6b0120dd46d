// Drawing a token from one row of logits. Bit for bit the definition in
// builder/ops/sampling_reference.py: weights are integers made by single fp32 operations, so sums
// are exact in any order and only comparisons decide.
//
// top_k and top_p need the candidates in order, but never all of them: candidates fall in bins by
// their distance from the top (a monotone function of the logit), bins hold counts and weights, and
// only the bins where a cut or the draw falls are sorted.
#pragma once
#include "math.h"
#include "philox.h"
#include "vec.h"

namespace pelton {

inline constexpr float kInf = __builtin_huge_valf();
inline constexpr float kLargest = 3.40282347e38f;
inline constexpr float kSmallestNormal = 1.17549435e-38f;

// NaN counts as -inf, +inf as the largest finite number.
PELTON_INLINE F32 clean(F32 x) { return min(select(x == x, x, splat(-kInf)), splat(kLargest)); }
PELTON_INLINE float clean(float x) { return x != x ? -kInf : x < kLargest ? x : kLargest; }

// 16 clean logits from index i on; lanes past the end are -inf.
PELTON_INLINE F32 load_logits(const float* x, int i, int n) {
  if (i + kLanes <= n) return clean(load(x + i));
  return select(first_n(n - i), clean(load_n(x + i, n - i)), splat(-kInf));
}

inline float highest(const float* x, int n) {
  F32 top = splat(-kInf);
  for (int i = 0; i < n; i += kLanes) top = max(top, load_logits(x, i, n));
  return max_lane(top);
}

inline float lowest(const float* x, int n) {
  F32 low = splat(kLargest);
  for (int i = 0; i < n; i += kLanes) {
    const F32 v = load_logits(x, i, n);
    low = min(low, n - i < kLanes ? select(first_n(n - i), v, splat(kLargest)) : v);
  }
  return -max_lane(-low);
}

// The lowest index of value ``top``, which is in x.
inline int first_index(const float* x, int n, float top) {
  for (int i = 0; i < n; i += kLanes) {
    const uint32_t found = mask_bits(load_logits(x, i, n) == splat(top));
    if (found != 0) return i + __builtin_ctz(found);
  }
  return 0;
}

// What a weight depends on, besides its logit.
struct Weighing {
  float top;
  float temperature;
  float least;  // min_p * 2^30
};

struct Weighed {
  F32 gap;     // (top - x) / temperature
  F32 weight;  // an integer; 0 for those that are no candidates
};

PELTON_INLINE Weighed weigh(F32 x, const Weighing& w) {
  const F32 gap = (splat(w.top) - x) / splat(w.temperature);
  const F32 y = -min(gap, splat(40.0f));
  const F32 n = round_even(y * splat(1.44269504f));
  const F32 r = (y - n * splat(0.69314575195f)) - n * splat(1.4286067653e-6f);
  F32 p = splat(static_cast<float>(1.0 / 5040));
  p = p * r + splat(static_cast<float>(1.0 / 720));
  p = p * r + splat(static_cast<float>(1.0 / 120));
  p = p * r + splat(static_cast<float>(1.0 / 24));
  p = p * r + splat(static_cast<float>(1.0 / 6));
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  const F32 scaled = p * exp2_int(to_int(n) + splat_int(30));
  return {gap, select(scaled >= splat(w.least), round_even(scaled), zero())};
}

// Exact: integers below 2^53.
PELTON_INLINE uint64_t sum_integers(F64 a) {
  double lane[kLanes];
  store(lane, a);
  uint64_t total = 0;
  for (double value : lane) total += static_cast<uint64_t>(value);
  return total;
}

// floor(u24 * 2^-24 * total) for total < 2^53.
PELTON_INLINE uint64_t scaled_total(uint32_t u24, uint64_t total) {
  const uint64_t low = total & 0xffffffu;
  return u24 * (total >> 24) + ((u24 * low) >> 24);
}

// The draw in id order, over all candidates.
inline int draw_unordered(const float* x, int n, const Weighing& weighing, uint32_t u24) {
  constexpr int kBlocks = 256;
  uint64_t sums[kBlocks];
  const int block = ((n + kBlocks - 1) / kBlocks + kLanes - 1) / kLanes * kLanes;
  uint64_t total = 0;
  for (int b = 0; b * block < n; ++b) {
    const int end = (b + 1) * block < n ? (b + 1) * block : n;
    F64 sum = splat64(0);
    for (int i = b * block; i < end; i += kLanes) {
      sum = sum + widen(weigh(load_logits(x, i, n), weighing).weight);
    }
    sums[b] = sum_integers(sum);
    total += sums[b];
  }
  const uint64_t target = scaled_total(u24, total);
  uint64_t before = 0;
  int b = 0;
  while (before + sums[b] <= target) before += sums[b++];
  for (int i = b * block; i < n; i += kLanes) {
    float lane[kLanes];
    store(lane, weigh(load_logits(x, i, n), weighing).weight);
    for (int j = 0; j < kLanes; ++j) {
      before += static_cast<uint64_t>(lane[j]);
      if (before > target) return i + j;
    }
  }
  return 0;  // not reached: the total exceeds the target
}

// Stable sort of ids by logit, descending; ``other`` is room for n ids. Returns the sorted array.
inline int32_t* sort_by_logit(const float* x, int32_t* ids, int32_t* other, int n) {
  constexpr int kRun = 16;
  for (int start = 0; start < n; start += kRun) {
    const int end = start + kRun < n ? start + kRun : n;
    for (int i = start + 1; i < end; ++i) {
      const int32_t id = ids[i];
      const float key = clean(x[id]);
      int j = i;
      for (; j > start && clean(x[ids[j - 1]]) < key; --j) ids[j] = ids[j - 1];
      ids[j] = id;
    }
  }
  for (int width = kRun; width < n; width *= 2) {
    for (int start = 0; start < n; start += 2 * width) {
      const int middle = start + width < n ? start + width : n;
      const int end = start + 2 * width < n ? start + 2 * width : n;
      int a = start, b = middle;
      for (int i = start; i < end; ++i) {
        const bool take_a = a < middle && (b >= end || !(clean(x[ids[a]]) < clean(x[ids[b]])));
        other[i] = ids[take_a ? a++ : b++];
      }
    }
    int32_t* swap = ids;
    ids = other;
    other = swap;
  }
  return ids;
}

// The candidates of one row in order of (logit descending, id ascending), sorted only where needed.
class OrderedCandidates {
 public:
  OrderedCandidates(const float* x, int n, const Weighing& weighing, int32_t* room_a,
                    int32_t* room_b)
      : x_(x), n_(n), weighing_(weighing), room_a_(room_a), room_b_(room_b) {
    // Spread the bins over the row's own range, so that a flat row too falls in many of them.
    const float range = (weighing.top - lowest(x, n)) / weighing.temperature;
    if (range < kVanishing) scale_ = range > 1e-30f ? kVanishing / range * scale_ : 0.0f;
    const F64 none = splat64(0);
    for (int b = 0; b < kBins; b += kLanes) {
      store_int(count_ + b, splat_int(0));
      store(weight_ + b, none);
    }
    fill_bins(0, kNear, true);
  }

  void keep_best(int k) {
    if (k >= candidates_) return;
    int64_t before = 0;
    for (int b = 0;; ++b) {
      if (b == kNear && !complete_) fill_far();
      if (before + count_[b] >= k) return cut_inside(b, static_cast<int>(k - before));
      before += count_[b];
    }
  }

  // The shortest prefix that has at least the fraction p of the weight.
  void keep_mass(float p) {
    const double wanted = static_cast<double>(p) * total_;
    double before = 0;
    for (int b = 0;; ++b) {
      if (b == kNear && !complete_) fill_far();
      if (before + weight_in(b) >= wanted) {
        sort_bin(b);
        int kept = 0;
        for (; kept < count_in(b) && before < wanted; ++kept) before += sorted_weight_[kept];
        return cut_inside(b, kept);
      }
      before += weight_in(b);
    }
  }

  int draw(uint32_t u24) {
    const double target = static_cast<double>(scaled_total(u24, static_cast<uint64_t>(total_)));
    double before = 0;
    for (int b = 0;; ++b) {
      if (b == kNear && !complete_) fill_far();
      if (before + weight_in(b) > target) {
        sort_bin(b);
        for (int i = 0;; ++i) {
          before += sorted_weight_[i];
          if (before > target) return sorted_[i];
        }
      }
      before += weight_in(b);
    }
  }

 private:
  // Weights vanish before a gap of kVanishing. Bins below kNear are filled first: in most rows the
  // cuts and the draw fall there. A bin's number grows with the gap, since every step that makes
  // it is monotone; it stays below kBins.
  static constexpr int kBins = 1024;
  static constexpr int kNear = 376;
  static constexpr float kVanishing = 21.7f;

  PELTON_INLINE I32 bin_of(F32 gap) const {
    return truncate_int(min(gap, splat(kVanishing)) * splat(scale_));
  }

  void fill_bins(int first, int last, bool totals) {
    F64 total = splat64(0);
    for (int i = 0; i < n_; i += kLanes) {
      const Weighed w = weigh(load_logits(x_, i, n_), weighing_);
      const I32 bin = bin_of(w.gap);
      const Mask candidate = w.weight > zero();
      if (totals) {
        total = total + widen(w.weight);
        candidates_ += __builtin_popcount(mask_bits(candidate));
      }
      uint32_t left = mask_bits(candidate & (bin < splat_int(last)) & (bin > splat_int(first - 1)));
      if (left == 0) continue;
      int32_t bins[kLanes];
      float weights[kLanes];
      store_int(bins, bin);
      store(weights, w.weight);
      for (; left != 0; left &= left - 1) {
        const int j = __builtin_ctz(left);
        count_[bins[j]] += 1;
        weight_[bins[j]] += weights[j];
      }
    }
    if (totals) total_ = static_cast<double>(sum_integers(total));
  }
  void fill_far() {
    fill_bins(kNear, kBins, false);
    complete_ = true;
  }

  // What is kept of a bin.
  int count_in(int b) const { return b == cut_bin_ ? cut_count_ : count_[b]; }
  double weight_in(int b) const { return b == cut_bin_ ? cut_weight_ : weight_[b]; }

  // Keep the bins before b and the first ``kept`` of b.
  void cut_inside(int b, int kept) {
    sort_bin(b);
    double total = 0;
    for (int i = 0; i < kept; ++i) total += sorted_weight_[i];
    cut_bin_ = b;
    cut_count_ = kept;
    cut_weight_ = total;
    for (int i = 0; i < b; ++i) total += weight_[i];
    total_ = total;
  }

  // Members of bin b in order in sorted_, their weights in sorted_weight_.
  void sort_bin(int b) {
    if (sorted_bin_ == b) return;
    int members = 0;
    for (int i = 0; i < n_; i += kLanes) {
      const Weighed w = weigh(load_logits(x_, i, n_), weighing_);
      uint32_t left = mask_bits((w.weight > zero()) & (bin_of(w.gap) == splat_int(b)));
      for (; left != 0; left &= left - 1) room_a_[members++] = i + __builtin_ctz(left);
    }
    sorted_ = sort_by_logit(x_, room_a_, room_b_, members);
    sorted_weight_ = reinterpret_cast<float*>(sorted_ == room_a_ ? room_b_ : room_a_);
    for (int i = 0; i < members; i += kLanes) {
      float keys[kLanes];
      for (int j = 0; j < kLanes; ++j) keys[j] = i + j < members ? x_[sorted_[i + j]] : -kInf;
      const int count = members - i < kLanes ? members - i : kLanes;
      store_n(sorted_weight_ + i, weigh(clean(load(keys)), weighing_).weight, count);
    }
    sorted_bin_ = b;
  }

  const float* x_;
  int n_;
  Weighing weighing_;
  int32_t* room_a_;
  int32_t* room_b_;
  int32_t* sorted_ = nullptr;
  float* sorted_weight_ = nullptr;
  int sorted_bin_ = -1;
  int cut_bin_ = -1;
  int cut_count_ = 0;
  double cut_weight_ = 0;
  int64_t candidates_ = 0;
  double total_ = 0;  // integer weights stay exact in fp64 up to 2^53
  bool complete_ = false;
  float scale_ = 47.0f;  // bins a unit of gap
  int32_t count_[kBins];
  double weight_[kBins];
};

struct DrawParameters {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  uint32_t u24;

  bool greedy() const {
    return !(temperature >= kSmallestNormal) || top_k == 1 || top_p <= 0.0f || min_p >= 1.0f;
  }
};

// The token for adjusted logits x. Greedy rows and rows without top_k and top_p touch no room.
inline int draw(const float* x, int n, const DrawParameters& p, int32_t* room_a, int32_t* room_b) {
  const float top = highest(x, n);
  if (p.greedy() || top == -kInf) return first_index(x, n, top);
  const Weighing weighing{top, p.temperature < kLargest ? p.temperature : kLargest,
                          p.min_p > 0.0f ? p.min_p * 1073741824.0f : 0.0f};
  if (p.top_k <= 0 && !(p.top_p < 1.0f)) return draw_unordered(x, n, weighing, p.u24);
  OrderedCandidates candidates(x, n, weighing, room_a, room_b);
  if (p.top_k > 0) candidates.keep_best(p.top_k);
  if (p.top_p < 1.0f) candidates.keep_mass(p.top_p);
  return candidates.draw(p.u24);
}

}  // namespace pelton
