"""A cache of compiled objects, addressed by the hash of everything that went into them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ...runtime.errors import BuildError
from ...runtime.paths import cache_dir


def content_key(parts: Iterable[bytes | str]) -> str:
    """sha256 (hex) over the parts; each is length-prefixed, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class ObjectCache:
    """Objects under ``directory``/objects. Entries are written atomically and carry their own hash.

    ``directory`` None means the default folder. A damaged entry counts as missing.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._objects = (directory or cache_dir()) / "objects"
        self.hits = 0
        self.misses = 0

    def get(self, key: str) -> bytes | None:
        """The object stored under a key, or None."""
        data = self._read(key)
        if data is None:
            self.misses += 1
        else:
            self.hits += 1
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store an object; raises BuildError if the cache folder cannot be written."""
        path = self._path(key)
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
                temporary = file.name
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(temporary, path)
        except OSError as error:
            raise self._refusal(error) from error
        finally:  # also where a signal ends the build
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def require_writable(self) -> None:
        """Raise BuildError unless ``put`` can work: asked before a long compilation, not after it."""
        try:
            made = next(folder for folder in (self._objects, *self._objects.parents) if folder.exists())
            with tempfile.TemporaryFile(dir=made):
                pass
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> BuildError:
        return BuildError(
            f"cannot write the object cache at {self._objects}: {error.strerror}; "
            "set PELTON_CACHE or --cache-dir to a folder you may write to"
        )

    def _read(self, key: str) -> bytes | None:
        try:
            stored = self._path(key).read_bytes()
        except OSError:
            return None
        digest, data = stored[:32], stored[32:]
        return data if hashlib.sha256(data).digest() == digest else None

    def _path(self, key: str) -> Path:
        return self._objects / key[:2] / key[2:]
