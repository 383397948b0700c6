"""Progress of one run: the reports of all workers, added up by operator, edge and checkpoint.

Two kinds of totals: what the pipeline's state has counted, from its beginning, which a restart takes back to the
checkpoint (OM1), and the work that this process has seen, which never decreases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from headgate.codec import messages
from headgate.codec.messages import AlignmentMetrics
from headgate.codec.snapshot import BROADCAST_PREFIX, FILES_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX
from headgate.environment import SYSTEM_CLOCK
from headgate.model.ids import CheckpointId, Generation, NodeName
from headgate.model.manifest import Manifest, Totals
from headgate.model.plan import Plan, PlanEdge
from headgate.model.progress import (
    BAD_RECORDS,
    BUSY,
    BUSY_MS,
    CLOCK_S,
    EDGE,
    FILL,
    HELD_BACK_MS,
    IDLE_MS,
    LATE_RECORDS,
    NODE,
    OF_EVERY_NODE,
    QUEUED_BATCHES,
    QUEUED_BYTES,
    RECORDS,
    RECORDS_IN,
    RECORDS_OUT,
    WATERMARK_MS,
    CheckpointProgress,
    EdgeProgress,
    Lateness,
    LoopProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
    Sample,
    Samples,
    SourceProgress,
    SplitProgress,
    SubtaskAlignment,
    SubtaskProgress,
    most_lagging,
    without_lateness,
)
from headgate.operators.expressions import runs_with

ALIGNED_CHECKPOINTS_MAX = 100
"""As many as the web page shows."""


Measured = dict[str, int | float]
"""What was measured of one operator or edge in one worker, by name."""


def _by_label(samples: Iterable[Sample], label: str) -> dict[str, Measured]:
    """Return what was measured by the value of ``label``, of all samples that have it."""
    found: dict[str, Measured] = {}
    for sample in samples:
        value = sample.label(label)
        if value is not None:
            found.setdefault(value, {})[sample.name] = sample.value
    return found


class AlignmentHistory:
    """The alignments of the checkpoints with the highest numbers."""

    def __init__(self) -> None:
        self._by_checkpoint: dict[CheckpointId, dict[tuple[str, int], SubtaskAlignment]] = {}

    def add(self, worker: int, reported: Iterable[AlignmentMetrics]) -> None:
        """A worker reported; it runs the subtask of its own number of every vertex."""
        for one in reported:
            subtasks = self._by_checkpoint.setdefault(CheckpointId(one.checkpoint), {})
            subtasks[one.vertex, worker] = SubtaskAlignment(f"{one.vertex}[{worker}]", one.align_us, one.freeze_us)
            if len(self._by_checkpoint) > ALIGNED_CHECKPOINTS_MAX:
                del self._by_checkpoint[min(self._by_checkpoint)]

    def latest(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        """Return them by checkpoint, in order of subtasks. From any thread."""
        # copied: the event thread goes on adding
        found = {number: subtasks.copy() for number, subtasks in self._by_checkpoint.copy().items()}
        return {number: tuple(found[number][key] for key in sorted(found[number])) for number in sorted(found)}


class EdgeTotals:
    """The edges of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._targets = {edge.index: plan.vertex(edge.target).head.name for edge in plan.edges}
        self._edges = plan.edges
        self._now: dict[int, dict[str, Measured]] = {}
        self._lately: dict[int, dict[str, Measured]] = {}
        self._clocks_s: dict[int, float] = {}

    def begin(self) -> None:
        """A generation starts."""
        self._now, self._lately, self._clocks_s = {}, {}, {}

    def add_part(self, worker: int, samples: Iterable[Sample]) -> None:
        """A subtask of a worker of the running generation reported: of an edge, the end that it has."""
        edges = self._now.get(worker, {})
        found = _by_label(samples, EDGE).items()
        self._now[worker] = {**edges, **{edge: {**edges.get(edge, {}), **measured} for edge, measured in found}}

    def add(self, worker: int, samples: Samples) -> None:
        """A worker of the running generation reported."""
        edges = _by_label(samples, EDGE)
        clock_s = float(samples.value(CLOCK_S) or 0.0)
        passed_s = clock_s - self._clocks_s.get(worker, clock_s)
        if passed_s > 0:
            former = self._now.get(worker, {})
            self._lately[worker] = {
                edge: _per_second(former.get(edge, {}), measured, passed_s) for edge, measured in edges.items()
            }
        self._now[worker], self._clocks_s[worker] = edges, clock_s

    def edges(self) -> tuple[EdgeProgress, ...]:
        """Return all edges, in the order of the plan; none before the first report."""
        return tuple(map(self._edge, self._edges)) if self._now else ()

    def _edge(self, edge: PlanEdge) -> EdgeProgress:
        key = str(edge.index)
        now = [nodes.get(key, {}) for nodes in self._now.values()]
        lately = [nodes.get(key, {}) for nodes in self._lately.values()]
        return EdgeProgress(
            edge.index,
            NodeName(edge.from_node),
            self._targets[edge.index],
            sum(_each(lately, RECORDS)),
            busy=_share(lately, BUSY_MS),
            held_back=_share(lately, HELD_BACK_MS),
            queued_batches=int(sum(_each(now, QUEUED_BATCHES))),
            queued_bytes=int(sum(_each(now, QUEUED_BYTES))),
            fill=max(_each(now, FILL), default=0.0),
        )


def _each(found: Iterable[Mapping[str, int | float]], name: str) -> list[float]:
    return [float(measured.get(name, 0)) for measured in found]


def _share(lately: Iterable[Mapping[str, int | float]], name: str) -> float:
    """Return the share of the subtask that spent most of a second so."""
    return min(max(_each(lately, name), default=0.0) / 1_000, 1.0)


def _per_second(former: Measured, now: Measured, passed_s: float) -> Measured:
    return {name: max(value - former.get(name, 0), 0) / passed_s for name, value in now.items()}


OF_STATE = (STATE_PREFIX, LISTS_PREFIX, UNION_PREFIX, BROADCAST_PREFIX, FILES_PREFIX)
GAUGES = frozenset({QUEUED_BATCHES, QUEUED_BYTES, WATERMARK_MS})
END_MS = 1 << 62
"""No event has such a time: a watermark beyond it is that of the end of all input."""

RATE_WINDOW_S = 2.0
"""Rates are those between reports of one worker, by its own clock, over about this time: a worker reports when it can,
so a time of the driver's would have one report more or fewer in it."""


class OperatorTotals:
    """The operators of one run."""

    def __init__(self, wall_ms: Callable[[], int], runs_with: Mapping[NodeName, NodeName] | None = None) -> None:
        """``runs_with``: as ``NodeProgress`` tells it, by operator."""
        self._wall_ms = wall_ms
        self._runs_with = runs_with or {}
        self._before: Totals = {}
        self._worked: dict[int, dict[str, Measured]] = {}
        self._now: dict[int, dict[str, Measured]] = {}
        self._clocks_s: dict[int, float] = {}
        self._shares: dict[int, dict[str, tuple[float, float]]] = {}
        self._lately: dict[int, deque[tuple[float, dict[str, Measured]]]] = {}
        self._completed: Totals = {}
        self._state: dict[str, tuple[int, int]] = {}

    def begin(self, before: Totals) -> None:
        """A generation starts, from a checkpoint that had counted ``before``: its workers count from zero."""
        for worker, nodes in self._now.items():
            # the work of the generation that ended stays; its counts of records go back to the checkpoint
            worked = self._worked.setdefault(worker, {})
            for node, measured in nodes.items():
                worked[node] = _sum(worked.get(node, {}), measured)
        self._before, self._completed = before, before
        self._now, self._clocks_s, self._shares, self._lately = {}, {}, {}, {}

    def add_part(self, worker: int, samples: Iterable[Sample]) -> None:
        """A subtask of a worker of the running generation reported."""
        self._now[worker] = self._now.get(worker, {}) | _by_label(samples, NODE)

    def add(self, worker: int, samples: Samples) -> None:
        """A worker of the running generation reported."""
        nodes = _by_label(samples, NODE)
        clock_s = float(samples.value(CLOCK_S) or 0.0)
        passed_ms = 1_000 * (clock_s - self._clocks_s.get(worker, clock_s))
        # no share from a worker's first report, nor from two at one tick of its clock
        if passed_ms > 0:
            former = self._now.get(worker, {})
            self._shares[worker] = {
                node: _shares(former.get(node, {}), measured, passed_ms) for node, measured in nodes.items()
            }
        self._now[worker], self._clocks_s[worker] = nodes, clock_s
        lately = self._lately.setdefault(worker, deque())
        lately.append((clock_s, nodes))
        # one report from before the window stays, so that the rate is over all of it
        while len(lately) > 2 and lately[1][0] <= clock_s - RATE_WINDOW_S:
            lately.popleft()

    def completed(self, manifest: Manifest) -> None:
        """A checkpoint of the running generation is complete."""
        self._completed = manifest.totals
        sizes: dict[str, tuple[int, int]] = {}
        for part in (part for entry in manifest.entries for part in entry.parts):
            prefix = next((prefix for prefix in OF_STATE if part.section.startswith(prefix)), None)
            if prefix is not None:
                rows, size_bytes = sizes.get(node := part.section.removeprefix(prefix), (0, 0))
                counted = sum((part.rows or {}).get(node, {}).values())
                sizes[node] = rows + counted, size_bytes + part.size_bytes
        self._state = sizes

    def totals(self) -> Totals:
        """Return what the state has counted until now; no less than what the newest checkpoint has."""
        totals = {node: dict(counts) for node, counts in self._before.items()}
        for nodes in self._now.values():
            for node, measured in nodes.items():
                of_node = totals.setdefault(node, {})
                for name in (RECORDS_IN, RECORDS_OUT, BAD_RECORDS, *_own(measured)):
                    of_node[name] = of_node.get(name, 0) + int(measured.get(name, 0))
        for node, counts in self._completed.items():  # its workers may have gone without a last report
            of_node = totals.setdefault(node, {})
            of_node.update({name: max(count, of_node.get(name, 0)) for name, count in counts.items()})
        return totals

    def nodes(self) -> tuple[NodeProgress, ...]:
        """Return all operators, in the order in which workers name them."""
        return tuple(self._node(node, counts) for node, counts in self.totals().items())

    def _rate(self, node: str, name: str) -> float:
        """Return how many a second it was lately, in all workers together."""
        rate = 0.0
        for reports in self._lately.values():
            (begun_s, before), (now_s, now) = reports[0], reports[-1]
            if now_s > begun_s:
                counted = now.get(node, {}).get(name, 0) - before.get(node, {}).get(name, 0)
                rate += max(counted, 0) / (now_s - begun_s)
        return rate

    def _node(self, node: str, counts: Mapping[str, int]) -> NodeProgress:
        subtasks = tuple(self._subtask(worker, node) for worker in sorted({*self._now, *self._worked}))
        busiest = max(subtasks, key=lambda s: (s.busy, s.held_back), default=SubtaskProgress(0))
        runs_with = self._runs_with.get(NodeName(node))
        is_measured = runs_with is None and busiest.busy_ms + busiest.held_back_ms + busiest.idle_ms > 0
        watermark_ms = lowest_watermark(nodes.get(node, {}).get(WATERMARK_MS) for nodes in self._now.values())
        rows, size_bytes = self._state.get(node, (0, 0))
        return NodeProgress(
            NodeName(node),
            counts.get(RECORDS_IN, 0),
            counts.get(RECORDS_OUT, 0),
            self._rate(node, RECORDS_IN),
            self._rate(node, RECORDS_OUT),
            without_lateness(_own(counts)),
            bad_records=counts.get(BAD_RECORDS, 0),
            late_records=counts.get(LATE_RECORDS, 0),
            busy=busiest.busy,
            held_back=busiest.held_back,
            idle=max(1.0 - busiest.busy - busiest.held_back, 0.0) if is_measured else 0.0,
            busy_ms=sum(s.busy_ms for s in subtasks),
            held_back_ms=sum(s.held_back_ms for s in subtasks),
            idle_ms=sum(s.idle_ms for s in subtasks),
            queued_batches=sum(s.queued_batches for s in subtasks),
            queued_bytes=sum(s.queued_bytes for s in subtasks),
            watermark_ms=watermark_ms,
            lag_ms=None if watermark_ms is None else max(self._wall_ms() - watermark_ms, 0),
            state_rows=rows,
            state_bytes=size_bytes,
            subtasks=subtasks,
            runs_with=runs_with,
            lateness=Lateness.of(counts),
        )

    def _subtask(self, worker: int, node: str) -> SubtaskProgress:
        now = self._now.get(worker, {}).get(node, {})
        before = self._worked.get(worker, {}).get(node)
        worked = now if before is None else _sum(before, now)
        busy, held_back = self._shares.get(worker, {}).get(node, (0.0, 0.0))
        return SubtaskProgress(
            worker,
            records_in=int(worked.get(RECORDS_IN, 0)),
            records_out=int(worked.get(RECORDS_OUT, 0)),
            bad_records=int(worked.get(BAD_RECORDS, 0)),
            busy_ms=int(worked.get(BUSY_MS, 0)),
            held_back_ms=int(worked.get(HELD_BACK_MS, 0)),
            idle_ms=int(worked.get(IDLE_MS, 0)),
            busy=busy,
            held_back=held_back,
            queued_batches=int(now.get(QUEUED_BATCHES, 0)),
            queued_bytes=int(now.get(QUEUED_BYTES, 0)),
            watermark_ms=lowest_watermark([now.get(WATERMARK_MS)]),
            counters=without_lateness(_own(worked)),
        )


def lowest_watermark(found: Iterable[int | float | None]) -> int | None:
    """Return the lowest watermark; None before the first one and after the end of all input."""
    lowest = min((int(watermark) for watermark in found if watermark is not None), default=None)
    return None if lowest is None or abs(lowest) >= END_MS else lowest


def _own(measured: Mapping[str, int | float]) -> dict[str, int]:
    """Return what an operator counts itself."""
    return {name: int(value) for name, value in measured.items() if name not in OF_EVERY_NODE}


def _sum(one: Mapping[str, int | float], other: Mapping[str, int | float]) -> Measured:
    names: Iterable[str] = dict.fromkeys([*one, *other])
    return {name: one.get(name, 0) + other.get(name, 0) for name in names if name not in GAUGES}


def _shares(former: Measured, now: Measured, passed_ms: float) -> tuple[float, float]:
    """Return which share of ``passed_ms`` an operator was busy, and held back."""
    busy, held_back = (
        min(max((now.get(name, 0) - former.get(name, 0)) / passed_ms, 0.0), 1.0) for name in (BUSY_MS, HELD_BACK_MS)
    )
    return busy, held_back


class SourceTotals:
    """The sources of one generation."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A generation starts."""
        self._now: dict[int, Sequence[SourceProgress]] = {}
        self._lately: dict[int, deque[tuple[float, dict[tuple[NodeName, str], int]]]] = {}

    def add(self, worker: int, clock_s: float, sources: Sequence[SourceProgress]) -> None:
        """A worker of the running generation reported, at ``clock_s`` by its clock."""
        self._now[worker] = sources
        lately = self._lately.setdefault(worker, deque())
        lately.append((clock_s, {(of.source, one.split): one.records for of in sources for one in of.most_lagging}))
        while len(lately) > 2 and lately[1][0] <= clock_s - RATE_WINDOW_S:
            lately.popleft()

    def sources(self) -> tuple[SourceProgress, ...]:
        """Return all sources, in the order in which workers name them."""
        by_source: dict[NodeName, list[SourceProgress]] = {}
        for worker, reported in self._now.items():
            for one in reported:
                splits = tuple(self._with_rate(worker, one.source, split) for split in one.most_lagging)
                by_source.setdefault(one.source, []).append(replace(one, most_lagging=splits))
        return tuple(map(_source_progress, by_source.values()))

    def _with_rate(self, worker: int, source: NodeName, split: SplitProgress) -> SplitProgress:
        """A split that lags less than others is not in every report."""
        key = source, split.split
        reports = [(clock_s, records[key]) for clock_s, records in self._lately[worker] if key in records]
        (begun_s, before), (now_s, now) = reports[0], reports[-1]
        rate = max(now - before, 0) / (now_s - begun_s) if now_s > begun_s else 0.0
        return replace(split, records_per_second=rate)


def _source_progress(found: Sequence[SourceProgress]) -> SourceProgress:
    """Return one source's progress from those of its subtasks."""
    lags = [one.lag for one in found if one.lag is not None]
    return SourceProgress(
        found[0].source,
        next((one.unit for one in found if one.splits), found[0].unit),
        sum(one.splits for one in found),
        sum(one.idle_splits for one in found),
        sum(lags) if lags else None,
        sum(one.unknown_lags for one in found),
        most_lagging(split for one in found for split in one.most_lagging),
        sum(one.waiting_splits for one in found),
        sum(one.undecided for one in found),
    )


CHECKPOINTS_MAX = 1_000
NO_PLAN = Plan((), (), 1, 1)


class RunProgress:
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
        self._nodes = OperatorTotals(wall_ms, runs_with(plan))
        self._edges = EdgeTotals(plan)
        self._sources = SourceTotals()
        self._heads: dict[int, Sequence[LoopProgress]] = {}
        self.checkpoints: deque[CheckpointProgress] = deque(maxlen=CHECKPOINTS_MAX)
        self.alignments = AlignmentHistory()

    def begin(self, generation: Generation, before: Totals | None = None) -> None:
        """A generation starts, from a checkpoint that had counted ``before``."""
        self._generation = generation
        self._nodes.begin(before or {})
        self._edges.begin()
        self._sources.begin()
        self._workers, self._heads = {}, {}

    def add(self, worker: int, metrics: messages.MetricsReport) -> None:
        """A worker reported."""
        # one of an older generation may still have been under way: it counts nowhere
        if metrics.generation == self._generation and metrics.is_part:
            self._workers[worker] = self._workers.get(worker, Samples(())).updated(metrics.samples)
            self._nodes.add_part(worker, metrics.samples)
            self._edges.add_part(worker, metrics.samples)
        elif metrics.generation == self._generation:
            samples = self._workers[worker] = Samples(metrics.samples)
            self._nodes.add(worker, samples)
            self._edges.add(worker, samples)
            self._sources.add(worker, float(samples.value(CLOCK_S) or 0.0), metrics.sources)
            self._heads[worker] = metrics.loops
            self.alignments.add(worker, metrics.alignments)

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
            sources=self._sources.sources(),
        )

    def _loops(self) -> tuple[LoopProgress, ...]:
        heads: dict[NodeName, list[LoopProgress]] = {}
        for found in self._heads.values():
            for head in found:
                heads.setdefault(head.loop, []).append(head)
        return tuple(_loop_progress(one) for one in heads.values())

    def _values(self, name: str) -> Iterator[float]:
        return (sample.value for samples in self._workers.values() for sample in samples if sample.name == name)


def _loop_progress(heads: list[LoopProgress]) -> LoopProgress:
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
