"""A bar for work that takes long: on a terminal only, on standard error.

Counterpart: ``display`` has what is shown of pipelines. Source: CL4 of docs/spec/stream-clients.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headgate.cli.terminal import Terminal


class Bar:
    """Counts bytes; shows them when there is something to show them on."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, size_bytes: int) -> None:
        """So much more is done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, size_bytes)


@contextlib.contextmanager
def bar(what: str, total_bytes: int, *, console: Console | None = None) -> Iterator[Bar]:
    """Give a bar for ``total_bytes`` of ``what``; it is gone at the end."""
    console = console or Terminal(stderr=True)
    if total_bytes == 0 or not console.is_terminal:
        yield Bar(None, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task(what, total=total_bytes))
