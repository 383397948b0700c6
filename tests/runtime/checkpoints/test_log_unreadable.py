"""A driver that cannot read what followed its own entries does not take the pipeline back (R56)."""

from __future__ import annotations

import pytest
from tests.runtime.checkpoints.test_log_takeover import Life, numbers

from headgate.errors import FencedError, StorageError
from headgate.model.ids import Generation
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage("unreadable"))


def damage(storage: FaultyStorage, first: int) -> dict[str, bytes]:
    """Make the entries from ``first`` on unreadable; return what they held."""
    paths = [f"p/log/{sequence:010d}" for sequence in numbers(storage) if sequence >= first]
    sound = {path: storage.get(path) for path in paths}
    for path in paths:
        storage.put(path, [b"torn"])
    return sound


@pytest.mark.parametrize("times", [0, 1, 6])
def test_a_driver_whose_heirs_entries_cannot_be_read_does_not_claim(storage: FaultyStorage, times: int) -> None:  # R56
    sleeper = Life(storage, "sleeper")
    sleeper.complete(2)
    heir = Life(storage, "heir")
    heir.complete(times)
    sound = damage(storage, 4)
    there = numbers(storage)
    with pytest.raises(StorageError, match="perhaps another driver runs pipeline 'p'") as found:
        sleeper.log.claim("sleeper", 0, sleeper.generation)
    assert found.value.is_transient, "the next entry of the heir tells"
    with pytest.raises(StorageError):
        sleeper.log.newer_generation()
    assert numbers(storage) == there
    assert heir.log.newer_generation() is None
    for path, data in sound.items():
        storage.put(path, [data])
    with pytest.raises(FencedError):
        sleeper.log.claim("sleeper", 0, sleeper.generation)
    heir.complete()


def test_a_driver_whose_heirs_entries_were_lost_does_not_claim(storage: FaultyStorage) -> None:  # R56
    sleeper = Life(storage, "sleeper")
    sleeper.complete(2)
    Life(storage, "heir").complete(1)
    for sequence in (4, 5):
        storage.delete(f"p/log/{sequence:010d}")
    with pytest.raises(StorageError, match="the entry is missing"):
        sleeper.log.claim("sleeper", 0, sleeper.generation)


def test_a_driver_whose_own_entry_is_damaged_claims_again_and_recovery_judges_it(storage: FaultyStorage) -> None:
    """Nobody else can have written it (R56)."""
    life = Life(storage, "one")
    life.complete(2)
    damage(storage, 3)
    assert life.log.claim("one", 0, life.generation).next.sequence == 4


def test_one_readable_entry_of_the_heir_tells(storage: FaultyStorage) -> None:  # R40, R56
    sleeper = Life(storage, "sleeper")
    heir = Life(storage, "heir")
    heir.complete(2)
    damage(storage, 4)
    assert sleeper.log.newer_generation() == heir.generation
    with pytest.raises(FencedError):
        sleeper.log.claim("sleeper", 0, sleeper.generation)


def test_an_unreadable_entry_behind_a_claim_of_ones_own_tells_nobody_anything(storage: FaultyStorage) -> None:  # R56
    """The answer of a claim got lost, and the heir's entry behind it cannot be read."""
    life = Life(storage, "one")
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    with pytest.raises(StorageError, match="timed out"):
        life.log.claim("one", 0, life.generation)
    Life(storage, "heir")
    damage(storage, 3)
    with pytest.raises(StorageError, match="another driver"):
        life.log.claim("one", 0, Generation(life.generation + 1))
    life.log._generation = Generation(life.generation + 1)  # as if it had heard of its claim otherwise
    with pytest.raises(StorageError, match="another driver"):
        life.log.newer_generation()
