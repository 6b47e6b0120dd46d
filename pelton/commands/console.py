"""The console that tables are printed to: plain text is never taken for markup, and a pipe gets whole names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_PIPE = 240


def stdout_console() -> Console:
    """A console on stdout: as wide as the terminal or $COLUMNS, else wide enough for most tables."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(markup=False, highlight=False, width=None if known else _WIDTH_OF_A_PIPE)


def print_line(console: Console, text: str) -> None:
    """A line of text, wrapped by nobody but the terminal."""
    console.print(text, soft_wrap=True)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> None:
    """A table whose first column, the names, stays in one piece. ``numbers``: the others end at the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0, justify="right" if numbers and i else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)
