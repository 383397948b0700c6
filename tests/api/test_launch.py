"""What a start may name, as users say it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from typer.testing import CliRunner

import headgate as hg
from headgate import testing
from headgate.cli.app import app
from headgate.cli.output import outcome_of, result_text
from headgate.display.progress import end_text
from headgate.errors import PipelineFailed, UsageError
from headgate.model.config import StartConfig
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import SilentObserver
from headgate.spark import session
from headgate.spark.session import check_cluster


def started(monkeypatch: pytest.MonkeyPatch, root: Path, **begins: Any) -> StartConfig:
    """Return what a start hands over."""
    found: list[PipelineDefinition] = []
    monkeypatch.setattr("headgate.spark.session.start_pipeline", lambda definition, **_: found.append(definition))
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    pipeline.start(**begins)
    return found[0].config.start


def test_what_a_start_names_reaches_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # SV20
    assert started(monkeypatch, tmp_path) == StartConfig()
    begins = started(monkeypatch, tmp_path, restore=tmp_path / "taken", allow_unclaimed_state=["sum"])
    assert begins == StartConfig(str(tmp_path / "taken"), None, frozenset({"sum"}))
    assert started(monkeypatch, tmp_path, restore="s3://bucket/taken").restore == "s3://bucket/taken"
    monkeypatch.chdir(tmp_path)
    assert started(monkeypatch, tmp_path, restore="taken").restore == str(tmp_path / "taken")
    moved = started(monkeypatch, tmp_path, moved={"in": tmp_path / "new", "s3://b/old": "s3://b/new"}).moved  # EV15
    assert {(str(tmp_path / "in"), str(tmp_path / "new")), ("s3://b/old", "s3://b/new"), ("b/old", "b/new")} == {*moved}
    assert ("kafka:old", "kafka:new") in started(monkeypatch, tmp_path, moved={"kafka:old": "kafka:new"}).moved
    own = started(monkeypatch, tmp_path, restore=41, go_back_past=43)
    assert own == StartConfig(str(tmp_path / "checkpoints" / "p" / "chk-41"), 43)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begins", "problem"),
    [
        ({"restore": 0}, "restore must be the id of a checkpoint, not 0"),
        ({"restore": "x", "go_back_past": "17"}, "go_back_past must be the id of a checkpoint, not '17'"),
        ({"go_back_past": 17}, "give both"),
        ({"allow_unclaimed_state": "sum"}, "must be a list of names, such as"),
        ({"moved": ["/old"]}, "moved must map former places to those of now"),
    ],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begins: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        started(monkeypatch, tmp_path, **begins)


class Context:
    """Of a cluster with two slots."""

    master = "local[2]"

    def __init__(self) -> None:
        self.defaultParallelism = 2  # as Spark spells it
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


def test_a_run_that_cannot_begin_deletes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # SO4
    happened: list[str] = []

    def no_java(*_: Any) -> None:
        happened.append("checked")
        raise UsageError("there is no Java")

    monkeypatch.setattr("headgate.api.launch.start_over", lambda *_: happened.append("deleted"))
    for check, expected in ((no_java, ["checked"]), (lambda *_: happened.append("checked"), ["checked", "deleted"])):
        happened.clear()
        monkeypatch.setattr("headgate.spark.session.check_cluster", check)
        with suppress(UsageError):
            started(monkeypatch, tmp_path, fresh=True)
        assert happened == expected


def test_a_supervisor_that_cannot_begin_deletes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # SO4
    happened: list[str] = []

    def no_master(*_: Any) -> None:
        raise UsageError("there is no such master")

    program = tmp_path / "program.py"
    program.write_text(
        "import headgate as hg\n"
        "p = hg.Pipeline('p', parallelism=1)\n"
        "p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\n"
    )
    monkeypatch.setattr("headgate.cli.run.check_cluster", no_master)
    monkeypatch.setattr("headgate.cli.run.start_over", lambda *_: happened.append("deleted"))
    monkeypatch.setattr("headgate.cli.run.exec_supervisor", lambda *_: happened.append("kept"))
    options = ["--fresh", "--supervised", "--quiet", "--dir", str(tmp_path / "home")]
    result = CliRunner().invoke(app, ["run", str(program), *options])
    assert str(result.exception) == "there is no such master"
    assert happened == []


@pytest.mark.parametrize("whose", ["made for it", "given", "of this process"])
def test_a_check_stops_only_the_context_that_it_made(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    context = Context()
    monkeypatch.setattr(SparkContext, "_active_spark_context", context if whose == "of this process" else None)
    monkeypatch.setattr("headgate.spark.session.make_context", lambda *_: context)
    given = context if whose == "given" else None
    with pytest.raises(UsageError, match="parallelism 3 needs as many slots"):
        check_cluster("p", 3, given, None)
    assert context.is_stopped == (whose == "made for it")
    check_cluster("p", 2, given, None)


ENDLESS = 10_000_000


def pipeline(root: Path, rows: int = 40) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(interval="20ms", dir=root / "checkpoints")
    p = hg.Pipeline("p", parallelism=2, checkpointing=checkpointing)
    rate = 1_000 if rows == ENDLESS else None
    source = p.source(hg.Generator({"n": hg.Uniform(0, 9)}, rows=rows, rows_per_second=rate), name="in")
    source.sink(hg.FileSink(root / "out", roll_interval=0), name="out")
    return p


class Notes(SilentObserver):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str) -> None:
        self.texts.append(str(text))


def no_context(*_: object, **__: object) -> None:
    raise AssertionError("Spark is asked for")


def test_a_pipeline_that_has_finished_says_so_without_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = testing.run(pipeline(tmp_path))
    assert not first.had_finished
    for name in ("find_context", "make_context", "ensure_jvm"):
        monkeypatch.setattr(session, name, no_context)
    notes = Notes()
    handle = pipeline(tmp_path).start(observer=notes)
    again = handle.wait(300)
    assert again is not None
    assert (again.is_finished, again.had_finished, again.records_in) == (True, True, 40)
    assert again.last_checkpoint == first.last_checkpoint
    assert result_text(again) == "nothing to do: it had finished before, after 40 records in, 40 out"
    assert end_text(again) == "it had finished before"
    assert any("has already processed all its input" in text for text in notes.texts)


def test_a_damaged_end_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether anything is left to do decides the claim, with workers if need be."""
    testing.run(pipeline(tmp_path))
    newest = max((tmp_path / "checkpoints" / "p" / "log").iterdir())
    newest.write_bytes(newest.read_bytes()[:-3])
    monkeypatch.setattr(session, "find_context", no_context)
    with pytest.raises(PipelineFailed, match="Spark is asked for"):
        pipeline(tmp_path).start()


def test_a_cancelled_run_says_that_it_was_cancelled(tmp_path: Path) -> None:
    with testing.running(pipeline(tmp_path, ENDLESS)) as handle:
        while (taken := handle.take_checkpoint()) is None or taken.checkpoint is None:
            pass
        handle.cancel()
        result = handle.wait(300)
    assert result is not None
    assert result.is_cancelled
    text = f"cancelled; the same command continues from checkpoint {result.last_checkpoint} after "
    assert result_text(result).startswith(text)
    assert end_text(result) == f"cancelled; the next run continues from checkpoint {result.last_checkpoint}"
    assert outcome_of(result) == "cancelled"
    with testing.running(pipeline(tmp_path, ENDLESS)) as handle:
        stopped = handle.stop()
    assert stopped is not None
    assert not stopped.is_cancelled
