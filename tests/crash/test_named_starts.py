"""The real commands: a start that names what it restores, kept or stood by for; a pipeline that is cancelled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.processes import STARTED_S, STEP_S, environment, kill
from crash.standing import PATIENT, PROGRAM, Place, tale

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

WITH_SPARK = [pytest.param(False, id="processes"), pytest.param(True, id="spark", marks=pytest.mark.spark)]
SILENT_S = 23.0
"""Longer than a standby waits for a sign of life."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(with_spark: bool) -> Place:
        places.append(Place(tmp_path, with_spark=with_spark))
        return places[-1]

    yield make
    for one in places:
        one.close()


def headgate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate.cli.main", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=STEP_S, check=False)


def options_of_a_named_start(here: Place) -> list[str]:
    """Run, stop with a savepoint; return what names it. It is where the pipeline ended, so nothing comes again."""
    first = here.run()
    first.checkpoint()
    taken = str(here.root / "taken")
    stopped = headgate("stop", "kept", "--dir", here.checkpoints, "--savepoint", taken)
    assert stopped.returncode == 0, stopped
    assert first.exit_code(STARTED_S) == 0, tale(here.processes)
    listed = json.loads(headgate("checkpoints", "list", "kept", "--dir", here.checkpoints, "--json").stdout)
    newest = max(entry["checkpoint"] for entry in listed if entry["kind"] == "checkpoint")
    return ["--restore", taken, "--go-back-behind", str(newest)]


@pytest.mark.parametrize("with_spark", WITH_SPARK)
def test_a_keeper_repeats_a_named_start_and_goes_on(
    place: Callable[..., Place], with_spark: bool
) -> None:  # SV24, SV25, KR2
    here = place(with_spark)
    options = options_of_a_named_start(here)
    kept = here.run("--supervised", "--restart", "fixed-delay:delay=50ms", *options)
    for _ in range(2):
        kept.checkpoint()
        kill(kept.driver().pid)
        kept.wait("a restart", lambda e: e["event"] == "driver-restart")
        kept.wait("the note", lambda e: e["event"] == "note" and "was restored before" in e["text"])
        kept.cursor = len(kept.events)
    kept.checkpoint()
    here.hurry()
    assert kept.exit_code(STARTED_S) == 0, tale(here.processes)
    here.assert_exactly_once()


@pytest.mark.parametrize("with_spark", WITH_SPARK)
@pytest.mark.early
def test_a_standby_takes_over_a_named_start_and_goes_on(
    place: Callable[..., Place], with_spark: bool
) -> None:  # SV24, SV25, SB8
    here = place(with_spark)
    options = options_of_a_named_start(here)
    first = here.run(*options)
    first.checkpoint()
    second = here.run("--standby", "--supervised", PATIENT, *options)
    second.notice("watching")
    first.checkpoint()
    first.kill()
    second.notice("taking-over")
    second.wait("the note", lambda e: e["event"] == "note" and "was restored before" in e["text"])
    second.checkpoint()
    kill(second.driver().pid)
    second.checkpoint()
    here.hurry()
    assert second.exit_code(STARTED_S) == 0, tale(here.processes)
    here.assert_exactly_once()


@pytest.mark.parametrize("with_spark", WITH_SPARK)
@pytest.mark.early
def test_a_cancelled_pipeline_stays_cancelled_whoever_keeps_it(
    place: Callable[..., Place], with_spark: bool
) -> None:  # C70, C74, KR3, SB6
    here = place(with_spark)
    here.program.write_text(PROGRAM.replace('interval="200ms"', 'interval="200ms", retain_on_cancel=False'))
    kept = here.run("--supervised", "--restart", "fixed-delay:delay=50ms")
    kept.checkpoint()
    beside = here.run("--standby", PATIENT)
    beside.notice("watching")
    cancelled = headgate("cancel", "kept", "--dir", here.checkpoints)
    assert cancelled.stdout == "kept: cancelled, and its checkpoints are removed\n", cancelled
    assert kept.exit_code(STARTED_S) == 0, tale(here.processes)
    assert not kept.has("driver-restart"), tale(here.processes)
    beside.notice("stopped")
    threading.Event().wait(SILENT_S)  # what must not happen has its time: not a wait for anything
    assert not beside.has("progress"), tale(here.processes)
    listed = headgate("checkpoints", "list", "kept", "--dir", here.checkpoints)
    assert "Its checkpoints were removed" in listed.stdout
    assert not list(Path(here.checkpoints).glob("kept/chk-*/*"))
    again = here.run()
    assert again.exit_code(STARTED_S) == 3, tale(here.processes)
    assert "removed since" in again.stderr()


@pytest.mark.parametrize("with_spark", WITH_SPARK)
def test_signals_that_come_twice_remove_nothing(place: Callable[..., Place], with_spark: bool) -> None:  # C70
    """Whoever ends a whole group of processes signals the driver, and its keeper, which passes that on."""
    here = place(with_spark)
    here.program.write_text(PROGRAM.replace('interval="200ms"', 'interval="200ms", retain_on_cancel=False'))
    kept = here.run("--supervised")
    kept.checkpoint()
    kill(kept.driver().pid, signal.SIGTERM)
    kept.signal(signal.SIGTERM)
    assert kept.exit_code(STARTED_S) == 0, tale(here.processes)
    again = here.run()
    again.checkpoint()
    here.hurry()
    assert again.exit_code(STARTED_S) == 0, tale(here.processes)
    here.assert_exactly_once()
