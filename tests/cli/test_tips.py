"""What a command tells once: to whom it helps, and to nobody else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headgate.cli import doctor, run
from headgate.cli.doctor import prepare_tip
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.supervisor_client import SupervisorClient
from headgate.model.progress import RunResult

pytestmark = pytest.mark.skipif(doctor.archive_file(os.environ) is None, reason="there is no Java here")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADGATE_MASTER", raising=False)
    return tmp_path


def tip(master: str | None = None, *, is_terminal: bool = True) -> str | None:
    return prepare_tip(master, os.environ, is_terminal=is_terminal)


def test_it_is_told_once_on_a_machine(home: Path) -> None:  # OM17
    told = tip()
    assert told is not None
    assert "headgate prepare" in told
    assert str(home / "cache" / "headgate") in told
    assert tip() is tip("local[4]") is None


def test_of_commands_that_end_at_one_moment_one_tells_it() -> None:  # OM17
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: tip(), range(8)))
    assert sum(one is not None for one in told) == 1


def test_it_is_told_only_where_it_helps(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # OM17
    assert tip(is_terminal=False) is None
    assert tip("spark://host:7077") is None
    monkeypatch.setenv("HEADGATE_MASTER", "spark://host:7077")
    assert tip() is None
    monkeypatch.delenv("HEADGATE_MASTER")
    file = doctor.archive_file(os.environ)
    assert file is not None
    file.parent.mkdir(parents=True, mode=0o700)
    file.touch(0o600)
    assert tip() is None, "starts are prepared"
    file.unlink()
    assert tip() is not None, "nothing of this counted as told"


def test_where_nothing_can_be_remembered_nothing_is_told(home: Path) -> None:  # OM17
    (home / "state").touch()
    assert tip() is None


@pytest.mark.parametrize(
    ("options", "keeper", "is_told"),
    [({}, 0, True), ({"quiet": True}, 0, False), ({"as_json": True}, 0, False), ({}, 7, False)],
)
def test_a_run_tells_it_behind_its_result(
    options: dict[str, bool],
    keeper: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # OM17
    class Named:
        name = "p"

    monkeypatch.setattr(SupervisorClient, "keeper", property(lambda self: keeper))
    monkeypatch.setattr(run, "_run_now", lambda *given: RunResult(True))
    monkeypatch.setattr(run, "_is_terminal", lambda: True)
    given = {"quiet": False, "as_json": False, **options}
    made = RunOptions(
        None, None, None, StartPoint(None, None, ()), supervised=False, standby=False, restart=None, **given
    )
    run.run_here(Named(), made, SupervisorClient(None))  # type: ignore[arg-type]
    told = capfd.readouterr().err
    assert ("headgate prepare" in told) is is_told
    if is_told:
        assert told.index("finished") < told.index("tip:")
