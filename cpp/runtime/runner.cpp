#include "runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "clock.h"
#include "error.h"

namespace pelton {
namespace {

// Two threads in one runner would share its arena: refuse, rather than corrupt.
class Exclusive {
 public:
  explicit Exclusive(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      throw Error("two threads use one driver at once; a driver belongs to one step loop");
    }
  }
  ~Exclusive() { busy_.store(false, std::memory_order_release); }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  std::atomic<bool>& busy_;
};

void count(const char* name, size_t size, int64_t wanted) {
  if (static_cast<int64_t>(size) != wanted) {
    throw Error(std::string("step output ") + name + " has " + std::to_string(size) +
                " elements; expected " + std::to_string(wanted));
  }
}

// Into the second-level cache, which instructions come through too. Always inline: g++ may drop the
// call of a function that only prefetches.
[[gnu::always_inline]] inline void fetch(const std::vector<Nearby>& memory) {
  for (const Nearby& part : memory) {
    for (size_t i = 0; i < part.size; i += part.stride) __builtin_prefetch(part.data + i, 0, 2);
  }
}

}  // namespace

Runner::Runner(std::shared_ptr<Team> team, std::shared_ptr<CodeObject> code,
               const std::vector<LaunchSpec>& launches, size_t tail_start, const Limits& limits,
               std::vector<PagedState> paged, std::shared_ptr<WeightMap> weights)
    : team_(std::move(team)),
      code_(std::move(code)),
      limits_(limits),
      paged_(std::move(paged)),
      weights_(std::move(weights)),
      checker_(limits),
      tail_start_(tail_start) {
  if (tail_start > launches.size()) {
    throw Error("plan: tail_start is " + std::to_string(tail_start) + " of " +
                std::to_string(launches.size()) + " launches");
  }
  for (const auto& state : paged_) {
    if (state.group >= limits.num_blocks.size()) {
      throw Error("plan: a state names KV group " + std::to_string(state.group) + " of " +
                  std::to_string(limits.num_blocks.size()));
    }
  }
  for (const auto& launch : launches) {
    launches_.push_back({launch.kernel, arguments_.size(), launch.barrier});
    for (const auto& argument : launch.arguments) {
      if (argument.kind == Argument::kTokenIds) token_arguments_.push_back(arguments_.size());
      if (argument.kind == Argument::kPositions) position_arguments_.push_back(arguments_.size());
      arguments_.push_back(reinterpret_cast<void*>(argument.address));
    }
  }
}

void Runner::check_results(const StepArrays& step, const StepResults& results) const {
  const auto rows = static_cast<int64_t>(step.logits_rows.size());
  count("tokens", results.tokens.size(), rows);
  count("logprobs", results.logprobs.size(), rows);
  count("ranks", results.ranks.size(), rows);
  count("top_ids", results.top_ids.size(), rows * limits_.max_logprobs);
  count("top_logprobs", results.top_logprobs.size(), rows * limits_.max_logprobs);
  if (results.logits.data() != nullptr) {
    count("logits", results.logits.size(), rows * limits_.vocab_size);
  }
}

pelton_step Runner::describe(const StepArrays& in, const StepResults& out) const {
  pelton_step step{};
  step.num_tokens = static_cast<int32_t>(in.token_ids.size());
  step.num_seqs = static_cast<int32_t>(in.seq_slots.size());
  step.num_rows = static_cast<int32_t>(in.logits_rows.size());
  step.token_ids = in.token_ids.data();
  step.positions = in.positions.data();
  step.token_seq = checker_.token_seq();
  step.query_start = in.query_start.data();
  step.seq_slots = in.seq_slots.data();
  step.logits_rows = in.logits_rows.data();
  step.row_seq = in.row_seq.data();
  for (size_t g = 0; g < in.block_tables.size(); ++g)
    step.block_tables[g] = in.block_tables[g].data;
  if (!in.block_tables.empty()) step.max_blocks = static_cast<int32_t>(in.block_tables[0].cols);
  step.sampling = {
      .temperature = in.temperature.data(),
      .top_k = in.top_k.data(),
      .top_p = in.top_p.data(),
      .min_p = in.min_p.data(),
      .repetition_penalty = in.repetition_penalty.data(),
      .presence_penalty = in.presence_penalty.data(),
      .frequency_penalty = in.frequency_penalty.data(),
      .seed = in.seed.data(),
      .num_logprobs = in.num_logprobs.data(),
      .prompt_len = in.prompt_len.data(),
      .forced = in.forced.data(),
      .bias_start = in.bias_start.data(),
      .bias_ids = in.bias_ids.data(),
      .bias_values = in.bias_values.data(),
      .mask = in.mask ? in.mask->data : nullptr,
      .tokens = out.tokens.data(),
      .logprobs = out.logprobs.data(),
      .ranks = out.ranks.data(),
      .top_ids = out.top_ids.data(),
      .top_logprobs = out.top_logprobs.data(),
      .logits = out.logits.data(),
  };
  return step;
}

void Runner::execute(const StepArrays& step, const StepResults& results) {
  Exclusive exclusive(busy_);
  checker_.check(step);
  check_results(step, results);
  step_ = describe(step, results);
  for (size_t i : token_arguments_) arguments_[i] = const_cast<int32_t*>(step.token_ids.data());
  for (size_t i : position_arguments_) arguments_[i] = const_cast<int32_t*>(step.positions.data());
  if (timing_) {
    const size_t chunk = static_cast<size_t>(limits_.logits_chunk);
    const size_t turns = (step.logits_rows.size() + chunk - 1) / chunk;
    const size_t wanted = timings_.size() + tail_start_ + turns * (launches_.size() - tail_start_);
    if (wanted > timings_.capacity()) timings_.reserve(2 * wanted);
  }
  if (weights_) weights_->before_step(*team_);
  const int64_t begin = weights_ ? now_ns() : 0;
  team_->run([](void* self, pelton_worker* worker) { static_cast<Runner*>(self)->work(worker); },
             this);
  if (weights_) weights_->after_step(now_ns() - begin);
}

void Runner::work(pelton_worker* worker) {
  pelton_step step = step_;  // own copy: workers may be in different turns of the tail
  run_launches(0, tail_start_, step, worker);
  if (tail_start_ == launches_.size()) return;
  for (int32_t row = 0; row < step.num_rows; row += limits_.logits_chunk) {
    step.row_start = row;
    step.row_count = std::min(limits_.logits_chunk, step.num_rows - row);
    run_launches(tail_start_, launches_.size(), step, worker);
    // The next turn reuses the buffers of this one, whatever the last launch's flag says.
    if (!launches_.back().barrier) worker->barrier(worker);
  }
}

void Runner::run_launches(size_t begin, size_t end, const pelton_step& step,
                          pelton_worker* worker) {
  const bool timed = timing_ && worker->index == 0;
  for (size_t i = begin; i < end; ++i) {
    const Launch& launch = launches_[i];
    Timing timing{static_cast<int64_t>(i), step.row_start, timed ? now_ns() : 0, 0, 0};
    launch.kernel(&step, arguments_.data() + launch.first_argument, worker);
    if (timed) timing.kernel_end = now_ns();
    if (worker->index == 0 && i + 1 == launches_.size()) fetch(at_end_);
    if (launch.barrier) worker->barrier(worker);
    if (timed) {
      timing.end = now_ns();
      timings_.push_back(timing);
    }
  }
}

size_t Runner::fetch_at_end(std::vector<Nearby> memory) {
  Exclusive exclusive(busy_);
  at_end_ = std::move(memory);
  size_t lines = 0;
  for (const Nearby& part : at_end_) lines += (part.size + part.stride - 1) / part.stride;
  return lines;
}

void Runner::copy_blocks(size_t group, std::span<const int32_t> source,
                         std::span<const int32_t> target) {
  Exclusive exclusive(busy_);
  if (group >= limits_.num_blocks.size()) {
    throw Error("copy_blocks: there is no KV group " + std::to_string(group));
  }
  if (source.size() != target.size()) {
    throw Error("copy_blocks: " + std::to_string(source.size()) + " sources and " +
                std::to_string(target.size()) + " targets");
  }
  const int32_t blocks = limits_.num_blocks[group];
  for (const auto list : {source, target}) {
    for (int32_t block : list) {
      if (block < 0 || block >= blocks) {
        throw Error("copy_blocks: block " + std::to_string(block) + " of " +
                    std::to_string(blocks));
      }
    }
  }
  for (const auto& state : paged_) {
    if (state.group != group) continue;
    for (size_t i = 0; i < source.size(); ++i) {
      // A block may be copied onto itself.
      std::memmove(state.data + static_cast<size_t>(target[i]) * state.block_bytes,
                   state.data + static_cast<size_t>(source[i]) * state.block_bytes,
                   state.block_bytes);
    }
  }
}

void Runner::set_timing(bool on) {
  Exclusive exclusive(busy_);
  timing_ = on;
}

std::vector<Timing> Runner::take_timings() {
  Exclusive exclusive(busy_);
  return std::exchange(timings_, {});
}

}  // namespace pelton
