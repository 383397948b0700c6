"""Tables of Delta and Iceberg that are appended to: one commit after another, and which columns are written."""

from __future__ import annotations

import pyarrow as pa
import pytest
from lake_program import committer, permit, prepared
from lakes import Tables, appending, output

from headgate.errors import FencedError, UsageError

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def numbers_in(tables: Tables) -> list[int]:
    return sorted(row["number"] for row in tables.rows())


def test_all_subtasks_of_a_checkpoint_are_one_version(tables: Tables) -> None:
    sink = appending(tables)
    one = committer(sink)
    before = tables.version()
    outputs = [prepared(sink, 1, 1), prepared(sink, 1, 2, subtask=1)]
    one.commit(permit(1), outputs)
    assert tables.version() == before + 1
    committer(sink, 2).commit(permit(1, 2), outputs)  # another process knows it
    assert numbers_in(tables) == [1, 2]


def test_appends_of_others_are_no_obstacle(tables: Tables) -> None:
    sink = appending(tables)
    one = committer(sink)
    one.commit(permit(1), [prepared(sink, 1, 1)])
    for number in (10, 11):
        tables.append(pa.table({"number": [number], "text": ["x"]}))
        one.commit(permit(number), [prepared(sink, number, number - 8)])
    assert numbers_in(tables) == [1, 2, 3, 10, 11]


def test_a_newer_generation_fences_an_older_one(tables: Tables) -> None:
    sink = appending(tables)
    old, late = committer(sink), prepared(sink, 1, 1)
    new = committer(sink, 2)
    with pytest.raises(FencedError):
        old.commit(permit(1), [late])
    new.commit(permit(1, 2), [late])
    assert numbers_in(tables) == [1]


def test_integers_are_widened_and_lose_nothing(tables: Tables) -> None:
    types = {"a": pa.uint8(), "b": pa.uint16(), "c": pa.uint32(), "d": pa.uint64(), "e": pa.int8(), "f": pa.int16()}
    schema = pa.schema(list(types.items()))
    row = {"a": 255, "b": 65_535, "c": 2**32 - 1, "d": 2**64 - 1, "e": -128, "f": -32_768}
    sink = appending(tables, schema)
    committer(sink).commit(permit(1), [output(sink, 1, pa.RecordBatch.from_pylist([row], schema=schema))])
    assert tables.rows() == [row]


def test_columns_are_added_only_on_request(tables: Tables) -> None:
    appending(tables, pa.schema([("number", pa.int64())]))
    with pytest.raises(UsageError, match="has no column 'text'; give evolve=True to add columns"):
        appending(tables)
    assert tables.sink().found().schema.names == ["number"]
    wider = appending(tables, evolve=True)
    appending(tables, evolve=True)
    committer(wider).commit(permit(1), [prepared(wider, 1, 4)])
    assert tables.rows() == [{"number": 4, "text": "4"}]
