// Compiled kernels of one target, mapped from an image in memory.
#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "pelton/abi.h"

namespace pelton {

// The image is an ELF shared object. It goes through memfd and dlopen, so that no file has to be
// written and a debugger or profiler still sees symbols. An image is code: check its hash first.
class CodeObject {
 public:
  explicit CodeObject(std::span<const std::byte> image);  // throws Error
  ~CodeObject();
  CodeObject(const CodeObject&) = delete;
  CodeObject& operator=(const CodeObject&) = delete;

  // The kernel with this symbol; throws Error if there is none.
  pelton_kernel kernel(const std::string& symbol) const;

 private:
  int fd_ = -1;
  void* handle_ = nullptr;
};

}  // namespace pelton
