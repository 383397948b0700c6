"""Heartbeats of a driver, the recorded end of its run, and how standbys read them (docs/spec/standby.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.running import definition_of, pipeline_at
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

import headgate as hg
from headgate.codec.json_files import (
    Ending,
    LockHolder,
    beat_path,
    decode_beat,
    encode_beat,
    end_path,
    generation_of,
    mark_of,
)
from headgate.errors import FencedError, HeadgateError, PipelineFailed, StorageError, UsageError
from headgate.model.failure import Failure
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.model.pipeline_identity import Beat, Course
from headgate.model.progress import RunResult, SilentObserver
from headgate.protocol.supervision.standby import Observed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import takeover as hearts
from headgate.runtime.driver.driver import Driver
from headgate.runtime.driver.pipeline_lock import RunningPipeline, read_holder
from headgate.runtime.driver.takeover import (
    HeartbeatReader,
    HeartbeatWriter,
    Takeover,
    end_beat,
    record_stop_of_dead_driver,
    taking_over,
)
from headgate.runtime.surroundings import PROCESS, Process
from headgate.storage.base import NotFound, Storage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage

WAIT_S = 300.0
FIRST, SECOND = Generation(1), Generation(2)


class Clock(Process):
    """A process whose clock a test turns."""

    now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def sleep(self, seconds: float) -> None:
        """Takes no time."""


def ended(result: RunResult | HeadgateError) -> Future[RunResult]:
    future: Future[RunResult] = Future()
    if isinstance(result, HeadgateError):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def beat_in(storage: Storage, generation: Generation) -> Beat | None:
    return decode_beat(storage.get(beat_path("p", generation)))


def end_in(storage: Storage, generation: Generation) -> Beat | None:
    try:
        return decode_beat(storage.get(end_path("p", generation)))
    except NotFound:
        return None


def drained(heart: HeartbeatWriter) -> None:
    """Wait until everything that was given to the heart's thread is done."""
    done = threading.Event()
    heart._pool.submit(done.set)
    assert done.wait(WAIT_S)


def test_a_beat_survives_its_bytes() -> None:
    beat = Beat(SECOND, "process 1 on here", 7, Course.FAILED, CheckpointId(9), "it failed")
    data = encode_beat(beat)
    assert decode_beat(data) == beat
    assert decode_beat(data[:-3]) is None
    assert decode_beat(data.replace(b"failed", b"stored")) is None
    assert decode_beat(b"") is None
    assert [generation_of(name) for name in ("0000000012", "0000000012-ended", "x", ".hg-tmp-1")] == [
        12,
        12,
        None,
        None,
    ]


def test_a_beat_of_another_version_is_a_sign_of_life() -> None:
    storage = MemoryStorage()
    CheckpointLog(storage, "p").claim("somebody", 0)
    newer = encode_beat(Beat(FIRST, "o", 1)).replace(b"headgate-heartbeat 1", b"headgate-heartbeat 2")
    lookout = HeartbeatReader(storage, "p", "")
    marks = []
    for data in (newer, newer + b"more"):
        storage.put(beat_path("p", FIRST), [data])
        found = lookout.all()
        assert (found.course, found.knows_beats, found.generation) == (Course.RUNNING, True, FIRST)
        marks.append(found.mark)
    assert marks == [mark_of(newer), mark_of(newer + b"more")]


def test_one_beat_is_written_at_a_time() -> None:  # SB1
    let, begun = threading.Event(), threading.Event()

    class Slow(MemoryStorage):
        def put(self, path: str, parts: Any) -> None:
            begun.set()
            assert let.wait(WAIT_S)
            super().put(path, parts)

    around, storage = Clock(), Slow()
    heart = HeartbeatWriter(storage, "p", "me", around)
    heart.beat(FIRST, Course.RUNNING)
    assert begun.wait(WAIT_S)
    for around.now_ms in (3_000, 6_000):
        heart.beat(FIRST, Course.STOPPING)  # returns at once: nothing waits for storage
    let.set()
    drained(heart)
    assert beat_in(storage, FIRST) == Beat(FIRST, "me", 1)
    heart.beat(FIRST, Course.STOPPING)
    drained(heart)
    assert beat_in(storage, FIRST) == Beat(FIRST, "me", 2, Course.STOPPING), "what was put off is said now"
    heart.stop(Generation(0), ended(RunResult(True)))


def test_the_first_beat_of_a_generation_removes_older_ones() -> None:
    storage = FaultyStorage(MemoryStorage())
    for generation in (1, 2, 3):
        storage.put(beat_path("p", generation), [encode_beat(Beat(Generation(generation), "o", 1))])
        storage.put(end_path("p", generation), [encode_beat(Beat(Generation(generation), "o", 1))])
    storage.put("p/heartbeats/note", [b"not ours"])
    around = Clock()
    heart = HeartbeatWriter(storage, "p", "me", around)
    for around.now_ms in (0, 2_000, 4_000):
        heart.beat(Generation(4), Course.RUNNING)
        drained(heart)
    assert storage.list("p") == ["p/heartbeats/0000000004", "p/heartbeats/note"]
    assert [call for call, _ in storage.calls].count("list") == 2, "once by this test, once by the heart"
    heart.stop(Generation(0), ended(RunResult(True)))


def test_a_driver_that_cannot_write_its_beats_goes_on() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault(FaultKind.IO_ERROR, "put", "heartbeats", times=2)])
    around = Clock()
    heart = HeartbeatWriter(storage, "p", "me", around)
    for around.now_ms in (0, 2_000, 4_000):
        heart.beat(FIRST, Course.RUNNING)
        drained(heart)
    assert beat_in(storage, FIRST) == Beat(FIRST, "me", 3)
    assert heart.stop(FIRST, ended(RunResult(False, last_checkpoint=CheckpointId(5)))) == ""


@pytest.mark.parametrize(
    ("result", "course"),
    [
        (RunResult(False, last_checkpoint=CheckpointId(5)), Course.STOPPED),
        (RunResult(True, last_checkpoint=CheckpointId(5)), Course.FINISHED),
        (RunResult(True, last_checkpoint=CheckpointId(5), is_drained=True), Course.DRAINED),
        (PipelineFailed("the JVM has ended"), Course.FAILED),
        (PipelineFailed("operator 'map' failed", is_for_good=True), Course.FAILED_FOR_GOOD),
        (UsageError("state does not fit"), Course.FAILED_FOR_GOOD),
        (StorageError("put", "x", "gone"), Course.FAILED),
    ],
)
def test_the_end_of_a_run_is_recorded(result: RunResult | HeadgateError, course: Course) -> None:
    storage = MemoryStorage()
    heart = HeartbeatWriter(storage, "p", "me", Clock())
    heart.beat(SECOND, Course.RUNNING)
    assert heart.stop(SECOND, ended(result)) == ""
    word = end_in(storage, SECOND)
    assert word is not None
    assert word == beat_in(storage, SECOND), "who looks at the beats only sees it, too"
    assert (word.course, word.owner) == (course, "me")
    assert word.reason == (str(result) if isinstance(result, HeadgateError) else "")
    assert word.checkpoint == (None if isinstance(result, HeadgateError) else 5)


@pytest.mark.parametrize(
    ("error", "wanted", "course", "was_draining"),
    [
        (PipelineFailed("the JVM has ended"), Course.STOPPING, Course.STOPPED, False),
        (StorageError("put", "x", "gone"), Course.STOPPING, Course.STOPPED, False),
        (PipelineFailed("the JVM has ended"), Course.DRAINING, Course.FAILED, True),
        (UsageError("state does not fit"), Course.STOPPING, Course.FAILED_FOR_GOOD, False),
        (UsageError("state does not fit"), Course.DRAINING, Course.FAILED_FOR_GOOD, False),
    ],
)
def test_the_end_of_a_run_that_failed_says_what_its_user_wanted(
    error: HeadgateError, wanted: Course, course: Course, was_draining: bool
) -> None:  # SB14
    storage = MemoryStorage()
    CheckpointLog(storage, "p").claim("me", 0)
    assert HeartbeatWriter(storage, "p", "me", Clock()).stop(FIRST, ended(error), wanted) == ""
    word = end_in(storage, FIRST)
    assert word is not None
    assert (word.course, word.was_draining, word.reason) == (course, was_draining, str(error))
    found = HeartbeatReader(storage, "p", "").all()
    assert (found.course, found.was_draining) == (course, was_draining)
    assert end_beat(FIRST, "me", ended(FencedError("p", 1, 2)), wanted) is None


def test_runs_that_end_before_their_first_beat_leave_nothing_but_the_last_end() -> None:
    storage = MemoryStorage()
    for generation in range(1, 30):  # a finished pipeline that is started again and again
        HeartbeatWriter(storage, "p", "me", Clock()).stop(Generation(generation), ended(RunResult(True)))
    assert storage.list("p") == [beat_path("p", 29), end_path("p", 29)]


def test_the_reason_of_a_failure_is_bounded() -> None:
    word = end_beat(FIRST, "me", ended(PipelineFailed("x" * 100_000)))
    assert word is not None
    assert len(encode_beat(word)) < 1_000


def test_a_driver_that_was_replaced_records_no_end() -> None:
    storage = MemoryStorage()
    assert HeartbeatWriter(storage, "p", "me", Clock()).stop(FIRST, ended(FencedError("p", 1, 2))) == ""
    assert HeartbeatWriter(storage, "p", "me", Clock()).stop(Generation(0), ended(RunResult(True))) == "", (
        "it claimed nothing"
    )
    assert storage.list("p") == []


def test_a_late_beat_does_not_undo_the_end() -> None:
    storage = MemoryStorage()
    CheckpointLog(storage, "p").claim("me", 0)
    heart = HeartbeatWriter(storage, "p", "me", Clock())
    heart.beat(FIRST, Course.RUNNING)
    heart.stop(FIRST, ended(RunResult(False)))
    storage.put(beat_path("p", FIRST), [encode_beat(Beat(FIRST, "me", 1))])  # one that had timed out lands
    assert HeartbeatReader(storage, "p", "").all().course is Course.STOPPED


@pytest.mark.parametrize("times", [3, 99])
def test_an_end_that_cannot_be_written_is_tried_again_and_then_told(times: int) -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault(FaultKind.TIMEOUT, "put", "-ended", times=times)])
    problem = HeartbeatWriter(storage, "p", "me", Clock()).stop(FIRST, ended(RunResult(False)))
    if times == 3:
        assert problem == ""
        assert end_in(storage, FIRST) is not None
    else:
        assert problem.startswith("how this run ended could not be recorded, so a standby may start the pipeline again")


class Idle:
    """A launcher whose workers never come."""

    def __init__(self) -> None:
        self.ended: list[Callable[[Failure | None], None]] = []

    def submit(self, submission: int, address: Any, secret: bytes, ended: Callable[[Failure | None], None]) -> None:
        self.ended.append(ended)

    def cancel(self, submission: int) -> None:
        while self.ended:
            self.ended.pop()(None)


def driver_at(root: Path, given: Takeover | None = None) -> Driver:
    pipeline = pipeline_at(root, interval=None)
    pipeline.source(hg.FromRows([{"id": 1}])).sink(hg.Discard(), name="out")
    with taking_over(given or Takeover()):
        return Driver(definition_of(pipeline), Idle(), SilentObserver(), "tests", beats=True)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_driver_beats_from_its_claim_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # SB1
    monkeypatch.setattr(hearts, "LOOK_MS", 5)
    driver = driver_at(tmp_path)
    storage = open_storage(str(tmp_path / "checkpoints"))
    driver.start()
    wait_for(lambda: storage.list("p/heartbeats"))
    assert beat_in(storage, FIRST) is not None
    driver.post(driver.supervision.stop)
    wait_for(lambda: (beat_in(storage, FIRST) or Beat(FIRST, "", 0)).course is Course.STOPPING)
    driver.cancel()
    driver.join()
    word = end_in(storage, FIRST)
    assert word is not None
    assert word.course is Course.STOPPED


@pytest.mark.parametrize(
    ("ask", "told", "course", "was_draining"),
    [
        (Driver.stop, Course.STOPPING, Course.STOPPED, False),
        (Driver.cancel, Course.STOPPING, Course.STOPPED, False),
        (Driver.drain, Course.DRAINING, Course.FAILED, True),
    ],
)
def test_a_driver_that_fails_over_a_wish_has_told_it_to_its_supervisor_and_to_standbys(
    tmp_path: Path, ask: Callable[[Driver], None], told: Course, course: Course, was_draining: bool
) -> None:  # KR13, SB14
    wishes: list[Course] = []
    driver = driver_at(tmp_path, Takeover("supervisor 1", on_course=wishes.append))
    driver.start()
    wait_for(lambda: driver.supervision.machine.generation)
    ask(driver)
    driver.post(lambda: driver._on_error(StorageError("put", "x", "gone")))
    driver.join()
    word = end_in(open_storage(str(tmp_path / "checkpoints")), FIRST)
    assert word is not None
    if ask is not Driver.cancel:  # it may be done before
        assert isinstance(driver.result.exception(), StorageError)
        assert word.reason
    assert (set(wishes), word.course, word.was_draining) == ({told}, course, was_draining)


def test_a_wish_that_is_refused_is_not_told(tmp_path: Path) -> None:  # KR13
    wishes: list[Course] = []
    driver = driver_at(tmp_path, Takeover("supervisor 1", on_course=wishes.append))
    driver.start()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        driver.end_with_savepoint(str(tmp_path / "file" / "savepoint"), drain=False)
    assert wishes == []
    driver.cancel()
    driver.join()
    assert wishes == [Course.STOPPING]


def test_a_driver_started_again_does_not_claim_behind_another_one(tmp_path: Path) -> None:  # KR10
    told: list[Generation] = []
    kept = Takeover("supervisor 1", None, told.append)

    def run(given: Takeover) -> str:
        driver = driver_at(tmp_path, given)
        driver.start()
        wait_for(lambda: driver.supervision.machine.generation or driver.result.done())
        driver.cancel()
        driver.join()
        return type(driver.result.exception()).__name__

    assert run(kept) == "NoneType"
    assert run(kept) == "NoneType", "one that died before it could tell what it had claimed changes nothing"
    assert told == [1, 2]
    assert run(Takeover("supervisor 1", FIRST)) == "NoneType", "generation 2 was claimed under the same name"
    assert run(Takeover("somebody else")) == "NoneType"
    assert run(Takeover("supervisor 1", Generation(3))) == "FencedError"
    assert run(Takeover("supervisor 1", Generation(4))) == "NoneType", "whoever knows of it may follow it"


def test_of_two_heirs_of_one_generation_one_claims(tmp_path: Path) -> None:
    log = CheckpointLog(open_storage(str(tmp_path / "checkpoints")), "p")
    log.claim("gone", 0)
    driver = driver_at(tmp_path, Takeover("", FIRST, lock_nonce=None))
    log.claim("the other heir", 0, FIRST)
    driver.start()
    wait_for(lambda: driver.supervision.machine.generation or driver.result.done())
    driver.cancel()
    driver.join()
    assert isinstance(driver.result.exception(), FencedError)
    with pytest.raises(FencedError):
        log.claim("a third heir", 0, FIRST)
    assert log.observe().entries[-1].content.generation == SECOND  # type: ignore[union-attr]


# -- what a standby sees of a pipeline (docs/spec/standby.md) -----


FIRST_LOOKOUT, SECOND_LOOKOUT = Generation(1), Generation(2)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


def say(storage: FaultyStorage, generation: Generation, course: Course = Course.RUNNING, *, end: bool = False) -> None:
    path = end_path("p", generation) if end else beat_path("p", generation)
    storage.put(path, [encode_beat(Beat(generation, "o", 1, course, reason="why" if end else ""))])


def test_nobody_has_run_yet(storage: FaultyStorage) -> None:  # SB11
    assert HeartbeatReader(storage, "p", "").all() == Observed(Generation(0), "0", knows_beats=False)


def test_of_an_older_release_the_log_is_the_sign_of_life(storage: FaultyStorage) -> None:  # SB11
    lookout = HeartbeatReader(storage, "p", "")
    log = CheckpointLog(storage, "p")
    log.claim("old one", 0)
    assert lookout.all() == Observed(FIRST_LOOKOUT, "1", owner="old one", knows_beats=False)
    log.append(Manifest(CheckpointId(1), FIRST_LOOKOUT, 1, 1, ()))
    assert lookout.all() == Observed(FIRST_LOOKOUT, "2", owner="old one", knows_beats=False)


def test_the_newest_generation_counts(storage: FaultyStorage) -> None:  # SB8
    lookout = HeartbeatReader(storage, "p", "heir")
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST_LOOKOUT)
    found = lookout.all()
    assert (found.generation, found.owner, found.is_ours, found.knows_beats) == (FIRST_LOOKOUT, "one", False, True)
    assert found.mark == lookout.beat(FIRST_LOOKOUT).mark != ""
    CheckpointLog(storage, "p").claim("heir", 0)
    say(storage, FIRST_LOOKOUT, Course.STOPPED, end=True)  # by a zombie: of a generation that is over
    found = lookout.all()
    assert found == Observed(SECOND_LOOKOUT, "", owner="heir", is_ours=True), "it has not beaten yet, but others have"


def test_the_name_of_a_pruned_claim_is_in_the_beat(storage: FaultyStorage) -> None:  # SB10
    log = CheckpointLog(storage, "p")
    log.claim("o", 0)
    log.append(Manifest(CheckpointId(1), FIRST_LOOKOUT, 1, 1, ()))
    say(storage, FIRST_LOOKOUT)
    storage.delete("p/log/0000000001")
    assert HeartbeatReader(storage, "p", "o").all().is_ours
    assert not HeartbeatReader(storage, "p", "x").all().is_ours


def test_a_claim_without_a_name_is_nobodys_own(storage: FaultyStorage) -> None:
    CheckpointLog(storage, "p").claim("", 0)
    say(storage, FIRST_LOOKOUT)
    assert not HeartbeatReader(storage, "p", "").all().is_ours


@pytest.mark.parametrize("course", [Course.STOPPED, Course.FAILED, Course.FINISHED])
def test_the_end_counts_more_than_the_beat(storage: FaultyStorage, course: Course) -> None:
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST_LOOKOUT, Course.STOPPING)
    say(storage, FIRST_LOOKOUT, course, end=True)
    lookout = HeartbeatReader(storage, "p", "")
    assert (lookout.all().course, lookout.all().reason) == (course, "why")
    assert lookout.beat(FIRST_LOOKOUT).course is Course.STOPPING


def test_a_beat_that_is_not_there_has_no_mark(storage: FaultyStorage) -> None:
    assert HeartbeatReader(storage, "p", "").beat(FIRST_LOOKOUT) == Observed(FIRST_LOOKOUT)


@pytest.mark.parametrize("path", ["p/log", "p/heartbeats"])
@pytest.mark.parametrize("operation", ["list", "get"])
def test_storage_that_does_not_answer_is_no_silence(storage: FaultyStorage, path: str, operation: str) -> None:  # SB7
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST_LOOKOUT)
    storage.inject(Fault(FaultKind.TIMEOUT, operation, path, times=9))
    with pytest.raises(StorageError):
        HeartbeatReader(storage, "p", "").all()


def test_a_log_of_which_nothing_can_be_read_says_nothing(storage: FaultyStorage) -> None:  # SB7
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST_LOOKOUT)
    storage.put("p/log/0000000001", [b"damaged"])
    with pytest.raises(StorageError):
        HeartbeatReader(storage, "p", "").all()


def test_a_look_changes_nothing(storage: FaultyStorage) -> None:
    CheckpointLog(storage, "p").claim("one", 0)
    say(storage, FIRST_LOOKOUT)
    storage.calls.clear()
    lookout = HeartbeatReader(storage, "p", "")
    lookout.all()
    lookout.beat(FIRST_LOOKOUT)
    assert {operation for operation, _ in storage.calls} <= {"get", "list"}
    storage.calls.clear()
    lookout.beat(FIRST_LOOKOUT)
    assert len(storage.calls) == 1, "one request for each look at a running pipeline"


# -- what was asked of a driver that died is recorded for standbys by whoever asked (docs/spec/standby.md -----


LAST, NEWER = Generation(1), Generation(2)
NAME = "a driver"
DEAD = LockHolder("process 1 on here", "here", 1, "n", True, claimant=NAME)


def claimed(storage: Storage, name: str = NAME) -> Storage:
    CheckpointLog(storage, "p").claim(name, 0)
    return storage


def said(storage: Storage, course: Course, generation: Generation = LAST, name: str = NAME) -> None:
    storage.put(beat_path("p", generation), [encode_beat(Beat(generation, name, 3, course))])


def seen(storage: Storage) -> Observed:
    return HeartbeatReader(storage, "p", "").all()


@pytest.mark.parametrize("drain", [False, True])
def test_what_was_asked_of_a_driver_that_died_is_told_to_standbys(drain: bool) -> None:
    storage = claimed(MemoryStorage())
    said(storage, Course.RUNNING)
    for _ in range(2):  # it is asked twice
        record_stop_of_dead_driver(storage, "p", DEAD, drain=drain)
        found = seen(storage)
        assert (found.course, found.was_draining) == (Course.FAILED if drain else Course.STOPPED, drain)


def test_a_run_that_failed_before_it_heard_the_wish_counts_as_stopped() -> None:
    storage = claimed(MemoryStorage())
    said(storage, Course.FAILED)
    storage.put(end_path("p", LAST), [encode_beat(Beat(LAST, NAME, 0, Course.FAILED, reason="the JVM has ended"))])
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert (seen(storage).course, seen(storage).reason) == (Course.STOPPED, "the JVM has ended")


def test_a_stop_of_a_driver_that_died_while_it_drained_counts() -> None:
    storage = claimed(MemoryStorage())
    said(storage, Course.DRAINING)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=True)
    assert seen(storage).course is Course.DRAINING, "standbys know that already"
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert seen(storage).course is Course.STOPPED


@pytest.mark.parametrize(
    "course", [Course.STOPPED, Course.FINISHED, Course.DRAINED, Course.FAILED_FOR_GOOD, Course.STOPPING]
)
def test_what_a_run_said_itself_about_its_end_stays(course: Course) -> None:
    storage = claimed(MemoryStorage())
    said(storage, course)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=True)
    assert seen(storage).course is course


@pytest.mark.parametrize("name", ["another driver", f"{NAME}, driver 2", NAME[:-1]])
def test_a_wish_for_a_former_run_is_no_wish_for_a_later_one(name: str) -> None:
    storage = claimed(claimed(MemoryStorage()), name)
    said(storage, Course.RUNNING, NEWER, name)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert (seen(storage).generation, seen(storage).course) == (NEWER, Course.RUNNING)


def test_a_lock_that_does_not_say_who_claims_is_of_nobody() -> None:
    storage = claimed(MemoryStorage(), "")
    said(storage, Course.RUNNING, name="")
    record_stop_of_dead_driver(storage, "p", replace(DEAD, claimant=""), drain=False)
    assert seen(storage).course is Course.RUNNING


@pytest.mark.parametrize("given", [Takeover(), Takeover("of a supervisor", supervisor_pid=7)], ids=["alone", "kept"])
def test_a_lock_says_under_which_name_its_driver_claims(tmp_path: Path, given: Takeover) -> None:
    driver = driver_at(tmp_path, given)
    holder = read_holder(str(tmp_path / "checkpoints"), "p")
    driver.start()
    wait_for(lambda: driver.supervision.machine.generation or driver.result.done())
    driver.cancel()
    driver.join()
    owner = seen(open_storage(str(tmp_path / "checkpoints"))).owner
    assert holder is not None
    assert holder.claimant == owner != ""


def test_a_run_without_heartbeats_is_left_alone() -> None:  # SB11
    storage = claimed(MemoryStorage())
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    assert storage.list("p/heartbeats") == []


def test_a_wish_is_over_when_the_pipeline_is_started_on_purpose() -> None:
    storage = claimed(MemoryStorage())
    said(storage, Course.RUNNING)
    record_stop_of_dead_driver(storage, "p", DEAD, drain=False)
    claimed(storage, "a later driver")
    assert seen(storage).course is Course.RUNNING
    heart = HeartbeatWriter(storage, "p", "a later driver", PROCESS)
    heart.beat(NEWER, Course.RUNNING)
    heart._pool.shutdown(wait=True)
    assert storage.list("p/heartbeats") == [beat_path("p", NEWER)]


def test_whoever_asked_records_it_and_an_outage_is_no_matter(tmp_path: Path) -> None:
    storage = claimed(open_storage(str(tmp_path)))
    said(storage, Course.RUNNING)
    running = RunningPipeline(str(tmp_path), "p", DEAD)
    replaced = LockHolder("process 2 on here", "here", 2, "m", True, Ending.REPLACED)
    running.insist(replaced, drain=False)
    assert seen(storage).course is Course.RUNNING, "the one that runs was started on purpose"
    running.insist(DEAD, drain=False)
    assert seen(storage).course is Course.STOPPED
    assert storage.list("p/heartbeats") == [beat_path("p", LAST), end_path("p", LAST)]
    gone = FaultyStorage(claimed(MemoryStorage()), [Fault(FaultKind.TIMEOUT, "list", "", times=9)])
    with pytest.raises(StorageError):
        record_stop_of_dead_driver(gone, "p", DEAD, drain=False)
