"""Keyed state in parts: cut by key group, and at another parallelism each reads about its share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.operators.harness import Harness
from tests.runtime.checkpoints.frozen_cases import CASES, Holder, made

from headgate.codec.snapshot import decode_sections
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.operators.base import RestoredState
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state import snapshot
from headgate.state.backend import Ownership
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.snapshot import RANGES_MAX, FrozenState, OwnedKeys, key_group_ranges
from headgate.storage.memory import MemoryStorage

KEYS = KeyColumns(("key",), (pa.int64(),))
COUNT = StateDescriptor("count", StateKind.VALUE, pa.int64())
GROUPS = 128


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 64)


def owned(parallelism: int, index: int) -> KeyGroups:
    found = key_groups_of_subtask(index, GROUPS, parallelism)
    return KeyGroups(found.start, len(found))


def written(storage: MemoryStorage, state: FrozenState, groups: KeyGroups, index: int = 0) -> list[SnapshotPart]:
    to = SnapshotDestination(storage, "p", Generation(1), 0, OwnedKeys(groups, GROUPS))
    target = SubtaskTarget(to, SubtaskId(VertexId("v"), index), CheckpointId(1))
    target.put_state("node", state)
    return list(target.finish())


def test_ranges_cover_what_is_owned_once_and_are_few() -> None:
    for count in (1, 5, 8, 43, 128):
        for size_bytes in (0, 64, 200, 1 << 30):
            ranges = key_group_ranges(KeyGroups(7, count), size_bytes)
            assert 1 <= len(ranges) <= min(RANGES_MAX, count, max(1, size_bytes // 64))
            covered = [group for one in ranges for group in range(one.first, one.first + one.count)]
            assert covered == list(range(7, 7 + count))


KEYED = [name for name in CASES if name.startswith(("reduce", "by-", "window"))]


@pytest.mark.parametrize("name", KEYED)
def test_state_in_parts_is_the_state(name: str) -> None:
    live = made(name)
    assert isinstance(live, Holder)
    frozen, storage = live.freeze(), MemoryStorage("parts")
    parts = written(storage, frozen, KeyGroups(0, GROUPS))
    live.change()
    assert written(storage, frozen, KeyGroups(0, GROUPS)) == parts, "as often as it is asked"
    assert 1 < len(parts) <= RANGES_MAX
    payloads = [read_part(storage, "p", part) for part in reversed(parts)]
    restored = Harness(live.spec, [RestoredState(0, 1, payload) for payload in payloads]).snapshot()
    whole = Harness(live.spec, [RestoredState(0, 1, memoryview(joined(frozen)))]).snapshot()
    assert live.contents(bytes(restored.payload)) == live.contents(bytes(whole.payload))


@pytest.mark.parametrize("name", ["reduce", "by-row-value", "window-merge"])
def test_an_operator_keeps_no_part_that_it_has_restored(name: str) -> None:
    live, storage, alive = made(name), MemoryStorage("parts"), list[weakref.ref[Any]]()
    assert isinstance(live, Holder)

    def read(part: SnapshotPart) -> memoryview:
        data = np.frombuffer(read_part(storage, "p", part), np.uint8).copy()
        assert sum(one() is not None for one in alive) <= 1, "only the one before is still in hand"
        alive.append(weakref.ref(data))
        return memoryview(data)

    parts = written(storage, live.freeze(), KeyGroups(0, GROUPS))
    assert len(parts) > 2
    Harness(live.spec, [RestoredState(0, 1, partial(read, part)) for part in parts])
    assert len(alive) == len(parts)


def joined(frozen: FrozenState) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in frozen.encode())


class Counting(MemoryStorage):
    """Counts the bytes that are read."""

    read_bytes = 0

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        data = super().get_range(path, offset, size_bytes)
        self.read_bytes += len(data)
        return data


def backend(keys: np.ndarray | None = None) -> MemoryColumnBackend:  # type: ignore[type-arg]
    found = MemoryColumnBackend(KEYS, [COUNT])
    if keys is not None:
        column = pa.array(keys)
        found.values(COUNT).put(found.slots([column]), column)
    return found


def test_a_key_that_is_not_owned_is_never_written() -> None:
    with pytest.raises(AssertionError, match="state 'count' has a key that its subtask does not own"):
        written(MemoryStorage("strange"), backend(np.arange(1_000)).freeze(), KeyGroups(0, 64))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (5, 8), (8, 5), (3, 1)])
def test_a_rescaled_worker_reads_about_its_share(before: int, after: int) -> None:
    storage, parts = Counting("rescaled"), list[SnapshotPart]()
    for index in range(before):
        data = memoryview(joined(backend(np.arange(20_000)).freeze()))
        own = backend()
        own.restore(decode_sections(data, "all"), "all", Ownership(GROUPS, before, index))
        parts += written(storage, own.freeze(), owned(before, index), index)
    total = sum(part.size_bytes for part in parts)
    found: list[int] = []
    for index in range(after):
        mine, owner = owned(after, index), Ownership(GROUPS, after, index)
        storage.read_bytes = 0
        restored = backend()
        for part in parts:
            if part.key_groups is not None and part.key_groups.overlaps(mine):
                restored.restore(decode_sections(read_part(storage, "p", part), "part"), "part", owner)
        assert storage.read_bytes / total <= 1 / after + 2 / (RANGES_MAX * before) + 0.01
        (column,) = restored.key_columns(restored.all_slots())
        found += column.to_pylist()
    assert sorted(found) == list(range(20_000)), "every key has one owner"


class Counted(FrozenState):
    forgotten = 0

    def _rows(self) -> Mapping[str, int]:
        return {"state": 3}

    def _encode(self) -> Sequence[bytes]:
        return [b"bytes"]

    def _forget(self) -> None:
        self.forgotten += 1
        if self.forgotten == 1:
            raise OSError("the first try fails")


def test_what_was_frozen_is_released_once_also_when_the_first_try_failed() -> None:
    frozen = Counted()
    assert (frozen.rows(), frozen.encode(), frozen.encode()) == ({"state": 3}, [b"bytes"], [b"bytes"])
    with pytest.raises(OSError, match="the first try fails"):
        frozen.release()
    assert frozen.encode() == [b"bytes"], "nobody has released it yet"
    frozen.release()
    frozen.release()
    assert frozen.forgotten == 2
    for ask in (frozen.rows, frozen.encode):
        with pytest.raises(AssertionError, match="Counted was released: it has nothing to write any more"):
            ask()


def test_buffers_of_batches_are_the_encoded_batches_without_a_copy_of_the_columns() -> None:
    batch = pa.RecordBatch.from_pydict({"key": np.arange(1_000), "text": pa.array(["x"] * 1_000, pa.large_string())})
    (encoded,) = snapshot.encode_batches(batch.schema, [batch, batch.slice(10, 20)])
    buffers = snapshot.batch_buffers(batch.schema, [batch, batch.slice(10, 20)])
    assert b"".join(buffers) == encoded.to_pybytes()
    assert batch.column(0).buffers()[1].address in [part.address for part in buffers if isinstance(part, pa.Buffer)]
