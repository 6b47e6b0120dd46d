#include "code_object.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U
#endif

namespace pelton {
namespace {

#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t kMachine = EM_AARCH64;
#else
#error "pelton: code objects of this architecture are not supported"
#endif

// The dynamic linker trusts its input; a cut image would crash it rather than fail.
void check_elf(std::span<const std::byte> image) {
  const auto fail = [](const std::string& what) {
    throw Error("code object: " + what +
                "; the engine is damaged or was built for another machine");
  };
  Elf64_Ehdr header;
  if (image.size() < sizeof header) fail("only " + std::to_string(image.size()) + " bytes");
  std::memcpy(&header, image.data(), sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) fail("not an ELF image");
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_type != ET_DYN) {
    fail("not a 64-bit shared object");
  }
  if (header.e_machine != kMachine) {
    fail("compiled for ELF machine " + std::to_string(header.e_machine) + ", this is machine " +
         std::to_string(kMachine));
  }
  const uint64_t table = uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
  if (header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phoff > image.size() ||
      table > image.size() - header.e_phoff) {
    fail("program headers lie outside the image");
  }
  for (size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    std::memcpy(&segment, image.data() + header.e_phoff + i * sizeof segment, sizeof segment);
    if (segment.p_offset > image.size() || segment.p_filesz > image.size() - segment.p_offset) {
      fail("segment " + std::to_string(i) + " lies outside the image (truncated)");
    }
  }
}

int memory_file(std::span<const std::byte> image) {
  int fd = memfd_create("pelton-code", MFD_CLOEXEC | MFD_EXEC);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("pelton-code", MFD_CLOEXEC);  // Linux < 6.3
  if (fd < 0) {
    throw Error("code object: memfd_create failed" + errno_text(errno) +
                "; pelton needs executable memory files (see sysctl vm.memfd_noexec)");
  }
  size_t done = 0;
  while (done < image.size()) {
    const ssize_t n = write(fd, image.data() + done, image.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int code = errno;
      close(fd);
      throw Error("code object: cannot write the memory file" + errno_text(code));
    }
    done += static_cast<size_t>(n);
  }
  return fd;
}

}  // namespace

CodeObject::CodeObject(std::span<const std::byte> image) {
  check_elf(image);
  // The descriptor stays open while the code is mapped: the dynamic linker knows objects by their
  // path, and a descriptor number used again would give it the old code for the new image.
  fd_ = memory_file(image);
  const std::string path = "/proc/self/fd/" + std::to_string(fd_);
  const auto fail = [this](const std::string& what) {
    if (handle_ != nullptr) dlclose(handle_);
    close(fd_);
    throw Error("code object: " + what);
  };
  handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) fail(std::string("cannot be loaded: ") + dlerror());
  const auto* abi = static_cast<const uint32_t*>(dlsym(handle_, "pelton_abi"));
  if (abi == nullptr) fail("has no symbol pelton_abi: not compiled by pelton");
  if (*abi != PELTON_ABI_VERSION) {
    fail("has kernel interface " + std::to_string(*abi) + ", this runtime has " +
         std::to_string(PELTON_ABI_VERSION) + "; rebuild the engine with this version of pelton");
  }
}

CodeObject::~CodeObject() {
  dlclose(handle_);
  close(fd_);
}

pelton_kernel CodeObject::kernel(const std::string& symbol) const {
  void* address = dlsym(handle_, symbol.c_str());
  if (address == nullptr) {
    throw Error("code object: no kernel " + symbol + ", which the plan names; rebuild the engine");
  }
  return reinterpret_cast<pelton_kernel>(address);
}

}  // namespace pelton
