from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import headgate as hg

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
        yield session
        session.stop()


def counted(name: str, dataframe: Any, root: Path) -> hg.Stream:
    pipeline = hg.Pipeline(name, checkpointing=hg.Checkpointing(dir=root))
    rows = pipeline.source(hg.DataFrameSource(dataframe)).with_timestamps("ts", out_of_orderness="1h")
    return rows.key_by("k").window(hg.Tumbling("10m")).agg(n=pl.len(), total=pl.col("id").sum())


def test_a_dataframe_goes_in_and_a_polars_frame_comes_out(spark: Any, tmp_path: Path) -> None:
    dataframe = spark.range(0, 900).selectExpr("id", "string(id % 3) AS k", "timestamp_seconds(id) AS ts")
    found = counted("collected", dataframe, tmp_path).collect().sort("window_start", "k")
    assert found["n"].to_list() == [200, 200, 200, 100, 100, 100]
    assert found["total"].sum() == 900 * 899 // 2
    again = counted("collected", dataframe.limit(1), tmp_path).collect()
    assert again.height == 1, "it is another DataFrame"
    assert list(tmp_path.iterdir()) == []


def test_results_are_a_spark_dataframe(spark: Any, tmp_path: Path) -> None:
    dataframe = spark.range(0, 90).selectExpr("id", "string(id % 3) AS k", "timestamp_seconds(id) AS ts")
    result = counted("framed", dataframe, tmp_path).to_dataframe(spark)
    assert sorted((row.k, row.n) for row in result.collect()) == [("0", 30), ("1", 30), ("2", 30)]


def test_a_streaming_dataframe_is_refused(spark: Any) -> None:
    streaming = spark.readStream.format("rate").load()
    with pytest.raises(hg.UsageError, match="bounded"):
        hg.DataFrameSource(streaming)
