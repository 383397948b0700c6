"""What is recorded about sinks beside the checkpoint log."""

from __future__ import annotations

import json

import pytest

from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.runtime.checkpoints.sink_registry import LostOutput, PipelineIdentities
from headgate.storage.memory import MemoryStorage


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage("registry")


def test_an_identity_is_drawn_once_and_those_before_it_are_known(storage: MemoryStorage) -> None:
    identities = PipelineIdentities(storage, "p")
    assert not identities.exists(0)
    for number in (0, 7, 0, 12):
        identities.draw(number, "home", f"host {number}", number)
        assert identities.exists(number)
    storage.put("p/lives/readme", [b""])
    assert [life.host for life in identities.before(12)] == ["host 0", "host 7"]
    assert identities.before(0) == []
    assert identities.read(12).begun_ms == 12


def test_lost_output_is_recorded_once_told_and_counted(storage: MemoryStorage) -> None:  # CS9
    notes: list[str] = []
    lost = LostOutput(storage, "p")
    lose = lost.losing(lambda: 5, notes.append)
    output = Committable("out", CheckpointId(3), 2, Generation(4), b"")
    for _ in range(2):
        lose(output, "it is gone")
    (path,) = storage.list("p/lost")
    assert json.loads(storage.get(path)) == {
        "sink": "out",
        "checkpoint": 3,
        "subtask": 2,
        "generation": 4,
        "why": "it is gone",
        "wall_ms": 5,
    }
    assert lost.count == 1
    assert len(notes) == 2
    assert notes[0].startswith("LOST: output of checkpoint 3, subtask 2 of sink 'out'")
    assert notes[0].endswith(f"{storage.url}/{path}")


def test_what_former_generations_lost_is_counted(storage: MemoryStorage) -> None:  # CS9
    LostOutput(storage, "p").losing(lambda: 5, lambda line: None)(
        Committable("out", CheckpointId(3), 2, Generation(4), b""), "gone"
    )
    storage.put("p/lost/readme", [b""])
    again = LostOutput(storage, "p")
    assert again.count == 0
    again.look()
    assert again.count == 1
