"""Progress and measurements of a running pipeline, its handle and result, and requests to it from other processes.

A measurement is a name, labels that say of what, and a value. Workers report them (``runtime.worker.metrics``), the
driver adds them up (``runtime.driver.progress``). A counter is a total since the generation began; a gauge is how it
was when the report was made.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from enum import Enum
from typing import NamedTuple, Protocol, Self, TypeAlias

from headgate.dataclass import dataclass
from headgate.model.ids import CheckpointId, Generation, NodeName

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of name and value, by name."""

BAD_RECORDS = "bad_records"
BUSY = "busy"
"""Share of the time since the report before in which the worker did not sleep, 0 to 1."""
BUSY_MS = "busy_ms"
"""Time that the worker's thread spent in the operator itself."""
BYTES_IN = "bytes_in"
BYTES_OUT = "bytes_out"
CLOCK_S = "clock_s"
"""The worker's own monotonic clock, so that two reports give rates."""
EDGE = "edge"
"""Label: the edge between two chains that was measured, its index in ``Plan.edges``."""
FILL = "fill"
"""Of an edge: the share of the credit that waits at the receiver, of the fullest channel, 0 to 1."""
HELD_BACK_MS = "held_back_ms"
"""Backpressure: time in which the operator had input, and those downstream had no room for its output."""
IDLE_MS = "idle_ms"
"""The rest of the time: it waited for records, or for its turn in the thread of its worker."""
LATE_RECORDS = "late"
"""Records that came after their window had closed; counted by the operators that drop them."""
LATENESS_MS = tuple(step * 10**zeros for zeros in range(13) for step in (1, 2, 5))
"""Bounds, in milliseconds, of the buckets in which operators count how late records were."""
_LATE_WITHIN = "late_within_ms:"


def late_within(bound_ms: int) -> str:
    """Return the name of the counter of late records that were at most ``bound_ms`` late, one of ``LATENESS_MS``."""
    return f"{_LATE_WITHIN}{bound_ms}"


NODE = "node"
"""Label: the operator that was measured."""
QUEUED_BATCHES = "queued_batches"
QUEUED_BYTES = "queued_bytes"
RECORDS = "records"
"""Of an edge: what its sender has sent."""
RECORDS_IN = "records_in"
RECORDS_OUT = "records_out"
WATERMARK_MS = "watermark_ms"

OF_EVERY_NODE = frozenset(
    {
        BAD_RECORDS,
        BUSY_MS,
        HELD_BACK_MS,
        IDLE_MS,
        QUEUED_BATCHES,
        QUEUED_BYTES,
        RECORDS_IN,
        RECORDS_OUT,
        WATERMARK_MS,
    }
)
"""What the runtime measures of each operator; all else with the label ``NODE`` the operator counts itself."""


class Sample(NamedTuple):
    """One measurement."""

    name: str
    labels: Labels
    value: int | float

    def label(self, name: str) -> str | None:
        """Return the value of label ``name``, or None."""
        for label, value in self.labels:  # there are a few
            if label == name:
                return value
        return None


class Samples:
    """The measurements of one report, found by name and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._values = {(sample.name, sample.labels): sample for sample in samples}

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._values.values())

    def updated(self, samples: Iterable[Sample]) -> Samples:
        """Return these with newer ``samples`` in the place of former ones."""
        found = Samples(samples)
        found._values = {**self._values, **found._values}
        return found

    def value(self, name: str, **labels: str) -> int | float | None:
        """Return what was measured of ``labels``, or None."""
        found = self._values.get((name, tuple(sorted(labels.items()))))
        return None if found is None else found.value

    def of(self, label: str, value: str) -> dict[str, int | float]:
        """Return everything that was measured of ``label`` = ``value``, by name."""
        return {sample.name: sample.value for sample in self if (label, value) in sample.labels}


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """Request for a checkpoint, or for a savepoint at ``savepoint``. ``ends``, ``drains``: and for the end.

    ``cancels``: only the end. ``run``: the nonce of the run that the request is for; "": of any.
    """

    savepoint: str = ""
    ends: bool = False
    drains: bool = False
    cancels: bool = False
    run: str = field(default="", repr=False, compare=False)

    def is_for(self, run: str) -> bool:
        """Whether ``run`` is asked. Who cancels always says whom: that may cost all checkpoints."""
        return self.run == run or not (self.run or self.cancels)


NO_GENERATION = Generation(0)
"""Before the first generation."""


class _Path(Protocol):
    """What ``pathlib.Path`` is."""

    def __fspath__(self) -> str:
        """Return it as text."""
        ...


Location: TypeAlias = str | _Path
"""A path, or a URL."""


class PipelineState(Enum):
    """The phases of a pipeline's run."""

    STARTING = "starting"
    """Waiting for its workers to register and restore."""
    RUNNING = "running"
    FAILED = "failed"
    """It ended with a failure that the restart strategy does not start again after."""
    RESTARTING = "restarting"
    """A generation failed; waiting for the delay of the restart strategy, or for new workers."""
    DRAINING = "draining"
    """Sources were asked to end; what is in flight is processed."""
    STOPPING = "stopping"
    """Was asked to stop, or all input has ended; waiting for the last checkpoint."""
    FINISHED = "finished"
    """Nothing runs any more, and nothing failed."""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self in (PipelineState.FINISHED, PipelineState.FAILED)


@dataclass(frozen=True, slots=True)
class SubtaskProgress:
    """One operator in one subtask, as its worker measured it.

    Attributes:
        records_in, records_out, bad_records, counters: since the first generation of this process. What is read again
            after a restart counts again: it is work that was done.
        busy_ms, held_back_ms, idle_ms: the same, of time; ``NodeProgress`` says what they mean.
        busy, held_back: shares of the time between its last two reports.
        queued_batches, queued_bytes: what waits on the subtask's inputs; of the operator that reads them.
        watermark_ms: milliseconds since 1970, or None before the first.
    """

    subtask: int
    records_in: int = 0
    records_out: int = 0
    bad_records: int = 0
    busy_ms: int = 0
    held_back_ms: int = 0
    idle_ms: int = 0
    busy: float = 0.0
    held_back: float = 0.0
    queued_batches: int = 0
    queued_bytes: int = 0
    watermark_ms: int | None = None
    counters: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late the late records of an operator were, rounded up to the next 1, 2 or 5 times a power of ten.

    With an ``out_of_orderness`` that is longer by so much, the record would have been in time.
    """

    p50_ms: int
    p99_ms: int
    max_ms: int

    @staticmethod
    def of(counters: Mapping[str, int]) -> Lateness | None:
        """Return it from the counters of an operator; None without late records."""
        if not any(name.startswith(_LATE_WITHIN) for name in counters):
            return None
        found = [(bound, counters.get(late_within(bound), 0)) for bound in LATENESS_MS]
        total = sum(count for _, count in found)
        if total == 0:
            return None
        reached = [(bound, sum(count for _, count in found[: place + 1])) for place, (bound, _) in enumerate(found)]
        p50, p99, most = (next(bound for bound, seen in reached if seen >= share * total) for share in (0.5, 0.99, 1))
        return Lateness(p50, p99, most)


def without_lateness(counters: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the counters of an operator as users see them, sorted by name, without those that ``Lateness`` has."""
    return tuple(sorted((name, count) for name, count in counters.items() if not name.startswith(_LATE_WITHIN)))


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """One operator over all its subtasks.

    Attributes:
        records_in, records_out, bad_records, late_records, counters: since the pipeline began, in all its runs, as its
            state has it: what a restart takes back is taken back here, too, and is counted when it comes again (OM1).
            A pipeline that continues from a checkpoint of a release that did not count begins at zero.
        records_in_per_second, records_out_per_second: lately.
        busy: the share of the time, 0 to 1, that its busiest subtask spent in the operator's own code, without that of
        the operators after it. held_back: the share in which that subtask had something to do, and those after it had
        no room (backpressure). idle: the rest: it waited for records, or for its turn in the one thread of its worker.
        busy_ms, held_back_ms, idle_ms: sums over all subtasks, since the first generation of this process.
        queued_batches, queued_bytes: what waits on the inputs of its subtasks. watermark_ms: the lowest of its
        subtasks, milliseconds since 1970, or None before the first. lag_ms: the date minus the watermark; None without
        a watermark, and when all input has ended. state_rows, state_bytes: of its state in the last completed
        checkpoint; rows of RocksDB are not counted there. counters: the operator's own, by name (for example
        ``late``). lateness: of its late records; None without any.
        subtasks: each of them. runs_with: expressions that follow each other run as one pass, and the last
        of them has the time of all: its
            name. None: the operator is not part of such a pass.
    """

    node: NodeName
    records_in: int = 0
    records_out: int = 0
    records_in_per_second: float = 0.0
    records_out_per_second: float = 0.0
    counters: tuple[tuple[str, int], ...] = ()
    bad_records: int = 0
    late_records: int = 0
    busy: float = 0.0
    held_back: float = 0.0
    idle: float = 0.0
    busy_ms: int = 0
    held_back_ms: int = 0
    idle_ms: int = 0
    queued_batches: int = 0
    queued_bytes: int = 0
    watermark_ms: int | None = None
    lag_ms: int | None = None
    state_rows: int = 0
    state_bytes: int = 0
    subtasks: tuple[SubtaskProgress, ...] = ()
    runs_with: NodeName | None = None
    lateness: Lateness | None = None

    def numbers(self) -> dict[str, int | float]:
        """Return every number by its name, the operator's own counters, too; nothing of what is None or not known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        unknown = () if self.runs_with is None else ("busy", "idle", "busy_ms", "idle_ms")
        return {**{name: n for name, n in numbers.items() if name not in unknown}, **dict(self.counters)}


@dataclass(frozen=True, slots=True)
class EdgeProgress:
    """What flows between two chains of operators, over all subtasks, now.

    Attributes:
        edge: its index among the edges of the plan.
        source, target: the operator that sends, and the first one of the chain that receives.
        records_per_second: that were sent lately.
        busy: the share of the time, 0 to 1, that its busiest receiver worked on what came over this edge, with all
            operators of its chain.
        held_back: the share in which the sender that waited longest had something to do, and this edge was one of those
            without room.
        queued_batches, queued_bytes: what waits at the receivers.
        fill: how full its fullest channel is, 0 to 1. Feedback is never full.
    """

    edge: int
    source: NodeName
    target: NodeName
    records_per_second: float = 0.0
    busy: float = 0.0
    held_back: float = 0.0
    queued_batches: int = 0
    queued_bytes: int = 0
    fill: float = 0.0


SPLITS_SHOWN_MAX = 20
"""Splits of one source that are shown one by one: those that lag most. A source may have thousands."""


@dataclass(frozen=True, slots=True)
class SplitProgress:
    """One split of a source, in the current generation.

    Attributes:
        split: its name, such as ``orders/3`` for a partition of Kafka.
        subtask: which subtask reads it.
        position: where reading continues, in the unit of its source; None: the source does not say.
        end: where the split ended when it was last read; None: not known.
        lag: what lies between them; None: the end is not known.
        records: records that were read of it, bad ones included.
        records_per_second: lately; 0 in the first report of a split.
        watermark_ms: its own watermark, milliseconds since 1970; None before its first record, and if the source's
            chain takes no event times.
        is_idle: it does not hold event time back, because it has not delivered anything for the idle timeout.
        is_waiting: it is not read now, because it is ahead of other splits in event time.
        undecided: what follows ``end`` and cannot be read until an open transaction ends.
    """

    split: str
    subtask: int = 0
    position: int | None = None
    end: int | None = None
    lag: int | None = None
    records: int = 0
    records_per_second: float = 0.0
    watermark_ms: int | None = None
    is_idle: bool = False
    is_waiting: bool = False
    undecided: int = 0


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far one source has read its splits, over all its subtasks. Splits that have ended are not counted.

    Attributes:
        source: the operator.
        unit: what positions and lags count: ``records`` or ``bytes``.
        splits: the number of its splits. idle_splits: how many of them are idle. waiting_splits: how many wait for
            slower ones.
        lag: the sum over the splits with a known end; None: no end is known.
        unknown_lags: how many splits are not in that sum.
        most_lagging: the splits that lag most, at most ``SPLITS_SHOWN_MAX``; those with unknown lags come last.
        undecided: the sum over the splits; it is not part of the lag.
    """

    source: NodeName
    unit: str = "records"
    splits: int = 0
    idle_splits: int = 0
    lag: int | None = None
    unknown_lags: int = 0
    most_lagging: tuple[SplitProgress, ...] = ()
    waiting_splits: int = 0
    undecided: int = 0

    @staticmethod
    def of(source: NodeName, unit: str, splits: Sequence[SplitProgress]) -> SourceProgress:
        """Return the progress of a source with these splits."""
        lags = [one.lag for one in splits if one.lag is not None]
        return SourceProgress(
            source,
            unit,
            len(splits),
            sum(one.is_idle for one in splits),
            sum(lags) if lags else None,
            len(splits) - len(lags),
            most_lagging(splits),
            sum(one.is_waiting for one in splits),
            sum(one.undecided for one in splits),
        )


def most_lagging(splits: Iterable[SplitProgress]) -> tuple[SplitProgress, ...]:
    """Return those that lag most; of equal ones those with most that is undecided, then the lowest watermarks."""
    return tuple(heapq.nsmallest(SPLITS_SHOWN_MAX, splits, key=_by_lag))


def _by_lag(split: SplitProgress) -> tuple[int, int, int | float, str]:
    lag = -1 if split.lag is None else split.lag
    return -lag, -split.undecided, math.inf if split.watermark_ms is None else split.watermark_ms, split.split


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """One loop over all its head subtasks, in the current generation.

    Attributes:
        queued_batches, queued_bytes: feedback that waits to go round again, in memory and on disk.
        queued_bytes_max: the most that ever waited; ``spilled_bytes`` is what waits on disk now.
        log_bytes: feedback kept for checkpoints under way.
        held_channels: feedback channels that wait for a barrier (L6).
        came_back: records that came back.
        throttled_ms: time in which regular input waited for the loop to drain.
        trip_ms: the slowest head's time from the last barrier to its last sentinel: one trip under load.
        round_: the round under way once all input has ended, or -1.
    """

    loop: NodeName
    queued_batches: int = 0
    queued_bytes: int = 0
    queued_bytes_max: int = 0
    spilled_bytes: int = 0
    log_bytes: int = 0
    held_channels: int = 0
    came_back: int = 0
    throttled_ms: int = 0
    trip_ms: int = 0
    round_: int = -1


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """A completed checkpoint. ``trigger_wall_ms`` is milliseconds since 1970."""

    checkpoint: CheckpointId
    duration_ms: int
    size_bytes: int
    trigger_wall_ms: int = 0
    generation: Generation = NO_GENERATION
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class SubtaskAlignment:
    """How long one checkpoint held up one subtask, in microseconds by its own clock.

    Attributes:
        subtask: as text (``window[1]``).
        aligned_us: from its first barrier to its snapshot; a subtask with one input has nothing to wait for.
        frozen_us: how long it took to freeze its state, so that the rest could be written beside the records.
    """

    subtask: str
    aligned_us: int
    frozen_us: int


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A worker that is registered now.

    Attributes:
        worker: its number; it runs the subtask of this number of every operator.
        host, pid: where its process is.
        busy: share of the time in which it was not idle, 0 to 1, lately.
    """

    worker: int
    host: str
    pid: int
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint under way. ``missing`` are the subtasks that have not acknowledged, as text (``window[1]``)."""

    checkpoint: CheckpointId
    age_ms: int
    missing: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of a pipeline's life, taken about once a second.

    Attributes:
        restarts: how often the pipeline was started again after a failure: by this process, and by a supervisor that
            started this process again.
        failures: the number of failures, whether or not the pipeline was started again; counted as ``restarts``.
        watermark_ms: the lowest watermark of all subtasks in milliseconds since 1970, or None before the first one.
        busy: the share of the time, 0 to 1, in which the busiest worker was not idle.
        late_records: records that came when their window had fired, and were dropped or sent to an output for them;
            counted as in ``NodeProgress``.
        bad_records: records that were diverted; counted as in ``NodeProgress``.
        lost_outputs: pieces of output that a target denied and without which the pipeline continued, in all its runs.
        workers: the registered workers, by number.
        edges: what flows between chains of operators, in the order of the plan.
        sources: how far each source has read its splits, in the order of the plan.
        drift_ms: how far a split may be ahead of the slowest one in event time, by ``max_drift``; None: no subtask
            is held back by it.
    """

    state: PipelineState
    generation: Generation = NO_GENERATION
    restarts: int = 0
    nodes: tuple[NodeProgress, ...] = ()
    watermark_ms: int | None = None
    last_checkpoint: CheckpointProgress | None = None
    pending_checkpoint: PendingCheckpoint | None = None
    busy: float = 0.0
    late_records: int = 0
    bad_records: int = 0
    uptime_ms: int = 0
    loops: tuple[LoopProgress, ...] = ()
    lost_outputs: int = 0
    failures: int = 0
    workers: tuple[WorkerProgress, ...] = ()
    edges: tuple[EdgeProgress, ...] = ()
    sources: tuple[SourceProgress, ...] = ()
    drift_ms: int | None = None


class LateRecords(str):
    """Warning that says which operator had late records, where they are, how late they were, and what to set."""

    def __new__(cls, node: NodeProgress, text: str) -> Self:
        """``text``: the sentence about ``node``."""
        note = super().__new__(cls, text)
        note.node, note.late_records, note.lateness = node.node, node.late_records, node.lateness
        return note

    node: NodeName
    late_records: int
    lateness: Lateness | None


class LogPlace(str):
    """Note that says where the workers' logs are: text for people, and the directory for a program that shows them."""

    def __new__(cls, directory: str) -> Self:
        """``directory``: of one pipeline, on the machines of its workers."""
        note = super().__new__(cls, f"the workers' logs are in {directory}")
        note.directory = directory
        return note

    directory: str


class Continuation(str):
    """Note that says what a generation continues from: text for people, and the same as values for a program."""

    def __new__(cls, generation: Generation, checkpoint: CheckpointId, before: int, now: int) -> Self:
        """``before``, ``now``: the parallelism that the checkpoint was taken at, and that of this generation."""
        moved = "" if before == now else f", which parallelism {before} wrote, at parallelism {now}"
        note = super().__new__(cls, f"generation {generation} continues from checkpoint {checkpoint}{moved}")
        note.generation, note.checkpoint, note.parallelism = generation, checkpoint, before
        return note

    generation: Generation
    checkpoint: CheckpointId
    parallelism: int
    """That the checkpoint was taken at."""


class Observer(Protocol):
    """Watches one pipeline. Called from the session's threads, one call at a time; must return quickly."""

    def on_progress(self, progress: Progress) -> None:
        """A fresh snapshot, about once a second and at every change of state."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """A generation failed for ``reason``; the next one is started after ``delay_ms``."""

    def on_note(self, text: str) -> None:
        """One sentence that the user should read (``Continuation``, damaged checkpoint skipped, …)."""

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """A checkpoint was completed."""


class SilentObserver:
    """An observer that ignores everything."""

    def on_progress(self, progress: Progress) -> None:
        """Ignore it."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """Ignore it."""

    def on_note(self, text: str) -> None:
        """Ignore it."""

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """Ignore it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:  # OM1
    """How a run ended without failing.

    Attributes:
        is_finished: whether all input has ended and everything is committed. False if the run was stopped before.
        records_in: records that sources delivered since the pipeline began, in all its runs, each counted once.
        records_out: records that reached sinks, counted in the same way.
        last_checkpoint: the newest completed checkpoint, or None.
        restarts: how often this run was restarted after a failure, by its process or by its supervisor.
        late_records: records that were late, dropped or sent to an output for them; counted as ``records_in``.
        is_drained: whether the sources were asked to end. A drained run is finished, too.
        savepoint: the outcome of the savepoint with which the run was to end; None if none was requested.
        has_removed_checkpoints: whether the run was cancelled with ``Checkpointing(retain_on_cancel=False)`` and
            removed its checkpoints. The pipeline then does not continue.
        is_removal_in_doubt: whether the run was to remove its checkpoints, but it is unknown whether it did. The next
            start either continues or begins again from nothing.
        is_cancelled: whether the run was cancelled. If its checkpoints stay, the next run processes
            again what came after ``last_checkpoint``.
        had_finished: whether the pipeline had finished before this run, which processed nothing. The records are those
            of the former runs.
    """

    is_finished: bool
    records_in: int = 0
    records_out: int = 0
    last_checkpoint: CheckpointId | None = None
    restarts: int = 0
    duration_ms: int = 0
    is_drained: bool = False
    savepoint: CheckpointOutcome | None = None
    has_removed_checkpoints: bool = False
    is_removal_in_doubt: bool = False
    is_cancelled: bool = False
    had_finished: bool = False
    late_records: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """The outcome of a requested checkpoint.

    Attributes:
        checkpoint: the completed checkpoint, which began after the request; None if there is none.
        reason: why there is none, as a clause.
        savepoint: the place of the requested savepoint.
        is_refused: whether the request was refused, so that nothing was begun.
    """

    checkpoint: CheckpointId | None
    reason: str = ""
    savepoint: str | None = None
    is_refused: bool = False


class PipelineHandle(Protocol):
    """A started pipeline: shows its progress, and stops it or takes checkpoints on request."""

    @property
    def progress(self) -> Progress:
        """The latest snapshot."""

    def wait(self, timeout_s: float | None = None) -> RunResult | None:
        """Wait until the pipeline has ended. Return None if ``timeout_s`` passes first.

        Raises:
            PipelineFailed: the restart strategy gave up.
            FencedError: another driver of the same pipeline took over.
        """

    def stop(
        self, timeout_s: float | None = None, *, drain: bool = False, savepoint: Location | None = None
    ) -> RunResult | None:
        """Take a last checkpoint, then stop. A later run of the same pipeline continues from it.

        Args:
            timeout_s: how long to wait for the end of the run. None: without limit.
            drain: end the sources as if their input had ended: everything in flight is processed, windows fire, and the
                last checkpoint is final. A drained pipeline has finished and does not continue.
            savepoint: a directory or URL at which to write a savepoint of the last checkpoint.
                ``RunResult.savepoint`` has the outcome.

        Raises:
            UsageError: the savepoint cannot be written there. The pipeline continues.
        """

    def take_checkpoint(self, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Take a checkpoint now, without waiting for the interval or the pause, and wait for its outcome.

        Returns:
            The outcome, or None if ``timeout_s`` passes first. The checkpoint may then still complete.
        """

    def take_savepoint(self, path: Location, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Write a savepoint at ``path``, an empty directory or a URL, and wait for its outcome.

        The savepoint holds the state of a checkpoint that is taken now. Headgate never removes it.

        Returns:
            The outcome; its ``savepoint`` is set if the savepoint was written. None if ``timeout_s`` passes first.

        Raises:
            UsageError: the savepoint cannot be written there.
        """

    def answer_requests(self) -> None:
        """Take a checkpoint for requests from other processes, and answer them."""

    def cancel(self, *, retain: bool = False) -> None:
        """Stop at once, without a last checkpoint; a later run continues from the latest completed one.

        With ``Checkpointing(retain_on_cancel=False)`` the checkpoints are removed, unless ``retain`` is given.
        """

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, as soon as the run has ended for any reason, and before ``wait`` returns."""

    def checkpoints(self) -> tuple[CheckpointProgress, ...]:
        """Return the completed checkpoints of this run, oldest first. Only the latest ones are kept."""

    def alignments(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        """Return, by checkpoint, how long the latest checkpoints delayed each subtask. Only the latest ones are kept.

        Workers report twice a second, so the newest checkpoint may be missing or incomplete.
        """

    def metrics(self) -> dict[str, dict[str, int | float]]:
        """Return ``node → metric → number`` of the latest snapshot: all numbers of ``NodeProgress`` but None."""
