"""Barriers of a subtask at least once (rules GM10–GM17), and batches of a source at most once (GM30–GM32).

Rules of docs/spec/guarantees.md. ``BarrierTracker`` takes the place of the ``Aligner``, with its events and effects
but for ``BlockChannel``: no input ever waits. ``ReadAhead``, one per source subtask, counts batches in the order in
which they were read and never sees one; ``runtime.worker`` holds them until a completed checkpoint releases them.
"""

from __future__ import annotations

from headgate.model.config import CheckpointOptions
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.alignment import (
    AbortedIds,
    BarrierMachine,
    BarrierReceived,
    CancelReceived,
    Decline,
    Effect,
    EmitBarrier,
    EmitCancel,
    TakeSnapshot,
)


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
