"""What a checkpoint costs the coordinator grows with the number of subtasks, not with its square (C64)."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from tests.protocol.checkpoints.coordinating import GENERATION, INTERVAL, STARTED, after, handle_of, reserved, written
from tests.protocol.making import committable, cp

from headgate.model.config import CheckpointConfig
from headgate.model.ids import SubtaskId, VertexId
from headgate.model.manifest import Copied, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import Acknowledged, FinishReported
from headgate.protocol.checkpoints.pending import Pending, PendingCheckpoints


class Counted(SubtaskId):
    """A subtask that counts how often some set or mapping looks for it."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


def subtasks_of(count: int) -> tuple[Counted, ...]:
    return tuple(Counted(VertexId("v"), index) for index in range(count))


def acks_of(subtasks: tuple[Counted, ...], checkpoint: int) -> list[Acknowledged]:
    entries = [SubtaskEntry(subtask, handle_of(subtask, checkpoint)) for subtask in subtasks]
    return [Acknowledged(GENERATION, cp(checkpoint), entry) for entry in entries]


def looks_of_a_run(count: int) -> int:
    """Return the looks at ``count`` subtasks over a checkpoint, the end of all input, and the final checkpoint."""
    subtasks = subtasks_of(count)
    machine = after(Coordinator(GENERATION, subtasks, CheckpointConfig(), cp(1)), STARTED)
    Counted.looks = 0
    after(machine, INTERVAL, reserved(1), *acks_of(subtasks, 1), written(1))
    after(machine, *(FinishReported(GENERATION, subtask) for subtask in subtasks))
    after(machine, reserved(2), *acks_of(subtasks, 2), written(2))
    assert machine.last_completed == 2
    return Counted.looks


def test_ten_times_the_subtasks_are_ten_times_the_looks() -> None:  # C64
    assert looks_of_a_run(100) <= 10 * looks_of_a_run(10)


def test_what_is_not_committed_yet_is_not_looked_through_with_every_acknowledgement() -> None:  # C64
    subtasks, looks = subtasks_of(50), []
    machine = after(Coordinator(GENERATION, subtasks, CheckpointConfig(), cp(1)), STARTED)
    first, *others = acks_of(subtasks, 1)
    output = SubtaskEntry(subtasks[0], first.entry.parts, (committable(1),))
    after(machine, INTERVAL, reserved(1), Acknowledged(GENERATION, cp(1), output), *others, written(1))

    unconfirmed = CommitQueue.unconfirmed.fget
    assert unconfirmed is not None

    def counted(queue: CommitQueue) -> object:
        looks.append(queue)
        return unconfirmed(queue)

    with patch.object(CommitQueue, "unconfirmed", property(counted)):
        after(machine, INTERVAL, reserved(2), *acks_of(subtasks, 2))
    assert len(looks) == 1, "once, for the manifest that carries it"


def test_only_participants_acknowledge_and_once() -> None:
    known, stranger = subtasks_of(2)[0], SubtaskId(VertexId("w"), 0)
    pending = PendingCheckpoints((known,))
    pending.begin(cp(1), Pending(is_final=False, is_last=False, is_draining=False))
    entry = SubtaskEntry(known, ())
    assert pending.acknowledge(cp(1), entry, Copied())
    assert not pending.acknowledge(cp(1), entry, Copied())
    assert not pending.acknowledge(cp(1), SubtaskEntry(known, ()), Copied())
    with pytest.raises(AssertionError, match="participants acknowledge"):
        pending.acknowledge(cp(1), SubtaskEntry(stranger, ()), Copied())
