"""Checks of the place an engine goes to: fail before minutes of work, not after, and never over something else."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..runtime.errors import BuildError

_REPORT = ".report.json"
_MOST_NAME = 200  # bytes of a file name: the temporary file's is longer, and file systems take 255
_CHECKPOINT_KINDS = (".safetensors", ".json", ".jinja", ".model", ".txt", ".bin", ".py")


def report_path(out: Path) -> Path:
    """Where the timings of a build go: OUT.report.json."""
    return out.with_name(out.name + _REPORT)


def check_output(out: Path, checkpoint: Path) -> None:
    """Raise BuildError unless ``out`` can be written and is not a part of the checkpoint (a folder or a file)."""
    folder = out.parent
    if "\0" in str(out) or len(out.name.encode(errors="replace")) > _MOST_NAME:
        raise BuildError(f"cannot write {str(out)!r}: file names have at most {_MOST_NAME} bytes, and no zero byte")
    if out.is_dir():
        raise BuildError(f"{out} is a folder; -o names the engine file to write")
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist; create it first"
        raise BuildError(f"cannot write {out}: the folder {folder} {why}")
    for path in (out, report_path(out)):
        if path.exists() and not path.is_file():
            raise BuildError(f"cannot write {path}: what is there is not a file; choose another name")
        if _is_part(path, checkpoint):
            raise BuildError(f"cannot write {path}: it is a file of the checkpoint; choose another name")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"{error.strerror} in {folder}; choose a folder you may write to"
        raise BuildError(f"cannot write {out}: {why}") from error


def _is_part(path: Path, checkpoint: Path) -> bool:
    """Whether this is an existing file that the checkpoint (a GGUF file or a folder) is made of."""
    if not path.is_file():
        return False
    if checkpoint.is_file():
        return path.samefile(checkpoint)
    parts = checkpoint.iterdir() if checkpoint.is_dir() else ()
    return any(
        part.suffix in _CHECKPOINT_KINDS and not part.name.endswith(_REPORT) and part.is_file() and path.samefile(part)
        for part in parts
    )
