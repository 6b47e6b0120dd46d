// One step as it comes from the scheduler, and the checks that make it safe to run.
//
// Kernels index memory with what stands in these arrays and check nothing themselves, so every
// value that becomes an index is checked here, once a step, on the calling thread.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pelton/abi.h"

namespace pelton {

template <typename T>
using View = std::span<const T>;

template <typename T>
struct Table {  // row-major [rows, cols]
  const T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
};

// The fields of runtime/step.py's StepInputs and SamplingInputs, under the same names.
struct StepArrays {
  View<int32_t> token_ids, positions, query_start, seq_slots, logits_rows, row_seq;
  std::vector<Table<int32_t>> block_tables;
  View<float> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  View<int32_t> top_k, num_logprobs, prompt_len, forced, bias_start, bias_ids;
  View<float> bias_values;
  View<uint64_t> seed;
  std::optional<Table<uint32_t>> mask;
};

// What the engine was built for, and how much state was allocated.
struct Limits {
  int32_t max_num_tokens = 0;
  int32_t max_batch_size = 0;
  int32_t max_seq_len = 0;
  int32_t max_logits_rows = 0;
  int32_t logits_chunk = 0;
  int32_t tokens_per_block = 0;
  int32_t max_logprobs = 0;
  int32_t vocab_size = 0;
  int32_t num_slots = 0;
  std::vector<int32_t> num_blocks;  // of each KV group
  std::vector<int32_t> windows;     // of each KV group; 0 = none
};

class StepChecker {
 public:
  explicit StepChecker(const Limits& limits);  // throws Error

  // Throws Error naming the field, the element, its value and what is allowed.
  void check(const StepArrays& step);

  // Sequence of each token of the step last checked, [T].
  const int32_t* token_seq() const { return token_seq_.data(); }

 private:
  void check_sizes(const StepArrays& step) const;
  void check_sequences(const StepArrays& step);
  void check_blocks(const StepArrays& step, size_t group);
  void check_rows(const StepArrays& step) const;
  void check_sampling(const StepArrays& step) const;
  // Marks an index as used in this step; false if it was already.
  bool mark(std::vector<uint32_t>& marks, int32_t index) const;

  Limits limits_;
  std::vector<int32_t> token_seq_;
  uint32_t stamp_ = 0;  // marks with this value belong to the current step
  std::vector<uint32_t> slot_marks_;
  std::vector<std::vector<uint32_t>> block_marks_;
};

}  // namespace pelton
