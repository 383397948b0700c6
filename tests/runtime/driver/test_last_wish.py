"""What was asked of a driver that died is recorded for standbys by whoever asked (docs/spec/standby.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.driver.test_heart import driver_at, wait_for

from headgate.codec.json_files import Ending, LockHolder, beat_path, encode_beat, end_path
from headgate.errors import StorageError
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import Generation
from headgate.protocol.supervision.standby import Observed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.liveness import HeartbeatReader, HeartbeatWriter, record_stop_of_dead_driver
from headgate.runtime.driver.pipeline_lock import read_holder
from headgate.runtime.driver.remote_control import RunningPipeline
from headgate.runtime.driver.takeover import Takeover
from headgate.runtime.surroundings import PROCESS
from headgate.storage.base import Storage
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage

FIRST, SECOND = Generation(1), Generation(2)
NAME = "a driver"
DEAD = LockHolder("process 1 on here", "here", 1, "n", True, claimant=NAME)


def claimed(storage: Storage, name: str = NAME) -> Storage:
    CheckpointLog(storage, "p").claim(name, 0)
    return storage


def said(storage: Storage, course: Course, generation: Generation = FIRST, name: str = NAME) -> None:
    storage.put(beat_path("p", generation), [encode_beat(Beat(generation, name, 3, course))])


def seen(storage: Storage) -> Observed:
    return HeartbeatReader(storage, "p", "").all()


@pytest.mark.parametrize("drain", [False, True])
def test_what_was_asked_of_a_driver_that_died_is_told_to_standbys(drain: bool) -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.RUNNING)
    for _ in range(2):  # it is asked twice
        record_stop_of_dead_driver(storage, "p", DEAD, drain=drain)
        found = seen(storage)
        assert (found.course, found.was_draining) == (Course.FAILED if drain else Course.STOPPED, drain)


def test_a_run_that_failed_before_it_heard_the_wish_counts_as_stopped() -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.FAILED)
    storage.put(end_path("p", FIRST), [encode_beat(Beat(FIRST, NAME, 0, Course.FAILED, reason="the JVM has ended"))])
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert (seen(storage).course, seen(storage).reason) == (Course.STOPPED, "the JVM has ended")


def test_a_stop_of_a_driver_that_died_while_it_drained_counts() -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.DRAINING)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=True)
    assert seen(storage).course is Course.DRAINING, "standbys know that already"
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert seen(storage).course is Course.STOPPED


@pytest.mark.parametrize(
    "course", [Course.STOPPED, Course.FINISHED, Course.DRAINED, Course.FAILED_FOR_GOOD, Course.STOPPING]
)
def test_what_a_run_said_itself_about_its_end_stays(course: Course) -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, course)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=True)
    assert seen(storage).course is course


@pytest.mark.parametrize("name", ["another driver", f"{NAME}, driver 2", NAME[:-1]])
def test_a_wish_for_a_former_run_is_no_wish_for_a_later_one(name: str) -> None:  # SB15
    storage = claimed(claimed(MemoryStorage()), name)
    said(storage, Course.RUNNING, SECOND, name)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert (seen(storage).generation, seen(storage).course) == (SECOND, Course.RUNNING)


def test_a_lock_that_does_not_say_who_claims_is_of_nobody() -> None:  # SB15
    storage = claimed(MemoryStorage(), "")
    said(storage, Course.RUNNING, name="")
    record_stop_of_dead_driver(storage, "p", replace(DEAD, claimant=""), drain=False)
    assert seen(storage).course is Course.RUNNING


@pytest.mark.parametrize("given", [Takeover(), Takeover("the driver of a keeper", keeper=7)], ids=["alone", "kept"])
def test_a_lock_says_under_which_name_its_driver_claims(tmp_path: Path, given: Takeover) -> None:  # SB15
    driver = driver_at(tmp_path, given)
    holder = read_holder(str(tmp_path / "checkpoints"), "p")
    driver.start()
    wait_for(lambda: driver.supervision.machine.generation or driver.result.done())
    driver.cancel()
    driver.join()
    owner = seen(open_storage(str(tmp_path / "checkpoints"))).owner
    assert holder is not None
    assert holder.claimant == owner != ""


def test_a_run_without_heartbeats_is_left_alone() -> None:  # SB11, SB15
    storage = claimed(MemoryStorage())
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert storage.list("p/heartbeats") == []


def test_a_wish_is_over_when_the_pipeline_is_started_on_purpose() -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.RUNNING)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    claimed(storage, "a later driver")
    assert seen(storage).course is Course.RUNNING
    heart = HeartbeatWriter(storage, "p", "a later driver", PROCESS)
    heart.beat(SECOND, Course.RUNNING)
    heart._pool.shutdown(wait=True)
    assert storage.list("p/heartbeats") == [beat_path("p", SECOND)]


def test_whoever_asked_records_it_and_an_outage_is_no_matter(tmp_path: Path) -> None:  # SB15
    storage = claimed(open_storage(str(tmp_path)))
    said(storage, Course.RUNNING)
    running = RunningPipeline(str(tmp_path), "p", DEAD)
    replaced = LockHolder("process 2 on here", "here", 2, "m", True, Ending.REPLACED)
    running.insist(replaced, drain=False)
    assert seen(storage).course is Course.RUNNING, "the one that runs was started on purpose"
    running.insist(DEAD, drain=False)
    assert seen(storage).course is Course.STOPPED
    assert storage.list("p/heartbeats") == [beat_path("p", FIRST), end_path("p", FIRST)]
    gone = FaultyStorage(claimed(MemoryStorage()), [Fault(FaultKind.TIMEOUT, "list", "", times=9)])
    with pytest.raises(StorageError):
        record_stop_of_dead_driver(gone, "p", DEAD, drain=False)
