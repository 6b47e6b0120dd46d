"""Loading compiled kernels from memory: what is taken and what is refused."""

from __future__ import annotations

import struct

import pytest

from pelton._core import ABI_VERSION, CodeObject, NativeError
from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.errors import DriverError

from .tiny import TARGET, TinyEngine, compile_kernels, make_step


def test_a_kernel_is_found(code):
    loaded = CodeObject(code)
    assert loaded.kernel("bump") != loaded.kernel("touch")
    with pytest.raises(NativeError, match="no kernel missing, which the plan names"):
        loaded.kernel("missing")


def test_a_plan_that_names_a_missing_kernel(code):
    with pytest.raises(DriverError, match="target cpu/tiny: code object: no kernel nothing_here"):
        CpuDriver(TinyEngine(code, ["nothing_here log"]), TARGET, threads=1)


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"MZ" + bytes(200), b"not code at all" * 20])
def test_what_is_not_elf(image):
    with pytest.raises(NativeError, match="only .* bytes|not an ELF image"):
        CodeObject(image)


def test_a_relocatable_object_is_refused(code):
    changed = code[:16] + struct.pack("<H", 1) + code[18:]
    with pytest.raises(NativeError, match="not a 64-bit shared object"):
        CodeObject(changed)


def test_another_machine_is_named(code):
    changed = code[:18] + struct.pack("<H", 243) + code[20:]  # EM_RISCV
    with pytest.raises(NativeError, match="ELF machine 243, this is machine"):
        CodeObject(changed)


def test_every_truncation_is_an_error(code):
    (offset, count) = struct.unpack_from("<Q", code, 32)[0], struct.unpack_from("<H", code, 56)[0]
    segments = [struct.unpack_from("<IIQQQQQQ", code, offset + 56 * i) for i in range(count)]
    needed = max(start + size for _, _, start, _, _, size, *_ in segments)
    for size in [*range(0, needed, 97), needed - 1]:
        with pytest.raises(NativeError):
            CodeObject(code[:size])


def test_another_abi_is_refused(tmp_path):
    image = compile_kernels(
        tmp_path, f'extern "C" const unsigned pelton_abi = {ABI_VERSION + 1};', "-fvisibility=default"
    )
    with pytest.raises(NativeError, match=f"kernel interface {ABI_VERSION + 1}, this runtime has {ABI_VERSION}"):
        CodeObject(image)


def test_a_library_without_abi_is_refused(tmp_path):
    image = compile_kernels(tmp_path, 'extern "C" int f() { return 1; }', "-fvisibility=default")
    with pytest.raises(NativeError, match="no symbol pelton_abi"):
        CodeObject(image)


def test_an_undefined_symbol_is_named(tmp_path):
    text = 'extern "C" { const unsigned pelton_abi = 1; int nowhere(); int f() { return nowhere(); } }'
    image = compile_kernels(tmp_path, text, "-fvisibility=default")
    with pytest.raises(NativeError, match="undefined symbol: nowhere"):
        CodeObject(image)


def test_two_images_at_once_and_in_turn_stay_apart(tmp_path):
    """The dynamic linker knows objects by path; every image must still run its own code."""

    def image(token: int) -> bytes:
        return compile_kernels(
            tmp_path,
            f"""#include "pelton/abi.h"
            extern "C" const uint32_t pelton_abi = PELTON_ABI_VERSION;
            extern "C" void say(const pelton_step* s, void* const*, pelton_worker* w) {{
              if (w->index == 0) s->sampling.tokens[0] = {token};
            }}""",
            "-fvisibility=default",
        )

    def driver(token: int) -> CpuDriver:
        made = CpuDriver(TinyEngine(image(token), [], ["say"]), TARGET, threads=1)
        made.allocate((4, 4), 1)
        return made

    def said(made: CpuDriver) -> int:
        return int(made.execute(make_step()).result().tokens[0])

    first, second = driver(1), driver(2)
    assert (said(first), said(second)) == (1, 2)
    first.close()
    third = driver(3)
    assert (said(second), said(third)) == (2, 3)
    second.close()
    third.close()
    fourth = driver(4)
    assert said(fourth) == 4
    fourth.close()
