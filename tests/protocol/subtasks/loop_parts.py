"""What ``loop_world`` is made of: records, what else travels, channels, subtasks, and the checks of a cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headgate.model.ids import CheckpointId
from headgate.model.plan import PlanEdge
from headgate.protocol.loop_prober import Probe
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.subtasks.loops import NO_ROUNDS, RoundProgress


@dataclass(frozen=True, slots=True)
class Record:
    """``trips`` that it may still make over feedback edges, ``made`` so far, and its round in the outermost loop."""

    name: str
    trips: int
    made: int = 0
    round_: int = 0


@dataclass(slots=True)
class State:
    """What a snapshot holds of one subtask."""

    position: int = 0
    born: list[str] = field(default_factory=list)
    died: list[Record] = field(default_factory=list)
    trips: list[str] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    has_fired: bool = False
    is_finished: bool = False
    progress: RoundProgress = NO_ROUNDS
    log: list[Record] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier, or on a feedback channel a sentinel."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel marker."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class End:
    """The end of data."""


Element = Record | Barrier | Cancel | End | Probe


@dataclass(slots=True)
class Channel:
    """A FIFO channel, with all that went through it: where each checkpoint cut it, and what was logged of it."""

    edge: PlanEdge
    queue: deque[Element] = field(default_factory=deque)
    sent: list[Record] = field(default_factory=list)
    taken_count: int = 0
    cut_sent: dict[CheckpointId, int] = field(default_factory=dict)
    cut_taken: dict[CheckpointId, int] = field(default_factory=dict)
    logs: dict[CheckpointId, list[Record]] = field(default_factory=dict)


@dataclass(slots=True)
class LiveSubtask:
    """One subtask, and what a worker would keep for it."""

    live: machine.Subtask
    state: State
    inputs: list[Channel]
    outputs: list[tuple[PlanEdge, list[Channel]]]
    records: list[Record]
    """Sources only: everything there is to read."""
    is_head: bool
    is_in_nest: bool
    replay: deque[Record] = field(default_factory=deque)
    control: deque[machine.Event] = field(default_factory=deque)
    frozen: dict[CheckpointId, State] = field(default_factory=dict)
    writing: set[CheckpointId] = field(default_factory=set)
    is_over: bool = False
    has_reported: bool = False


def check_logs(subtask: LiveSubtask, checkpoint: CheckpointId, logs: list[list[Record]]) -> None:
    """The log of each channel: sent before its sentinel, and not processed before the head's barrier."""
    for channel, log in zip(subtask.inputs, logs, strict=True):
        if channel.edge.is_feedback and checkpoint in channel.cut_sent:
            transit = channel.sent[channel.cut_taken[checkpoint] : channel.cut_sent[checkpoint]]
            assert [r.name for r in log] == [r.name for r in transit]


def check_cut(subtasks: Iterable[LiveSubtask], checkpoint: CheckpointId) -> None:
    """Every channel is cut: nothing was processed that the sender's snapshot does not know to be sent."""
    for subtask in subtasks:
        for channel in subtask.inputs:
            sent, taken = channel.cut_sent[checkpoint], channel.cut_taken[checkpoint]
            assert taken <= sent if channel.edge.is_feedback else taken == sent
