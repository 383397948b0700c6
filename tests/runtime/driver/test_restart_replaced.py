"""A driver that is replaced while it begins a generation, and other failures there (C35, C12)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.runtime.checkpoints.writing import write_snapshot
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

import headgate as hg
from headgate.errors import FencedError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest, SubtaskEntry
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import coordinator_events
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart
from headgate.runtime.driver.coordinator_host import CoordinatorHost, Pools
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.storage.memory import MemoryStorage


class Place:
    """One pipeline in a storage, and drivers that begin generations of it."""

    def __init__(self, root: Path) -> None:
        pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(interval=None, dir=root))
        pipeline.source(hg.FromRows([{"id": 1}])).sink(hg.Discard(), name="out")
        self.definition: PipelineDefinition = pipeline.definition()
        self.storage = FaultyStorage(MemoryStorage())
        self.notes: list[str] = []

    def begin(self, owner: str) -> tuple[CheckpointLog, NewGeneration]:
        log = CheckpointLog(self.storage, "p")
        found = begin_generation(self.definition, log, owner, self.notes.append)
        assert isinstance(found, NewGeneration)
        return log, found

    def complete(self, log: CheckpointLog, generation: int, checkpoint: int, *, retained: int = 1) -> Manifest:
        """Complete a checkpoint, then drop what is not retained."""
        here, oldest = CheckpointId(checkpoint), CheckpointId(checkpoint - retained + 1)
        subtasks = self.definition.plan.subtasks()
        entries = tuple(
            SubtaskEntry(s, (write_snapshot(self.storage, "p", s, here, Generation(generation), [b"state"], 0),))
            for s in subtasks
        )
        texts, groups = self.definition.plan.state_texts(), self.definition.plan.max_parallelism
        made = Manifest(here, Generation(generation), 1, groups, entries, state_texts=texts)
        log.append(made, oldest)
        log.drop(CheckpointId(oldest - 1), oldest)
        return made

    def files(self) -> list[str]:
        return [path for path in self.storage.list("p") if "/chk-" in path]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))


@pytest.mark.parametrize("times", [1, 2, 6])
def test_a_driver_replaced_between_its_claim_and_its_choice_does_not_report_damage(tmp_path: Path, times: int) -> None:
    """Its heir has dropped what it reads, and pruned the claim that replaced it."""
    place = Place(tmp_path)
    first, _ = place.begin("first")
    place.complete(first, 1, 1)

    def take_over(_: float) -> None:
        heir, found = place.begin("heir")
        for checkpoint in range(2, 2 + times):
            place.complete(heir, found.generation, checkpoint)

    place.storage._wait = take_over
    place.storage.inject(Fault(FaultKind.SLOW, operation="get_range", path_part="/chk-"))
    with pytest.raises(FencedError) as fenced:
        place.begin("sleeper")
    assert (fenced.value.mine, fenced.value.newest) == (2, 3)
    assert not [note for note in place.notes if "cannot be used" in note]


def test_a_damaged_newer_checkpoint_is_not_retained(tmp_path: Path) -> None:  # C35
    """Else it would push a sound one out, and the newest of them would be what nobody can restore."""
    place = Place(tmp_path)
    log, found = place.begin("first")
    place.complete(log, found.generation, 1, retained=2)
    damaged = place.complete(log, found.generation, 2, retained=2)
    place.storage.put(f"p/{damaged.entries[0].parts[0].path}", [b"garbage"])
    log, found = place.begin("second")
    assert found.retained == (1,)
    assert found.first_checkpoint == 3
    place.complete(log, found.generation, 3, retained=3)
    _, found = place.begin("third")
    assert found.retained == (1, 3)


def test_what_cannot_be_swept_now_is_left_and_noted(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.storage.put("p/chk-0000000001/out-0.g1", [b"left"])
    log = CheckpointLog(place.storage, "p")
    log.reserve(CheckpointId(5))
    place.storage.inject(Fault(FaultKind.IO_ERROR, operation="delete", path_part="/chk-", times=99))
    _, found = place.begin("first")
    assert found.first_checkpoint == 6
    assert "could not remove old checkpoint files" in place.notes[-1]
    place.storage.heal()
    place.begin("second")
    assert place.files() == []


# -- an unexpected error ----------------------------------------------------------------------------------------------


class AtOnce:
    """A pool that runs in the calling thread."""

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)


class Around:
    """What a coordination needs from its driver."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def post(self, call: Callable[[], None]) -> None:
        call()

    def generation_failed(self, effect: coordinator_events.FailGeneration) -> None:
        self.failed.append(effect.failure.reason)

    def monotonic_ms(self) -> int:
        return 0

    def wall_ms(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_an_unexpected_error_while_a_manifest_is_written_leaves_its_outcome_open(tmp_path: Path) -> None:  # C12
    """It may have taken effect: nothing may be deleted, and the next generation reads what is there."""
    place = Place(tmp_path)
    log, begun = place.begin("first")
    around = Around()
    all_parts, at_once = cast(Any, around), cast(Any, AtOnce())
    pools = Pools(at_once, at_once, at_once)
    coordination = CoordinatorHost(place.definition, begun, log, all_parts, all_parts, all_parts, pools, all_parts)
    real = log.append

    def break_behind(*args: Any) -> None:
        real(*args)
        raise MemoryError("while the answer was read")

    log.append = break_behind  # type: ignore[method-assign,assignment]
    coordination.start(1)
    coordination.handle(coordinator_events.CheckpointRequested())
    one = CheckpointId(1)
    for subtask in place.definition.plan.subtasks():
        handle = write_snapshot(place.storage, "p", subtask, one, begun.generation, [b"state"], 0)
        coordination.handle(coordinator_events.Acknowledged(begun.generation, one, SubtaskEntry(subtask, (handle,))))
    assert around.failed == ["it is not known whether the manifest of checkpoint 1 was written"]
    assert len(place.files()) == len(place.definition.plan.subtasks())
    _, found = place.begin("second")
    assert found.restored is not None
    assert found.restored.checkpoint == 1
