// Work that is shared out while it is done, so that a worker that is held up, by a neighbour on its
// CPU or by slow memory, keeps nobody waiting for long.
#pragma once
#include "work.h"

namespace pelton {

// Each worker begins with its equal part of [0, total), as share() has it, and claims it from the
// front, piece by piece. When that is used up it takes over the second half of what another one has
// not claimed yet. So pieces follow each other in memory but for a few times near the end, every
// item is one worker's, and which one's depends on time: only for work whose result does not.
//
// Every worker of the team must make its Claims of the same jobs in the same order, and take until
// nothing is left; no barrier is needed before, between or after.
class Claims {
 public:
  static constexpr int64_t kMost = (1 << 24) - 1;  // items

  // grain: pieces are multiples of it, but for the last ones.
  PELTON_INLINE Claims(int64_t total, pelton_worker* worker, int64_t grain = 1)
      : worker_(worker), grain_(grain), job_(++worker->jobs & 0xffff) {
    const Range mine = share(total, worker);
    if (worker->count == 1) {
      alone_ = mine;
    } else {
      // Nobody else writes here: what was left of the job before is nothing.
      __atomic_store_n(part(worker->index), packed(mine), __ATOMIC_RELAXED);
    }
  }

  // The next piece, which is this worker's alone; empty when all is claimed.
  PELTON_INLINE Range take() {
    if (worker_->count == 1) {
      const Range all = alone_;
      alone_ = {0, 0};
      return all;
    }
    return claim();
  }

 private:
  // Out of line: it is called once in many microseconds.
  __attribute__((noinline)) Range claim() {
    for (;;) {
      uint64_t* own = part(worker_->index);
      uint64_t seen = __atomic_load_n(own, __ATOMIC_RELAXED);
      const Range left = range(seen);
      const int64_t count = left.end - left.begin;
      if (count == 0) {
        if (!take_over()) return {0, 0};
        continue;
      }
      const int64_t whole = count / kPieces / grain_ * grain_;
      const int64_t end = left.begin + smaller(larger(whole, grain_), count);
      if (exchange(own, seen, {end, left.end})) return {left.begin, end};
    }
  }
  // Half of what the first one has that has any.
  PELTON_INLINE bool take_over() {
    for (int32_t i = 1; i < worker_->count; ++i) {
      uint64_t* other = part((worker_->index + i) % worker_->count);
      uint64_t seen = __atomic_load_n(other, __ATOMIC_RELAXED);
      // Another one's part of an earlier job or of a later one is none of this.
      while (seen >> 48 == job_ && range(seen).begin < range(seen).end) {
        const Range left = range(seen);
        const int64_t middle = left.begin + (left.end - left.begin) / 2;
        if (exchange(other, seen, {left.begin, middle})) {
          __atomic_store_n(part(worker_->index), packed({middle, left.end}), __ATOMIC_RELAXED);
          return true;
        }
      }
    }
    return false;
  }

  PELTON_INLINE uint64_t* part(int32_t index) const { return &worker_->unclaimed[index].range; }
  // 16 bits of the job's number, 24 for each end.
  PELTON_INLINE uint64_t packed(Range range) const {
    return uint64_t{job_} << 48 | static_cast<uint64_t>(range.begin) << 24 |
           static_cast<uint64_t>(range.end);
  }
  static PELTON_INLINE Range range(uint64_t packed) {
    return {static_cast<int64_t>(packed >> 24 & kMost), static_cast<int64_t>(packed & kMost)};
  }
  PELTON_INLINE bool exchange(uint64_t* part, uint64_t& seen, Range range) const {
    return __atomic_compare_exchange_n(part, &seen, packed(range), false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }

  // A piece is this part of what is left: the rest can be taken over.
  static constexpr int64_t kPieces = 4;

  pelton_worker* worker_;
  int64_t grain_;
  uint32_t job_;
  Range alone_{0, 0};
};

}  // namespace pelton
