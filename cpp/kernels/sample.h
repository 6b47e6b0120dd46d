// The two kernels at the ends of a step: ResolveTokens fills in input tokens that an earlier step
// sampled, Sample turns logits into tokens and logprobs. Meaning:
// builder/ops/sampling_reference.py.
#pragma once
#include "pelton/abi.h"
#include "sample_draw.h"

namespace pelton {

// args: token_ids [T], out [T], history [slots][max_seq_len].
template <int kMaxSeqLen>
inline void resolve_tokens(const pelton_step* step, void* const* args,
                           const pelton_worker* worker) {
  const auto* ids = static_cast<const int32_t*>(args[0]);
  auto* out = static_cast<int32_t*>(args[1]);
  auto* history = static_cast<int32_t*>(args[2]);
  for (int t = worker->index; t < step->num_tokens; t += worker->count) {
    const int64_t slot = step->seq_slots[step->token_seq[t]];
    int32_t* place = history + slot * kMaxSeqLen + step->positions[t];
    const int32_t id = ids[t] == -1 ? *place : ids[t];
    out[t] = id;
    *place = id;
  }
}

inline bool in_vocabulary(int32_t id, int n) {
  return static_cast<uint32_t>(id) < static_cast<uint32_t>(n);
}

// Repetition, presence and frequency penalties; ``marks`` is room for n numbers.
inline void penalise(const pelton_sampling& s, int row, const int32_t* past, int past_len, float* x,
                     int n, int32_t* marks) {
  const float repetition = s.repetition_penalty[row];
  const float presence = s.presence_penalty[row];
  const float frequency = s.frequency_penalty[row];
  if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store_int(marks + i, splat_int(0));
  for (; i < n; ++i) marks[i] = 0;
  // mark = 2 * occurrences in the output + 1
  for (int p = 0; p < past_len; ++p) {
    if (!in_vocabulary(past[p], n)) continue;
    int32_t& mark = marks[past[p]];
    mark = (p >= s.prompt_len[row] ? mark + 2 : mark) | 1;
  }
  for (int p = 0; p < past_len; ++p) {
    if (!in_vocabulary(past[p], n) || marks[past[p]] == 0) continue;
    const int32_t count = marks[past[p]] >> 1;
    marks[past[p]] = 0;
    float value = x[past[p]];
    value = value > 0 ? value / repetition : value * repetition;
    if (count > 0) value = (value - frequency * static_cast<float>(count)) - presence;
    x[past[p]] = value;
  }
}

// Where allowed-token bits are 0, the logit becomes -inf.
inline void apply_mask(const uint32_t* allowed, float* x, int n) {
  alignas(64) static constexpr int32_t kLaneBit[kLanes] = {
      1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  const I32 lane_bit = load_int(kLaneBit);
  for (int i = 0; i < n; i += kLanes) {
    const int32_t bits16 = static_cast<int32_t>((allowed[i / 32] >> (i % 32)) & 0xffffu);
    const Mask keep = (splat_int(bits16) & lane_bit) == lane_bit;
    const int count = n - i < kLanes ? n - i : kLanes;
    store_n(x + i, select(keep, load_n(x + i, count), splat(-kInf)), count);
  }
}

// Raw logits with bias, penalties and mask applied, in ``x``; or ``raw`` itself if there are none.
inline const float* adjust(const pelton_sampling& s, int row, const float* raw, int n,
                           const int32_t* past, int past_len, float* x, int32_t* marks) {
  const int bias_begin = s.bias_start[row], bias_end = s.bias_start[row + 1];
  const bool penalties = s.repetition_penalty[row] != 1.0f || s.presence_penalty[row] != 0.0f ||
                         s.frequency_penalty[row] != 0.0f;
  if (bias_begin == bias_end && !penalties && s.mask == nullptr) return raw;
  for (int i = 0; i < n; i += kLanes) {
    store_n(x + i, load_logits(raw, i, n), n - i < kLanes ? n - i : kLanes);
  }
  for (int i = bias_begin; i < bias_end; ++i) {
    if (in_vocabulary(s.bias_ids[i], n)) x[s.bias_ids[i]] += s.bias_values[i];
  }
  if (penalties) penalise(s, row, past, past_len, x, n, marks);
  if (s.mask != nullptr) {
    const int64_t words = (n + 31) / 32;
    apply_mask(s.mask + row * words, x, n);
  }
  return x;
}

// log(sum(exp(x - top))), in an order fixed by n.
inline float log_sum(const float* x, int n, float top) {
  constexpr int kBlock = 64 * kLanes;
  F32 total = zero();
  for (int start = 0; start < n; start += kBlock) {
    const int end = start + kBlock < n ? start + kBlock : n;
    F32 sum = zero();
    for (int i = start; i < end; i += kLanes) sum += exp(load_logits(x, i, n) - splat(top));
    total += sum;
  }
  return log(sum(total));
}

// 1 + how many come before ``token`` by (logit descending, id ascending).
inline int rank_of(const float* x, int n, int token) {
  const F32 mine = splat(clean(x[token]));
  int rank = 1;
  for (int i = 0; i < n; i += kLanes) {
    const F32 v = load_logits(x, i, n);
    uint32_t before = mask_bits(v > mine);
    if (i <= token) {
      const uint32_t lower = token - i >= kLanes ? 0xffffu : (1u << (token - i)) - 1u;
      before |= mask_bits(v == mine) & lower;
    }
    rank += __builtin_popcount(before);
  }
  return rank;
}

// The k best logits (k <= n) in order, ties to the lower id.
inline void best(const float* x, int n, int k, int32_t* ids, float* values) {
  if (k <= 0) return;
  int count = 0;
  for (int i = 0; i < n; i += kLanes) {
    const F32 v = load_logits(x, i, n);
    const int lanes = n - i < kLanes ? n - i : kLanes;
    uint32_t left = (1u << lanes) - 1u;
    if (count == k) left &= mask_bits(v > splat(values[k - 1]));
    if (left == 0) continue;
    float lane[kLanes];
    store(lane, v);
    for (; left != 0; left &= left - 1) {
      const int j = __builtin_ctz(left);
      if (count == k && !(lane[j] > values[k - 1])) continue;
      int place = count < k ? count++ : k - 1;
      for (; place > 0 && values[place - 1] < lane[j]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = lane[j];
      ids[place] = i + j;
    }
  }
}

inline void write_logprobs(const pelton_sampling& s, int row, const float* x, int n, int token,
                           int max_logprobs) {
  int32_t* ids = s.top_ids + static_cast<int64_t>(row) * max_logprobs;
  float* logprobs = s.top_logprobs + static_cast<int64_t>(row) * max_logprobs;
  s.logprobs[row] = 0.0f;
  s.ranks[row] = 0;
  int wanted = s.num_logprobs[row] < max_logprobs ? s.num_logprobs[row] : max_logprobs;
  wanted = wanted < 0 ? 0 : wanted < n ? wanted : n;
  for (int i = wanted; i < max_logprobs; ++i) {
    ids[i] = -1;
    logprobs[i] = -kInf;
  }
  if (s.num_logprobs[row] < 0) return;
  s.ranks[row] = rank_of(x, n, token);
  best(x, n, wanted, ids, logprobs);
  const float top = highest(x, n);
  if (top == -kInf) {
    s.logprobs[row] = -kInf;
    return;
  }
  const float log_total = log_sum(x, n, top);
  s.logprobs[row] = (clean(x[token]) - top) - log_total;
  for (int i = 0; i < wanted; ++i) logprobs[i] = (logprobs[i] - top) - log_total;
}

inline void copy_row(float* to, const float* from, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? n - i : kLanes;
    store_n(to + i, load_n(from + i, count), count);
  }
}

// Bytes of scratch a row in work needs: adjusted logits and two arrays of ids.
constexpr int64_t sample_room(int vocab) { return (int64_t{12} * vocab + 63) / 64 * 64; }

// args: logits [C][V], (token), history [slots][max_seq_len], scratch (sample_room for each worker
// that has a row). Workers take whole rows, so a row's bits depend on nothing but the row. The last
// worker takes the first: with few rows worker 0, on whose thread the next step is planned, has
// none.
template <int kVocab, int kMaxLogprobs, int kMaxSeqLen>
inline void sample(const pelton_step* step, void* const* args, const pelton_worker* worker) {
  const pelton_sampling& s = step->sampling;
  auto* history = static_cast<int32_t*>(args[2]);
  const int first = worker->count - 1 - worker->index;  // of its rows, and its place in the scratch
  auto* x = reinterpret_cast<float*>(static_cast<char*>(args[3]) + first * sample_room(kVocab));
  auto* room_a = reinterpret_cast<int32_t*>(x + kVocab);
  auto* room_b = room_a + kVocab;
  for (int i = first; i < step->row_count; i += worker->count) {
    const int row = step->row_start + i;
    const float* raw = static_cast<const float*>(args[0]) + static_cast<int64_t>(i) * kVocab;
    const int position = step->positions[step->logits_rows[row]];
    const int64_t slot = step->seq_slots[step->row_seq[row]];
    if (s.logits != nullptr) copy_row(s.logits + static_cast<int64_t>(row) * kVocab, raw, kVocab);
    int token = s.forced[row];
    if (token == -1) {
      int32_t* past = history + slot * kMaxSeqLen;
      const float* adjusted = adjust(s, row, raw, kVocab, past, position + 1, x, room_a);
      const DrawParameters parameters{s.temperature[row], s.top_k[row], s.top_p[row], s.min_p[row],
                                      uniform24(s.seed[row], position + 1)};
      token = draw(adjusted, kVocab, parameters, room_a, room_b);
      if (position + 1 < kMaxSeqLen) past[position + 1] = token;
    }
    s.tokens[row] = token;
    write_logprobs(s, row, raw, kVocab, token, kMaxLogprobs);
  }
}

}  // namespace pelton
