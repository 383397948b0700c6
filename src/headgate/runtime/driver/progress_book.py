"""Adds up what workers report into ``model.progress.Progress``."""

from __future__ import annotations

import time
from collections import deque

from headgate.codec import messages
from headgate.model.ids import CheckpointId, Generation, NodeName
from headgate.model.progress import (
    CheckpointProgress,
    LoopProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
)

CHECKPOINTS_MAX = 1_000
ALIGNMENTS_MAX = 100_000
LATE_COUNTER = "late"
BAD_COUNTER = "bad"


class ProgressBook:
    """The latest numbers of one run."""

    def __init__(self, bad_records_node: str) -> None:
        self._begun_s = time.monotonic()
        self._bad_records_node = bad_records_node
        self._generation = Generation(0)
        self._workers: dict[int, messages.Metrics] = {}
        self._rates: dict[NodeName, tuple[float, float]] = {}
        self._rated: tuple[float, dict[NodeName, tuple[int, int]]] = (self._begun_s, {})
        self.checkpoints: deque[CheckpointProgress] = deque(maxlen=CHECKPOINTS_MAX)
        self.alignments: deque[messages.AlignmentMetrics] = deque(maxlen=ALIGNMENTS_MAX)

    def begin(self, generation: Generation) -> None:
        """A generation starts: its totals count from zero."""
        self._generation = generation
        self._workers = {}
        self._rated = (time.monotonic(), {})
        self._rates = {}

    def add(self, worker: int, metrics: messages.Metrics) -> None:
        """A worker reported."""
        if metrics.generation == self._generation:
            self._workers[worker] = metrics
            self.alignments.extend(metrics.alignments)

    def reports(self) -> dict[int, messages.Metrics]:
        """Return the latest report of every worker of the running generation."""
        return dict(self._workers)

    @property
    def busy(self) -> float:
        """Busy fraction of the busiest worker."""
        return max((m.busy for m in self._workers.values()), default=0.0)

    def snapshot(
        self,
        state: PipelineState,
        generation: Generation,
        restarts: int,
        pending: tuple[CheckpointId, int, tuple[str, ...]] | None,
    ) -> Progress:
        """Return everything as of now."""
        totals = self._totals()
        self._update_rates(totals)
        watermarks = [n.watermark_ms for m in self._workers.values() for n in m.nodes if n.watermark_ms is not None]
        nodes = tuple(
            NodeProgress(name, records_in, records_out, *self._rates.get(name, (0.0, 0.0)), self._counters(name))
            for name, (records_in, records_out) in totals.items()
        )
        late = sum(dict(n.counters).get(LATE_COUNTER, 0) for n in nodes)
        bad = totals.get(NodeName(self._bad_records_node), (0, 0))[0]
        return Progress(
            state,
            generation,
            restarts,
            nodes,
            min(watermarks, default=None),
            self.checkpoints[-1] if self.checkpoints else None,
            None if pending is None else PendingCheckpoint(*pending),
            self.busy,
            late,
            bad,
            round((time.monotonic() - self._begun_s) * 1000),
            self._loops(),
        )

    def _loops(self) -> tuple[LoopProgress, ...]:
        heads: dict[NodeName, list[LoopProgress]] = {}
        for metrics in self._workers.values():
            for head in metrics.loops:
                heads.setdefault(head.loop, []).append(head)
        return tuple(_of_all(found) for found in heads.values())

    def _totals(self) -> dict[NodeName, tuple[int, int]]:
        totals: dict[NodeName, tuple[int, int]] = {}
        for metrics in self._workers.values():
            for node in metrics.nodes:
                records_in, records_out = totals.get(NodeName(node.node), (0, 0))
                totals[NodeName(node.node)] = (records_in + node.records_in, records_out + node.records_out)
        return totals

    def _counters(self, name: NodeName) -> tuple[tuple[str, int], ...]:
        sums: dict[str, int] = {}
        for metrics in self._workers.values():
            for node in metrics.nodes:
                if node.node == name:
                    for counter, value in node.counters.items():
                        sums[counter] = sums.get(counter, 0) + value
        return tuple(sorted(sums.items()))

    def _update_rates(self, totals: dict[NodeName, tuple[int, int]]) -> None:
        now = time.monotonic()
        since, before = self._rated
        if now - since < 0.5:
            return
        self._rates = {
            name: tuple(max(0.0, (t - b) / (now - since)) for t, b in zip(total, before.get(name, (0, 0)), strict=True))  # type: ignore[misc]
            for name, total in totals.items()
        }
        self._rated = (now, totals)


def _of_all(heads: list[LoopProgress]) -> LoopProgress:
    """Return one loop's progress from those of its head subtasks."""
    return LoopProgress(
        heads[0].loop,
        queued_batches=sum(head.queued_batches for head in heads),
        queued_bytes=sum(head.queued_bytes for head in heads),
        queued_bytes_max=sum(head.queued_bytes_max for head in heads),
        spilled_bytes=sum(head.spilled_bytes for head in heads),
        log_bytes=sum(head.log_bytes for head in heads),
        held_channels=sum(head.held_channels for head in heads),
        came_back=sum(head.came_back for head in heads),
        throttled_ms=sum(head.throttled_ms for head in heads),
        trip_ms=max(head.trip_ms for head in heads),
        round_=max(head.round_ for head in heads),
    )
