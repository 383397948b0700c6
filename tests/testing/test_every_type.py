"""Every type that a user meets, at the values at which types go wrong, through each surface and back."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.every_type import CASES, FIRST, LAST, carried, exact, rows_of, table, utc
from tests.support.killing import run_killing
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import app as cli
from headgate.connectors.base import SourceBatch, SourceContext
from headgate.connectors.files.file_committer import read_committed
from headgate.operators.schemas import to_canonical
from headgate.store.store import Store
from headgate.testing import Collect, run

GIVEN = table()
CARRIED = carried(GIVEN)
EXPECTED = rows_of(CARRIED)
NAMES = list(CASES)
DURATIONS = dict(zip(CASES["interval"][1], ["-PT86399.999999S", "PT8640090000S"], strict=True))


def pipeline(name: str, **options: Any) -> hg.Pipeline:
    return hg.Pipeline(name, parallelism=1, **options)


def told(*arguments: object, text: str = "") -> str:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], input=text)
    if result.exception is not None:
        raise AssertionError(result.output) from result.exception
    return result.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """Return what lines of JSON say; a NaN is none, though Python reads it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def in_json(value: Any) -> Any:
    """Return what the command line prints for a value."""
    if isinstance(value, dict):
        return {name: in_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [in_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dt.timedelta):
        return DURATIONS[value]
    return value.isoformat() if isinstance(value, dt.date) else value


# -- pipelines ---------------------------------------------------------------------------------------------------------


def test_parquet_files_rows_and_frames_have_them(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(GIVEN, tmp_path / "in" / "a.parquet")
    pq.write_table(GIVEN.slice(0, 0), tmp_path / "in" / "nothing.parquet")
    p, sink = pipeline("files"), Collect(tmp_path / "rows")
    rows = p.source(hg.ParquetFiles(tmp_path / "in"))
    rows.sink(hg.FileSink(tmp_path / "out", "parquet"))
    by_row = rows.map(lambda row: row).flat_map(lambda row: [row])
    by_row.map_batches(lambda frame: frame).sink(sink)
    run(p)
    assert rows_of(sink.rows()) == EXPECTED
    assert rows_of(read_committed(str(tmp_path / "out")).to_dicts()) == EXPECTED
    (file,) = (tmp_path / "out").glob("*.parquet")
    assert rows_of(pq.read_table(file)) == EXPECTED


def test_json_lines_have_what_json_has(tmp_path: Path) -> None:
    with pytest.raises(hg.UsageError, match="column 'binary' has type large_binary, which JSON cannot hold"):
        pipeline("refused").source(hg.FromRows(GIVEN)).sink(hg.FileSink(tmp_path / "no", "jsonl"))
    given = carried(GIVEN.drop_columns("binary"))
    p = pipeline("writes")
    p.source(hg.FromRows(given)).sink(hg.FileSink(tmp_path / "out", "jsonl"))
    run(p)
    with pytest.raises(hg.UsageError, match=r"field 'decimal' has type .*, which JSON cannot express; read it as a"):
        pipeline("refused").source(hg.JsonLines(tmp_path / "out", given.schema))
    as_text = [f.name for f in given.schema if pa.types.is_decimal(f.type) or pa.types.is_duration(f.type)]
    read = pa.schema([f.with_type(pa.string()) if f.name in as_text else f for f in given.schema])
    p, sink = pipeline("reads"), Collect(tmp_path / "rows")
    p.source(hg.JsonLines(tmp_path / "out", read)).sink(sink)
    run(p)
    expected = given.to_pylist()
    for row in expected:
        row["interval"] = DURATIONS.get(row["interval"])
        for name in ("float", "double"):
            row[name] = row[name] if row[name] is not None and math.isfinite(row[name]) else None
    found = sink.rows()
    for row in found:
        row |= {name: row[name] and Decimal(row[name]) for name in ("decimal", "small decimal")}
    assert rows_of(found) == rows_of(expected)


@pytest.mark.parametrize("made", [GIVEN.schema, CARRIED.schema], ids=["as it is", "canonical"])
def test_streams_have_them(tmp_path: Path, made: pa.Schema) -> None:
    """Whoever made the stream: a program, in any form of the types, or a pipeline, in those that it carries."""
    with Store.open(tmp_path / "store") as store:
        store.create_stream("app/all", made, segments=1)
        given = GIVEN if made == GIVEN.schema else CARRIED
        with store.writer("app/all") as writer:
            writer.append(given.to_batches()[0])
            writer.append(given.to_batches()[0].slice(0, 0))
        p = pipeline("copies")
        p.source(hg.StreamSource("app/all", store=tmp_path / "store", follow=False)).sink(
            hg.StreamSink("app/all", store=tmp_path / "store")
        )
        run(p)
        reader = store.reader("app/all", 0, 0)
        batches = list(iter(reader.read, None))
        assert [batch.schema for batch in batches] == [made] * len(batches)
        found = rows_of(pa.Table.from_batches(batches))
        assert found == sorted(rows_of(given) * 2, key=lambda row: row["n"][1])
        assert store.fsck() == []


# -- state -------------------------------------------------------------------------------------------------------------


class Keeps(hg.ProcessFunction):
    """Keeps each column in a value, a list, and a map, and asks for it at once."""

    schema = CARRIED.schema

    def open(self, state: hg.StateHandle) -> None:
        dtypes = [CARRIED.schema.field(name).type for name in NAMES]
        self.values = [state.value(f"value{at}", dtype) for at, dtype in enumerate(dtypes)]
        self.lists = [state.list(f"list{at}", dtype) for at, dtype in enumerate(dtypes)]
        self.maps = [state.map(f"map{at}", pa.int64(), dtype) for at, dtype in enumerate(dtypes)]

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        found = dict(row)
        for name, value, elements, entries in zip(NAMES, self.values, self.lists, self.maps, strict=True):
            if row[name] is not None:
                value.put(row[name])
                elements.append(row[name])
                entries.put(row["n"], row[name])
                assert exact(elements.get()) == [exact(row[name])]
                assert exact(entries.get(row["n"])) == exact(row[name])
            found[name] = value.get()
        yield found


def states(where: Path) -> Iterator[tuple[int, str, pl.DataFrame]]:
    for at in range(len(NAMES)):
        for kind in ("value", "list", "map"):
            yield at, f"{kind}{at}", hg.read_state(where, "keeps", f"{kind}{at}").sort("n")


@pytest.mark.parametrize("state", ["memory", "rocksdb"])
def test_keyed_state_has_them(tmp_path: Path, state: str) -> None:
    if state == "rocksdb":
        pytest.importorskip("rocksdict")
    backend = hg.Memory() if state == "memory" else hg.RocksDB(memory="64MB")
    p, sink = pipeline("keeps", state=backend), Collect(tmp_path / "rows")
    p.source(hg.FromRows(GIVEN)).key_by("n").process(Keeps(), name="keeps").sink(sink)
    run(p, checkpoint_dir=tmp_path / "checkpoints")
    assert rows_of(sink.rows()) == EXPECTED
    where, again = tmp_path / "checkpoints" / "keeps", tmp_path / "again"
    draft = hg.new_savepoint(p, again)
    frames = list(states(where))
    for at, name, frame in frames:
        expected = [row[NAMES[at]] for row in CARRIED.to_pylist() if row[NAMES[at]] is not None]
        assert [exact(value) for value in frame["value"].to_list()] == [exact(value) for value in expected], NAMES[at]
        draft = draft.with_state("keeps", name, frame)
    draft.write()
    before = {name: (frame.schema, exact(frame.to_dicts())) for _, name, frame in frames}
    assert {name: (frame.schema, exact(frame.to_dicts())) for _, name, frame in states(again)} == before


def test_a_savepoint_is_made_of_maps(tmp_path: Path) -> None:
    """As Arrow has them, and Spark: state has the lists of their entries."""
    p = pipeline("keeps")
    p.source(hg.FromRows(GIVEN)).key_by("n").process(Keeps(), name="keeps").sink(hg.Discard())
    name = f"value{NAMES.index('map')}"
    given = GIVEN.filter(GIVEN["map"].is_valid()).select(["n", "map"]).rename_columns(["n", "value"])
    hg.new_savepoint(p, tmp_path / "new").with_state("keeps", name, given).write()
    found = hg.read_state(tmp_path / "new", "keeps", name).sort("n").to_dicts()
    assert exact(found) == exact(carried(given).to_pylist())


class Counts(hg.ProcessFunction):
    """Counts the rows of each key."""

    schema = {"count": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.count.put(self.count.get(0) + 1)


def as_typed(key: Any) -> str:
    """Return a key of JSON as it is typed on the command line."""
    return str(key).lower() if isinstance(key, bool) else str(key)


@pytest.mark.parametrize("state", ["memory", "rocksdb"])
def test_every_type_that_can_be_a_key_is_found_by_what_is_printed(tmp_path: Path, state: str) -> None:
    """But for durations, which the command line does not take."""
    if state == "rocksdb":
        pytest.importorskip("rocksdict")
    names = [
        "boolean",
        "int8",
        "uint64",
        "double",
        "string",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
        "interval",
    ]
    p = pipeline("keys", state=hg.Memory() if state == "memory" else hg.RocksDB(memory="64MB"))
    rows = p.source(hg.FromRows(GIVEN))
    for name in names:
        given = rows.filter(pl.col(name).is_not_null() & (pl.lit(name != "double") | pl.col("double").is_finite()))
        given.key_by(name).process(Counts(), name=name).sink(hg.Discard(), name=f"{name}-out")
    run(p, checkpoint_dir=tmp_path)
    for name in names:
        found = hg.read_state(tmp_path / "keys", name)
        given = [row[name] for row in CARRIED.to_pylist() if row[name] is not None]
        keys = {value for value in given if name != "double" or math.isfinite(value)}
        assert dict(found.rows()) == {key: given.count(key) for key in keys}, name
        if state == "rocksdb" or name == "interval":
            continue  # what is printed is the same
        for line in objects(told("state", "show", tmp_path / "keys", name, "--json", "--limit", 2)):
            asked = told("state", "show", tmp_path / "keys", name, f"--key={as_typed(line[name])}", "--json")
            assert objects(asked) == [line], name
    if state == "memory":
        with pytest.raises(AssertionError) as caught:
            told("state", "show", tmp_path / "keys", "binary", "--key", "no digits")
        assert "--key 'no digits' is no key of operator 'binary'" in str(caught.value.__cause__)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    """One with numbers that JSON does not have, in a state whose key has a name that looks like markup."""
    p = pipeline("keeps")
    rows = p.source(hg.FromRows(GIVEN.rename_columns({'odd, `na.me` "ü" [b]': "[b]"})))
    rows.key_by("[b]").process(Numbers(), name="keeps").sink(hg.Discard())
    frame = pl.DataFrame({"[b]": [7, 8], "value": [math.nan, -math.inf]})
    hg.new_savepoint(p, tmp_path / "savepoint").with_state("keeps", "number", frame).write()
    return tmp_path / "savepoint"


class Numbers(hg.ProcessFunction):
    schema = {"[b]": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.number = state.value("number", pa.float64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


def stream_of(store: Path, name: str, given: pa.Table) -> None:
    with Store.open(store) as opened:
        opened.create_stream(name, given.schema, segments=1)
        with opened.writer(name) as writer:
            for batch in given.to_batches():
                writer.append(batch)


def test_a_stream_is_printed_as_json_that_loses_nothing(tmp_path: Path) -> None:
    stream_of(tmp_path / "store", "app/all", GIVEN)
    found = objects(told("streams", "read", "app/all", "--json", "--store", tmp_path / "store"))
    assert [exact(row) for row in found] == [exact(in_json(row)) for row in CARRIED.to_pylist()]


def test_state_is_printed_as_json_that_loses_nothing(savepoint: Path) -> None:
    found = objects(told("state", "show", savepoint, "keeps", "--json"))
    assert sorted(found, key=lambda row: row["[b]"]) == [{"[b]": 7, "value": "NaN"}, {"[b]": 8, "value": "-Infinity"}]
    assert told("state", "show", savepoint, "keeps").splitlines()[0].split() == ["[b]", "value"]


def test_times_that_python_does_not_have_are_printed(tmp_path: Path) -> None:
    far = pa.array([2**58], pa.timestamp("us", "UTC"))
    nested = pa.StructArray.from_arrays([far, pa.array([2**30], pa.int32()).cast(pa.date32())], ["at", "day"])
    lists = pa.ListArray.from_arrays([0, 1], far.cast(pa.timestamp("us")))
    stream_of(tmp_path / "store", "app/far", pa.table({"n": [1], "at": far, "s": nested, "l": lists}))
    (found,) = objects(told("streams", "read", "app/far", "--json", "--store", tmp_path / "store"))
    assert found["at"] == found["s"]["at"] == "11103-08-29 17:22:31.711744Z"
    assert (found["n"], found["l"]) == (1, ["11103-08-29 17:22:31.711744"])


def test_what_is_printed_can_be_written(tmp_path: Path) -> None:
    """But for bytes, which are digits in JSON, and durations."""
    given = GIVEN.drop_columns(["binary", "interval"])
    stream_of(tmp_path / "store", "app/all", given)
    stream_of(tmp_path / "store", "app/again", given.slice(0, 0))
    printed = told("streams", "read", "app/all", "--json", "--store", tmp_path / "store")
    told("streams", "write", "app/again", "--format", "json", "--store", tmp_path / "store", text=printed)
    with Store.open(tmp_path / "store") as store:
        found = list(iter(store.reader("app/again", 0, 0).read, None))
    assert rows_of(pa.Table.from_batches(found)) == rows_of(given)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_a_microsecond_cannot_hold_is_refused(tmp_path: Path) -> None:
    """In one sentence, and without trying again: it would be no other time the next time."""
    fine = pa.table({"at": pa.array([1_000, 1_001], pa.timestamp("ns"))})
    sentence = (
        r"column 'at' is timestamp\[us\], which cannot hold datetime64 np.datetime64\('1970-01-01T00:00:00.000001001'\)"
    )
    with pytest.raises(hg.UsageError, match=f"FromRows: {sentence}; round or cast the column before"):
        hg.FromRows(fine)
    (tmp_path / "in").mkdir()
    pq.write_table(fine, tmp_path / "in" / "fine.parquet", version="2.6")
    stream_of(tmp_path / "store", "app/fine", fine)
    for name, source, where in (
        ("files", hg.ParquetFiles(tmp_path / "in"), "fine.parquet"),
        ("stream", hg.StreamSource("app/fine", store=tmp_path / "store", follow=False), "stream 'app/fine'"),
    ):
        p = pipeline(name)
        p.source(source).sink(hg.FileSink(tmp_path / "out", "parquet"))
        with pytest.raises(hg.HeadgateError, match=f"{where}: {sentence}") as caught:
            run(p, timeout_s=300)
        assert not isinstance(caught.value, TimeoutError)
        assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_stream_says_what_its_own_types_cannot_hold(tmp_path: Path) -> None:
    """It was made with others than a pipeline's: seconds, and maps."""
    entry = pa.large_list(pa.struct({"key": pa.string(), "value": pa.int64()}))
    for name, dtype, rows in (
        ("app/seconds", pa.timestamp("s"), pa.table({"c": pa.array([1], pa.timestamp("us"))})),
        ("app/maps", pa.map_(pa.string(), pa.int64()), pa.table({"c": pa.array([[{"key": None, "value": 1}]], entry)})),
    ):
        stream_of(tmp_path / "store", name, pa.table({"c": pa.array([], dtype)}))
        p = pipeline(name.partition("/")[2])
        p.source(hg.FromRows(rows)).sink(hg.StreamSink(name, store=tmp_path / "store"))
        with pytest.raises(hg.HeadgateError, match=rf"stream '{name}': column 'c' is .*, which cannot hold"):
            run(p, timeout_s=300)


def test_a_captured_duration_is_no_number(tmp_path: Path) -> None:
    """As Spark writes an interval: a number, which is all that Parquet says of it."""
    durations = GIVEN.select(["n", "interval"])
    pq.write_table(durations.set_column(1, "interval", durations["interval"].cast(pa.int64())), tmp_path / "a.parquet")
    files = hg.ParquetFiles(tmp_path / "a.parquet").read_as(durations.schema)
    polled = files.open(SourceContext("reads", "source", 0, 1, None)).poll()
    assert isinstance(polled, SourceBatch)
    assert polled.batch.schema.types == durations.schema.types
    assert rows_of(pa.Table.from_batches([polled.batch])) == rows_of(durations)


@pytest.mark.parametrize(
    ("rows", "schema", "problem"),
    [
        (pa.table({"a": pa.array([None], pa.month_day_nano_interval())}), None, "column 'a' has type month_day_nano"),
        ([{"a": None}], None, "column 'a' has type null, which Headgate does not carry"),
        ([{"a": 2**70}], None, "FromRows got rows that do not make a table: Python int too large"),
        ([{"a": "x"}], {"a": int}, "FromRows: row 0 .*: column 'a' is int64, which cannot hold str 'x'"),
        (
            pl.DataFrame({"a": [1]}, schema={"a": pl.Int128}),
            None,
            "FromRows got rows that do not make a table: .*_pli128",
        ),
        (
            pl.DataFrame({"a": ["x"]}),
            {"a": int},
            "FromRows: column 'a' is int64, which cannot hold str 'x'",
        ),
        (pl.DataFrame({"a": [1]}), {"b": int}, "FromRows got no column 'b', which is in schema=; there is a: int64"),
        (pa.Table.from_arrays([[1], [2]], names=["a", "a"]), None, "FromRows has two columns 'a'; rename one of them"),
    ],
)
def test_rows_that_cannot_be_carried_are_refused(rows: Any, schema: Any, problem: str) -> None:
    with pytest.raises(hg.UsageError, match=problem):
        pipeline("refused").source(hg.FromRows(rows, schema=schema))


def test_files_that_cannot_be_carried_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([[1], [2]], names=["a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(hg.UsageError, match=r"twice.parquet has two columns 'a'; rename one of them"):
        pipeline("twice").source(hg.ParquetFiles(tmp_path / "twice.parquet"))
    nothing = pa.table({"a": pa.array([[{}], None], pa.list_(pa.struct([])))})
    with pytest.raises(hg.UsageError, match="column 'a' has a struct without fields, which Parquet cannot hold"):
        pipeline("empty").source(hg.FromRows(nothing)).sink(hg.FileSink(tmp_path / "out", "parquet"))


def test_int96_reaches_as_far_as_times_do(tmp_path: Path) -> None:
    """As nanoseconds, which is how Arrow reads it unasked, it would end in 2262."""
    given = [utc(FIRST), utc(LAST), None]
    table_ = pa.table({"n": [0, 1, 2], "at": pa.array(given, pa.timestamp("us", "UTC"))})
    pq.write_table(table_, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    p, sink = pipeline("reads"), Collect(tmp_path / "rows")
    p.source(hg.ParquetFiles(tmp_path / "a.parquet")).sink(sink)
    run(p)
    assert rows_of(sink.rows()) == rows_of(table_)


ROWS = 200
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "price": pa.decimal128(12, 2),
        "opens": pa.time32("s"),
        "tags": pa.map_(pa.string(), pa.decimal128(5, 1)),
        "raw": pa.binary(),
        "corner": pa.list_(pa.int64(), 2),
        "parts": pa.list_(pa.struct({"name": pa.string(), "weight": pa.decimal128(8, 3)})),
        "ms": pa.int64(),
    }
)


def given(number: int) -> dict[str, Any]:
    return {
        "id": number % 5,
        "price": None if number % 11 == 3 else Decimal(number) / 4,
        "opens": None if number % 7 == 2 else dt.time(number % 24, 30),
        "tags": None if number % 9 == 4 else [(f"t{number % 3}", Decimal(number) / 10)],
        "raw": bytes([number % 256]),
        "corner": [number, -number],
        "parts": [{"name": "a", "weight": Decimal(number) / 8}] * (number % 3),
        "ms": number * 100,
    }


def typed_carried(number: int) -> dict[str, Any]:
    """What a record is inside: a map is a list of its entries."""
    row = given(number)
    tags = None if row["tags"] is None else [{"key": key, "value": value} for key, value in row["tags"]]
    return {**row, "tags": tags}


def source() -> hg.FromRows:
    return hg.FromRows(pa.Table.from_pylist([given(number) for number in range(ROWS)], SCHEMA))


def typed_pipeline(name: str, parallelism: int = 2, **options: Any) -> hg.Pipeline:
    return hg.Pipeline(name, parallelism=parallelism, checkpointing=hg.Checkpointing(interval="50ms"), **options)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["ms"]))


TYPED_EXPECTED = [typed_carried(number) for number in range(ROWS)]
EXACT = to_canonical(pa.RecordBatch.from_pylist([given(number) for number in range(ROWS)], SCHEMA)).to_pylist()
"""With as many digits as the types have."""


def test_columns_come_out_as_they_went_in(tmp_path: Path) -> None:
    """Through operators, files and a stream."""
    p, sink = typed_pipeline("through"), Collect(tmp_path / "rows")
    rows = p.source(source())
    kept = rows.filter(pl.col("price").is_null() | (pl.col("price") >= Decimal("0.00")))
    by_row = kept.rebalance().map(lambda row: row).flat_map(lambda row: [row])
    by_row.map_batches(lambda frame: frame).union(kept.filter(pl.col("id") < 0)).sink(sink)
    rows.sink(hg.FileSink(tmp_path / "parquet", "parquet"), name="parquet")
    rows.select(pl.exclude("raw")).sink(hg.FileSink(tmp_path / "jsonl", "jsonl"), name="jsonl")
    rows.sink(hg.StreamSink("app/all", store=tmp_path / "store"), name="stream")
    run(p)
    assert in_order(sink.rows()) == TYPED_EXPECTED
    assert read_committed(str(tmp_path / "parquet")).sort("ms").to_dicts() == TYPED_EXPECTED
    lines = "".join(path.read_text() for path in (tmp_path / "jsonl").glob("*.jsonl")).splitlines()
    exact = [{name: value for name, value in row.items() if name != "raw"} for row in EXACT]
    assert in_order([json.loads(line) for line in lines]) == json.loads(json.dumps(exact, default=str))
    p, sink = typed_pipeline("reads"), Collect(tmp_path / "again")
    p.source(hg.StreamSource("app/all", store=tmp_path / "store", follow=False)).sink(sink)
    run(p)
    assert in_order(sink.rows()) == TYPED_EXPECTED


class Latest(hg.ProcessFunction):
    """Keeps what came last of each kind, and sums prices."""

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.value("total", pa.decimal128(20, 2))
        self.opens = state.list("opens", dt.time)
        self.weights = state.map("weights", str, pa.decimal128(8, 3))
        self.last = state.value("last", pa.struct({"at": pa.time64("ns"), "price": pa.decimal128(12, 2)}))

    schema = {
        "id": int,
        "ms": int,
        "total": pa.decimal128(20, 2),
        "opens": pa.list_(pa.time64("ns")),
        "a": pa.decimal128(8, 3),
    }

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        self.total.put(self.total.get(Decimal(0)) + (row["price"] or 0))
        if row["opens"] is not None:
            self.opens.put([*self.opens.get()[-2:], row["opens"]])
        for part in row["parts"]:
            self.weights.put(part["name"], part["weight"])
        self.last.put({"at": row["opens"], "price": row["price"]})
        last = self.last.get()
        assert (last["at"], last["price"]) == (row["opens"], row["price"])
        yield {
            "id": row["id"],
            "ms": row["ms"],
            "total": self.total.get(),
            "opens": self.opens.get(),
            "a": self.weights.get("a"),
        }


def typed_states() -> list[Any]:
    return [hg.Memory(), hg.RocksDB(memory="64MB")]


@pytest.mark.parametrize("state", typed_states(), ids=["memory", "rocksdb"])
def test_state_holds_them_over_a_restart(tmp_path: Path, state: Any) -> None:
    if isinstance(state, hg.RocksDB):
        pytest.importorskip("rocksdict")
    p, sink = typed_pipeline("states", 1, state=state), Collect(tmp_path / "out")
    columns = {"id": hg.Choice((0, 1)), "n": hg.RowNumber()}
    slow = p.source(hg.Generator(columns, rows=600, rows_per_second=2_000))
    number = pl.col("n").cast(pl.Int64)
    rows = slow.select(
        "id",
        ms=number,
        price=(number / 4).cast(pl.Decimal(12, 2)),
        opens=pl.time(number % 24, 30),
        parts=pl.concat_list(pl.struct(name=pl.lit("a"), weight=(number / 8).cast(pl.Decimal(8, 3)))),
    )
    rows.key_by("id").process(Latest(), name="latest").sink(sink)
    run_killing(p, (1, 2))
    for id_ in (0, 1):
        found = [row for row in sink.rows() if row["id"] == id_]
        prices = [Decimal(row["ms"]) / 4 for row in found]
        assert found[-1]["total"] == sum(price.quantize(Decimal("0.01")) for price in prices)
        assert found[-1]["opens"] == [dt.time(row["ms"] % 24, 30) for row in found[-3:]]
        assert found[-1]["a"] == Decimal(found[-1]["ms"]) / 8


def test_reduce_and_windows_take_them(tmp_path: Path) -> None:
    p, reduced, windows = typed_pipeline("aggregates"), Collect(tmp_path / "reduced"), Collect(tmp_path / "windows")
    rows = p.source(source())
    rows.key_by("id").reduce(lambda so_far, row: row).sink(reduced)
    prices = [
        pl.col("price").sum().alias("sum"),
        pl.col("price").min().alias("min"),
        pl.col("price").max().alias("max"),
    ]
    others = [pl.col("price").mean().alias("mean"), pl.col("opens").max().alias("latest"), pl.len().alias("rows")]
    timed = rows.with_timestamps("ms").key_by("id").window(hg.Tumbling("5s"))
    timed.agg(*prices, *others).sink(windows)
    run(p)
    assert in_order(reduced.rows()) == TYPED_EXPECTED
    expected = pl.DataFrame(TYPED_EXPECTED).group_by("id", pl.col("ms") // 5_000).agg(*prices, *others).sort("id", "ms")
    names = ["id", "sum", "min", "max", "latest", "rows"]
    found = pl.DataFrame(windows.rows()).sort("id", "window_start")
    assert found.select(names).rows() == expected.select(names).rows()
    assert found["mean"].cast(pl.Float64).to_list() == pytest.approx(expected["mean"].cast(pl.Float64).to_list())


@pytest.mark.parametrize("column", ["price", "opens", "tags"])
def test_they_cannot_be_keys(column: str) -> None:
    with pytest.raises(hg.UsageError, match=f"column '{column}' of type .* cannot be a key"):
        typed_pipeline("keys").source(source()).key_by(column)
