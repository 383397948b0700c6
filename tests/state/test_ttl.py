"""Columns with a TTL, many rows a call and keys more than once: what plain dicts with a clock have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.operators.process.expiring_functions import Model
from tests.runtime.checkpoints.frozen_cases import small
from tests.state.backends import EACH, Chosen, choose

from headgate.codec.snapshot import decode_sections
from headgate.state.backend import ColumnBackend, Ownership
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.ttl import TTL

KEYS = KeyColumns(("id",), (pa.int64(),))
TEXT = pa.large_string()
COUNT = 3
WRITES = ("value put", "value last", "value min", "value add", "value clear", "list append", "list clear")
MAPS = ("map put", "map put", "map remove", "map clear")
READS = ("value get", "value exists", "list get", "list count", "map get", "map contains", "map items")

rows = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 2), st.integers(-5, 5)), min_size=1, max_size=10)
waits = st.sampled_from((0, 0, 0, 1, 3, 5))
steps = st.one_of(
    st.tuples(st.sampled_from((*WRITES, *MAPS)), rows, waits),
    st.tuples(st.sampled_from((*WRITES, *MAPS)), rows, waits),
    st.tuples(st.sampled_from(READS), rows, waits),
    st.tuples(st.sampled_from(("prepare", "freeze", "restore")), st.none(), waits),
)
EVERYTHING = [(key, m, 0) for key in range(COUNT) for m in range(3)]


@pytest.fixture(autouse=True, params=EACH)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param):
        yield


class Columns:
    """Three states of one backend."""

    def __init__(self, ttl: TTL) -> None:
        self.value = StateDescriptor("value", StateKind.VALUE, pa.int64(), ttl=ttl)
        self.list = StateDescriptor("list", StateKind.LIST, TEXT, ttl=ttl)
        self.map = StateDescriptor("map", StateKind.MAP, pa.int64(), TEXT, ttl=ttl)
        self.held: list[Any] = []
        self.backend = self._new()

    def _new(self) -> ColumnBackend:
        return Chosen.worker.of("node", 0, 128).by_column(KEYS, (self.value, self.list, self.map))

    def restore(self) -> None:
        frozen = self.backend.freeze()
        payload = b"".join(bytes(memoryview(part)) for part in frozen.encode())
        now_ms, self.backend = self.backend.time.now_ms, self._new()
        self.backend.restore(decode_sections(payload, "test"), "test", Ownership(128, 1, 0))
        self.backend.time.now_ms = now_ms
        self.backend.end_restore()

    def write(self, do: str, slots: Any, m: list[int], n: list[int]) -> None:
        values, lists, maps = (
            self.backend.values(self.value),
            self.backend.lists(self.list),
            self.backend.maps(self.map),
        )
        numbers, texts = pa.array(n, pa.int64()), pa.array([str(one) for one in n], TEXT)
        own = pa.array([str(one) for one in m], TEXT)
        match do:
            case "value put":
                values.put(slots, numbers)
            case "value last":
                values.replace(slots, numbers)
            case "value min":
                values.extreme(slots, numbers, is_min=True)
            case "value add":
                values.add(slots, numbers)
            case "value clear":
                values.clear(slots)
            case "list append":
                lists.append(slots, texts)
            case "list clear":
                lists.clear(slots)
            case "map put":
                maps.put(slots, own, pa.array(n))
            case "map remove":
                maps.remove(slots, own)
            case "map clear":
                maps.clear(slots)

    def read(self, do: str, slots: Any, m: list[int]) -> list[Any]:
        values, lists, maps = (
            self.backend.values(self.value),
            self.backend.lists(self.list),
            self.backend.maps(self.map),
        )
        own = pa.array([str(one) for one in m], TEXT)
        found: list[list[Any]] = [[] for _ in slots]
        match do:
            case "value get":
                return values.get(slots).to_pylist()  # type: ignore[no-any-return]
            case "value exists":
                return values.contains(slots).tolist()  # type: ignore[no-any-return]
            case "list count":
                return lists.counts(slots).tolist()  # type: ignore[no-any-return]
            case "map get":
                return maps.get(slots, own).to_pylist()  # type: ignore[no-any-return]
            case "map contains":
                return maps.contains(slots, own).tolist()  # type: ignore[no-any-return]
            case "list get":
                for row, text in zip(*(part.tolist() for part in lists.explode(slots)), strict=True):
                    found[row].append(int(text))
                return found
            case _:
                for row, key, value in zip(*(part.tolist() for part in maps.items(slots)), strict=True):
                    found[row].append((int(key), value))
                return [sorted(one) for one in found]


@pytest.mark.parametrize("update", ["write", "read_and_write"])
@given(history=st.lists(steps, max_size=20))
@example(history=[("value put", [(0, 0, 1)], 0), ("value get", [(0, 0, 0)], 5)])
@example(history=[("value put", [(0, 0, 1)], 0), ("value add", [(0, 0, 2)], 5)])
@example(history=[("map put", [(0, 0, 1)], 0), ("map get", [(0, 0, 0)], 5)])
@example(
    history=[("map put", [(0, 0, 1), (0, 1, 1)], 0), ("map remove", [(0, 0, 0)], 1), ("map items", [(0, 0, 0)], 1)]
)
@settings(max_examples=60)
def test_many_rows_at_once_are_one_after_the_other_at_one_time(
    update: Any, history: list[tuple[str, Any, int]]
) -> None:
    columns, model = Columns(TTL("5ms", update)), Model(5, update == "read_and_write")
    with small():
        for do, given_, wait_ms in [*history, *((read, EVERYTHING, 0) for read in READS)]:
            backend = columns.backend
            model.now_ms += wait_ms
            backend.time.now_ms = model.now_ms
            if do == "prepare":
                backend.prepare()
            elif do == "freeze":  # what is written next is copied first
                frozen = backend.freeze()
                columns.held.append((frozen, frozen.rows(), b"".join(map(bytes, map(memoryview, frozen.encode())))))
            elif do == "restore":
                columns.restore()
                model.restore(5, update == "read_and_write")
            else:
                slots = backend.slots([pa.array([key for key, _, _ in given_])])
                m, n = [one for _, one, _ in given_], [one for _, _, one in given_]
                seen = [model.do(key, do, one, number) for key, one, number in given_]
                if do in READS:
                    assert [repr(one) for one in columns.read(do, slots, m)] == seen
                else:
                    columns.write(do, slots, m, n)
            now = columns.backend
            keys = now.key_columns(now.all_slots())[0].to_pylist()
            assert sorted(keys) == sorted(model.keys())
        for frozen, counts, payload in columns.held:
            assert frozen.rows() == counts
            assert b"".join(map(bytes, map(memoryview, frozen.encode()))) == payload
