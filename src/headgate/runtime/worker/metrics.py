"""What one worker measures, and the message that reports it twice a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headgate.codec.messages import AlignmentMetrics, MetricsReport
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.progress import (
    BAD_RECORDS,
    BUSY,
    BUSY_MS,
    BYTES_IN,
    BYTES_OUT,
    CLOCK_S,
    EDGE,
    FILL,
    HELD_BACK_MS,
    IDLE_MS,
    NODE,
    QUEUED_BATCHES,
    QUEUED_BYTES,
    RECORDS,
    RECORDS_IN,
    RECORDS_OUT,
    WATERMARK_MS,
    Sample,
)
from headgate.runtime.wire.exchange import ExchangeMetrics
from headgate.runtime.worker.chain import Link
from headgate.runtime.worker.loop_head import LoopHeadRunner
from headgate.runtime.worker.subtask_runner import SubtaskRunner

ALIGNMENTS_MAX = 1_000
"""Kept between two reports; a report twice a second never needs so many."""


class WorkerMetrics:
    """Busy time, alignment times, and the operators' totals."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        """``clock_ns``: of the surroundings, as everything that is compared with it."""
        self._clock_ns = clock_ns
        self._since_ns = clock_ns()
        self._started_ns = self._since_ns
        self._slept_ns = 0
        self._reported_ms: int | None = None
        self._has_reported = False
        self._alignments: list[AlignmentMetrics] = []

    def start(self) -> None:
        """The mailbox loop begins."""
        self._since_ns = self._started_ns = self._clock_ns()

    def slept(self, duration_ns: int) -> None:
        """The mailbox had nothing to do."""
        self._slept_ns += duration_ns

    def snapshot_taken(self, subtask: SubtaskId, checkpoint: CheckpointId, align_us: int, freeze_us: int) -> None:
        """Note the synchronous cost of one snapshot."""
        if len(self._alignments) < ALIGNMENTS_MAX:
            self._alignments.append(AlignmentMetrics(str(subtask.vertex), checkpoint, align_us, freeze_us))

    @property
    def has_reported(self) -> bool:
        """Whether there was a report of all subtasks."""
        return self._has_reported

    def is_due(self, now_ms: int, period_ms: int) -> bool:
        """Whether the next report is due; it counts as made."""
        if self._reported_ms is not None and now_ms - self._reported_ms < period_ms:
            return False
        self._reported_ms = now_ms
        return True

    def busy_fraction(self) -> float:
        """Return the share of the time since the last call in which the mailbox did not sleep."""
        now_ns = self._clock_ns()
        total_ns, slept_ns = now_ns - self._since_ns, self._slept_ns
        self._since_ns, self._slept_ns = now_ns, 0
        return 1.0 if total_ns <= 0 else max(0.0, 1.0 - slept_ns / total_ns)

    def message(
        self, generation: Generation, busy: float, runners: Sequence[SubtaskRunner], exchange: ExchangeMetrics
    ) -> MetricsReport:
        """Return the report."""
        self._has_reported = True
        alignments, self._alignments = self._alignments, []
        samples = [
            Sample(BUSY, (), busy),
            Sample(BYTES_IN, (), exchange.bytes_in),
            Sample(BYTES_OUT, (), exchange.bytes_out),
            Sample(CLOCK_S, (), self._clock_ns() / 1e9),
        ]
        ran_ns = self._clock_ns() - self._started_ns
        for runner in runners:
            samples += _of_subtask(runner, ran_ns)
        loops = [runner.progress() for runner in runners if isinstance(runner, LoopHeadRunner)]
        sources = [found for runner in runners if (found := runner.source_progress()) is not None]
        return MetricsReport(generation, samples, alignments, loops, sources)

    def part(self, generation: Generation, runner: SubtaskRunner) -> MetricsReport:
        """Return the report of one subtask, which reads no source and heads no loop."""
        samples = list(_of_subtask(runner, self._clock_ns() - self._started_ns))
        return MetricsReport(generation, samples, is_part=True)


def _of_subtask(runner: SubtaskRunner, ran_ns: int) -> Iterator[Sample]:
    for link in runner.chain.links:
        yield from _of_node(link, runner, ran_ns)
    yield from _of_edges(runner)


def _of_node(link: Link, runner: SubtaskRunner, ran_ns: int) -> Iterator[Sample]:
    """``ran_ns``: since the mailbox loop began."""
    held_ns = runner.held_back.total_ns
    is_head = link is runner.chain.head
    for totals in link.measured():  # several, if they run in one pass
        labels = ((NODE, totals.node),)
        if totals.node == str(link.node.name):  # the others have no time of their own
            yield Sample(BUSY_MS, labels, totals.busy_ns // 1_000_000)
            yield Sample(IDLE_MS, labels, max(ran_ns - totals.busy_ns - held_ns, 0) // 1_000_000)
        yield Sample(HELD_BACK_MS, labels, held_ns // 1_000_000)
        yield Sample(BAD_RECORDS, labels, totals.bad_records)
        if is_head:
            batches, size_bytes = runner.queued
            yield Sample(QUEUED_BATCHES, labels, batches)
            yield Sample(QUEUED_BYTES, labels, size_bytes)
            is_head = False
        yield Sample(RECORDS_IN, labels, totals.records_in)
        yield Sample(RECORDS_OUT, labels, totals.records_out)
        if totals.watermark_ms is not None:
            yield Sample(WATERMARK_MS, labels, totals.watermark_ms)
    for name, count in link.context.metrics.counters.items():
        yield Sample(name, ((NODE, str(link.node.name)),), count)


def _of_edges(runner: SubtaskRunner) -> Iterator[Sample]:
    """What leaves the subtask and what comes to it: of each edge its two ends are in the same worker."""
    for outlet in runner.outlets:
        labels = ((EDGE, str(outlet.edge.index)),)
        yield Sample(RECORDS, labels, outlet.records)
        yield Sample(HELD_BACK_MS, labels, outlet.held_back.total_ns // 1_000_000)
    for edge, received in runner.meter.edges.items():
        labels = ((EDGE, str(edge)),)
        batches, size_bytes = received.queued
        yield Sample(BUSY_MS, labels, received.busy_ns // 1_000_000)
        yield Sample(QUEUED_BATCHES, labels, batches)
        yield Sample(QUEUED_BYTES, labels, size_bytes)
        yield Sample(FILL, labels, received.fill)
