"""What a simulated subtask continues from, as docs/spec/recovery.md and docs/spec/loops.md say."""

from __future__ import annotations

import random

import msgspec
import pytest

from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, StateHandle, SubtaskEntry
from headgate.protocol.subtasks.subtask import RoundProgress
from headgate.sim.disk import Disk
from headgate.sim.faults import Faults
from headgate.sim.restoring import may_move, restored_rounds
from headgate.sim.world import World


def manifest(*closed: int) -> Manifest:
    """A checkpoint whose subtasks have seen the end of these rounds."""
    entries = []
    for index, round_ in enumerate(closed):
        data = msgspec.msgpack.encode({"rounds": (round_, round_, 3)})
        handle = StateHandle(len(data), 0, "", data)
        entries.append(SubtaskEntry(SubtaskId(VertexId("P"), index), handle))
    return Manifest(CheckpointId(1), Generation(1), len(closed), 8, tuple(entries))


@pytest.mark.parametrize(("closed", "expected"), [((1, 1), True), ((1, 2), False), ((-1, -1), True)])
def test_a_checkpoint_in_which_a_round_was_ending_keeps_its_parallelism(  # L36
    closed: tuple[int, ...], expected: bool
) -> None:
    disk = Disk(World(0), Faults(random.Random(0)), lambda event: None)
    assert may_move(manifest(*closed), disk) is expected


def test_rounds_go_on_from_the_first_under_way_and_know_the_highest() -> None:  # L36
    formers = {0: {"rounds": (1, 2, 4)}, 1: {"rounds": (1, 1, 3)}, 2: {}}
    assert restored_rounds(formers) == RoundProgress(closed=1, started=1, highest=4)
