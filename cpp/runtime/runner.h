// Runs the launches of a plan, a step at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "code_object.h"
#include "region.h"
#include "team.h"
#include "weight_map.h"

namespace pelton {

// Where an argument's memory is. Step inputs have another address each step.
struct Argument {
  enum Kind : int32_t { kMemory = 0, kTokenIds = 1, kPositions = 2 };
  Kind kind = kMemory;
  uint64_t address = 0;  // of kMemory; 0 = absent
};

struct LaunchSpec {
  pelton_kernel kernel = nullptr;
  std::vector<Argument> arguments;
  bool barrier = true;
};

// One layer's KV storage, for copies of whole blocks.
struct PagedState {
  size_t group = 0;
  std::byte* data = nullptr;
  size_t block_bytes = 0;
};

// Where a step's results go; rows as in runtime/step.py's StepOutputs.
struct StepResults {
  std::span<int32_t> tokens, ranks, top_ids;
  std::span<float> logprobs, top_logprobs, logits;  // logits is empty if not wanted
};

// One timed launch: nanoseconds of the steady clock on worker 0.
struct Timing {
  int64_t launch;     // index in the plan
  int64_t row_start;  // of the tail's turn, 0 before the tail
  int64_t begin;
  int64_t kernel_end;  // worker 0 left the kernel
  int64_t end;         // and all workers have met, if the launch has a barrier
};

// Memory to be fetched ahead of its use: one line of every ``stride`` bytes.
struct Nearby {
  const std::byte* data = nullptr;
  size_t size = 0;
  size_t stride = 64;
};

class Runner {
 public:
  // launches[:tail_start] run once a step, the rest once for each chunk of logits rows.
  // ``weights``: those that launches point into, to be moved along with the steps; may be null.
  Runner(std::shared_ptr<Team> team, std::shared_ptr<CodeObject> code,
         const std::vector<LaunchSpec>& launches, size_t tail_start, const Limits& limits,
         std::vector<PagedState> paged, std::shared_ptr<WeightMap> weights = nullptr);

  // Checks and runs one step; nothing has been written if it throws.
  void execute(const StepArrays& step, const StepResults& results);

  // What the caller runs through when a step has ended; weights have displaced it from all caches.
  // Worker 0 fetches it once it has done its part of the last launch, while others finish theirs.
  // Addresses that are no longer valid do no harm. Returns the lines that it takes.
  size_t fetch_at_end(std::vector<Nearby> memory);

  // Copies blocks in all layers of a group, in the order of the lists.
  void copy_blocks(size_t group, std::span<const int32_t> source, std::span<const int32_t> target);

  // Timing of every launch of the coming steps; off costs nothing.
  void set_timing(bool on);
  std::vector<Timing> take_timings();  // of the steps since the last call

 private:
  struct Launch {
    pelton_kernel kernel;
    size_t first_argument;
    bool barrier;
  };

  pelton_step describe(const StepArrays& step, const StepResults& results) const;
  void check_results(const StepArrays& step, const StepResults& results) const;
  void work(pelton_worker* worker);
  void run_launches(size_t begin, size_t end, const pelton_step& step, pelton_worker* worker);

  const std::shared_ptr<Team> team_;
  const std::shared_ptr<CodeObject> code_;  // keeps the kernels mapped
  const Limits limits_;
  const std::vector<PagedState> paged_;
  const std::shared_ptr<WeightMap> weights_;
  StepChecker checker_;
  std::vector<Launch> launches_;
  size_t tail_start_;
  std::vector<void*> arguments_;  // of all launches, one after another
  std::vector<size_t> token_arguments_, position_arguments_;
  std::atomic<bool> busy_{false};
  pelton_step step_{};  // of the step that runs; workers take copies
  std::vector<Nearby> at_end_;
  bool timing_ = false;
  std::vector<Timing> timings_;
};

}  // namespace pelton
