"""A pipeline starts over: its checkpoints and its output go together, and the next run is as one fresh run (SO)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.support import sqlite_sinks
from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect
from typer.testing import CliRunner, Result

import headgate as hg
from headgate.cli.app import app
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.errors import PipelineFailed, UsageError
from headgate.model.plan import PipelineDefinition
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.reset import Reset
from headgate.store.store import Store

cloudpickle.register_pickle_by_value(sqlite_sinks)  # workers do not import tests

ROWS = 300


class World:
    """One place on disk, with a pipeline that writes to a sink of each kind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files, self.store, self.table = (str(root / name) for name in ("files", "store", "numbers.db"))

    def pipeline(self, factor: int = 1, *, text: str = "text", sinks: str = "files stream own ledger") -> hg.Pipeline:
        """``factor`` and ``text`` change the program: other rows, other columns of what it writes."""
        kept = hg.Checkpointing("100ms", dir=str(self.root / "home"))
        made = hg.Pipeline("p", parallelism=2, checkpointing=kept)
        rows = made.source(hg.FromRows([{"number": n} for n in range(ROWS)], splits=2, batch_rows=20))
        out = rows.select(number=pl.col("number") * factor, text=pl.col("number").cast(pl.String))
        targets: dict[str, Any] = {
            "files": hg.FileSink(self.files, "parquet", roll_interval=0),
            "stream": hg.StreamSink("app/out", store=self.store),
            "own": SqliteSink(self.table),
            "ledger": SqliteLedgerSink(self.table),
        }
        for name in sinks.split():
            renamed = out if name in ("own", "ledger") else out.select("number", **{text: pl.col("text")})
            renamed.sink(targets[name], name=name)
        return made

    def run(self, pipeline: hg.Pipeline, **options: Any) -> Any:
        return pipeline.run(**options)

    def in_files(self) -> Counter[int]:
        return Counter(read_committed(self.files)["number"].to_list() if committed_files(self.files) else [])

    def in_stream(self) -> Counter[int]:
        with Store.open(self.store) as store:
            if "app/out" not in {info.name for info in store.list_streams()}:
                return Counter()
            found: Counter[int] = Counter()
            for segment in range(store.describe("app/out").segments_count):
                reader = store.reader("app/out", segment)
                while (batch := reader.read()) is not None:
                    found.update(batch.column("number").to_pylist())
            return found

    def in_table(self) -> Counter[int]:
        with connect(self.table) as target:
            return Counter(number for (number,) in target.execute("select number from numbers"))

    def all(self) -> list[Counter[int]]:
        return [self.in_files(), self.in_stream(), self.in_table()]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def once(factor: int = 1) -> list[Counter[int]]:
    """What one fresh run writes: two sinks write to the table."""
    numbers = Counter(n * factor for n in range(ROWS))
    return [numbers, numbers, numbers + numbers]


def is_left_alone(world: World, **program: Any) -> bool:
    """Run once more what has finished; return whether it changed nothing, and reported what it had counted."""
    before = world.all()
    result = world.pipeline(**program).run()
    return result.is_finished and result.records_in == ROWS and world.all() == before


def reset(world: World, program: PipelineDefinition | None = None) -> Any:
    with Reset.holding_the_lock(str(world.root / "home"), "p", program) as resetting:
        plan = resetting.plan()
        resetting.carry_out(plan)
        return plan


def test_a_fresh_run_is_as_the_first_one(world: World, started: Any) -> None:  # SO5
    world.pipeline().run()
    assert world.all() == once()
    world.pipeline().run(fresh=True)
    assert world.all() == once()
    world.pipeline(factor=3).run(fresh=True)
    assert world.all() == once(3)
    assert is_left_alone(world, factor=3), "it has finished"


def test_another_program_may_write_other_columns(world: World, started: Any) -> None:  # SO5
    world.pipeline(sinks="files stream").run()
    world.pipeline(sinks="files stream").run(fresh=True)
    reset(world)
    world.pipeline(factor=2, text="words", sinks="files stream").run()
    assert world.all()[:2] == once(2)[:2]
    with Store.open(world.store) as store:
        assert "words" in store.describe("app/out").schema.names


def test_a_sink_that_the_program_has_no_more_is_emptied_too(world: World, started: Any) -> None:
    world.pipeline(sinks="files stream").run()
    world.pipeline(sinks="stream").run(fresh=True)
    assert world.in_files() == Counter()
    assert world.in_stream() == once()[1]


def test_what_is_written_down_is_enough_for_files_and_streams(world: World, started: Any) -> None:
    world.pipeline(sinks="files stream").run()
    (Path(world.files) / "notes.txt").write_text("mine")
    plan = reset(world)
    assert {found.target.sink: found.holding.what.partition("with ")[2] for found in plan.targets} == {
        "files": f"{ROWS} records",
        "stream": "",
    }
    assert [found.holding.stays for found in plan.targets if found.target.sink == "files"] == [("notes.txt",)]
    assert world.all()[:2] == [Counter(), Counter()]
    assert (Path(world.files) / "notes.txt").read_text() == "mine"
    assert list((world.root / "home" / "p").glob("chk-*")) == []
    assert list((world.root / "home" / "p" / "resets").glob("*")) == [], "the order goes last"
    world.pipeline(sinks="files stream").run()
    assert world.all()[:2] == once()[:2]


def test_a_sink_of_ones_own_needs_the_program(world: World, started: Any) -> None:  # SO4
    world.pipeline().run()
    before = world.all()
    with pytest.raises(UsageError, match="run: headgate run PROGRAM --fresh"):
        reset(world)
    assert world.all() == before
    assert is_left_alone(world)


def test_a_sink_that_cannot_remove_its_output_keeps_everything(
    world: World, started: Any, monkeypatch: Any
) -> None:  # SO4
    world.pipeline().run()
    monkeypatch.delattr(sqlite_sinks.SqliteTarget, "remove_output")
    before = world.all()
    with pytest.raises(UsageError, match="give it a method remove_output"):
        world.pipeline().run(fresh=True)
    assert world.all() == before
    for name in ("own", "ledger"):
        SqliteSink(world.table).forget_owner("p", name)
    world.pipeline().run(fresh=True)
    assert world.all()[:2] == once()[:2]
    assert world.in_table() == once()[2] + once()[2], "nobody has removed what was there"


def test_a_stream_that_others_write_to_keeps_everything(world: World, started: Any) -> None:  # SO4
    world.pipeline(sinks="files stream").run()
    with Store.open(world.store) as store:
        writer = store.writer("app/out")
        schema = store.describe("app/out").schema
        writer.append(pa.RecordBatch.from_pylist([{"number": 7, "text": "7"}], schema))
        writer.flush()
        writer.close()
    before = world.all()
    with pytest.raises(UsageError, match="also holds what others have written"):
        world.pipeline(sinks="files stream").run(fresh=True)
    assert world.all() == before
    assert is_left_alone(world, sinks="files stream")


def test_whoever_removed_the_checkpoints_by_hand_may_start_over(world: World, started: Any) -> None:  # SO4
    world.pipeline().run()
    shutil.rmtree(world.root / "home")
    with pytest.raises(PipelineFailed, match="headgate run PROGRAM --fresh"):
        world.pipeline().run()
    world.pipeline().run(fresh=True)
    assert world.all() == once()


def test_what_another_directory_wrote_is_not_deleted(world: World, started: Any) -> None:  # SO4
    world.pipeline(sinks="files").run()
    other = world.pipeline(sinks="files")
    other.override(checkpoint_dir=str(world.root / "elsewhere"))
    with pytest.raises(UsageError, match=f"headgate reset p --dir {world.root}/home"):
        other.run(fresh=True)
    assert world.in_files() == once()[0]


def test_a_first_start_may_be_a_fresh_one(world: World, started: Any) -> None:
    world.pipeline().run(fresh=True)
    assert world.all() == once()


def test_fresh_and_restore_contradict_each_other(world: World) -> None:
    with pytest.raises(UsageError, match="not both"):
        world.pipeline().run(fresh=True, restore="elsewhere")


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


def reset_by_command(*options: str, answer: str = "") -> Result:
    return call("reset", "visits", "--dir", "home", *options, answer=answer)


def facts() -> dict[str, Any]:
    return dict(json.loads(reset_by_command("--json").output))


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
    assert reset_by_command(answer="n\n").output == f"{shown}n\nAborted.\n"
    assert facts()["sinks"][0]["holds"] == files
    done = "visits is reset: its next start begins at the beginning.\n"
    assert reset_by_command(answer="y\n").output == f"{shown}y\n{done}"
    assert [path.name for path in (place / "out").iterdir() if path.is_file()] == ["mine.csv"]
    assert reset_by_command().output == "Nothing to delete: the next start of visits begins at the beginning.\n"
    run()
    assert facts()["sinks"][0]["holds"] == files


def test_json_only_looks_unless_it_is_told_not_to_ask(place: Path) -> None:
    found = facts()
    assert found["is_reset"] is False
    assert [sink["holds"] for sink in found["sinks"]] == [found["sinks"][0]["holds"], "1,200 events", ""]
    assert found == facts()
    told = json.loads(reset_by_command("--json", "--yes").output)
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
    result = reset_by_command("--yes")
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
    result = reset_by_command("--yes")
    assert "headgate run PROGRAM --fresh" in str(result.exception)
    run("--fresh")
    assert facts()["sinks"][0]["holds"].endswith("with 1,200 records")


@pytest.mark.parametrize("options", [("--restore", "3"), ("--standby",)])
def test_what_does_not_go_together_is_refused(place: Path, options: tuple[str, ...]) -> None:
    result = call("run", "program.py", "--fresh", *options)
    assert isinstance(result.exception, UsageError)
    assert "--fresh" in str(result.exception)
