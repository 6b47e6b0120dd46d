// What the native tests share: checks that count failures, and teams.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "error.h"
#include "team.h"

namespace pelton {

using Test = std::pair<const char*, void (*)()>;
std::vector<Test> claims_tests();
std::vector<Test> team_tests();

inline int failures = 0;

inline void expect(bool ok, const char* what, int line) {
  if (ok) return;
  std::printf("  line %d: %s\n", line, what);
  failures++;
}
#define EXPECT(condition) ::pelton::expect(condition, #condition, __LINE__)

inline bool throws(const std::function<void()>& action, const char* message) {
  try {
    action();
  } catch (const Error& error) {
    if (std::strstr(error.what(), message) != nullptr) return true;
    std::printf("  unexpected message: %s\n", error.what());
  }
  return false;
}

inline std::shared_ptr<Team> make_team(int workers, int64_t spin_ns = 50'000,
                                       const std::vector<int>& cpus = {}) {
  return std::make_shared<Team>(workers, cpus, spin_ns);
}

}  // namespace pelton
