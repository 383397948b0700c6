"""DataFrames with odd columns, in directories with odd names, that change between two starts or do not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark.errors import IllegalArgumentException
from pyspark.sql.functions import expr
from tests.spark.support.sessions import session
from tests.support.powercut import PowerCut, another_process

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import StorageError
from headgate.spark.dataframes import capture, is_captured, spark_path

ODD = "a b%20[x]{y,z}=#+ü*?&\\$;:'\"~"

VALUES: dict[str, tuple[str, str]] = {
    "DOUBLE": ("0.0D", "-0.0D"),
    "STRING": ("''", "NULL"),
    "STRING COLLATE UTF8_LCASE": ("'a' COLLATE UTF8_LCASE", "'A' COLLATE UTF8_LCASE"),
    "TIMESTAMP": ("TIMESTAMP'1500-02-03 00:00:00.000001'", "TIMESTAMP'1500-02-03 00:00:00'"),
    "ARRAY<INT>": ("array(1, NULL)", "array(NULL, 1)"),
    "ARRAY<DOUBLE>": ("array()", "NULL"),
    "ARRAY<ARRAY<INT>>": ("array(array(1), array(2))", "array(array(1, 2))"),
    "STRUCT<a INT, `b.c` INT>": ("named_struct('a', 5, 'b.c', NULL)", "named_struct('a', NULL, 'b.c', 5)"),
    "STRUCT<a: INT>": ("named_struct('a', NULL)", "NULL"),
    "MAP<STRING, INT>": ("map('a', 1, 'b', NULL)", "map('a', NULL, 'b', 1)"),
    "MAP<ARRAY<INT>, STRUCT<m: MAP<INT, STRING>>>": (
        "map(array(1), named_struct('m', map(1, '')))",
        "map(array(1), named_struct('m', map(1, NULL)))",
    ),
}
"""Of each type a value, and one that another hash could take for it."""


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with session() as made:
        yield made


def start(dataframe: Any, root: Path, **options: Any) -> Any:
    """Capture ``dataframe`` as a start does, and return the source of what was captured."""
    source = hg.DataFrameSource(dataframe, **options)
    placed = source.at(str(root), "p", "in")
    placed.capture()
    return placed.captured()


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_a_directory_may_have_any_name(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started twice, below a working directory of that name; a result is read from there, too."""
    (tmp_path / ODD).mkdir()
    monkeypatch.chdir(tmp_path / ODD)
    frame = spark.sql("SELECT id, map('a', id) AS m FROM RANGE(3)")
    for _ in range(2):
        pipeline = hg.Pipeline("p")
        pipeline.source(hg.DataFrameSource(frame), name="in").sink(hg.FileSink("out", "parquet"), name="out")
        pipeline.run(spark=spark)
    assert sorted(read_committed("out")["id"]) == [0, 1, 2]
    found = hg.Pipeline("q").source(hg.FromRows([{"v": 1}, {"v": 2}])).to_dataframe(spark)
    assert sorted(row.v for row in found.collect()) == [1, 2]
    assert os.listdir(tmp_path) == [ODD]


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_a_parent_is_the_one_that_the_system_finds(tmp_path: Path) -> None:
    """Spark takes the name before it away, though that may be a link."""
    (tmp_path / "there" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "in")
    assert spark_path(None, f"{tmp_path}/link/../x") == f"file://{tmp_path}/there/x"


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_directories_that_spark_cannot_name_are_refused(tmp_path: Path) -> None:
    class AsciiJvm:
        """Of a session whose locale is C."""

        def __getattr__(self, name: str) -> Any:
            return self

        def File(self, path: str) -> Any:  # noqa: N802
            raise IllegalArgumentException(f"Malformed input or input contains unmappable characters: {path}")

        def getProperty(self, name: str) -> str:  # noqa: N802
            return "ANSI_X3.4-1968"

    assert spark_path(AsciiJvm(), "/tmp/a b") == "file:///tmp/a b"
    with pytest.raises(
        hg.UsageError, match=r"Spark cannot name /tmp/ü: .* encoding is ANSI_X3.4-1968; start it with LC"
    ):
        spark_path(AsciiJvm(), "/tmp/ü")
    with pytest.raises(hg.UsageError, match=r"Spark cannot name /tmp/\\udcff, which is not UTF-8"):
        spark_path(AsciiJvm(), os.fsdecode(b"/tmp/\xff"))


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_each_changed_value_makes_another_dataframe(spark: Any, tmp_path: Path) -> None:
    """Of every type, also where the row has other nulls than before; and the same rows are the same in any order."""
    columns = ", ".join(f"CAST({value} AS {kind}) AS c{at}" for at, (kind, (value, _)) in enumerate(VALUES.items()))
    nulls = ", ".join(f"CAST(NULL AS {kind})" for kind in VALUES)
    frame = spark.sql(f"SELECT 1 AS n, {columns} UNION ALL SELECT 2, {nulls} UNION ALL SELECT 2, {nulls}")
    start(frame, tmp_path)
    start(frame.orderBy("n", ascending=False).repartition(3), tmp_path)
    passed = []
    for at, (kind, (_, other)) in enumerate(VALUES.items()):
        changed = frame.withColumn(f"c{at}", expr(f"IF(n = 1, CAST({other} AS {kind}), c{at})"))
        with suppress(hg.UsageError):
            start(changed, tmp_path)
            passed.append(kind)
    assert passed == []


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_a_null_that_moves_to_another_column_is_a_change(spark: Any, tmp_path: Path) -> None:
    start(spark.sql("SELECT 5 AS a, CAST(NULL AS INT) AS b"), tmp_path)
    with pytest.raises(hg.UsageError, match="it has 1 rows, as then, but not the same ones"):
        start(spark.sql("SELECT CAST(NULL AS INT) AS a, 5 AS b"), tmp_path)


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_a_map_has_no_order(spark: Any, tmp_path: Path) -> None:
    start(spark.sql("SELECT map('a', 1, 'b', map(2, 3)[2]) AS m"), tmp_path)
    start(spark.sql("SELECT map('b', 3, 'a', 1) AS m"), tmp_path)


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_columns_are_compared_as_a_pipeline_gets_them(spark: Any, tmp_path: Path) -> None:
    """A length, a collation or a class is nothing to it; a name and a type are, also for rows that are kept."""
    spark.sql(f"CREATE TABLE texts (c CHAR(3), m MAP<STRING, VARCHAR(3)>) USING parquet LOCATION '{tmp_path}/texts'")
    try:
        spark.sql("INSERT INTO texts VALUES ('a', map('k', 'b'))")
        given = spark.table("texts")
        assert start(given, tmp_path).schema() == start(given, tmp_path).schema()
        start(
            spark.sql("SELECT c COLLATE UTF8_LCASE AS c, m FROM VALUES ('a  ', map('k', 'b')) AS texts(c, m)"), tmp_path
        )
    finally:
        spark.sql("DROP TABLE texts")
    for other in ("'a  ' AS C, map('k', 'b') AS m", "1 AS c, map('k', 'b') AS m", "'a  ' AS c"):
        for options in ({}, {"changed": "keep"}):
            with pytest.raises(hg.UsageError, match=r"the DataFrame has other columns .*: it had the columns c string"):
                start(spark.sql(f"SELECT {other}"), tmp_path, **options)


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_columns_may_have_almost_any_names(spark: Any, tmp_path: Path) -> None:
    given = spark.sql(
        "SELECT 2 AS ` `, 3 AS `a.b`, named_struct('b', 4, '', 5) AS a, 6 AS `x``y`, 7 AS `ä,;{}()=`, "
        "8 AS `c0`, 9 AS hash, 10 AS `__index__`, 12 AS `_metadata`"
    )
    start(given, tmp_path)
    start(given, tmp_path)
    pipeline = hg.Pipeline("names", checkpointing=hg.Checkpointing(dir=tmp_path))
    found = pipeline.source(hg.DataFrameSource(given)).to_dataframe(spark)
    assert found.columns == given.columns
    assert found.collect() == given.collect()
    for name, problem in (("", "has no name; rename it"), ("*", r"has the name '\*', which is a pattern")):
        with pytest.raises(hg.UsageError, match=f"column 1 of 1 {problem}"):
            pipeline.source(hg.DataFrameSource(spark.sql(f"SELECT 1 AS `{name}`")))


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_case_tells_columns_apart_where_it_does_for_spark(spark: Any, tmp_path: Path) -> None:
    query = "SELECT 1 AS a, 2 AS A, named_struct('b', 3, 'B', 4) AS s"
    twins = {
        "SELECT 1 AS a, 2 AS A": "columns 'a' and 'A' are one column to Spark",
        "SELECT named_struct('b', 3, 'B', 4) AS s": "column 's' has type .*: its fields 'b' and 'B' are one field",
    }
    for given, problem in twins.items():
        with pytest.raises(hg.UsageError, match=problem):
            hg.Pipeline("p").source(hg.DataFrameSource(spark.sql(given)))
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        start(spark.sql(query), tmp_path)
        start(spark.sql(query), tmp_path)
        with pytest.raises(hg.UsageError, match="not the same ones"):
            start(spark.sql(query.replace("'B', 4", "'B', 5")), tmp_path)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("SELECT named_struct() AS v", "column 'v' has type struct<>: Spark does not write structs without fields"),
        (
            "SELECT array(map('a' COLLATE UNICODE, 1)) AS v",
            "column 'v' has type array<map<.*: .* keys have a collation",
        ),
        ("SELECT TIME'12:00:00' AS v", r"column 'v' has type time\(6\): .* spark.sql.timeType.enabled=true"),
        ("SELECT 1 AS v, 2 AS v", "a schema has two columns 'v'"),
    ],
)
def test_columns_that_no_file_can_have_are_refused(spark: Any, query: str, problem: str) -> None:
    """When the source is given, not when the pipeline starts."""
    with pytest.raises(hg.UsageError, match=problem):
        hg.Pipeline("p").source(hg.DataFrameSource(spark.sql(query)))


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_times_of_day_go_in_and_come_out_where_spark_has_them(spark: Any, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("times", checkpointing=hg.Checkpointing(dir=tmp_path))
    rows = pipeline.source(hg.FromRows([{"n": 20 * 60 * 10**9 + 1}])).select(t=pl.col("n").cast(pl.Time))
    with pytest.raises(hg.UsageError, match="column 't' has type time"):
        rows.to_dataframe(spark)
    spark.conf.set("spark.sql.timeType.enabled", "true")
    try:
        given = rows.to_dataframe(spark)
        assert given.selectExpr("string(t)").collect() == [("00:20:00.000000001",)]
        start(given, tmp_path)
        start(given, tmp_path)
        with pytest.raises(hg.UsageError, match="not the same ones"):
            start(given.selectExpr("TIME'00:20:00' AS t"), tmp_path)  # of TIME(6)
    finally:
        spark.conf.unset("spark.sql.timeType.enabled")


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_settings_with_which_spark_writes_other_times_are_refused(spark: Any, tmp_path: Path) -> None:
    name = "spark.sql.parquet.outputTimestampType"
    spark.conf.set(name, "TIMESTAMP_MILLIS")
    try:
        with pytest.raises(hg.UsageError, match=f"with {name}=TIMESTAMP_MILLIS .*; set it to TIMESTAMP_MICROS"):
            start(spark.sql("SELECT TIMESTAMP'2026-01-31 12:00:00.000001' AS t"), tmp_path)
    finally:
        spark.conf.unset(name)


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")
def test_a_capture_of_another_version_is_refused(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(1)
    start(frame, tmp_path)
    (tmp_path / "p" / "inputs" / "in" / "_captured").write_bytes(b"captured DataFrame, version 1\n")
    with pytest.raises(hg.UsageError, match=r"_captured is not a file of this version .*; start over with run\(fresh"):
        start(frame, tmp_path)


SCHEMA = pa.schema({"id": pa.int64()})
PARTS = ("part-0.snappy.parquet", "part-1.snappy.parquet")


class WritesAsSparkDoes:
    """A DataFrame whose rows are two files: renamed to their places, then marked by Spark, nothing synced."""

    def __init__(self) -> None:
        self.write = self.sparkSession = self.conf = self

    def get(self, name: str) -> str:
        return ""

    def option(self, name: str, value: str) -> WritesAsSparkDoes:
        return self

    def parquet(self, url: str) -> None:
        target = Path(url.removeprefix("file://"))
        os.mkdir(target)
        for name in (*PARTS, "_SUCCESS"):
            (target.parent / name).write_text(name)
            os.rename(target.parent / name, target / name)


@pytest.mark.parametrize("is_cut_in_between", [True, False])
def test_a_power_cut_leaves_all_of_a_capture_or_none(tmp_path: Path, is_cut_in_between: bool) -> None:
    directory = tmp_path / "in"
    with another_process(), PowerCut().watching() as power:
        if is_cut_in_between:
            power.fail_directory_syncs(100)
            with pytest.raises(StorageError):
                capture(WritesAsSparkDoes(), str(directory), SCHEMA)
        else:
            capture(WritesAsSparkDoes(), str(directory), SCHEMA)
        power.cut()
    assert is_captured(str(directory)) != is_cut_in_between
    if not is_cut_in_between:
        assert sorted(path.name for path in directory.iterdir()) == ["_SUCCESS", "_captured", *PARTS]


def test_a_capture_that_cannot_be_made_durable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, fsync, synced = tmp_path / "in", os.fsync, []

    def full(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.name)
        if path.name == PARTS[1] and synced.count(path.name) == 1:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="Disk quota exceeded"):
        capture(WritesAsSparkDoes(), str(directory), SCHEMA)
    assert not is_captured(str(directory))
    capture(WritesAsSparkDoes(), str(directory), SCHEMA)
    assert is_captured(str(directory))
    assert {*PARTS} <= set(synced)
