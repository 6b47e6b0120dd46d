"""The Python entry points: the only place that sees both the building and the serving side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inflight_batcher import LLM as ServingLLM
from .runtime.errors import BuildError
from .runtime.names import refuse_unknown
from .runtime.paths import cache_dir

if TYPE_CHECKING:
    from .builder.build import BuildResult
    from .builder.progress import BuildProgress


def build(
    checkpoint: str | Path,
    out: str | Path,
    *,
    target: str | Sequence[str] = "host",
    progress: BuildProgress | None = None,
    **options: Any,
) -> BuildResult:
    """Build an engine file ``out`` from a checkpoint folder or GGUF file.

    ``target``: one name or several ("host", "x86-64-v3", ...). ``options``: the fields of builder.options.BuildOptions,
    named as build-engine's flags: dtype, max_batch_size, max_num_tokens, max_seq_len, ..., verify, golden.
    """
    try:
        from .builder.build import build as run
        from .builder.kernels import KernelRegistry
        from .builder.options import BuildOptions
        from .plugins import KERNELS
    except ImportError as error:
        raise BuildError(f"building needs the build extra: pip install 'pelton[build]' ({error})") from error

    names = [field.name for field in fields(BuildOptions) if field.name != "targets"]
    refuse_unknown("build", options, ["target", *names], BuildError)
    targets = (target,) if isinstance(target, str) else tuple(target)
    return run(checkpoint, out, BuildOptions(targets=targets, **options), KernelRegistry(KERNELS), progress)


class LLM(ServingLLM):
    """An engine ready to generate. Also takes a checkpoint folder or GGUF file: it is built once, into the cache.

    ``options``: threads, max_kv_tokens, kv_cache_bytes, seed, verify_weights, trust, public_key, ...; see
    ``pelton.inflight_batcher.LLM``.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        path = Path(model)
        super().__init__(_cached_engine(path) if _is_checkpoint(path) else path, **options)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".gguf"


def _cached_engine(checkpoint: Path) -> Path:
    """The engine of a checkpoint for this machine, built if the cache lacks it. The key is content, not path."""
    from .builder.cache_key import engine_key
    from .builder.checkpoint import Checkpoint
    from .builder.options import BuildOptions
    from .builder.target import host

    target = host()
    options = BuildOptions(targets=(str(target),))
    try:
        opened = Checkpoint.open(checkpoint)
    except ImportError as error:  # a GGUF file is read by the gguf package
        raise _extra_needed(checkpoint, error) from error
    path = cache_dir() / "engines" / f"{engine_key(opened, options)[:32]}-{str(target).replace(':', '-')}.engine"
    if path.exists():
        print(f"pelton: using the engine built before from {checkpoint}: {path}", file=sys.stderr)
        return path
    try:
        from .builder import build as _  # noqa: F401  # before saying that it builds
    except ImportError as error:
        raise _extra_needed(checkpoint, error) from error
    print(f"pelton: building an engine from {checkpoint} for {target} into {path}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"cannot write the engine cache at {path.parent}: {error.strerror}; set PELTON_CACHE to a folder you may "
            "write to"
        ) from error
    from .builder.progress import BuildProgress

    build(checkpoint, path, target=options.targets, progress=BuildProgress())
    return path


def _extra_needed(checkpoint: Path, error: ImportError) -> BuildError:
    return BuildError(
        f"{checkpoint} is a checkpoint, and building needs the build extra: pip install 'pelton[build]' ({error})"
    )
