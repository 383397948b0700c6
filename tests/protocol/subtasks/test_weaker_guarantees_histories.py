"""Random legal histories of a tracker against a naive model, and the invariants that no history may break."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp
from tests.protocol.subtasks.test_weaker_guarantees import TRACKED

from headgate.protocol.subtasks.alignment import (
    AbortReceived,
    BarrierReceived,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    Decline,
    EmitBarrier,
    EmitCancel,
    Event,
    TakeSnapshot,
    UnblockChannels,
)
from headgate.protocol.subtasks.weaker_guarantees import BarrierTracker


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
