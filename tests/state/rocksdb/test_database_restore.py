"""Of a database only the files are fetched that have wanted rows; what was removed in any history stays away."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, compress
from pathlib import Path

import pyarrow as pa
import pytest
import rocksdict
import xxhash
from rocksdict import Rdict
from tests.conftest import few
from tests.state.rocksdb.increments import GROUPS, IN_MEMORY, Restored, Subtask, files_of, manifest_of

import headgate as hg
from headgate.codec.snapshot import encode_sections
from headgate.errors import CorruptionError
from headgate.model.manifest import KeyGroups, Manifest
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.rocksdb import database, database_restore
from headgate.state.rocksdb.database import Changes, Database, FileRange, SharedMemory, open_read_only
from headgate.state.rocksdb.database_restore import (
    _pieces,
    _varint,
    check_files,
    files_of_key_groups,
    remove_from_manifest,
)
from headgate.state.rocksdb.database_snapshot import Description, decode_description
from headgate.state.rocksdb.row_encoding import group_start
from headgate.state.snapshot import OwnedKeys, is_description
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage

KEYS = 6_000


class CountedStorage(MemoryStorage):
    """Notes which files were read."""

    def __init__(self) -> None:
        super().__init__("needed")
        self.read: list[str] = []

    def get(self, path: str) -> bytes:
        """See ``Storage``."""
        self.read.append(path)
        return super().get(path)

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """See ``Storage``."""
        self.read.append(path)
        return super().get_range(path, offset, size_bytes)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have RocksDB make files of 100 KB and merge them."""
    original = SharedMemory.options

    def options(*arguments: object, **settings: object) -> rocksdict.Options:
        made = original(*arguments, **settings)  # type: ignore[arg-type]
        made.set_target_file_size_base(100_000)
        made.set_max_bytes_for_level_base(400_000)
        return made

    monkeypatch.setattr(SharedMemory, "options", options)


@pytest.fixture
def subtask(tmp_path: Path, small_files: None) -> Iterator[Subtask]:
    made = Subtask(tmp_path / "local", CountedStorage())
    made.claim()
    yield made
    made.worker.close()


def merged(subtask: Subtask) -> Manifest:
    """Return a checkpoint whose files are in the order of their key groups, and one newer file that is of all."""
    subtask.put(range(0, KEYS, 2))
    subtask.checkpoint(1)
    subtask.put(range(1, KEYS, 2))
    subtask.checkpoint(2)
    (place,) = subtask.worker._databases._open  # type: ignore[attr-defined]
    place.database._db.compact_range(None, None)
    subtask.put(range(700, 900), version=1)
    return subtask.checkpoint(3)


def told(subtask: Subtask, manifest: Manifest) -> Description:
    (part,) = [part for part in manifest.entries[0].parts if is_description(part)]
    return decode_description(read_part(subtask.storage, "p", part), "it")


def described_as(manifest: Manifest, description: Description) -> Manifest:
    """Return ``manifest`` with another description of the same files."""
    data = b"".join(map(bytes, description.encode()))
    told = {"inline": data, "path": "", "size_bytes": len(data), "checksum": xxhash.xxh3_64_intdigest(data)}
    parts = manifest.entries[0].parts
    return manifest_of(3, tuple(replace(part, **told) if is_description(part) else part for part in parts))


def files_read(subtask: Subtask) -> set[str]:
    assert isinstance(subtask.storage, CountedStorage)
    return {path for path in subtask.storage.read if ".f" in path}


@pytest.mark.parametrize(("name", "parallelism"), [("memory", 3), ("rocksdb", 2), ("rocksdb", 8)])
def test_a_worker_fetches_only_files_with_its_key_groups(
    subtask: Subtask, tmp_path: Path, name: str, parallelism: int
) -> None:
    manifest = merged(subtask)
    files = len(files_of(manifest.entries[0].parts))
    assert files > 10
    found: dict[int, str] = {}
    fetched = 0
    for worker in range(parallelism):
        assert isinstance(subtask.storage, CountedStorage)
        subtask.storage.read.clear()
        restored = Restored(
            subtask.storage,
            manifest,
            tmp_path / "other",
            worker=worker,
            parallelism=parallelism,
            config=IN_MEMORY if name == "memory" else None,
        )
        fetched += len(files_read(subtask))
        assert not found.keys() & restored.found.keys()
        found |= restored.found
        restored.states.close()
    assert found == subtask.expected
    assert fetched <= files + 3 * parallelism, "each needs the newest file, and shares one at either end of its range"
    assert not list((tmp_path / "other").rglob("*.sst")), "nothing stays"


def owned_group(key: int) -> int:
    """Return the key group of a key."""
    batch = pa.RecordBatch.from_arrays([pa.array([key])], names=["id"])
    return int(key_groups(hash_columns(batch, ["id"]), GROUPS)[0])


def test_who_looks_at_keys_fetches_only_files_with_their_key_groups(
    tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    original = database_restore._write
    monkeypatch.setattr(
        database_restore, "_write", lambda path, data: (fetched.append(path.name), original(path, data))
    )
    subtask = Subtask(tmp_path / "local", open_storage(str(tmp_path / "checkpoints")))
    subtask.claim()
    manifest = merged(subtask)
    places = {key: owned_group(key) for key in range(KEYS)}
    near = [key for key, group in places.items() if 40 <= group < 44]
    frame = hg.read_state(tmp_path / "checkpoints" / "p", "sum", "value", keys=near)
    found = dict(zip(frame["id"].to_list(), frame["value"].to_list(), strict=True))
    assert found == {key: subtask.expected[key] for key in near}
    files = {name for name in fetched if name.endswith(".sst")}
    assert 0 < len(files) <= 4 < len(files_of(manifest.entries[0].parts)) / 2
    subtask.worker.close()


# R57
def test_files_without_a_manifest_are_named_as_ever(subtask: Subtask, tmp_path: Path) -> None:
    manifest = merged(subtask)
    description = told(subtask, manifest)
    small = {name: data for name, data in description.small.items() if not name.startswith("MANIFEST-")}
    with pytest.raises(CorruptionError, match="files that RocksDB can read"):
        Restored(
            subtask.storage,
            described_as(manifest, replace(description, small=small)),
            tmp_path / "other",
            parallelism=2,
        )


# R57
@pytest.mark.parametrize("wrong", ["range", "level"])
def test_files_that_are_not_where_it_says_are_named(subtask: Subtask, tmp_path: Path, wrong: str) -> None:
    changes = {"range": {"last_group": 127, "first_group": 0}, "level": {"level": 5}}[wrong]
    manifest = merged(subtask)
    description = told(subtask, manifest)
    (at, *_) = [at for at, one in enumerate(description.ranges) if one.first_group < one.last_group < 60]
    ranges = list(description.ranges)
    ranges[at] = replace(ranges[at], **changes)
    wrongly = described_as(manifest, replace(description, ranges=ranges))
    with pytest.raises(CorruptionError, match=r"files that RocksDB can read|the files .*level"):
        Restored(subtask.storage, wrongly, tmp_path / "other", worker=1, parallelism=2)


def test_a_description_that_tells_where_some_files_are_is_damage(subtask: Subtask) -> None:
    description = told(subtask, merged(subtask))
    data = memoryview(b"".join(map(bytes, replace(description, ranges=description.ranges[1:]).encode())))
    with pytest.raises(CorruptionError, match="where each of"):
        decode_description(data, "it")


def test_a_file_that_is_not_the_databases_is_in_no_checkpoint(
    subtask: Subtask, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Database.check

    def check(self: Database, path: Path) -> dict[str, FileRange]:
        found = original(self, path)
        (path / "999999.sst").write_bytes(b"of somebody else")
        return found

    monkeypatch.setattr(Database, "check", check)
    subtask.put(range(KEYS))
    with pytest.raises(CorruptionError, match="999999"):
        subtask.checkpoint(1)


@pytest.mark.parametrize("notes_bytes", few([*range(32_730, 32_780), 65_530, 100_000], 8))
def test_rocksdb_reads_what_was_noted_wherever_it_is_in_the_manifest(tmp_path: Path, notes_bytes: int) -> None:
    """A record is in pieces where it would cross the end of a block."""
    with closing(Rdict(str(tmp_path / "db"), _small_options())) as db:
        for key in range(3_000):
            db[key.to_bytes(8, "big")] = random.Random(key).randbytes(100)
        db.flush()
        db.compact_range(None, None)
        names = {file["name"]: file["level"] for file in db.live_files()}
    (manifest,) = (tmp_path / "db").glob("MANIFEST-*")
    removed = sorted(names)[1::2]
    data = manifest.read_bytes()
    files = [(names[name], int(Path(name).stem)) for name in removed]
    manifest.write_bytes(remove_from_manifest(_filled(data, notes_bytes), files))
    for name in removed:
        (tmp_path / "db" / name.lstrip("/")).unlink()
    with closing(
        Rdict(str(tmp_path / "db"), _small_options(), access_type=rocksdict.AccessType.read_only(False))
    ) as db:
        left = {file["name"] for file in db.live_files()}
        rows = list(db.keys())
    assert left == names.keys() - set(removed)
    assert 0 < len(rows) < 3_000


def _small_options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(64 << 10)
    options.set_target_file_size_base(64 << 10)
    return options


def _filled(manifest: bytes, size_bytes: int) -> bytes:
    """Return ``manifest`` with notes that a reader skips, so that it has ``size_bytes``, or one that is possible."""
    while len(manifest) < size_bytes - 2_500:
        manifest += b"".join(_pieces(_skipped(1_000), len(manifest)))
    last = min(range(1_200, 2_600), key=lambda n: abs(len(manifest) + _stored_bytes(n, len(manifest)) - size_bytes))
    return manifest + b"".join(_pieces(_skipped(last), len(manifest)))


def _stored_bytes(length: int, written_bytes: int) -> int:
    return sum(map(len, _pieces(_skipped(length), written_bytes)))


def _skipped(length: int) -> bytes:
    """Return a note of a kind that nobody knows, with the bit that says that it may be skipped."""
    return bytes([*_varint((1 << 13) + 500), *_varint(length)]) + bytes(length)


@pytest.mark.parametrize("wanted", list(combinations(range(6), 2)))
def test_what_is_needed_is_what_overlaps(wanted: tuple[int, int]) -> None:
    """All files with some of five key groups, and all ranges of these that may be wanted."""
    first, end = wanted
    places = list(combinations_with_replacement(range(5), 2))
    names = [f"{number:06}.sst" for number in range(len(places))]
    ranges = [FileRange(1, *place) for place in places]
    small = {"MANIFEST-000004": b"notes"}
    description = Description([], OwnedKeys(KeyGroups(0, 128), 128), names, ranges, small)
    found = files_of_key_groups(description, KeyGroups(first, end - first))
    has_some = [bool({*range(first, end)} & {*range(start, last + 1)}) for start, last in places]
    assert list(found.names) == list(compress(names, has_some))
    assert found.is_whole == all(has_some)


def test_a_description_of_another_version_is_refused() -> None:
    data = b"".join(map(bytes, encode_sections({"what": [b'{"version": 2}']})))
    with pytest.raises(CorruptionError, match=r"files of a database, version 1.*version 2"):
        decode_description(memoryview(data), "it")


CHECKPOINTS = 6
_BESIDE = (".sst", ".log", "LOG", "LOCK", "IDENTITY")


@pytest.fixture
def tiny_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have RocksDB merge files of a few KiB on several levels, and begin its MANIFEST anew now and then."""
    monkeypatch.setattr(database, "MANIFEST_BYTES_MAX", 2_000)
    original = SharedMemory.options

    def options(*arguments: object, **settings: object) -> rocksdict.Options:
        made = original(*arguments, **settings)  # type: ignore[arg-type]
        made.set_target_file_size_base(10_000)
        made.set_max_bytes_for_level_base(20_000)
        made.set_max_bytes_for_level_multiplier(3.0)
        made.set_level_zero_file_num_compaction_trigger(2)
        return made

    monkeypatch.setattr(SharedMemory, "options", options)


class History:
    """A database whose rows come and go, and the dict that it should be."""

    def __init__(self, root: Path, seed: int, groups: int) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.root = root
        self.database = Database(root / "db", SharedMemory(64 << 20))
        self.rows: dict[bytes, bytes] = {}

    def change(self) -> None:
        """Set some rows of near and of any key groups, the first and the last one too, or remove some."""
        changes, drawn = Changes(), self.random
        if self.rows and drawn.random() < 0.4:
            gone = drawn.sample(sorted(self.rows), len(self.rows) // 3)
            changes.delete(gone)
            for row in gone:
                del self.rows[row]
        else:
            first = drawn.randrange(self.groups)
            near = [min(self.groups - 1, first + drawn.randrange(20)) for _ in range(90)]
            groups = [0, self.groups - 1, *near, *(drawn.randrange(self.groups) for _ in range(30))]
            rows = [group_start(group) + drawn.randrange(300).to_bytes(10, "big") for group in groups]
            values = [drawn.randbytes(80) for _ in rows]
            changes.put(rows, values)
            self.rows |= dict(zip(rows, values, strict=True))
        self.database.write(changes)

    def checkpoint(self, number: int) -> tuple[Path, Description]:
        path = self.root / f"checkpoint-{number}"
        self.database.checkpoint(path)
        files = self.database.check(path)
        small = {one.name: one.read_bytes() for one in path.iterdir() if not one.name.endswith(_BESIDE)}
        small = {name: data for name, data in small.items() if not name.startswith("OPTIONS-")}
        keys = OwnedKeys(KeyGroups(0, self.groups), self.groups)
        return path, Description([], keys, list(files), list(files.values()), small)

    def wanted(self) -> Iterator[KeyGroups]:
        """Yield the first key group, the last one, and any range."""
        yield KeyGroups(0, 1)
        yield KeyGroups(self.groups - 1, 1)
        first = self.random.randrange(self.groups)
        yield KeyGroups(first, self.random.randrange(1, self.groups - first + 1))


def put_there(directory: Path, checkpoint: Path, description: Description) -> None:
    directory.mkdir()
    for name in description.names:
        os.link(checkpoint / name, directory / name)
    for name, data in description.small.items():
        (directory / name).write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "groups"), [(1, 128), (2, 32_768)])
def test_any_history_that_is_read_in_part_is_what_all_files_say(
    tmp_path: Path, tiny_files: None, seed: int, groups: int
) -> None:
    history, manifests, levels, left_out = History(tmp_path, seed, groups), set(), set(), 0
    for number in range(CHECKPOINTS):
        for _ in range(4):
            history.database._db.flush()
            history.change()
        if number == 1:
            history.database._db.compact_range(None, None)
            history.change()
        checkpoint, description = history.checkpoint(number)
        manifests |= {name for name in description.small if name.startswith("MANIFEST-")}
        levels |= {found.level for found in description.ranges}
        for wanted in history.wanted():
            part = files_of_key_groups(description, wanted)
            left_out += len(description.names) - len(part.names)
            start, end = group_start(wanted.first), group_start(wanted.first + wanted.count)
            put_there(tmp_path / "part", checkpoint, part)
            with closing(open_read_only(tmp_path / "part", SharedMemory(32 << 20))) as rows:
                check_files(rows, part, "it")
                found = {row: value for some in rows.scan(start, end) for row, value in zip(*some, strict=True)}
            assert found == {row: value for row, value in history.rows.items() if start <= row < end}
            shutil.rmtree(tmp_path / "part")
        if number % 3 == 2:  # as a restore does
            put_there(tmp_path / "restored", checkpoint, description)
            history.database.continue_from(tmp_path / "restored")
    history.database.close()
    assert left_out > 20
    assert len(levels) > 1
    assert len(manifests) > CHECKPOINTS // 3 + 1, "not only a restore began one anew"
