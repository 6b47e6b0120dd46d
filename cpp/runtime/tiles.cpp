#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "error.h"

namespace pelton {

#if defined(__x86_64__)

namespace {

// From asm/prctl.h and the numbering of XSAVE's components; older headers lack them.
constexpr int kRequestComponentPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;                        // XTILEDATA

std::string reason(int code) {
  switch (code) {
    case EINVAL:
    case ENOSYS:
      return "this kernel does not know tiles; they need Linux 5.16";
    case EOPNOTSUPP:
      return "this CPU, or the virtual machine's view of it, has no tiles";
    case ENOSPC:
      return "a thread's signal stack (sigaltstack) is too small for 8 KiB of tiles more";
    default:
      return "a sandbox or container may forbid it";
  }
}

}  // namespace

void request_tile_permission() {
  if (syscall(SYS_arch_prctl, kRequestComponentPermission, kTileData) == 0) return;
  const int code = errno;
  throw Error("the kernel refuses the tile registers (AMX)" + errno_text(code) + "; " +
              reason(code) +
              ". Build the engine for a target without amx_tile (pelton targets lists them)");
}

#else

void request_tile_permission() {
  throw Error("this architecture has no tile registers (AMX); the engine is for another machine");
}

#endif

}  // namespace pelton
