// The clock of all measurements in the runtime.
#pragma once
#include <chrono>
#include <cstdint>

namespace pelton {

// Nanoseconds on the monotonic clock.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace pelton
