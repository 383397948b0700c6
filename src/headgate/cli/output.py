"""Terminal output of commands: text, tables, progress bars and errors.

Everything that a user's data, names or errors say is shown as text and never acts on the terminal (SE22).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.text import Text

from headgate.display.text import count_text, counted, duration_text, size_text, time_text
from headgate.errors import HeadgateError
from headgate.model.failure import exit_code_of
from headgate.model.progress import RunResult
from headgate.plain_text import printable
from headgate.tracebacks import user_line


class Terminal(Console):
    """A console that shows every text as it is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See ``Console``; its width is that of what is shown."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See ``Console``."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)


__all__ = ["count_text", "duration_text", "result_text", "say", "size_text", "time_text", "write_lines"]


def say(text: str, *, err: bool = False, fg: str | None = None, nl: bool = True) -> None:
    """Print ``text``; see ``typer.secho``."""
    typer.secho(printable(text), err=err, fg=fg, nl=nl)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines of data to standard output: as they are, or made printable on a terminal."""
    is_shown = sys.stdout.isatty()
    sys.stdout.writelines(f"{printable(line) if is_shown else line}\n" for line in lines)


def result_text(result: RunResult) -> str:
    """Return how a run ended, in one sentence."""
    ended = "drained" if result.is_drained else "finished"
    how = ended if result.is_finished else "stopped; the same command continues"
    records = f"{counted(result.records_in, 'record')} in, {count_text(result.records_out)} out"
    if result.had_finished:
        return f"nothing to do: it had {ended} before, after {records}"
    if result.is_cancelled:
        how = "cancelled; the same command continues"
    if result.has_removed_checkpoints:
        how = "cancelled, and its checkpoints are removed,"
    elif result.is_removal_in_doubt:
        how = (
            "cancelled; it is not known whether its checkpoints are removed: the same command begins anew, or continues"
        )
    where = "" if result.is_finished or result.last_checkpoint is None else f" from checkpoint {result.last_checkpoint}"
    return f"{how}{where} after {duration_text(result.duration_ms)}: {records}, {counted(result.restarts, 'restart')}"


def report_error(error: HeadgateError) -> int:
    """Print ``error`` on standard error; return the exit code.

    The line of the program that led to it follows. ``PipelineFailed`` brings the short traceback of the user's own
    function with it.
    """
    say(f"Error: {error}{user_line(error.__traceback__)}", err=True, fg=typer.colors.RED)
    return int(exit_code_of(error))


class ProgressBar:
    """Counts bytes; shows them when there is something to show them on."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, size_bytes: int) -> None:
        """So much more is done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, size_bytes)


@contextlib.contextmanager
def progress_bar(what: str, total_bytes: int, *, console: Console | None = None) -> Iterator[ProgressBar]:
    """Give a bar for ``total_bytes`` of ``what``; it is gone at the end."""
    console = console or Terminal(stderr=True)
    if total_bytes == 0 or not console.is_terminal:
        yield ProgressBar(None, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress, progress.add_task(what, total=total_bytes))
