"""The timing cache: a JSON file that remembers how long each tactic of a kernel took, and on which machine.

Read whole, changed in memory, written beside and renamed. Tactics are named by their label, so what a newer pelton no
longer offers is never used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..runtime.errors import TimingCacheError
from ..runtime.format.temporaries import write_atomically
from .codegen.cache import content_key
from .codegen.cpu import template_files
from .kernels import Kernel, KernelCall
from .machine import Machine
from .tactics import Workload
from .target import Target

SCHEMA = 1
_ABOUT = "pelton timing cache: median seconds of kernel tactics, one for each workload, by machine. Safe to delete."
_DIGITS = 4  # significant ones: what decides is what the file says, in the first build too

#: Seconds by the tactic's label, one for each workload.
Seconds = Mapping[str, tuple[float, ...]]


class KernelTimings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Timings of one kernel on concrete types: ``seconds[machine][tactic][workload]``."""

    sku: str
    call: str
    workloads: tuple[str, ...]
    seconds: dict[str, dict[str, tuple[Annotated[float, Meta(gt=0)], ...]]]


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The file. ``machines`` are named by their ids, ``kernels`` by name and hash of what is timed."""

    schema: int
    about: str
    machines: dict[str, Machine]
    kernels: dict[str, KernelTimings]


class _Versioned(msgspec.Struct):
    schema: int


class TimingCache:
    """A timing cache file in memory. ``get`` and ``put`` never touch the file; ``save`` does."""

    def __init__(self, path: Path, document: Document) -> None:
        self.path = path
        self._document = document

    @classmethod
    def open(cls, path: Path, *, create: bool) -> TimingCache:
        """Read a file; where there is none, start an empty one (``create``) that can be written.

        Raises TimingCacheError.
        """
        path = Path(os.path.realpath(path))  # a link stays a link when the file is replaced
        if os.path.exists(path) or not create:
            document = _read(path)
        else:
            document = Document(schema=SCHEMA, about=_ABOUT, machines={}, kernels={})
        if create:
            _require_writable(path)
        return cls(path, document)

    def get(
        self, key: str, labels: Sequence[str], count: int, machine: Machine | None
    ) -> list[tuple[Machine, Seconds]]:
        """Timings under a key that have all of ``labels`` on ``count`` workloads, in order of machine ids.

        ``machine``: only that machine's; None: every machine's.
        """
        found = self._document.kernels.get(key)
        if found is None:
            return []
        result: list[tuple[Machine, Seconds]] = []
        for name, seconds in sorted(found.seconds.items()):
            complete = all(len(seconds.get(label, ())) == count for label in labels)
            if complete and (machine is None or name == machine.id):
                wanted = {label: seconds[label] for label in labels}
                result.append((self._document.machines[name], wanted))
        return result

    def put(
        self, key: str, call: str, target: Target, workloads: Sequence[Workload], machine: Machine, seconds: Seconds
    ) -> None:
        """Keep a machine's timings of a call, instead of older ones."""
        document = self._document
        document.machines[machine.id] = machine
        empty = KernelTimings(
            sku=target.sku.name if target.sku else "", call=call, workloads=tuple(map(str, workloads)), seconds={}
        )
        document.kernels.setdefault(key, empty).seconds[machine.id] = dict(seconds)

    def save(self) -> None:
        """Write the file, with what others have added to it meanwhile. Raises TimingCacheError, the file untouched."""
        if os.path.exists(self.path):
            self._merge(_read(self.path))
        text = json.dumps(_sorted(self._document), indent=1, ensure_ascii=False) + "\n"
        try:
            write_atomically(self.path, text.encode())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _merge(self, other: Document) -> None:
        """Add what ``other`` has and this has not."""
        mine = self._document
        mine.machines = other.machines | mine.machines
        for key, theirs in other.kernels.items():
            ours = mine.kernels.setdefault(key, theirs)
            ours.seconds = theirs.seconds | ours.seconds


def timing_key(kernel: Kernel, call: KernelCall, target: Target, workloads: Sequence[Workload]) -> str:
    """Name and hash of all that a kernel's speed depends on, the machine aside: types, SKU, workloads, templates."""
    sku = target.sku.name if target.sku else ""
    types = [*map(str, call.inputs), "->", *map(str, call.outputs)]
    described = [kernel.name, sku, call.op.name, call.op.attributes(), types, list(map(str, workloads)), _templates()]
    return f"{kernel.name} {hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]}"


def rounded(seconds: float) -> float:
    """As the file keeps them."""
    return float(f"{seconds:.{_DIGITS}g}")


def _templates() -> str:
    return content_key(template_files())


def _sorted(document: Document) -> object:
    """Plain data in one order, whatever the order of timing; tactics stay as they were offered."""
    plain = msgspec.to_builtins(document)
    plain["machines"] = dict(sorted(plain["machines"].items()))
    plain["kernels"] = dict(sorted(plain["kernels"].items()))
    for kernel in plain["kernels"].values():
        kernel["seconds"] = dict(sorted(kernel["seconds"].items()))
    return plain


def _read(path: Path) -> Document:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TimingCacheError(
            f"--timing-cache {path} does not exist; make it on a machine of the target's kind with --autotune"
        ) from error
    except OSError as error:
        raise TimingCacheError(f"cannot read --timing-cache {path}: {error.strerror}; name another file") from error
    try:
        schema = msgspec.json.decode(data, type=_Versioned).schema
        if schema != SCHEMA:
            raise TimingCacheError(
                f"--timing-cache {path} has schema {schema}, and this pelton reads {SCHEMA}; use the pelton that wrote "
                "it, or name another file"
            )
        document = msgspec.json.decode(data, type=Document)
        _check(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise TimingCacheError(
            f"--timing-cache {path} is damaged or no timing cache: {error}; delete it (timings can be taken again with "
            "--autotune), or name another file"
        ) from error
    return document


def _check(document: Document) -> None:
    """Raise ValueError for contents that contradict each other."""
    for name, machine in document.machines.items():
        if machine.id != name:
            raise ValueError(f"machine {name} is {machine.id} by its own description")
    for key, kernel in document.kernels.items():
        for name, tactics in kernel.seconds.items():
            if name not in document.machines:
                raise ValueError(f"{key} has timings of the unknown machine {name}")
            for label, seconds in tactics.items():
                if len(seconds) != len(kernel.workloads) or not all(map(math.isfinite, seconds)):
                    raise ValueError(f"{key}, {label!r}: {list(seconds)} are not the times of {len(kernel.workloads)}")


def _require_writable(path: Path) -> None:
    """Fail before minutes of timing, not after them."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> TimingCacheError:
    return TimingCacheError(
        f"cannot write --timing-cache {path}: {error.strerror}; name a file in a folder you may write to"
    )
