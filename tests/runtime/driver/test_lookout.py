"""What a standby sees of a pipeline (docs/spec/standby.md)."""

from __future__ import annotations

import pytest

from headgate.codec.json_files import beat_path, encode_beat, end_path
from headgate.errors import StorageError
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.protocol.supervision.standby import Observed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.liveness import HeartbeatReader
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage

FIRST, SECOND = Generation(1), Generation(2)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


def say(storage: FaultyStorage, generation: Generation, course: Course = Course.RUNNING, *, end: bool = False) -> None:
    path = end_path("p", generation) if end else beat_path("p", generation)
    storage.put(path, [encode_beat(Beat(generation, "o", 1, course, reason="why" if end else ""))])


def test_nobody_has_run_yet(storage: FaultyStorage) -> None:  # SB11
    assert HeartbeatReader(storage, "p", "").all() == Observed(Generation(0), "0", knows_beats=False)


def test_of_an_older_release_the_log_is_the_sign_of_life(storage: FaultyStorage) -> None:  # SB5, SB11
    lookout = HeartbeatReader(storage, "p", "")
    log = CheckpointLog(storage, "p")
    log.claim("old one", 0)
    assert lookout.all() == Observed(FIRST, "1", owner="old one", knows_beats=False)
    log.append(Manifest(CheckpointId(1), FIRST, 1, 1, ()))
    assert lookout.all() == Observed(FIRST, "2", owner="old one", knows_beats=False)


def test_the_newest_generation_counts(storage: FaultyStorage) -> None:  # SB8
    lookout = HeartbeatReader(storage, "p", "heir")
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST)
    found = lookout.all()
    assert (found.generation, found.owner, found.is_ours, found.knows_beats) == (FIRST, "one", False, True)
    assert found.mark == lookout.beat(FIRST).mark != ""
    CheckpointLog(storage, "p").claim("heir", 0)
    say(storage, FIRST, Course.STOPPED, end=True)  # by a zombie: of a generation that is over
    found = lookout.all()
    assert found == Observed(SECOND, "", owner="heir", is_ours=True), "it has not beaten yet, but others have"


def test_the_name_of_a_pruned_claim_is_in_the_beat(storage: FaultyStorage) -> None:  # SB10
    log = CheckpointLog(storage, "p")
    log.claim("o", 0)
    log.append(Manifest(CheckpointId(1), FIRST, 1, 1, ()))
    say(storage, FIRST)
    storage.delete("p/log/0000000001")
    assert HeartbeatReader(storage, "p", "o").all().is_ours
    assert not HeartbeatReader(storage, "p", "x").all().is_ours


def test_a_claim_without_a_name_is_nobodys_own(storage: FaultyStorage) -> None:
    CheckpointLog(storage, "p").claim("", 0)
    say(storage, FIRST)
    assert not HeartbeatReader(storage, "p", "").all().is_ours


@pytest.mark.parametrize("course", [Course.STOPPED, Course.FAILED, Course.FINISHED])
def test_the_end_counts_more_than_the_beat(storage: FaultyStorage, course: Course) -> None:  # SB3
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST, Course.STOPPING)
    say(storage, FIRST, course, end=True)
    lookout = HeartbeatReader(storage, "p", "")
    assert (lookout.all().course, lookout.all().reason) == (course, "why")
    assert lookout.beat(FIRST).course is Course.STOPPING


def test_a_beat_that_is_not_there_has_no_mark(storage: FaultyStorage) -> None:
    assert HeartbeatReader(storage, "p", "").beat(FIRST) == Observed(FIRST)


@pytest.mark.parametrize("path", ["p/log", "p/heartbeats"])
@pytest.mark.parametrize("operation", ["list", "get"])
def test_storage_that_does_not_answer_is_no_silence(storage: FaultyStorage, path: str, operation: str) -> None:  # SB7
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST)
    storage.inject(Fault(FaultKind.TIMEOUT, operation, path, times=9))
    with pytest.raises(StorageError):
        HeartbeatReader(storage, "p", "").all()


def test_a_log_of_which_nothing_can_be_read_says_nothing(storage: FaultyStorage) -> None:  # SB7
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST)
    storage.put("p/log/0000000001", [b"damaged"])
    with pytest.raises(StorageError):
        HeartbeatReader(storage, "p", "").all()


def test_a_look_changes_nothing(storage: FaultyStorage) -> None:
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST)
    storage.calls.clear()
    lookout = HeartbeatReader(storage, "p", "")
    lookout.all()
    lookout.beat(FIRST)
    assert {operation for operation, _ in storage.calls} <= {"get", "list"}
    storage.calls.clear()
    lookout.beat(FIRST)
    assert len(storage.calls) == 1, "one request for each look at a running pipeline"
