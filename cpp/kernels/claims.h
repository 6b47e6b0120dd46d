// Work that is shared out while it is done, so that a worker that is held up in the middle of it,
// by a neighbour on its CPU or by slow memory, keeps nobody waiting for long.
#pragma once
#include "work.h"

namespace pelton {

// Each worker begins with its equal part of [0, total), as share() has it, and claims it from the
// front, piece by piece. When that is used up it takes over the second half of what another one has
// not claimed yet. So pieces follow each other in memory but for a few times near the end, every
// item is one worker's, and which one's depends on time: only for work whose result does not.
//
// Every worker of the team must make its Claims of the same jobs in the same order, and take until
// nothing is left; no barrier is needed before, between or after, as long as no two are 2^16 jobs
// apart. A worker that has not begun a job cannot be helped. Claims order no other memory: what
// items read must have been published by a barrier.
class Claims {
 public:
  // Items that have room in a part. Of more, two or four and so on are claimed as one.
  static constexpr int64_t kMost = (1 << 24) - 1;

  // grain: pieces end at multiples of it, but for those at the end of what a worker has.
  // most: of a piece, if that is more than a grain; for items of which some take much longer.
  PELTON_INLINE Claims(int64_t total, pelton_worker* worker, int64_t grain = 1,
                       int64_t most = kMost)
      : worker_(worker), total_(total), job_(++worker->jobs & 0xffff) {
    if (worker->count == 1) {
      alone_ = {0, total};
      return;
    }
    while (units(total) > kMost) ++shift_;
    grain_ = units(grain), most_ = units(most);
    // What this worker had of the job before is used up, and others only change what is not.
    publish(share(units(total), worker));
  }

  // The next piece, which is this worker's alone; empty when all is claimed.
  PELTON_INLINE Range take() {
    if (worker_->count == 1) {
      const Range all = alone_;
      alone_ = {0, 0};
      return all;
    }
    const Range piece = claim();
    return {piece.begin << shift_, smaller(piece.end << shift_, total_)};
  }

 private:
  // Out of line: it is called once in many microseconds.
  __attribute__((noinline)) Range claim() {
    uint64_t* own = part(worker_->index);
    uint64_t seen = __atomic_load_n(own, __ATOMIC_RELAXED);
    while (any(seen)) {
      const Range left = range(seen), piece = {left.begin, end_of_piece(left)};
      if (exchange(own, seen, {piece.end, left.end})) return piece;
    }
    return take_over();
  }
  // The first piece of the second half of what the next worker has left that has anything left; the
  // others of it become this worker's own.
  PELTON_INLINE Range take_over() {
    for (int32_t i = 1; i < worker_->count; ++i) {
      uint64_t* other = part((worker_->index + i) % worker_->count);
      uint64_t seen = __atomic_load_n(other, __ATOMIC_RELAXED);
      // Another one's part of an earlier job or of a later one is none of this.
      while (seen >> 48 == job_ && any(seen)) {
        const Range left = range(seen);
        const int64_t middle = left.begin + (left.end - left.begin) / 2;
        if (exchange(other, seen, {left.begin, middle})) {
          const int64_t end = end_of_piece({middle, left.end});
          publish({end, left.end});
          return {middle, end};
        }
      }
    }
    return {0, 0};
  }

  // A piece is a quarter of what is left, or a grain: the rest can be taken over.
  PELTON_INLINE int64_t end_of_piece(Range left) const {
    const int64_t quarter = smaller((left.end - left.begin) / 4, most_);
    const int64_t end = left.begin + larger(quarter, grain_);
    return smaller(end / grain_ * grain_, left.end);
  }
  PELTON_INLINE int64_t units(int64_t items) const {
    return divide_up(items, int64_t{1} << shift_);
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
  static PELTON_INLINE bool any(uint64_t packed) { return range(packed).begin < range(packed).end; }
  PELTON_INLINE void publish(Range own) const {
    __atomic_store_n(part(worker_->index), packed(own), __ATOMIC_RELAXED);
  }
  PELTON_INLINE bool exchange(uint64_t* part, uint64_t& seen, Range range) const {
    return __atomic_compare_exchange_n(part, &seen, packed(range), false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }

  pelton_worker* worker_;
  int64_t total_, grain_ = 1, most_ = kMost;
  int shift_ = 0;  // a unit that is claimed is 2^shift items
  uint32_t job_;
  Range alone_{0, 0};
};

}  // namespace pelton
