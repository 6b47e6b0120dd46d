// The inner loops of the roofs, each compiled for the feature it needs and chosen when running.
#pragma once
#include <cstddef>
#include <cstdint>

#include "roofs.h"

namespace pelton {

// Reads ``nbytes`` (a multiple of 1024) at ``data`` once, in order.
using ReadLoop = void (*)(const void* data, size_t nbytes);
ReadLoop read_loop();

struct PeakLoop {
  void (*run)(int64_t iterations) = nullptr;  // null: this CPU has no such instruction
  int64_t operations = 0;                     // of one iteration
  const char* instruction = "";
  int64_t iterations = 1 << 20;  // of a pass, a few milliseconds
};
// The fastest instruction here. Where the CPU has tiles, asks for permission to use them; if it is
// refused, the loop is that of vectors, in this process for good.
PeakLoop peak_loop(Peak peak);

}  // namespace pelton
