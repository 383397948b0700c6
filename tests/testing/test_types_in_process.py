"""Decimals, times of day, maps and nested columns go through whole pipelines and come out as they went in."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.killing import run_killing

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.operators.schemas import to_canonical
from headgate.testing import Collect, run

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


def carried(number: int) -> dict[str, Any]:
    """What a record is inside: a map is a list of its entries."""
    row = given(number)
    tags = None if row["tags"] is None else [{"key": key, "value": value} for key, value in row["tags"]]
    return {**row, "tags": tags}


def source() -> hg.FromRows:
    return hg.FromRows(pa.Table.from_pylist([given(number) for number in range(ROWS)], SCHEMA))


def pipeline(name: str, parallelism: int = 2, **options: Any) -> hg.Pipeline:
    return hg.Pipeline(name, parallelism=parallelism, checkpointing=hg.Checkpointing(interval="50ms"), **options)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["ms"]))


EXPECTED = [carried(number) for number in range(ROWS)]
EXACT = to_canonical(pa.RecordBatch.from_pylist([given(number) for number in range(ROWS)], SCHEMA)).to_pylist()
"""With as many digits as the types have."""


def test_columns_come_out_as_they_went_in(tmp_path: Path) -> None:
    p, sink = pipeline("through"), Collect(tmp_path / "out")
    kept = p.source(source()).filter(pl.col("price").is_null() | (pl.col("price") >= Decimal("0.00")))
    by_row = kept.rebalance().map(lambda row: row).flat_map(lambda row: [row])
    by_row.map_batches(lambda frame: frame).union(kept.filter(pl.col("id") < 0)).sink(sink)
    run(p)
    assert in_order(sink.rows()) == EXPECTED


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_files_have_them(tmp_path: Path, form: str) -> None:
    p = pipeline("files")
    rows = p.source(source()) if form == "parquet" else p.source(source()).select(pl.exclude("raw"))
    rows.sink(hg.FileSink(tmp_path / "out", form))
    run(p)
    if form == "parquet":
        assert read_committed(str(tmp_path / "out")).sort("ms").to_dicts() == EXPECTED
    else:
        lines = "".join(path.read_text() for path in (tmp_path / "out").glob("*.jsonl")).splitlines()
        found = in_order([json.loads(line) for line in lines])
        exact = [{name: value for name, value in row.items() if name != "raw"} for row in EXACT]
        assert found == json.loads(json.dumps(exact, default=str))


def test_a_stream_has_them(tmp_path: Path) -> None:
    p = pipeline("writes")
    p.source(source()).sink(hg.StreamSink("app/all", store=tmp_path / "store"))
    run(p)
    p, sink = pipeline("reads"), Collect(tmp_path / "out")
    p.source(hg.StreamSource("app/all", store=tmp_path / "store", follow=False)).sink(sink)
    run(p)
    assert in_order(sink.rows()) == EXPECTED


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


def states() -> list[Any]:
    return [hg.Memory(), hg.RocksDB(memory="64MB")]


@pytest.mark.parametrize("state", states(), ids=["memory", "rocksdb"])
def test_state_holds_them_over_a_restart(tmp_path: Path, state: Any) -> None:
    if isinstance(state, hg.RocksDB):
        pytest.importorskip("rocksdict")
    p, sink = pipeline("states", 1, state=state), Collect(tmp_path / "out")
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
    p, reduced, windows = pipeline("aggregates"), Collect(tmp_path / "reduced"), Collect(tmp_path / "windows")
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
    assert in_order(reduced.rows()) == EXPECTED
    expected = pl.DataFrame(EXPECTED).group_by("id", pl.col("ms") // 5_000).agg(*prices, *others).sort("id", "ms")
    names = ["id", "sum", "min", "max", "latest", "rows"]
    found = pl.DataFrame(windows.rows()).sort("id", "window_start")
    assert found.select(names).rows() == expected.select(names).rows()
    assert found["mean"].cast(pl.Float64).to_list() == pytest.approx(expected["mean"].cast(pl.Float64).to_list())


@pytest.mark.parametrize("column", ["price", "opens", "tags"])
def test_they_cannot_be_keys(column: str) -> None:
    with pytest.raises(hg.UsageError, match=f"column '{column}' of type .* cannot be a key"):
        pipeline("keys").source(source()).key_by(column)
