"""Progress of a running pipeline: live on a terminal, a line now and then elsewhere, or JSON.

Each class is an ``Observer`` and a context manager. They are called from the session's threads.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
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
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.errors import HeadgateError
from headgate.model.ids import CheckpointId
from headgate.model.progress import (
    LoopProgress,
    NodeProgress,
    Observer,
    PipelineHandle,
    Progress,
    RunResult,
    SilentObserver,
)

LINE_PERIOD_S = 5.0
"""Between two lines of progress where there is no terminal."""

NOTES_MAX = 5

BUSY_STEPS = 10
"""Rows are sorted by tenths of their busy share."""


class ShownObserver(Observer, Protocol):
    """An observer that shows things between ``with`` and its end."""

    def on_start(self, handle: PipelineHandle) -> None:
        """It has begun."""

    def on_result(self, result: RunResult) -> None:
        """It ended without failing; nothing comes behind this."""

    def on_failure(self, error: HeadgateError) -> None:
        """It failed; nothing comes behind this."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""


class Quiet(SilentObserver):
    """Shows nothing."""

    def on_start(self, handle: PipelineHandle) -> None:
        """It has begun."""

    def on_result(self, result: RunResult) -> None:
        """It ended without failing; nothing comes behind this."""

    def on_failure(self, error: HeadgateError) -> None:
        """It failed; nothing comes behind this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class JsonLinesProgress(Quiet):
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
    """Return a row for each operator; what holds the pipeline back comes first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("operator")
    titles = ("busy", "held back", "records/s in", "records/s out", "records in", "records out", "waiting", "lag")
    for title in (*titles, "late", "bad", "state"):
        table.add_column(title, justify="right")
    for node in by_busy(progress.nodes):
        table.add_row(
            escape(str(node.node)),
            f"{node.busy:.0%}",
            f"{node.held_back:.0%}",
            count_text(node.records_in_per_second),
            count_text(node.records_out_per_second),
            count_text(node.records_in),
            count_text(node.records_out),
            size_text(node.queued_bytes) if node.queued_batches else "",
            "" if node.lag_ms is None else duration_text(node.lag_ms),
            count_text(node.late_records) if node.late_records else "",
            count_text(node.bad_records) if node.bad_records else "",
            size_text(node.state_bytes) if node.state_bytes else "",
        )
    return table


def by_busy(nodes: Sequence[NodeProgress]) -> list[NodeProgress]:
    """Return the operators, the busiest first: whoever is busy all the time holds back those in front of it.

    Shares that are nearly the same do not count as different, so that rows keep their places.
    """
    return sorted(nodes, key=lambda node: -round(node.busy * BUSY_STEPS))


def outcome_of(result: RunResult) -> str:
    """Return one word for how a run ended that did not fail."""
    if result.has_removed_checkpoints:
        return "cancelled"
    return "drained" if result.is_drained else "finished" if result.is_finished else "stopped"


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
    if progress.failures > progress.restarts:
        parts.append(f"{progress.failures} failures")
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
