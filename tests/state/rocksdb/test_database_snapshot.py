"""Checkpoints of RocksDB that write only new files, what is restored of them, and what a machine still has of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.state.rocksdb.increments import (
    GROUPS,
    IN_MEMORY,
    Restored,
    Subtask,
    files_of,
    manifest_of,
    owned,
    text,
    written_by,
)

import headgate as hg
from headgate.codec.snapshot import FILES_PREFIX, STATE_PREFIX
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import SnapshotPart
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.state.rocksdb import database as rocks_memory
from headgate.state.rocksdb import database_restore
from headgate.state.rocksdb import database_snapshot as rocks_increments
from headgate.state.rocksdb.database import Changes, Database, SharedMemory, Use
from headgate.state.rocksdb.database_snapshot import FrozenDatabase, decode_description
from headgate.state.rocksdb.tables import Table
from headgate.state.snapshot import LocalDamage, is_description
from headgate.storage.urls import open_storage

KEYS = 4_000


@pytest.fixture
def subtask(tmp_path: Path) -> Iterator[Subtask]:
    made = Subtask(tmp_path / "local")
    made.claim()
    yield made
    made.worker.close()


def paths(parts: tuple[SnapshotPart, ...]) -> set[str]:
    return {part.path for part in files_of(parts)}


# SF15
def test_a_checkpoint_writes_only_the_files_that_no_earlier_one_has(subtask: Subtask, tmp_path: Path) -> None:
    subtask.put(range(KEYS))
    first = subtask.checkpoint(1).entries[0].parts
    assert sum(part.size_bytes for part in files_of(first)) > rocks_increments.SIZE_BYTES_MIN
    subtask.put(range(60), version=1)
    manifest = subtask.checkpoint(2)
    second = manifest.entries[0].parts
    assert paths(first) < paths(second), "the old files are referred to"
    new = sum(part.size_bytes for part in written_by(second, 2))
    assert 0 < new < sum(part.size_bytes for part in files_of(second)) / 20
    assert subtask.log.files.verify(manifest) == []
    restored = Restored(subtask.storage, manifest, tmp_path / "other")
    assert restored.continued
    assert restored.found == subtask.expected
    restored.states.close()


def test_what_describes_a_database_does_not_grow_with_its_age(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks_memory, "MANIFEST_BYTES_MAX", 2_000)
    young = Subtask(tmp_path / "young", subtask.storage)
    young.claim()
    young.put(range(KEYS))
    sizes = []
    for number in range(1, 31):
        young.put([number], version=number)
        manifest = young.checkpoint(number)
        (described,) = [
            one for one in manifest.entries[0].parts if is_description(one) and one.section == f"{FILES_PREFIX}sum"
        ]
        sizes.append(described.size_bytes)
    assert max(sizes) < sizes[0] + 2_500, "each checkpoint adds about 200 bytes"
    restored = Restored(subtask.storage, manifest, tmp_path / "other")
    assert restored.continued
    assert restored.found == young.expected
    for one in (young.worker, restored.states):
        one.close()


def test_options_are_in_no_checkpoint(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    parts = subtask.checkpoint(1).entries[0].parts
    (described,) = [one for one in parts if is_description(one) and one.section == f"{FILES_PREFIX}sum"]
    assert described.inline is not None
    found = decode_description(memoryview(described.inline), "here").small
    assert sorted(name.partition("-")[0] for name in found) == ["CURRENT", "MANIFEST", "rocksdict"]
    assert described.size_bytes < 4_000


def test_a_file_of_any_size_but_its_own_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    """Of so many files only some are opened."""
    made = Database(tmp_path / "db", SharedMemory(8 << 20), Use.LOOKED_UP)
    for number in range(14):
        changes = Changes()
        changes.put([number.to_bytes(8, "big")], [b"value"])
        made.write(changes)
        made.checkpoint(tmp_path / f"{number}")
    path = tmp_path / "13"
    made.check(path)
    files = sorted(path.glob("*.sst"))
    assert len(files) == 14
    for file in files:
        data = file.read_bytes()
        for other in (data[:-1], data + b"x", None):
            file.unlink()
            if other is not None:
                file.write_bytes(other)
            with pytest.raises(LocalDamage, match=file.name):
                made.check(path)
            file.write_bytes(data)
    made.check(path)
    made.close()


def test_little_state_is_written_as_rows(subtask: Subtask) -> None:
    subtask.put(range(100))
    assert {part.section for part in subtask.write(1)} == {f"{STATE_PREFIX}sum"}


def test_a_database_that_cannot_be_told_what_it_is_is_written_as_rows(
    subtask: Subtask, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Expiring(Table):
        """As a table that is more than a description says."""

    original = FrozenDatabase.__init__

    def init(self: Any, place: Any, path: Any, tables: Any, *others: Any) -> None:
        made = [Expiring(**{field.name: getattr(table, field.name) for field in fields(table)}) for table in tables]
        original(self, place, path, made, *others)

    subtask.put(range(KEYS))
    monkeypatch.setattr(FrozenDatabase, "__init__", init)
    assert {part.section for part in subtask.write(1)} == {f"{STATE_PREFIX}sum"}


# SV3
def test_a_savepoint_has_no_files_of_a_database(subtask: Subtask, tmp_path: Path) -> None:
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    parts = subtask.write(2, is_portable=True)
    assert {part.section for part in parts} == {f"{STATE_PREFIX}sum"}
    restored = Restored(subtask.storage, manifest_of(2, parts), tmp_path / "other")
    assert not restored.continued
    assert restored.found == subtask.expected
    restored.states.close()


# SF15
def test_files_of_a_checkpoint_that_may_never_complete_are_written_again(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    subtask.put(range(60), version=1)
    aborted = subtask.write(2)
    subtask.log.files.delete(aborted)
    subtask.put(range(60, 120), version=1)
    manifest = subtask.checkpoint(3)
    assert not paths(manifest.entries[0].parts) & {part.path for part in written_by(aborted, 2)}
    assert subtask.log.files.verify(manifest) == []


# SF15
def test_a_file_that_the_newest_completed_checkpoint_may_not_have_is_not_shared(subtask: Subtask) -> None:
    """Checkpoint 2 is written before anybody hears of 1, 3 afterwards; 2 completes, and 1 is dropped."""
    subtask.put(range(KEYS))
    first = subtask.write(1)
    second = subtask.write(2)
    assert not paths(first) & paths(second), "nothing is completed"
    subtask.complete(1, first)
    third = subtask.write(3)
    subtask.complete(2, second, is_heard=False)
    subtask.log.drop(CheckpointId(1), CheckpointId(2))
    manifest = subtask.complete(3, third)
    assert subtask.log.files.verify(manifest) == []


# SF15
def test_lost_notifications_lose_no_file(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    subtask.complete(1, subtask.write(1))
    for number in range(2, 6):
        subtask.put(range(number * 40, number * 40 + 40), version=number)
        manifest = subtask.complete(number, subtask.write(number), is_heard=False)
        subtask.log.drop(CheckpointId(number - 1), CheckpointId(number))
        assert subtask.log.files.verify(manifest) == []


# SF4 SF15
def test_a_shared_file_goes_when_the_last_checkpoint_goes_that_has_it(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    seen: set[str] = set()
    for number in range(1, 13):
        subtask.put(range((number * 700) % KEYS, (number * 700) % KEYS + 700), version=number)
        manifest = subtask.checkpoint(number)
        if number > 1:
            subtask.log.drop(CheckpointId(number - 1), CheckpointId(number))
        assert subtask.log.files.verify(manifest) == []
        there = {path.removeprefix("p/") for path in subtask.storage.list("p") if "/chk-" in path}
        assert there == manifest.files, "nothing else stays"
        seen |= there
    assert len(seen) > len(there) > 1, "files were compacted, and went"


# SF15
def test_a_database_that_was_filled_with_rows_shares_nothing_of_another(subtask: Subtask, tmp_path: Path) -> None:
    """Its files have the same names."""
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    other = Subtask(tmp_path / "other", subtask.storage)
    other.claim()
    other.shared = type(other.shared)(files_of(manifest.entries[0].parts))
    other.put(range(KEYS), version=5)
    names = {part.name for part in files_of(manifest.entries[0].parts)}
    parts = other.write(2)
    assert names & {part.name for part in files_of(parts)}
    assert not paths(parts) & manifest.files
    other.worker.close()


# SF15
def test_what_goes_on_with_files_shares_them(subtask: Subtask, tmp_path: Path) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    restored = Restored(subtask.storage, manifest, tmp_path / "other")
    heir = Subtask(tmp_path / "unused", subtask.storage)
    heir.claim()
    heir.backend, heir.expected = restored.backend, subtask.expected
    heir.shared = type(heir.shared)(files_of(manifest.entries[0].parts))
    heir.put(range(60), version=1)
    later = heir.checkpoint(2)
    assert paths(manifest.entries[0].parts) < paths(later.entries[0].parts)
    again = Restored(subtask.storage, later, tmp_path / "third")
    assert again.found == heir.expected
    for one in (restored.states, again.states, heir.worker):
        one.close()


@pytest.mark.parametrize(("name", "parallelism"), [("memory", 1), ("memory", 2), ("rocksdb", 1), ("rocksdb", 3)])
def test_files_are_restored_at_any_parallelism_in_any_backend(
    subtask: Subtask, tmp_path: Path, name: str, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_restore, "PART_BYTES", 100_000)
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    subtask.put(range(500, 900), version=1)
    manifest = subtask.checkpoint(2)
    found: dict[int, str] = {}
    for worker in range(parallelism):
        config = IN_MEMORY if name == "memory" else None
        restored = Restored(
            subtask.storage, manifest, tmp_path / "other", worker=worker, parallelism=parallelism, config=config
        )
        assert restored.continued == (name == "rocksdb" and parallelism == 1)
        assert not found.keys() & restored.found.keys()
        found |= restored.found
        restored.states.close()
    assert found == subtask.expected
    assert not list((tmp_path / "other").rglob("*.sst")), "nothing stays"
    assert len(owned(0, parallelism)) == -(-GROUPS // parallelism) or parallelism == 3


def test_other_states_take_the_rows(subtask: Subtask, tmp_path: Path) -> None:
    from tests.state.rocksdb import increments

    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(increments, "STATES", [increments.VALUE])
        made = Restored.__new__(Restored)
        patch.setattr(Restored, "found", property(lambda self: None))
        made.__init__(subtask.storage, manifest, tmp_path / "other")  # type: ignore[misc]
    assert not made.continued
    values, keys = made.backend.cells(increments.VALUE), made.backend.all_keys()
    values.fetch(keys)
    assert {key: values.get(key) for key in keys} == subtask.expected
    made.states.close()


def damaged(subtask: Subtask, how: str) -> str:
    """Damage one file of a database in storage; return its path."""
    (path, *_) = sorted(p for p in subtask.storage.list("p") if ".f" in p)
    data = bytes(subtask.storage.get(path))
    if how == "missing":
        subtask.storage.delete(path)
    elif how == "truncated":
        subtask.storage.put(path, [data[:-7]])
    else:
        subtask.storage.put(path, [data[:1_000] + bytes([data[1_000] ^ 1]) + data[1_001:]])
    return path.removeprefix("p/")


# I4
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_damaged_file_is_named_and_nothing_is_half_restored(
    subtask: Subtask, tmp_path: Path, how: str, parallelism: int
) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    path = damaged(subtask, how)
    (damage,) = subtask.log.files.verify(manifest)
    assert path in damage.path
    with pytest.raises(CorruptionError, match=path):
        Restored(subtask.storage, manifest, tmp_path / "other", parallelism=parallelism)
    assert not list((tmp_path / "other").rglob("restored"))


@pytest.mark.parametrize("parallelism", [1, 2])
def test_rows_that_are_missing_are_named(subtask: Subtask, tmp_path: Path, parallelism: int) -> None:
    subtask.put(range(KEYS))
    parts = subtask.checkpoint(1).entries[0].parts
    wrong = tuple(
        part if part.rows is None else replace(part, rows={"sum": {"value": KEYS + 1, "list": 2 * KEYS}})
        for part in parts
    )
    with pytest.raises(CorruptionError, match=f"{KEYS + 1} rows of state 'value'.*{KEYS} rows"):
        Restored(subtask.storage, manifest_of(1, wrong), tmp_path / "other", parallelism=parallelism)


def test_a_description_without_one_of_its_files_is_damage(subtask: Subtask, tmp_path: Path) -> None:
    subtask.put(range(KEYS))
    parts = subtask.checkpoint(1).entries[0].parts
    lost = files_of(parts)[0]
    without = tuple(part for part in parts if part != lost)
    with pytest.raises(CorruptionError, match=f"{lost.name}.*no part with this name"):
        Restored(subtask.storage, manifest_of(1, without), tmp_path / "other")


class Counting:
    """How many files are asked of the storage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, subtask: Subtask) -> None:
        self.paths: list[str] = []
        original = subtask.storage.get_range

        def get_range(path: str, offset: int, size_bytes: int) -> bytes:
            self.paths.append(path)
            return original(path, offset, size_bytes)

        monkeypatch.setattr(subtask.storage, "get_range", get_range)

    @property
    def files(self) -> set[str]:
        return {path for path in self.paths if ".f" in path}


def test_what_a_killed_worker_left_is_used_and_then_goes(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    subtask.put(range(60), version=1)
    manifest = subtask.checkpoint(2)
    left = next(path for path in subtask.root.glob("*/*") if path.is_dir())
    subtask.kill()
    counting = Counting(monkeypatch, subtask)
    restored = Restored(subtask.storage, manifest, subtask.root)
    assert restored.continued
    assert counting.files == set(), "nothing was fetched"
    assert restored.found == subtask.expected
    assert left.exists(), "another worker may need it"
    restored.backend.freeze()
    assert not left.exists()
    assert restored.found == subtask.expected, "its files are its own"
    restored.states.close()


def test_what_a_failed_worker_left_is_used_and_then_goes(subtask: Subtask, monkeypatch: pytest.MonkeyPatch) -> None:
    subtask.put(range(KEYS))
    for number in (1, 2, 3):
        subtask.put(range(60), version=number)
        manifest = subtask.checkpoint(number)
    subtask.put(range(KEYS), version=9)  # is in no checkpoint
    (left,) = (path for path in subtask.root.glob("*/*") if path.is_dir())
    subtask.worker.close(is_left=True)
    assert sorted(path.name for path in left.glob("*/*")) == ["checkpoint-2", "checkpoint-3"], "and no database"
    subtask.expected |= {key: text(key, 3 if key < 60 else 0) for key in range(KEYS)}
    counting = Counting(monkeypatch, subtask)
    restored = Restored(subtask.storage, manifest, subtask.root)
    assert counting.files == set(), "nothing was fetched"
    assert restored.found == subtask.expected
    assert left.exists(), "another worker may need it"
    restored.backend.freeze()
    assert not left.exists()
    restored.states.close()
    assert not list(subtask.root.iterdir())


def test_a_worker_that_fails_before_it_wrote_a_snapshot_leaves_what_others_left(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    subtask.kill()
    (left,) = (path for path in subtask.root.glob("*/*") if path.is_dir())
    restored = Restored(subtask.storage, manifest, subtask.root)
    restored.states.close(is_left=True)
    assert [path for path in subtask.root.glob("*/*") if path.is_dir()] == [left]
    assert list(left.rglob("*.sst"))


def test_what_is_beside_the_directories_of_workers_is_in_nobodys_way(
    subtask: Subtask, monkeypatch: pytest.MonkeyPatch
) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    subtask.kill()
    (parent,) = subtask.root.iterdir()
    (parent / "a.lock").mkdir()  # cannot be opened as a file
    (parent / "b.lock").symlink_to(parent / "b.lock")
    half = parent / "copied" / "0-sum-0" / "db"  # without a lock
    half.mkdir(parents=True)
    for part in files_of(manifest.entries[0].parts):
        (half / part.name).write_bytes(b"")
    restored = Restored(subtask.storage, manifest, subtask.root)
    assert restored.found == subtask.expected
    restored.backend.freeze().release()
    restored.states.close()
    assert sorted(path.name for path in parent.iterdir()) == ["a.lock", "b.lock", "copied"]


def test_files_are_fetched_where_what_is_near_cannot_be_read(subtask: Subtask, monkeypatch: pytest.MonkeyPatch) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    subtask.kill()

    def unreadable(path: Path, pattern: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "glob", unreadable)
    restored = Restored(subtask.storage, manifest, subtask.root)
    monkeypatch.undo()
    assert restored.found == subtask.expected
    restored.states.close()


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_what_is_left_is_ignored_where_it_does_not_fit(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    subtask.put(range(60), version=1)
    manifest = subtask.checkpoint(2)
    subtask.kill()
    name = files_of(manifest.entries[0].parts)[0].name
    found = list(subtask.root.rglob(name))
    assert len(found) >= 2
    data = found[0].read_bytes()
    for path in found:
        path.unlink()
        if how == "truncated":
            path.write_bytes(data[:-1])
        elif how == "flipped":
            path.write_bytes(data[:500] + bytes([data[500] ^ 4]) + data[501:])
    counting = Counting(monkeypatch, subtask)
    restored = Restored(subtask.storage, manifest, subtask.root)
    assert len(counting.files) == 1, "that one was fetched"
    assert restored.found == subtask.expected
    restored.states.close()


def test_only_the_last_snapshots_stay_on_the_disk(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    for number in range(1, 6):
        subtask.put(range(number * 40, number * 40 + 40), version=number)
        subtask.checkpoint(number)
    assert len(list(subtask.root.rglob("checkpoint-*"))) == 2
    subtask.worker.close()
    assert not subtask.root.exists() or not list(subtask.root.rglob("*"))


def test_a_full_disk_while_restoring_is_one_sentence(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)

    def full(path: Path, data: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(database_restore, "_write", full)
        with pytest.raises(StorageError, match=r"cannot write .*restored.*no space is left on this disk; free some"):
            Restored(subtask.storage, manifest, tmp_path / "other")
    restored = Restored(subtask.storage, manifest, tmp_path / "another")
    assert restored.found == subtask.expected, "nothing is lost"
    restored.states.close()


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_local_file_that_is_damaged_is_not_written_to_a_checkpoint(subtask: Subtask, how: str) -> None:
    """What is left without it is enough to be written as files."""
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    subtask.put(range(60), version=1)
    before = subtask.storage.list("p")
    original: Callable[..., Any] = type(subtask.backend).freeze

    def broken(self: Any) -> Any:
        frozen = original(self)
        path = max(frozen._path.glob("*.sst"))
        data = path.read_bytes()
        path.unlink()
        if how == "truncated":
            path.write_bytes(data[:-100])
        return frozen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(subtask.backend), "freeze", broken)
        with pytest.raises(CorruptionError, match=r"checkpoint-2"):
            subtask.write(2)
    assert subtask.storage.list("p") == before


def with_two_checkpoints(root: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> Subtask:
    monkeypatch.setattr(database_restore, "PART_BYTES", 500_000)
    root.mkdir()
    subtask = Subtask(local, open_storage(str(root)))
    subtask.claim()
    subtask.put(range(KEYS))
    subtask.checkpoint(1)
    subtask.put(range(60), version=1)
    subtask.checkpoint(2)
    return subtask


def test_states_in_files_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subtask = with_two_checkpoints(root := tmp_path / "checkpoints", tmp_path / "local", monkeypatch)
    catalog = {row["state"]: row for row in hg.state_catalog(root / "p").to_dicts()}
    assert {name: row["rows"] for name, row in catalog.items()} == {"value": KEYS, "list": 2 * KEYS}
    assert sum(row["size_bytes"] for row in catalog.values()) > rocks_increments.SIZE_BYTES_MIN
    rows = hg.read_state(root / "p", "sum", "value")
    assert dict(rows.rows()) == subtask.expected
    assert len(hg.read_state(root / "p", "sum", "list", keys=[17, 18])) == 4
    file = next(path for path in root.rglob("*.f0"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=file.name):
        hg.read_state(root / "p", "sum", "value")
    subtask.worker.close()


@pytest.mark.parametrize("changed", ["value", None])
def test_a_checkpoint_in_files_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str | None
) -> None:
    subtask = with_two_checkpoints(root := tmp_path / "checkpoints", tmp_path / "local", monkeypatch)
    before = {name: hg.read_state(root / "p", "sum", name) for name in ("value", "list")}
    draft = hg.edit_savepoint(root / "p", tmp_path / "new")
    if changed is not None:
        before[changed] = before[changed].with_columns(value=pl.lit("other"))
        draft.replace("sum", changed, before[changed])
    draft.write()
    for name, rows in before.items():
        found = hg.read_state(tmp_path / "new", "sum", name)
        assert found.sort(found.columns).equals(rows.sort(rows.columns))
    sections = {p.section for e in SavepointDirectory(str(tmp_path / "new")).read().manifest.entries for p in e.parts}
    assert "files/sum" not in sections, "any backend restores it"
    subtask.worker.close()
