"""State of p subtasks goes on in q, on another backend too: each key, window and timer is where it is owned (KG8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP
from tests.state.backends import Parts, states
from tests.state.memory.test_window_backend import ADD_MAX, ROWS, partials, window_of
from tests.state.memory.test_window_backend import KEYS as WINDOW_KEYS

from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import KeyGroups
from headgate.state.backend import Ownership, RowBackend, StateFactory, TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.window_aggregates import partial_batch
from headgate.state.worker_backends import WorkerStates

GROUPS = 16
COUNTS = (1, 2, 3, 5, 8) if IS_DEEP else (1, 3, 8)
KEYS = KeyColumns(("id", "name"), (pa.int64(), pa.large_string()))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.int64())
LIST = StateDescriptor("list", StateKind.LIST, pa.large_string())
MAP = StateDescriptor("map", StateKind.MAP, pa.int64(), pa.large_string())
ALL = [(n, f"n{n % 3}") for n in range(60)]


def owner_of(parallelism: int) -> dict[Any, int]:
    batch = pa.record_batch([[n for n, _ in ALL], pa.array([s for _, s in ALL], pa.large_string())], KEYS.section_names)
    groups = key_groups(hash_columns(batch, KEYS.section_names), GROUPS).tolist()
    return {key: group * parallelism // GROUPS for key, group in zip(ALL, groups, strict=True)}


def backend(worker: WorkerStates, subtask: int) -> RowBackend:
    return worker.of("node", subtask, GROUPS).by_row(KEYS, [VALUE, LIST, MAP], has_timers=True)


def written(worker: WorkerStates, parallelism: int) -> list[Parts]:
    """Return the snapshot of each of ``parallelism`` subtasks, which hold all keys."""
    owners, found = owner_of(parallelism), []
    for subtask in range(parallelism):
        made = backend(worker, subtask)
        assert made.timers is not None
        for key in (key for key in ALL if owners[key] == subtask):
            made.cells(VALUE).put(key, key[0])
            made.cells(LIST).put(key, [f"e{at}" for at in range(key[0] % 4)] or ["none"])
            made.cells(MAP).put(key, {f"k{at}": at for at in range(1 + key[0] % 2)})
            made.timers.of(TimeKind.EVENT_TIME).register(key, key[0])
        target = Parts(parallelism, subtask, GROUPS)
        made.freeze().write_to(target)
        found.append(target)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("former", "later"),
    [("memory", "rocksdb"), ("rocksdb", "memory"), ("rocksdb", "rocksdb-without-cache"), ("memory", "memory")],
)
@pytest.mark.parametrize("p", COUNTS)
def test_state_of_p_subtasks_goes_on_in_q_on_either_backend(former: str, later: str, p: int) -> None:
    with states(former) as formers, states(later) as laters:
        snapshots = written(formers, p)
        for q in COUNTS:
            owners = owner_of(q)
            for subtask in range(q):
                made, owned = backend(laters, subtask), key_groups_of_subtask(subtask, GROUPS, q)
                for groups, part in (one for snapshot in snapshots for one in snapshot.parts):
                    assert groups is not None
                    if groups.overlaps(KeyGroups(owned.start, len(owned))):
                        made.restore(part, "part", Ownership(GROUPS, q, subtask))
                mine = [key for key in ALL if owners[key] == subtask]
                assert sorted(made.all_keys()) == mine
                for n, name in mine:
                    assert made.cells(VALUE).get((n, name)) == n
                    assert made.cells(LIST).get((n, name)) == ([f"e{at}" for at in range(n % 4)] or ["none"])
                    assert made.cells(MAP).get((n, name)) == {f"k{at}": at for at in range(1 + n % 2)}
                assert made.freeze().rows()["value"] == len(mine)
                assert made.timers is not None
                assert len(made.timers.of(TimeKind.EVENT_TIME)) == len(mine)


ROCKS = "rocksdb-without-cache"
BACKENDS = (("memory", "memory"), ("memory", ROCKS), (ROCKS, "memory"))
"""Who wrote and who restores; what RocksDB writes as rows is what memory does."""

COUNT = 40
COLUMNS = KeyColumns(("key",), (pa.int64(),))
Row = tuple[Any, ...]


@cache
def groups_of_keys() -> list[int]:
    batch = pa.record_batch([pa.array(range(COUNT), pa.int64())], ["key"])
    return [int(group) for group in key_groups(hash_columns(batch, ["key"]), GROUPS)]


def owned(subtask: int, parallelism: int) -> list[int]:
    return [key for key, group in enumerate(groups_of_keys()) if group * parallelism // GROUPS == subtask]


class Kept:
    """Windows that keep every record."""

    def __init__(self, factory: StateFactory) -> None:
        self.backend: Any = factory.by_window(WINDOW_KEYS, ROWS)

    def fill(self, keys: list[int]) -> None:
        for key in keys:
            batch = partials((key, key % 3, 1, key, key), (key, 9, 1, key, None))
            self.backend.add(window_of(batch), batch)

    def found(self) -> list[Row]:
        rows = []
        for window in self.backend.windows():
            rows += [tuple(row.values()) for batch in self.backend.take(window) for row in batch.to_pylist()]
        return sorted(rows, key=str)

    @staticmethod
    def wanted(keys: list[int]) -> list[Row]:
        rows = [row for key in keys for row in ((key, key % 3, 1, key, key), (key, 9, 1, key, None))]
        return sorted(rows, key=str)


class Merged(Kept):
    """Windows that merge partial results."""

    def __init__(self, factory: StateFactory) -> None:
        self.backend = factory.merged_by_window(WINDOW_KEYS, ROWS, ADD_MAX)

    def found(self) -> list[Row]:
        rows = []
        for window in self.backend.windows():
            taken = self.backend.take(window)
            batch = partial_batch(ROWS.section.schema, taken.keys, window, taken.table)
            rows += [tuple(row.values()) for row in batch.to_pylist()]
        return sorted(rows, key=str)


class Columns:
    """Values and timers of both kinds, by column."""

    def __init__(self, factory: StateFactory) -> None:
        self.backend: Any = factory.by_column(COLUMNS, [VALUE], has_timers=True)

    def fill(self, keys: list[int]) -> None:
        if keys:
            slots = self.backend.slots([pa.array(keys, pa.int64())])
            self.backend.values(VALUE).put(slots, pa.array(keys, pa.int64()))
            for kind in TimeKind:
                self.backend.timers.of(kind).register(slots, np.array(keys, np.int64) * 10)
            self.backend.prepare()

    def found(self) -> list[Row]:
        slots = self.backend.all_slots()
        keys = self.backend.key_columns(slots)[0].to_pylist()
        rows = [("value", *row) for row in zip(keys, self.backend.values(VALUE).get(slots).to_pylist(), strict=True)]
        for kind in TimeKind:
            while len(fired := self.backend.timers.of(kind).take(1 << 40, 1_000)[0]):
                rows += [(kind.value, key) for key in self.backend.key_columns(fired)[0].to_pylist()]
        return sorted(rows, key=str)

    @staticmethod
    def wanted(keys: list[int]) -> list[Row]:
        rows = [row for key in keys for row in (("value", key, key), *((kind.value, key) for kind in TimeKind))]
        return sorted(rows, key=str)


KINDS: dict[str, Callable[[StateFactory], Any]] = {
    "windows that keep": Kept,
    "windows that merge": Merged,
    "columns and timers": Columns,
}


def written_kind(kind: str, worker: WorkerStates, parallelism: int) -> Iterator[Parts]:
    """Yield the snapshot of each of ``parallelism`` subtasks, which hold all keys."""
    for subtask in range(parallelism):
        made = KINDS[kind](worker.of("node", subtask, GROUPS))
        made.fill(owned(subtask, parallelism))
        target = Parts(parallelism, subtask, GROUPS)
        frozen = made.backend.freeze()
        frozen.write_to(target)
        frozen.release()
        yield target


def restored(kind: str, worker: WorkerStates, snapshots: list[Parts], subtask: int, parallelism: int) -> Any:
    """Return the state of one subtask, which reads the parts that may have keys of its own."""
    mine = key_groups_of_subtask(subtask, GROUPS, parallelism)
    made = KINDS[kind](worker.of("node", subtask, GROUPS))
    for groups, part in (one for snapshot in snapshots for one in snapshot.parts):
        assert groups is not None, "state is cut by key group"
        if groups.overlaps(KeyGroups(mine.start, len(mine))):
            made.backend.restore(part, "part", Ownership(GROUPS, parallelism, subtask))
    return made


@pytest.mark.long
@pytest.mark.parametrize(("former", "later"), BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_of_p_subtasks_goes_on_in_q(kind: str, former: str, later: str) -> None:
    for p in COUNTS:
        with ExitStack() as opened:
            formers, laters = opened.enter_context(states(former)), opened.enter_context(states(later))
            snapshots = list(written_kind(kind, formers, p))
            for q in COUNTS:
                for subtask in range(q):
                    made = restored(kind, laters, snapshots, subtask, q)
                    assert made.found() == KINDS[kind].wanted(owned(subtask, q)), (p, q, subtask)  # type: ignore[attr-defined]
