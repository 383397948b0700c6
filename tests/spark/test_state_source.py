"""``spark.read.format("headgate-state")``: partitions and filters without a JVM, and once with Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType
from tests.spark.support.filtered_reads import PUSHDOWN, check, pushing_filters
from tests.spark.support.sessions import session

import headgate as hg
from headgate.errors import UsageError
from headgate.spark import dataframes, state_source
from headgate.spark.state_source import StateDataSource, StateReader

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "checkpoints_1", tmp_path / "checkpoints")) / "golden"


def travelled(thing: Any) -> Any:
    """Return what arrives in another process."""
    return cloudpickle.loads(cloudpickle.dumps(thing))


def reader_of(path: Path, operator: str = "counts", **options: str) -> StateReader:
    source = StateDataSource({"path": str(path), "operator": operator, **options})
    schema = source.schema()
    reader = travelled(source).reader(schema)
    assert isinstance(reader, StateReader)
    return reader


def rows_of(reader: StateReader, partitions: list[InputPartition] | None = None) -> pl.DataFrame:
    found = [
        batch
        for partition in partitions or travelled(list(reader.partitions()))
        for batch in travelled(reader).read(partition)
    ]
    frame = pl.from_arrow(pa.Table.from_batches(found))
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_there_is_a_partition_for_each_subtask(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataframes, "BATCH_ROWS_MAX", 7)
    reader = reader_of(path)
    partitions = reader.partitions()
    assert len(partitions) == 2
    expected = hg.read_state(path, "counts", columns=["key", "value", "_subtask"])
    for index, partition in enumerate(partitions):
        mine = expected.filter(pl.col("_subtask") == index).drop("_subtask")
        assert rows_of(reader, [partition]).rows() == mine.rows()
    assert all(batch.num_rows <= 7 for partition in partitions for batch in reader.read(partition))
    assert rows_of(reader_of(path, columns="value, key, _key_group")).columns == ["value", "key", "_key_group"]
    assert rows_of(reader_of(path, "windows", state="windows", id="4")).height == 63


def test_without_an_operator_the_states_are_listed(path: Path) -> None:
    for options in ({}, {"id": "4"}):
        source = StateDataSource({"path": str(path), **options})
        reader = travelled(source).reader(source.schema())
        found = [batch for partition in reader.partitions() for batch in travelled(reader).read(partition)]
        expected = hg.state_catalog(path, id=int(options["id"]) if options else None)
        assert pl.DataFrame(pl.from_arrow(found)).rows() == expected.rows()
        assert source.schema().names == expected.columns


def test_keys_choose_what_is_read(path: Path) -> None:
    reader = reader_of(path, keys="[3]")
    assert len(reader.partitions()) == 1
    assert rows_of(reader)["key"].to_list() == [3]
    assert sorted(rows_of(reader_of(path, keys="[3, 5, 4711]", columns="key"))["key"].to_list()) == [3, 5]
    nothing = reader_of(path, keys="[]")
    assert nothing.partitions() == []
    assert list(nothing.read(InputPartition(None))) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keys": '["3"]'}, r"a key of operator 'counts' is \(key: int64\): keys must be a list in JSON, such as"),
        ({"keys": "[9223372036854775808]"}, "a key of operator 'counts' is .*9223372036854775808"),
        ({"operator": "in", "keys": "[3]"}, "state 'positions' of operator 'in' has no key to choose rows by"),
    ],
)
def test_what_is_no_key_of_a_state_is_told_at_the_load(path: Path, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        StateDataSource({"path": str(path), "operator": "counts", **options}).schema()


def test_keys_of_several_columns_are_lists_in_a_list() -> None:
    key = [pa.field("a", pa.int64()), pa.field("b", pa.large_string())]
    assert dataframes.keys_in('[[1, "x"], [2, "y"]]', key, "operator 'o'") == [(1, "x"), (2, "y")]
    for wrong in ('[1, "x"]', '[["x", 1]]', '[[1, "x", 2]]', "{}", "[[[[", "null"):
        with pytest.raises(UsageError, match=r'keys must be a list in JSON, such as \[\[42, "tea"\]\]'):
            dataframes.keys_in(wrong, key, "operator 'o'")


def test_all_tasks_read_the_checkpoint_that_was_the_newest_at_the_load(path: Path) -> None:
    (path / "log" / "0000000006").rename(path / "newest")
    (path / "log-hint").unlink()
    source = StateDataSource({"path": str(path), "operator": "windows"})
    schema = source.schema()
    before = travelled(source).reader(schema)
    (path / "newest").rename(path / "log" / "0000000006")
    assert rows_of(travelled(source).reader(schema)).height == rows_of(before).height == 63
    assert rows_of(reader_of(path, "windows")).height == 89


def test_types_that_spark_does_not_have_become_wider() -> None:
    unsigned = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    signed = [pa.int16(), pa.int32(), pa.int64(), pa.decimal128(20, 0)]
    assert [dataframes.for_spark(dtype) for dtype in unsigned] == signed
    nested = pa.large_list(pa.struct([("a", pa.large_string()), ("b", pa.uint8())]))
    assert dataframes.for_spark(nested) == pa.list_(pa.struct([("a", pa.string()), ("b", pa.int16())]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"operator": "sums"}, "the option path is needed"),
        ({"path": "x", "state": "y"}, "the option operator is needed to choose a state, columns or keys"),
        ({"path": "x", "columns": "y"}, "the option operator is needed to choose a state, columns or keys"),
        ({"path": "/nowhere/p"}, "there is neither a savepoint nor a checkpoint at /nowhere/p"),
        ({"path": "x", "operator": "sums", "stat": "y"}, "there is no option stat; the options are path, operator"),
        ({"path": "x", "operator": "sums", "id": "newest"}, "id must be the number of a checkpoint, not 'newest'"),
        ({"path": "/nowhere/p", "operator": "sums"}, "there is neither a savepoint nor a checkpoint at /nowhere/p"),
    ],
)
def test_wrong_options_are_one_sentence(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        StateDataSource(options).schema()


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with session(**{"spark.python.daemon.module": "pyspark.daemon"}) as made:  # as any user's session
        yield made


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")  # see test_streams_in_spark
def test_spark_reads_the_state_of_a_checkpoint(spark: Any, path: Path) -> None:
    hg.register_state_source(spark)

    def load(operator: str, where: Path, **options: str) -> Any:
        return spark.read.format("headgate-state").options(operator=operator, **options).load(str(where))

    sums = load("sums", path)
    assert isinstance(sums.schema, StructType)
    assert sums.columns == ["id", "key", "value", "ts", "_subtask"]
    expected = hg.read_state(path, "sums")
    assert sorted(tuple(row) for row in sums.collect()) == sorted(expected.rows())
    assert sums.rdd.getNumPartitions() == 2
    some, counts = load("counts", path, keys="[3]"), hg.read_state(path, "counts")
    assert [row.value for row in some.collect()] == counts.filter(pl.col("key") == 3)["value"].to_list()
    assert some.rdd.getNumPartitions() == 1, "the other subtask's snapshot cannot hold it"
    by_key = load("counts", path, columns="key,value,_key_group")
    joined = by_key.join(sums.select("key"), "key").agg({"value": "sum"}).collect()[0][0]
    assert joined == hg.read_state(path, "counts")["value"].sum()
    assert load("windows", GOLDEN / "savepoint_1", state="windows").count() == 50
    listed = spark.read.format("headgate-state").load(str(path)).where("kind = 'value'").select("operator", "keys")
    assert [tuple(row) for row in listed.collect()] == [("counts", ["key"])]
    with pytest.raises(AnalysisException, match="the operators with state are counts, in, sums, times, windows"):
        load("summ", path)
    assert spark.conf.get(PUSHDOWN) == "false", "the registration has left the setting alone"
    with pushing_filters(spark):  # of one use: they leave the others alone, as those of a read of a stream do
        sums = load("sums", path)
        check(sums.where("key = 3"), expected.filter(pl.col("key") == 3).rows())
        check(sums, expected.rows())


@pytest.mark.parametrize("session", [None, "local[2]"])
def test_what_is_no_session_is_told(session: Any) -> None:
    with pytest.raises(UsageError, match="register_state_source needs the SparkSession that shall read, not"):
        state_source.register_state_source(session)
