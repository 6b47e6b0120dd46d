"""Every error that pelton raises on purpose. Messages name the culprit, where it came from, and the remedy."""

from __future__ import annotations


class PeltonError(Exception):
    """Base of all pelton errors."""


class CheckpointError(PeltonError):
    """A checkpoint is missing something, damaged, or contradicts itself."""


class UnsupportedModelError(PeltonError):
    """The model does something that pelton does not understand; never a guess instead."""


class BuildError(PeltonError):
    """A build option is impossible, or the output cannot be written."""


class GraphError(PeltonError):
    """A graph breaks an invariant, or IR text cannot be parsed."""


class NoKernelError(BuildError):
    """No kernel takes a call; lists why each candidate refused."""


class LayoutOverflow(BuildError):
    """A weight's values do not fit a layout that takes only some: packed12 has room for few exceptions."""


class TacticError(BuildError):
    """Two tactics of one kernel gave different bits: a kernel template or the compiler is at fault."""


class TimingCacheError(BuildError):
    """A timing cache file is damaged, of a newer schema, or cannot be read or written."""


class EngineFormatError(PeltonError):
    """An engine file is damaged, truncated, altered, or of a newer schema."""


class TargetMismatchError(PeltonError):
    """An engine has no section that this machine can run; shows both fingerprints."""


class TrustError(PeltonError):
    """An engine's signature is missing or wrong under ``--trust signed``."""


class RequestError(PeltonError, ValueError):
    """A request is malformed or outside the ranges the engine was built for."""


class DriverError(PeltonError):
    """The device or the native runtime failed."""


class TokenizerError(PeltonError):
    """A tokenizer or chat template cannot be converted, or differs from its original."""
