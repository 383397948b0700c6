"""Every type of Spark, at the values at which types go wrong, between DataFrames, streams, state and pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from tests.spark.support.sessions import run_to_end, session
from tests.support.every_type import NOT_OF_SPARK, carried, exact, rows_of, table

import headgate as hg
from headgate.spark import dataframes
from headgate.store.store import Store

pytestmark = [
    pytest.mark.spark,
    pytest.mark.early,
    pytest.mark.xdist_group("session"),
]  # of one process, which keeps its JVM

GIVEN = table(*NOT_OF_SPARK)
CARRIED = carried(GIVEN)
EXPECTED = rows_of(CARRIED)
WHOLE = pa.struct(list(CARRIED.schema))


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with session(**{"spark.sql.session.timeZone": "America/New_York"}) as made:
        hg.register_streams(made)
        hg.register_state_source(made)
        yield made


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(GIVEN, from_arrow_schema(GIVEN.schema))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


def seen(found: Any) -> list[Any]:
    """Return the rows of a DataFrame, whose types are as they were, but for maps, which are lists of entries."""
    kinds = dict(found.dtypes)
    assert kinds.pop("map") in ("map<string,double>", "array<struct<key:string,value:double>>")
    assert (kinds["timestamp"], kinds["timestamp_ntz"]) == ("timestamp", "timestamp_ntz")
    assert (kinds["interval"], kinds["int8"], kinds["decimal"]) == (
        "interval day to second",
        "tinyint",
        "decimal(38,18)",
    )
    return rows_of(carried(found.toArrow()))


class Keeps(hg.ProcessFunction):
    schema = {"n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.whole = state.value("whole", WHOLE)
        self.tags = state.value("tags", CARRIED.schema.field("map").type)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


def test_every_type_of_spark_goes_through_streams_and_state(
    spark: Any, frame: Any, store: Store, tmp_path: Path
) -> None:
    """Written and read once, by a query in several micro-batches, and as state; and streams that a program made."""
    from pyspark.sql import functions as f

    def load(stream: str) -> Any:
        return spark.read.format("headgate").option("store", store.root).load(stream)

    store.create_stream("app/maps", GIVEN.schema, segments=1)
    for stream in ("app/all", "app/maps"):
        frame.write.format("headgate").option("store", store.root).mode("append").save(stream)
        assert seen(load(stream)) == EXPECTED
    events = spark.readStream.format("headgate").options(store=store.root, rows_per_batch=4).load("app/maps")
    assert dict(events.dtypes) == dict(load("app/maps").dtypes)
    query = events.writeStream.format("headgate").options(store=store.root, routing_key="n", segments=2)
    query = run_to_end(
        query.option("checkpointLocation", str(tmp_path / "query")).trigger(availableNow=True), "app/copy"
    )
    assert query.lastProgress.batchId >= 1
    assert seen(load("app/copy")) == EXPECTED
    assert store.describe("app/copy").schema == CARRIED.schema
    pipeline = hg.Pipeline("keeps", checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    pipeline.source(hg.FromRows(GIVEN.select(["n"])), name="in").key_by("n").process(Keeps(), name="keeps").sink(
        hg.Discard()
    )
    columns = [f.col(f"`{name.replace('`', '``')}`") for name in frame.columns]
    whole = frame.select("n", f.struct(*columns).alias("value"))
    tags = frame.select("n", f.col("map").alias("value")).where("value IS NOT NULL")
    draft = hg.new_savepoint(pipeline, tmp_path / "savepoint").with_state("keeps", "whole", whole)
    draft.with_state("keeps", "tags", tags).write()
    found = spark.read.format("headgate-state").options(operator="keeps", state="whole")
    found = found.load(str(tmp_path / "savepoint"))
    assert seen(found.select("value.*")) == EXPECTED
    kept = hg.read_state(tmp_path / "savepoint", "keeps", "tags").sort("n")["value"].to_list()
    assert exact(kept) == exact([row["map"] for row in CARRIED.to_pylist() if row["map"] is not None])


def test_every_type_of_spark_goes_through_a_pipeline(spark: Any, frame: Any, tmp_path: Path) -> None:
    """Parquet is between: it does not tell a duration from a number, and Spark writes moments as INT96."""
    pipeline = hg.Pipeline("types", checkpointing=hg.Checkpointing(dir=tmp_path))
    rows = pipeline.source(hg.DataFrameSource(frame))
    assert seen(rows.to_dataframe(spark)) == EXPECTED


@pytest.mark.parametrize(
    ("query", "column"),
    [
        ("SELECT parse_json('{}') AS v", "column 'v' of the DataFrame has type variant"),
        (
            "SELECT ARRAY(NAMED_STRUCT('i', INTERVAL '3' MONTH)) AS v",
            "column 'v' of the DataFrame has type interval month",
        ),
        ("SELECT ARRAY() AS v", "column 'v' of the DataFrame has type void"),
        ("SELECT 1 AS id, NULL AS v", "column 'v' of the DataFrame has type void"),
    ],
)
def test_types_that_are_not_carried_are_refused(spark: Any, store: Store, query: str, column: str) -> None:
    given = spark.sql(query)
    with pytest.raises(hg.UsageError, match=f"{column}, which Headgate does not carry; cast it"):
        hg.Pipeline("refused").source(hg.DataFrameSource(given))
    with pytest.raises(AnalysisException, match=f"{column}, which Headgate does not carry"):
        given.write.format("headgate").option("store", store.root).mode("append").save("app/refused")
    assert store.list_streams() == []


def test_records_that_no_dataframe_can_have_are_refused(spark: Any) -> None:
    """Before anything is computed."""
    for schema, problem in (
        ({"case": int, "Case": int}, "columns 'case' and 'Case' are one column to Spark"),
        ({"d": pa.list_(pa.duration("ms"))}, r"column 'd' has type .*, and Spark has durations in microseconds only"),
    ):
        with pytest.raises(hg.UsageError, match=problem):
            hg.Pipeline("refused").source(hg.FromRows([], schema=schema)).to_dataframe(spark)


def test_no_records_are_a_dataframe_with_all_types(spark: Any) -> None:
    found = dataframes.read_parquet(spark, [], carried(table("Case")).schema)
    assert found.count() == 0
    assert {name: kind for name, kind in found.dtypes if name.startswith("uint")} == {
        "uint8": "smallint",
        "uint16": "int",
        "uint32": "bigint",
        "uint64": "decimal(20,0)",
    }
