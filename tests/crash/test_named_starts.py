"""The real commands: a start that names what it restores, kept or stood by for; a pipeline that is cancelled."""

# Rules: F3

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import headgate as hg
from crash.support.processes import STARTED_S, headgate, kill
from crash.support.standing import PATIENT, PROGRAM, SPARK_IN_DEEP, Place, tale

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]


def stop(here: Place, savepoint: str) -> subprocess.CompletedProcess[str]:
    return headgate("stop", "kept", "--dir", here.checkpoints, "--savepoint", str(here.root / savepoint))


def options_of_a_named_start(here: Place) -> list[str]:
    """Run, stop with a savepoint; return what names it. It is where the pipeline ended, so nothing comes again."""
    first = here.run()
    first.checkpoint()
    stopped = stop(here, "taken")
    assert stopped.returncode == 0, stopped
    assert first.exit_code(STARTED_S) == 0, tale(here.processes)
    return ["--restore", str(here.root / "taken")]


def test_a_user_stops_changes_and_restores(place: Callable[..., Place]) -> None:  # SV10, SV24, SV25
    """By the commands alone; the driver dies at every step, and the user repeats the command."""
    here = place(False)
    options = options_of_a_named_start(here)
    for point in ("after-claim", "after-adoption"):
        assert here.run(*options, kill_at=point).exit_code(STARTED_S) == -9, tale(here.processes)
    again = here.run(*options)
    again.wait("the note", lambda e: e["event"] == "note" and "was restored before" in e["text"])
    again.checkpoint()
    assert stop(here, "second").returncode == 0, tale(here.processes)
    assert again.exit_code(STARTED_S) == 0, tale(here.processes)

    old = here.run(*options)  # a command that nobody has changed meanwhile goes on, and restores nothing
    old.wait("the note", lambda e: e["event"] == "note" and "was restored before" in e["text"])
    assert stop(here, "third").returncode == 0, tale(here.processes)
    hg.edit_savepoint(here.root / "third", here.root / "edited").write()
    changed = here.run("--restore", str(here.root / "edited"), "--parallelism", "3", kill_at="after-savepoint")
    changed.checkpoint()
    stopped = stop(here, "fourth")
    assert stopped.returncode != 0, stopped
    assert f"the savepoint {here.root / 'fourth'} is complete" in stopped.stderr
    refused = here.run("--restore", str(here.root / "third"))
    assert refused.exit_code(STARTED_S) == 3, tale(here.processes)
    assert "committed would be produced again" in refused.stderr()
    last = here.run("--restore", str(here.root / "fourth"))
    here.hurry()
    assert last.exit_code(STARTED_S) == 0, tale(here.processes)
    here.assert_exactly_once()
    notes = [event["text"] for process in here.processes for event in process.events if event["event"] == "note"]
    assert not any("remove" in text or "produced again" in text for text in notes), notes


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.early
def test_a_standby_takes_over_a_named_start_and_goes_on(
    place: Callable[..., Place], with_spark: bool
) -> None:  # SV24, SV25, KR2, SB8
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


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
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
    beside.notice("stopped")  # it stays so, however long all is silent: see the machine's own tests
    assert not beside.has("progress"), tale(here.processes)
    listed = headgate("checkpoints", "list", "kept", "--dir", here.checkpoints)
    assert "Its checkpoints were removed" in listed.stdout
    assert not list(Path(here.checkpoints).glob("kept/chk-*/*"))
    again = here.run()
    assert again.exit_code(STARTED_S) == 3, tale(here.processes)
    assert "removed since" in again.stderr()


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_signals_that_come_twice_remove_nothing(place: Callable[..., Place], with_spark: bool) -> None:  # C70
    """Whoever ends a whole group of processes signals the driver, and its supervisor, which passes that on."""
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
