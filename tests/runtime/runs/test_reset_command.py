"""``headgate reset``: what it says, and that it asks; and ``headgate run --fresh``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headgate.cli.app import app
from headgate.errors import UsageError
from headgate.runtime.driver.pipeline_lock import PipelineLock

PROGRAM = """
import headgate as hg
p = hg.Pipeline("visits", parallelism=1, checkpointing=hg.Checkpointing("100ms", dir="home"))
rows = p.source(hg.FromRows([{"n": n} for n in range(1200)]))
rows.sink(hg.FileSink("out", "jsonl", roll_interval=0), name="out")
rows.sink(hg.StreamSink("app/n", store="store"), name="all")
rows.sink(hg.Discard(), name="nowhere")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Any) -> Path:
    """A pipeline that has run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    run()
    return tmp_path


def call(*command: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, [*command], input=answer)


def run(*options: str) -> Result:
    result = call("run", "program.py", "--quiet", *options)
    assert result.exit_code == 0, result.exception
    return result


def reset(*options: str, answer: str = "") -> Result:
    return call("reset", "visits", "--dir", "home", *options, answer=answer)


def facts() -> dict[str, Any]:
    return dict(json.loads(reset("--json").output))


def test_it_says_what_goes_and_asks(place: Path) -> None:  # SO4
    (place / "out" / "mine.csv").write_text("1,2")
    newest = len(list((place / "home" / "visits").glob("log/*")))
    assert newest
    count, newest = len(facts()["checkpoints"]), facts()["checkpoints"][0]
    files = facts()["sinks"][0]["holds"]
    shown = f"""To start over, pipeline visits loses:

  checkpoints  {count} in {place}/home/visits, the newest is {newest}
  files        {files} in {place}/out (sink 'out')
  stream       1,200 events of stream app/n in {place}/store (sink 'all')

1 file that it has not written stays in {place}/out: mine.csv
Readers of stream app/n have to start over, too.
Savepoints stay.

Delete all of this? [y/N]: """
    assert reset(answer="n\n").output == f"{shown}n\nAborted.\n"
    assert facts()["sinks"][0]["holds"] == files
    done = "visits is reset: its next start begins at the beginning.\n"
    assert reset(answer="y\n").output == f"{shown}y\n{done}"
    assert [path.name for path in (place / "out").iterdir() if path.is_file()] == ["mine.csv"]
    assert reset().output == "Nothing to delete: the next start of visits begins at the beginning.\n"
    run()
    assert facts()["sinks"][0]["holds"] == files


def test_json_only_looks_unless_it_is_told_not_to_ask(place: Path) -> None:
    found = facts()
    assert found["is_reset"] is False
    assert [sink["holds"] for sink in found["sinks"]] == [found["sinks"][0]["holds"], "1,200 events", ""]
    assert found == facts()
    told = json.loads(reset("--json", "--yes").output)
    assert told == {**found, "is_reset": True}
    assert [sink["holds"] for sink in facts()["sinks"]] == []
    assert facts()["checkpoints"] == []


def test_a_fresh_run_starts_over_without_asking(place: Path) -> None:
    before = facts()["sinks"][0]["holds"]
    run()
    assert facts()["sinks"][0]["holds"] == before, "it had finished"
    result = call("run", "program.py", "--fresh", "--json")
    notes = [json.loads(line) for line in result.output.splitlines() if "starts over" in line]
    assert len(notes) == 1
    assert "1,200 events of sink 'all' (stream app/n" in json.dumps(notes[0])
    assert facts()["sinks"][0]["holds"].endswith("with 1,200 records")


def test_a_pipeline_that_runs_is_left_alone(place: Path) -> None:
    before = facts()
    lock = PipelineLock.acquire(str(place / "home"), "visits", "process 1 on far")
    result = reset("--yes")
    lock.release()
    assert isinstance(result.exception, UsageError)
    assert "is run by process 1 on far, and cannot start over meanwhile; stop it first: headgate stop visits" in str(
        result.exception
    )
    assert facts() == before


def test_a_pipeline_that_is_not_there_is_named(place: Path) -> None:
    result = call("reset", "visit", "--dir", "home")
    assert str(result.exception) == f"there is no pipeline 'visit' in {place}/home"
    assert not (place / "home" / "visit").exists()


def test_a_pipeline_without_registered_targets_needs_its_program(place: Path) -> None:
    for path in (place / "home" / "visits" / "targets").iterdir():
        path.unlink()
    result = reset("--yes")
    assert "headgate run PROGRAM --fresh" in str(result.exception)
    run("--fresh")
    assert facts()["sinks"][0]["holds"].endswith("with 1,200 records")


@pytest.mark.parametrize("options", [("--restore", "3"), ("--standby",)])
def test_what_does_not_go_together_is_refused(place: Path, options: tuple[str, ...]) -> None:
    result = call("run", "program.py", "--fresh", *options)
    assert isinstance(result.exception, UsageError)
    assert "--fresh" in str(result.exception)
