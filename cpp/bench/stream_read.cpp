// How fast this machine reads memory: the roof for decoding. Prints GB/s (median of 9 passes).
//   stream_read THREADS MEGABYTES
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Four independent sums over one sequential stream; the compiler vectorises them.
uint64_t read_all(const uint64_t* p, size_t n) {
  uint64_t a[32] = {};
  for (size_t i = 0; i + 32 <= n; i += 32)
    for (int j = 0; j < 32; ++j) a[j] += p[i + j];
  uint64_t sum = 0;
  for (uint64_t v : a) sum += v;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const size_t bytes = (argc > 2 ? std::atol(argv[2]) : 400) << 20;
  if (threads < 1 || bytes < (1u << 20)) {
    std::fprintf(stderr, "usage: stream_read THREADS MEGABYTES\n");
    return 2;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  auto* words = static_cast<uint64_t*>(memory);
  for (size_t i = 0; i < bytes / 8; ++i) words[i] = i * 0x9E3779B97F4A7C15ull;

  const size_t share = bytes / 8 / threads;
  std::atomic<uint64_t> sink{0};
  std::vector<double> rates;
  for (int pass = 0; pass < 9; ++pass) {
    std::atomic<int> ready{0};
    std::vector<double> seconds(threads);
    std::vector<std::thread> team;
    for (int t = 0; t < threads; ++t)
      team.emplace_back([&, t] {
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET(t, &cpus);
        pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
        ready.fetch_add(1);
        while (ready.load() < threads) {
        }
        const double start = now();
        sink += read_all(words + t * share, share);
        seconds[t] = now() - start;
      });
    for (auto& thread : team) thread.join();
    rates.push_back(share * 8 * threads / *std::max_element(seconds.begin(), seconds.end()) / 1e9);
  }
  std::sort(rates.begin(), rates.end());
  std::printf("%.2f\n", rates[4]);
  return sink.load() == 1;  // keep the sums alive
}
