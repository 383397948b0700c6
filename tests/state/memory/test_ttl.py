"""What expires gives its room back, a bounded amount of work at a time, and goes on with the chunks of a checkpoint."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.state.backends import GROUPS
from tests.state.memory.chunk_stories import KEYS, Story, chunks_of, small

import headgate as hg
from headgate.codec.snapshot import decode_sections
from headgate.state import vectors
from headgate.state.backend import Ownership
from headgate.state.descriptors import StateDescriptor, StateKind
from headgate.state.memory import column_backend as memory_columns
from headgate.state.memory import column_states as memory_lists
from headgate.state.memory import column_states as memory_maps
from headgate.state.memory import ttl
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.memory.row_backend import MemoryRowBackend
from headgate.state.memory.ttl import ExpiringCells, ExpiringLists, ExpiringMaps
from headgate.state.ttl import TTL, live_entries, live_value

TEXT = pa.large_string()
HOUR = TTL("1h")
HOUR_MS = 3_600_000
HOUR_VALUE = StateDescriptor("value", StateKind.VALUE, TEXT, ttl=HOUR)
HOUR_LIST = StateDescriptor("list", StateKind.LIST, TEXT, ttl=HOUR)
HOUR_MAP = StateDescriptor("map", StateKind.MAP, TEXT, pa.int64(), ttl=HOUR)
ALL = (HOUR_VALUE, HOUR_LIST, HOUR_MAP)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what is looked at in a turn, and what may be left, so small that little state is more."""
    monkeypatch.setattr(ttl, "SWEEP_ROWS", 16)
    monkeypatch.setattr(ttl, "SWEEP_KEYS", 16)
    monkeypatch.setattr(memory_columns, "_RENUMBER_MIN", 64)
    monkeypatch.setattr(memory_lists, "_POOL_FREE", 16)
    monkeypatch.setattr(memory_maps, "_DEAD_FREE", 16)
    monkeypatch.setattr(vectors, "_HEAP_FREE", 16)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def fill(backend: MemoryColumnBackend, first: int, count: int) -> None:
    slots = backend.slots([pa.array(range(first, first + count))])
    texts = pa.array([f"text {n}" for n in range(count)], TEXT)
    backend.values(HOUR_VALUE).put(slots, texts)
    backend.lists(HOUR_LIST).append(slots, texts)
    backend.maps(HOUR_MAP).put(slots, pa.array([n % 5 for n in range(count)]), texts)


@pytest.mark.usefixtures("_small")
def test_columns_whose_values_expired_are_forgotten_while_only_another_key_is_used() -> None:
    backend = MemoryColumnBackend(KEYS, ALL)
    fill(backend, 0, 1_000)
    backend.prepare()
    backend.time.now_ms = HOUR_MS
    for _ in range(200):
        backend.prepare()
        fill(backend, 5_000, 1)
    assert len(backend._index) < 100
    lists, maps = backend.lists(HOUR_LIST), backend.maps(HOUR_MAP)
    assert isinstance(lists, ExpiringLists)
    assert isinstance(maps, ExpiringMaps)
    assert lists._values._end < 1_000, "of which 200 live"
    assert len(maps._pairs) < 100
    assert len(backend.all_slots()) == 1


@pytest.mark.usefixtures("_small")
def test_texts_that_expired_take_no_room_although_their_keys_have_other_state() -> None:
    other = StateDescriptor("other", StateKind.VALUE, pa.int64())
    backend = MemoryColumnBackend(KEYS, (*ALL, other))
    fill(backend, 0, 1_000)
    slots = backend.slots([pa.array(range(1_000))])
    backend.values(other).put(slots, pa.array(range(1_000)))
    backend.time.now_ms = HOUR_MS
    for _ in range(80):
        backend.prepare()
        fill(backend, 0, 1)
    assert len(backend.all_slots()) == 1_000
    held = [backend.values(HOUR_VALUE)._vector, backend.lists(HOUR_LIST)._values._pool, backend.maps(HOUR_MAP)._values]
    assert max(len(vector._heap) for vector in held) < 100


@pytest.mark.usefixtures("_small")
def test_a_turn_looks_at_a_bounded_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryColumnBackend(KEYS, ALL)
    fill(backend, 0, 1_000)
    backend.prepare()
    looked: list[tuple[int, int]] = []
    drop = ExpiringLists._drop_expired

    def counted(self: Any, slots: Any) -> None:
        looked.append((int(slots[0]), len(slots)))
        drop(self, slots)

    monkeypatch.setattr(ExpiringLists, "_drop_expired", counted)
    for _ in range(62):
        backend.prepare()
    assert looked == [(start, 16) for start in range(0, 992, 16)]


@pytest.mark.usefixtures("_small")
def test_keys_by_row_whose_values_expired_are_forgotten_while_only_another_key_is_used() -> None:
    backend = MemoryRowBackend(KEYS, ALL)
    value, list_, map_ = (backend.cells(descriptor) for descriptor in ALL)
    for key in range(1_000):
        value.put(key, ("v", HOUR_MS))
        list_.put(key, [("v", HOUR_MS)])
        map_.put(key, {1: ("v", HOUR_MS)})
    backend.absorb()
    held: list[int] = []
    for _ in range(300):
        backend.time.now_ms = HOUR_MS
        value.put(5_000, ("v", 2 * HOUR_MS))
        backend.absorb()
        held.append(len(value._base))
    assert max(before - after for before, after in itertools.pairwise(held)) == 16, "a bounded number a turn"
    for cells, living in ((value, 1), (list_, 0), (map_, 0)):
        assert isinstance(cells, ExpiringCells)
        assert list(cells.keys()) == [5_000] * living
        assert len(cells._base) == living
        assert len(cells._to_see) + len(cells._seen) <= 2 * living


@pytest.mark.usefixtures("_small")
def test_the_round_keeps_up_with_keys_that_are_used_once() -> None:
    rows, by_column = MemoryRowBackend(KEYS, (HOUR_VALUE,)), MemoryColumnBackend(KEYS, ALL)
    cells = rows.cells(HOUR_VALUE)
    at_most: list[int] = []
    for turn in range(60):
        rows.time.now_ms = by_column.time.now_ms = turn * HOUR_MS // 4
        rows.absorb()
        by_column.prepare()
        for key in range(turn * 100, turn * 100 + 100):
            cells.put(key, ("v", rows.time.now_ms + HOUR_MS))
        fill(by_column, turn * 100, 100)
        at_most.append(max(len(cells._base), len(by_column._index)))
    assert max(at_most) <= 2_000, "400 live at a time"


@pytest.mark.usefixtures("_small")
def test_the_round_keeps_up_with_what_is_added_to_keys() -> None:
    rows, by_column = MemoryRowBackend(KEYS, ALL), MemoryColumnBackend(KEYS, ALL)
    cells = rows.cells(HOUR_LIST)
    lists, maps = by_column.lists(HOUR_LIST), by_column.maps(HOUR_MAP)
    assert isinstance(lists, ExpiringLists)
    assert isinstance(maps, ExpiringMaps)
    held: list[tuple[int, ...]] = []
    for key in range(1_000):
        cells.put(key, [("v", HOUR_MS)])
    for turn in range(100):
        rows.time.now_ms = by_column.time.now_ms = turn * HOUR_MS // 4
        rows.absorb()
        by_column.prepare()
        slots = by_column.slots([pa.array(range(1_000))])
        chosen = np.arange(turn * 300, turn * 300 + 300) % 1_000
        for key in chosen.tolist():
            found, pair = cells.writable(key), ("v", rows.time.now_ms + HOUR_MS)
            if found is None:
                cells.put(key, [pair])
            else:
                found.append(pair)
        texts = pa.array(["v"] * 300, TEXT)
        lists.append(slots[chosen], texts)
        maps.put(slots[chosen], pa.array(range(turn * 300, turn * 300 + 300)), texts)
        held.append((sum(map(len, cells._base.values())), lists._values._used, len(maps._pairs)))
    most = tuple(map(max, zip(*held[-50:], strict=True)))
    assert max(most) <= 6_000, f"{most} where 1,200 live at a time"


@pytest.mark.long
@pytest.mark.parametrize("size", [7, 8, 9, 100])
def test_a_list_that_loses_at_the_beginning_what_it_gains_at_the_end_is_seldom_moved(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    move = vectors.FixedVector.move

    def counted(self: Any, old: Any, new: Any, count: int) -> None:
        moved.append(len(old))
        move(self, old, new, count)

    monkeypatch.setattr(vectors.FixedVector, "move", counted)
    descriptor = StateDescriptor("list", StateKind.LIST, pa.int64(), ttl=TTL(f"{size}ms"))
    backend = MemoryColumnBackend(KEYS, (descriptor,))
    lists, slots = backend.lists(descriptor), backend.slots([pa.array([1])])
    for n in range(2_000):
        backend.time.now_ms = n
        assert lists.counts(slots).tolist() == [min(n, size - 1)]
        lists.append(slots, pa.array([n]))
    assert lists.explode(slots)[1].to_pylist() == list(range(2_000 - size, 2_000))
    assert sum(moved) <= 2 * 2 * 2_000, "of elements and of their expiries, each twice"


def test_a_list_of_any_length_is_bisected() -> None:
    backend = MemoryColumnBackend(KEYS, (HOUR_LIST,))
    slots = backend.slots([pa.array([1, 2, 3])])
    lists = backend.lists(HOUR_LIST)
    for n in range(50):
        backend.time.now_ms = n
        lists.append(slots, pa.array(["a", "b", "c"], TEXT))
    for gone in (0, 1, 7, 31, 49, 50):
        backend.time.now_ms = HOUR_MS + gone - 1
        assert lists.counts(slots).tolist() == [50 - gone] * 3
        rows, elements = lists.explode(np.array([slots[2], slots[0], slots[2]]))
        assert elements.to_pylist() == ["c"] * (50 - gone) + ["a"] * (50 - gone) + ["c"] * (50 - gone)
        assert rows.tolist() == [row for row in range(3) for _ in range(50 - gone)]


def test_what_expired_before_a_restore_is_dropped_by_it() -> None:
    former, backend, by_row = (
        MemoryColumnBackend(KEYS, ALL),
        MemoryColumnBackend(KEYS, ALL),
        MemoryRowBackend(KEYS, ALL),
    )
    fill(former, 0, 1_000)
    payload = b"".join(bytes(memoryview(part)) for part in former.freeze().encode())
    for one in (backend, by_row):
        one.restore(decode_sections(payload, "test"), "test", Ownership(128, 1, 0))
        one.time.now_ms = HOUR_MS
        one.end_restore()
    lists, maps = backend.lists(HOUR_LIST), backend.maps(HOUR_MAP)
    assert isinstance(lists, ExpiringLists)
    assert isinstance(maps, ExpiringMaps)
    assert not backend.values(HOUR_VALUE)._present.read(1_000).any()
    assert (lists._values._used, lists._at._used, maps._live) == (0, 0, 0)
    assert [len(by_row.cells(descriptor)._base) for descriptor in ALL] == [0, 0, 0]


@pytest.mark.usefixtures("_small")
def test_what_was_restored_is_not_looked_at_all_at_once_when_records_come() -> None:
    former, backend, by_row = (
        MemoryColumnBackend(KEYS, ALL),
        MemoryColumnBackend(KEYS, ALL),
        MemoryRowBackend(KEYS, ALL),
    )
    fill(former, 0, 1_000)
    payload = b"".join(bytes(memoryview(part)) for part in former.freeze().encode())
    for one in (backend, by_row):
        one.restore(decode_sections(payload, "test"), "test", Ownership(128, 1, 0))
        one.end_restore()
        one.time.now_ms = HOUR_MS
    by_row.absorb()
    assert [len(by_row.cells(descriptor)._base) for descriptor in ALL] == [984] * 3
    backend._drop_some_that_expired()
    lists, maps = backend.lists(HOUR_LIST), backend.maps(HOUR_MAP)
    assert isinstance(lists, ExpiringLists)
    assert isinstance(maps, ExpiringMaps)
    assert int(backend.values(HOUR_VALUE)._present.read(1_000).sum()) == 984
    assert (int(lists._values.living().sum()), maps._live) == (984, 984)


def test_before_1970_lists_expire_as_well() -> None:
    backend = MemoryColumnBackend(KEYS, (HOUR_LIST,))
    lists, slots = backend.lists(HOUR_LIST), backend.slots([pa.array([1])])
    backend.time.now_ms = -3 * HOUR_MS
    lists.append(slots, pa.array(["a"], TEXT))
    backend.time.now_ms = -2 * HOUR_MS
    assert lists.counts(slots).tolist() == [0]
    assert len(backend.all_slots()) == 0


def test_a_value_by_row_is_gone_from_its_expiry_on() -> None:
    cells = MemoryRowBackend(KEYS, (HOUR_VALUE,)).cells(HOUR_VALUE)
    cells.put(1, ("v", 3))
    assert live_value(cells, 1, 2) == ("v", 3)
    assert live_value(cells, 1, 3) is None
    assert cells.get(1) is None


def test_a_map_by_row_forgets_the_entries_that_expire_first_where_it_is() -> None:
    cells = MemoryRowBackend(KEYS, (HOUR_MAP,)).cells(HOUR_MAP)
    cells.put(1, {n: ("v", n) for n in range(1, 1_000)})
    held = cells.get(1)
    assert live_entries(cells, 1, 3) is held
    assert (next(iter(held)), len(held)) == (4, 996)
    assert live_entries(cells, 1, 999) is None
    assert cells.get(1) is None


VALUE = StateDescriptor("value", StateKind.VALUE, pa.int64())
LIST = StateDescriptor("list", StateKind.LIST, pa.int64())
MAP = StateDescriptor("map", StateKind.MAP, pa.int64(), pa.int64())
NAMES = ("value", "list", "map")

LATE, MANY = 180, 200

each_form = pytest.mark.parametrize("form", ["row", "column"])


class Expiring:
    """A value, a list of one element and a map of one entry for each key: when all three expire."""

    def __init__(self, form: str) -> None:
        self.form, self.ttl_ms, self.now_ms = form, 100, 0

    @property
    def states(self) -> list[StateDescriptor]:
        return [replace(one, ttl=hg.TTL(timedelta(milliseconds=self.ttl_ms))) for one in (VALUE, LIST, MAP)]

    def make(self, worker: Any) -> Any:
        of = worker.of("sum", 0, GROUPS)
        return (of.by_row if self.form == "row" else of.by_column)(KEYS, self.states)

    def nothing(self) -> dict[int, int]:
        return {}

    def counts(self, model: dict[int, int]) -> dict[str, int]:
        return dict.fromkeys(NAMES, len(self.living(model)))

    def living(self, model: dict[int, int]) -> set[int]:
        return {key for key, until_ms in model.items() if until_ms > self.now_ms}

    def process(self, backend: Any, model: dict[int, int], keys: range) -> None:
        """Give keys that have nothing something."""
        backend.time.now_ms = self.now_ms
        until_ms = self.now_ms + self.ttl_ms
        model |= dict.fromkeys(keys, until_ms)
        value, elements, entries = self.states
        if self.form == "row":
            for key in keys:
                backend.cells(value).put(key, (key, until_ms))
                backend.cells(elements).put(key, [(key, until_ms)])
                backend.cells(entries).put(key, {key: (key, until_ms)})
            return
        column = pa.array(np.array(keys), pa.int64())
        slots = backend.slots([column])
        backend.values(value).put(slots, column)
        backend.lists(elements).append(slots, column)
        backend.maps(entries).put(slots, column, column)


def told(form: str, ttl_ms: int = 100, now_ms: int = 90) -> Story:
    """Return a story that goes on with a chunk at ``now_ms``; of the keys in it, most expire at 100, others at 150.

    ``ttl_ms``: from then on.
    """
    story = Story(Expiring(form))
    story.change(range(LATE))
    story.use.now_ms = 50
    story.change(range(LATE, MANY))
    story.checkpoint()
    story.use.now_ms, story.use.ttl_ms = now_ms, ttl_ms
    story.restart()
    assert story.continued == 1
    return story


def found(story: Story, manifest: Any, now_ms: int, parallelism: int = 1) -> dict[str, set[int]]:
    """Return the keys that somebody has who restores a checkpoint later."""
    story.use.now_ms = now_ms
    contents = story.contents(manifest, parallelism)
    return {name: {row["key0"] for row in contents[name]} for name in NAMES}


def each(keys: set[int]) -> dict[str, set[int]]:
    return dict.fromkeys(NAMES, keys)


def paths(manifest: Any) -> set[str]:
    return {part.path for part in chunks_of(manifest)}


@each_form
@small()
def test_state_that_expires_goes_on_with_chunks(form: str) -> None:
    story = told(form)
    (first, _) = story.retained[story.number]
    story.change(range(MANY, MANY + 5))
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    for parallelism in (1, 2):
        assert found(story, manifest, 95, parallelism) == each({*range(MANY + 5)})
        assert found(story, manifest, 140, parallelism) == each({*range(LATE, MANY + 5)})
        assert found(story, manifest, 160, parallelism) == each({*range(MANY, MANY + 5)})


@each_form
@small()
def test_what_a_restore_shortens_is_written_again(form: str) -> None:
    story = told(form, ttl_ms=30)
    (first, _) = story.retained[story.number]
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    story.use.ttl_ms = 100
    assert found(story, manifest, 110) == each({*range(LATE, MANY)})
    assert found(story, manifest, 120) == each(set())


@each_form
@pytest.mark.parametrize("now_ms", [50, 90])
@small()
def test_what_a_restore_does_not_shorten_is_not_written_again(now_ms: int, form: str) -> None:
    story = told(form, now_ms=now_ms)
    (first, _) = story.retained[story.number]
    assert paths(story.checkpoint()) == paths(first)
