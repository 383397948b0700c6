"""What was asked of a driver that died is recorded for standbys by whoever asked (docs/spec/standby.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.codec.heartbeat import beat_path, encode_beat, end_path
from headgate.codec.lock_holder import Ending, LockHolder
from headgate.errors import StorageError
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import Generation
from headgate.protocol.supervision.standby import Observed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.heart import Heart
from headgate.runtime.driver.last_wish import tell_standbys
from headgate.runtime.driver.lookout import Lookout
from headgate.runtime.driver.stopping import RunningPipeline
from headgate.runtime.process import PROCESS
from headgate.storage.backends import open_storage
from headgate.storage.base import Storage
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage

FIRST, SECOND = Generation(1), Generation(2)
DEAD = LockHolder("process 1 on here", "here", 1, "n", True)
NAME = "process 1 on here, driver 12"


def claimed(storage: Storage, name: str = NAME) -> Storage:
    CheckpointLog(storage, "p").claim(name, 0)
    return storage


def said(storage: Storage, course: Course, generation: Generation = FIRST, name: str = NAME) -> None:
    storage.put(beat_path("p", generation), [encode_beat(Beat(generation, name, 3, course))])


def seen(storage: Storage) -> Observed:
    return Lookout(storage, "p", "").all()


@pytest.mark.parametrize("name", [NAME, "supervisor 7 on here, driver 12"], ids=["alone", "kept"])
@pytest.mark.parametrize("drain", [False, True])
def test_what_was_asked_of_a_driver_that_died_is_told_to_standbys(name: str, drain: bool) -> None:  # SB15
    storage = claimed(MemoryStorage(), name)
    said(storage, Course.RUNNING, name=name)
    dead = LockHolder("process 1 on here", "here", 1, "n", True, keeper=7)
    for _ in range(2):  # it is asked twice
        tell_standbys(storage, "p", dead, drain=drain)
        found = seen(storage)
        assert (found.course, found.was_draining) == (Course.FAILED if drain else Course.STOPPED, drain)


def test_a_run_that_failed_before_it_heard_the_wish_counts_as_stopped() -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.FAILED)
    storage.put(end_path("p", FIRST), [encode_beat(Beat(FIRST, NAME, 0, Course.FAILED, reason="the JVM has ended"))])
    tell_standbys(storage, "p", DEAD, drain=False)
    assert (seen(storage).course, seen(storage).reason) == (Course.STOPPED, "the JVM has ended")


def test_a_stop_of_a_driver_that_died_while_it_drained_counts() -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.DRAINING)
    tell_standbys(storage, "p", DEAD, drain=True)
    assert seen(storage).course is Course.DRAINING, "standbys know that already"
    tell_standbys(storage, "p", DEAD, drain=False)
    assert seen(storage).course is Course.STOPPED


@pytest.mark.parametrize(
    "course", [Course.STOPPED, Course.FINISHED, Course.DRAINED, Course.FAILED_FOR_GOOD, Course.STOPPING]
)
def test_what_a_run_said_itself_about_its_end_stays(course: Course) -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, course)
    tell_standbys(storage, "p", DEAD, drain=True)
    assert seen(storage).course is course


@pytest.mark.parametrize("name", ["process 12 on here, driver 3", "supervisor 0 on there, driver 4"])
def test_a_wish_for_a_former_run_is_no_wish_for_a_later_one(name: str) -> None:  # SB15
    storage = claimed(claimed(MemoryStorage()), name)
    said(storage, Course.RUNNING, SECOND, name)
    tell_standbys(storage, "p", DEAD, drain=False)
    assert (seen(storage).generation, seen(storage).course) == (SECOND, Course.RUNNING)


def test_a_run_without_heartbeats_is_left_alone() -> None:  # SB11, SB15
    storage = claimed(MemoryStorage())
    tell_standbys(storage, "p", DEAD, drain=False)
    assert storage.list("p/heartbeats") == []


def test_a_wish_is_over_when_the_pipeline_is_started_on_purpose() -> None:  # SB15
    storage = claimed(MemoryStorage())
    said(storage, Course.RUNNING)
    tell_standbys(storage, "p", DEAD, drain=False)
    claimed(storage, "process 2 on here, driver 5")
    assert seen(storage).course is Course.RUNNING
    heart = Heart(storage, "p", "process 2 on here, driver 5", PROCESS)
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
        tell_standbys(gone, "p", DEAD, drain=False)
