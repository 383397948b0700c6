"""What commands print: text, progress bars, and a running pipeline as a table, lines, JSON lines or a web page.

Observers of a run are context managers. They are called from the session's threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from headgate.api.pipeline_registry import announced_page
from headgate.dataclass import dataclass
from headgate.display.progress import (
    NODE_TITLES,
    by_busy,
    count_text,
    counted,
    duration_text,
    loop_text,
    node_cells,
    size_text,
    summary_text,
    time_text,
)
from headgate.distribution import install_command
from headgate.environment import SYSTEM_CLOCK, Clock
from headgate.errors import HeadgateError, UsageError
from headgate.model.failure import exit_code_of
from headgate.model.ids import CheckpointId
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import LogPlace, Observer, PipelineHandle, Progress, RunResult, SilentObserver
from headgate.plain_text import printable
from headgate.tracebacks import user_line

if TYPE_CHECKING:
    from headgate.web.app import RunActions
    from headgate.web.view_model import LogDirectory, RunView


class Terminal(Console):
    """A console that shows every text as it is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See ``Console``; its width is that of what is shown."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
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
            "cancelled; it is not known whether its checkpoints are removed: the same command begins from nothing, "
            "or continues"
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

    def __init__(self, progress: RichProgress | None, task: TaskID | None) -> None:
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
    with RichProgress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress, progress.add_task(what, total=total_bytes))


LINE_PERIOD_S = 5.0
"""Between two lines of progress where there is no terminal."""

NOTES_MAX = 5

LEAST_IMPORTANT = ("state", "waiting", "held back", "in", "late", "lag", "bad", "in/s", "busy")
"""Columns of the table that go on a narrow terminal, in this order."""


class RunObserver(Observer, Protocol):
    """An observer that shows things between ``with`` and its end."""

    def on_start(self, handle: PipelineHandle) -> None:
        """The run has begun."""

    def on_result(self, result: RunResult) -> None:
        """The run ended without failing; this is the last call."""

    def on_failure(self, error: HeadgateError) -> None:
        """The run failed; this is the last call."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""


class QuietObserver(SilentObserver):
    """Shows nothing."""

    def on_start(self, handle: PipelineHandle) -> None:
        """The run has begun."""

    def on_result(self, result: RunResult) -> None:
        """The run ended without failing; this is the last call."""

    def on_failure(self, error: HeadgateError) -> None:
        """The run failed; this is the last call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class JsonLinesProgress(QuietObserver):
    """Writes one JSON object for each event to standard output: of which pipeline, and at which time."""

    def __init__(self, pipeline: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._pipeline = pipeline
        self._clock = clock

    def on_progress(self, progress: Progress) -> None:
        """Write it with all its fields, but without single subtasks: there may be thousands."""
        nodes = tuple(replace(node, subtasks=()) for node in progress.nodes)
        fields = asdict(replace(progress, nodes=nodes))
        for node in fields["nodes"]:
            del node["subtasks"]
        self._write("progress", fields)

    def on_result(self, result: RunResult) -> None:
        """Write it, with one word for how it ended."""
        self._write("result", {"outcome": outcome_of(result), **asdict(result)})

    def on_failure(self, error: HeadgateError) -> None:
        """Write it."""
        self._write("result", {"outcome": "failed", "error": str(error)})

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """Write it."""
        self._write("restart", {"reason": reason, "delay_ms": delay_ms})

    def on_note(self, text: str) -> None:
        """Write it."""
        self._write("note", {"text": text})

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """Write it."""
        self._write("checkpoint", {"checkpoint": checkpoint, "duration_ms": duration_ms, "size_bytes": size_bytes})

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        now_ms = self._clock.wall_ms()
        time = f"{datetime.fromtimestamp(now_ms // 1000, UTC):%Y-%m-%dT%H:%M:%S}.{now_ms % 1000:03d}Z"
        event = {"event": kind, "pipeline": self._pipeline, "time": time, **fields}
        typer.echo(json.dumps(event, default=_plain))


class PlainProgress(QuietObserver):
    """Prints a line every few seconds, and one for each restart and note."""

    def __init__(self, pipeline: str, period_s: float = LINE_PERIOD_S) -> None:
        self._pipeline = pipeline
        self._period_s = period_s
        self._next_s = 0.0
        self._state: Enum | None = None

    def on_progress(self, progress: Progress) -> None:
        """Print it when it is time, or when the state changed."""
        now = time.monotonic()
        if now < self._next_s and progress.state is self._state:
            return
        self._next_s, self._state = now + self._period_s, progress.state
        self._print(summary_text(progress))
        for loop in progress.loops:
            self._print(loop_text(loop))

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """Print it."""
        self._print(restart_text(reason, delay_ms))

    def on_note(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def _print(self, text: str) -> None:
        say(f"{self._pipeline}: {text}", err=True)


class LiveProgress(QuietObserver):
    """A table that is redrawn in place."""

    def __init__(self, pipeline: str, console: Console | None = None) -> None:
        self._pipeline = pipeline
        self._progress: Progress | None = None
        self._notes: deque[str] = deque(maxlen=NOTES_MAX)
        self._live = Live(
            console=console or Terminal(stderr=True), refresh_per_second=4, get_renderable=self.render, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_progress(self, progress: Progress) -> None:
        """Keep it for the next drawing."""
        self._progress = progress

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """Keep it among the last notes."""
        self._notes.append(restart_text(reason, delay_ms))

    def on_note(self, text: str) -> None:
        """Keep it among the last notes."""
        self._notes.append(text)

    def render(self) -> Group:
        """Return what is to be seen now."""
        progress = self._progress
        if progress is None:
            return Group(Text(f"{self._pipeline}: starting Spark …"))
        head = Text.assemble((self._pipeline, "bold"), f"  {summary_text(progress)}")
        loops = (Text(loop_text(loop)) for loop in progress.loops)
        table = nodes_table(progress, self._live.console.width)
        # the notes are copied: the driver's thread adds some meanwhile
        return Group(head, table, *loops, *(Text(note, style="yellow") for note in tuple(self._notes)))


def nodes_table(progress: Progress, width: int | None = None) -> Table:
    """Return a row for each operator; what holds the pipeline back comes first.

    Columns without a value are left out, and, where ``width`` is too small for all, the least important ones: no number
    is cut off.
    """
    rows = [node_cells(node) for node in by_busy(progress.nodes)]
    kept = [title for number, title in enumerate(NODE_TITLES) if any(row[number] for row in rows)] or list(NODE_TITLES)
    widths = {title: max(map(len, [title, *cells])) for title, *cells in zip(NODE_TITLES, *rows, strict=True)}
    for title in LEAST_IMPORTANT:
        if width is not None and sum(widths[one] + 2 for one in kept) - 2 > width and title in kept:
            kept.remove(title)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in kept:
        is_name = title == NODE_TITLES[0]
        table.add_column(title, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for title, cell in zip(NODE_TITLES, row, strict=True) if title in kept))
    return table


def outcome_of(result: RunResult) -> str:
    """Return one word for how a run ended that did not fail."""
    if result.has_removed_checkpoints or result.is_cancelled:
        return "cancelled"
    return "drained" if result.is_drained else "finished" if result.is_finished else "stopped"


def restart_text(reason: str, delay_ms: int) -> str:
    """Return the sentence about a restart."""
    return f"restarting in {duration_text(delay_ms)}: {reason}"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str(value)


TOKEN = "HEADGATE_UI_TOKEN"
"""Environment variable; not an option, which everybody on the machine can read."""
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where a page is served."""

    port: int
    host: str = HOST

    def check(self, option: str = "--ui") -> None:
        """Refuse what cannot be; ``option`` is what was given, for messages.

        Raises:
            UsageError: it is no port, or the packages are missing.
        """
        if not 0 <= self.port < 65_536:
            raise UsageError(f"{option} is {self.port}, but a port is a number up to 65535, or 0 for a free one")
        missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
        if missing:
            raise UsageError(f"the page needs the package {missing[0]}: {install_command('ui')}")


class PageObserver:
    """A ``ShownObserver`` in front of another one: shows what it hears in browsers, too.

    Of a run that goes on in another's place (``must_run``) a page that cannot be served is a note, and no error.
    """

    def __init__(
        self, other: RunObserver, definition: PipelineDefinition, place: PageAddress, *, must_run: bool = False
    ) -> None:
        self._must_run = must_run
        self._other = other
        self._definition = definition
        self._place = place
        self._opened = ExitStack()
        self._story: RunView
        self._asking: RunActions
        self._logs: LogDirectory
        self._handle: PipelineHandle | None = None

    def __enter__(self) -> Self:
        from headgate.web.app import RunActions, make_app, serve_page
        from headgate.web.view_model import LogDirectory, RunView

        self._story, self._asking, self._logs = RunView(self._definition), RunActions(), LogDirectory()
        token = os.environ.pop(TOKEN, None)  # workers run what others wrote: it is not for them
        more = "add #token=… with the token to be able to stop it" if token else "read only"
        with ExitStack() as opened:
            answering = partial(make_app, self._story, self._asking, self._logs)
            served = serve_page(answering, self._place.port, self._place.host, token or None)
            try:
                address = opened.enter_context(served)
                opened.enter_context(announced_page(self._definition.config.name, address))
                note = f"page: {address} ({more})"
            except UsageError as error:
                if not self._must_run:
                    raise
                note = f"running without a page: {error}"
            opened.enter_context(self._other)
            # all are open: until here a failure closes those that were
            self._opened = opened.pop_all()
        self._other.on_note(note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def on_start(self, handle: PipelineHandle) -> None:
        self._asking.begin(handle)
        self._handle = handle
        self._other.on_start(handle)

    def on_progress(self, progress: Progress) -> None:
        self._story.set_progress(progress, SYSTEM_CLOCK.wall_ms(), SYSTEM_CLOCK.monotonic_ms())
        if self._handle is not None:
            self._story.set_alignments(self._handle.alignments())
        self._other.on_progress(progress)

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self._story.add_restart(reason, delay_ms, SYSTEM_CLOCK.wall_ms())
        self._other.on_restart(reason, delay_ms)

    def on_note(self, text: str) -> None:
        self._story.add_note(text, SYSTEM_CLOCK.wall_ms())
        if isinstance(text, LogPlace):
            self._logs.set_directory(text.directory)
        self._other.on_note(text)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        self._story.add_checkpoint(checkpoint, duration_ms, size_bytes, SYSTEM_CLOCK.wall_ms())
        self._other.on_checkpoint(checkpoint, duration_ms, size_bytes)

    def on_result(self, result: RunResult) -> None:
        self._story.set_end(outcome_of(result), result_text(result), SYSTEM_CLOCK.wall_ms())
        self._other.on_result(result)

    def on_failure(self, error: HeadgateError) -> None:
        self._story.set_end("failed", str(error), SYSTEM_CLOCK.wall_ms())
        self._other.on_failure(error)
