"""What a window hands over when it fires: what it kept, in the form in which it was kept."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.state.backend import WindowRows
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Words
from headgate.state.memory.window_backend import MemoryMergedRows
from headgate.state.window_aggregates import Accumulator, FrozenTable, Kind
from headgate.state.worker_backends import MemoryStates

SCHEMA = pa.schema([(name, pa.int64()) for name in ("key", "window", "rows", "sum", "max")])
ADD_MAX = (Accumulator(Kind.ADD, "int64"), Accumulator(Kind.MAX, "int64"))
KEYS = KeyColumns(("key",), (pa.int64(),))


def window_of(batch: pa.RecordBatch) -> Words:
    windows: Words = batch.column(1).to_numpy()
    return windows


ROWS = WindowRows(Section("windows", SCHEMA, ("key",)), window_of)


def partials(*rows: tuple[int | None, ...]) -> pa.RecordBatch:
    return pa.record_batch([list(column) for column in zip(*rows, strict=True)], SCHEMA)


def merged(*batches: pa.RecordBatch) -> MemoryMergedRows:
    found = MemoryStates().merged_by_window(KEYS, ROWS, ADD_MAX)
    assert isinstance(found, MemoryMergedRows)
    for batch in batches:
        found.add(window_of(batch), batch)
    return found


def arrays(table: FrozenTable) -> list[np.ndarray]:
    return [table.rows, *table.values, *(seen for seen in table.seen if seen is not None)]


def as_lists(table: FrozenTable) -> list[list[int]]:
    return [array.tolist() for array in arrays(table)]


def test_a_window_hands_over_the_arrays_in_which_it_merged() -> None:
    state = merged(partials((7, 3, 1, 10, 10), (5, 3, 2, 20, None)), partials((7, 3, 1, 5, 12)))
    kept = arrays(state._held[3].table.freeze(2))
    taken = state.take(3)
    assert [key.to_pylist() for key in taken.keys] == [[7, 5]]
    assert as_lists(taken.table)[:2] == [[2, 2], [15, 20]]
    assert (taken.table.values[1][0], taken.table.seen[1].tolist()) == (12, [True, False])  # type: ignore[union-attr]
    shared = [np.shares_memory(a, b) for a, b in zip(kept, arrays(taken.table), strict=True)]
    assert shared == [True] * 4, "no array is made anew for a window that nobody else has"


def test_a_window_hands_over_the_batches_that_it_kept() -> None:
    state = MemoryStates().by_window(KEYS, ROWS)
    batches = [partials((7, 3, 1, 10, 10), (5, 3, 2, 20, None)), partials((7, 3, 1, 5, 12))]
    for batch in batches:
        state.add(window_of(batch), batch)
    assert [id(batch) for batch in state.take(3)] == [id(batch) for batch in batches]


def test_what_a_window_handed_over_stays_as_it_was_when_the_window_begins_again() -> None:
    state = merged(partials((7, 3, 1, 10, 10)))
    frozen = state.freeze()
    before = [bytes(part) for part in frozen.encode()]
    taken = state.take(3)
    assert state.windows() == []
    state.add(np.array([3]), partials((7, 3, 4, 100, 100)))
    again = state.take(3)
    assert as_lists(taken.table) == [[1], [10], [10], [True]]
    assert as_lists(again.table) == [[4], [100], [100], [True]], "it begins with nothing"
    assert [bytes(part) for part in frozen.encode()] == before


def test_a_snapshot_has_what_the_window_would_hand_over() -> None:
    state = merged(partials((7, 3, 1, 10, 10), (5, 3, 2, 20, None), (7, 4, 1, 1, 1)), partials((7, 3, 1, 5, 12)))
    (section,) = (batches for _, batches in state.freeze()._sections())  # type: ignore[attr-defined]
    assert (
        pa.Table.from_batches(section).to_pylist()
        == partials((7, 3, 2, 15, 12), (5, 3, 2, 20, None), (7, 4, 1, 1, 1)).to_pylist()
    )
    assert as_lists(state.take(4).table) == [[1], [1], [1], [True]]
