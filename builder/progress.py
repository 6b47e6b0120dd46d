"""Build progress: a line a stage with time left on a terminal, nothing elsewhere; and the stage timings."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclass
class Stage:
    """One finished or running stage. ``bytes`` is what it wrote, where that means something."""

    name: str
    seconds: float = 0.0
    bytes: int = 0


@dataclass
class BuildProgress:
    """Collects stage timings; draws them on stderr if it is a terminal and ``quiet`` is False."""

    quiet: bool = False
    stages: list[Stage] = field(default_factory=list)
    _progress: Progress | None = None
    _task: TaskID | None = None

    def __enter__(self) -> BuildProgress:
        if not self.quiet and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description:<28}"),
                BarColumn(bar_width=28),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Stage]:
        """Time a stage. ``total`` is what ``advance`` will add up to (None: an indefinite bar)."""
        stage = Stage(name)
        self.stages.append(stage)
        started = time.monotonic()
        if self._progress is not None:
            self._task = self._progress.add_task(name, total=total)
        try:
            yield stage
        finally:
            stage.seconds = time.monotonic() - started
            if self._progress is not None and self._task is not None:
                self._progress.update(self._task, total=total or 1, completed=total or 1)
                self._task = None

    def advance(self, amount: float) -> None:
        """Move the running stage's bar on."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)
