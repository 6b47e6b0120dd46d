#include "roofs.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <system_error>
#include <thread>

#include "clock.h"
#include "error.h"
#include "roof_loops.h"
#include "round_trip.h"
#include "team.h"

namespace pelton {
namespace {

constexpr size_t kStride = 1024;  // of the reading loops

double now() { return static_cast<double>(now_ns()) * 1e-9; }

// Threads leave together. Yields, so that it ends even where threads share a CPU.
class StartLine {
 public:
  explicit StartLine(int threads) : threads_(threads) {}
  void wait(int round) {
    arrived_.fetch_add(1);
    for (int spins = 0; arrived_.load() < threads_ * (round + 1); ++spins) {
      if (spins > 10000) std::this_thread::yield();
    }
  }
  void leave() { arrived_.fetch_add(1 << 24); }  // nobody is to wait for this thread again

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
};

void check(int threads, const std::vector<int>& cpus, size_t read_bytes) {
  if (threads < 1 || threads > kMaxWorkers) {
    throw Error("roofs: 1 to " + std::to_string(kMaxWorkers) + " threads can measure, not " +
                std::to_string(threads));
  }
  check_cpus(cpus);
  if (read_bytes < static_cast<size_t>(threads) * kStride) {
    throw Error("roofs: " + std::to_string(read_bytes) + " bytes to read are too few for " +
                std::to_string(threads) + " threads");
  }
}

}  // namespace

const char* peak_name(Peak peak) {
  switch (peak) {
    case Peak::kFmaF32:
      return "fma_f32";
    case Peak::kDotBf16:
      return "dot_bf16";
    case Peak::kDotInt8:
      return "dot_int8";
  }
  return "";
}

std::string peak_instruction(Peak peak) { return peak_loop(peak).instruction; }

Roofs::Roofs(int threads, std::vector<int> cpus, size_t read_bytes)
    : threads_((check(threads, cpus, read_bytes), threads)),
      cpus_(std::move(cpus)),
      share_(read_bytes / static_cast<size_t>(threads) / kStride * kStride),
      memory_(share_ * static_cast<size_t>(threads)) {
  // Touched by the threads that will read it, so that on several nodes it lies near them.
  seconds(1, [this](int thread) {
    auto* words =
        reinterpret_cast<uint64_t*>(memory_.data() + static_cast<size_t>(thread) * share_);
    for (size_t i = 0; i < share_ / 8; ++i) words[i] = i * 0x9E3779B97F4A7C15ull;
  });
}

template <typename Work, typename GiveUp>
void Roofs::run(const std::vector<int>& which, const Work& work, const GiveUp& give_up) const {
  const auto pinned = [&](int thread) {
    if (static_cast<size_t>(thread) < cpus_.size()) pin(cpus_[static_cast<size_t>(thread)]);
    work(thread);
  };
  std::vector<std::thread> team;
  try {
    for (int thread : which) team.emplace_back(pinned, thread);
  } catch (const std::system_error& error) {
    give_up();
    for (auto& thread : team) thread.join();
    throw Error(std::string("roofs: cannot start a thread: ") + error.what());
  }
  for (auto& thread : team) thread.join();
}

template <typename Work>
std::vector<double> Roofs::seconds(int passes, const Work& work) const {
  if (passes < 1) throw Error("roofs: " + std::to_string(passes) + " passes; at least one");
  const auto count = static_cast<size_t>(threads_) * static_cast<size_t>(passes);
  std::vector<double> begins(count), ends(count);
  std::vector<int> all(static_cast<size_t>(threads_));
  std::iota(all.begin(), all.end(), 0);
  StartLine line(threads_);
  const auto each = [&](int thread) {
    for (int pass = 0; pass < passes; ++pass) {
      const auto at = static_cast<size_t>(pass * threads_ + thread);
      line.wait(pass);
      begins[at] = now();
      work(thread);
      ends[at] = now();
    }
  };
  run(all, each, [&] { line.leave(); });
  std::vector<double> result;
  for (size_t pass = 0; pass < static_cast<size_t>(passes); ++pass) {
    const auto first = static_cast<ptrdiff_t>(pass * static_cast<size_t>(threads_));
    const auto last = first + threads_;
    result.push_back(*std::max_element(ends.begin() + first, ends.begin() + last) -
                     *std::min_element(begins.begin() + first, begins.begin() + last));
  }
  return result;
}

std::vector<double> Roofs::read(int passes) const {
  const ReadLoop loop = read_loop();
  auto rates = seconds(passes, [&](int thread) {
    loop(memory_.data() + static_cast<size_t>(thread) * share_, share_);
  });
  for (double& rate : rates) rate = static_cast<double>(memory_.nbytes()) / rate;
  return rates;
}

std::vector<double> Roofs::peak(Peak peak, int passes) const {
  const PeakLoop loop = peak_loop(peak);
  if (loop.run == nullptr) {
    throw Error(std::string("roofs: this CPU has no instruction for ") + peak_name(peak));
  }
  auto rates = seconds(passes, [&](int) { loop.run(loop.iterations); });
  const double operations = static_cast<double>(loop.operations * loop.iterations) * threads_;
  for (double& rate : rates) rate = operations / rate;
  return rates;
}

double Roofs::round_trip() const {
  double longest = 0.0;
  for (int other = 1; other < threads_; ++other) {
    Ball ball;
    double best = 0.0;
    const auto play = [&](int thread) {
      if (thread == 0) {
        best = ball.best_trip();
      } else {
        ball.return_all();
      }
    };
    run({0, other}, play, [] {});
    longest = std::max(longest, best);
  }
  return longest;
}

}  // namespace pelton
