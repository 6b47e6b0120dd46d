"""EngineFile: open, check and read an engine file. Nothing is unpickled; nothing unchecked is handed out."""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np

from ..errors import EngineFormatError, RequestError
from .decode import T, decoded
from .dtypes import DType
from .engine_header import PAD, SECTION
from .engine_io import about, decode_section, open_file, pread, read_header
from .hash_tree import DIGEST, BackgroundVerifier, WeightsCheck, WeightsFile, damaged_leaves, leaf_count
from .manifest import Manifest, decode_manifest
from .plan import Plan, decode_plan
from .plan_check import check_plan
from .tensor_spec import TensorSpec
from .tensor_type import layout_problem

Trust = Literal["any", "signed"]
VerifyWeights = Literal["background", "before", "off"]
HASH_TREE = "hash_tree"  # section: leaf hashes of the weights
TENSOR_LAYOUTS = "layouts"  # section: logical shape and layout of tensors that are not row-major


class LayoutEntry(msgspec.Struct, frozen=True):
    """Logical shape and layout of a packed tensor."""

    shape: tuple[int, ...]
    layout: str


class EngineFile:
    """An open engine. Safe to use from several threads; ``close`` ends it (views of tensors stay valid).

    With ``verify_weights="background"`` the weights are checked while they are in use, by a thread of this object or
    by the driver that reads them. What is found goes to ``problems`` and ``on_problem`` (called from the thread, or
    from whoever next uses this object); from then on every access raises EngineFormatError.
    """

    def __init__(self, path: Path, fd: int, *, verify: bool = True) -> None:
        """Use ``EngineFile.open``. Takes over ``fd``; ``verify=False`` is for a file still being written."""
        self.path = path
        self._problems: list[str] = []
        self._on_problem: Callable[[str], None] | None = None
        self._fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)
        self._verify = verify
        self._checks: list[WeightsCheck] = []  # the last one is in charge
        self._header = read_header(fd, verify=verify)
        #: One string that stands for every byte of the file.
        self.identity = self._header.metadata.root
        self.manifest: Manifest = decode_manifest(self._header.metadata.manifest)
        self._map = mmap.mmap(fd, self._header.file_size, access=mmap.ACCESS_READ)
        #: Stored tensors by name, in file order (sections and pads left out).
        self.tensors: dict[str, TensorSpec] = self._specs()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        trust: Trust = "any",
        verify_weights: VerifyWeights = "background",
        public_key: str | os.PathLike[str] | bytes | None = None,
        on_problem: Callable[[str], None] | None = None,
    ) -> EngineFile:
        """Open an engine: header, manifest, sizes and (with ``trust="signed"``) the signature are checked here.

        verify_weights: "background" (while in use), "before" (now; raises), "off".
        public_key: PEM bytes or a file, for trust="signed". on_problem: see the class.
        Raises EngineFormatError for a file that is missing, damaged, cut short or of another schema; TrustError for
        a signature that is missing or wrong; RequestError for a choice that does not exist.
        """
        for name, given, choices in (("trust", trust, Trust), ("verify_weights", verify_weights, VerifyWeights)):
            if given not in get_args(choices):
                raise RequestError(f"{name}: got {given!r}; allowed: {', '.join(get_args(choices))}")
        where = Path(path)
        with about(where):
            engine = cls(where, open_file(where))
        try:
            if trust == "signed":
                from .signature import require_signature

                require_signature(where, engine.identity, public_key)
            with about(where):
                engine._start_verification(verify_weights, on_problem)
        except BaseException:
            engine.close()
            raise
        return engine

    # --- sections ---------------------------------------------------------------------------------------------

    @property
    def sections(self) -> dict[str, int]:
        """Names of all sections and their bytes in the file."""
        return {name: self._header.location(SECTION + name)[1] for name in self._header.sections}

    def has_section(self, name: str) -> bool:
        return name in self._header.sections

    def section(self, name: str) -> bytes:
        """A section's contents, a private copy whose hash has been checked. Raises EngineFormatError."""
        self.raise_problems()
        with about(self.path):
            return self._section(name)

    def json_section(self, name: str, kind: type[T]) -> T:
        """A section of JSON as a value of this type. Raises EngineFormatError."""
        data = self.section(name)
        with about(self.path):
            return decoded(f"section {name!r}", data, kind)

    def plan(self, key: str) -> Plan:
        """The launch plan of a target, decoded and checked for references out of bounds."""
        data = self._target_section("plan", key)
        with about(self.path):
            plan = decode_plan(data, f"the plan of target {key!r}")
            problems = check_plan(plan, self.tensors)
            if problems:
                more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
                raise EngineFormatError(f"the plan of target {key!r} is damaged: {problems[0]}{more}")
            return plan

    def code(self, key: str) -> memoryview:
        """The code object of a target: the very bytes that were hashed, not a view of a file that may change."""
        return memoryview(self._target_section("code", key))

    # --- tensors ----------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view of a tensor's storage on the mapped file (shape ``TensorSpec.storage_shape``)."""
        self.raise_problems()
        spec = self._spec(name)
        offset, nbytes = self._header.location(name)
        if not nbytes:
            array = np.empty(spec.storage_shape, spec.dtype.numpy)
            array.flags.writeable = False
            return array
        flat = np.frombuffer(self._map, np.uint8, nbytes, offset)
        return flat.view(spec.dtype.numpy).reshape(spec.storage_shape)

    def tensor_location(self, name: str) -> tuple[int, int]:
        """File offset (a multiple of 4096) and bytes of a tensor's storage."""
        self._spec(name)
        return self._header.location(name)

    def weights_file(self) -> WeightsFile:
        """Where all weights lie in the file, with their hashes while nobody has checked them to the end."""
        checks = list(self._checks)
        pending = checks and not any(check.complete for check in checks)
        with about(self.path):
            digests = self._digests() if pending else b""
        return WeightsFile(self._fd, self._header.weights_start, self._header.file_size, digests)

    def delegate_check(self, check: WeightsCheck) -> None:
        """Leave the check of the weights to ``check``, which has started from the beginning."""
        for mine in self._checks:
            if isinstance(mine, BackgroundVerifier):
                mine.cancel()
        self._checks.append(check)

    # --- health -----------------------------------------------------------------------------------------------

    def check(self, weights: bool = True) -> list[str]:
        """Everything that is wrong with the file, down to single bits; empty for a sound one."""
        found: list[str] = []
        try:
            header = read_header(self._fd)
            if header.metadata.root != self.identity:
                found.append("the header has changed since the engine was opened")
        except EngineFormatError as error:
            found.append(str(error))
        for name in self._header.sections:
            try:
                self._section(name)
            except EngineFormatError as error:
                found.append(str(error))
        found += self._nonzero_pads()
        if not found:
            for target in self.manifest.targets:
                try:
                    self.plan(target.key)
                except EngineFormatError as error:
                    found.append(str(error))
        if weights and not any(HASH_TREE in problem for problem in found):
            found += [self._describe_damage(*span) for span in self._damaged()]
        return found

    def wait_verified(self, timeout: float | None = None) -> bool:
        """Wait for the background check (seconds); returns whether it is complete. Raises if it found damage."""
        checks = list(self._checks)
        done = not checks or checks[-1].wait(timeout) or any(check.complete for check in checks)
        self.raise_problems()
        return done

    @property
    def problems(self) -> list[str]:
        """What the check of the weights has found so far."""
        checks = list(self._checks)
        complete = any(check.complete for check in checks)
        for check in checks:
            for span in check.damage():
                self._report(*span)
        if complete:
            self._checks.clear()  # nothing more can come
        return self._problems

    def raise_problems(self) -> None:
        """Raise EngineFormatError if the background check has found damage."""
        if not self._checks and not self._problems:
            return
        if self.problems:
            raise EngineFormatError(f"{self.path}: {self._problems[0]}; copy or build the engine again")

    def close(self) -> None:
        """Stop checking and let go of the file. Arrays and bytes already handed out stay valid."""
        for check in self._checks:
            check.cancel()
        try:
            self._map.close()
        except BufferError:
            pass  # tensor views are alive; the mapping goes with the last of them
        self._fd = -1
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- inner parts ------------------------------------------------------------------------------------------

    def _section(self, name: str) -> bytes:
        entry = self._header.sections.get(name)
        if entry is None:
            raise EngineFormatError(f"the engine has no section {name!r}; it has: {', '.join(self._header.sections)}")
        offset, nbytes = self._header.location(SECTION + name)
        stored = pread(self._fd, nbytes, offset)
        if self._verify and hashlib.sha256(stored).hexdigest() != entry.sha256:
            raise EngineFormatError(f"section {name!r} is damaged: its hash does not match")
        return decode_section(name, entry, stored)

    def _target_section(self, kind: str, key: str) -> bytes:
        self.raise_problems()
        name = f"{kind}/{key}"
        if not self.has_section(name):
            known = ", ".join(n.removeprefix(f"{kind}/") for n in self._header.sections if n.startswith(f"{kind}/"))
            raise EngineFormatError(f"{self.path}: no {kind} for target {key!r}; there is: {known or '(none)'}")
        return self.section(name)

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self.tensors[name]
        except KeyError:
            raise EngineFormatError(f"{self.path}: the engine has no tensor {name!r}") from None

    def _specs(self) -> dict[str, TensorSpec]:
        packed = decoded(f"section {TENSOR_LAYOUTS!r}", self._section(TENSOR_LAYOUTS), dict[str, LayoutEntry])
        specs = {}
        for name, entry in self._header.tensors.items():
            if name.startswith((SECTION, PAD)):
                continue
            layout = packed.pop(name, LayoutEntry(entry.shape, "rows"))
            spec = TensorSpec(name, DType.from_safetensors(entry.dtype), layout.shape, layout.layout)
            if problem := layout_problem(spec.type):
                raise EngineFormatError(f"tensor {name!r} of type {spec.type} cannot be: {problem}")
            if any(dim < 0 for dim in spec.shape) or spec.storage_shape != entry.shape:
                raise EngineFormatError(f"tensor {name!r} of type {spec.type} is stored as {list(entry.shape)}")
            specs[name] = spec
        if packed:
            raise EngineFormatError(f"section {TENSOR_LAYOUTS!r} names {next(iter(packed))!r}, which is not stored")
        return specs

    def _start_verification(self, mode: VerifyWeights, on_problem: Callable[[str], None] | None) -> None:
        if mode == "off":
            return
        if mode == "before":
            for span in self._damaged():
                raise EngineFormatError(self._describe_damage(*span) + "; copy or build the engine again")
            return

        self._on_problem = on_problem
        span = (self._header.weights_start, self._header.file_size)
        self._checks.append(BackgroundVerifier(self._fd, *span, self._digests(), self._report))

    def _report(self, offset: int, end: int) -> None:
        problem = self._describe_damage(offset, end)
        self._problems.append(problem)
        if self._on_problem is not None:
            self._on_problem(problem)

    def _digests(self) -> bytes:
        digests = self._section(HASH_TREE)
        weights = self._header.file_size - self._header.weights_start
        if len(digests) != leaf_count(weights) * DIGEST:
            raise EngineFormatError(f"section {HASH_TREE!r} does not cover the {weights} bytes of weights")
        return digests

    def _damaged(self) -> Iterator[tuple[int, int]]:
        return damaged_leaves(self._fd, self._header.weights_start, self._header.file_size, self._digests())

    def _describe_damage(self, offset: int, end: int) -> str:
        touched = []
        for name in self.tensors:
            start, nbytes = self._header.location(name)
            if start < end and start + nbytes > offset:
                touched.append(name)
        listed = ", ".join(touched[:3]) + (f" and {len(touched) - 3} more" if len(touched) > 3 else "")
        return f"weights are damaged at bytes {offset}:{end} ({listed or 'padding'})"

    def _nonzero_pads(self) -> Iterator[str]:
        """Pads before the weights; the others are under the hash tree."""
        for name in self._header.tensors:
            offset, nbytes = self._header.location(name)
            if name.startswith(PAD) and offset < self._header.weights_start and any(pread(self._fd, nbytes, offset)):
                yield f"the padding at bytes {offset}:{offset + nbytes} is not zero"
