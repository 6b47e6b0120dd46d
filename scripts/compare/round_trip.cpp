// cpp/runtime/round_trip.h as a library of its own, so that every system's process can ask,
// whatever Python it runs in.
#include "round_trip.h"

#include <sched.h>

namespace {

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

// Seconds. On threads of its own: the caller keeps its CPUs.
extern "C" double round_trip(int first_cpu, int second_cpu) {
  pelton::Ball ball;
  double best = 0.0;
  std::thread first([&] {
    pin(first_cpu);
    best = ball.best_trip();
  });
  std::thread second([&] {
    pin(second_cpu);
    ball.return_all();
  });
  first.join();
  second.join();
  return best;
}
