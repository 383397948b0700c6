"""All small and many random legal histories of an aligner against four invariants.

Every snapshot id is taken at most once, ids increase; an id this subtask gave up is never snapshotted; the channels
told to block are the channels blocked; some live channel can always be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp

from headgate.protocol.subtasks.alignment import (
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
    TakeSnapshot,
    UnblockChannels,
)


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
