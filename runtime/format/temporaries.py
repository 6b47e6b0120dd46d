"""Files that are written beside their place and renamed: each locked while its writer lives, so that the next writer
to the same place can tell what a killed one left.

A lock goes with its process, also by SIGKILL. Process ids would not do: a folder may be shared by containers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CLOEXEC


def temporary_name(path: Path) -> Path:
    """A new name beside ``path``."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def create_locked(temporary: Path) -> int:
    """Make the file and lock it; returns its descriptor, or -1 if ``remove_stale`` took it before it was locked.

    Raises OSError. Where the file system has no locks, the file goes without.
    """
    fd = os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits at most for another writer's look at it
    if os.fstat(fd).st_nlink:
        return fd
    os.close(fd)
    return -1


def remove_stale(path: Path) -> None:
    """Remove what writers to ``path`` that live no more have left. Never fails: what cannot be removed stays."""
    prefix = f".{path.name}.tmp-"
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(prefix):
                _remove_unless_locked(path.with_name(name))


def _remove_unless_locked(temporary: Path) -> None:
    with suppress(OSError):
        fd = os.open(temporary, _FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(temporary)
        finally:
            os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """The file ``path`` with this content, whole or not at all. Raises OSError."""
    remove_stale(path)
    fd = -1
    while fd < 0:
        temporary = temporary_name(path)
        fd = create_locked(temporary)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
