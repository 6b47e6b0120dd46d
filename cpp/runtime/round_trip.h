// How long a cache line takes from one thread's CPU to another's and back. A header by itself, so
// that programs which do not load the runtime can measure it too (scripts/compare).
#pragma once
#include <algorithm>
#include <atomic>
#include <thread>

#include "clock.h"

namespace pelton {

// The line that two threads hand to each other. They see the same deadline, so each ends even
// where the other never starts.
class Ball {
 public:
  static constexpr int kBatches = 20;
  static constexpr int kTrips = 200;                 // of a batch
  static constexpr int64_t kLongestNs = 50'000'000;  // after which both stop

  // The first thread: seconds of a round trip in the best batch. If the deadline ends the first
  // batch: of those trips that there were.
  double best_trip() {
    double best = 0.0;
    for (int batch = 0, turn = 0; batch < kBatches; ++batch) {
      const int64_t begin = now_ns();
      for (int trip = 1; trip <= kTrips; ++trip) {
        hand(++turn);
        if (!take(++turn)) return batch > 0 ? best : each(begin, trip);
      }
      best = batch > 0 ? std::min(best, each(begin, kTrips)) : each(begin, kTrips);
    }
    return best;
  }
  // The other: gives the ball back every time.
  void return_all() {
    for (int turn = 1; turn < 2 * kBatches * kTrips && take(turn); turn += 2) hand(turn + 1);
  }

 private:
  void hand(int turn) { turn_.store(turn, std::memory_order_release); }
  // Waits for the other's hand(turn); false if it does not come before the deadline. Yields, so
  // that the other comes where both share a CPU.
  bool take(int turn) const {
    for (int spins = 1; turn_.load(std::memory_order_acquire) != turn; ++spins) {
      if (spins % 4096 == 0) {
        if (now_ns() > deadline_) return false;
        std::this_thread::yield();
      }
    }
    return true;
  }
  static double each(int64_t begin, int trips) {
    return static_cast<double>(now_ns() - begin) * 1e-9 / trips;
  }

  alignas(64) std::atomic<int> turn_{0};
  alignas(64) const int64_t deadline_ = now_ns() + kLongestNs;
};

}  // namespace pelton
