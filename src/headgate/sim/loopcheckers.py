"""Checkers of loops: what a log holds, when it is replayed, when rounds and loops are over (L1–L37).

They know channels, positions and records, as an observer of the network does, and nothing of the machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId
from headgate.model.plan import Plan
from headgate.sim import history, kinds
from headgate.sim.history import HistoryEvent, Record
from headgate.sim.kinds import Spec, spec_of
from headgate.sim.world import Violation


@dataclass(slots=True)
class _Traffic:
    """What went over one feedback channel of one generation."""

    records: dict[int, tuple[Record, ...]] = field(default_factory=dict)
    sentinels: dict[CheckpointId, int] = field(default_factory=dict)
    read: int = 0


class LogHoldsWhatCirculated:
    """L1–L4, L11: a log is exactly what was sent before the sentinel and read after the barrier, channel by channel."""

    def __init__(self, plan: Plan) -> None:
        self._heads: dict[str, Spec] = {str(v.head.name): spec_of(v.head) for v in plan.vertices if v.is_loop_head}
        self._traffic: dict[Generation, dict[history.FeedbackChannel, _Traffic]] = {}
        self._edges = {edge.index: str(edge.target) for edge in plan.edges if edge.is_feedback}
        self._begun: dict[tuple[Generation, SubtaskId, CheckpointId], dict[history.FeedbackChannel, int]] = {}

    def observe(self, event: HistoryEvent) -> None:
        """Follow the channels; judge logs."""
        match event:
            case history.FeedbackSent():
                traffic = self._of(event.generation, event.channel)
                if event.records:
                    traffic.records[event.position] = event.records
                if event.sentinel is not None:
                    traffic.sentinels[event.sentinel] = event.position
            case history.FeedbackRead():
                self._of(event.generation, event.channel).read = event.position
            case history.BarrierPassed() if event.is_barrier and str(event.subtask.vertex) in self._heads:
                mine = self._channels(event.generation, event.subtask)
                begun = {channel: traffic.read for channel, traffic in mine.items()}
                self._begun[event.generation, event.subtask, event.checkpoint] = begun
                self._refuse_overtaking(event, mine)
            case history.LogSealed():
                self._judge(event)
            case _:
                pass

    def _of(self, generation: Generation, channel: history.FeedbackChannel) -> _Traffic:
        return self._traffic.setdefault(generation, {}).setdefault(channel, _Traffic())

    def _channels(self, generation: Generation, head: SubtaskId) -> dict[history.FeedbackChannel, _Traffic]:
        everything = self._traffic.get(generation, {})
        return {c: t for c, t in everything.items() if self._edges[c[0]] == head.vertex and c[2] == head.index}

    def _refuse_overtaking(self, event: history.BarrierPassed, mine: dict[history.FeedbackChannel, _Traffic]) -> None:
        """L6: what is behind a sentinel must not be processed in front of the barrier."""
        for channel, traffic in mine.items():
            sentinel = traffic.sentinels.get(event.checkpoint)
            if sentinel is not None and any(sentinel < at <= traffic.read for at in traffic.records):
                where = f"behind sentinel {event.checkpoint} on channel {channel}"
                raise Violation("L6", f"{event.subtask} read what is {where} before it passed the barrier")

    def _judge(self, event: history.LogSealed) -> None:
        head, who = str(event.subtask.vertex), f"the log of {event.checkpoint} at {event.subtask}"
        begun = self._begun[event.generation, event.subtask, event.checkpoint]
        logged = {(edge, sender, position): records for edge, sender, position, records in event.entries}
        if len(logged) < len(event.entries):
            raise Violation("L2", f"{who} holds something twice")
        for channel, traffic in self._channels(event.generation, event.subtask).items():
            if event.checkpoint not in traffic.sentinels:
                raise Violation("L4", f"{who} was sealed before the sentinel was sent on channel {channel}")
            end = traffic.sentinels[event.checkpoint]
            for position, records in traffic.records.items():
                kept = self._kept(head, records)
                expected = kept if begun.get(channel, 0) < position < end else ()
                found = logged.pop((channel[0], channel[1], position), ())
                if found != expected:
                    where = f"position {position} of channel {channel}"
                    raise Violation("L1", f"{who} has {len(found)} records of {where}, {len(expected)} circulated")
        if logged:
            raise Violation("L1", f"{who} holds what nobody sent: {sorted(logged)[:3]}")

    def _kept(self, head: str, records: tuple[Record, ...]) -> tuple[Record, ...]:
        back = [kinds.came_back(record, head) for record in records]
        return tuple(record for record in back if not kinds.is_dropped(record, head, self._heads[head]))

    def at_end(self) -> None:
        """Nothing to add."""


class ReplayFirst:
    """L17, L18: a head that has read anything, or taken a snapshot, replays nothing any more."""

    def __init__(self) -> None:
        self._busy: dict[tuple[Generation, SubtaskId], str] = {}

    def observe(self, event: HistoryEvent) -> None:
        """Watch heads."""
        match event:
            case history.InputRead():
                self._busy[event.generation, event.subtask] = "read new input"
            case history.BarrierPassed() if event.is_barrier:
                self._busy[event.generation, event.subtask] = "passed a barrier"
            case history.Replayed():
                done = self._busy.get((event.generation, event.subtask))
                if done is not None:
                    raise Violation("L17", f"{event.subtask} replays its log after it has {done}")
            case _:
                pass

    def at_end(self) -> None:
        """Nothing to add."""


class RoundsInOrder:
    """L35: within a generation rounds end one after another; a nest ends once, with nothing left to read."""

    def __init__(self, plan: Plan) -> None:
        self._nests = {edge.index: edge.nest for edge in plan.edges if edge.is_feedback}
        self._rounds: dict[tuple[Generation, NodeName], int] = {}
        self._ended: set[tuple[Generation, NodeName]] = set()
        self._unread: dict[tuple[Generation, NodeName | None], int] = {}

    def observe(self, event: HistoryEvent) -> None:
        """Follow rounds, and how much is under way on feedback channels."""
        match event:
            case history.RoundFinished():
                key = (event.generation, event.nest)
                before = self._rounds.get(key, event.round_ - 1)
                if event.round_ != before + 1:
                    raise Violation("L35", f"round {event.round_} of {event.nest} ended after round {before}")
                self._rounds[key] = event.round_
            case history.FeedbackSent() if event.records:
                where = (event.generation, self._nests[event.channel[0]])
                self._unread[where] = self._unread.get(where, 0) + 1
                if where in self._ended:
                    raise Violation("L29", f"records circulate in {where[1]} after it was found empty")
            case history.FeedbackRead() if event.is_records:
                self._unread[event.generation, self._nests[event.channel[0]]] -= 1
            case history.LoopFoundEmpty():
                if (event.generation, event.nest) in self._ended:
                    raise Violation("L29", f"{event.nest} ended twice")
                if self._unread.get((event.generation, event.nest), 0):
                    raise Violation("L34", f"{event.nest} was found empty while records were on their way back")
                self._ended.add((event.generation, event.nest))
            case _:
                pass

    def at_end(self) -> None:
        """Nothing to add."""
