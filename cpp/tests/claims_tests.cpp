// Work that is claimed while it is done (kernels/claims.h): every item goes to one worker, once,
// whoever is late, however jobs follow each other.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "claims.h"
#include "testing.h"

namespace pelton {
namespace {

struct Job {
  int64_t total, grain;
};

// Jobs one after the other, without barriers. The counters of a job are written by whoever claims.
struct Series {
  std::vector<Job> jobs;
  std::vector<std::vector<std::atomic<int>>> times;  // of each item
  int slow = -1;  // a worker that waits with its first piece until all others are done
  std::atomic<int64_t> by_slow{0}, by_others{0};

  explicit Series(std::vector<Job> list) : jobs(std::move(list)) {
    for (const Job& job : jobs) times.emplace_back(static_cast<size_t>(job.total));
  }
  void work(pelton_worker* worker) {
    for (size_t j = 0; j < jobs.size(); ++j) {
      Claims claims(jobs[j].total, worker, jobs[j].grain);
      Range mine = claims.take();
      if (slow >= 0) worker->barrier(worker);
      if (worker->index == slow) {
        const int64_t others = jobs[j].total - (mine.end - mine.begin);
        while (by_others < others) std::this_thread::yield();
      }
      for (; mine.begin < mine.end; mine = claims.take()) {
        (worker->index == slow ? by_slow : by_others) += mine.end - mine.begin;
        for (int64_t i = mine.begin; i < mine.end; ++i) times[j][static_cast<size_t>(i)]++;
      }
    }
  }
  void run(Team& team) {
    team.run([](void* self, pelton_worker* w) { static_cast<Series*>(self)->work(w); }, this);
  }
  bool each_once() const {
    return std::all_of(times.begin(), times.end(), [](const auto& job) {
      return std::all_of(job.begin(), job.end(), [](const auto& count) { return count == 1; });
    });
  }
};

void claims_give_each_item_once() {
  for (const int workers : {1, 2, 3, 7}) {
    auto team = make_team(workers);
    for (int turn = 0; turn < 200; ++turn) {
      std::vector<Job> jobs;
      for (int64_t j = 0; j < 12; ++j) jobs.push_back({(turn * 7 + j * 31) % 97, 1 + j % 3 * 5});
      Series series(std::move(jobs));
      series.run(*team);
      EXPECT(series.each_once());
    }
  }
}

void claims_outlive_their_numbers() {
  // A job's number has 16 bits.
  auto team = make_team(2);
  for (int turn = 0; turn < 5; ++turn) {
    Series series(std::vector<Job>(20'000, Job{3, 1}));
    series.run(*team);
    EXPECT(series.each_once());
  }
}

void mates_take_over_from_a_late_worker() {
  for (const int slow : {0, 1}) {
    Series series({{1000, 1}});
    series.slow = slow;
    series.run(*make_team(2));
    EXPECT(series.each_once());
    EXPECT(series.by_slow == 500 / 4);
  }
}

// Worker by worker, each to its end, so that what is taken is known: pieces are whole grains and
// begin at the worker's own part.
void claims_come_in_grains() {
  pelton_unclaimed unclaimed[2] = {};
  pelton_worker workers[2];
  for (int i = 0; i < 2; ++i) workers[i] = {i, 2, nullptr, nullptr, unclaimed, 0};
  Claims second(100, &workers[1], 10), first(100, &workers[0], 10);
  std::vector<Range> taken;
  for (Range mine = first.take(); mine.begin < mine.end; mine = first.take()) {
    taken.push_back(mine);
  }
  EXPECT(taken.front().begin == 0 && taken.front().end == 10);
  int64_t items = 0;
  for (const Range& range : taken) items += range.end - range.begin;
  EXPECT(items == 100);
  EXPECT(std::any_of(taken.begin(), taken.end(),
                     [](const Range& range) { return range.begin == 75 && range.end == 85; }));
  const Range rest = second.take();
  EXPECT(rest.begin == rest.end);
}

void claims_of_one_worker_are_one_piece() {
  pelton_worker alone = {0, 1, nullptr, nullptr, nullptr, 0};
  Claims claims(100, &alone, 10);
  const Range all = claims.take();
  EXPECT(all.begin == 0 && all.end == 100);
  const Range rest = claims.take();
  EXPECT(rest.begin == rest.end);
}

}  // namespace

std::vector<Test> claims_tests() {
  return {
      {"claims_give_each_item_once", claims_give_each_item_once},
      {"claims_outlive_their_numbers", claims_outlive_their_numbers},
      {"mates_take_over_from_a_late_worker", mates_take_over_from_a_late_worker},
      {"claims_come_in_grains", claims_come_in_grains},
      {"claims_of_one_worker_are_one_piece", claims_of_one_worker_are_one_piece},
  };
}

}  // namespace pelton
