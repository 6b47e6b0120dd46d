"""Finding a C++ compiler and saying exactly which one it is."""

from __future__ import annotations

import functools
import importlib.util
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from ...runtime.errors import BuildError
from ...runtime.paths import compiler_command

_REMEDY = "install g++ 12 or clang++ 16 or newer (Debian: apt install g++), or `pip install ziglang`, or set CXX"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler driver: the command that runs it, and its version line (part of every cache key)."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    @property
    def extra_flags(self) -> tuple[str, ...]:
        """Flags this compiler needs everywhere. Zig would else compile for the build machine's own CPU."""
        return ("-target", "x86_64-linux-gnu") if "ziglang" in self.command else ()


def find_compiler(preferred: str | None = None) -> Compiler:
    """``preferred``, else $CXX, else g++, clang++, or zig's c++; raises BuildError if there is none that runs."""
    wanted = preferred or compiler_command()
    if wanted and not wanted.isspace():
        try:
            return _probe(tuple(shlex.split(wanted)))
        except ValueError as error:
            raise BuildError(f"the C++ compiler command {wanted!r} cannot be read ({error}); {_REMEDY}") from error
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return _probe((name,))
    if importlib.util.find_spec("ziglang"):
        return _probe((sys.executable, "-m", "ziglang", "c++"))
    raise BuildError(f"no C++ compiler found; {_REMEDY}")


@functools.lru_cache(maxsize=8)
def _probe(command: tuple[str, ...]) -> Compiler:
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {shlex.join(command)!r} does not run ({error}); {_REMEDY}") from error
    lines = run.stdout.strip().splitlines()
    return Compiler(command, lines[0] if lines else "unknown")
