"""``headgate run --supervised``: drivers that are killed are started again, and every signal arrives (KR1–KR3, KR5–KR8,
KR10, KR11)."""

# Rules: F3

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

import psutil
import pytest

from crash.support.processes import STARTED_S, environment, headgate, kill
from crash.support.results import assert_clean
from crash.support.standing import PROCESSES_IN_DEEP, SPARK_IN_DEEP, Place, freeze_workers, thaw

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800 + 120 * float(os.environ.get("HEADGATE_TEST_MINUTES", "0")))]


@pytest.mark.parametrize("with_spark", PROCESSES_IN_DEEP)
@pytest.mark.early
def test_drivers_killed_at_random_are_started_again_and_nothing_is_lost_or_doubled(
    place: Callable[..., Place], dice: random.Random, with_spark: bool, tmp_path: Path
) -> None:  # KR1, KR2, KR10
    here = place(with_spark)
    kept = here.run("--supervised", "--restart", "fixed-delay:delay=50ms")
    begun_s, killed, seen = time.monotonic(), 0, set()
    while not here.until_time_is_up(begun_s, killed):
        kept.checkpoint()
        threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time: not a wait for anything
        driver = kept.driver()
        assert driver.pid not in seen, "one driver after the other"
        seen.add(driver.pid)
        jvms = [p.pid for p in driver.children(recursive=True) if p.name() == "java"]
        kill(dice.choice(jvms) if jvms and dice.random() < 0.3 else driver.pid)
        killed += 1
        told = kept.wait("a restart", lambda e: e["event"] == "driver-restart")
        assert told["restarts"] == killed
        kept.cursor = len(kept.events)
    kept.checkpoint()
    assert psutil.Process(kept.pid).memory_info().rss < 40 << 20, "a supervisor is small"
    here.hurry()
    assert kept.exit_code(STARTED_S) == 0, kept.tale("exit code")
    kept.assert_gone()
    here.assert_exactly_once()
    assert_clean(tmp_path)


@pytest.mark.parametrize(
    ("how", "with_spark"),
    [
        *(pytest.param(how, False, id=f"{how}-processes") for how in ("SIGTERM", "SIGUSR1")),
        *(
            pytest.param(how, False, id=f"{how}-processes", marks=pytest.mark.deep)
            for how in ("SIGINT", "headgate stop")  # Ctrl-C is the one; the other is asked of drivers that die over it
        ),
        pytest.param("Ctrl-C", True, id="Ctrl-C-spark", marks=pytest.mark.spark),  # the JVM and its workers get it, too
        *(
            pytest.param(how, True, id=f"{how}-spark", marks=[pytest.mark.spark, pytest.mark.deep])
            for how in ("SIGTERM", "headgate stop")
        ),
    ],
)
def test_a_kept_pipeline_stops_and_drains_as_any_other(
    place: Callable[..., Place], how: str, with_spark: bool, tmp_path: Path
) -> None:  # KR6, KR7
    here = place(with_spark)
    kept = here.run("--supervised")
    kept.checkpoint()
    if how == "headgate stop":
        asked = headgate("stop", "kept", "--dir", here.checkpoints)
        assert (asked.returncode, "stopped; started again, it continues" in asked.stdout) == (0, True), asked
    elif how == "Ctrl-C":
        os.killpg(kept.pid, signal.SIGINT)
    else:
        os.kill(kept.pid, signal.Signals[how])
    assert kept.exit_code(STARTED_S) == 0, kept.tale("exit code")
    kept.assert_gone()
    assert not kept.has("driver-restart")
    assert "Traceback" not in kept.stderr()
    if how != "SIGUSR1":
        here.hurry()
        again = here.run("--supervised")
        assert again.exit_code(STARTED_S) == 0, again.tale("exit code")
        here.assert_exactly_once()
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.parametrize("how", ["headgate stop, unheard", "SIGTERM to the driver"])
def test_a_driver_that_dies_while_it_stops_is_not_started_again(
    place: Callable[..., Place], with_spark: bool, how: str, tmp_path: Path
) -> None:  # KR6, KR13
    here = place(with_spark)
    kept = here.run("--supervised", "--restart", "fixed-delay:delay=50ms")
    kept.checkpoint()
    driver = kept.driver()
    frozen = freeze_workers(driver)
    if how == "SIGTERM to the driver":
        kill(driver.pid, signal.SIGTERM)
        kept.wait("the stop", lambda e: e["event"] == "progress" and e["state"] == "stopping")
        kill(driver.pid)
    else:
        driver.suspend()
        command = [sys.executable, "-m", "headgate.cli", "stop", "kept", "--dir", here.checkpoints]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as asking:
            assert asking.stderr is not None
            assert "kept: stopping process" in asking.stderr.readline()
            kill(driver.pid)
            said = asking.stderr.read()
            assert asking.wait(STARTED_S) == 1
        assert "died before it had ended; started again, it continues" in said
    thaw(frozen)
    kept.wait("the end", lambda e: e["event"] in ("closed", "driver-restart"))
    assert not kept.has("driver-restart"), kept.tale("it was asked to stop")
    assert kept.exit_code(STARTED_S) == 137
    assert "its last checkpoint may be missing; it is not started again" in kept.stderr()
    kept.assert_gone()
    here.hurry()
    again = here.run("--supervised")  # on purpose: the wish is over
    assert again.exit_code(STARTED_S) == 0, again.tale("exit code")
    here.assert_exactly_once()
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_driver_that_dies_while_it_drains_is_started_again_and_drains(
    place: Callable[..., Place], with_spark: bool, tmp_path: Path
) -> None:  # KR7, KR13
    here = place(with_spark)
    kept = here.run("--supervised", "--restart", "fixed-delay:delay=50ms")
    kept.checkpoint()
    driver = kept.driver()
    frozen = freeze_workers(driver)
    kill(driver.pid, signal.SIGUSR1)
    kept.wait("the drain", lambda e: e["event"] == "progress" and e["state"] == "draining")
    kill(driver.pid)
    thaw(frozen)
    kept.wait("the restart", lambda e: e["event"] == "driver-restart")
    assert kept.exit_code(STARTED_S) == 0, kept.tale("it drains without being asked again")
    kept.assert_gone()
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", PROCESSES_IN_DEEP)
@pytest.mark.early
def test_a_killed_supervisor_leaves_nothing_running_and_the_next_start_goes_on(
    place: Callable[..., Place], with_spark: bool
) -> None:
    here = place(with_spark)
    kept = here.run("--supervised")
    kept.checkpoint()
    kept.kill()
    kept.assert_gone()
    here.hurry()
    again = here.run("--supervised")
    again.wait("the continuation", lambda e: e["event"] == "note" and "continues from checkpoint" in e["text"])
    assert again.exit_code(STARTED_S) == 0
    again.assert_gone()
    here.assert_exactly_once()


def test_a_program_that_cannot_be_loaded_ends_the_supervisor(place: Callable[..., Place]) -> None:  # KR3
    here = place(False)
    here.program.write_text("import headgate\nraise ValueError('mistyped')")
    kept = here.run("--supervised")
    assert kept.exit_code() == 2
    assert "mistyped" in kept.stderr()
    assert not kept.has("driver-restart")
