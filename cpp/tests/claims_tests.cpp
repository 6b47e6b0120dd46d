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
  int64_t total, grain, most = Claims::kMost;
};

// Jobs one after the other, without barriers.
struct Series {
  std::vector<Job> jobs;
  std::vector<std::vector<std::vector<Range>>> taken;  // by worker and job
  int slow = -1;  // a worker that waits with its first piece until all others are done
  std::atomic<int64_t> by_slow{0}, by_others{0};

  Series(std::vector<Job> list, int workers)
      : jobs(std::move(list)),
        taken(static_cast<size_t>(workers), std::vector<std::vector<Range>>(jobs.size())) {}

  void work(pelton_worker* worker) {
    for (size_t j = 0; j < jobs.size(); ++j) {
      Claims claims(jobs[j].total, worker, jobs[j].grain, jobs[j].most);
      Range mine = claims.take();
      if (slow >= 0) worker->barrier(worker);
      if (worker->index == slow) {
        const int64_t others = jobs[j].total - (mine.end - mine.begin);
        while (by_others < others) std::this_thread::yield();
      }
      for (; mine.begin < mine.end; mine = claims.take()) {
        (worker->index == slow ? by_slow : by_others) += mine.end - mine.begin;
        taken[static_cast<size_t>(worker->index)][j].push_back(mine);
      }
    }
  }
  void run(Team& team) {
    team.run([](void* self, pelton_worker* w) { static_cast<Series*>(self)->work(w); }, this);
  }
  // Whether the pieces of each job are all of it, side by side.
  bool each_once() const {
    for (size_t j = 0; j < jobs.size(); ++j) {
      std::vector<Range> all;
      for (const auto& worker : taken) {
        all.insert(all.end(), worker[j].begin(), worker[j].end());
      }
      std::sort(all.begin(), all.end(),
                [](const Range& a, const Range& b) { return a.begin < b.begin; });
      int64_t end = 0;
      for (const Range& piece : all) {
        if (piece.begin != end || piece.end <= piece.begin) return false;
        end = piece.end;
      }
      if (end != jobs[j].total) return false;
    }
    return true;
  }
};

void claims_give_each_item_once() {
  for (const int workers : {1, 2, 3, 7, 64}) {
    auto team = make_team(workers);
    for (int turn = 0; turn < (workers > 7 ? 5 : 200); ++turn) {
      std::vector<Job> jobs;
      for (int64_t j = 0; j < 12; ++j) {
        jobs.push_back({(turn * 7 + j * 31) % 97, 1 + j % 3 * 5, j % 2 == 0 ? Claims::kMost : 1});
      }
      Series series(std::move(jobs), workers);
      series.run(*team);
      EXPECT(series.each_once());
    }
  }
}

void claims_outlive_their_numbers() {
  // A job's number has 16 bits.
  auto team = make_team(2);
  for (int turn = 0; turn < 5; ++turn) {
    Series series(std::vector<Job>(20'000, Job{3, 1}), 2);
    series.run(*team);
    EXPECT(series.each_once());
  }
}

// Beyond 2^24 items several are claimed as one.
void claims_of_very_many_items() {
  auto team = make_team(3);
  for (const int64_t total : {Claims::kMost - 1, Claims::kMost, Claims::kMost + 1,
                              3 * Claims::kMost + 1, int64_t{688} * 32768, int64_t{1} << 40}) {
    for (const int64_t grain : {int64_t{1}, int64_t{1000}}) {
      Series series({{total, grain}, {5, 1}, {total, grain}}, 3);
      series.run(*team);
      EXPECT(series.each_once());
    }
  }
}

void mates_take_over_from_a_slow_worker() {
  for (const int slow : {0, 1}) {
    for (const int64_t most : {Claims::kMost, int64_t{1}}) {
      Series series({{1000, 1, most}}, 2);
      series.slow = slow;
      series.run(*make_team(2));
      EXPECT(series.each_once());
      EXPECT(series.by_slow == smaller<int64_t>(500 / 4, most));
    }
  }
}

// Worker by worker, each to its end, so that what is taken is known.
void claims_come_in_grains() {
  pelton_unclaimed unclaimed[2] = {};
  pelton_worker workers[2];
  for (int i = 0; i < 2; ++i) workers[i] = {i, 2, nullptr, nullptr, unclaimed, 0};
  Claims second(110, &workers[1], 10), first(110, &workers[0], 10);
  std::vector<Range> taken;
  for (Range mine = first.take(); mine.begin < mine.end; mine = first.take()) {
    taken.push_back(mine);
  }
  // Its own part in grains; then from the middle of the other's, 55 .. 110, to the next border.
  EXPECT(taken[0].begin == 0 && taken[0].end == 10);
  EXPECT(taken[5].begin == 50 && taken[5].end == 55);
  EXPECT(taken[6].begin == 82 && taken[6].end == 90);
  EXPECT(taken[7].begin == 90 && taken[7].end == 100);
  int64_t items = 0;
  for (const Range& range : taken) items += range.end - range.begin;
  EXPECT(items == 110);
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
      {"claims_of_very_many_items", claims_of_very_many_items},
      {"mates_take_over_from_a_slow_worker", mates_take_over_from_a_slow_worker},
      {"claims_come_in_grains", claims_come_in_grains},
      {"claims_of_one_worker_are_one_piece", claims_of_one_worker_are_one_piece},
  };
}

}  // namespace pelton
