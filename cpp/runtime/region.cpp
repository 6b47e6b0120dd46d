#include "region.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "error.h"

namespace pelton {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

std::string errno_text(int code) { return std::string(": ") + std::strerror(code); }

Region::Region(size_t nbytes) : nbytes_(nbytes) {
  if (nbytes > SIZE_MAX / 2) throw Error("a memory region of " + std::to_string(nbytes) + " bytes");
  const bool huge = nbytes >= kHugePage;
  mapping_bytes_ =
      huge ? round_up(nbytes, kHugePage) + kHugePage : round_up(nbytes == 0 ? 1 : nbytes, kPage);
  mapping_ =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw Error("cannot map " + std::to_string(nbytes) + " bytes of memory" + errno_text(errno) +
                "; lower the number of KV blocks or the engine's ranges");
  }
  auto address = reinterpret_cast<uintptr_t>(mapping_);
  if (huge) {
    address = round_up(address, kHugePage);
    // Refused where huge pages are off; ordinary pages do then.
    madvise(reinterpret_cast<void*>(address), round_up(nbytes, kHugePage), MADV_HUGEPAGE);
  }
  data_ = reinterpret_cast<std::byte*>(address);
}

Region::~Region() { munmap(mapping_, mapping_bytes_); }

}  // namespace pelton
