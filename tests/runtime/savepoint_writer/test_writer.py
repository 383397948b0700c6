"""Savepoints written from frames: new ones, changed ones, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import UsageError
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.state import snapshot

KEYS = list(range(200))
ROWS = {
    "count": pl.DataFrame({"key": KEYS, "value": [key * 2 for key in KEYS]}),
    "ids": pl.DataFrame({"key": [k for k in KEYS for _ in range(3)], "value": list(range(600))}),
    "last": pl.DataFrame({"key": KEYS * 2, "map_key": ["odd"] * 200 + ["even"] * 200, "value": list(range(400))}),
}
TIMES = pl.DataFrame({"key": KEYS, "time_ms": [1_000 + key for key in KEYS]})
EVENT_TIMERS = "headgate.timers.event_time"


class Everything(hg.ProcessFunction):
    """Declares state of every kind."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.last = state.map("last", pa.string(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


class Timed(Everything):
    """Is called by timers, too."""

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Any:
        yield {"key": context.key}


class Expiring(hg.ProcessFunction):
    """Remembers for a while."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.list("seen", pa.int64(), ttl=hg.TTL("7d"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


def pipeline(
    root: Path, function: hg.ProcessFunction | None = None, *, key: Sequence[str] = ("key",), **options: Any
) -> hg.Pipeline:
    """Return a pipeline with a process function, a reduction and a window."""
    made = hg.Pipeline(
        "p", parallelism=3, checkpointing=hg.Checkpointing(interval="1s", dir=root / "checkpoints"), **options
    )
    rows = made.source(hg.FromRows([{"key": 1, "other": 1, "value": 1.5}]), name="in")
    rows.key_by(*key).process(function or Everything(), name="all").sink(hg.Discard(), name="nowhere")
    rows.key_by("key").reduce(lambda one, other: other, name="newest").sink(hg.Discard(), name="nowhere2")
    return made


def full(root: Path, path: Path, **options: Any) -> hg.WrittenSavepoint:
    """Write a savepoint with all of ``ROWS``."""
    draft = hg.new_savepoint(pipeline(root), path, **options)
    for name, rows in ROWS.items():
        draft.with_state("all", name, rows)
    return draft.write()


def same(found: pl.DataFrame, wanted: pl.DataFrame) -> bool:
    """Whether the rows are the same; those of one key in the same order."""
    assert found.columns == wanted.columns
    assert dict(found.schema) == dict(wanted.schema)
    return found.sort("key", maintain_order=True).equals(wanted.sort("key", maintain_order=True))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = full(tmp_path, tmp_path / "new")
    assert dict(written.rows) == {("all", name): rows.height for name, rows in ROWS.items()}
    for name, rows in ROWS.items():
        assert same(hg.read_state(tmp_path / "new", "all", name), rows)
    savepoint = SavepointDirectory(str(tmp_path / "new")).read()
    texts = pipeline(tmp_path).definition().plan.state_texts()
    assert (savepoint.pipeline, savepoint.manifest.state_texts) == ("p", texts)
    assert savepoint.manifest.parallelism == 3


def test_what_is_read_written_and_read_again_is_equal(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one", parallelism=2)
    draft = hg.new_savepoint(pipeline(tmp_path), tmp_path / "two", parallelism=5)
    for name in ROWS:
        rows = hg.read_state(tmp_path / "one", "all", name)
        everything = [*rows.columns, "_subtask", "_key_group"]
        draft.with_state("all", name, hg.read_state(tmp_path / "one", "all", name, columns=everything))
    draft.write()
    edited = hg.edit_savepoint(tmp_path / "two", tmp_path / "three")
    for name in ROWS:
        edited.replace("all", name, hg.read_state(tmp_path / "two", "all", name))
    edited.write()
    for name, rows in ROWS.items():
        assert same(hg.read_state(tmp_path / "two", "all", name), rows)
        assert hg.read_state(tmp_path / "three", "all", name).equals(hg.read_state(tmp_path / "two", "all", name))


def test_keys_are_where_the_product_looks_for_them(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "new")
    for key in (0, 7, 199):
        assert hg.read_state(tmp_path / "new", "all", "count", keys=[key])["value"].to_list() == [key * 2]
    where = hg.read_state(tmp_path / "new", "all", "count", columns=["_subtask", "_key_group"])
    assert set(where["_subtask"]) == {0, 1, 2}
    assert (where["_key_group"] * 3 // 128).cast(pl.Int32).equals(where["_subtask"])


def test_large_state_is_cut_by_key_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 256)
    full(tmp_path, tmp_path / "new")
    manifest = SavepointDirectory(str(tmp_path / "new")).read().manifest
    ranges = [p.key_groups for e in manifest.entries for p in e.parts if p.section == "state/all"]
    assert len(ranges) > 3
    for name, rows in ROWS.items():
        assert same(hg.read_state(tmp_path / "new", "all", name), rows)


def of_kinds(rows: pl.DataFrame) -> list[Any]:
    table = rows.to_arrow()
    return [rows, rows.lazy(), rows.to_pandas(), table, table.combine_chunks().to_batches()[0], table.to_reader()]


def test_rows_are_of_any_kind_of_frame(tmp_path: Path) -> None:
    for number, rows in enumerate(of_kinds(ROWS["last"])):
        hg.new_savepoint(pipeline(tmp_path), tmp_path / str(number)).with_state("all", "last", rows).write()
        assert same(hg.read_state(tmp_path / str(number), "all", "last"), ROWS["last"])
    with pytest.raises(UsageError, match="a frame is needed, of Polars, pandas, Arrow or Spark, not list"):
        hg.new_savepoint(pipeline(tmp_path), tmp_path / "no").with_state("all", "last", [{"key": 1}])


def test_columns_may_be_narrower_and_in_another_order(tmp_path: Path) -> None:
    rows = pl.DataFrame({"value": [1, 2], "key": [3, 4]}, schema={"value": pl.Int16, "key": pl.UInt32})
    hg.new_savepoint(pipeline(tmp_path), tmp_path / "new").with_state("all", "count", rows).write()
    assert sorted(hg.read_state(tmp_path / "new", "all", "count").rows()) == [(3, 1), (4, 2)]


WRONG: dict[str, tuple[str, pl.DataFrame, str]] = {
    "missing": ("count", pl.DataFrame({"key": [1]}), "has the columns .*, but the rows lack value"),
    "unknown": ("count", pl.DataFrame({"key": [1], "value": [1], "x": [1]}), "have an unknown column x"),
    "text": ("count", pl.DataFrame({"key": ["1"], "value": [1]}), "'key' is int64, which cannot hold str '1'"),
    "fraction": ("count", pl.DataFrame({"key": [1.5], "value": [1]}), "'key' is int64, which cannot hold float 1.5"),
    "too-large": (
        "count",
        pl.DataFrame({"key": [2**63], "value": [1]}),
        "'key' is int64, which cannot hold int 9223372036854775808",
    ),
    "null": ("count", pl.DataFrame({"key": [1], "value": [None]}), "column 'value' has a null, which is never stored"),
    "null-key": ("ids", pl.DataFrame({"key": [None, 1], "value": [1, 1]}), "column 'key' has a null"),
    "twice": ("count", pl.DataFrame({"key": [4, 4], "value": [1, 2]}), "{'key': 4} more than once"),
    "entry-twice": (
        "last",
        pl.DataFrame({"key": [4, 4], "map_key": ["a", "a"], "value": [1, 2]}),
        "{'key': 4, 'map_key': 'a'} more than once",
    ),
    "list": ("ids", pl.DataFrame({"key": [1], "value": [[1]]}), "'value' is int64, which cannot hold list"),
    "state": ("sum", pl.DataFrame({"key": [1], "value": [1]}), "operator 'all' has no state 'sum'; it has count, ids"),
    "timers": (EVENT_TIMERS, TIMES, "has no state 'headgate.timers.event_time'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_do_not_fit_are_refused_by_one_sentence(tmp_path: Path, name: str) -> None:
    state, rows, said = WRONG[name]
    draft = hg.new_savepoint(pipeline(tmp_path), tmp_path / "new").with_state("all", state, rows)
    with pytest.raises(UsageError, match=said) as refused:
        draft.write()
    assert "\n" not in str(refused.value)
    assert "operator 'all'" in str(refused.value)
    full(tmp_path, tmp_path / "new")
    edited = hg.edit_savepoint(tmp_path / "new", tmp_path / "no").replace("all", state, rows)
    with pytest.raises(UsageError, match=said):
        edited.write()


def test_other_wrong_uses_are_told(tmp_path: Path) -> None:
    draft = hg.new_savepoint(pipeline(tmp_path), tmp_path / "new")
    with pytest.raises(UsageError, match=r"no operator 'al' in pipeline 'p'; the operators are all, in, newest$"):
        draft.with_state("al", "count", ROWS["count"])
    with pytest.raises(UsageError, match="state 'count' of operator 'all' is given twice"):
        draft.with_state("all", "count", ROWS["count"]).with_state("all", "count", ROWS["count"])
    with pytest.raises(UsageError, match=r"needs a headgate\.Pipeline, not str"):
        hg.new_savepoint("p", tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="parallelism must be an integer between 1 and 128"):
        hg.new_savepoint(pipeline(tmp_path), tmp_path / "new", parallelism=1_000)
    with pytest.raises(UsageError, match="neither a savepoint nor a checkpoint"):
        hg.edit_savepoint(tmp_path / "nothing", tmp_path / "new")
    full(tmp_path, tmp_path / "new")
    edited = hg.edit_savepoint(tmp_path / "new", tmp_path / "no")
    with pytest.raises(UsageError, match="no operator 'gone' in the savepoint"):
        edited.drop("gone")
    with pytest.raises(UsageError, match="no state 'x'; it has count, ids, last"):
        edited.drop("all", "x").write()
    with pytest.raises(UsageError, match="has 128 key groups, but the pipeline 64; give it max_parallelism=128"):
        hg.edit_savepoint(tmp_path / "new", tmp_path / "no", pipeline=pipeline(tmp_path, max_parallelism=64))
    assert not (tmp_path / "no" / "savepoint").exists()


def test_windows_begin_empty_and_can_be_changed_later(tmp_path: Path) -> None:
    made = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    rows = made.source(hg.FromRows([{"key": 1, "at": datetime(2026, 1, 1)}]), name="in").with_timestamps("at")
    rows.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len(), name="counts").sink(hg.Discard())
    state = pl.DataFrame({"key": [1], "window_start": [datetime(2026, 1, 1)], "rows": [1], "partial_0": [1]})
    draft = hg.new_savepoint(made, tmp_path / "new").with_state("counts", "windows", state)
    with pytest.raises(UsageError, match="state of operator 'counts' cannot be made before it has run"):
        draft.write()
    assert hg.new_savepoint(made, tmp_path / "new").write().empty == ("counts",)


def test_what_begins_empty_and_at_the_beginning_is_said(tmp_path: Path) -> None:
    written = hg.new_savepoint(pipeline(tmp_path), tmp_path / "new").with_state("all", "count", ROWS["count"]).write()
    assert (written.empty, written.from_the_beginning) == (("newest",), ("in",))
    assert str(written).splitlines()[1:] == [
        "state 'count' of operator 'all' has 200 rows",
        "operator 'newest' begins empty",
        "source 'in' begins at the beginning of its input",
    ]


def test_positions_of_sources_are_set_and_taken_away(tmp_path: Path) -> None:
    positions = pl.DataFrame({"split": ["a", "b"], "position": [b"1", b"2"]})
    written = hg.new_savepoint(pipeline(tmp_path), tmp_path / "new").with_state("in", "positions", positions).write()
    assert (written.from_the_beginning, dict(written.rows)) == ((), {("in", "positions"): 2})
    found = hg.read_state(tmp_path / "new", "in", "positions")
    assert found.select("split", "position").rows() == positions.rows()
    edited = hg.edit_savepoint(tmp_path / "new", tmp_path / "two")
    edited.replace("in", "positions", found.with_columns(_subtask=pl.Series([2, 1], dtype=pl.Int32))).write()
    assert sorted(hg.read_state(tmp_path / "two", "in", "positions").select("split", "_subtask").rows()) == [
        ("a", 2),
        ("b", 1),
    ]
    dropped = hg.edit_savepoint(tmp_path / "two", tmp_path / "three").drop("in", "positions").write()
    assert dropped.from_the_beginning == ("in",)
    assert "in" not in hg.state_catalog(tmp_path / "three")["operator"].to_list()
    again = hg.edit_savepoint(tmp_path / "two", tmp_path / "no")
    again.replace("in", "positions", pl.concat([positions, positions]))
    with pytest.raises(UsageError, match="the rows have the split 'a' more than once"):
        again.write()
