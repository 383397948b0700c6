"""An edited program goes on correctly, or is refused with a sentence (EV13 to EV17)."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.model.progress import SilentObserver
from headgate.testing import PAUSE, ScriptedSource

Row = dict[str, Any]

SEEN: list[Row] = []
CHANGED = threading.Condition()


def see(row: Row) -> bool:
    """Keep every record, and let a test wait for it."""
    with CHANGED:
        SEEN.append(row)
        CHANGED.notify_all()
    return True


class Notes(SilentObserver):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def pipeline(parallelism: int = 1) -> hg.Pipeline:
    return hg.Pipeline("p", parallelism=parallelism, checkpointing=hg.Checkpointing(interval="1h"))


def run_until(seen: int, made: hg.Pipeline, root: Path, **begins: Any) -> list[str]:
    """Run until so many records were seen, then stop; return what the user was told."""
    SEEN.clear()
    notes = Notes()
    with testing.running(made, checkpoint_dir=root / "checkpoints", observer=notes, **begins) as handle:
        handle.when_ended(lambda: see({}))
        with CHANGED:
            assert CHANGED.wait_for(lambda: len(SEEN) >= seen, 30)
        handle.stop()
        assert handle.wait(30) is not None
    return notes.notes


def refused(made: hg.Pipeline, root: Path, **begins: Any) -> str:
    """Return why a start is refused."""
    with pytest.raises(hg.PipelineFailed) as failed:
        testing.run(made, checkpoint_dir=root / "checkpoints", **begins)
    return str(failed.value)


def append(path: Path, *values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"k": "k", "v": value}) + "\n" for value in values)


def lines(*paths: Path, **options: Any) -> hg.JsonLines:
    return hg.JsonLines(list(paths), {"k": str, "v": int}, follow=True, discovery_interval="20ms", **options)


def written(directory: Path) -> list[int]:
    return sorted(read_committed(str(directory))["v"].to_list()) if directory.exists() else []


def to_sinks(sources: Mapping[str, hg.Stream], root: Path) -> None:
    for name, stream in sources.items():
        stream.filter(see, name=f"see-{name}").sink(
            hg.FileSink(root / "out" / name, roll_interval=0), name=f"out-{name}"
        )


# -- sources ----------------------------------------------------------------------------------------------------------


def copying(root: Path, order: str, names: Mapping[str, str] = {}, parallelism: int = 1) -> hg.Pipeline:
    """Copy each directory of ``order`` to a sink of its own; sources without ``names``."""
    made = pipeline(parallelism)
    to_sinks({one: made.source(lines(root / one), name=names.get(one)) for one in order}, root)
    return made


@pytest.mark.parametrize("parallelism", [1, 2])
def test_unnamed_sources_that_change_places_are_refused_and_go_on_under_their_names(
    tmp_path: Path, parallelism: int
) -> None:  # EV13, EV14
    append(tmp_path / "a" / "x", 1, 2)
    append(tmp_path / "b" / "x", 10, 20)
    run_until(4, copying(tmp_path, "ab"), tmp_path)
    append(tmp_path / "a" / "x", 3)
    append(tmp_path / "b" / "x", 30)
    why = refused(copying(tmp_path, "ba", parallelism=parallelism), tmp_path)
    assert f"source 'source' read {tmp_path / 'a'}" in why
    assert f"reads {tmp_path / 'b'} now, as 'source-2' did" in why
    assert "name='source-2'" in why
    run_until(2, copying(tmp_path, "ba", {"a": "source", "b": "source-2"}, parallelism), tmp_path)
    assert (written(tmp_path / "out" / "a"), written(tmp_path / "out" / "b")) == ([1, 2, 3], [10, 20, 30])


def test_an_unnamed_source_before_others_takes_the_place_of_none(tmp_path: Path) -> None:  # EV14
    for one in "ab":
        append(tmp_path / one / "x", 1)
    run_until(1, copying(tmp_path, "a"), tmp_path)
    assert "source 'source' read" in refused(copying(tmp_path, "ba"), tmp_path)
    run_until(1, copying(tmp_path, "ba", {"b": "new"}), tmp_path)
    assert [written(tmp_path / "out" / one) for one in "ab"] == [[1], [1]]


def test_an_unnamed_source_behind_one_that_was_removed_is_refused(tmp_path: Path) -> None:  # EV14
    for one in "ab":
        append(tmp_path / one / "x", 1)
    run_until(2, copying(tmp_path, "ab"), tmp_path)
    left = {"allow_unclaimed_state": ["source-2", "out-a"]}
    assert "as 'source-2' did" in refused(copying(tmp_path, "b"), tmp_path, **left)
    append(tmp_path / "b" / "x", 2)
    run_until(1, copying(tmp_path, "b", {"b": "source-2"}), tmp_path, allow_unclaimed_state=["source", "out-a"])
    assert written(tmp_path / "out" / "b") == [1, 2]


def parquet(root: Path, order: str) -> hg.Pipeline:
    made = pipeline()
    to_sinks({one: made.source(hg.ParquetFiles(root / one)) for one in order}, root)
    to_sinks({"w": made.source(lines(root / "w"), name="waiting")}, root)
    return made


def test_unnamed_parquet_sources_that_change_places_are_refused(tmp_path: Path) -> None:  # EV14
    for one in "ab":
        append(tmp_path / "w" / one, 1)
        (tmp_path / one).mkdir()
        pq.write_table(pa.table({"k": ["k"], "v": [1]}), tmp_path / one / "x.parquet")
    run_until(4, parquet(tmp_path, "ab"), tmp_path)
    assert "as 'source-2' did" in refused(parquet(tmp_path, "ba"), tmp_path)


@pytest.mark.parametrize(
    "sources",
    [
        lambda: (hg.FromRows([{"k": "a", "v": 1}]), hg.FromRows([{"k": "b", "v": 2}])),
        lambda: (
            ScriptedSource([{"k": "a", "v": 1}, PAUSE], schema={"k": str, "v": int}),
            ScriptedSource([{"k": "b", "v": 2}, PAUSE], schema={"k": str, "v": int}),
        ),
    ],
    ids=["rows", "of a class"],
)
def test_unnamed_sources_of_a_class_are_told_apart_by_what_they_hold(
    tmp_path: Path, sources: Callable[[], tuple[Any, Any]]
) -> None:  # EV14
    def reading(order: Sequence[int]) -> hg.Pipeline:
        made = pipeline()
        found = sources()
        to_sinks({str(one): made.source(found[one]) for one in order}, tmp_path)
        to_sinks({"w": made.source(lines(tmp_path / "w"), name="waiting")}, tmp_path)
        return made

    append(tmp_path / "w" / "x", 1)
    run_until(3, reading([0, 1]), tmp_path)
    assert "source 'source' is what 'source-2' was" in refused(reading([1, 0]), tmp_path)
    append(tmp_path / "w" / "x", 2)
    run_until(1, reading([0, 1]), tmp_path)  # the same program goes on


def following(root: Path, source: hg.JsonLines) -> hg.Pipeline:
    made = pipeline()
    to_sinks({"a": made.source(source, name="in")}, root)
    return made


def test_a_named_source_does_not_go_on_in_another_directory(tmp_path: Path) -> None:  # EV13
    append(tmp_path / "a" / "x", 1)
    append(tmp_path / "b" / "x", 2)
    run_until(1, following(tmp_path, lines(tmp_path / "a")), tmp_path)
    why = refused(following(tmp_path, lines(tmp_path / "b")), tmp_path)
    assert f"source 'in' read {tmp_path / 'a'}" in why
    assert f"--moved '{tmp_path / 'a'}={tmp_path / 'b'}'" in why


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_what_was_moved_is_read_on_if_its_user_says_so(tmp_path: Path, how: str) -> None:  # EV15
    append(tmp_path / "a" / "deep" / "x", 1, 2)
    run_until(2, following(tmp_path, lines(tmp_path / "a")), tmp_path)
    if how == "moved":
        (tmp_path / "a").rename(tmp_path / "b")
    else:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    append(tmp_path / "b" / "deep" / "x", 3)
    moved = {str(tmp_path / "a"): str(tmp_path / "b")}
    run_until(1, following(tmp_path, lines(tmp_path / "b")), tmp_path, moved=moved)
    append(tmp_path / "b" / "deep" / "x", 4)
    run_until(1, following(tmp_path, lines(tmp_path / "b")), tmp_path, moved=moved)  # may be said again
    assert written(tmp_path / "out" / "a") == [1, 2, 3, 4]


def spelled(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    match how:
        case "relative":
            monkeypatch.chdir(tmp_path)
            return "./a"
        case "slash":
            return f"{tmp_path / 'a'}/"
        case "dots":
            return str(tmp_path / "b" / ".." / "a")
        case _:
            os.symlink(tmp_path / "a", tmp_path / "link")
            return str(tmp_path / "link")


@pytest.mark.parametrize("how", ["relative", "slash", "dots", "link"])
def test_a_directory_is_the_same_however_it_is_spelled(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # EV13, EV17
    append(tmp_path / "a" / "x", 1, 2)
    (tmp_path / "b").mkdir()
    run_until(2, following(tmp_path, lines(tmp_path / "a")), tmp_path)
    append(tmp_path / "a" / "x", 3)
    run_until(1, following(tmp_path, lines(Path(spelled(tmp_path, how, monkeypatch)))), tmp_path)
    assert written(tmp_path / "out" / "a") == [1, 2, 3]


def test_a_path_that_is_added_is_read_and_one_that_is_removed_is_not(tmp_path: Path) -> None:  # EV13, EV17
    for one in "abc":
        append(tmp_path / one, 1)
    run_until(2, following(tmp_path, lines(tmp_path / "a", tmp_path / "b")), tmp_path)
    run_until(1, following(tmp_path, lines(tmp_path / "a", tmp_path / "b", tmp_path / "c")), tmp_path)
    for one in "abc":
        append(tmp_path / one, 2)
    notes = run_until(2, following(tmp_path, lines(tmp_path / "a", tmp_path / "c")), tmp_path)
    assert f"source 'in' no longer reads {tmp_path / 'b'}" in notes
    assert written(tmp_path / "out" / "a") == [1, 1, 1, 2, 2]


def test_files_that_a_pattern_leaves_out_are_not_read_on(tmp_path: Path) -> None:  # EV17
    append(tmp_path / "a" / "x.json", 1)
    append(tmp_path / "a" / "y.txt", 2)
    run_until(2, following(tmp_path, lines(tmp_path / "a")), tmp_path)
    append(tmp_path / "a" / "y.txt", 3)
    append(tmp_path / "a" / "x.json", 4)
    run_until(1, following(tmp_path, lines(tmp_path / "a", pattern="*.json")), tmp_path)
    assert written(tmp_path / "out" / "a") == [1, 2, 4]


def test_a_source_whose_positions_are_dropped_reads_another_directory_from_its_beginning(
    tmp_path: Path,
) -> None:  # EV13
    def made(directory: Path) -> hg.Pipeline:
        p = pipeline()
        p.source(lines(directory), name="in").filter(see).sink(hg.Discard(), name="out")
        return p

    append(tmp_path / "a" / "x", 1)
    append(tmp_path / "b" / "x", 2)
    run_until(1, made(tmp_path / "a"), tmp_path)
    hg.edit_savepoint(tmp_path / "checkpoints" / "p", tmp_path / "edited").drop("in", "positions").write()
    run_until(1, made(tmp_path / "b"), tmp_path / "other", restore=tmp_path / "edited")
    assert [row["v"] for row in SEEN if row] == [2]


def test_moved_parquet_files_are_not_read_twice(tmp_path: Path) -> None:  # EV15
    def made(directory: Path) -> hg.Pipeline:
        p = pipeline()
        to_sinks({"a": p.source(hg.ParquetFiles(directory), name="in")}, tmp_path)
        to_sinks({"w": p.source(lines(tmp_path / "w"), name="waiting")}, tmp_path)
        return p

    append(tmp_path / "w" / "x", 1)
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"k": ["k"], "v": [1]}), tmp_path / "a" / "x.parquet")
    run_until(2, made(tmp_path / "a"), tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    pq.write_table(pa.table({"k": ["k"], "v": [2]}), tmp_path / "b" / "y.parquet")
    assert "--moved" in refused(made(tmp_path / "b"), tmp_path)
    run_until(1, made(tmp_path / "b"), tmp_path, moved={tmp_path / "a": tmp_path / "b"})
    assert written(tmp_path / "out" / "a") == [1, 2]


# -- sinks ------------------------------------------------------------------------------------------------------------


def holding(root: Path, order: str, out: Path | None = None, name: str | None = None) -> hg.Pipeline:
    made = pipeline()
    streams = {one: made.source(lines(root / one), name=f"in-{one}").filter(see) for one in "ab"}
    for one in order:
        streams[one].sink(hg.FileSink(out or root / "out" / one), name=name)
    for one in {*"ab"} - {*order}:
        streams[one].sink(hg.Discard(), name=f"gone-{one}")
    return made


def test_unnamed_sinks_that_hold_records_and_change_places_are_refused(tmp_path: Path) -> None:  # EV16
    for one, value in (("a", 1), ("b", 2)):
        append(tmp_path / one / "x", value)
    run_until(2, holding(tmp_path, "ab"), tmp_path)
    assert "sink 'sink' wrote to" in refused(holding(tmp_path, "ba"), tmp_path)
    append(tmp_path / "a" / "x", 3)
    run_until(1, holding(tmp_path, "ab"), tmp_path)
    assert 1 in written(tmp_path / "out" / "a")
    assert written(tmp_path / "out" / "b") == [2]


def test_records_that_a_sink_holds_do_not_go_elsewhere_unsaid(tmp_path: Path) -> None:  # EV16
    append(tmp_path / "a" / "x", 1)
    append(tmp_path / "b" / "x", 9)
    run_until(2, holding(tmp_path, "a", tmp_path / "old", "out"), tmp_path)
    elsewhere = holding(tmp_path, "a", tmp_path / "new", "out")
    assert "which holds 1 records that are not written yet" in refused(elsewhere, tmp_path)
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "old").rename(tmp_path / "new")
    append(tmp_path / "a" / "x", 2)
    moved = {str(tmp_path / "old"): str(tmp_path / "new")}
    run_until(1, holding(tmp_path, "a", tmp_path / "new", "out"), tmp_path, moved=moved)
    assert 1 in written(tmp_path / "new")


def test_a_sink_writes_elsewhere_once_it_holds_nothing(tmp_path: Path) -> None:  # EV16
    def made(out: str, name: str, **options: Any) -> hg.Pipeline:
        p = pipeline()
        found = p.source(lines(tmp_path / "in"), name="in").filter(see)
        found.sink(hg.FileSink(tmp_path / out, **options), name=name)
        return p

    append(tmp_path / "in" / "x", 1)
    run_until(1, made("old", "out"), tmp_path)
    append(tmp_path / "in" / "x", 2)
    run_until(1, made("old", "out", roll_interval=0), tmp_path)
    append(tmp_path / "in" / "x", 3)
    run_until(1, made("new", "out-2", roll_interval=0), tmp_path, allow_unclaimed_state=["out"])
    assert (written(tmp_path / "old"), written(tmp_path / "new")) == ([1, 2], [3])


def test_output_that_was_promised_to_a_stream_is_not_looked_for_in_another(tmp_path: Path) -> None:  # EV16
    def made(stream: str, store: str = "store") -> hg.Pipeline:
        p = pipeline()
        found = p.source(lines(tmp_path / "in"), name="in").filter(see)
        found.sink(hg.StreamSink(stream, str(tmp_path / store)), name="out")
        return p

    append(tmp_path / "in" / "x", 1)
    run_until(1, made("one"), tmp_path)
    assert f"wrote to stream one in {tmp_path / 'store'}" in refused(made("one", "other"), tmp_path)
    append(tmp_path / "in" / "x", 2)
    run_until(1, made("two"), tmp_path)
    with hg.Store.open(tmp_path / "store") as store:
        assert [store.describe(name).events_count for name in ("one", "two")] == [1, 1]
        assert store.describe("one").prepared_count == 0


def test_a_savepoint_is_restored_in_front_of_other_targets(tmp_path: Path) -> None:  # EV16
    def made(out: str, order: str) -> hg.Pipeline:
        p = pipeline()
        streams = {one: p.source(lines(tmp_path / one), name=f"in-{one}").filter(see) for one in "ab"}
        for one in order:
            streams[one].sink(hg.FileSink(tmp_path / out / one))
        return p

    append(tmp_path / "a" / "x", 1)
    append(tmp_path / "b" / "x", 2)
    run_until(2, made("out", "ab"), tmp_path)
    taken = {"restore": tmp_path / "checkpoints" / "p"}
    assert "sink 'sink' is what 'sink-2' was" in refused(made("other", "ba"), tmp_path / "other", **taken)
    for one in "ab":
        append(tmp_path / one / "x", 3)
    run_until(2, made("other", "ab"), tmp_path / "other", **taken)
    assert [written(tmp_path / "other" / one)[0] for one in "ab"] == [1, 2]


# -- operators --------------------------------------------------------------------------------------------------------


def total(one: Row, two: Row) -> Row:
    return {**one, "v": one["v"] + two["v"]}


def product(one: Row, two: Row) -> Row:
    return {**one, "v": one["v"] * two["v"]}


class Counting(hg.ProcessFunction):
    """Multiplies what it has counted, by what its user said."""

    schema = {"k": str, "v": int}

    def __init__(self, by: int) -> None:
        self._by = by

    def open(self, state: hg.StateHandle) -> None:
        self._count = state.value("count", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> list[Row]:
        self._count.put(self._count.get(0) + 1)
        return [{"k": row["k"], "v": self._count.get(0) * self._by}]


def windowed(stream: hg.Stream, least: int) -> hg.Stream:
    timed = stream.filter(pl.col("v") >= least).with_columns(t=pl.lit(0)).with_timestamps("t")
    return timed.key_by("k").window(hg.Tumbling("1m")).agg(v=pl.col("v").sum()).select("k", "v")


PAIRS: dict[str, tuple[Callable[[hg.Stream], hg.Stream], Callable[[hg.Stream], hg.Stream]]] = {
    "functions": (lambda s: s.key_by("k").reduce(total), lambda s: s.key_by("k").reduce(product)),
    "lambdas": (
        lambda s: s.key_by("k").reduce(lambda one, two: {**one, "v": one["v"] + two["v"]}),
        lambda s: s.key_by("k").reduce(lambda one, two: {**one, "v": one["v"] * two["v"]}),
    ),
    "objects": (lambda s: s.key_by("k").process(Counting(1)), lambda s: s.key_by("k").process(Counting(10))),
    "windows": (lambda s: windowed(s, 0), lambda s: windowed(s, 3)),
    "streams": (lambda s: s.key_by("k").reduce(total), lambda s: s.map(dict).key_by("k").reduce(total)),
    "loops": (
        lambda s: s.iterate(lambda x: (x.filter(pl.col("v") < 0), x.key_by("k").reduce(total))),
        lambda s: s.iterate(lambda x: (x.filter(pl.col("v") < -1), x.key_by("k").reduce(total))),
    ),
}


def computing(root: Path, pair: str, order: Sequence[int], *, is_named: bool = False) -> hg.Pipeline:
    made = pipeline()
    stream = made.source(lines(root / "in"), name="in").filter(see)
    for one in order:
        PAIRS[pair][one](stream).sink(hg.FileSink(root / "out" / str(one), roll_interval=0), name=f"out-{one}")
    return made


@pytest.mark.parametrize("pair", PAIRS)
def test_unnamed_operators_with_state_that_change_places_are_refused(tmp_path: Path, pair: str) -> None:  # EV14
    append(tmp_path / "in" / "x", 1, 2, 3)
    run_until(3, computing(tmp_path, pair, [0, 1]), tmp_path)
    why = refused(computing(tmp_path, pair, [1, 0]), tmp_path)
    assert "was when checkpoint" in why
    append(tmp_path / "in" / "x", 4)
    run_until(1, computing(tmp_path, pair, [0, 1]), tmp_path)  # the same program goes on


def reducing(root: Path, *functions: Any, names: Sequence[str | None] = (), others: bool = False) -> hg.Pipeline:
    made = pipeline()
    stream = made.source(lines(root / "in"), name="in").filter(see)
    for at, function in enumerate(functions):
        reduced = stream.key_by("k").reduce(function, name=names[at] if names else None)
        reduced.sink(hg.FileSink(root / "out" / function.__name__, roll_interval=0), name=f"out-{function.__name__}")
    return made


def test_operators_go_on_under_the_names_that_a_refusal_says(tmp_path: Path) -> None:  # EV14
    append(tmp_path / "in" / "x", 2, 3, 4)
    run_until(3, reducing(tmp_path, total, product), tmp_path)
    assert "name='reduce-2'" in refused(reducing(tmp_path, product, total), tmp_path)
    append(tmp_path / "in" / "x", 1)
    run_until(1, reducing(tmp_path, product, total, names=["reduce-2", "reduce"]), tmp_path)
    assert max(written(tmp_path / "out" / "total")) == 2 + 3 + 4 + 1
    assert max(written(tmp_path / "out" / "product")) == 2 * 3 * 4 * 1


def test_an_unnamed_operator_that_was_removed_leaves_its_state_to_no_other(tmp_path: Path) -> None:  # EV14
    append(tmp_path / "in" / "x", 2, 3, 4)
    run_until(3, reducing(tmp_path, total, product), tmp_path)
    left = ["reduce-2", "out-total"]
    assert "'reduce' is what 'reduce-2' was" in refused(
        reducing(tmp_path, product), tmp_path, allow_unclaimed_state=left
    )


def test_one_of_several_unnamed_operators_may_be_edited(tmp_path: Path) -> None:  # EV14
    def doubled(one: Row, two: Row) -> Row:
        return {**one, "v": one["v"] + 2 * two["v"]}

    append(tmp_path / "in" / "x", 1)
    run_until(1, reducing(tmp_path, total, product), tmp_path)
    append(tmp_path / "in" / "x", 1)
    doubled.__name__ = "total"
    run_until(1, reducing(tmp_path, doubled, product), tmp_path)
    assert max(written(tmp_path / "out" / "total")) == 3


def test_unnamed_operators_behind_other_sources_are_told_apart_by_these(tmp_path: Path) -> None:  # EV14
    def made(order: str, function: Any = total) -> hg.Pipeline:
        p = pipeline()
        streams = {one: p.source(lines(tmp_path / one), name=f"in-{one}").filter(see) for one in "ab"}
        for one in order:
            streams[one].key_by("k").reduce(function).sink(
                hg.FileSink(tmp_path / "out" / one, roll_interval=0), name=f"out-{one}"
            )
        return p

    append(tmp_path / "a" / "x", 1, 2)
    append(tmp_path / "b" / "x", 10, 20)
    run_until(4, made("ab"), tmp_path)
    assert "operator 'reduce' is what 'reduce-2' was" in refused(made("ba"), tmp_path)
    append(tmp_path / "a" / "x", 3)
    append(tmp_path / "b" / "x", 30)
    run_until(2, made("ab", product), tmp_path)  # both were edited, and each still has its own source
    assert (max(written(tmp_path / "out" / "a")), max(written(tmp_path / "out" / "b"))) == (9, 900)
