"""A pipeline starts over: its checkpoints and its output go together, and the next run is as one fresh run (SO)."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests import sqlite_sinks
from tests.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect

import headgate as hg
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.errors import PipelineFailed, UsageError
from headgate.model.plan import PipelineDefinition
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
