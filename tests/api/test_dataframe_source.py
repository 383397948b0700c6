from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.conftest import few
from tests.spark.support.sessions import session

import headgate as hg
from headgate.connectors.files.file_committer import read_committed

pytestmark = [
    pytest.mark.spark,
    pytest.mark.early,
    pytest.mark.xdist_group("session"),
]  # of one process, which keeps its JVM


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with session() as made:
        yield made


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


def test_another_dataframe_under_the_same_name_is_noticed(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 90).selectExpr("id", "string(id % 3) AS k", "array(id) AS l")

    def run(dataframe: Any, **options: Any) -> hg.Pipeline:
        pipeline = hg.Pipeline("counts", checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
        source = hg.DataFrameSource(dataframe, **options)
        pipeline.source(source, name="in").sink(hg.FileSink(tmp_path / "out", "parquet"))
        pipeline.run(spark=spark)
        return pipeline

    run(frame)
    captured = tmp_path / "checkpoints" / "counts" / "inputs" / "in"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in captured.rglob("*")}
    assert {path: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    run(frame.orderBy("id", ascending=False).repartition(3))  # the same rows
    for other, problem in (
        (frame.limit(89), "it had 90 rows then, and has 89 now"),
        (frame.selectExpr("id + 1 AS id", "k", "l"), "it has 90 rows, as then, but not the same ones"),
        (frame.selectExpr("id", "k", "array(id + 1) AS l"), "it has 90 rows, as then, but not the same ones"),
    ):
        with pytest.raises(hg.UsageError, match=f"operator 'in': the DataFrame is another one .*: {problem}"):
            run(other)
    run(frame.limit(89), changed="keep")
    assert read_committed(str(tmp_path / "out")).height == 90


def test_spark_types_go_in_and_come_out(spark: Any, tmp_path: Path) -> None:
    """A map comes out as a list of its entries, which Spark makes a map again; all others as they went in."""
    given = spark.sql(
        """
        SELECT id, CAST(id / 4 AS DECIMAL(12, 2)) AS price, MAP('a', id, 'b', NULL) AS tags,
               NAMED_STRUCT('at', TIMESTAMP_NTZ'2026-01-31 12:00:00', 'days', ARRAY(DATE'2026-01-31', NULL)) AS nested,
               CAST(STRING(id) AS BINARY) AS raw, IF(id = 7, NULL, MAP('k', ARRAY(CAST(id AS DECIMAL(5, 1))))) AS deep
        FROM RANGE(0, 20)
        """
    )
    pipeline = hg.Pipeline("types", checkpointing=hg.Checkpointing(dir=tmp_path))
    rows = pipeline.source(hg.DataFrameSource(given)).with_columns(twice=pl.col("price") * 2)
    found = rows.to_dataframe(spark)
    types = dict(found.dtypes)
    assert {name: types[name] for name in ("price", "nested", "raw")} == {
        name: kind for name, kind in given.dtypes if name in ("price", "nested", "raw")
    }
    again = found.selectExpr(
        "id", "price", "map_from_entries(tags) AS tags", "nested", "raw", "map_from_entries(deep) AS deep"
    )
    assert sorted(again.collect()) == sorted(given.collect())
    assert {(row.id, row.twice) for row in found.collect()} == {(row.id, row.price * 2) for row in given.collect()}


@pytest.mark.parametrize("zone", few(["America/New_York", "Asia/Kolkata"], 1))
def test_times_come_back_as_they_went_in(spark: Any, tmp_path: Path, zone: str) -> None:
    """Also around the hours that New York skips and repeats."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        given = spark.sql(
            """
            SELECT timestamp_seconds(at) AS at, CAST(wall AS TIMESTAMP_NTZ) AS wall,
                   ARRAY(timestamp_seconds(at)) AS more
            FROM VALUES (1772951400, '2026-03-08 02:30:00'), (1772955000, '2026-03-08 03:30:00'),
                        (1793510999, '2026-11-01 01:29:59.000001'), (1793514600, '2026-11-01 01:30:00'),
                        (unix_seconds(TIMESTAMP'2026-01-31 12:00:00'), '2026-01-31 12:00:00'),
                        (NULL, NULL) AS t(at, wall)
            """
        )
        pipeline = hg.Pipeline("times", checkpointing=hg.Checkpointing(dir=tmp_path))
        found = pipeline.source(hg.DataFrameSource(given)).filter(lambda row: True).to_dataframe(spark)
        assert found.dtypes == given.dtypes
        assert {kind for _, kind in found.dtypes} == {"timestamp", "timestamp_ntz", "array<timestamp>"}
        shown = "string(at)", "unix_micros(at)", "string(wall)", "string(more)"
        rows = [{tuple(row) for row in frame.selectExpr(*shown).collect()} for frame in (given, found)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 6
        assert "2026-01-31 12:00:00" in {row[0] for row in rows[1]}
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_a_streaming_dataframe_is_refused(spark: Any) -> None:
    streaming = spark.readStream.format("rate").load()
    with pytest.raises(hg.UsageError, match="bounded"):
        hg.DataFrameSource(streaming)
