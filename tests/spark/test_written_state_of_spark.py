"""A savepoint that is made of Spark DataFrames: types, times, and what has no end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import StorageError, UsageError

pytestmark = [
    pytest.mark.spark,
    pytest.mark.early,
    pytest.mark.xdist_group("session"),
]  # of one process, which keeps its JVM


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
        session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
        yield session
        session.stop()


class Seen(hg.ProcessFunction):
    """Remembers when each customer was seen, and how often each day."""

    schema = {"customer": pa.string()}

    def open(self, state: hg.StateHandle) -> None:
        self.at = state.value("at", pa.timestamp("us"))
        self.days = state.map("days", pa.date32(), pa.int64())
        self.moment = state.value("moment", pa.timestamp("us", "UTC"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


def test_a_savepoint_is_made_of_spark_dataframes(spark: Any, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    rows = pipeline.source(hg.FromRows([{"customer": "ann"}]), name="in").key_by("customer")
    rows.process(Seen(), name="seen").sink(hg.Discard())
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    history = spark.range(0, 100, numPartitions=4).selectExpr("concat('c', id) as customer", "id")
    at = history.selectExpr("customer", f"timestamp_micros({int(moment.timestamp())}000000 + id) as value")
    days = history.selectExpr("customer", "date'2026-01-02' as map_key", "cast(id as int) as value")
    draft = hg.new_savepoint(pipeline, tmp_path / "new").with_state("seen", "at", at).with_state("seen", "days", days)
    draft = draft.with_state("seen", "moment", at)
    assert dict(draft.write().rows) == {
        ("seen", "at"): 100,
        ("seen", "days"): 100,
        ("seen", "moment"): 100,
    }
    (found,) = hg.read_state(tmp_path / "new", "seen", "at", keys=["c7"]).rows()
    assert found == ("c7", datetime(2026, 1, 2, 3, 4, 5, 7))
    hg.register_state_source(spark)
    read = spark.read.format("headgate-state").options(operator="seen", state="moment").load(str(tmp_path / "new"))
    assert read.dtypes == at.dtypes == [("customer", "string"), ("value", "timestamp")]
    assert sorted(read.collect()) == sorted(at.collect())
    assert hg.read_state(tmp_path / "new", "seen", "days", keys=["c7"]).rows() == [("c7", date(2026, 1, 2), 7)]
    assert hg.read_state(tmp_path / "new", "seen", "days").select(pl.col("value").sum()).item() == 4950
    endless = spark.readStream.format("rate").load().selectExpr("'a' as customer", "timestamp as value")
    with pytest.raises(UsageError, match="state 'at' of operator 'seen': a streaming DataFrame has no end"):
        draft.with_state("seen", "at", endless)
    failing = history.selectExpr("customer", "cast(raise_error('no such day') as timestamp) as value")
    with pytest.raises(StorageError, match="no such day"):
        hg.new_savepoint(pipeline, tmp_path / "no").with_state("seen", "at", failing)
