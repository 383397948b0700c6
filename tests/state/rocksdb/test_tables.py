"""Values of several states of a key in one row of a database."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.state.backends import IN_FILES, NODE, Moved, restore, states
from tests.state.rocksdb.test_snapshots_of_timers import GROUPS, owned_by

import headgate as hg
from headgate.codec.snapshot import DATABASE_DESCRIPTION, decode_sections
from headgate.errors import CorruptionError
from headgate.state.backend import Ownership
from headgate.state.descriptors import Evolution, KeyColumns, StateDescriptor, StateKind
from headgate.state.rocksdb.tables import PackedTable, Table, tables_of
from headgate.state.values import to_numpy
from headgate.state.worker_backends import WorkerStates

KEYS = KeyColumns(("id",), (pa.int64(),))
COUNT = StateDescriptor("count", StateKind.VALUE, pa.int64())
LAST = StateDescriptor("last", StateKind.VALUE, pa.float64())
IS_OPEN = StateDescriptor("open", StateKind.VALUE, pa.bool_())
NAME = StateDescriptor("name", StateKind.VALUE, pa.large_string())
SEEN = StateDescriptor("seen", StateKind.LIST, pa.int64())
EXPIRES = StateDescriptor("expires", StateKind.VALUE, pa.int64(), ttl=hg.TTL("1h"))
PACKED = (COUNT, LAST, IS_OPEN)
ALL = (*PACKED, NAME, SEEN)
TYPES = [
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64()),
    *(pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.time64("us"), pa.duration("us")),
]


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states(IN_FILES) as made:
        yield made


class State:
    """The state of a function by batch, and what it must hold."""

    def __init__(self, worker: WorkerStates, descriptors: Sequence[StateDescriptor] = ALL, subtask: int = 0) -> None:
        self.backend: Any = worker.of(NODE, subtask, GROUPS).by_column(KEYS, descriptors, has_timers=False)
        self.descriptors = descriptors
        self.expected: dict[str, dict[int, Any]] = {one.name: {} for one in descriptors}

    def slots(self, keys: Sequence[int]) -> Any:
        return self.backend.slots([pa.array(keys, pa.int64())])

    def put(self, state: StateDescriptor, found: Mapping[int, Any]) -> None:
        """Write values, to the database."""
        self.backend.prepare()
        self.backend.values(state).put(self.slots(list(found)), pa.array(list(found.values()), state.type))
        self.expected[state.name] |= found
        self.backend.prepare()

    def clear(self, state: StateDescriptor, keys: Sequence[int]) -> None:
        self.backend.prepare()
        self.backend.values(state).clear(self.slots(keys))
        for key in keys:
            self.expected[state.name].pop(key, None)
        self.backend.prepare()

    def append(self, keys: Sequence[int]) -> None:
        self.backend.lists(SEEN).append(self.slots(keys), pa.array(keys, pa.int64()))
        self.expected[SEEN.name] |= {key: [key] for key in keys}
        self.backend.prepare()

    def held(self, keys: Sequence[int]) -> dict[str, dict[int, Any]]:
        """Return what there is of ``keys``."""
        self.backend.prepare()
        found = {}
        for state in self.descriptors:
            slots = self.slots(keys)
            if state.kind is StateKind.LIST:
                numbers, values = self.backend.lists(state).explode(slots)
                found[state.name] = {keys[n]: [v] for n, v in zip(numbers.tolist(), values.to_pylist(), strict=True)}
                continue
            pairs = zip(keys, self.backend.values(state).get(slots).to_pylist(), strict=True)
            found[state.name] = {key: value for key, value in pairs if value is not None}
        return found


def some_state(worker: WorkerStates) -> State:
    """Return keys of which each has another part of the states."""
    state = State(worker)
    state.put(COUNT, {key: key for key in range(0, 300, 2)})
    state.put(LAST, {key: key / 4 for key in range(0, 300, 3)})
    state.put(IS_OPEN, {key: bool(key % 2) for key in range(0, 300, 5)})
    state.put(NAME, {key: f"n{key}" for key in range(0, 300, 7)})
    state.append(range(0, 300, 11))
    return state


def rows_by_table(backend: Any) -> dict[int, int]:
    backend.write_back()
    found: dict[int, int] = {}
    for rows, _ in backend._local.database.scan(b"", None):
        for row in rows:
            number = int.from_bytes(row[2:4], "big")
            found[number] = found.get(number, 0) + 1
    return found


def packed_table(types: Sequence[pa.DataType]) -> PackedTable:
    descriptors = [StateDescriptor(f"s{at:02}", StateKind.VALUE, dtype) for at, dtype in enumerate(types)]
    return PackedTable(tuple(tables_of(KEYS, descriptors).values()))


def test_states_of_a_key_share_a_row_and_texts_and_lists_have_their_own(worker: WorkerStates) -> None:
    state = State(worker)
    numbers = {key: key for key in range(100)}
    state.put(COUNT, numbers)
    state.put(LAST, {key: float(key) for key in numbers})
    state.put(NAME, {key: str(key) for key in numbers})
    found = rows_by_table(state.backend)
    tables = tables_of(KEYS, ALL)
    assert found == {tables[COUNT].number: 100, tables[NAME].number: 100}


def test_a_number_alone_has_rows_of_its_own_and_so_has_what_expires(worker: WorkerStates) -> None:
    state = State(worker, [COUNT, NAME, EXPIRES])
    state.put(COUNT, {1: 1})
    state.put(EXPIRES, {1: 1})
    tables = tables_of(KEYS, [COUNT, NAME, EXPIRES])
    assert rows_by_table(state.backend) == {tables[COUNT].number: 1, tables[EXPIRES].number: 1}


@given(st.data())
def test_values_of_any_fixed_width_come_back_each_where_it_was(data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(TYPES), min_size=2, max_size=20))
    table, count = packed_table(types), data.draw(st.integers(1, 5))
    members = []
    for dtype in types:
        has = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        raw = data.draw(st.binary(min_size=8 * count, max_size=8 * count))
        members.append((has, _of_bytes(raw, dtype, int(has.sum()))))
    is_there, rows = table.encode(members)
    assert is_there.tolist() == np.logical_or.reduce([has for has, _ in members]).tolist()
    assert len(rows) == is_there.sum()
    assert table.counts(rows) == [int(has.sum()) for has, _ in members]
    for (has, values), (found, column) in zip(members, table.decode(rows), strict=True):
        assert found.tolist() == has[is_there].tolist()
        assert column.type == values.type
        assert to_numpy(column).tobytes() == to_numpy(values).tobytes()


def _of_bytes(raw: bytes, dtype: pa.DataType, count: int) -> pa.Array:
    if pa.types.is_boolean(dtype):
        return pa.array([byte % 2 == 1 for byte in raw[:count]], dtype)
    if pa.types.is_time(dtype):
        return pa.array(list(raw[:count]), pa.int64()).view(dtype)
    return pa.Array.from_buffers(dtype, count, [None, pa.py_buffer(raw)])


def test_any_history_of_several_states_is_that_of_plain_dicts(worker: WorkerStates) -> None:
    rng, state = random.Random(5), State(worker)
    for _ in range(200):
        one, keys = rng.choice(PACKED), rng.sample(range(40), 5)
        if rng.random() < 0.3:
            state.clear(one, keys)
        else:
            state.put(one, {key: pa.scalar(rng.randrange(2), pa.int64()).cast(one.type).as_py() for key in keys})
        assert state.held(range(40)) == state.expected
    assert state.expected["count"]
    assert state.expected["last"]


def test_a_key_that_lost_its_last_value_has_no_row(worker: WorkerStates) -> None:
    state = State(worker)
    state.put(COUNT, {1: 1, 2: 2})
    state.put(LAST, {1: 0.0})
    state.clear(COUNT, [1, 2])
    assert rows_by_table(state.backend) == {tables_of(KEYS, ALL)[COUNT].number: 1}, "key 1 has its last value, 0.0"
    state.clear(LAST, [1])
    assert rows_by_table(state.backend) == {}
    assert state.held([1, 2]) == state.expected


def test_all_keys_are_those_that_have_anything(worker: WorkerStates) -> None:
    state = some_state(worker)
    slots = state.backend.all_slots()
    found = set(state.backend.key_columns(slots)[0].to_pylist())
    assert found == set().union(*state.expected.values())


@pytest.mark.parametrize("later", [IN_FILES, "rocksdb-without-cache", "memory"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_packed_files_are_restored_by_every_backend_at_any_parallelism(
    later: str, parallelism: int, worker: WorkerStates
) -> None:
    state = some_state(worker)
    moved = Moved(state.backend.freeze(), groups=GROUPS)
    assert moved.counted == {one.name: len(state.expected[one.name]) for one in ALL}
    with states(later) as other:
        for index in range(parallelism):
            mine = owned_by(range(300), parallelism, index)
            back = State(other, subtask=index)
            goes_on = restore(back.backend, [moved], index, parallelism)
            assert goes_on == (later != "memory" and parallelism == 1)
            expected = {name: {k: v for k, v in held.items() if k in mine} for name, held in state.expected.items()}
            assert back.held(mine) == expected
            if later == IN_FILES:
                again = Moved(back.backend.freeze(), index, parallelism, groups=GROUPS)
                assert again.counted == {name: len(held) for name, held in expected.items()}


def test_a_function_by_row_goes_on_with_the_rows_of_one_by_batch(worker: WorkerStates) -> None:
    state = some_state(worker)
    moved = Moved(state.backend.freeze(), groups=GROUPS)
    by_row: Any = worker.of(NODE, 1, GROUPS).by_row(KEYS, ALL)
    assert not restore(by_row, [moved])
    keys = by_row.all_keys()
    found = {one.name: {key: by_row.cells(one).get(key) for key in keys} for one in PACKED}
    assert {name: {k: v for k, v in held.items() if v is not None} for name, held in found.items()} == {
        one.name: state.expected[one.name] for one in PACKED
    }
    back = State(worker, subtask=2)
    assert not restore(back.backend, [Moved(by_row.freeze(), groups=GROUPS)])
    assert back.held(range(300)) == state.expected


def test_rows_of_states_that_are_restored_one_after_the_other_keep_each_other(worker: WorkerStates) -> None:
    parts = []
    for one in (COUNT, LAST):  # as from two subtasks, or two parts
        state = State(worker, subtask=len(parts))
        state.put(one, dict.fromkeys(range(50), pa.scalar(3, one.type).as_py()))
        parts.append(Moved(state.backend.freeze(), groups=GROUPS))
    with states("rocksdb-without-cache") as other:
        back = State(other)
        for moved in parts:
            for given_ in moved.states(0, 1):
                back.backend.restore(decode_sections(given_.payload, "state"), "state", Ownership(GROUPS, 1, 0))
        held = back.held(range(50))
    assert held["count"] == dict.fromkeys(range(50), 3)
    assert held["last"] == dict.fromkeys(range(50), 3.0)


def test_a_value_that_is_missing_in_a_row_is_named(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    state = some_state(worker)
    moved = Moved(state.backend.freeze(), groups=GROUPS)
    (told,) = [part for part in moved.parts if part.name == DATABASE_DESCRIPTION]
    assert told.rows is not None
    wrong = {NODE: {**told.rows[NODE], "last": 101}}
    moved.parts = tuple(replace(part, rows=wrong) if part == told else part for part in moved.parts)
    for q in (1, 2):
        with pytest.raises(CorruptionError, match=r"101 rows of state 'last', found 100 rows"):
            restore(State(worker, subtask=q).backend, [moved], 0, q)


def test_states_that_were_written_are_counted_once_for_a_write_back(worker: WorkerStates) -> None:
    state = State(worker)
    slots = state.slots(range(10))
    for one in PACKED:
        state.backend.values(one).put(slots, pa.array([1] * 10, pa.int64()).cast(one.type))
    (pack, *_) = state.backend._stores
    assert pack.changed_rows == 10


def test_other_states_take_the_rows(worker: WorkerStates) -> None:
    state = some_state(worker)
    moved = Moved(state.backend.freeze(), groups=GROUPS)
    more = StateDescriptor("amount", StateKind.VALUE, pa.int32(), evolution=Evolution(starts_empty=True))
    back = State(worker, [*ALL, more], subtask=1)
    assert not restore(back.backend, [moved])
    assert back.held(range(300)) == {**state.expected, "amount": {}}


def test_the_table_of_a_description_is_that_of_the_database(worker: WorkerStates) -> None:
    assert isinstance(some_state(worker).backend._all_tables[0], PackedTable)
    assert all(isinstance(table, Table) for table in State(worker, [COUNT], subtask=1).backend._all_tables)
