"""A driver that slept through its replacement: what it appends or claims means nothing (X8, X9)."""

from __future__ import annotations

import pytest

from headgate.errors import FencedError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim, Manifest
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage


def log(storage: Storage) -> CheckpointLog:
    return CheckpointLog(storage, "p")


def memory() -> Storage:
    return MemoryStorage("log-fencing")


def manifest(checkpoint: int, generation: int) -> Manifest:
    return Manifest(CheckpointId(checkpoint), Generation(generation), 1, 128, ())


def replaced_and_pruned(storage: Storage) -> CheckpointLog:
    """Return the log of a driver whose next number was used by its replacement, and pruned."""
    old, new = log(storage), log(storage)
    old.claim("old", 1)
    assert old.append(manifest(1, 1)) is Outcome.WRITTEN
    new.claim("new", 2)
    for checkpoint in (2, 3):
        assert new.append(manifest(checkpoint, 2), CheckpointId(checkpoint)) is Outcome.WRITTEN
    new.drop(CheckpointId(1), CheckpointId(2))
    new.drop(CheckpointId(2), CheckpointId(3))
    return old


def test_a_manifest_at_a_pruned_number_is_taken_back() -> None:  # X8
    storage = memory()
    old = replaced_and_pruned(storage)
    before = log(storage).observe()
    with pytest.raises(FencedError) as error:
        old.append(manifest(9, 1))
    assert error.value.newest == 2
    assert log(storage).observe() == before


def test_a_replaced_driver_does_not_claim_again() -> None:  # X9
    storage = memory()
    first, second = log(storage), log(storage)
    mine = first.claim("first", 1).next.generation
    second.claim("second", 2)
    with pytest.raises(FencedError):
        first.claim("first", 3, mine)


def test_a_driver_claims_again_after_claims_of_its_own() -> None:
    storage = memory()
    mine = log(storage).claim("first", 1).next.generation
    orphaned = log(storage).claim("first", 2).next.generation
    again = log(storage).claim("first", 3, mine)
    assert again.next.generation > orphaned > mine
    assert all(isinstance(entry.content, Claim) for entry in again.log.entries)
