"""Adds up what workers report into ``model.progress.Progress``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from headgate.codec import messages
from headgate.model.ids import Generation, NodeName
from headgate.model.metrics import (
    BUSY,
    NODE,
    OF_EVERY_NODE,
    RECORDS_IN,
    RECORDS_OUT,
    WATERMARK_MS,
    Sample,
    Samples,
)
from headgate.model.progress import (
    CheckpointProgress,
    LoopProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
)

CHECKPOINTS_MAX = 1_000
ALIGNMENTS_MAX = 10_000
LATE_COUNTER = "late"


class ProgressBook:
    """The latest numbers of one run."""

    def __init__(self, bad_records_node: str, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._begun_ns = clock_ns()
        self._bad_records_node = bad_records_node
        self._generation = Generation(0)
        self._workers: dict[int, Samples] = {}
        self._heads: dict[int, Sequence[LoopProgress]] = {}
        self._rates: dict[NodeName, tuple[float, float]] = {}
        self._rated: tuple[int, dict[NodeName, tuple[int, int]]] = (self._begun_ns, {})
        self.checkpoints: deque[CheckpointProgress] = deque(maxlen=CHECKPOINTS_MAX)
        self.alignments: deque[messages.AlignmentMetrics] = deque(maxlen=ALIGNMENTS_MAX)

    def begin(self, generation: Generation) -> None:
        """A generation starts: its totals count from zero."""
        self._generation = generation
        self._workers, self._heads = {}, {}
        self._rated = (self._clock_ns(), {})
        self._rates = {}

    def add(self, worker: int, metrics: messages.MetricsReport) -> None:
        """A worker reported."""
        if metrics.generation == self._generation:
            self._workers[worker] = Samples(metrics.samples)
            self._heads[worker] = metrics.loops
            self.alignments.extend(metrics.alignments)

    def reports(self) -> dict[int, Samples]:
        """Return the latest report of every worker of the running generation."""
        return dict(self._workers)

    @property
    def busy(self) -> float:
        """Busy fraction of the busiest worker."""
        return max(self._values(BUSY), default=0.0)

    def snapshot(
        self,
        state: PipelineState,
        generation: Generation,
        restarts: int,
        pending: PendingCheckpoint | None,
    ) -> Progress:
        """Return everything as of now."""
        totals = self._totals()
        self._update_rates(totals)
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
            min(map(int, self._values(WATERMARK_MS)), default=None),
            self.checkpoints[-1] if self.checkpoints else None,
            pending,
            self.busy,
            late,
            bad,
            round((self._clock_ns() - self._begun_ns) / 1_000_000),
            self._loops(),
        )

    def _loops(self) -> tuple[LoopProgress, ...]:
        heads: dict[NodeName, list[LoopProgress]] = {}
        for found in self._heads.values():
            for head in found:
                heads.setdefault(head.loop, []).append(head)
        return tuple(_of_all(one) for one in heads.values())

    def _samples(self) -> Iterator[Sample]:
        for samples in self._workers.values():
            yield from samples

    def _values(self, name: str) -> Iterator[float]:
        return (sample.value for sample in self._samples() if sample.name == name)

    def _totals(self) -> dict[NodeName, tuple[int, int]]:
        totals: dict[NodeName, tuple[int, int]] = {}
        for sample in self._samples():
            if sample.name in (RECORDS_IN, RECORDS_OUT):
                node, value = NodeName(str(sample.label(NODE))), int(sample.value)
                records_in, records_out = totals.get(node, (0, 0))
                is_in = sample.name == RECORDS_IN
                totals[node] = (records_in + value, records_out) if is_in else (records_in, records_out + value)
        return totals

    def _counters(self, name: NodeName) -> tuple[tuple[str, int], ...]:
        sums: dict[str, int] = {}
        for samples in self._workers.values():
            for counter, value in samples.of(NODE, str(name)).items():
                if counter not in OF_EVERY_NODE:
                    sums[counter] = sums.get(counter, 0) + int(value)
        return tuple(sorted(sums.items()))

    def _update_rates(self, totals: dict[NodeName, tuple[int, int]]) -> None:
        now_ns = self._clock_ns()
        since_ns, before = self._rated
        passed_s = (now_ns - since_ns) / 1e9
        if passed_s < 0.5:
            return
        self._rates = {
            name: tuple(max(0.0, (t - b) / passed_s) for t, b in zip(total, before.get(name, (0, 0)), strict=True))  # type: ignore[misc]
            for name, total in totals.items()
        }
        self._rated = (now_ns, totals)


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
