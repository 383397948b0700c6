"""Numbers, sizes and times as people read them, and the progress of a run: as text and HTML, and live in notebooks."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from typing import Any, TypeAlias

from headgate.display.html import escaped, table
from headgate.environment import DaemonThread
from headgate.model.progress import LoopProgress, NodeProgress, PipelineState, Progress, RunResult, SourceProgress


def count_text(number: float) -> str:
    """Return ``1234567`` as ``1,234,567``."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Return ``1 failure``, ``1,234 failures`` or ``2 batches``."""
    several = "es" if noun.endswith("ch") else "s"
    return f"{count_text(number)} {noun}{'' if number == 1 else several}"


def size_text(size_bytes: int) -> str:
    """Return a size such as ``12.3 kB``."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def time_text(wall_ms: int | None) -> str:
    """Return milliseconds since 1970 as ``2026-01-31 12:00:00.000`` in UTC; ``-`` where there is no such date."""
    if wall_ms is None:
        return "-"
    try:
        moment = datetime.fromtimestamp(wall_ms / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return "end of input" if wall_ms > 0 else "-"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{wall_ms % 1000:03d}"


def duration_text(duration_ms: int) -> str:
    """Return ``850 ms``, ``12.3 s``, ``4 min 05 s`` or ``3 h 07 min``."""
    if duration_ms < 1_000:
        return f"{duration_ms} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.1f} s"
    seconds = duration_ms // 1000
    if seconds < 3_600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3_600} h {seconds % 3_600 // 60:02d} min"


PERIOD_S = 0.5
DISPLAYS_MAX = 4
"""Of one thing: older ones stay as they are."""
LAST_LOOK_S = 2.0

MimeBundle: TypeAlias = dict[str, str]
"""What is shown, by kind of content: ``text/html``, ``text/plain``."""


def in_notebook() -> bool:
    """Whether this code runs in a notebook kernel, which shows HTML and takes updates. Imports nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class LiveDisplay:
    """Shows one thing in as many cells as ask for it, until it has ended."""

    def __init__(self, look: Callable[[], MimeBundle], ended: Callable[[float], bool]) -> None:
        """Nothing is shown yet.

        Args:
            look: returns what is to be seen now; from any thread.
            ended: waits so many seconds for the end, and returns whether it has come.
        """
        self._look, self._ended = look, ended
        self._lock = threading.Lock()
        self._displays: deque[Any] = deque(maxlen=DISPLAYS_MAX)
        self._seen: MimeBundle = {}
        self._thread: DaemonThread | None = None

    def show(self) -> None:
        """Show it in the cell that runs. Needs a kernel."""
        from IPython.display import display

        with self._lock:
            self._seen = self._look()
            self._displays.append(display(self._seen, raw=True, display_id=True))
            if self._thread is None or not self._thread.is_alive():
                self._thread = DaemonThread(target=self._follow, name="headgate-display", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """It has ended: wait until its end is seen, before the cell that waited for it is over."""
        thread = self._thread
        if thread is not None:
            thread.join(LAST_LOOK_S)

    def _follow(self) -> None:
        while not self._ended(PERIOD_S):
            self._update()
        self._update()

    def _update(self) -> None:
        try:
            with self._lock:
                now = self._look()
                displays = list(self._displays) if now != self._seen else []
                self._seen = now
            for shown in displays:
                shown.update(now, raw=True)
        except Exception:
            logging.getLogger("headgate").debug("a display could not be updated", exc_info=True)


BUSY_STEPS = 10
"""Rows are sorted by tenths of their busy share."""

NODE_TITLES = ("operator", "busy", "held back", "in/s", "out/s", "in", "out", "waiting", "lag", "late", "bad", "state")
"""``in`` and ``out`` are records."""

_MARKS = {PipelineState.RUNNING: "#1a7f4b", PipelineState.FINISHED: "#2b6cd4", PipelineState.FAILED: "#b3261e"}
_MARK = "#b25e00"


def node_cells(node: NodeProgress) -> tuple[str, ...]:
    """Return what stands in the row of ``node``, one text for each of ``NODE_TITLES``."""
    return (
        str(node.node),
        f"{node.busy:.0%}" if node.runs_with is None else f"with {node.runs_with}",
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


def by_busy(nodes: Sequence[NodeProgress]) -> list[NodeProgress]:
    """Return the operators, the busiest first: one that is always busy holds back its upstreams.

    Shares that are nearly the same do not count as different, so that rows keep their places.
    """
    return sorted(nodes, key=lambda node: -round(node.busy * BUSY_STEPS))


def loop_text(loop: LoopProgress) -> str:
    """Return a line about a loop: what circulates, and what it costs."""
    parts = [f"loop {loop.loop}: {count_text(loop.came_back)} came back"]
    waiting = f"{counted(loop.queued_batches, 'batch')} ({size_text(loop.queued_bytes)}) waiting"
    parts.append(waiting + (f", {size_text(loop.spilled_bytes)} on disk" if loop.spilled_bytes else ""))
    if loop.trip_ms:
        parts.append(f"trip {duration_text(loop.trip_ms)}")
    if loop.throttled_ms:
        parts.append(f"input held back for {duration_text(loop.throttled_ms)}")
    if loop.round_ >= 0:
        parts.append(f"round {loop.round_}")
    return " · ".join(parts)


def lag_text(sources: Sequence[SourceProgress]) -> str:
    """Return what is known to wait in all sources together, to be read or in transactions; "" if nothing is known."""
    lags: dict[str, int] = {}
    for source in sources:
        if source.lag is not None:
            lags[source.unit] = lags.get(source.unit, 0) + source.lag
    parts = [size_text(lag) if unit == "bytes" else counted(lag, "record") for unit, lag in lags.items()]
    if undecided := sum(source.undecided for source in sources):
        parts.append(f"{undecided:,} in open transactions")
    return ", ".join(parts)


def summary_text(progress: Progress) -> str:
    """Return the state in one line: rate, watermark, checkpoint, restarts, and what needs attention."""
    parts = [progress.state.value]
    if progress.nodes:
        rate = max(max(n.records_in_per_second, n.records_out_per_second) for n in progress.nodes)
        parts.append(f"{count_text(rate)} records/s")
    if lags := lag_text(progress.sources):
        parts.append(f"lag {lags}")
    if progress.watermark_ms is not None:
        parts.append(f"watermark {time_text(progress.watermark_ms)}")
    if progress.last_checkpoint is not None:
        last = progress.last_checkpoint
        parts.append(f"checkpoint {last.checkpoint} ({duration_text(last.duration_ms)}, {size_text(last.size_bytes)})")
    pending = progress.pending_checkpoint
    if pending is not None and pending.age_ms > 1_000:
        held = f", held by {', '.join(pending.missing[:3])}" if pending.missing else ""
        parts.append(f"checkpoint {pending.checkpoint} under way for {duration_text(pending.age_ms)}{held}")
    parts.append(counted(progress.restarts, "restart"))
    if progress.failures > progress.restarts:
        parts.append(counted(progress.failures, "failure"))
    if progress.busy:
        parts.append(f"busy {progress.busy:.0%}")
    if progress.late_records:
        parts.append(f"{count_text(progress.late_records)} late")
    if progress.bad_records:
        parts.append(f"{count_text(progress.bad_records)} bad")
    if progress.lost_outputs:
        parts.append(f"{counted(progress.lost_outputs, 'output')} lost")
    return " · ".join(parts)


def late_text(node: NodeProgress, is_of_windows: bool, output: str | None) -> str:
    """Return a sentence about the late records of an operator: how many, where they are, how late, and what to set.

    Args:
        node: the operator.
        is_of_windows: it is a window, and its records are results of other windows.
        output: its output that took them; None: they were dropped.
    """
    assert node.lateness is not None, "only operators with late records"
    late = node.lateness
    seen = ", ".join(
        f"{name} {duration_text(ms)}" for name, ms in (("p50", late.p50_ms), ("p99", late.p99_ms), ("max", late.max_ms))
    )
    rescued = "kept them all" if output is None else "had them all in their windows"
    longer = f"{duration_text(late.max_ms)} longer, would have {rescued}"
    remedy = f"out_of_orderness of with_timestamps, {longer}"
    if is_of_windows:
        remedy = (
            "they are results of other windows, which come when event time has passed their window_start long ago; "
            f"allowed_lateness of '{node.node}', {longer}, and so would windows that begin and end with the others"
        )
    records = counted(node.late_records, "late record")
    what = f"dropped {records}" if output is None else f"sent {records} to its output '{output}'"
    return f"'{node.node}' {what} (lateness: {seen}); {remedy}"


def progress_html(name: str, progress: Progress, ended: str | None = None) -> str:
    """Return a run as HTML. ``ended``: a sentence about its end, once it has ended."""
    mark = _MARKS.get(progress.state, _MARK)
    lines = [f'<div><span style="color:{mark}">●</span> <b>{escaped(name)}</b> {escaped(summary_text(progress))}</div>']
    if progress.nodes:
        lines.append(table(NODE_TITLES, [node_cells(node) for node in by_busy(progress.nodes)], numbers_from=1))
    lines += [f"<div>{escaped(loop_text(loop))}</div>" for loop in progress.loops]
    if ended is not None:
        lines.append(f"<div>{escaped(ended)}</div>")
    return f"<div>{''.join(lines)}</div>"


def end_text(end: RunResult | BaseException) -> str:
    """Return a sentence about how a run ended."""
    if isinstance(end, BaseException):
        return f"failed: {end}"
    if end.had_finished:
        return "it had been drained before, and does not continue" if end.is_drained else "it had finished before"
    if end.is_finished:
        return "drained: it does not continue" if end.is_drained else "all input has been processed"
    how = "cancelled" if end.is_cancelled else "stopped"
    if end.last_checkpoint is None or end.has_removed_checkpoints:
        return f"{how}; the next run begins at the beginning"
    return f"{how}; the next run continues from checkpoint {end.last_checkpoint}"


class RunDisplay:
    """Base class of a handle that shows its run: live in a notebook, as one line elsewhere."""

    def __init__(self, name: str, result: Future[RunResult]) -> None:
        """Display the run of the pipeline ``name``, which ends with ``result``."""
        self._name, self._result = name, result
        self._live = LiveDisplay(self._shown, lambda timeout_s: not wait([result], timeout_s).not_done)

    @property
    def progress(self) -> Progress:
        """The latest snapshot."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"PipelineHandle({self._name!r}, {self.progress.state.value})"

    def _repr_html_(self) -> str:
        return self._shown()["text/html"]

    def _ipython_display_(self) -> None:
        """Show the run for as long as it goes on: notebooks call this for what a cell returns."""
        if not in_notebook():
            raise NotImplementedError("only what a notebook shows can change")
        self._live.show()

    def close_display(self) -> None:
        """The run has ended: what is shown of it shows that."""
        self._live.close()

    def _shown(self) -> MimeBundle:
        result = self._result
        end = (result.exception() or result.result()) if result.done() else None
        html = progress_html(self._name, self.progress, None if end is None else end_text(end))
        return {"text/html": html, "text/plain": repr(self)}
