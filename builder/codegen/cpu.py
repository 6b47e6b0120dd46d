"""Compile emitted kernel sources into one freestanding shared object for a CPU SKU.

The object needs nothing from the system (no libc, libm or libstdc++), exports ``pelton_abi`` and one
function per kernel, and has the same bytes wherever the same compiler made it.
"""

from __future__ import annotations

import functools
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...runtime.errors import BuildError
from ..target import Sku
from .cache import ObjectCache, content_key
from .elf import read_dynamic
from .toolchain import Compiler, find_compiler

_COMPILE = (
    *("-O3", "-std=c++20", "-ffreestanding", "-fno-exceptions", "-fno-rtti", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # Kernels are vectorised by hand. g++ 12's vectoriser fuses a * b - c * d to fmaddsub in spite of -ffp-contract=off.
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize"),
    # Nothing that calls into a library or differs from run to run:
    *("-fno-stack-protector", "-fno-threadsafe-statics", "-fno-asynchronous-unwind-tables", "-U_FORTIFY_SOURCE"),
    *("-fcf-protection=none", "-fno-ident", "-g0", "-w"),
    # GEMMs have large frames that few rows never touch; some compilers would look at every page in every call.
    "-fno-stack-clash-protection",
)
_LINK = (
    *("-shared", "-nostdlib", "-Wl,--build-id=none", "-Wl,--strip-all", "-Wl,-z,defs", "-Wl,-z,noexecstack"),
    *("-Wl,--hash-style=gnu", "-Wl,-soname,pelton-kernels", "-Wl,-z,max-page-size=4096"),
)
#: Translation units per object. Fixed, because the split shows in the object's bytes.
_UNITS = 4
_ERROR_LINES = 12

#: What a compiler may call by itself, plus the ABI mark. Loops must not be turned back into calls.
_SUPPORT = """\
#include "pelton/abi.h"
typedef __SIZE_TYPE__ size_t;
extern "C" {
extern __attribute__((visibility("default"))) const uint32_t pelton_abi;
const uint32_t pelton_abi = PELTON_ABI_VERSION;
void *memset(void *to, int value, size_t n) {
  unsigned char *p = static_cast<unsigned char *>(to);
  for (; n != 0; --n) *p++ = static_cast<unsigned char>(value);
  return to;
}
void *memcpy(void *__restrict to, const void *__restrict from, size_t n) {
  unsigned char *p = static_cast<unsigned char *>(to);
  const unsigned char *q = static_cast<const unsigned char *>(from);
  for (; n != 0; --n) *p++ = *q++;
  return to;
}
void *memmove(void *to, const void *from, size_t n) {
  unsigned char *p = static_cast<unsigned char *>(to);
  const unsigned char *q = static_cast<const unsigned char *>(from);
  if (p <= q) {
    for (; n != 0; --n) *p++ = *q++;
  } else {
    for (p += n, q += n; n != 0; --n) *--p = *--q;
  }
  return to;
}
int memcmp(const void *a, const void *b, size_t n) {
  const unsigned char *p = static_cast<const unsigned char *>(a);
  const unsigned char *q = static_cast<const unsigned char *>(b);
  for (; n != 0; --n, ++p, ++q) {
    if (*p != *q) return *p < *q ? -1 : 1;
  }
  return 0;
}
}
"""


def compile_cpu(
    sources: Sequence[tuple[str, str]], sku: Sku, *, compiler: str | None = None, cache: ObjectCache, jobs: int = 1
) -> bytes:
    """The shared object with these kernels, ``sources`` = (symbol, C++ source) pairs, as bytes.

    Raises BuildError if there is no compiler, a source does not compile (with the compiler's first
    lines), or the object would need something from outside.
    """
    cxx = find_compiler(compiler)
    units = _units(sources)
    flags = (*cxx.extra_flags, *_COMPILE, *sku.compiler_flags)
    key = content_key(
        ("cpu-object-1", cxx.version, *flags, *_LINK, *(part for unit in units for part in unit), *template_files())
    )
    found = cache.get(key)
    if found is not None:
        return found
    cache.require_writable()
    with tempfile.TemporaryDirectory(prefix="pelton-cc-") as folder:
        data = _build(Path(folder), units, cxx, flags, [symbol for symbol, _ in sources], jobs)
    _check(data, [symbol for symbol, _ in sources], sku)
    cache.put(key, data)
    return data


def compiler_version(compiler: str | None = None) -> str:
    """The version line of the compiler that ``compile_cpu`` would use; raises BuildError if there is none."""
    return find_compiler(compiler).version


@functools.lru_cache(maxsize=1)
def template_root() -> Path:
    """The folder that holds ``include`` and ``kernels``: beside the package in a wheel, at the root of a checkout."""
    here = Path(__file__)
    for path in (here, here.resolve()):
        root = path.parents[2] / "cpp"
        if (root / "kernels").is_dir():
            return root
    raise BuildError(f"the kernel templates (cpp/kernels) are missing beside {here.parents[1]}; reinstall pelton")


def template_files() -> list[bytes | str]:
    """Names and bytes of every template header, in name order."""
    root = template_root()
    parts: list[bytes | str] = []
    for path in sorted([*root.glob("include/pelton/*.h"), *root.glob("kernels/**/*.h")]):
        parts += [path.relative_to(root).as_posix(), path.read_bytes()]
    return parts


def _units(sources: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(file name, text) of each translation unit. Kernels are dealt out in turn, so that big ones spread."""
    units = [("support.cpp", _SUPPORT)]
    for index in range(min(_UNITS, len(sources))):
        part = sources[index::_UNITS]
        lines = ['#include "pelton/abi.h"\n']
        for symbol, _ in part:
            lines.append(
                f'extern "C" __attribute__((visibility("default"))) '
                f"void {symbol}(const pelton_step *, void *const *, pelton_worker *);\n"
            )
        units.append((f"kernels{index}.cpp", "".join([*lines, *(text + "\n" for _, text in part)])))
    return units


def _build(
    folder: Path, units: list[tuple[str, str]], cxx: Compiler, flags: tuple[str, ...], symbols: list[str], jobs: int
) -> bytes:
    root = template_root()
    includes = (f"-I{root / 'include'}", f"-I{root / 'kernels'}", f"-ffile-prefix-map={root}=cpp")

    def compile_unit(name: str, text: str) -> str:
        (folder / name).write_text(text)
        extra = ("-fno-builtin",) if cxx.is_clang else ("-fno-tree-loop-distribute-patterns",)
        command = [*cxx.command, *flags, *includes, *(extra if name == "support.cpp" else ())]
        _run([*command, "-c", name, "-o", f"{name}.o"], folder, f"compiling {name} (kernels {', '.join(symbols)})")
        return f"{name}.o"

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        objects = list(pool.map(lambda unit: compile_unit(*unit), units))
    _run([*cxx.command, *cxx.extra_flags, *_LINK, *objects, "-o", "kernels.so"], folder, "linking the kernels")
    try:
        return (folder / "kernels.so").read_bytes()
    except OSError as error:
        raise BuildError(
            f"{shlex.join(cxx.command)} reported success but wrote no object ({error.strerror}); it is no C++ compiler"
        ) from error


def _run(command: list[str], folder: Path, what: str) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        head = "\n".join(run.stderr.strip().splitlines()[:_ERROR_LINES])
        raise BuildError(f"{command[0]} failed {what}:\n{head}\ncommand: {' '.join(command)}")


def _check(data: bytes, symbols: Sequence[str], sku: Sku) -> None:
    info = read_dynamic(data)
    if info.undefined or info.needed:
        raise BuildError(
            f"the kernels for {sku.name} are not freestanding: they need "
            f"{', '.join([*info.undefined, *info.needed])}; a template or the compiler introduced a library call"
        )
    missing = {*symbols, "pelton_abi"} - set(info.defined)
    if missing:
        raise BuildError(
            f"the kernels for {sku.name} lack {', '.join(sorted(missing))}; an emitter names another symbol"
        )
