"""What decides an engine's bytes, as one key: for the cache of engines behind ``LLM("checkpoint")``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from ..runtime.version import VERSION
from .checkpoint import Checkpoint
from .codegen.cache import content_key
from .codegen.cpu import template_files
from .options import BuildOptions

#: Options that change how a build goes, not what comes out.
_HOW = ("compiler", "cache_dir", "jobs", "dump_ir", "verify")
#: Libraries whose code makes a part of the engine: the traced model, the tokenizer.
_LIBRARIES = ("torch", "transformers", "tokenizers", "gguf")
#: Beside this package: where the code that builds lies.
_PACKAGES = ("builder", "plugins", "quantization", "runtime")
_ROOT = Path(__file__).parents[1]


def engine_key(checkpoint: Checkpoint, options: BuildOptions) -> str:
    """sha256 (hex) over the checkpoint's content, the options and pelton's own code; reads every weight.

    The code counts by content, not by version: after an edit of a pass or a kernel nothing built before is used.
    The compiler does not count: no compiler may change a result, and an engine in the cache needs none.
    """
    return content_key([*_checkpoint(checkpoint), *_options(options), *code_parts()])


def code_parts(root: Path = _ROOT) -> Iterator[bytes | str]:
    """Names and bytes of all that builds: pelton's modules, kernel templates; and the libraries' versions."""
    yield VERSION
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix()
            yield path.read_bytes()
    yield from template_files()
    for library in _LIBRARIES:
        yield library
        yield _version(library)


def _checkpoint(checkpoint: Checkpoint) -> Iterator[bytes | str]:
    """The fingerprint has config and weights; the rest of what goes into an engine follows."""
    yield checkpoint.fingerprint()
    yield repr(sorted(checkpoint.generation_config.items()))
    if checkpoint.path.is_dir():  # of a GGUF file the fingerprint has it all
        for name, path in sorted(checkpoint.tokenizer_files.items()):
            yield name
            yield path.read_bytes()


def _options(options: BuildOptions) -> Iterator[str]:
    for name, value in sorted(asdict(options).items()):
        if name not in _HOW:
            yield f"{name}={value!r}"


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"
