// What this machine can do at most: reading memory, and arithmetic in registers. The roofs that
// measurements are held against.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "region.h"

namespace pelton {

// Arithmetic whose peak can be measured. An operation is a multiplication or an addition.
enum class Peak { kFmaF32, kDotBf16, kDotInt8 };

// "fma_f32", "dot_bf16" (bf16 pairs into fp32) or "dot_int8" (quads of bytes into int32: u8 x s8 of
// vectors, s8 x s8 of tiles).
const char* peak_name(Peak peak);
// The instruction that would be measured here ("avx512 vdpbf16ps", "amx tdpbf16ps"), or "" if this
// CPU has none. Tiles count if the kernel grants them, for which it is asked.
std::string peak_instruction(Peak peak);

// Threads that each do the same work at once, pinned where ``cpus`` names a CPU for each.
//
// A pass lasts from the first thread's start to the last one's end. The rates of all passes are
// returned: the caller takes medians.
class Roofs {
 public:
  // ``read_bytes`` are read by read(); several times the last-level cache. Throws Error.
  Roofs(int threads, std::vector<int> cpus, size_t read_bytes);

  // Bytes a second of a sequential read from huge pages, each thread its own share.
  std::vector<double> read(int passes) const;
  // Operations a second of all threads. Throws Error if this CPU lacks the instruction.
  std::vector<double> peak(Peak peak, int passes) const;
  // Seconds that a cache line takes from thread 0's CPU to another's and back: the best of some
  // batches, of the farthest CPU; 0 with one thread. It tells where the CPUs are: a hypervisor
  // moves virtual ones between cores of one chiplet, which share its link to memory, and cores of
  // several, which read faster together. The reading roof holds for one placement only. Takes
  // milliseconds for each thread, more where threads share a CPU or others are busy.
  double round_trip() const;

 private:
  // Runs work(thread) for each of ``which`` on a thread of its own, pinned, and waits for all.
  // ``give_up`` is called where one cannot start: those running must end without it.
  template <typename Work, typename GiveUp>
  void run(const std::vector<int>& which, const Work& work, const GiveUp& give_up) const;
  template <typename Work>
  std::vector<double> seconds(int passes, const Work& work) const;

  const int threads_;
  const std::vector<int> cpus_;
  const size_t share_;  // bytes of one thread, whole cache lines
  const Region memory_;
};

}  // namespace pelton
