// The thread team: persistent workers that run one function at a time, together.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "pelton/abi.h"

namespace pelton {

constexpr int kMaxWorkers = 64;  // kernels size their per-worker scratch by it

// Throws Error unless each of these can be a CPU's number.
void check_cpus(const std::vector<int>& cpus);
// Bind the calling thread to a CPU. One that went offline, or that a cpuset took away, is no
// reason to fail.
void pin(int cpu);

// How often this process is a fork of a fork: another value than before means that threads, which
// do not survive a fork, are gone. Not a system call.
uint64_t fork_count();

// A word that threads wait on: spin for a while, then sleep in the kernel (futex).
// A writer enters the kernel only if somebody sleeps.
class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value);                        // publish and wake all sleepers
  void wait_while(uint32_t old, int64_t spin_ns);  // return once the value differs

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Workers 1..n-1 are threads of the team; the thread that calls run() is worker 0.
//
// The team's threads block all signals. Each is pinned to its own CPU where ``cpus`` names one; the
// caller is never pinned (its children would inherit it). While a job runs, every worker has
// the default floating-point environment, whatever the caller's is, so that results do not
// depend on which worker computes them.
//
// Fork: threads do not survive it. In a child, run() throws and the destructor only lets go.
class Team {
 public:
  // ``cpus[i]`` is the CPU of worker i + 1; may be empty or shorter. Throws Error.
  Team(int workers, const std::vector<int>& cpus, int64_t spin_ns);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Run ``job(context, worker)`` on every worker and wait for all. One caller at a time.
  using Job = void (*)(void* context, pelton_worker* worker);
  void run(Job job, void* context);

 private:
  struct alignas(PELTON_CACHE_LINE) Slot {
    pelton_worker worker;
  };

  void loop(int index, int cpu);
  void meet();
  void stop();
  static void barrier(pelton_worker* worker);

  const int size_;
  const int64_t spin_ns_;
  const uint64_t fork_count_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  WaitWord turn_;                                // counts jobs; the workers wait on it
  alignas(64) std::atomic<int32_t> arrived_{0};  // in the current barrier
  WaitWord phase_;                               // counts barriers
  std::unique_ptr<Slot[]> slots_;
  std::unique_ptr<pelton_unclaimed[]> unclaimed_;
  std::vector<std::thread> threads_;
};

}  // namespace pelton
