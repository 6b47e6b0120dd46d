// The thread team: every worker runs, barriers order memory, and neither hangs nor burns the CPU
// when mates come late or busy threads of others sit on the same CPUs.
#include <sched.h>
#include <sys/resource.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "testing.h"

namespace pelton {
namespace {

void team_runs_every_worker() {
  for (int workers : {1, 2, 3, 8}) {
    auto team = make_team(workers);
    std::vector<std::atomic<int>> seen(static_cast<size_t>(workers));
    for (int turn = 0; turn < 300; ++turn) {
      team->run(
          [](void* context, pelton_worker* w) {
            auto& counts = *static_cast<std::vector<std::atomic<int>>*>(context);
            counts[static_cast<size_t>(w->index)]++;
          },
          &seen);
    }
    for (auto& count : seen) EXPECT(count == 300);
  }
}

// Plain (not atomic) cells: a barrier that lets two phases overlap is a race that TSan reports.
void barriers_order_plain_memory() {
  for (int64_t spin : {int64_t{0}, int64_t{1'000}, int64_t{50'000}}) {
    struct Shared {
      int cells[8] = {};
      int errors[8] = {};
    } shared;
    auto team = make_team(3, spin);
    for (int turn = 0; turn < 100; ++turn) {
      team->run(
          [](void* context, pelton_worker* w) {
            auto& s = *static_cast<Shared*>(context);
            for (int i = 0; i < 20; ++i) {
              s.cells[w->index]++;
              w->barrier(w);
              for (int k = 0; k < w->count; ++k) s.errors[w->index] += s.cells[k] != s.cells[0];
              w->barrier(w);
            }
          },
          &shared);
    }
    for (int errors : shared.errors) EXPECT(errors == 0);
    EXPECT(shared.cells[2] == 2000);
  }
}

void teams_start_and_stop() {
  for (int i = 0; i < 100; ++i) make_team(1 + i % 4);
  EXPECT(throws([] { make_team(0); }, "1 to 64 workers"));
  EXPECT(throws([] { Team(2, {1 << 20}, 0); }, "there is no CPU"));
}

// --- beside others ------------------------------------------------------------------------------

// The CPUs this process may use, at most ``most``.
std::vector<int> usable_cpus(size_t most) {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < most; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// Threads that never give their CPU away, ``each`` of them on every CPU named, until destroyed.
class BusyThreads {
 public:
  BusyThreads(const std::vector<int>& cpus, int each) {
    for (int cpu : cpus) {
      for (int i = 0; i < each; ++i) threads_.emplace_back([this, cpu] { spin(cpu); });
    }
    while (running_ < static_cast<int>(threads_.size())) std::this_thread::yield();
  }
  ~BusyThreads() {
    stop_ = true;
    for (auto& thread : threads_) thread.join();
  }
  BusyThreads(const BusyThreads&) = delete;
  BusyThreads& operator=(const BusyThreads&) = delete;

 private:
  void spin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
    ++running_;
    while (!stop_.load(std::memory_order_relaxed)) {
    }
  }

  std::atomic<bool> stop_{false};
  std::atomic<int> running_{0};
  std::vector<std::thread> threads_;
};

// How often the calling thread has given its CPU away: a futex does, spinning and preemption never.
long times_slept() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Worker 0 comes 5 ms late to every barrier. The others sleep meanwhile (the kernel counts it), and
// what they spin is bounded: processor time, so that it does not matter who else runs here.
void late_mates_are_waited_for_asleep() {
  static constexpr int kBarriers = 20;
  static constexpr double kLate = 5e-3;  // seconds
  for (int64_t spin : {int64_t{0}, int64_t{50'000}}) {
    struct Shared {
      long slept[3] = {};
      double seconds[3] = {};
    } shared;
    make_team(3, spin)->run(
        [](void* context, pelton_worker* w) {
          auto& s = *static_cast<Shared*>(context);
          const long slept = times_slept();
          const double seconds = processor_seconds();
          for (int i = 0; i < kBarriers; ++i) {
            if (w->index == 0) std::this_thread::sleep_for(std::chrono::duration<double>(kLate));
            w->barrier(w);
          }
          s.slept[w->index] = times_slept() - slept;
          s.seconds[w->index] = processor_seconds() - seconds;
        },
        &shared);
    for (int index : {1, 2}) {
      EXPECT(shared.slept[index] >= kBarriers / 2);
      EXPECT(shared.seconds[index] < kBarriers * kLate / 4);
    }
  }
}

// As many busy threads as CPUs and twice as many, on the CPUs that the workers are bound to, and
// teams up to more workers than CPUs. Every phase is seen by every worker, in order.
void barriers_beside_busy_threads() {
  static constexpr int kTurns = 10, kMostTurns = 1000, kPhases = 10;
  const std::vector<int> cpus = usable_cpus(8);
  const int count = static_cast<int>(cpus.size());
  std::vector<int> workers_on;  // of workers 1, 2, ...: no CPU without a busy thread
  for (int i = 0; i <= count; ++i)
    workers_on.push_back(cpus[static_cast<size_t>(i + 1) % cpus.size()]);
  for (const int each : {1, 2}) {
    const BusyThreads busy(cpus, each);
    for (const int workers : {2, count + 1}) {
      for (int64_t spin : {int64_t{0}, int64_t{1'000}, int64_t{50'000}}) {
        struct Shared {
          int cells[10] = {};  // plain: phases that overlap are a race that TSan reports
          int errors[10] = {};
          long slept[10] = {};

          long all_slept() const { return std::accumulate(slept, slept + 10, 0L); }
        } shared;
        auto team = make_team(workers, spin, workers_on);
        int turn = 0;
        // Until a worker has waited for one that did not run: a few turns may well find all of them
        // running.
        for (; turn < kTurns || (shared.all_slept() == 0 && turn < kMostTurns); ++turn) {
          team->run(
              [](void* context, pelton_worker* w) {
                auto& s = *static_cast<Shared*>(context);
                const long slept = times_slept();
                for (int i = 0; i < kPhases; ++i) {
                  const int expected = ++s.cells[w->index];
                  w->barrier(w);
                  for (int k = 0; k < w->count; ++k) s.errors[w->index] += s.cells[k] != expected;
                  w->barrier(w);
                }
                s.slept[w->index] += times_slept() - slept;
              },
              &shared);
        }
        for (int w = 0; w < workers; ++w) {
          EXPECT(shared.cells[w] == turn * kPhases);
          EXPECT(shared.errors[w] == 0);
        }
        EXPECT(shared.all_slept() > 0);  // and its CPU was given away
      }
    }
  }
}

}  // namespace

std::vector<Test> team_tests() {
  return {
      {"team_runs_every_worker", team_runs_every_worker},
      {"barriers_order_plain_memory", barriers_order_plain_memory},
      {"teams_start_and_stop", teams_start_and_stop},
      {"late_mates_are_waited_for_asleep", late_mates_are_waited_for_asleep},
      {"barriers_beside_busy_threads", barriers_beside_busy_threads},
  };
}

}  // namespace pelton
