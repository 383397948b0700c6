from __future__ import annotations

from datetime import datetime

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.connectors.source_reading import context, read_all, read_over_subtasks

from headgate.connectors.base import SinkContext, SplitPosition
from headgate.connectors.memory import Discard, FromRows, Print
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.testing.source_kit import check_source

SCHEMA = pa.schema([("n", pa.int64())])


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_rows_pass_the_conformance_kit(splits: int) -> None:
    rows = [{"n": n, "s": str(n)} for n in range(20)]
    assert sorted(check_source(FromRows(rows, splits=splits, batch_rows=3)), key=lambda row: row["n"]) == rows


def test_tables_become_canonical_records() -> None:
    frame = pl.DataFrame({"a": ["x", None]})
    for given in (frame, frame.to_arrow(), pa.record_batch({"a": pa.array(["x", None], pa.string())})):
        source = FromRows(given)
        assert source.schema() == pa.schema([("a", pa.large_string())])
        assert read_over_subtasks(source, 2) == [{"a": "x"}, {"a": None}]


def test_rows_travel_with_the_pipeline() -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(FromRows([{"a": 1}], schema={"a": pa.int16()})))
    assert copy.schema().field("a").type == pa.int16()
    assert read_all(copy.open(context()))[0] == [{"a": 1}]


def test_other_rows_have_another_identity() -> None:
    assert FromRows([{"a": 1}]).identity() == FromRows([{"a": 1}]).identity()
    assert FromRows([{"a": 1}]).identity() != FromRows([{"a": 2}]).identity()


def test_no_rows_with_a_schema_end_at_once() -> None:
    assert read_over_subtasks(FromRows([], schema=SCHEMA), 2) == []


def test_columns_are_those_of_all_rows() -> None:
    found = read_all(FromRows([{"a": 1}, {}, {"b": "x", "a": None}]).open(context()))[0]
    assert found == [{"a": 1, "b": None}, {"a": None, "b": None}, {"a": None, "b": "x"}]
    with pytest.raises(UsageError, match="names of columns are texts"):
        FromRows([{1: 2}])  # type: ignore[dict-item]


def test_rows_that_make_no_table_are_refused() -> None:
    with pytest.raises(UsageError, match="no rows to take column names from"):
        FromRows([])
    with pytest.raises(UsageError, match="do not make a table"):
        FromRows([{"a": 1}, {"a": "x"}])
    with pytest.raises(UsageError, match="must be positive"):
        FromRows([{"a": 1}], splits=0)


def test_discard_and_print_have_nothing_to_commit(capsys: pytest.CaptureFixture[str]) -> None:
    for sink in (Discard(), Print(prefix="> ")):
        sink.check(SCHEMA)
        writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
        writer.write(pa.record_batch([[1, 2]], schema=SCHEMA))
        assert writer.seal(CheckpointId(1)).prepare() is None
        writer.close()
    assert capsys.readouterr().out == '> {"n":1}\n> {"n":2}\n'


def test_print_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(UsageError, match="column 'b' has type large_binary"):
        Print().check(pa.schema([("b", pa.large_binary())]))


def test_rows_may_come_from_pandas_and_types_from_anywhere() -> None:
    frame = pd.DataFrame({"n": [1, 2], "word": ["a", None]}, index=[7, 8])
    assert FromRows(frame).schema() == pa.schema([("n", pa.int64()), ("word", pa.large_string())])
    assert FromRows(frame).identity() == FromRows([{"n": 1, "word": "a"}, {"n": 2, "word": None}]).identity()
    given = {"a": int, "b": str, "c": datetime, "d": pl.Int32, "e": pa.int16(), "f": bool, "g": float}
    types = [pa.int64(), pa.large_string(), pa.timestamp("us"), pa.int32(), pa.int16(), pa.bool_(), pa.float64()]
    expected = pa.schema(list(zip(given, types, strict=True)))
    assert FromRows([], schema=given).schema() == expected
    assert FromRows([], schema=pl.Schema({"n": pl.Int8})).schema() == pa.schema([("n", pa.int8())])
    with pytest.raises(
        UsageError, match="schema= gives column 'n' the type 'number', which is no Python, Polars or py"
    ):
        FromRows([], schema={"n": "number"})
    with pytest.raises(UsageError, match="schema= must be a pyarrow or Polars schema"):
        FromRows([], schema=["n"])  # type: ignore[arg-type]


def test_progress_is_the_rows_delivered_of_each_split() -> None:
    reader = FromRows([{"n": n} for n in range(4)], splits=2, batch_rows=1).open(context())
    reader.poll()
    assert reader.progress() == {"0": SplitPosition(1, 2), "1": SplitPosition(2, 4)}
