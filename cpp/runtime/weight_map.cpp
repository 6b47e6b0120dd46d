#include "weight_map.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "clock.h"
#include "error.h"

namespace pelton {
namespace {

using std::chrono::nanoseconds;

constexpr int64_t kShare = 8;                 // the team works 1/8 of its steps' time on windows,
constexpr int64_t kMostCredit = 8'000'000;    // but delays no step by much more than this
constexpr int64_t kIdleAfter = 20'000'000;    // no step for so long: the thread may work
constexpr nanoseconds kLook{kIdleAfter / 2};  // how often it looks
constexpr size_t kMemoryCheck = 32;           // windows between looks at the machine's free memory
constexpr int64_t kLeastMemory = int64_t{256} << 20;

size_t windows_of(size_t nbytes) { return (nbytes + WeightMap::kWindow - 1) / WeightMap::kWindow; }

// Without huge pages a copy has no use.
bool kernel_has_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  return std::getline(file, text) && text.find("[never]") == std::string::npos;
}

bool memory_is_short() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kib = 0; file >> name >> kib; std::getline(file, unit)) {
    if (name == "MemAvailable:") return kib * 1024 < kLeastMemory;
  }
  return false;
}

// Bytes read; fewer than asked at the end of the file or after an error.
size_t read_at(int fd, std::byte* to, size_t nbytes, uint64_t offset) {
  size_t done = 0;
  while (done < nbytes) {
    const ssize_t n = pread(fd, to + done, nbytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

}  // namespace

WeightMap::WeightMap(int fd, uint64_t offset, size_t nbytes, std::span<const std::byte> digests,
                     bool move)
    : offset_(offset),
      nbytes_(nbytes),
      windows_(windows_of(nbytes)),
      digests_(digests.size() / sizeof(Digest)),
      fork_count_(fork_count()),
      move_(move && kernel_has_huge_pages()) {
  const size_t leaves = (nbytes + kLeaf - 1) / kLeaf;
  if (nbytes == 0 || nbytes > SIZE_MAX / 4) throw Error("weights of no use: no bytes, or too many");
  if (!digests.empty() && digests.size() != leaves * sizeof(Digest)) {
    throw Error("weights have " + std::to_string(leaves) + " leaves; the hash tree has " +
                std::to_string(digests.size()) + " bytes, not 32 for each");
  }
  std::memcpy(digests_.data(), digests.data(), digests.size());
  const size_t span = windows_ * kWindow;
  reserved_bytes_ = 2 * span + kWindow;
  reserved_ =
      mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved_ == MAP_FAILED) {
    throw Error("cannot reserve addresses for " + std::to_string(nbytes) + " bytes of weights" +
                errno_text(errno));
  }
  const auto start = (reinterpret_cast<uintptr_t>(reserved_) + kWindow - 1) / kWindow * kWindow;
  base_ = reinterpret_cast<std::byte*>(start);
  staging_ = base_ + span;
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0 || mmap(base_, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd_,
                      static_cast<off_t>(offset)) == MAP_FAILED) {
    const int code = errno;
    if (fd_ >= 0) close(fd_);
    munmap(reserved_, reserved_bytes_);
    throw Error("cannot map the engine file's weights" + errno_text(code));
  }
  if (move_) {
    move_ = mprotect(staging_, span, PROT_READ | PROT_WRITE) == 0 &&
            madvise(staging_, span, MADV_HUGEPAGE) == 0;
  }
  if (!move_ && digests_.empty()) next_ = done_ = windows_;
}

WeightMap::~WeightMap() {
  stop();
  if (thread_.joinable()) new std::thread(std::move(thread_));  // a fork: neither join nor detach
  munmap(reserved_, reserved_bytes_);
  close(fd_);
}

void WeightMap::start() {
  if (complete() || thread_.joinable()) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread(&WeightMap::loop, this);
  } catch (const std::system_error&) {
    // The team does it alone.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WeightMap::stop() {
  stopping_ = true;
  if (forked()) return;  // the thread lives in the parent, and may have held the mutex
  {
    const std::lock_guard lock(mutex_);  // a waiter is either before its test or asleep
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void WeightMap::finish(Team& team) {
  team.run(
      [](void* self, pelton_worker*) {
        while (static_cast<WeightMap*>(self)->step()) continue;
      },
      this);
  wait(-1);  // for what the thread had in hand
}

bool WeightMap::wait(double seconds) {
  if (forked()) return complete();
  std::unique_lock lock(mutex_);
  const auto over = [this] { return complete() || stopping_; };
  if (seconds < 0) {
    changed_.wait(lock, over);
  } else {
    changed_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e9)), over);
  }
  return complete();
}

std::vector<WeightMap::Range> WeightMap::take_damage() {
  const std::lock_guard lock(mutex_);
  damaged_ = false;
  return std::exchange(damage_, {});
}

void WeightMap::before_step(Team& team) {
  if (complete()) return;
  last_step_.store(INT64_MAX, std::memory_order_relaxed);
  while (credit_ns_ > 0 && next_.load(std::memory_order_relaxed) < windows_ && !stopping_) {
    const int64_t begin = now_ns();
    team.run([](void* self, pelton_worker*) { static_cast<WeightMap*>(self)->step(); }, this);
    credit_ns_ -= now_ns() - begin;
  }
}

void WeightMap::after_step(int64_t step_ns) {
  if (complete()) return;
  credit_ns_ = std::min(credit_ns_ + step_ns / kShare, kMostCredit);
  last_step_.store(now_ns(), std::memory_order_relaxed);
}

bool WeightMap::busy() const {
  const int64_t last = last_step_.load(std::memory_order_relaxed);
  return last == INT64_MAX || (last != INT64_MIN && now_ns() - last < kIdleAfter);
}

void WeightMap::loop() {
  pthread_setname_np(pthread_self(), "pelton-weights");
  const sched_param none{};
  // Only CPUs that have nothing else to do.
  if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) setpriority(PRIO_PROCESS, 0, 19);
  while (!stopping_) {
    if (busy()) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kLook, [this] { return stopping_.load(); });
    } else if (!step()) {
      return;
    }
  }
}

bool WeightMap::step() {
  const size_t window = next_.fetch_add(1, std::memory_order_relaxed);
  if (window >= windows_) return false;
  process(window);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == windows_) {
    const std::lock_guard lock(mutex_);  // a waiter is either before its test or asleep
    changed_.notify_all();
  }
  return true;
}

void WeightMap::process(size_t window) {
  const uint64_t begin = uint64_t{window} * kWindow;
  const size_t size = std::min(kWindow, nbytes_ - static_cast<size_t>(begin));
  if (window % kMemoryCheck == 0 && moves() && memory_is_short()) move_ = false;
  if (moves()) {
    std::byte* page = staging_ + begin;
    const size_t got = read_at(fd_, page, size, offset_ + begin);
    if (check(window, page, got) && install(window, page)) {
      moved_.fetch_add(size, std::memory_order_relaxed);
    } else {
      madvise(page, kWindow, MADV_DONTNEED);
    }
  } else if (!digests_.empty()) {
    std::unique_ptr<std::byte[]> buffer;
    {
      const std::lock_guard lock(mutex_);
      if (!scratch_.empty()) {
        buffer = std::move(scratch_.back());
        scratch_.pop_back();
      }
    }
    if (!buffer) buffer = std::make_unique_for_overwrite<std::byte[]>(kWindow);
    check(window, buffer.get(), read_at(fd_, buffer.get(), size, offset_ + begin));
    const std::lock_guard lock(mutex_);
    scratch_.push_back(std::move(buffer));
  }
}

// Whether all of the window was read and is what it should be; notes leaves that are not.
bool WeightMap::check(size_t window, const std::byte* bytes, size_t got) {
  const uint64_t begin = uint64_t{window} * kWindow;
  const size_t size = std::min(kWindow, nbytes_ - static_cast<size_t>(begin));
  if (digests_.empty()) return got == size;
  bool sound = true;
  std::array<Digest, 2> both;
  const bool pair = got == kWindow;
  if (pair) both = sha256_pair(bytes, bytes + kLeaf, kLeaf);
  for (size_t at = 0; at < size; at += kLeaf) {
    const size_t end = std::min(at + kLeaf, size);
    const Digest& wanted = digests_[static_cast<size_t>(begin + at) / kLeaf];
    if (end <= got && (pair ? both[at / kLeaf] : sha256({bytes + at, end - at})) == wanted)
      continue;
    sound = false;
    const std::lock_guard lock(mutex_);
    damage_.push_back({offset_ + begin + at, offset_ + begin + end});
    damaged_ = true;
  }
  return sound;
}

bool WeightMap::install(size_t window, std::byte* page) {
  // Read-only first: no kernel can write to weights. Moved pages stay neighbours of their
  // neighbours, so the kernel merges them into one area. The staging addresses stay reserved.
  constexpr int kFlags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (mprotect(page, kWindow, PROT_READ) == 0 &&
      mremap(page, kWindow, kWindow, kFlags, base_ + window * kWindow) != MAP_FAILED) {
    return true;
  }
  move_ = false;  // the rest stays on the file
  return false;
}

}  // namespace pelton
