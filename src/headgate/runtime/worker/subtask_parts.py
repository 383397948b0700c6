"""What a subtask is made of, and what it tells the coordinator.

Counterparts: ``runtime.worker.deployment`` puts it together, ``runtime.worker.subtask_runner`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Protocol

from headgate.connectors.base import AnyReader, SinkWriter
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_CLOCK
from headgate.model.config import Guarantee
from headgate.model.graph import InputName
from headgate.model.ids import ChannelIndex, CheckpointId, SubtaskId
from headgate.model.manifest import Copied, SubtaskEntry
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.subtasks import loops
from headgate.protocol.subtasks.loops import NO_ROUNDS, LoopPlace, RoundProgress
from headgate.protocol.watermarks import SplitAligner
from headgate.runtime.checkpoints.snapshot_writer import SnapshotWriter
from headgate.runtime.wire.channels import ReceivingChannel
from headgate.runtime.worker.chain import Chain, EdgeOutlet
from headgate.runtime.worker.listeners import SubtaskListeners
from headgate.runtime.worker.unaligned import ChannelRecorder, UnalignedOptions

BURST_NS = 100_000_000
"""After a pause, what this time would have allowed is made up for."""


class RateLimit:
    """How many records one subtask may read.

    A batch may be larger than what is allowed: it is read whole, and the next one waits longer.
    """

    def __init__(self, records_per_second: float, subtasks: int, clock_ns: Callable[[], int]) -> None:
        """Make it; until ``divide`` is called, each of ``subtasks`` has an equal part of the rate."""
        self._records_per_second = records_per_second
        self._share = 1 / subtasks
        self._clock_ns = clock_ns
        self._seen_ns = clock_ns()
        self._allowed = 0.0
        """Records that may be read now; below 0: how many were read too early."""

    def divide(self, own_splits: int, all_splits: int) -> None:
        """The source has ``all_splits``, of which this subtask reads ``own_splits``: each gets the same rate.

        A subtask without splits may look for some.
        """
        self._refill()
        # what was allowed until now counts by the share that held then
        self._share = max(own_splits, 1) / max(all_splits, own_splits, 1)

    def take(self, records: int) -> None:
        """So many records were read."""
        self._refill()
        self._allowed -= records

    def wait_ms(self) -> int:
        """Return how long to wait before the next batch; 0: not at all."""
        self._refill()
        if self._allowed >= 0:
            return 0
        # rounded up: waking a moment too early would only mean to wait once more
        return int(-self._allowed / (self._records_per_second * self._share) * 1_000) + 1

    def _refill(self) -> None:
        now_ns = self._clock_ns()
        per_ns = self._records_per_second * self._share / 1e9
        # capped: after an hour without input a source must not flood what is downstream
        self._allowed = min(self._allowed + (now_ns - self._seen_ns) * per_ns, per_ns * BURST_NS)
        self._seen_ns = now_ns


FIRST_CHECKPOINT = CheckpointId(1)
"""Of a pipeline; a later generation begins with a later one."""

READS_ON_MS = 150_000
"""For the timeout that checkpoints have by default."""


class SubtaskReports(Protocol):
    """What a subtask tells the coordinator; interpreted by the worker."""

    def acknowledge(self, checkpoint: CheckpointId, entry: SubtaskEntry, copied: Copied | None = None) -> None:
        """Its part of ``checkpoint`` is durable; ``copied`` of the savepoint that it carries."""

    def decline(self, subtask: SubtaskId, checkpoint: CheckpointId, reason: AbortReason, text: str) -> None:
        """It gives ``checkpoint`` up."""

    def reads_on(self, subtask: SubtaskId, uncut: tuple[CheckpointId, ...]) -> None:
        """It comes forward, and has not met the markers of ``uncut``."""

    def source_position(self, subtask: SubtaskId, lowest_ms: int | None) -> None:
        """Its source has come so far; None: it has nothing to read."""

    def source_share(self, subtask: SubtaskId, splits: int, ended_parts: int) -> None:
        """Its source reads so many splits, and has read so many parts to their end."""

    def finished(self, subtask: SubtaskId) -> None:
        """It has processed all input."""

    def entrance_ended(self, subtask: SubtaskId, effect: loops.ReportEntranceEnded) -> None:
        """Nothing will enter its nest of loops here any more."""

    def probe_returned(self, subtask: SubtaskId, effect: loops.ReportProbe) -> None:
        """A probe has come back, or has ended here."""

    def snapshot_taken(self, subtask: SubtaskId, checkpoint: CheckpointId, align_us: int, freeze_us: int) -> None:
        """Measured: waiting for barriers, and the synchronous part."""


@dataclass(frozen=True, slots=True)
class SubtaskParts:
    """What a subtask is made of.

    Attributes:
        inputs: its channels, feedback channels last.
        input_names: of the operator's input that each channel belongs to; None: all of the main one.
        make_writer: makes what writes its snapshots.
        is_restored_finished: its restored snapshot says that all input had ended.
        is_draining: its source is not read on (E9).
        listeners: what of the user's has to do with checkpoints; None: nothing.
        place, rounds: where it stands in a nest of loops, and how far rounds had come.
        mode: what the pipeline guarantees.
        first_checkpoint: no checkpoint of this generation is below it.
        recorder: what it replays first, and records when a barrier overtakes.
        unaligned: how long it aligns; None: as long as it takes.
        late_inputs: channels with barriers that take credit (UA20).
        reads_on_ms: how often a source that sets its own barrier says that it reads towards a marker.
        aligner: which of its splits wait for others; None: none does.
        rate_limit: of its source; None: it has none.
        clock_ns: measures; of the surroundings.
    """

    subtask: SubtaskId
    chain: Chain
    inputs: Sequence[ReceivingChannel]
    outlets: Sequence[EdgeOutlet]
    sinks: Mapping[str, SinkWriter]
    reader: AnyReader | None
    make_writer: Callable[[], SnapshotWriter]
    reports: SubtaskReports
    is_restored_finished: bool
    is_draining: bool = False
    place: LoopPlace | None = None
    rounds: RoundProgress = NO_ROUNDS
    input_names: Sequence[InputName] | None = None
    mode: Guarantee = Guarantee.EXACTLY_ONCE
    listeners: SubtaskListeners | None = None
    first_checkpoint: CheckpointId = FIRST_CHECKPOINT
    recorder: ChannelRecorder = field(default_factory=ChannelRecorder)
    unaligned: UnalignedOptions | None = None
    late_inputs: frozenset[ChannelIndex] = frozenset()
    reads_on_ms: int = READS_ON_MS
    aligner: SplitAligner | None = None
    rate_limit: RateLimit | None = None
    clock_ns: Callable[[], int] = SYSTEM_CLOCK.monotonic_ns
