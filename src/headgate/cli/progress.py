"""Progress of a running pipeline: live on a terminal, a line now and then elsewhere, or JSON.

Each class is an ``Observer`` and a context manager. They are called from the session's threads.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headgate.cli.text import count_text, duration_text, size_text, time_text
from headgate.model.ids import CheckpointId
from headgate.model.progress import LoopProgress, Observer, Progress, SilentObserver

LINE_PERIOD_S = 5.0
"""Between two lines of progress where there is no terminal."""

NOTES_MAX = 5


class ShownObserver(Observer, Protocol):
    """An observer that shows things between ``with`` and its end."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""


class Quiet(SilentObserver):
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class JsonLinesProgress(Quiet):
    """Writes one JSON object for each event to standard output."""

    def on_progress(self, progress: Progress) -> None:
        """Write it with all its fields."""
        self._write("progress", asdict(progress))

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
        typer.echo(json.dumps({"event": kind, **fields}, default=_plain))


class PlainProgress(Quiet):
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
        typer.echo(f"{self._pipeline}: {text}", err=True)


class LiveProgress(Quiet):
    """A table that is redrawn in place."""

    def __init__(self, pipeline: str, console: Console | None = None) -> None:
        self._pipeline = pipeline
        self._progress: Progress | None = None
        self._notes: deque[str] = deque(maxlen=NOTES_MAX)
        self._live = Live(
            console=console or Console(stderr=True), refresh_per_second=4, get_renderable=self.render, transient=False
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
        head = Text.from_markup(f"[bold]{escape(self._pipeline)}[/bold]  {escape(summary_text(progress))}")
        loops = (Text(loop_text(loop)) for loop in progress.loops)
        return Group(head, nodes_table(progress), *loops, *(Text(note, style="yellow") for note in tuple(self._notes)))


def nodes_table(progress: Progress) -> Table:
    """Return a row for each operator."""
    table = Table(box=None, pad_edge=False)
    table.add_column("operator")
    for title in ("records/s in", "records/s out", "records in", "records out"):
        table.add_column(title, justify="right")
    for node in progress.nodes:
        table.add_row(
            escape(str(node.node)),
            count_text(node.records_in_per_second),
            count_text(node.records_out_per_second),
            count_text(node.records_in),
            count_text(node.records_out),
        )
    return table


def loop_text(loop: LoopProgress) -> str:
    """Return a line about a loop: what circulates, and what it costs."""
    parts = [f"loop {loop.loop}: {count_text(loop.came_back)} came back"]
    waiting = f"{count_text(loop.queued_batches)} batches ({size_text(loop.queued_bytes)}) wait"
    parts.append(waiting + (f", {size_text(loop.spilled_bytes)} on disk" if loop.spilled_bytes else ""))
    if loop.trip_ms:
        parts.append(f"trip {duration_text(loop.trip_ms)}")
    if loop.throttled_ms:
        parts.append(f"input held back for {duration_text(loop.throttled_ms)}")
    if loop.round_ >= 0:
        parts.append(f"round {loop.round_}")
    return " · ".join(parts)


def summary_text(progress: Progress) -> str:
    """Return the state in one line: rate, watermark, checkpoint, restarts, and what needs attention."""
    parts = [progress.state.value]
    if progress.nodes:
        rate = max(max(n.records_in_per_second, n.records_out_per_second) for n in progress.nodes)
        parts.append(f"{count_text(rate)} records/s")
    if progress.watermark_ms is not None:
        parts.append(f"watermark {time_text(progress.watermark_ms)}")
    if progress.last_checkpoint is not None:
        last = progress.last_checkpoint
        parts.append(f"checkpoint {last.checkpoint} ({duration_text(last.duration_ms)}, {size_text(last.size_bytes)})")
    pending = progress.pending_checkpoint
    if pending is not None and pending.age_ms > 1_000:
        held = f", held by {', '.join(pending.missing[:3])}" if pending.missing else ""
        parts.append(f"checkpoint {pending.checkpoint} under way for {duration_text(pending.age_ms)}{held}")
    parts.append(f"{progress.restarts} restarts")
    if progress.busy:
        parts.append(f"busy {progress.busy:.0%}")
    if progress.late_records:
        parts.append(f"{count_text(progress.late_records)} late")
    if progress.bad_records:
        parts.append(f"{count_text(progress.bad_records)} bad")
    if progress.lost_outputs:
        parts.append(f"{count_text(progress.lost_outputs)} outputs lost")
    return " · ".join(parts)


def restart_text(reason: str, delay_ms: int) -> str:
    """Return the sentence about a restart."""
    return f"restarting in {duration_text(delay_ms)}: {reason}"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str(value)
