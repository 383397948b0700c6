"""``headgate run --standby``: the driver dies, freezes or stops; whoever stands by takes over, once (SB1–SB13)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from crash.support.processes import STARTED_S, environment, kill, until
from crash.support.results import assert_clean
from crash.support.standing import (
    PATIENT,
    PROGRAM,
    SPARK_IN_DEEP,
    Place,
    Process,
    freeze_workers,
    tale,
    thaw,
    whoever_completes,
)
from crash.support.takeovers import Takeover, problem, told

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800 + 120 * float(os.environ.get("HEADGATE_TEST_MINUTES", "0")))]

# Rules: F3, F6, F15


def ways(spark_on: str | None, *, only: str | None = None) -> list[Any]:
    """Return where checkpoints are, and whether Spark runs the workers.

    `make test` has Spark on ``spark_on`` only, if anywhere, and plain processes on every other place; it has ``only``
    one of the places, where that is given.
    """
    return [
        pytest.param(
            place == "object store",
            with_spark,
            id=f"{place}-{'spark' if with_spark else 'processes'}",
            marks=[
                *([pytest.mark.spark] if with_spark else []),
                *([pytest.mark.deep] if with_spark != (place == spark_on) or only not in (None, place) else []),
            ],
        )
        for place in ("directory", "object store")
        for with_spark in (False, True)
    ]


def took_over(heir: Process, since_s: float, record: Callable[[str, object], None]) -> None:
    """Wait until ``heir`` runs the pipeline, and record how long that took."""
    heir.notice("taking-over")
    heir.wait("the pipeline running", lambda e: e["event"] == "progress" and e["state"] == "running")
    took_ms = round((time.monotonic() - since_s) * 1000)
    record("takeover_ms", took_ms)
    print(f"takeover: {took_ms} ms")


@pytest.mark.parametrize(("is_object_store", "with_spark"), ways(spark_on="directory", only="directory"))
@pytest.mark.early
def test_a_standby_takes_over_when_the_driver_is_killed(
    place: Callable[..., Place],
    with_spark: bool,
    is_object_store: bool,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # SB8
    here = place(with_spark, is_object_store=is_object_store)
    first = here.run()
    first.checkpoint()
    second = here.run("--standby", PATIENT)
    second.notice("watching")
    first.checkpoint()
    assert not second.has("progress"), "it only watches"
    first.kill()
    took_over(second, time.monotonic(), record_property)
    second.checkpoint()
    here.hurry()
    assert second.exit_code(STARTED_S) == 0, tale(here.processes)
    for process in here.processes:
        process.assert_gone()
    here.assert_exactly_once()
    assert_clean(tmp_path)


@pytest.mark.parametrize(("is_object_store", "with_spark"), ways(spark_on=None, only="directory"))
def test_a_frozen_driver_that_wakes_after_the_takeover_ends_and_changes_nothing(
    place: Callable[..., Place],
    with_spark: bool,
    is_object_store: bool,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # SB8
    """In a directory it holds the lock all the time, too."""
    here = place(with_spark, is_object_store=is_object_store)
    zombie = here.run()
    zombie.checkpoint()
    heir = here.run("--standby", PATIENT)
    heir.notice("watching")
    zombie.checkpoint()
    zombie.signal(signal.SIGSTOP)
    try:
        took_over(heir, time.monotonic(), record_property)
        heir.checkpoint()
    finally:
        zombie.signal(signal.SIGCONT)
    assert zombie.exit_code(STARTED_S) == 4, tale(here.processes)
    heir.checkpoint()
    here.hurry()
    assert heir.exit_code(STARTED_S) == 0, tale(here.processes)
    for process in here.processes:
        process.assert_gone()
    here.assert_exactly_once()
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_standby_does_not_start_what_was_stopped_and_ends_with_what_has_finished(
    place: Callable[..., Place], with_spark: bool
) -> None:  # SB6
    here = place(with_spark)
    first = here.run()
    first.checkpoint()
    second = here.run("--standby", PATIENT)
    second.notice("watching")
    first.signal(signal.SIGTERM)
    assert first.exit_code(STARTED_S) == 0
    second.notice("stopped")
    here.hurry()
    again = here.run()
    assert again.exit_code(STARTED_S) == 0
    assert second.exit_code(STARTED_S) == 0, tale(here.processes)
    assert second.events[-2]["notice"] == "ended"
    assert not second.has("progress"), "it never ran"
    here.assert_exactly_once()


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_what_failed_while_its_user_stopped_it_is_not_taken_over(
    place: Callable[..., Place], with_spark: bool
) -> None:  # SB6, SB14
    here = place(with_spark)
    strategy = 'hg.FixedDelay(delay="50ms")'
    assert strategy in PROGRAM
    here.program.write_text(PROGRAM.replace(strategy, "hg.NoRestart()"))
    first = here.run()
    first.checkpoint()
    second = here.run("--standby", PATIENT)
    second.notice("watching")
    driver = first.driver()
    frozen = freeze_workers(driver)
    workers = [process for process in frozen if not process.children()]  # but not who starts them
    kill(driver.pid, signal.SIGTERM)
    first.wait("the stop", lambda e: e["event"] == "progress" and e["state"] == "stopping")
    for worker in workers:
        kill(worker.pid)
    thaw(frozen)
    assert first.exit_code(STARTED_S) == 1, tale(here.processes)
    decisions = ("stopped", "taking-over")
    decided = second.wait("a decision", lambda e: e["event"] == "standby" and e["notice"] in decisions)
    assert decided["notice"] == "stopped", tale(here.processes)
    here.program.write_text(PROGRAM)
    here.hurry()
    again = here.run()  # on purpose: the wish is over
    assert again.exit_code(STARTED_S) == 0
    assert second.exit_code(STARTED_S) == 0, tale(here.processes)
    assert not second.has("progress"), "it never ran"
    here.assert_exactly_once()


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_what_died_before_it_heard_the_stop_of_its_user_is_not_taken_over(
    place: Callable[..., Place], with_spark: bool
) -> None:
    here = place(with_spark)
    first = here.run()
    first.checkpoint()
    second = here.run("--standby", PATIENT)
    second.notice("watching")
    second.signal(signal.SIGSTOP)  # however long a busy machine takes for the stop, it decides behind it
    try:
        first.signal(signal.SIGSTOP)
        command = [sys.executable, "-m", "headgate.cli", "stop", "kept", "--dir", here.checkpoints]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as asking:
            assert asking.stderr is not None
            assert "kept: stopping process" in asking.stderr.readline()
            first.kill()
            assert "died before it had ended" in asking.stderr.read()
    finally:
        second.signal(signal.SIGCONT)
    decisions = ("stopped", "taking-over")
    decided = second.wait("a decision", lambda e: e["event"] == "standby" and e["notice"] in decisions)
    assert decided["notice"] == "stopped", tale(here.processes)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.early
def test_of_two_standbys_one_takes_over_and_the_other_goes_on_waiting(
    place: Callable[..., Place], with_spark: bool, tmp_path: Path
) -> None:
    here = place(with_spark, is_object_store=True)
    first = here.run()
    first.checkpoint()
    others = [here.run("--standby", PATIENT), here.run("--standby", PATIENT)]
    for other in others:
        other.notice("watching")
    first.kill()
    heir = whoever_completes(others)
    (other,) = [process for process in others if process is not heir]
    heir.checkpoint()
    assert other.process.poll() is None, tale(here.processes)
    heir.kill()
    other.notice("taking-over")
    other.checkpoint()
    here.hurry()
    assert other.exit_code(STARTED_S) == 0, tale(here.processes)
    here.assert_exactly_once()
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_standby_ends_when_it_is_told_to(place: Callable[..., Place], with_spark: bool) -> None:  # SB6
    here = place(with_spark)
    alone = here.run("--standby")
    alone.notice("not-started")
    alone.signal(signal.SIGINT)
    assert alone.exit_code(STARTED_S) == 0, alone.tale("exit code")
    alone.assert_gone()
    assert "Traceback" not in alone.stderr()


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.deep
@pytest.mark.early
def test_drivers_killed_and_frozen_at_random_among_standbys_lose_and_double_nothing(
    place: Callable[..., Place],
    dice: random.Random,
    with_spark: bool,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # SB8, KR3
    """Each is kept: whoever is killed or replaced stands by again. Half of the faults wait until one does."""
    here = place(with_spark, is_object_store=dice.random() < 0.5)
    here.run().checkpoint()
    kept = [here.run("--supervised", "--standby", "--restart", "fixed-delay:delay=50ms") for _ in range(2)]
    for process in kept:
        process.notice("watching")
    here.processes[0].kill()
    begun_s, takeovers = time.monotonic(), list[Takeover]()
    frozen: list[int] = []
    while not here.until_time_is_up(begun_s, len(takeovers)):
        active = whoever_completes(kept)
        threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time: not a wait for anything
        driver = active.driver()
        (other,) = [process for process in kept if process is not active]
        if not frozen and dice.random() < 0.5:
            until(other.stands_by, "a standby that waits", STARTED_S)
        if frozen and dice.random() < 0.7:
            kill(frozen.pop(), signal.SIGCONT)
        if dice.random() < 0.4 and not frozen:
            kill(driver.pid, signal.SIGSTOP)
            frozen.append(driver.pid)
        else:
            kill(driver.pid)
        since_s, was_awaited = time.monotonic(), other.stands_by()
        heir = whoever_completes([other] if driver.pid in frozen else kept)
        takeovers.append(Takeover(round((time.monotonic() - since_s) * 1000), was_awaited))
        by = "the other" if heir is other else "the same"
        print(f"takeover {len(takeovers)} by {by}: {takeovers[-1].took_ms / 1000:.1f} s, awaited: {was_awaited}")
    print(told(takeovers))
    record_property("takeovers", told(takeovers))
    for pid in frozen:
        kill(pid, signal.SIGCONT)
    whoever_completes(kept)
    here.hurry()
    for process in kept:
        assert process.exit_code(2 * STARTED_S) == 0, tale(here.processes)
        process.assert_gone()
    here.assert_exactly_once()
    assert_clean(tmp_path)
    assert not [p for p in psutil.process_iter() if p.pid in frozen]
    assert problem(takeovers) is None, problem(takeovers)


def awaited(*took_ms: int) -> list[Takeover]:
    return [Takeover(one, was_awaited=True) for one in took_ms]


def test_takeovers_are_judged_by_the_longest_of_them() -> None:
    assert problem(awaited(6_000, 29_999), 3) is None
    assert problem(awaited(6_000, 30_001), 3) == (
        "takeovers by a standby that was waiting: 2, median 18.0 s, longest 30.0 s (promised: 10 s); "
        "while no standby was waiting: none; allowed here: 30 s each"
    )


def test_a_takeover_of_a_minute_is_not_accepted() -> None:
    assert problem(awaited(60_000), 3) is not None


def test_where_no_standby_waits_nothing_is_promised() -> None:
    alone = Takeover(60_000, was_awaited=False)
    assert problem([*awaited(6_000), alone], 1) is None
    assert told([*awaited(6_000), alone]).endswith("while no standby was waiting: 1, median 60.0 s, longest 60.0 s")


def test_without_takeovers_there_is_nothing_to_be_content_with() -> None:
    for nothing in ([], [Takeover(5, was_awaited=False)]):
        assert (problem(nothing, 3) or "").startswith("takeovers by a standby that was waiting: none (promised: 10 s)")


def test_nobody_is_judged_by_the_clock_unless_asked() -> None:
    assert problem(awaited(60_000), 0) is None
    assert "longest 60.0 s" in told(awaited(60_000))
