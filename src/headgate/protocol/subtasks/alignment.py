"""Barriers of one subtask: aligned for exactly once, tracked at least once, and what a source reads at most once.

One ``Aligner`` per subtask (ABS paper, Algorithm 1; rules A1–A10 of docs/spec/alignment.md). It never reads a channel;
it tells the interpreter which channels may be read. ``BarrierTracker`` takes its place at least once (rules GM10–GM17
of docs/spec/guarantees.md), with its events and effects but for ``BlockChannel``: no input ever waits. ``unaligned``
has the same events and effects, too. ``ReadAhead``, one per source subtask, counts batches at most once (GM30–GM32),
in the order in which they were read, and never sees one; ``runtime.worker`` holds them until a completed checkpoint
releases them. Counterparts: the ``Coordinator``, which asks for checkpoints and aborts them, and the interpreter in
``runtime.worker``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, CheckpointOptions
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored, Machine


class AbortedIds:
    """The newest ids that were aborted early, in the order in which that was heard."""

    COUNT_MAX = 128
    """As many as Flink remembers; barriers of older ones cannot arrive any more."""

    def __init__(self) -> None:
        self._ids: OrderedDict[CheckpointId, None] = OrderedDict()

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        """Return whether ``checkpoint`` is remembered."""
        return checkpoint in self._ids

    def __iter__(self) -> Iterator[CheckpointId]:
        """Go through all of them."""
        return iter(self._ids)

    def add(self, checkpoint: CheckpointId) -> None:
        """Remember ``checkpoint``; forget the one that was heard of first if there are too many."""
        self._ids[checkpoint] = None
        if len(self._ids) > self.COUNT_MAX:
            self._ids.popitem(last=False)

    def discard(self, checkpoint: CheckpointId) -> bool:
        """Forget ``checkpoint``; return whether it was remembered."""
        return self._ids.pop(checkpoint, self) is None

    def discard_up_to(self, checkpoint: CheckpointId) -> bool:
        """Forget ``checkpoint`` and everything older; return whether it was remembered itself."""
        was_aborted = checkpoint in self._ids
        for old in [c for c in self._ids if c <= checkpoint]:
            del self._ids[old]
        return was_aborted


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """EVENT: the barrier of ``checkpoint`` reached the head of ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """EVENT: the cancel marker of ``checkpoint`` reached the head of ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AbortReceived:
    """EVENT: the coordinator aborted ``checkpoint``."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ChannelEnded:
    """EVENT: nothing will ever come on ``channel`` again; it counts as aligned."""

    channel: ChannelIndex


Event: TypeAlias = BarrierReceived | CancelReceived | AbortReceived | ChannelEnded


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """EFFECT: do not read ``channel`` until it is unblocked."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class UnblockChannels:
    """EFFECT: read these channels again, what waits in them first."""

    channels: tuple[ChannelIndex, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """EFFECT: flush what belongs in front of the barrier, then freeze, before any further element."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class EmitBarrier:
    """EFFECT: send the barrier on every output channel."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class EmitCancel:
    """EFFECT: send the cancel marker on every output channel, so that no subtask downstream waits."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Decline:
    """EFFECT: tell the coordinator that this subtask gives ``checkpoint`` up."""

    checkpoint: CheckpointId
    reason: AbortReason


Effect: TypeAlias = BlockChannel | UnblockChannels | TakeSnapshot | EmitBarrier | EmitCancel | Decline | Ignored


class Phase(Enum):
    """What the aligner waits for."""

    FLOWING = "the first barrier of a newer checkpoint"
    ALIGNING = "the barriers of the current checkpoint on the remaining channels"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FLOWING: frozenset({Phase.ALIGNING}),
    Phase.ALIGNING: frozenset({Phase.FLOWING}),
}


class BarrierMachine(Machine, ABC):
    """What the machines that receive the barriers of one subtask have in common."""

    def __init__(self, channels_count: int) -> None:
        assert channels_count >= 1, "barriers come on channels; a source has one of its own"
        super().__init__()
        self._channels_count = channels_count
        self._ended: set[ChannelIndex] = set()
        self._aborted = AbortedIds()

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: second barrier on a channel, or any event on an ended channel.
        """
        self._begin(event)
        match event:
            case BarrierReceived():
                effects = self._on_barrier(event)
            case CancelReceived():
                effects = self._on_cancel(event)
            case AbortReceived():
                effects = self._on_abort(event.checkpoint)
            case ChannelEnded():
                effects = self._on_end(event.channel)
            case _:
                assert_never(event)
        self._check()
        return effects

    @abstractmethod
    def _on_barrier(self, event: BarrierReceived) -> list[Effect]: ...

    @abstractmethod
    def _on_cancel(self, event: CancelReceived) -> list[Effect]: ...

    @abstractmethod
    def _on_abort(self, checkpoint: CheckpointId) -> list[Effect]: ...

    @abstractmethod
    def _on_end(self, channel: ChannelIndex) -> list[Effect]: ...

    @abstractmethod
    def _check(self) -> None: ...

    def _refuse_ended(self, channel: ChannelIndex) -> None:  # A10, GM17
        if channel in self._ended:
            raise self._violation(f"event on channel {channel}, which has ended")


class Aligner(BarrierMachine):
    """Aligns the barriers of one checkpoint at a time."""

    def __init__(self, channels_count: int) -> None:
        super().__init__(channels_count)
        self._phase = Phase.FLOWING
        self._current = CheckpointId(0)
        self._options = ORDINARY
        self._blocked: set[ChannelIndex] = set()

    @property
    def phase(self) -> Phase:
        """What the aligner waits for."""
        return self._phase

    @property
    def current(self) -> CheckpointId:
        """Highest checkpoint id seen (0: none)."""
        return self._current

    @property
    def blocked(self) -> frozenset[ChannelIndex]:
        """Channels that must not be read now."""
        return frozenset(self._blocked)

    def _on_barrier(self, event: BarrierReceived) -> list[Effect]:
        self._refuse_ended(event.channel)
        if event.checkpoint < self._current:
            return [Ignored("barrier of an older checkpoint")]  # A3
        if event.checkpoint == self._current:
            if self._phase is Phase.FLOWING:
                return [Ignored("barrier of a finished checkpoint")]
            if event.channel in self._blocked:
                raise self._violation(f"second barrier of {event.checkpoint} on channel {event.channel}")
            if event.options != self._options:  # A11
                raise self._violation(f"a barrier of {event.checkpoint} wants {event.options}, not {self._options}")
            return self._align(event.channel)
        # Channels are in order: a sender of the newer barrier will never send the missing one.
        abandoned = self._abandon(AbortReason.OVERTAKEN)  # A4
        self._current, self._options = event.checkpoint, event.options
        if self._aborted.discard_up_to(event.checkpoint):  # A8: no snapshot, but no subtask downstream may wait
            return [*abandoned, EmitCancel(event.checkpoint)]
        self._enter(Phase.ALIGNING)
        return abandoned + self._align(event.channel)

    def _on_cancel(self, event: CancelReceived) -> list[Effect]:
        self._refuse_ended(event.channel)
        if event.checkpoint < self._current:
            return [Ignored("cancel marker of an older checkpoint")]
        if event.checkpoint == self._current:
            if self._phase is Phase.FLOWING:
                return [Ignored("cancel marker of a finished checkpoint")]
            return self._abandon(AbortReason.CANCELLED_UPSTREAM)  # A5
        abandoned = self._abandon(AbortReason.OVERTAKEN)  # A6
        self._current = event.checkpoint
        was_aborted = self._aborted.discard_up_to(event.checkpoint)
        given_up: list[Effect] = [EmitCancel(event.checkpoint)]
        if not was_aborted:
            given_up.append(Decline(event.checkpoint, AbortReason.CANCELLED_UPSTREAM))
        return abandoned + given_up

    def _on_abort(self, checkpoint: CheckpointId) -> list[Effect]:
        if checkpoint < self._current:
            return [Ignored("abort of an older checkpoint")]
        if checkpoint == self._current:
            if self._phase is Phase.FLOWING:
                return [Ignored("abort of a checkpoint that this subtask has finished")]
            return [EmitCancel(self._current), *self._release()]  # A9: the coordinator knows, no decline
        # The control connection is faster than the channels: without this the barrier would begin an alignment that
        # nobody waits for, and block channels until a newer checkpoint comes.
        self._aborted.add(checkpoint)
        return [Ignored("abort remembered until the barrier comes")]

    def _on_end(self, channel: ChannelIndex) -> list[Effect]:
        self._refuse_ended(channel)
        self._ended.add(channel)
        self._blocked.discard(channel)
        if self._phase is Phase.ALIGNING and self._missing() == 0:
            return self._complete()
        return [Ignored("an ended channel counts as aligned")]  # A7

    def _align(self, channel: ChannelIndex) -> list[Effect]:
        """Count ``channel`` as aligned. The last one completes: its channel never blocks (A2)."""
        assert self._phase is Phase.ALIGNING, "only an alignment counts channels (A1)"
        assert channel not in self._blocked, "a channel is counted once (A10)"
        if self._missing() == 1:
            return self._complete()
        self._blocked.add(channel)
        return [BlockChannel(channel)]  # A1

    def _complete(self) -> list[Effect]:
        # Snapshot, then barrier, then the blocked channels: what follows a barrier is in neither the state nor in front
        # of the barrier that goes out.
        assert self._missing() <= 1, "every other channel has delivered the barrier or ended (A2, A7)"
        return [
            TakeSnapshot(self._current, self._options),
            EmitBarrier(self._current, self._options),
            *self._release(),
        ]

    def _abandon(self, reason: AbortReason) -> list[Effect]:
        """Give the current checkpoint up, if one is being aligned: downstream first, then the coordinator."""
        if self._phase is Phase.FLOWING:
            return []
        return [EmitCancel(self._current), Decline(self._current, reason), *self._release()]

    def _release(self) -> list[Effect]:
        self._enter(Phase.FLOWING)
        blocked, self._blocked = tuple(sorted(self._blocked)), set()
        return [UnblockChannels(blocked)] if blocked else []

    def _missing(self) -> int:
        return self._channels_count - len(self._blocked) - len(self._ended)

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert self._phase is Phase.ALIGNING or not self._blocked, "only an alignment blocks channels"
        assert not self._blocked & self._ended, "an ended channel does not block"
        assert len(self._blocked) + len(self._ended) <= self._channels_count, "channels are counted once"
        if self._phase is Phase.ALIGNING:
            assert self._missing() > 0, "an alignment waits for a channel"


class BarrierTracker(BarrierMachine):
    """Counts the barriers of several checkpoints at a time."""

    PENDING_MAX = 50
    """Checkpoints with barriers that are counted at a time (as in Flink); beyond that the oldest is given up."""
    DROPPED_MAX = AbortedIds.COUNT_MAX
    """Ids given up that are remembered; barriers of older ones cannot arrive any more."""

    def __init__(self, channels_count: int) -> None:
        super().__init__(channels_count)
        self._seen: dict[CheckpointId, set[ChannelIndex]] = {}
        self._options: dict[CheckpointId, CheckpointOptions] = {}
        self._done = CheckpointId(0)
        self._dropped: set[CheckpointId] = set()

    @property
    def blocked(self) -> frozenset[ChannelIndex]:
        """Channels that must not be read now: none, ever (GM10)."""
        return frozenset()

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that some barrier has come of, and not all, ascending."""
        return tuple(sorted(self._seen))

    def _on_barrier(self, event: BarrierReceived) -> list[Effect]:
        self._refuse_ended(event.channel)
        checkpoint = event.checkpoint
        if checkpoint <= self._done or checkpoint in self._dropped:  # GM12
            return [Ignored("barrier of a finished checkpoint")]
        if self._aborted.discard(checkpoint):  # GM15: no snapshot, and no subtask downstream counts on
            return self._drop(checkpoint)
        # at least once: no channel is blocked, so records that follow a barrier may be in its snapshot already; a
        # restore reads them a second time
        seen = self._seen.setdefault(checkpoint, set())
        options = self._options.setdefault(checkpoint, event.options)
        if event.channel in seen:
            raise self._violation(f"second barrier of {checkpoint} on channel {event.channel}")  # GM17
        if event.options != options:  # A11
            raise self._violation(f"a barrier of {checkpoint} wants {event.options}, not {options}")
        seen.add(event.channel)
        if self._is_complete(checkpoint):
            return self._complete(checkpoint)
        return self._drop_oldest() or [Ignored("barriers are missing on other channels")]

    def _on_cancel(self, event: CancelReceived) -> list[Effect]:  # GM14
        self._refuse_ended(event.channel)
        checkpoint = event.checkpoint
        if checkpoint <= self._done or checkpoint in self._dropped:
            return [Ignored("cancel marker of a finished checkpoint")]
        was_aborted = checkpoint in self._aborted
        effects = [*self._give_up_before(checkpoint), EmitCancel(checkpoint)]
        if not was_aborted:
            effects.append(Decline(checkpoint, AbortReason.CANCELLED_UPSTREAM))
        self._finish(checkpoint)
        return effects

    def _on_abort(self, checkpoint: CheckpointId) -> list[Effect]:  # GM15
        if checkpoint <= self._done or checkpoint in self._dropped:
            return [Ignored("abort of a finished checkpoint")]
        if checkpoint in self._seen:
            self._forget(checkpoint)
            return self._drop(checkpoint)
        self._aborted.add(checkpoint)
        return [Ignored("abort remembered until the barrier comes")]

    def _on_end(self, channel: ChannelIndex) -> list[Effect]:  # GM16
        self._refuse_ended(channel)
        self._ended.add(channel)
        # an end may complete several at once: the newest is taken, which gives the older ones up
        complete = [checkpoint for checkpoint in self.pending if self._is_complete(checkpoint)]
        return self._complete(complete[-1]) if complete else [Ignored("an ended channel counts as seen")]

    def _is_complete(self, checkpoint: CheckpointId) -> bool:
        return len(self._seen[checkpoint] | self._ended) == self._channels_count

    def _complete(self, checkpoint: CheckpointId) -> list[Effect]:  # GM11
        options = self._options[checkpoint]
        effects = self._give_up_before(checkpoint)
        self._finish(checkpoint)
        return [*effects, TakeSnapshot(checkpoint, options), EmitBarrier(checkpoint, options)]

    def _give_up_before(self, checkpoint: CheckpointId) -> list[Effect]:
        effects: list[Effect] = []
        for older in [c for c in self.pending if c < checkpoint]:
            effects += [EmitCancel(older), Decline(older, AbortReason.OVERTAKEN)]
        return effects

    def _drop(self, checkpoint: CheckpointId) -> list[Effect]:
        """The coordinator aborted it, so it is not declined; others are counted on."""
        self._dropped.add(checkpoint)
        if len(self._dropped) > self.DROPPED_MAX:
            self._dropped.remove(min(self._dropped))
        return [EmitCancel(checkpoint)]

    def _drop_oldest(self) -> list[Effect]:  # GM13
        if len(self._seen) <= self.PENDING_MAX:
            return []
        oldest = self.pending[0]
        self._finish(oldest)
        return [EmitCancel(oldest), Decline(oldest, AbortReason.OVERTAKEN)]

    def _finish(self, checkpoint: CheckpointId) -> None:
        """Nothing of ``checkpoint``, or of an older one, matters here any more."""
        assert checkpoint > self._done, "checkpoints are over in order (GM11)"
        self._done = checkpoint
        for older in [c for c in self._seen if c <= checkpoint]:
            self._forget(older)
        self._aborted.discard_up_to(checkpoint)
        self._dropped = {c for c in self._dropped if c > checkpoint}

    def _forget(self, checkpoint: CheckpointId) -> None:
        del self._seen[checkpoint], self._options[checkpoint]

    def _check(self) -> None:
        assert len(self._seen) <= self.PENDING_MAX, "what is counted is bounded (GM13)"
        assert all(c > self._done for c in (*self._seen, *self._aborted, *self._dropped)), "older ones are over (GM11)"
        assert not self._seen.keys() & self._dropped, "what was given up is not counted on (GM15)"
        assert not any(self._is_complete(checkpoint) for checkpoint in self._seen), (
            "a complete checkpoint counts no more barriers (GM11)"
        )


class ReadAhead:
    """A batch may be processed once a completed checkpoint holds a position after it."""

    def __init__(self) -> None:
        self._read = 0
        self._taken = 0
        self._released = 0
        self._covered: dict[CheckpointId, int] = {}
        self._is_over = False

    @property
    def held(self) -> int:
        """Batches that were read and not yet processed."""
        return self._read - self._taken

    @property
    def may_take(self) -> bool:
        """Whether the oldest batch that is held may be processed (GM30)."""
        return not self._is_over and self._taken < self._released

    def read(self) -> None:
        """One more batch was read, and is held."""
        self._read += 1

    def take(self) -> None:
        """The oldest batch that is held is processed now."""
        assert self.may_take, "nothing is processed that a restore might read again (GM30)"
        self._taken += 1

    def cut(self, checkpoint: CheckpointId, *, is_last: bool) -> bool:
        """Take a snapshot; return whether its positions come after everything that was read.

        The positions of the last one before a stop come before the held batches: none of these is processed (GM32).
        """
        self._is_over = self._is_over or is_last
        assert checkpoint > max(self._covered, default=0), "cuts come in the order of checkpoints (T2)"
        if not is_last:
            self._covered[checkpoint] = self._read
        return not is_last

    def completed(self, checkpoint: CheckpointId) -> None:
        """Everything that this checkpoint, or an older one, covers may be processed (C16)."""
        covered = [count for older, count in self._covered.items() if older <= checkpoint]
        self._released = max([self._released, *covered])
        self._covered = {newer: count for newer, count in self._covered.items() if newer > checkpoint}
        assert self._taken <= self._released <= self._read, "processed: released and read before (GM30)"
