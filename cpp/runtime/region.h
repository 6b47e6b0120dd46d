// Anonymous memory for the arena and for state that outlives a step.
#pragma once
#include <cstddef>

namespace pelton {

// Zeroed memory straight from the kernel, 2 MiB aligned and on huge pages when it is large enough.
// Pages come to be on first touch, so memory that no step reaches costs nothing.
class Region {
 public:
  explicit Region(size_t nbytes);  // throws Error; 0 bytes give a valid, empty region
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace pelton
