"""State by row against plain dicts, whatever is frozen, released and restored in between."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.codec.snapshot import decode_sections
from headgate.errors import CorruptionError
from headgate.state.backend import Ownership
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory.row_backend import MemoryRowBackend
from headgate.state.snapshot import FrozenState

ONE = KeyColumns(("id",), (pa.int64(),))
TWO = KeyColumns(("id", "name"), (pa.int64(), pa.large_string()))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.large_string())
LIST = StateDescriptor("list", StateKind.LIST, pa.struct([("x", pa.int64()), ("day", pa.date32())]))
MAP = StateDescriptor("map", StateKind.MAP, pa.large_list(pa.int64()), pa.int64())
ALL = (VALUE, LIST, MAP)
OWNER = Ownership(128, 1, 0)

Model = dict[str, dict[Any, Any]]


def sections(frozen: FrozenState) -> dict[str, memoryview]:
    return decode_sections(b"".join(bytes(memoryview(part)) for part in frozen.encode()), "snapshot")


def restored(keys: KeyColumns, frozen: FrozenState, owner: Ownership = OWNER) -> MemoryRowBackend:
    backend = MemoryRowBackend(keys, ALL)
    backend.restore(sections(frozen), "snapshot", owner)
    return backend


def contents(backend: MemoryRowBackend) -> Model:
    return {d.name: {key: backend.cells(d).get(key) for key in backend.cells(d).keys()} for d in ALL}  # noqa: SIM118


def change(backend: MemoryRowBackend, model: Model, what: str, key: Any, n: int) -> None:
    """Do as users' handles do: an empty list or map is removed."""
    values, lists, maps = (backend.cells(descriptor) for descriptor in ALL)
    match what:
        case "put":
            values.put(key, f"v{n}")
            model["value"][key] = f"v{n}"
        case "clear":
            values.remove(key)
            model["value"].pop(key, None)
        case "append":
            found = lists.writable(key)
            if found is None:
                lists.put(key, found := [])
            found.append((n, None))
            model["list"].setdefault(key, []).append((n, None))
        case "forget":
            lists.remove(key)
            model["list"].pop(key, None)
        case "set":
            entries = maps.writable(key)
            if entries is None:
                maps.put(key, entries := {})
            entries[n % 3] = (n,)
            model["map"].setdefault(key, {})[n % 3] = (n,)
        case "unset":
            entries = maps.writable(key)
            if entries is not None:
                entries.pop(n % 3, None)
                model["map"][key].pop(n % 3, None)
                if not entries:
                    maps.remove(key)
                    del model["map"][key]


WORDS = ["put", "clear", "append", "forget", "set", "unset", "freeze", "freeze", "release", "drop", "absorb"]


@given(
    steps=st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 3), st.integers(0, 99)), max_size=60),
    keys=st.sampled_from([ONE, TWO]),
)
@example(steps=[("append", 1, 5), ("freeze", 0, 0), ("append", 1, 6)], keys=ONE)
@example(steps=[("set", 1, 5), ("freeze", 0, 0), ("freeze", 0, 0), ("set", 1, 6), ("unset", 1, 5)], keys=TWO)
def test_any_history_is_that_of_plain_dicts_and_what_was_frozen_stays(
    steps: list[tuple[str, int, int]], keys: KeyColumns
) -> None:
    backend = MemoryRowBackend(keys, ALL)
    model: Model = {"value": {}, "list": {}, "map": {}}
    held: list[tuple[FrozenState, dict[str, bytes], dict[str, int]]] = []
    for what, number, n in steps:
        key: Any = number if keys is ONE else (number, f"k{number}")
        match what:
            case "freeze":
                frozen = backend.freeze()
                held.append((frozen, {k: bytes(v) for k, v in sections(frozen).items()}, dict(frozen.rows())))
            case "release" if held:
                held.pop(n % len(held))[0].release()
            case "drop" if held:
                held.pop(n % len(held))
            case "absorb":
                backend.absorb()
            case _:
                change(backend, model, what, key, n)
        assert contents(backend) == model
        assert sorted(backend.all_keys()) == sorted({key for state in model.values() for key in state})
        for frozen, before, rows in held:
            assert {k: bytes(v) for k, v in sections(frozen).items()} == before
            assert frozen.rows() == rows
    again = backend.freeze()
    entries = {d: sum(map(len, model[d].values())) for d in ("list", "map")}
    assert again.rows() == {"value": len(model["value"]), **entries}
    found = contents(restored(keys, again))
    assert found["value"] == model["value"]
    assert {key: len(rows) for key, rows in found["list"].items()} == {k: len(v) for k, v in model["list"].items()}
    assert {key: set(entries) for key, entries in found["map"].items()} == {k: set(v) for k, v in model["map"].items()}
    assert {k: bytes(v) for k, v in sections(restored(keys, again).freeze()).items()} == {
        k: bytes(v) for k, v in sections(again).items()
    }, "a restore loses and changes nothing"


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_each_key_of_former_subtasks_goes_to_its_owner(parallelism: int) -> None:
    backend = MemoryRowBackend(TWO, ALL)
    model: Model = {"value": {}, "list": {}, "map": {}}
    for number in range(200):
        for what in ("put", "append", "set"):
            change(backend, model, what, (number, f"k{number}"), number)
    frozen = backend.freeze()
    parts = [restored(TWO, frozen, Ownership(128, parallelism, index)).all_keys() for index in range(parallelism)]
    assert sorted(key for part in parts for key in part) == sorted(model["value"])
    assert all(parts)


def test_a_section_of_other_columns_is_refused_by_name() -> None:
    frozen = MemoryRowBackend(ONE, ALL).freeze()
    with pytest.raises(CorruptionError, match="expected columns"):
        restored(TWO, frozen)


def test_state_of_no_key_is_written_and_read() -> None:
    backend = MemoryRowBackend(ONE, ALL)
    frozen = backend.freeze()
    assert frozen.rows() == {"value": 0, "list": 0, "map": 0}
    assert restored(ONE, frozen).all_keys() == []


def test_more_keys_than_one_batch_holds_come_back() -> None:
    backend = MemoryRowBackend(ONE, ALL)
    for number in range(40_000):
        backend.cells(VALUE).put(number, str(number))
    found = restored(ONE, backend.freeze()).cells(VALUE)
    assert (len(list(found.keys())), found.get(39_999)) == (40_000, "39999")
