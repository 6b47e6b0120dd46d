#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cfenv>
#include <climits>
#include <string>
#include <system_error>

#include "clock.h"
#include "error.h"

namespace pelton {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

std::atomic<uint64_t> g_fork_count{0};

// Workers spin longer between jobs than inside one: a step loop comes back after its planning, and
// waking a CPU that has gone to sleep takes longer than that.
constexpr int64_t kBetweenJobs = 2;

// The default floating-point environment (rounding, denormals) for a scope.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace

void check_cpus(const std::vector<int>& cpus) {
  for (int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw Error("there is no CPU " + std::to_string(cpu));
  }
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

uint64_t fork_count() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_fork_count.fetch_add(1); });
  (void)registered;
  return g_fork_count.load();
}

// The order of the writer (value, then sleepers) and of the waiter (sleepers, then value) is
// sequentially consistent: either the writer sees the sleeper, or the sleeper sees the new value.
void WaitWord::set(uint32_t value) {
  value_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

void WaitWord::wait_while(uint32_t old, int64_t spin_ns) {
  if (load() != old) return;
  if (spin_ns > 0) {
    const int64_t deadline = now_ns() + spin_ns;
    do {
      for (int i = 0; i < 32; ++i) {
        pause();
        if (load() != old) return;
      }
    } while (now_ns() < deadline);
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == old) {
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(int workers, const std::vector<int>& cpus, int64_t spin_ns)
    : size_(workers), spin_ns_(spin_ns), fork_count_(fork_count()) {
  if (workers < 1 || workers > kMaxWorkers) {
    throw Error("a thread team has 1 to " + std::to_string(kMaxWorkers) + " workers, not " +
                std::to_string(workers));
  }
  check_cpus(cpus);
  slots_ = std::make_unique<Slot[]>(static_cast<size_t>(workers));
  unclaimed_ = std::make_unique<pelton_unclaimed[]>(static_cast<size_t>(workers));
  for (int i = 0; i < workers; ++i) {
    slots_[i].worker = {i, workers, this, &Team::barrier, unclaimed_.get(), 0};
  }
  // Threads inherit the signal mask: signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 1; i < workers; ++i) {
      const int cpu = static_cast<size_t>(i) <= cpus.size() ? cpus[i - 1] : -1;
      threads_.emplace_back(&Team::loop, this, i, cpu);
    }
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw Error("cannot start thread " + std::to_string(threads_.size() + 1) + " of " +
                std::to_string(workers) + ": " + error.what() + "; ask for fewer threads");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Team::~Team() {
  if (fork_count() == fork_count_) {
    stop();
  } else {
    // A forked child: the threads live in the parent only. Neither join nor detach is defined on
    // them here, so their handles are left behind.
    new std::vector<std::thread>(std::move(threads_));
  }
}

void Team::stop() {
  job_ = nullptr;
  turn_.set(turn_.load() + 1);
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void Team::run(Job job, void* context) {
  if (fork_count() != fork_count_) {
    throw Error(
        "this process is a fork of the one that loaded the engine, and threads do not survive a "
        "fork; "
        "load the engine after forking, or start processes by \"spawn\"");
  }
  DefaultFloats floats;
  job_ = job;
  context_ = context;
  if (size_ > 1) turn_.set(turn_.load() + 1);
  job(context, &slots_[0].worker);
  meet();
}

void Team::loop(int index, int cpu) {
  pthread_setname_np(pthread_self(), ("pelton-" + std::to_string(index)).c_str());
  if (cpu >= 0) pin(cpu);
  DefaultFloats floats;
  for (uint32_t seen = 0;;) {
    turn_.wait_while(seen, kBetweenJobs * spin_ns_);
    ++seen;
    if (job_ == nullptr) return;
    job_(context_, &slots_[index].worker);
    meet();
  }
}

// A central barrier. The last to arrive resets the count before it opens the next phase, so
// whoever has seen the phase change finds the barrier ready for use again.
void Team::meet() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.set(phase + 1);
  } else {
    phase_.wait_while(phase, spin_ns_);
  }
}

void Team::barrier(pelton_worker* worker) { static_cast<Team*>(worker->team)->meet(); }

}  // namespace pelton
