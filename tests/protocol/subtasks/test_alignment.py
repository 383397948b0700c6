"""Every cell of the aligner's table (reference of the rules: docs/spec/alignment.md)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp

from headgate.errors import ProtocolViolation
from headgate.model.config import CheckpointKind, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import STORY_MAX, Ignored, describe
from headgate.protocol.subtasks.alignment import (
    AbortedIds,
    AbortReceived,
    Aligner,
    BarrierReceived,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    Decline,
    Effect,
    EmitBarrier,
    EmitCancel,
    Event,
    Phase,
    TakeSnapshot,
    UnblockChannels,
)


def barrier(channel: int, checkpoint: int) -> BarrierReceived:
    return BarrierReceived(ch(channel), cp(checkpoint))


SAVEPOINT = CheckpointOptions(CheckpointKind.SAVEPOINT, target="s3://bucket/here")


# A11
def test_options_travel_from_the_barrier_to_the_snapshot_and_the_barriers_sent_on() -> None:
    aligner = Aligner(2)
    aligner.handle(BarrierReceived(ch(0), cp(1), SAVEPOINT))
    assert aligner.handle(BarrierReceived(ch(1), cp(1), SAVEPOINT))[:2] == [
        TakeSnapshot(cp(1), SAVEPOINT),
        EmitBarrier(cp(1), SAVEPOINT),
    ]
    aligner.handle(barrier(0, 2))
    assert aligner.handle(barrier(1, 2))[:2] == [TakeSnapshot(cp(2)), EmitBarrier(cp(2))], "they are not kept"


# A11
def test_barriers_of_one_checkpoint_with_other_options_are_a_violation() -> None:
    aligner = Aligner(2)
    aligner.handle(BarrierReceived(ch(0), cp(1), SAVEPOINT))
    with pytest.raises(ProtocolViolation, match="a barrier of 1 wants"):
        aligner.handle(barrier(1, 1))


def cancel(channel: int, checkpoint: int) -> CancelReceived:
    return CancelReceived(ch(channel), cp(checkpoint))


def abort(checkpoint: int) -> AbortReceived:
    return AbortReceived(cp(checkpoint))


def ended(channel: int) -> ChannelEnded:
    return ChannelEnded(ch(channel))


def unblocked(*channels: int) -> UnblockChannels:
    return UnblockChannels(tuple(ch(c) for c in channels))


def after(channels_count: int, *events: Event) -> Aligner:
    aligner = Aligner(channels_count)
    for event in events:
        aligner.handle(event)
    return aligner


OVERTAKEN = AbortReason.OVERTAKEN
UPSTREAM = AbortReason.CANCELLED_UPSTREAM

# -- while flowing ------------------------------------------------------------------------------------------------


def test_first_barrier_blocks_its_channel() -> None:  # A1
    aligner = after(2)
    assert aligner.handle(barrier(0, 1)) == [BlockChannel(ch(0))]
    assert (aligner.phase, aligner.current, aligner.blocked) == (Phase.ALIGNING, 1, {0})


def test_barrier_of_a_finished_checkpoint_is_ignored() -> None:  # A3
    aligner = after(3, barrier(0, 1), ended(1), cancel(0, 1))
    assert aligner.handle(barrier(2, 1)) == [Ignored("barrier of a finished checkpoint")]
    assert not aligner.blocked


def test_barrier_of_an_older_checkpoint_is_ignored_while_flowing() -> None:  # A3
    aligner = after(2, barrier(0, 5), barrier(1, 5))
    assert aligner.handle(barrier(0, 4)) == [Ignored("barrier of an older checkpoint")]


def test_cancel_of_a_finished_checkpoint_is_ignored() -> None:  # A5
    aligner = after(2, barrier(0, 1), barrier(1, 1))
    assert aligner.handle(cancel(0, 1)) == [Ignored("cancel marker of a finished checkpoint")]


def test_cancel_of_a_newer_checkpoint_while_flowing_is_forwarded_and_declined() -> None:  # A6
    aligner = after(2)
    assert aligner.handle(cancel(0, 3)) == [EmitCancel(cp(3)), Decline(cp(3), UPSTREAM)]
    assert aligner.handle(barrier(1, 3)) == [Ignored("barrier of a finished checkpoint")]


def test_cancel_of_an_older_checkpoint_is_ignored_while_flowing() -> None:  # A5
    aligner = after(2, barrier(0, 5), barrier(1, 5))
    assert aligner.handle(cancel(0, 4)) == [Ignored("cancel marker of an older checkpoint")]


def test_channel_that_ends_while_flowing_counts_as_aligned_later() -> None:  # A7
    aligner = after(2)
    assert aligner.handle(ended(1)) == [Ignored("an ended channel counts as aligned")]
    assert aligner.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]


# -- while aligning -----------------------------------------------------------------------------------------------


def test_last_barrier_snapshots_then_emits_then_unblocks() -> None:  # A2
    aligner = after(3, barrier(2, 1), barrier(0, 1))
    assert aligner.handle(barrier(1, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), unblocked(0, 2)]
    assert (aligner.phase, aligner.blocked) == (Phase.FLOWING, frozenset())


def test_second_barrier_on_a_blocked_channel_is_a_violation() -> None:  # A10
    aligner = after(2, barrier(0, 1))
    with pytest.raises(ProtocolViolation, match="second barrier of 1 on channel 0"):
        aligner.handle(barrier(0, 1))


def test_newer_barrier_abandons_the_current_checkpoint_and_starts_the_next() -> None:  # A4
    aligner = after(3, barrier(0, 1), barrier(1, 1))
    assert aligner.handle(barrier(2, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        unblocked(0, 1),
        BlockChannel(ch(2)),
    ]
    assert aligner.blocked == {2}


def test_newer_barrier_on_the_only_live_channel_abandons_and_completes() -> None:  # A2, A4
    aligner = after(3, barrier(0, 1), ended(1), ended(0))
    assert aligner.handle(barrier(2, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        TakeSnapshot(cp(2)),
        EmitBarrier(cp(2)),
    ]


def test_barrier_of_an_older_checkpoint_is_ignored_while_aligning() -> None:  # A3
    aligner = after(2, barrier(0, 5))
    assert aligner.handle(barrier(1, 4)) == [Ignored("barrier of an older checkpoint")]
    assert aligner.blocked == {0}


def test_cancel_of_the_current_checkpoint_unblocks_declines_and_is_forwarded_once() -> None:  # A5
    aligner = after(3, barrier(0, 1))
    assert aligner.handle(cancel(1, 1)) == [EmitCancel(cp(1)), Decline(cp(1), UPSTREAM), unblocked(0)]
    assert aligner.handle(cancel(2, 1)) == [Ignored("cancel marker of a finished checkpoint")]


def test_cancel_of_a_newer_checkpoint_abandons_the_current_one_too() -> None:  # A6
    aligner = after(2, barrier(0, 1))
    assert aligner.handle(cancel(1, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        unblocked(0),
        EmitCancel(cp(2)),
        Decline(cp(2), UPSTREAM),
    ]
    assert aligner.handle(barrier(0, 2)) == [Ignored("barrier of a finished checkpoint")]


def test_cancel_of_an_older_checkpoint_is_ignored_while_aligning() -> None:  # A5
    aligner = after(2, barrier(0, 5))
    assert aligner.handle(cancel(1, 4)) == [Ignored("cancel marker of an older checkpoint")]
    assert aligner.blocked == {0}


def test_last_missing_channel_that_ends_completes() -> None:  # A7
    aligner = after(2, barrier(0, 1))
    assert aligner.handle(ended(1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), unblocked(0)]


def test_channel_that_ends_while_others_are_missing_does_not_complete() -> None:  # A7
    aligner = after(3, barrier(0, 1))
    assert aligner.handle(ended(1)) == [Ignored("an ended channel counts as aligned")]
    assert aligner.handle(barrier(2, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), unblocked(0)]


@pytest.mark.parametrize("event", [barrier(0, 1), barrier(0, 9), cancel(0, 1), ended(0)], ids=repr)
@pytest.mark.parametrize("is_aligning", [False, True])
def test_any_event_on_an_ended_channel_is_a_violation(event: Event, is_aligning: bool) -> None:  # A10
    aligner = after(3, *([barrier(1, 1)] if is_aligning else []), ended(0))
    with pytest.raises(ProtocolViolation, match="channel 0, which has ended"):
        aligner.handle(event)


# -- one channel --------------------------------------------------------------------------------------------------


def test_single_channel_completes_at_once_and_never_blocks() -> None:  # A2
    aligner = after(1)
    assert aligner.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]
    assert aligner.handle(barrier(0, 1)) == [Ignored("barrier of a finished checkpoint")]
    assert aligner.handle(cancel(0, 2)) == [EmitCancel(cp(2)), Decline(cp(2), UPSTREAM)]


# -- aborts by the coordinator ------------------------------------------------------------------------------------


def test_barrier_of_an_aborted_checkpoint_becomes_a_cancel_marker() -> None:  # A8
    aligner = after(2)
    assert aligner.handle(abort(1)) == [Ignored("abort remembered until the barrier comes")]
    assert aligner.handle(barrier(0, 1)) == [EmitCancel(cp(1))]
    assert aligner.handle(barrier(1, 1)) == [Ignored("barrier of a finished checkpoint")]


def test_barrier_of_an_aborted_checkpoint_still_abandons_an_older_one() -> None:  # A4, A8
    aligner = after(2, barrier(0, 1), abort(2))
    assert aligner.handle(barrier(1, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        unblocked(0),
        EmitCancel(cp(2)),
    ]


def test_cancel_of_an_aborted_checkpoint_is_forwarded_without_a_decline() -> None:  # A8
    assert after(2, abort(1)).handle(cancel(0, 1)) == [EmitCancel(cp(1))]


def test_abort_of_the_checkpoint_being_aligned_releases_without_a_decline() -> None:  # A9
    aligner = after(2, barrier(0, 1))
    assert aligner.handle(abort(1)) == [EmitCancel(cp(1)), unblocked(0)]
    assert aligner.handle(barrier(1, 1)) == [Ignored("barrier of a finished checkpoint")]


def test_abort_of_an_older_checkpoint_changes_nothing() -> None:  # A9
    aligner = after(2, barrier(0, 5))
    assert aligner.handle(abort(4)) == [Ignored("abort of an older checkpoint")]
    assert aligner.blocked == {0}


def test_abort_of_a_finished_checkpoint_changes_nothing() -> None:  # A9
    aligner = after(1, barrier(0, 1))
    assert aligner.handle(abort(1)) == [Ignored("abort of a checkpoint that this subtask has finished")]


def test_remembered_aborts_are_bounded_and_the_oldest_is_forgotten() -> None:  # A8
    count = AbortedIds.COUNT_MAX + 1
    aligner = after(1, *(abort(i) for i in range(1, count + 1)))
    assert aligner.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]
    assert aligner.handle(barrier(0, 2)) == [EmitCancel(cp(2))]
    assert aligner.handle(barrier(0, count)) == [EmitCancel(cp(count))]


# -- what every machine does --------------------------------------------------------------------------------------


def test_a_machine_that_broke_a_rule_stays_dead_and_tells_its_story() -> None:  # A10
    aligner = after(2, barrier(0, 1))
    with pytest.raises(ProtocolViolation) as first:
        aligner.handle(barrier(0, 1))
    with pytest.raises(ProtocolViolation) as second:
        aligner.handle(barrier(1, 1))
    assert second.value is first.value
    assert first.value.machine == "Aligner"
    assert first.value.story == (describe(barrier(0, 1)), describe(barrier(0, 1)))


def test_the_story_is_bounded() -> None:
    aligner = after(1, *(barrier(0, i) for i in range(1, STORY_MAX + 10)))
    assert len(aligner.story) == STORY_MAX
    assert aligner.story[-1] == describe(barrier(0, STORY_MAX + 9))


def test_aborted_ids_are_forgotten_once_they_are_met() -> None:
    aborted = AbortedIds()
    for number in (1, 2, 3, 5):
        aborted.add(cp(number))
    assert [aborted.discard_up_to(cp(number)) for number in (2, 2)] == [True, False]
    assert list(aborted) == [3, 5]
    assert [aborted.discard(cp(number)) for number in (3, 3, 4)] == [True, False, False]
    assert aborted.discard_up_to(cp(4)) is False
    assert list(aborted) == [5]


class Observer:
    """Follows the effects of one aligner as its interpreter would, and checks the invariants."""

    def __init__(self, channels_count: int) -> None:
        self.aligner = Aligner(channels_count)
        self.live = set(range(channels_count))
        self.blocked: set[int] = set()
        self.snapshots: list[int] = []
        self.given_up: set[int] = set()
        self.markers: list[int] = []
        self.barriers: list[int] = []

    @property
    def readable(self) -> list[int]:
        return sorted(self.live - self.blocked)

    def feed(self, event: Event) -> list[Effect]:
        effects = self.aligner.handle(event)
        if isinstance(event, ChannelEnded):
            self.live.discard(event.channel)
        for effect in effects:
            self._follow(effect)
        self._check()
        return effects

    def _follow(self, effect: Effect) -> None:
        match effect:
            case BlockChannel():
                assert effect.channel not in self.blocked
                self.blocked.add(effect.channel)
            case UnblockChannels():
                assert set(effect.channels) == self.blocked, "all that is blocked, and nothing else"
                self.blocked.clear()
            case TakeSnapshot():
                assert effect.checkpoint not in self.given_up
                assert not self.snapshots or effect.checkpoint > self.snapshots[-1]
                self.snapshots.append(effect.checkpoint)
            case EmitBarrier():
                assert effect.checkpoint == self.snapshots[-1], "the snapshot belongs in front of the barrier"
                self.barriers.append(effect.checkpoint)
            case EmitCancel():
                self.markers.append(effect.checkpoint)
                self.given_up.add(effect.checkpoint)
            case Decline():
                assert effect.checkpoint in self.given_up, "downstream hears of it first"

    def _check(self) -> None:
        assert self.aligner.blocked == {ch(c) for c in self.blocked}
        assert not self.live or self.readable, "not all live channels are blocked"
        assert self.barriers == self.snapshots
        sent = self.barriers + self.markers
        assert len(sent) == len(set(sent)), "downstream gets one barrier or one cancel marker of an id, never both"


def event_of(channel: int, item: tuple[str, int]) -> Event:
    kind, checkpoint = item
    return (BarrierReceived if kind == "barrier" else CancelReceived)(ch(channel), cp(checkpoint))


def merges(queues: Sequence[tuple[Event, ...]]) -> Iterator[tuple[Event, ...]]:
    """Yield every way to interleave ``queues`` that keeps the order within each."""
    if not any(queues):
        yield ()
        return
    for index, queue in enumerate(queues):
        if queue:
            rest = [*queues[:index], queue[1:], *queues[index + 1 :]]
            for tail in merges(rest):
                yield (queue[0], *tail)


def run_honouring_blocks(order: Sequence[Event], channels_count: int) -> Observer:
    """Feed ``order``; what comes on a blocked channel waits, in order, until it may be read."""
    observer = Observer(channels_count)
    waiting: list[Event] = list(order)
    while waiting:
        index = next(i for i, event in enumerate(waiting) if _channel(event) not in observer.blocked)
        observer.feed(waiting.pop(index))
    return observer


def _channel(event: Event) -> int | None:
    return None if isinstance(event, AbortReceived) else int(event.channel)


@pytest.mark.long
def test_every_interleaving_of_two_channels_two_checkpoints_and_one_cancel_or_abort() -> None:
    one, two = ("barrier", 1), ("barrier", 2)
    per_channel = [
        [(one, two), (one, two)],
        [(("cancel", 1), two), (one, two)],
        [(("cancel", 1), two), (("cancel", 1), two)],
        [(one, ("cancel", 2)), (one, two)],
        [(one, ("cancel", 2)), (one, ("cancel", 2))],
        [(("cancel", 2),), (one, two)],
    ]
    histories_count = 0
    for items in per_channel:
        for end, aborted in itertools.product(range(4), (None, 1, 2)):
            queues = [tuple(event_of(c, item) for item in items[c]) for c in (0, 1)]
            queues = [q + ((ChannelEnded(ch(c)),) if end >> c & 1 else ()) for c, q in enumerate(queues)]
            queues.append(() if aborted is None else (AbortReceived(cp(aborted)),))
            cancelled = {c for kind, c in items[0] + items[1] if kind == "cancel"}
            for order in merges(queues):
                histories_count += 1
                observer = run_honouring_blocks(order, 2)
                assert not observer.blocked, "every channel has delivered everything: nobody waits"
                assert not set(observer.snapshots) & cancelled, "a cancelled checkpoint is never snapshotted"
                told = set(observer.snapshots) | observer.given_up
                assert 2 in told, "downstream hears of the newest checkpoint: its barrier or its cancel marker"
                if not cancelled and aborted is None:
                    assert 2 in observer.snapshots
    assert histories_count > 2_000


@pytest.mark.long
@settings(max_examples=150)
@given(st.data(), st.integers(1, 4))
def test_any_legal_history_keeps_the_rules(data: st.DataObject, channels_count: int) -> None:
    observer = Observer(channels_count)
    newest_on = dict.fromkeys(range(channels_count), 0)
    cancelled: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        if not observer.readable:
            break
        kinds = st.sampled_from(["barrier", "barrier", "barrier", "cancel", "abort", "end"])
        kind = data.draw(kinds)
        channel = data.draw(st.sampled_from(observer.readable))
        if kind == "end":
            observer.feed(ChannelEnded(ch(channel)))
            continue
        if kind == "abort":
            checkpoint = data.draw(st.integers(1, max(newest_on.values()) + 2))
            observer.feed(AbortReceived(cp(checkpoint)))
            continue
        checkpoint = newest_on[channel] = newest_on[channel] + data.draw(st.integers(1, 2))
        if kind == "cancel":
            if checkpoint not in observer.snapshots:
                cancelled.add(checkpoint)
            observer.feed(CancelReceived(ch(channel), cp(checkpoint)))
        else:
            observer.feed(BarrierReceived(ch(channel), cp(checkpoint)))
        assert not set(observer.snapshots) & cancelled
