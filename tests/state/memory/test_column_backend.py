"""State by column in memory against plain Python: values, and the arrays that hold them."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.codec.snapshot import decode_sections
from headgate.errors import UsageError
from headgate.state import vectors
from headgate.state.backend import Ownership
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory import column_backend as memory_columns
from headgate.state.memory import column_states as memory_lists
from headgate.state.memory import column_states as memory_maps
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.memory.column_states import MemoryValues

KEYS = KeyColumns(("id", "name"), (pa.int64(), pa.large_string()))
PAIR = pa.struct([("x", pa.int64()), ("y", pa.large_string())])
VALUE = StateDescriptor("value", StateKind.VALUE, pa.large_string())
LIST = StateDescriptor("list", StateKind.LIST, PAIR)
MAP = StateDescriptor("map", StateKind.MAP, pa.large_list(pa.int64()), pa.int64())
ALL = (VALUE, LIST, MAP)
OWNER = Ownership(128, 1, 0)

Key = tuple[int, str]


def key_arrays(keys: list[Key]) -> list[pa.Array]:
    return [pa.array([k[0] for k in keys], pa.int64()), pa.array([k[1] for k in keys], pa.large_string())]


def pair(n: int) -> dict[str, Any]:
    return {"x": None if n % 4 == 0 else n, "y": f"y{n}"}


class Model:
    """State as dicts, which lose what is empty."""

    def __init__(self) -> None:
        self.values: dict[Key, str] = {}
        self.lists: dict[Key, list[Any]] = {}
        self.maps: dict[Key, dict[int, list[int]]] = {}

    def copy(self) -> Model:
        copied = Model()
        copied.values = dict(self.values)
        copied.lists = {key: list(found) for key, found in self.lists.items()}
        copied.maps = {key: dict(found) for key, found in self.maps.items()}
        return copied

    def keys(self) -> set[Key]:
        return {*self.values, *self.lists, *(key for key, found in self.maps.items() if found)}


def apply(backend: MemoryColumnBackend, model: Model, op: str, keys: list[Key], n: int) -> None:
    """Do ``op`` for ``keys`` in one call; row i has the number n + i."""
    backend.prepare()
    slots = backend.slots(key_arrays(keys))
    numbers = [n + i for i in range(len(keys))]
    own = pa.array([number % 5 for number in numbers])
    match op:
        case "put":
            backend.values(VALUE).put(slots, pa.array([f"v{m}" for m in numbers], pa.large_string()))
            model.values.update({key: f"v{m}" for key, m in zip(keys, numbers, strict=True)})
        case "clear":
            backend.values(VALUE).clear(slots)
            backend.lists(LIST).clear(slots)
            backend.maps(MAP).clear(slots)
            for key in keys:
                for part in (model.values, model.lists, model.maps):
                    part.pop(key, None)  # type: ignore[attr-defined]
        case "append":
            backend.lists(LIST).append(slots, pa.array([pair(m) for m in numbers], PAIR))
            for key, m in zip(keys, numbers, strict=True):
                model.lists.setdefault(key, []).append(pair(m))
        case "map put":
            backend.maps(MAP).put(slots, own, pa.array([[m, m] for m in numbers], pa.large_list(pa.int64())))
            for key, m in zip(keys, numbers, strict=True):
                model.maps.setdefault(key, {})[m % 5] = [m, m]
        case "map remove":
            backend.maps(MAP).remove(slots, own)
            for key, m in zip(keys, numbers, strict=True):
                model.maps.get(key, {}).pop(m % 5, None)


def check(backend: MemoryColumnBackend, model: Model) -> None:
    living = backend.all_slots()
    keys = list(zip(*(column.to_pylist() for column in backend.key_columns(living)), strict=True))
    assert len(keys) == len(set(keys))
    assert set(keys) == model.keys()
    assert backend.values(VALUE).get(living).to_pylist() == [model.values.get(key) for key in keys]
    found: list[list[Any]] = [[] for _ in keys]
    for row, element in zip(*(part.tolist() for part in backend.lists(LIST).explode(living)), strict=True):
        found[row].append(element)
    assert found == [model.lists.get(key, []) for key in keys]
    entries: list[dict[int, Any]] = [{} for _ in keys]
    rows, map_keys, values = backend.maps(MAP).items(living)
    for row, map_key, value in zip(rows.tolist(), map_keys.to_pylist(), values.to_pylist(), strict=True):
        assert map_key not in entries[row]
        entries[row][map_key] = value
    assert entries == [model.maps.get(key, {}) for key in keys]


def restored(frozen: Any) -> MemoryColumnBackend:
    payload = b"".join(bytes(memoryview(b)) for b in frozen.encode())
    backend = MemoryColumnBackend(KEYS, ALL)
    backend.restore(decode_sections(payload, "test"), "test", OWNER)
    return backend


STEPS = st.tuples(
    st.sampled_from(["put", "clear", "append", "append", "map put", "map put", "map remove", "freeze", "check"]),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from("ab")), min_size=1, max_size=10),
    st.integers(0, 40),
)


@pytest.mark.long
@settings(max_examples=120)
@given(st.lists(STEPS, max_size=30), st.sampled_from([0, 1, 3, 100]))
def test_stores_with_small_thresholds_do_what_plain_objects_do(
    steps: list[tuple[str, list[Key], int]], spare: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:  # growing, moving, rebuilding and renumbering happen all the time
        patched.setattr(vectors, "_SLOTS_MIN", 1)
        patched.setattr(vectors, "_HEAP_FREE", spare)
        patched.setattr(memory_lists, "_POOL_FREE", spare)
        patched.setattr(memory_maps, "_DEAD_FREE", spare)
        patched.setattr(memory_columns, "_RENUMBER_MIN", spare)
        backend, model = MemoryColumnBackend(KEYS, ALL), Model()
        held = []
        for op, keys, n in steps:
            if op == "freeze":
                held.append((backend.freeze(), model.copy()))
            elif op == "check":
                check(backend, model)
            else:
                apply(backend, model, op, keys, n)
        check(backend, model)
        for frozen, then in held:
            check(restored(frozen), then)


def test_keys_without_state_lose_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_columns, "_RENUMBER_MIN", 100)
    backend, model = MemoryColumnBackend(KEYS, ALL), Model()
    apply(backend, model, "append", [(-1, "stays")], 1)
    for start in range(0, 10_000, 50):
        keys = [(start + i, "goes") for i in range(50)]
        for op in ("put", "append", "map put", "clear"):
            apply(backend, model, op, keys, start)
    assert len(backend._index) < 250
    assert model.keys() == {(-1, "stays")}
    check(backend, model)


@pytest.mark.parametrize("apart", [1, 1 << 40])
def test_keys_keep_their_state_when_they_get_other_slots(apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, model = MemoryColumnBackend(KEYS, ALL), Model()
    for start in range(0, 1_000, 10):
        keys = [(number * apart, name) for number in range(start, start + 10) for name in "ab"]
        for op in ("put", "append", "map put"):
            apply(backend, model, op, keys, start)
    apply(backend, model, "clear", [key for key in model.values if key[0] // apart % 3], 0)
    monkeypatch.setattr(backend, "_renumber_at", 0)
    backend.prepare()
    assert len(backend._index) == len(model.keys())
    check(backend, model)


def test_blocks_double_so_that_appending_moves_each_element_a_bounded_number_of_times() -> None:
    backend, rows = MemoryColumnBackend(KEYS, (LIST,)), 20_000
    lists = backend.lists(LIST)
    slots = backend.slots(key_arrays([(0, "hub"), (1, "leaf")]))
    for n in range(0, rows, 100):
        lists.append(np.repeat(slots[:1], 100), pa.array([pair(n + i) for i in range(100)], PAIR))
    lists.append(slots[1:], pa.array([pair(7)], PAIR))
    assert lists._end <= 4 * rows
    assert lists.counts(slots).tolist() == [rows, 1]
    rows_found, elements = lists.explode(slots)
    assert rows_found.tolist() == [0] * rows + [1]
    assert elements.to_pylist() == [pair(n) for n in range(rows)] + [pair(7)]


def test_what_is_frozen_does_not_change_while_another_thread_encodes_it() -> None:
    backend, model = MemoryColumnBackend(KEYS, ALL), Model()
    keys = [(i % 3_000, "k") for i in range(6_000)]
    for op in ("put", "append", "map put"):
        apply(backend, model, op, keys, 1)
    frozen, then = backend.freeze(), model.copy()
    encoded: list[MemoryColumnBackend] = []
    upload = threading.Thread(target=lambda: encoded.append(restored(frozen)))
    upload.start()
    n = 0
    while upload.is_alive() or n < 3:
        n += 1
        for op in ("put", "append", "map remove", "map put", "clear"):
            apply(backend, model, op, keys[: 2_000 + n], n)
    upload.join()
    check(encoded[0], then)
    check(backend, model)


SLOTS = 5
ROWS = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(-3, 3)), max_size=10)
STEP = st.tuples(st.sampled_from(["put", "clear", "replace", "min", "max", "add"]), ROWS)


def slots_of(rows: list[tuple[int, Any]]) -> Any:
    return np.array([slot for slot, _ in rows], np.int64)


def check_marks(marks: Any, rows: list[tuple[int, Any]], before: dict[int, Any], after: dict[int, Any]) -> list[int]:
    """Exactly one row is marked of each slot whose value is another one now."""
    marked = [rows[at][0] for at in np.flatnonzero(marks)]
    assert sorted(marked) == sorted(slot for slot in after if before.get(slot) != after[slot])
    return [int(at) for at in np.flatnonzero(marks)]


@pytest.mark.parametrize("dtype", [pa.int64(), pa.int8(), pa.float64()])
@given(steps=st.lists(STEP, max_size=12))
def test_any_history_is_that_of_a_dict(dtype: pa.DataType, steps: list[tuple[str, list[tuple[int, int]]]]) -> None:
    values, model = MemoryValues(dtype, lambda: SLOTS), dict[int, int]()
    every = np.arange(SLOTS)
    for what, rows in steps:
        slots, given_ = slots_of(rows), pa.array([value for _, value in rows], dtype)
        before = dict(model)
        match what:
            case "put":
                values.put(slots, given_)
                model.update(rows)
            case "clear":
                values.clear(slots)
                for slot, _ in rows:
                    model.pop(slot, None)
            case "replace":
                marks = values.replace(slots, given_)
                model.update(rows)
                assert all(rows[at][1] == model[rows[at][0]] for at in check_marks(marks, rows, before, model))
            case "min" | "max":
                marks = values.extreme(slots, given_, is_min=what == "min")
                for slot, value in rows:
                    best = min if what == "min" else max
                    model[slot] = best(model.get(slot, value), value)
                assert all(rows[at][1] == model[rows[at][0]] for at in check_marks(marks, rows, before, model))
            case _:
                marks = values.add(slots, given_)
                for slot, value in rows:
                    model[slot] = model.get(slot, 0) + value
                check_marks(marks, rows, before, model)
        assert values.get(every).to_pylist() == [model.get(slot) for slot in range(SLOTS)]
        assert values.contains(every).tolist() == [slot in model for slot in range(SLOTS)]


@pytest.mark.parametrize(("is_min", "best"), [(True, 1.0), (False, 2.0)])
def test_nan_is_never_the_least_nor_the_greatest(is_min: bool, best: float) -> None:
    values = MemoryValues(pa.float64(), lambda: 2)
    rows = [(0, math.nan), (0, 2.0), (0, 1.0), (1, math.nan)]
    marks = values.extreme(slots_of(rows), pa.array([value for _, value in rows]), is_min=is_min)
    assert values.get(np.array([0, 1])).to_pylist() == [best, None]
    assert [rows[at][1] for at in np.flatnonzero(marks)] == [best]


def test_what_was_frozen_shows_no_later_change_and_comes_back() -> None:
    values = MemoryValues(pa.large_string(), lambda: 3)
    values.put(np.array([0, 2]), pa.array(["a", "c"], pa.large_string()))
    frozen = values.freeze()
    values.put(np.array([0, 1]), pa.array(["x", "y"], pa.large_string()))
    values.clear(np.array([2]))
    assert frozen.count() == 2
    slots, columns = frozen.rows()
    assert (slots.tolist(), columns[0].to_pylist()) == ([0, 2], ["a", "c"])
    again = MemoryValues(pa.large_string(), lambda: 3)
    again.restore(slots, columns)
    assert again.get(np.arange(3)).to_pylist() == ["a", None, "c"]


@pytest.mark.parametrize("dtype", [pa.int8(), pa.int64(), pa.uint64(), pa.duration("us")])
def test_a_sum_that_its_type_does_not_hold_fails(dtype: pa.DataType) -> None:
    values = MemoryValues(dtype, lambda: SLOTS)
    most = {pa.int8(): 2**7, pa.uint64(): 2**64}.get(dtype, 2**63) - 1
    values.add(np.array([0, 0]), pa.array([most - 1, 1], dtype))
    with pytest.raises(UsageError, match=r"a sum of integers is larger than u?int"):
        values.add(np.array([1, 0]), pa.array([1, 1], dtype))
    assert values.get(np.array([0])).to_pylist() == pa.array([most], dtype).to_pylist()


def test_a_sum_of_narrow_floating_numbers_is_one() -> None:
    values = MemoryValues(pa.float32(), lambda: SLOTS)
    values.add(np.array([0, 0]), pa.array([0.5, 1.0], pa.float32()))
    assert values.get(np.array([0])).to_pylist() == [1.5]
