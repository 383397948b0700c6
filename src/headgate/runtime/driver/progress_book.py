"""Adds up what workers report into ``model.progress.Progress``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from headgate.clock import SYSTEM_CLOCK
from headgate.codec import messages
from headgate.model.ids import Generation, NodeName
from headgate.model.manifest import Manifest, Totals
from headgate.model.metrics import BUSY, WATERMARK_MS, Samples
from headgate.model.plan import Plan
from headgate.model.progress import (
    CheckpointProgress,
    LoopProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
)
from headgate.operators.fusing import runs_with
from headgate.runtime.driver.alignment_book import AlignmentBook
from headgate.runtime.driver.edge_book import EdgeBook
from headgate.runtime.driver.node_book import NodeBook, lowest_watermark

CHECKPOINTS_MAX = 1_000
ALIGNMENTS_MAX = 10_000
NO_PLAN = Plan((), (), 1, 1)


class ProgressBook:
    """The latest numbers of one run."""

    def __init__(
        self,
        bad_records_node: str,
        clock_ns: Callable[[], int],
        wall_ms: Callable[[], int] = SYSTEM_CLOCK.wall_ms,
        plan: Plan = NO_PLAN,
    ) -> None:
        self._clock_ns = clock_ns
        self._begun_ns = clock_ns()
        self._bad_records_node = bad_records_node
        self._generation = Generation(0)
        self._workers: dict[int, Samples] = {}
        self._nodes = NodeBook(wall_ms, runs_with(plan))
        self._edges = EdgeBook(plan)
        self._heads: dict[int, Sequence[LoopProgress]] = {}
        self.checkpoints: deque[CheckpointProgress] = deque(maxlen=CHECKPOINTS_MAX)
        self.alignments: deque[messages.AlignmentMetrics] = deque(maxlen=ALIGNMENTS_MAX)
        self.aligned = AlignmentBook()

    def begin(self, generation: Generation, before: Totals | None = None) -> None:
        """A generation starts, from a checkpoint that had counted ``before``."""
        self._generation = generation
        self._nodes.begin(before or {})
        self._edges.begin()
        self._workers, self._heads = {}, {}

    def add(self, worker: int, metrics: messages.MetricsReport) -> None:
        """A worker reported."""
        if metrics.generation == self._generation:
            samples = self._workers[worker] = Samples(metrics.samples)
            self._nodes.add(worker, samples)
            self._edges.add(worker, samples)
            self._heads[worker] = metrics.loops
            self.alignments.extend(metrics.alignments)
            self.aligned.add(worker, metrics.alignments)

    def completed(self, progress: CheckpointProgress, manifest: Manifest) -> None:
        """A checkpoint of the running generation is complete."""
        self.checkpoints.append(progress)
        self._nodes.completed(manifest)

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
        nodes = self._nodes.nodes()
        late = sum(n.late_records for n in nodes)
        bad = sum(n.records_in for n in nodes if n.node == self._bad_records_node)
        return Progress(
            state,
            generation,
            restarts,
            nodes,
            lowest_watermark(self._values(WATERMARK_MS)),
            self.checkpoints[-1] if self.checkpoints else None,
            pending,
            self.busy,
            late,
            bad,
            round((self._clock_ns() - self._begun_ns) / 1_000_000),
            self._loops(),
            edges=self._edges.edges(),
        )

    def _loops(self) -> tuple[LoopProgress, ...]:
        heads: dict[NodeName, list[LoopProgress]] = {}
        for found in self._heads.values():
            for head in found:
                heads.setdefault(head.loop, []).append(head)
        return tuple(_of_all(one) for one in heads.values())

    def _values(self, name: str) -> Iterator[float]:
        return (sample.value for samples in self._workers.values() for sample in samples if sample.name == name)


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
