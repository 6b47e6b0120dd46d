// Runs compiled AMX code on a CPU without AMX: each tile instruction raises SIGILL, and the handler
// does what the instruction would have done. For tests; the meanings are those of amx_emulated.h.
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstring>

#define PELTON_EMULATED_AMX
#include "amx.h"

namespace {

using namespace pelton;

std::atomic<int64_t> g_emulated{0};

// A tile instruction: VEX with three bytes, map 0F38, W and L zero.
struct Instruction {
  explicit Instruction(const ucontext_t* context)
      : registers(context->uc_mcontext.gregs),
        code(reinterpret_cast<const uint8_t*>(registers[REG_RIP])) {}

  bool known_form() const {
    return code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0;
  }
  int prefix() const { return code[2] & 3; }  // 0 none, 1 66, 2 F3, 3 F2
  int third() const { return ~(code[2] >> 3) & 15; }
  int opcode() const { return code[3]; }
  int mode() const { return code[4] >> 6; }
  int reg() const { return code[4] >> 3 & 7; }
  int rm() const { return code[4] & 7; }

  int64_t value(int number) const {
    static constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                       REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                       REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[kOrder[number]];
  }

  // Of the memory operand: address without index, index scaled, bytes after the ModRM byte.
  struct Memory {
    int64_t address, index;
    int bytes;
  };
  Memory memory() const {
    const int high_base = (code[1] & 0x20) ? 0 : 8, high_index = (code[1] & 0x40) ? 0 : 8;
    const uint8_t* next = code + 5;
    int64_t base = 0, index = 0;
    bool has_base = true;
    int base_number = rm() + high_base;
    if (rm() == 4) {
      const int index_number = (*next >> 3 & 7) + high_index;
      if (index_number != 4) index = value(index_number) << (*next >> 6);
      base_number = (*next & 7) + high_base;
      has_base = mode() != 0 || (*next & 7) != 5;
      ++next;
    } else if (rm() == 5 && mode() == 0) {
      has_base = false;
    }
    if (has_base) base = value(base_number);
    int32_t far = 0;
    if (mode() == 1) {
      far = static_cast<int8_t>(*next);
      next += 1;
    } else if (mode() == 2 || !has_base) {
      std::memcpy(&far, next, sizeof far);
      next += sizeof far;
    }
    if (rm() == 5 && mode() == 0) base = reinterpret_cast<int64_t>(next);  // relative to RIP
    return {base + far, index, static_cast<int>(next - (code + 5))};
  }

  const greg_t* registers;
  const uint8_t* code;
};

// The length of the instruction, done; 0 if it is none of these.
int emulate(const Instruction& in) {
  if (!in.known_form()) return 0;
  const int plain = 5;  // bytes up to ModRM
  if (in.opcode() == 0x5c && in.prefix() == 2 && in.mode() == 3) {
    dot_tiles_bf16(in.reg(), in.rm(), in.third());
    return plain;
  }
  if (in.opcode() == 0x49 && in.mode() == 3) {
    if (in.prefix() == 0 && in.reg() == 0 && in.rm() == 0) return release_tiles(), plain;
    if (in.prefix() == 3 && in.rm() == 0) return zero_tile(in.reg()), plain;
    return 0;
  }
  if (in.mode() == 3) return 0;
  const auto memory = in.memory();
  if (in.opcode() == 0x49 && in.prefix() == 0 && in.reg() == 0) {
    configure_tiles(reinterpret_cast<const TileConfig*>(memory.address + memory.index));
  } else if (in.opcode() == 0x4b && (in.prefix() == 3 || in.prefix() == 1) && in.rm() == 4) {
    load_tile(in.reg(), reinterpret_cast<const void*>(memory.address), memory.index);
  } else if (in.opcode() == 0x4b && in.prefix() == 2 && in.rm() == 4) {
    store_tile(in.reg(), reinterpret_cast<void*>(memory.address), memory.index);
  } else {
    return 0;
  }
  return plain + memory.bytes;
}

struct sigaction g_before;

void on_illegal(int signal, siginfo_t*, void* opaque) {
  auto* context = static_cast<ucontext_t*>(opaque);
  const int bytes = emulate(Instruction(context));
  if (bytes == 0) {  // somebody else's: runs again, into the handler that was there before
    sigaction(signal, &g_before, nullptr);
    return;
  }
  context->uc_mcontext.gregs[REG_RIP] += bytes;
  g_emulated.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int amx_trap_install() {
  struct sigaction action{};
  action.sa_sigaction = on_illegal;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, &g_before);
}
EXPORT void amx_trap_remove() { sigaction(SIGILL, &g_before, nullptr); }
EXPORT int64_t amx_trap_count() { return g_emulated.load(); }

// For tests of the arithmetic itself.
EXPORT float amx_fma(float a, float b, float c) { return fma_flushed(a, b, c); }
EXPORT void amx_dot_row(float* sums, const uint16_t* a, const uint16_t (*b)[32], int pairs,
                        int columns) {
  dot_row_bf16(sums, a, b, pairs, columns);
}
