"""Every cell of the tracker's table (rules GM10–GM17 of docs/spec/guarantees.md)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp

from headgate.errors import ProtocolViolation
from headgate.model.config import Alignment, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.alignment import (
    AbortedIds,
    AbortReceived,
    Aligner,
    BarrierReceived,
    BarrierTracker,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    Decline,
    Effect,
    EmitBarrier,
    EmitCancel,
    Event,
    ReadAhead,
    TakeSnapshot,
    UnblockChannels,
)

TRACKED = CheckpointOptions(alignment=Alignment.TRACKED)


def barrier(channel: int, checkpoint: int, options: CheckpointOptions = TRACKED) -> BarrierReceived:
    return BarrierReceived(ch(channel), cp(checkpoint), options)


def cancel(channel: int, checkpoint: int) -> CancelReceived:
    return CancelReceived(ch(channel), cp(checkpoint))


def abort(checkpoint: int) -> AbortReceived:
    return AbortReceived(cp(checkpoint))


def end(channel: int) -> ChannelEnded:
    return ChannelEnded(ch(channel))


def taken(checkpoint: int) -> list[Effect]:
    return [TakeSnapshot(cp(checkpoint), TRACKED), EmitBarrier(cp(checkpoint), TRACKED)]


def given_up(checkpoint: int, reason: AbortReason = AbortReason.OVERTAKEN) -> list[Effect]:
    return [EmitCancel(cp(checkpoint)), Decline(cp(checkpoint), reason)]


def after(channels_count: int, *events: Event) -> BarrierTracker:
    tracker = BarrierTracker(channels_count)
    for event in events:
        tracker.handle(event)
    return tracker


# GM10
def test_no_channel_is_ever_blocked() -> None:
    tracker = after(3, barrier(0, 1), barrier(0, 2), barrier(1, 1))
    assert tracker.blocked == frozenset()
    assert tracker.pending == (1, 2)


# GM11
def test_the_last_barrier_takes_the_snapshot_and_goes_on() -> None:
    tracker = BarrierTracker(2)
    assert tracker.handle(barrier(0, 1)) == [Ignored("barriers are missing on other channels")]
    assert tracker.handle(barrier(1, 1)) == taken(1)
    assert tracker.pending == ()


# GM11
def test_a_completed_checkpoint_gives_up_older_ones() -> None:
    tracker = after(2, barrier(0, 1), barrier(0, 2), barrier(0, 3), barrier(1, 2))
    assert tracker.pending == (3,)
    tracker = after(2, barrier(0, 1), barrier(0, 2))
    assert tracker.handle(barrier(1, 2)) == [*given_up(1), *taken(2)]


# GM11
def test_several_checkpoints_complete_one_after_the_other() -> None:
    tracker = after(2, barrier(0, 1), barrier(0, 2))
    assert tracker.handle(barrier(1, 1)) == taken(1)
    assert tracker.handle(barrier(1, 2)) == taken(2)


# GM12
def test_a_barrier_of_a_finished_or_older_checkpoint_is_ignored() -> None:
    finished = after(3, barrier(0, 1), barrier(0, 2), barrier(1, 2), barrier(2, 2))
    assert finished.handle(barrier(1, 1)) == [Ignored("barrier of a finished checkpoint")]
    assert after(2, cancel(0, 2)).handle(barrier(1, 2)) == [Ignored("barrier of a finished checkpoint")]
    assert after(2, barrier(0, 2), abort(2)).handle(barrier(1, 2)) == [Ignored("barrier of a finished checkpoint")]


# GM13
def test_the_oldest_of_too_many_is_given_up() -> None:
    tracker = after(2, *(barrier(0, n) for n in range(1, BarrierTracker.PENDING_MAX + 1)))
    assert tracker.handle(barrier(0, BarrierTracker.PENDING_MAX + 1)) == given_up(1)
    assert tracker.handle(barrier(1, 1)) == [Ignored("barrier of a finished checkpoint")]
    assert tracker.handle(barrier(1, 2)) == taken(2)


# GM14
def test_a_cancel_marker_gives_up_its_checkpoint_and_older_ones() -> None:
    tracker = after(3, barrier(0, 1), barrier(0, 2), barrier(0, 3))
    assert tracker.handle(cancel(1, 2)) == [*given_up(1), *given_up(2, AbortReason.CANCELLED_UPSTREAM)]
    assert tracker.handle(cancel(2, 2)) == [Ignored("cancel marker of a finished checkpoint")]
    assert tracker.pending == (3,)
    assert after(2, abort(2)).handle(cancel(0, 2)) == [EmitCancel(cp(2))], "the coordinator knows"
    assert after(2, barrier(0, 2), abort(2)).handle(cancel(1, 2)) == [Ignored("cancel marker of a finished checkpoint")]


# GM15
def test_an_abort_gives_up_one_checkpoint_alone() -> None:
    tracker = after(2, barrier(0, 1), barrier(0, 2), barrier(0, 3))
    assert tracker.handle(abort(2)) == [EmitCancel(cp(2))]
    assert tracker.handle(abort(2)) == [Ignored("abort of a finished checkpoint")]
    assert tracker.handle(barrier(1, 1)) == taken(1)
    assert tracker.handle(barrier(1, 2)) == [Ignored("barrier of a finished checkpoint")]
    assert tracker.handle(barrier(1, 3)) == taken(3)


# GM15
def test_an_abort_before_the_first_barrier_is_remembered() -> None:
    tracker = after(2, barrier(0, 1))
    assert tracker.handle(abort(2)) == [Ignored("abort remembered until the barrier comes")]
    assert tracker.handle(barrier(0, 2)) == [EmitCancel(cp(2))]
    assert tracker.handle(barrier(1, 1)) == taken(1)
    assert tracker.handle(barrier(1, 2)) == [Ignored("barrier of a finished checkpoint")]


# GM15
def test_what_is_remembered_of_aborts_is_bounded() -> None:
    tracker = after(2, *(abort(n) for n in range(1, AbortedIds.COUNT_MAX + 2)))
    assert tracker.handle(barrier(0, 1)) == [Ignored("barriers are missing on other channels")], (
        "the first is forgotten"
    )
    assert tracker.handle(barrier(0, 2)) == [EmitCancel(cp(2))]


# GM16
def test_the_end_of_a_channel_completes_the_newest_that_misses_nothing_else() -> None:
    tracker = after(3, barrier(0, 1), barrier(1, 1), barrier(0, 2), barrier(1, 2), barrier(0, 3))
    assert tracker.handle(end(2)) == [*given_up(1), *taken(2)]
    assert tracker.handle(barrier(1, 3)) == taken(3)
    assert after(2, end(1)).handle(barrier(0, 1)) == taken(1)
    assert after(2).handle(end(1)) == [Ignored("an ended channel counts as seen")]


# GM17
def test_what_no_correct_peer_sends_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="second barrier of 1 on channel 0"):
        after(2, barrier(0, 1), barrier(0, 1))
    for event in (barrier(0, 1), cancel(0, 1), end(0)):
        with pytest.raises(ProtocolViolation, match="channel 0, which has ended"):
            after(2, end(0), event)
    other = CheckpointOptions(alignment=Alignment.TRACKED, is_last=True)
    with pytest.raises(ProtocolViolation, match="a barrier of 1 wants"):  # A11
        after(2, barrier(0, 1), barrier(1, 1, other))


def test_a_subtask_with_one_input_takes_the_same_snapshots_as_one_that_aligns() -> None:
    events: list[Event] = [barrier(0, 1), barrier(0, 3), abort(4), barrier(0, 4), cancel(0, 5), barrier(0, 6)]
    tracker, aligner = BarrierTracker(1), Aligner(1)
    for event in events:
        assert tracker.handle(event) == aligner.handle(event)


# GM30
def test_a_batch_is_handed_over_when_a_completed_checkpoint_covers_it() -> None:
    gate = ReadAhead()
    gate.read()
    assert not gate.may_take, "no checkpoint at all"
    gate.cut(cp(1), is_last=False)
    gate.read()
    assert not gate.may_take, "not yet completed"
    gate.completed(cp(1))
    assert gate.may_take
    gate.take()
    assert not gate.may_take, "the second one was read behind the snapshot"
    gate.cut(cp(2), is_last=False)
    gate.read()
    gate.cut(cp(3), is_last=False)
    gate.completed(cp(3))
    gate.take()
    gate.take()
    assert gate.held == 0, "a completion covers older checkpoints"
    gate.completed(cp(2))
    assert not gate.may_take, "a late word changes nothing"


# GM32
def test_nothing_is_taken_behind_the_last_checkpoint_before_a_stop() -> None:
    gate = ReadAhead()
    gate.read()
    assert gate.cut(cp(1), is_last=False), "positions are after what is held"
    assert not gate.cut(cp(2), is_last=True), "positions go in front of it"
    gate.completed(cp(1))
    gate.completed(cp(2))
    assert not gate.may_take


STEPS = st.lists(st.sampled_from(["read", "read", "take", "cut", "complete", "last"]), max_size=60)


@given(STEPS, st.data())
def test_nothing_is_ever_taken_that_no_completed_checkpoint_covers(steps: list[str], data: st.DataObject) -> None:
    # GM30
    gate, read, taken, newest = ReadAhead(), 0, 0, 0
    positions: dict[int, int] = {0: 0}
    restored = 0
    for step in steps:
        match step:
            case "read":
                gate.read()
                read += 1
            case "take" if gate.may_take:
                gate.take()
                taken += 1
            case "cut" | "last":
                newest += 1
                positions[newest] = read if gate.cut(cp(newest), is_last=step == "last") else taken
            case "complete" if newest:
                done = data.draw(st.integers(1, newest))
                gate.completed(cp(done))
                restored = max(restored, done)
        assert taken <= positions[restored], "a restore begins behind everything that was processed"


class Model:
    """Says by itself what must come of each event: what has been seen where, and what is over."""

    def __init__(self, channels_count: int) -> None:
        self.channels = set(range(channels_count))
        self.seen: dict[int, set[int]] = {}
        self.ended: set[int] = set()
        self.aborted: set[int] = set()
        self.over: set[int] = set()
        self.newest_over = 0

    def is_over(self, checkpoint: int) -> bool:
        return checkpoint <= self.newest_over or checkpoint in self.over

    def expects(self, event: Event) -> tuple[int | None, set[int]]:
        """Return the snapshot that is due, and what must be given up."""
        match event:
            case BarrierReceived():
                if self.is_over(event.checkpoint):
                    return None, set()
                if event.checkpoint in self.aborted:
                    self.over.add(event.checkpoint)
                    return None, {int(event.checkpoint)}
                self.seen.setdefault(event.checkpoint, set()).add(event.channel)
                return self._due()
            case ChannelEnded():
                self.ended.add(event.channel)
                return self._due()
            case CancelReceived():
                if self.is_over(event.checkpoint):
                    return None, set()
                return None, self._end(event.checkpoint) | {int(event.checkpoint)}
            case AbortReceived():
                if self.is_over(event.checkpoint):
                    return None, set()
                if self.seen.pop(event.checkpoint, None) is None:
                    self.aborted.add(event.checkpoint)
                    return None, set()
                self.over.add(event.checkpoint)
                return None, {int(event.checkpoint)}

    def _due(self) -> tuple[int | None, set[int]]:
        full = [c for c, seen in self.seen.items() if seen | self.ended == self.channels]
        if not full:
            return None, set()
        return max(full), self._end(max(full)) - {max(full)}

    def _end(self, checkpoint: int) -> set[int]:
        dropped = {c for c in self.seen if c <= checkpoint}
        self.seen = {c: seen for c, seen in self.seen.items() if c > checkpoint}
        self.newest_over = checkpoint
        return dropped


@pytest.mark.long
@settings(max_examples=300)
@given(st.data(), st.integers(1, 4))
def test_any_legal_history_is_what_the_model_says(data: st.DataObject, channels_count: int) -> None:
    tracker, model = BarrierTracker(channels_count), Model(channels_count)
    newest = dict.fromkeys(range(channels_count), 0)
    taken: list[int] = []
    told: list[int] = []
    for _ in range(data.draw(st.integers(1, 40))):
        live = sorted(model.channels - model.ended)
        if not live:
            break
        kind = data.draw(st.sampled_from(["barrier", "barrier", "barrier", "barrier", "cancel", "abort", "end"]))
        channel = data.draw(st.sampled_from(live))
        event: Event
        if kind == "end":
            event = ChannelEnded(ch(channel))
        elif kind == "abort":
            event = AbortReceived(cp(data.draw(st.integers(1, max(newest.values()) + 2))))
        else:
            newest[channel] += data.draw(st.integers(1, 2))
            checkpoint = cp(newest[channel])
            is_barrier = kind == "barrier"
            event = (
                BarrierReceived(ch(channel), checkpoint, TRACKED)
                if is_barrier
                else CancelReceived(ch(channel), checkpoint)
            )
        snapshot, given_up = model.expects(event)
        effects = tracker.handle(event)
        assert not [e for e in effects if isinstance(e, BlockChannel | UnblockChannels)]
        assert [e.checkpoint for e in effects if isinstance(e, TakeSnapshot)] == ([snapshot] if snapshot else [])
        assert [e.checkpoint for e in effects if isinstance(e, EmitBarrier)] == ([snapshot] if snapshot else [])
        assert {int(e.checkpoint) for e in effects if isinstance(e, EmitCancel)} == given_up
        assert {int(e.checkpoint) for e in effects if isinstance(e, Decline)} <= given_up, "downstream hears of it"
        taken += [snapshot] if snapshot else []
        told += [int(e.checkpoint) for e in effects if isinstance(e, EmitCancel | EmitBarrier)]
        assert taken == sorted(set(taken)), "ids are taken once and rise"
        assert len(told) == len(set(told)), "downstream gets one barrier or one cancel marker of an id, never both"
