"""State of p subtasks goes on in q, on another backend too: each key is where it is owned, once (KG8)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.state.backends import Parts, states

from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import KeyGroups
from headgate.state.backend import Ownership, RowBackend, TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.worker_backends import WorkerStates

GROUPS = 16
COUNTS = (1, 2, 3, 5, 8)
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
