// The weights of an engine file in memory: usable at once, checked and moved to huge pages in the
// background.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "sha256.h"
#include "team.h"

namespace pelton {

// Maps a range of a file. Then window by window (2 MiB), once and only once: the bytes are read
// into a fresh huge page, compared with their hashes, and the page takes the place of the file's
// pages at the same address (mremap, which is atomic for whoever reads there, even inside a step).
// So pointers never change, bytes never change, and no more than a window for each worker exists
// twice.
//
// Who does the work: while no step runs, a thread of the lowest priority. While steps come one
// after another, that thread waits, because a team that shares a CPU with another busy thread loses
// far more than that CPU's time at its barriers. Instead the team itself does some windows before a
// step, for a fixed share of the time that steps take.
//
// Fork: the mapping stays valid in a child, the thread does not exist there.
class WeightMap {
 public:
  static constexpr size_t kWindow = size_t{2} << 20;
  static constexpr size_t kLeaf = size_t{1} << 20;  // bytes that one hash covers

  struct Range {  // of the file, in bytes
    uint64_t begin, end;
  };

  // Maps ``[offset, offset + nbytes)``; ``offset`` is a multiple of 4096. ``digests``: SHA-256 of
  // every leaf, or empty for no check. ``move``: to huge pages, where the kernel has them. Throws
  // Error. The descriptor stays the caller's.
  WeightMap(int fd, uint64_t offset, size_t nbytes, std::span<const std::byte> digests, bool move);
  ~WeightMap();
  WeightMap(const WeightMap&) = delete;
  WeightMap& operator=(const WeightMap&) = delete;

  const std::byte* data() const { return base_; }  // 2 MiB aligned

  void start();             // the background thread
  void stop();              // it, and work before steps; the mapping stays
  void finish(Team& team);  // all that is left, now

  // Around every step of the team that reads the weights.
  void before_step(Team& team);
  void after_step(int64_t step_ns);

  // Waits until all windows are done; returns whether they are. A negative time waits for ever.
  bool wait(double seconds);
  bool complete() const { return done_.load(std::memory_order_acquire) == windows_; }
  bool moves() const { return move_.load(std::memory_order_relaxed); }
  size_t moved_bytes() const { return moved_.load(std::memory_order_relaxed); }

  // Damage found since the last call. ``damaged`` costs nothing.
  bool damaged() const { return damaged_.load(std::memory_order_acquire); }
  std::vector<Range> take_damage();

 private:
  bool step();  // one window; false if none is left
  void process(size_t window);
  bool check(size_t window, const std::byte* bytes, size_t got);
  bool install(size_t window, std::byte* bytes);
  void loop();
  bool busy() const;
  bool forked() const { return fork_count() != fork_count_; }

  int fd_ = -1;
  const uint64_t offset_;
  const size_t nbytes_, windows_;
  std::vector<Digest> digests_;
  const uint64_t fork_count_;
  void* reserved_ = nullptr;  // address space: the weights, then staging of the same size
  size_t reserved_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::byte* staging_ = nullptr;

  std::atomic<bool> move_, damaged_{false}, stopping_{false};
  std::atomic<size_t> next_{0}, done_{0}, moved_{0};
  std::atomic<int64_t> last_step_{INT64_MIN};  // end of the last step; INT64_MAX inside one
  int64_t credit_ns_ = 0;                      // of the team, for windows before steps

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Range> damage_;
  std::vector<std::unique_ptr<std::byte[]>> scratch_;  // windows that are checked and not moved
  std::thread thread_;
};

}  // namespace pelton
