from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.operators.lazy_rows import ChosenRows, LazyRows, Part, as_batch
from headgate.state.heap import Heap, HeapRows

ROW = pa.struct([("text", pa.large_string()), ("n", pa.int64())])


class Counted(ChosenRows):
    """Rows of columns that say which of them were made."""

    made: list[str] = []

    def column(self, name: str) -> pa.Array:
        self.made.append(name)
        return super().column(name)


def late() -> LazyRows:
    heap = Heap(ROW)
    heap.append(pa.array([{"text": "a" * 20, "n": 1}, {"text": None, "n": None}, {"text": "c", "n": 3}], ROW))
    columns = {"id": pa.array([7, 8]), "unread": pa.array(["x", "y"])}
    schema = pa.schema(
        [("id", pa.int64()), ("text", pa.large_string()), ("number", pa.int64()), ("other", pa.string())]
    )
    of_batch = ChosenRows(columns, np.array([0, 0, 1, 1]))
    stored = HeapRows(heap, np.array([2, 0, 1, 2]))
    return LazyRows(
        schema, [Part({"id": "id", "other": "unread"}, of_batch), Part({"text": "text", "number": "n"}, stored)]
    )


def test_lazy_rows_are_those_of_their_batch() -> None:
    rows = late()
    batch = as_batch(rows)
    assert rows.num_rows == batch.num_rows == 4
    assert batch.to_pydict() == {
        "id": [7, 7, 8, 8],
        "text": ["c", "a" * 20, None, "c"],
        "number": [3, 1, None, 3],
        "other": ["x", "x", "y", "y"],
    }
    assert as_batch(batch) is batch
    assert rows.select(["number"]).to_pydict() == {"number": [3, 1, None, 3]}


def test_lazy_rows_are_chosen_as_rows_of_a_batch_are() -> None:
    rows, batch = late(), late().batch()
    mask = pa.array([True, None, False, True])
    assert rows.filter(mask).batch() == batch.filter(mask)
    places = pa.array([3, 0, 0])
    assert rows.take(places).batch() == batch.take(places)
    assert rows.slice(1, 9).batch() == batch.slice(1, 9)
    assert rows.take(places).filter(pa.array([False, True, True])).slice(1, 1).batch() == batch.slice(0, 1)


def test_columns_that_are_not_asked_for_are_not_made() -> None:
    columns = {"a": pa.array([1, 2, 3]), "b": pa.array([4, 5, 6])}
    source = Counted(columns, np.arange(3))
    rows = LazyRows(pa.schema([("a", pa.int64()), ("b", pa.int64())]), [Part({"a": "a", "b": "b"}, source)])
    assert rows.column("a").to_pylist() == rows.column("a").to_pylist() == [1, 2, 3]
    assert Counted.made == ["a"]
