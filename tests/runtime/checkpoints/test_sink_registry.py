"""What is recorded about sinks beside the checkpoint log."""

from __future__ import annotations

import json

import pytest

from headgate.codec.json_files import encode_life
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import ResetOrder, Target, TargetKind
from headgate.runtime.checkpoints.sink_registry import LostOutput, PipelineIdentities, SinkRegistry
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
    assert len(identities.read(12).id) == 32, "16 bytes, drawn at random"
    storage.put("p/lives/0000000012", [encode_life(None)])
    with pytest.raises(CorruptionError, match="expected a life, found none"):
        identities.read(12)


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
    for other in ("readme", "0000000003-out-00002-0000000004.json.bak"):
        storage.put(f"p/lost/{other}", [b""])
    again = LostOutput(storage, "p")
    assert again.count == 0
    again.look()
    assert again.count == 1


def test_targets_are_those_of_all_starts_since_the_last_reset(storage: MemoryStorage) -> None:
    registry = SinkRegistry(storage, "p")
    a, b, again = (Target("out", TargetKind.FILES, place, segments=n) for n, place in enumerate(("a", "b", "a")))
    assert registry.targets() is None
    for life, targets in ((0, (a,)), (0, (a,)), (0, (b,)), (4, (again,))):
        registry.note(life, targets)
    storage.put("p/targets/readme", [b"?"])
    assert len(storage.list("p/targets")) == 4, "the same sinks are noted once"
    assert registry.targets() in ((again, b), (b, again)), "of the same place the last one counts"
    registry.carried_out(4, "0" * 16)
    assert registry.targets() == (again,)


def test_an_order_counts_until_it_is_carried_out_or_withdrawn(storage: MemoryStorage) -> None:  # SO2
    registry = SinkRegistry(storage, "p")
    tokens = ("0123456789abcdef", "fedcba9876543210", "00000000000000ff")
    orders = [ResetOrder(token, (Target("out", TargetKind.NOTHING),), ("aside",)) for token in tokens]
    for order in (*orders, orders[0]):
        registry.give(order)
    storage.put("p/resets/readme", [b"?"])
    assert sorted(registry.orders()) == sorted(tokens)
    assert [registry.order(token) for token in tokens] == orders
    registry.carried_out(1, tokens[0])
    registry.withdraw(tokens[1:2])
    assert registry.orders() == tokens[2:]
    assert [registry.order(token) for token in tokens] == [None, None, orders[2]]
