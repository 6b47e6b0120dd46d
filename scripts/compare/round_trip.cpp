// How long a cache line takes from one CPU to another and back. A library of its own, so that every
// system's process can ask, whatever Python it runs in.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace {

constexpr int kBatches = 20;
constexpr int kTrips = 200;  // of a batch
constexpr std::chrono::milliseconds kDeadline(100);

using Clock = std::chrono::steady_clock;

struct Line {
  alignas(128) std::atomic<int> turn{0};
};

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

// Passes the line on; false once it is too late.
bool pass(Line& line, int side, Clock::time_point deadline) {
  for (int spins = 0; line.turn.load(std::memory_order_acquire) != side;) {
    if (++spins % 4096 == 0) {
      if (Clock::now() > deadline) return false;
      std::this_thread::yield();  // where other programs are busy, the other side may wait for a
                                  // CPU
    }
  }
  line.turn.store(1 - side, std::memory_order_release);
  return true;
}

}  // namespace

// Seconds, the least of some batches' means; 0 where the two never ran at the same time.
extern "C" double round_trip(int first_cpu, int second_cpu) {
  Line line;
  const auto deadline = Clock::now() + kDeadline;
  std::thread other([&] {
    pin(second_cpu);
    for (int i = 0; i < kBatches * kTrips && pass(line, 1, deadline); ++i) {
    }
  });
  double best = 0;
  std::thread here([&] {  // the caller keeps its own CPUs
    pin(first_cpu);
    for (int batch = 0; batch < kBatches; ++batch) {
      const auto begin = Clock::now();
      for (int i = 0; i < kTrips; ++i) {
        if (!pass(line, 0, deadline)) return;
      }
      const double mean = std::chrono::duration<double>(Clock::now() - begin).count() / kTrips;
      best = batch == 0 ? mean : std::min(best, mean);
    }
  });
  here.join();
  other.join();
  return best;
}
