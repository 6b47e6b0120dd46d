#include "check.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace pelton {
namespace {

std::string at(const char* field, size_t index) {
  return std::string("step input ") + field + "[" + std::to_string(index) + "]";
}

template <typename T>
[[noreturn]] void bad(const char* field, size_t index, T value, const std::string& allowed) {
  throw Error(at(field, index) + " is " + std::to_string(value) + "; allowed: " + allowed);
}

std::string range_text(int64_t low, int64_t end) {
  return "[" + std::to_string(low) + ", " + std::to_string(end) + ")";
}

// Every element in [low, end). The first loop has no exit, so that it is vectorised.
void within(const char* field, View<int32_t> values, int32_t low, int32_t end) {
  bool ok = true;
  for (int32_t v : values) ok &= (v >= low) & (v < end);
  if (ok) return;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < low || values[i] >= end) bad(field, i, values[i], range_text(low, end));
  }
}

// Every element passes; comparisons are written so that NaN does not.
template <typename Accept>
void accept(const char* field, View<float> values, const char* allowed, Accept ok) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!ok(values[i])) bad(field, i, values[i], allowed);
  }
}

void count(const char* field, size_t size, int64_t wanted, const char* meaning) {
  if (static_cast<int64_t>(size) != wanted) {
    throw Error(std::string("step input ") + field + " has " + std::to_string(size) +
                " elements; expected " + std::to_string(wanted) + " (" + meaning + ")");
  }
}

void limit(const char* what, int64_t value, int64_t low, int64_t high, const char* flag) {
  if (value < low || value > high) {
    throw Error("the step has " + std::to_string(value) + " " + what + "; this engine takes " +
                std::to_string(low) + " to " + std::to_string(high) + " (rebuild it with " + flag +
                ")");
  }
}

void positive(const char* name, int32_t value) {
  if (value < 1) throw Error(std::string("limits: ") + name + " is " + std::to_string(value));
}

}  // namespace

StepChecker::StepChecker(const Limits& limits) : limits_(limits) {
  positive("max_num_tokens", limits.max_num_tokens);
  positive("max_batch_size", limits.max_batch_size);
  positive("max_seq_len", limits.max_seq_len);
  positive("max_logits_rows", limits.max_logits_rows);
  positive("logits_chunk", limits.logits_chunk);
  positive("tokens_per_block", limits.tokens_per_block);
  positive("vocab_size", limits.vocab_size);
  positive("num_slots", limits.num_slots);
  if (limits.max_logprobs < 0) throw Error("limits: max_logprobs is negative");
  if (limits.num_blocks.size() > PELTON_MAX_KV_GROUPS ||
      limits.num_blocks.size() != limits.windows.size()) {
    throw Error("limits: " + std::to_string(limits.num_blocks.size()) +
                " KV groups; the kernel interface takes " + std::to_string(PELTON_MAX_KV_GROUPS));
  }
  token_seq_.resize(static_cast<size_t>(limits.max_num_tokens));
  slot_marks_.resize(static_cast<size_t>(limits.num_slots));
  for (int32_t blocks : limits.num_blocks) {
    positive("num_blocks", blocks);
    block_marks_.emplace_back(static_cast<size_t>(blocks));
  }
}

bool StepChecker::mark(std::vector<uint32_t>& marks, int32_t index) const {
  uint32_t& mark = marks[static_cast<size_t>(index)];
  if (mark == stamp_) return false;
  mark = stamp_;
  return true;
}

void StepChecker::check(const StepArrays& step) {
  if (++stamp_ == 0) {  // wrapped: old marks could be taken for new ones
    std::fill(slot_marks_.begin(), slot_marks_.end(), 0u);
    for (auto& marks : block_marks_) std::fill(marks.begin(), marks.end(), 0u);
    stamp_ = 1;
  }
  check_sizes(step);
  within("token_ids", step.token_ids, -1, limits_.vocab_size);
  within("positions", step.positions, 0, limits_.max_seq_len);
  check_sequences(step);
  for (size_t group = 0; group < step.block_tables.size(); ++group) check_blocks(step, group);
  check_rows(step);
  check_sampling(step);
}

void StepChecker::check_sizes(const StepArrays& step) const {
  const auto tokens = static_cast<int64_t>(step.token_ids.size());
  const auto seqs = static_cast<int64_t>(step.seq_slots.size());
  const auto rows = static_cast<int64_t>(step.logits_rows.size());
  limit("tokens", tokens, 1, limits_.max_num_tokens, "--max-num-tokens");
  limit("sequences", seqs, 1, limits_.max_batch_size, "--max-batch-size");
  limit("logits rows", rows, 0, limits_.max_logits_rows, "--max-logits-rows");
  count("positions", step.positions.size(), tokens, "one a token");
  count("query_start", step.query_start.size(), seqs + 1, "one a sequence, and the end");
  count("row_seq", step.row_seq.size(), rows, "one a logits row");
  count("block_tables", step.block_tables.size(), static_cast<int64_t>(limits_.num_blocks.size()),
        "one a KV group");
  const int64_t blocks =
      (int64_t{limits_.max_seq_len} + limits_.tokens_per_block - 1) / limits_.tokens_per_block;
  for (const auto& table : step.block_tables) {
    if (table.rows != seqs || table.cols != blocks) {
      throw Error("step input block_tables has a table [" + std::to_string(table.rows) + ", " +
                  std::to_string(table.cols) + "]; expected [" + std::to_string(seqs) + ", " +
                  std::to_string(blocks) + "] (sequences, blocks of the longest sequence)");
    }
  }
  const char* per_row = "one a logits row";
  count("sampling.temperature", step.temperature.size(), rows, per_row);
  count("sampling.top_k", step.top_k.size(), rows, per_row);
  count("sampling.top_p", step.top_p.size(), rows, per_row);
  count("sampling.min_p", step.min_p.size(), rows, per_row);
  count("sampling.repetition_penalty", step.repetition_penalty.size(), rows, per_row);
  count("sampling.presence_penalty", step.presence_penalty.size(), rows, per_row);
  count("sampling.frequency_penalty", step.frequency_penalty.size(), rows, per_row);
  count("sampling.seed", step.seed.size(), rows, per_row);
  count("sampling.num_logprobs", step.num_logprobs.size(), rows, per_row);
  count("sampling.prompt_len", step.prompt_len.size(), rows, per_row);
  count("sampling.forced", step.forced.size(), rows, per_row);
  count("sampling.bias_start", step.bias_start.size(), rows + 1, "one a logits row, and the end");
  count("sampling.bias_values", step.bias_values.size(), static_cast<int64_t>(step.bias_ids.size()),
        "one a bias id");
  const int64_t words = (int64_t{limits_.vocab_size} + 31) / 32;
  if (step.mask && (step.mask->rows != rows || step.mask->cols != words)) {
    throw Error("step input sampling.mask is [" + std::to_string(step.mask->rows) + ", " +
                std::to_string(step.mask->cols) + "]; expected [" + std::to_string(rows) + ", " +
                std::to_string(words) + "] (logits rows, vocabulary / 32)");
  }
}

void StepChecker::check_sequences(const StepArrays& step) {
  const size_t seqs = step.seq_slots.size();
  const auto tokens = static_cast<int32_t>(step.token_ids.size());
  if (step.query_start[0] != 0) bad("query_start", 0, step.query_start[0], "0");
  if (step.query_start[seqs] != tokens) {
    bad("query_start", seqs, step.query_start[seqs],
        "the number of tokens, " + std::to_string(tokens));
  }
  within("seq_slots", step.seq_slots, 0, limits_.num_slots);
  for (size_t s = 0; s < seqs; ++s) {
    const int32_t begin = step.query_start[s];
    const int32_t end = step.query_start[s + 1];
    if (end <= begin || end > tokens) {
      bad("query_start", s + 1, end, "ascending; every sequence of a step has a token");
    }
    if (!mark(slot_marks_, step.seq_slots[s])) {
      bad("seq_slots", s, step.seq_slots[s], "a slot that no other sequence of the step has");
    }
    const int32_t first = step.positions[begin] - begin;
    bool ok = true;
    for (int32_t t = begin; t < end; ++t) ok &= step.positions[t] - t == first;
    for (int32_t t = begin; !ok && t < end; ++t) {
      if (step.positions[t] - t != first) {
        bad("positions", t, step.positions[t], "consecutive within a sequence");
      }
    }
    std::fill(token_seq_.begin() + begin, token_seq_.begin() + end, static_cast<int32_t>(s));
  }
}

void StepChecker::check_blocks(const StepArrays& step, size_t group) {
  const auto& table = step.block_tables[group];
  const int32_t blocks = limits_.num_blocks[group];
  const int32_t window = limits_.windows[group];
  for (size_t s = 0; s < step.seq_slots.size(); ++s) {
    const int32_t* row = table.data + static_cast<int64_t>(s) * table.cols;
    const int32_t first_new = step.positions[step.query_start[s]];
    const int32_t last = step.positions[step.query_start[s + 1] - 1] / limits_.tokens_per_block;
    const int32_t oldest = window > 0 ? std::max(0, first_new - window + 1) : 0;
    const int32_t needed = oldest / limits_.tokens_per_block;
    const int32_t written = first_new / limits_.tokens_per_block;
    const auto fail = [&](int32_t b, const std::string& allowed) {
      const std::string field =
          "block_tables[" + std::to_string(group) + "][" + std::to_string(s) + "]";
      bad(field.c_str(), static_cast<size_t>(b), row[b], allowed);
    };
    bool ok = true;
    for (int32_t b = 0; b < needed; ++b) ok &= (row[b] >= -1) & (row[b] < blocks);
    for (int32_t b = needed; b <= last; ++b) ok &= (row[b] >= 0) & (row[b] < blocks);
    for (int32_t b = 0; !ok && b <= last; ++b) {
      const int32_t low = b < needed ? -1 : 0;
      if (row[b] < low || row[b] >= blocks) fail(b, range_text(low, blocks));
    }
    for (int32_t b = written; b <= last; ++b) {
      if (!mark(block_marks_[group], row[b]))
        fail(b, "a block that nobody else writes in this step");
    }
  }
}

void StepChecker::check_rows(const StepArrays& step) const {
  within("logits_rows", step.logits_rows, 0, static_cast<int32_t>(step.token_ids.size()));
  for (size_t r = 0; r < step.row_seq.size(); ++r) {
    const int32_t owner = token_seq_[static_cast<size_t>(step.logits_rows[r])];
    if (step.row_seq[r] != owner) {
      bad("row_seq", r, step.row_seq[r], "the row's sequence, " + std::to_string(owner));
    }
  }
}

void StepChecker::check_sampling(const StepArrays& step) const {
  const int32_t vocab = limits_.vocab_size;
  within("sampling.num_logprobs", step.num_logprobs, -1, limits_.max_logprobs + 1);
  within("sampling.forced", step.forced, -1, vocab);
  within("sampling.bias_ids", step.bias_ids, 0, vocab);
  within("sampling.top_k", step.top_k, 0, INT32_MAX);
  within("sampling.prompt_len", step.prompt_len, 0, INT32_MAX);
  const auto unit = [](float v) { return v >= 0.0f && v <= 1.0f; };
  const auto finite = [](float v) { return v - v == 0.0f; };
  accept("sampling.temperature", step.temperature, "0 or more, and finite",
         [&](float v) { return v >= 0.0f && finite(v); });
  accept("sampling.top_p", step.top_p, "0 to 1", unit);
  accept("sampling.min_p", step.min_p, "0 to 1", unit);
  accept("sampling.repetition_penalty", step.repetition_penalty, "above 0, and finite",
         [&](float v) { return v > 0.0f && finite(v); });
  accept("sampling.presence_penalty", step.presence_penalty, "finite", finite);
  accept("sampling.frequency_penalty", step.frequency_penalty, "finite", finite);
  accept("sampling.bias_values", step.bias_values, "not NaN", [](float v) { return v == v; });
  const auto total = static_cast<int32_t>(step.bias_ids.size());
  if (step.bias_start[0] != 0) bad("sampling.bias_start", 0, step.bias_start[0], "0");
  for (size_t r = 1; r < step.bias_start.size(); ++r) {
    const int32_t low = step.bias_start[r - 1];
    if (step.bias_start[r] < low || step.bias_start[r] > total) {
      bad("sampling.bias_start", r, step.bias_start[r], "ascending, up to the number of bias ids");
    }
  }
  if (step.bias_start.back() != total) {
    bad("sampling.bias_start", step.bias_start.size() - 1, step.bias_start.back(),
        "the number of bias ids, " + std::to_string(total));
  }
}

}  // namespace pelton
