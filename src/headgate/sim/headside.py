"""What a simulated loop head has beside an ordinary subtask: the replay, the log, and snapshots that wait for it.

As ``runtime.worker.loop_head_runner`` does it. A keyed log is cut by key group, so that it restores at another
parallelism (L19, L20). Counterpart: ``subtaskhost``, which runs the effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from headgate.model.graph import Partitioner
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.key_groups import key_groups_of_subtask
from headgate.protocol.subtasks import subtask as machine
from headgate.sim import history, kinds
from headgate.sim.faults import Fault
from headgate.sim.history import Record
from headgate.sim.kinds import spec_of
from headgate.sim.marks import Mark
from headgate.sim.storemodel import Transaction
from headgate.sim.uploads import Job

if TYPE_CHECKING:
    from headgate.sim.subtaskhost import SubtaskHost

Batch: TypeAlias = tuple[Record, ...]


@dataclass(slots=True)
class Waiting:
    """A frozen state that waits until its log is sealed (L4)."""

    content: dict[str, Any]
    sealed: list[Transaction]
    entries: list[tuple[ChannelIndex, int, Batch]] = field(default_factory=list)


class HeadSide:
    """The log and the replay of one head subtask."""

    def __init__(self, host: SubtaskHost) -> None:
        plan, vertex = host.worker.plan, host.vertex
        self._host = host
        self._name = str(vertex.head.name)
        self._spec = spec_of(vertex.head)
        self._is_outermost = vertex.head.loops == (vertex.head.name,)
        edges = [*vertex.head.inputs, *vertex.head.feedback]
        self._is_keyed = all(edge.partitioner is Partitioner.HASH for edge in edges)
        self._groups = key_groups_of_subtask(host.subtask.index, plan.max_parallelism, plan.parallelism)
        self._waiting: dict[CheckpointId, Waiting] = {}
        self._open: dict[CheckpointId, Waiting] = {}
        self._replay: list[Batch] = []
        self._at_hand: tuple[ChannelIndex, int, Batch] | None = None
        self._expected: CheckpointId | None = None

    # -- replay -------------------------------------------------------------------------------------------------

    @property
    def is_replaying(self) -> bool:
        """Whether the restored log has not been processed to its end: nothing may be read (L17, L18)."""
        return bool(self._replay)

    def restore(self, logs: Mapping[int, Any], *, is_moved: bool) -> None:
        """Continue from the logs of former subtasks, by their index."""
        host = self._host
        if self._is_keyed:
            groups: dict[str, list[Record]] = {}
            for log in logs.values():
                groups.update(log["groups"])
            found = [groups[str(group)] for group in self._groups] if logs else []
        else:
            parallelism = host.worker.plan.parallelism
            mine = [i for i in sorted(logs) if not is_moved or i % parallelism == host.subtask.index]
            found = [batch for i in mine for batch in logs[i]["batches"]]
        self._replay = [tuple(as_record(record) for record in batch) for batch in found if batch]
        if self._replay:
            host.env.marks.reach(Mark.REPLAYED)
            if is_moved:
                host.env.marks.reach(Mark.RESCALED_LOG)

    def replay_next(self) -> None:
        """Process the next part of the restored log."""
        host = self._host
        host.env.faults.crash_point(host.worker, Fault.LOG_CRASH)
        batch = self._replay.pop(0)
        host.env.note(history.Replayed(host.worker.generation, host.subtask))
        host.handle(machine.FeedbackForwarded(self._round_of(batch)))
        host.process(batch)

    # -- feedback -----------------------------------------------------------------------------------------------

    def receive(self, channel: ChannelIndex, position: int, records: Batch) -> None:
        """Take records from a feedback channel."""
        host = self._host
        back = [kinds.came_back(record, self._name) for record in records]
        kept = tuple(record for record in back if not kinds.is_dropped(record, self._name, self._spec))
        if len(kept) < len(back):
            host.env.marks.reach(Mark.ROUND_DROPPED)
        if not kept:
            return
        self._at_hand = (channel, position, kept)
        host.handle(machine.FeedbackReceived(channel))
        self._at_hand = None

    def forward(self) -> None:
        """Process the records at hand."""
        assert self._at_hand is not None
        batch = self._at_hand[2]
        self._host.handle(machine.FeedbackForwarded(self._round_of(batch)))
        self._host.process(batch)

    def _round_of(self, batch: Iterable[Record]) -> int:
        if not self._spec.has_rounds:
            return -1
        return max(kinds.trips(record, self._name) for record in batch)

    # -- throttling ---------------------------------------------------------------------------------------------

    def expect(self, checkpoint: CheckpointId) -> None:
        """A checkpoint was triggered: its barrier must not wait behind throttled input (L25)."""
        self._expected = max(checkpoint, self._expected or checkpoint)

    def is_throttled(self, queued: int) -> bool:
        """Whether regular input waits because ``queued`` feedback elements wait (L25)."""
        is_so = self._expected is None and queued > self._host.env.options.feedback_elements
        if is_so:
            self._host.env.marks.reach(Mark.THROTTLED)
        return is_so

    def is_past(self, checkpoint: CheckpointId) -> None:
        """The head has taken ``checkpoint``, or given it up."""
        if self._expected is not None and checkpoint >= self._expected:
            self._expected = None

    # -- the log ------------------------------------------------------------------------------------------------

    def freeze(self, checkpoint: CheckpointId, content: dict[str, Any], sealed: list[Transaction]) -> None:
        """Keep a frozen state until its log is sealed."""
        self._waiting[checkpoint] = Waiting(content, sealed)

    def open(self, checkpoint: CheckpointId) -> None:
        """Begin a log."""
        self._open[checkpoint] = self._waiting[checkpoint]
        if len(self._open) > 1:
            self._host.env.marks.reach(Mark.TWO_LOGS)
        self._host.env.level(f"{self._host.subtask} open logs", len(self._open), 20)

    def log(self, checkpoints: Sequence[CheckpointId]) -> None:
        """Append the records at hand, as they will be processed (L2)."""
        assert self._at_hand is not None
        for checkpoint in checkpoints:
            self._open[checkpoint].entries.append(self._at_hand)

    def seal(self, checkpoint: CheckpointId) -> Job:
        """End a log; return what is to be written."""
        host, waiting = self._host, self._open.pop(checkpoint)
        del self._waiting[checkpoint]
        inputs = host.worker.plan.inputs(host.subtask)
        entries = tuple((inputs[c].edge.index, inputs[c].upstream.index, at, b) for c, at, b in waiting.entries)
        host.env.note(history.LogSealed(host.worker.generation, host.subtask, checkpoint, entries))
        if entries:
            host.env.marks.reach(Mark.LOGGED)
            host.env.logged.add((host.worker.generation, checkpoint))
            if not self._is_outermost:
                host.env.logged_inside.add((host.worker.generation, checkpoint))
        content = {**waiting.content, "log": self._encoded([batch for _, _, batch in waiting.entries])}
        return Job(checkpoint, msgspec.msgpack.encode(content), waiting.sealed)

    def drop(self, checkpoint: CheckpointId) -> list[Transaction]:
        """Forget a log; return the sealed output, which goes into the next snapshot (L5)."""
        del self._open[checkpoint]
        return self._waiting.pop(checkpoint).sealed

    def _encoded(self, batches: list[Batch]) -> dict[str, Any]:
        if not self._is_keyed:
            return {"batches": batches}
        groups: dict[str, list[Record]] = {str(group): [] for group in self._groups}  # L20: empty ones too
        for batch in batches:
            for record in batch:
                groups[str(self._host.group_of(record))].append(record)
        return {"groups": groups}


def as_record(values: Sequence[Any]) -> Record:
    """Return a record that was decoded from a snapshot."""
    origin, number, key, value, time = values
    return origin, number, key, value, time
