"""The contract of a state backend: any history on any of them is that of plain dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.state.backends import GROUPS, NAMES, OWNER, rows_in, sections_of, states

from headgate.state.backend import ColumnBackend, RowBackend
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.snapshot import FrozenState

POINT = pa.struct([("x", pa.int64()), ("day", pa.date32()), ("names", pa.large_list(pa.large_string()))])
VALUE = StateDescriptor("value", StateKind.VALUE, pa.int64())
LIST = StateDescriptor("list", StateKind.LIST, POINT)
MAP = StateDescriptor("map", StateKind.MAP, pa.large_string(), pa.large_string())
ALL = (VALUE, LIST, MAP)

NUMBER = KeyColumns(("id",), (pa.int64(),))
TEXT = KeyColumns(("name",), (pa.large_string(),))
PAIR = KeyColumns(("name", "id"), (pa.large_string(), pa.int32()))
TIMES = KeyColumns(("day", "is_on", "ratio"), (pa.date32(), pa.bool_(), pa.float64()))
KEYS: dict[str, tuple[KeyColumns, Callable[[int], tuple[Any, ...]]]] = {
    "number": (NUMBER, lambda n: (n - 2,)),
    "text": (TEXT, lambda n: (["", "a", "a\0", "ä", "a\0\0b"][n],)),
    "pair": (PAIR, lambda n: (["", "a"][n % 2], n - 2)),
    "times": (TIMES, lambda n: (n, n % 2 == 0, n - 0.5)),
}

Model = dict[str, dict[int, Any]]
each = pytest.mark.parametrize("name", NAMES)
each_key = pytest.mark.parametrize("key", KEYS)
few = settings(max_examples=12)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("put", "put", "clear", "append", "append", "forget", "set", "set", "unset", "empty"),
                *("freeze", "release", "tidy", "tidy", "memory", "rocksdb"),
            ]
        ),
        st.lists(st.integers(0, 4), min_size=1, max_size=4),
        st.integers(0, 99),
    ),
    max_size=25,
)


def point(n: int) -> dict[str, Any]:
    return {"x": n, "day": None if n % 3 == 0 else n, "names": None if n % 2 else [f"n{n}", None]}


def points(numbers: list[int]) -> pa.Array:
    plain = pa.struct([("x", pa.int64()), ("day", pa.int32()), ("names", pa.large_list(pa.large_string()))])
    return pa.array([point(n) for n in numbers], plain).cast(POINT)


def in_snapshot(model: Model, key: str) -> dict[str, list[dict[str, Any]]]:
    """Return what a snapshot of ``model`` has to hold."""
    columns, tuple_of = KEYS[key]

    def outer(n: int) -> dict[str, Any]:
        arrays = [pa.array([part], t) for part, t in zip(tuple_of(n), columns.types, strict=True)]
        return {f"key{at}": array[0].as_py() for at, array in enumerate(arrays)}

    def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=lambda row: [found for name, found in row.items() if name != "value"])

    lists = [outer(n) | {"value": value} for n, found in model["list"].items() for value in points(found).to_pylist()]
    return {
        "value": ordered([outer(n) | {"value": value} for n, value in model["value"].items()]),
        "list": ordered(lists),
        "map": ordered(
            [outer(n) | {"map_key": k, "value": v} for n, found in model["map"].items() for k, v in found.items()]
        ),
    }


def counts(model: Model) -> dict[str, int]:
    entries = {name: sum(map(len, model[name].values())) for name in ("list", "map")}
    return {"value": len(model["value"]), **entries}


def change(model: Model, what: str, numbers: list[int], n: int) -> None:
    for number in numbers:
        match what:
            case "put":
                model["value"][number] = n
            case "clear":
                model["value"].pop(number, None)
            case "append":
                model["list"].setdefault(number, []).append(n)
            case "forget":
                model["list"].pop(number, None)
            case "set":
                model["map"].setdefault(number, {})[f"k{n % 3}"] = f"v{n}"
            case "unset" if number in model["map"]:
                model["map"][number].pop(f"k{n % 3}", None)
                if not model["map"][number]:
                    del model["map"][number]
            case "empty":
                model["map"].pop(number, None)


class Rows:
    """A backend by row, used as functions use it."""

    def __init__(self, key: str) -> None:
        self.columns, self._tuple_of = KEYS[key]

    def make(self, made: Any) -> RowBackend:
        self.backend = made.of("node", 0, GROUPS).by_row(self.columns, ALL)
        return self.backend

    def key(self, n: int) -> Any:
        arrays = [pa.array([part], t) for part, t in zip(self._tuple_of(n), self.columns.types, strict=True)]
        found = tuple(array[0].as_py() for array in arrays)
        return found[0] if len(found) == 1 else found

    def tidy(self) -> None:
        self.backend.absorb()

    def change(self, what: str, numbers: list[int], n: int) -> None:
        values, lists, maps = (self.backend.cells(descriptor) for descriptor in ALL)
        element = (n, points([n])[0].as_py()["day"], None if n % 2 else (f"n{n}", None))
        for number in numbers:
            key = self.key(number)
            match what:
                case "put":
                    values.put(key, n)
                case "clear":
                    values.remove(key)
                case "append":
                    found = lists.writable(key)
                    if found is None:
                        lists.put(key, [element])
                    else:
                        found.append(element)
                case "forget":
                    lists.remove(key)
                case "set":
                    found = maps.writable(key)
                    if found is None:
                        maps.put(key, {f"k{n % 3}": f"v{n}"})
                    else:
                        found[f"k{n % 3}"] = f"v{n}"
                case "unset":
                    found = maps.get(key)
                    if found is not None and f"k{n % 3}" in found:
                        if len(found) == 1:
                            maps.remove(key)
                        else:
                            del maps.writable(key)[f"k{n % 3}"]
                case "empty":
                    maps.remove(key)

    def check(self, model: Model) -> None:
        for number in range(5):
            key = self.key(number)
            assert self.backend.cells(VALUE).get(key) == model["value"].get(number)
            assert len(self.backend.cells(LIST).get(key) or ()) == len(model["list"].get(number, ()))
            assert (self.backend.cells(MAP).get(key) or {}) == model["map"].get(number, {})

    def check_keys(self, model: Model) -> None:
        found = self.backend.all_keys()
        assert Counter(found) == Counter({self.key(n) for state in model.values() for n in state})
        for descriptor in ALL:
            keys = list(self.backend.cells(descriptor).keys())
            assert Counter(keys) == Counter(self.key(n) for n in model[descriptor.name])


class Columns(Rows):
    """A backend by column, used as functions use it: one call for all rows."""

    def make(self, made: Any) -> ColumnBackend:  # type: ignore[override]
        self.columned: ColumnBackend = made.of("node", 0, GROUPS).by_column(self.columns, ALL)
        return self.columned

    def slots(self, numbers: list[int]) -> Any:
        parts = list(zip(*(self._tuple_of(n) for n in numbers), strict=True))
        return self.columned.slots([pa.array(list(part), t) for part, t in zip(parts, self.columns.types, strict=True)])

    def tidy(self) -> None:
        self.columned.prepare()

    def change(self, what: str, numbers: list[int], n: int) -> None:
        slots, count = self.slots(numbers), len(numbers)
        values, lists, maps = self.columned.values(VALUE), self.columned.lists(LIST), self.columned.maps(MAP)
        map_keys = pa.array([f"k{n % 3}"] * count, pa.large_string())
        match what:
            case "put" if n % 3 == 0:
                values.replace(slots, pa.array([n] * count))
            case "put" if n % 3 == 1:
                values.clear(slots)
                values.extreme(slots, pa.array([n] * count), is_min=n % 2 == 0)
            case "put":
                values.clear(slots)
                first = np.unique(slots)
                values.add(first, pa.array([n] * len(first)))
            case "clear":
                values.clear(slots)
            case "append":
                lists.append(slots, points([n] * count))
            case "forget":
                lists.clear(slots)
            case "set":
                maps.put(slots, map_keys, pa.array([f"v{n}"] * count, pa.large_string()))
            case "unset":
                maps.remove(slots, map_keys)
            case "empty":
                maps.clear(slots)

    def check(self, model: Model) -> None:
        slots = self.slots(list(range(5)))
        assert self.columned.values(VALUE).get(slots).to_pylist() == [model["value"].get(n) for n in range(5)]
        rows, elements = self.columned.lists(LIST).explode(slots)
        wanted = [(n, one) for n in range(5) for one in points(model["list"].get(n, [])).to_pylist()]
        assert list(zip(rows.tolist(), elements.to_pylist(), strict=True)) == wanted
        entry_rows, map_keys, values = self.columned.maps(MAP).items(slots)
        found = sorted(zip(entry_rows.tolist(), map_keys.to_pylist(), values.to_pylist(), strict=True))
        assert found == sorted((n, k, v) for n, one in model["map"].items() for k, v in one.items())

    def check_keys(self, model: Model) -> None:
        slots = self.columned.all_slots()
        found = list(zip(*(column.to_pylist() for column in self.columned.key_columns(slots)), strict=True))
        keys = {self.key(n) for state in model.values() for n in state}
        assert Counter(found) == Counter(key if isinstance(key, tuple) else (key,) for key in keys)


def check_history(name: str, key: str, use: Rows, steps: list[tuple[str, list[int], int]]) -> None:
    """Do ``steps`` on a backend and on dicts. ``memory`` and ``rocksdb`` are restarts, with that backend."""
    model: Model = {"value": {}, "list": {}, "map": {}}
    held: list[tuple[FrozenState, Any, dict[str, int]]] = []
    with states(name) as made, states("rocksdb" if name == "memory" else "memory") as others:
        backend: Any = use.make(made)
        for what, numbers, n in steps:
            match what:
                case "freeze":
                    held.append((backend.freeze(), in_snapshot(model, key), counts(model)))
                case "release" if held:
                    held.pop(n % len(held))[0].release()
                case "tidy":
                    use.tidy()
                case "memory" | "rocksdb":
                    former = sections_of(backend.freeze())
                    backend = use.make(made if name.startswith(what) else others)
                    backend.restore(former, "snapshot", OWNER)
                case _:
                    use.change(what, numbers, n)
                    change(model, what, numbers, n)
            use.check(model)
        for frozen, wanted, rows in held:
            assert rows_in(sections_of(frozen)) == wanted, "what was frozen has changed"
            assert frozen.rows() == rows
        use.tidy()
        use.check_keys(model)
        last = backend.freeze()
        assert rows_in(sections_of(last)) == in_snapshot(model, key)
        assert last.rows() == counts(model)


@each
@each_key
@few
@given(steps=STEPS)
def test_any_history_by_row_is_that_of_plain_dicts(
    name: str, key: str, steps: list[tuple[str, list[int], int]]
) -> None:
    check_history(name, key, Rows(key), steps)


@each
@each_key
@few
@given(steps=STEPS)
def test_any_history_by_column_is_that_of_plain_dicts(
    name: str, key: str, steps: list[tuple[str, list[int], int]]
) -> None:
    check_history(name, key, Columns(key), steps)
