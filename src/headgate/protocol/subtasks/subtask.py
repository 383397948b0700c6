"""One subtask's part in checkpoints and in the end of input (rules T1–T10 of docs/spec/subtask.md).

Composes the ``Aligner`` (or what takes its place) with the asynchronous part of the snapshot, the precommitted output
of its sink, and its part in loops. Counterparts: the ``Coordinator``, and the interpreter in ``runtime.worker``,
which reports the events and runs the effects in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import Committable, Copied, SubtaskEntry
from headgate.protocol.checkpoints.commit import Precommit
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.loop_prober import ProbeReceived
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.subtasks import alignment, loops, unaligned
from headgate.protocol.subtasks import loops as loop_part
from headgate.protocol.subtasks.alignment import (
    AbortReceived,
    Aligner,
    BarrierReceived,
    BarrierTracker,
    CancelReceived,
    Decline,
    EmitBarrier,
    EmitCancel,
    TakeSnapshot,
)
from headgate.protocol.subtasks.externally_induced import Cut, DeclineCut, InducedCut, ReadOn
from headgate.protocol.subtasks.externally_induced import Effect as InducedEffect
from headgate.protocol.subtasks.loops import (
    NO_ROUNDS,
    DropLog,
    FeedbackForwarded,
    FeedbackReceived,
    LoopHead,
    LoopParticipant,
    LoopPlace,
    ProbeOrdered,
    RoundProgress,
)
from headgate.protocol.subtasks.unaligned import (
    AlignmentTimedOut,
    BarrierArrived,
    CancelArrived,
    DropRecording,
    TimeoutAligner,
)


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """EVENT (source subtasks): the coordinator asks for ``checkpoint``; the barrier goes out at this position."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class CheckpointAnnounced:
    """EVENT (sources that set their own barrier): ``checkpoint`` has begun."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class MarkerMet:
    """EVENT (sources that set their own barrier): in ``split`` the reader has met the marker of ``checkpoint``."""

    split: str
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SplitsSeen:
    """EVENT (sources that set their own barrier): these splits have not ended.

    ``is_read``: the reader reads those on that do not stand still.
    """

    splits: tuple[str, ...]
    is_read: bool = True


@dataclass(frozen=True, slots=True)
class EndReceived:
    """EVENT: the end of data reached the head of input ``channel``. Barriers may still follow on it (T6, L28)."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """EVENT (source subtasks): the reader has delivered all its bounded input."""


@dataclass(frozen=True, slots=True)
class InputResumed:
    """EVENT: there is more input than when the restored snapshot was taken, which says that all had ended.

    A source: its reader has something to read. Others: records have come; this is reported before they are processed.
    """


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """EVENT: the asynchronous part of ``checkpoint`` is durable, and ``entry`` is what there is of it.

    Its committables were prepared by this write, in checkpoint order; they include what an earlier, failed or cancelled
    write left unprepared.
    """

    checkpoint: CheckpointId
    entry: SubtaskEntry
    copied: Copied | None = None
    """What was written to the savepoint that the checkpoint carries."""


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """EVENT: the asynchronous part of ``checkpoint`` failed for good."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """EVENT (loop heads): the driver found the nest of loops empty: end of data follows (L29)."""


@dataclass(frozen=True, slots=True)
class CompleteReceived:
    """EVENT: the coordinator completed ``checkpoint``."""

    checkpoint: CheckpointId


Event: TypeAlias = (
    TriggerReceived
    | CheckpointAnnounced
    | MarkerMet
    | SplitsSeen
    | BarrierReceived
    | CancelReceived
    | BarrierArrived
    | CancelArrived
    | AlignmentTimedOut
    | EndReceived
    | SourceEnded
    | InputResumed
    | SnapshotWritten
    | SnapshotFailed
    | AbortReceived
    | CompleteReceived
    | FeedbackReceived
    | FeedbackForwarded
    | ProbeReceived
    | ProbeOrdered
    | LoopEnded
)


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """EFFECT: tell the coordinator that this subtask's part of ``checkpoint`` is durable.

    ``entry`` is that of the event, with every committable that no completed checkpoint covers (T3). The interpreter
    adds what it measured; from then on it is the same value on the wire, in the coordinator and in the manifest.
    """

    checkpoint: CheckpointId
    entry: SubtaskEntry
    copied: Copied | None = None


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """EFFECT: stop the asynchronous part of ``checkpoint`` if it still runs; its sealed output stays sealed (T4)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class FinishOperators:
    """EFFECT: pass the last watermark through the chain, then ``finish`` every operator, in chain order."""


@dataclass(frozen=True, slots=True)
class ResumeOperators:
    """EFFECT: tell every operator that input goes on after the end that its restored state knows of."""


@dataclass(frozen=True, slots=True)
class EmitEnd:
    """EFFECT: send the end of data on every output channel."""


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """EFFECT: tell the coordinator that this subtask has processed all input."""


Effect: TypeAlias = (
    alignment.Effect
    | unaligned.Effect
    | loops.HeadEffect
    | loop_part.ParticipantEffect
    | ReadOn
    | Acknowledge
    | CancelWrite
    | FinishOperators
    | ResumeOperators
    | EmitEnd
    | ReportFinished
)


class Subtask(Machine):
    """Checkpoints and end of input of one subtask."""

    def __init__(
        self,
        channels_count: int,
        *,
        is_restored_finished: bool = False,
        place: LoopPlace | None = None,
        rounds: RoundProgress = NO_ROUNDS,
        alignment: Alignment = Alignment.ALIGNED,
        induced_from: CheckpointId | None = None,
        is_immediate: bool = False,
        late: frozenset[ChannelIndex] = frozenset(),
    ) -> None:
        """Make the machine of a subtask with ``channels_count`` inputs, feedback channels aside (0: a source).

        Args:
            channels_count: inputs that barriers are aligned on.
            is_restored_finished: the restored snapshot was taken after ``finish``, which must not run twice (T8)
                unless more input comes (T10).
            place: where the subtask stands in its nest of loops, if it is in one.
            rounds: from the restored snapshot.
            alignment: of every barrier of this run (GM2).
            induced_from: of a source that sets its own barrier: the first checkpoint of this generation.
            is_immediate: barriers that may overtake do so at once: the timeout is 0.
            late: channels with a barrier that takes credit, because their source sets its own.
        """
        super().__init__()
        self._is_source = channels_count == 0
        self._channels_count = channels_count
        self._alignment = alignment
        assert place is None or not alignment.may_overtake, "no barrier overtakes in a loop (UA2)"
        self._aligner = _aligner(alignment, max(channels_count, 1), is_immediate=is_immediate, late=late)
        self._is_suspended = False
        self._induced = None if induced_from is None else InducedCut(induced_from)
        self._precommit = Precommit()
        self._ended: set[ChannelIndex] = set()
        self._is_finished = False
        self._were_operators_finished = is_restored_finished
        self._writing: set[CheckpointId] = set()
        self._last_snapshot = CheckpointId(0)
        feedback = frozenset[ChannelIndex]() if place is None else place.feedback
        self._feedback = feedback
        self._head = LoopHead(sorted(feedback)) if feedback else None
        self._part = None if place is None else LoopParticipant(place, rounds)
        self._outside = frozenset[ChannelIndex]() if place is None else place.outside
        self._has_loop_ended = False

    @property
    def is_finished(self) -> bool:
        """Whether all input has ended and been processed. Part of the snapshot."""
        return self._were_operators_finished

    @property
    def is_suspended(self) -> bool:
        """Whether this source sends no more records: the last barrier before a stop has gone out (GM3)."""
        return self._is_suspended

    @property
    def held_splits(self) -> tuple[str, ...]:
        """Splits, of a source that sets its own barrier, that are stopped at their markers."""
        return () if self._induced is None else self._induced.held

    @property
    def awaited_markers(self) -> tuple[CheckpointId, ...]:
        """Checkpoints with markers that a source that sets its own barrier has not met yet."""
        return () if self._induced is None else self._induced.awaited

    @property
    def blocked(self) -> frozenset[ChannelIndex]:
        """Input channels that must not be read now."""
        return self._aligner.blocked if self._head is None else self._aligner.blocked | self._head.held

    @property
    def rounds(self) -> RoundProgress:
        """How far rounds have come here. Part of the snapshot of a subtask in a loop."""
        return NO_ROUNDS if self._part is None else self._part.progress

    @property
    def open_logs(self) -> tuple[CheckpointId, ...]:
        """Checkpoints with an open log in this loop head."""
        return () if self._head is None else self._head.pending

    @property
    def pending_committables(self) -> tuple[Committable, ...]:
        """Prepared output not yet known to be covered by a completed checkpoint."""
        return self._precommit.pending

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: an event that no correct peer or interpreter can produce.
        """
        self._begin(event)
        match event:
            case TriggerReceived():
                effects = self._on_trigger(event)
            case CheckpointAnnounced() | MarkerMet() | SplitsSeen():
                effects = self._on_induced(event)
            case BarrierReceived() if event.channel in self._feedback:
                effects = self._logged(loops.SentinelReceived(event.channel, event.checkpoint))
            case BarrierReceived():
                effects = self._aligned(event)
            case CancelReceived() if event.channel in self._feedback:
                effects = [Ignored("the loop tail has informed the coordinator")]  # L10
            case CancelReceived() | BarrierArrived() | CancelArrived() | AlignmentTimedOut():
                effects = self._aligned(event)
            case EndReceived():
                effects = self._on_end(event)
            case SourceEnded():
                effects = self._on_source_ended()
            case InputResumed():
                effects = self._on_resumed()
            case SnapshotWritten():
                effects = self._on_written(event)
            case SnapshotFailed():
                effects = self._on_failed(event)
            case AbortReceived():
                effects = self._on_abort(event)
            case CompleteReceived():
                effects = self._on_complete(event)
            case FeedbackReceived():
                effects = self._on_feedback(event)
            case LoopEnded():
                effects = self._on_loop_ended()
            case FeedbackForwarded() | ProbeReceived() | ProbeOrdered():
                if self._part is None:
                    raise self._violation("only subtasks in a loop get probes and feedback")
                effects = list(self._part.handle(event))
            case _:
                assert_never(event)
        self._check()
        return effects

    def _on_trigger(self, event: TriggerReceived) -> list[Effect]:  # T1
        if not self._is_source:
            raise self._violation("only sources are triggered")
        if self._induced is not None:  # C47: the marker is its barrier, however barriers are aligned (EI29)
            return self._on_induced(CheckpointAnnounced(event.checkpoint, event.options))
        return self._cut(event.checkpoint, event.options)

    def _cut(self, checkpoint: CheckpointId, options: CheckpointOptions) -> list[Effect]:
        """Send the barrier of a source: downstream it is like any other (EI32)."""
        # never taken back, even if this checkpoint fails: the next try is a last one, too, and cuts at the same place
        self._is_suspended = self._is_suspended or options.is_last
        return self._aligned(BarrierReceived(ChannelIndex(0), checkpoint, options))

    def _on_induced(self, event: CheckpointAnnounced | MarkerMet | SplitsSeen) -> list[Effect]:
        if self._induced is None:
            raise self._violation("only a source that sets its own barrier meets markers")
        match event:
            case CheckpointAnnounced():
                effects = self._induced.announced(event.checkpoint, event.options)
            case MarkerMet():
                if event.split in self._induced.held:
                    raise self._violation(f"the reader went on in split '{event.split}' before its release (EI21)")
                effects = self._induced.met(event.split, event.checkpoint)
            case SplitsSeen():
                effects = self._induced.splits(event.splits, is_read=event.is_read)
        return self._induced_effects(effects) or [Ignored("no checkpoint is cut by it")]

    def _induced_effects(self, found: list[InducedEffect]) -> list[Effect]:
        effects: list[Effect] = []
        for effect in found:
            match effect:
                case ReadOn():
                    effects.append(effect)
                case Cut():
                    effects += self._cut(effect.checkpoint, effect.options)
                case DeclineCut():  # EI24: no subtask downstream may wait, and it counts
                    given_up = self._aligned(CancelReceived(ChannelIndex(0), effect.checkpoint))
                    effects += [
                        replace(e, reason=AbortReason.MARKER_MISSED) if isinstance(e, Decline) else e for e in given_up
                    ]
        if self._is_suspended and self._induced is not None:
            self._induced.stop()
        return effects

    @property
    def recording(self) -> CheckpointId | None:
        """The checkpoint with a snapshot that was taken and is not whole yet, because barriers overtook (UA8)."""
        return self._aligner.recording if isinstance(self._aligner, TimeoutAligner) else None

    def _aligned(self, event: unaligned.Event) -> list[Effect]:
        """Pass ``event`` to the aligner, note the snapshots it orders, and let the loop head know."""
        if isinstance(event, BarrierReceived | BarrierArrived) and not self._is_expected(event.options.alignment):
            raise self._violation(
                f"a barrier of {event.checkpoint} is {event.options.alignment}, not {self._alignment}"
            )
        effects: list[Effect] = []
        for effect in self._ordered(event):
            effects.append(effect)
            match effect:
                case TakeSnapshot():
                    assert effect.checkpoint > self._last_snapshot, "snapshot ids increase (T2)"
                    self._last_snapshot = effect.checkpoint
                    self._writing.add(effect.checkpoint)
                case EmitBarrier() if self._head is not None:  # L1, GM22: the log begins where it went out
                    effects += self._logged(loops.SnapshotTaken(effect.checkpoint))
                case DropRecording():
                    self._writing.discard(effect.checkpoint)
                case EmitCancel() if self._head is not None:
                    effects += self._logged(loops.GivenUp(effect.checkpoint))
        return effects

    def _ordered(self, event: unaligned.Event) -> Sequence[unaligned.Effect]:
        if isinstance(self._aligner, TimeoutAligner):
            return self._aligner.handle(event)
        if isinstance(event, BarrierArrived | CancelArrived | AlignmentTimedOut):
            raise self._violation(f"{type(event).__name__}, where no barrier may overtake")
        return self._aligner.handle(event)

    def _is_expected(self, alignment: Alignment) -> bool:
        """Whether a barrier may have this ``alignment``: the run's, or that of what may be overtaken in it (UA3)."""
        if self._alignment.may_overtake:
            return alignment is not Alignment.TRACKED
        return alignment is self._alignment

    def _logged(self, event: loops.HeadEvent) -> list[Effect]:
        """Pass ``event`` to the loop head; a checkpoint is not written any more once its log is dropped."""
        assert self._head is not None, "only loop heads have a log (L1)"
        effects = self._head.handle(event)
        self._writing -= {e.checkpoint for e in effects if isinstance(e, DropLog)}
        return list(effects)

    def _on_feedback(self, event: FeedbackReceived) -> list[Effect]:
        if self._head is None or event.channel in self._ended:
            raise self._violation(f"feedback on channel {event.channel}, where none can come")
        if self._is_finished:
            raise self._violation("records came back after the loop was found empty and its end had gone out")
        return self._logged(event)

    def _on_end(self, event: EndReceived) -> list[Effect]:
        if event.channel in self._ended or self._is_source:
            raise self._violation(f"second end of data on channel {event.channel}")
        self._ended.add(event.channel)
        if event.channel in self._feedback:
            # the end has gone round the loop: only now this head is done, what it sent has been processed
            is_back = self._feedback <= self._ended
            return [ReportFinished()] if is_back else [Ignored("the end has not come back on other channels")]
        effects: list[Effect] = []
        if self._part is not None and event.channel in self._outside:
            effects += self._part.handle(loop_part.OutsideEnded(event.channel))
        if self._regular_ended < self._channels_count:
            return effects or [Ignored("other channels still deliver")]
        return effects + self._finish_if_empty()

    @property
    def _regular_ended(self) -> int:
        return len(self._ended - self._feedback)

    def _on_loop_ended(self) -> list[Effect]:
        if self._head is None or self._has_loop_ended:
            raise self._violation("the end of a loop is an event of its heads alone, and comes once")
        self._has_loop_ended = True
        if self._regular_ended < self._channels_count:
            return [Ignored("the end has not come through the outer loop yet")]
        return self._finish_if_empty()

    def _finish_if_empty(self) -> list[Effect]:
        """Finish, unless this is a loop head and records may still circulate (L29)."""
        if self._head is not None and not self._has_loop_ended:
            return [Ignored("records may still circulate")]
        return self._finish()

    def _on_source_ended(self) -> list[Effect]:
        if not self._is_source:
            raise self._violation("only sources end by themselves")
        if self._is_finished:
            return [Ignored("already ended")]
        return self._finish()

    def _on_resumed(self) -> list[Effect]:  # T10
        if self._is_finished:
            raise self._violation("input came after the end of data had gone out")
        if not self._were_operators_finished:
            return [Ignored("its input had not ended")]
        self._were_operators_finished = False
        return [ResumeOperators()]

    def _finish(self) -> list[Effect]:  # T7: the last watermark, finish, end of data, report
        assert not self._is_finished, "the end of data goes out once (T7)"
        effects: list[Effect] = [] if self._were_operators_finished else [FinishOperators()]
        self._is_finished = self._were_operators_finished = True
        effects.append(EmitEnd())
        return effects if self._head is not None else [*effects, ReportFinished()]  # L29: when the end is back

    def _on_written(self, event: SnapshotWritten) -> list[Effect]:
        if event.checkpoint in self.open_logs:
            raise self._violation(f"the snapshot of {event.checkpoint} was written before its log was complete (L4)")
        if event.checkpoint == self.recording:
            raise self._violation(f"the snapshot of {event.checkpoint} was written before all was recorded (UA8)")
        self._precommit.prepared(event.entry.committables)  # kept even when the checkpoint is gone (T5)
        if event.checkpoint not in self._writing and not any(part.path for part in event.entry.parts):
            return [Ignored("written after the checkpoint was aborted")]
        # Too late, with a file: acknowledged all the same, so that the coordinator deletes the file (C10).
        self._writing.discard(event.checkpoint)
        covered = self._precommit.covered_by(event.checkpoint)  # T3
        return [Acknowledge(event.checkpoint, replace(event.entry, committables=covered), event.copied)]

    def _on_failed(self, event: SnapshotFailed) -> list[Effect]:
        if event.checkpoint not in self._writing:
            return [Ignored("failed after the checkpoint was aborted")]
        released = self._released(event.checkpoint)  # L5: its log may have failed while it was open
        self._writing.discard(event.checkpoint)
        return [*released, Decline(event.checkpoint, AbortReason.SNAPSHOT_FAILED)]  # T4

    def _on_abort(self, event: AbortReceived) -> list[Effect]:
        released = self._released(event.checkpoint)
        if event.checkpoint == self.recording:
            return self._aligned(event)  # UA10
        if event.checkpoint in self._writing:
            self._writing.remove(event.checkpoint)
            return [*released, CancelWrite(event.checkpoint)]
        effects = released + self._aligned(event)
        if self._induced is not None:  # after the aligner, which must know before the next barrier
            effects += self._induced_effects(self._induced.aborted(event.checkpoint))
        return effects

    def _released(self, checkpoint: CheckpointId) -> list[Effect]:
        """Let the loop head drop what it holds for ``checkpoint`` (L5)."""
        if self._head is None:
            return []
        return [e for e in self._logged(loops.Released(checkpoint)) if not isinstance(e, Ignored)]

    def _on_complete(self, event: CompleteReceived) -> list[Effect]:
        self._precommit.completed(event.checkpoint)  # T9
        effects: list[Effect] = []
        for checkpoint in sorted(c for c in self._writing if c < event.checkpoint):  # subsumed (C15)
            effects += self._released(checkpoint)
            if checkpoint == self.recording:
                # giving the recording up takes it out of what is written, hence the second look below
                effects += self._aligned(AbortReceived(checkpoint))
            if checkpoint in self._writing:
                self._writing.remove(checkpoint)
                effects.append(CancelWrite(checkpoint))
        return effects or [Ignored("nothing of it is held here any more")]

    def _check(self) -> None:
        assert not self._is_finished or self._were_operators_finished, (
            "the end is sent after the operators finished (T7)"
        )
        assert all(checkpoint <= self._last_snapshot for checkpoint in self._writing), "what is written was taken (T2)"
        assert not self._is_finished or self._is_source or self._regular_ended == self._channels_count, "the end (T6)"


def _aligner(
    alignment: Alignment, channels_count: int, *, is_immediate: bool, late: frozenset[ChannelIndex]
) -> Aligner | BarrierTracker | TimeoutAligner:
    if alignment.may_overtake:
        return TimeoutAligner(channels_count, is_immediate=is_immediate, late=late)
    return (BarrierTracker if alignment is Alignment.TRACKED else Aligner)(channels_count)
