"""What a local disk spoils goes into no checkpoint: new files are checked, and an opening finds whose damage it is."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash
from tests.state.rocksdb.increments import Restored, Subtask, files_of, manifest_of, written_by

from headgate.codec.snapshot import FILES_PREFIX, decode_sections, encode_sections
from headgate.model.config import MemoryState, RocksState
from headgate.model.ids import WorkerIndex
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.runtime.worker import deployment
from headgate.state.rocksdb import database, database_restore, database_snapshot, sst_checksums
from headgate.state.rocksdb import database as database_module
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.row_backend import RocksRowBackend
from headgate.state.rocksdb.sst_checksums import check_blocks
from headgate.state.snapshot import LocalDamage, UnsoundFiles, is_description
from headgate.state.worker_backends import local_directory

KEYS = 4_000


@pytest.fixture
def subtask(tmp_path: Path) -> Iterator[Subtask]:
    made = Subtask(tmp_path / "local")
    made.claim()
    yield made
    made.worker.close()


def file_of(subtask: Subtask) -> Path:
    """Return a copy of the largest file of a snapshot."""
    subtask.put(range(KEYS))
    frozen = subtask.backend.freeze()
    path = max(frozen._path.glob("*.sst"), key=lambda path: path.stat().st_size)
    return Path(shutil.copy(path, subtask.root / path.name))


@contextmanager
def a_bit_flips(at: Callable[[int], int]) -> Iterator[None]:
    """In the largest file of each snapshot that is taken; ``at``: where, for its size."""
    original: Callable[..., Any] = RocksRowBackend.freeze

    def freeze(self: Any) -> Any:
        frozen = original(self)
        path = max(frozen._path.glob("*.sst"), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[at(len(data))] ^= 1
        path.unlink()  # it is a link
        path.write_bytes(data)
        return frozen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RocksRowBackend, "freeze", freeze)
        yield


def test_a_sound_file_is_sound_and_any_bit_of_it_counts(subtask: Subtask) -> None:
    path = file_of(subtask)
    data = path.read_bytes()
    check_blocks(data, path)
    rng = random.Random(7)
    spread = [rng.randrange(len(data)) for _ in range(100)]
    near_the_end = [len(data) - 1 - rng.randrange(20_000) for _ in range(50)]
    footer = range(len(data) - 53, len(data))
    for at in (0, *spread, *near_the_end, *footer):
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << rng.randrange(8)
        with pytest.raises(LocalDamage, match=path.name):
            check_blocks(spoiled, path)
    for cut in (b"", data[:40], data[:-1], data[1:], data[:5_000] + data[5_001:], data + b"\0"):
        with pytest.raises(LocalDamage, match=path.name):
            check_blocks(cut, path)


def test_blocks_that_changed_places_are_damage(subtask: Subtask) -> None:
    """Each of them has its checksum."""
    path = file_of(subtask)
    data = path.read_bytes()
    handles, _ = sst_checksums._File(memoryview(data)).blocks()
    by_size: dict[int, int] = {}
    for at, length in handles:
        if length in by_size:
            break
        by_size[length] = at
    else:
        pytest.fail("no two blocks have the same size")
    first, length = by_size[length], length + 5
    swapped = bytearray(data)
    swapped[first : first + length], swapped[at : at + length] = data[at : at + length], data[first : first + length]
    with pytest.raises(LocalDamage, match="a block with checksum"):
        check_blocks(swapped, path)


def test_filters_and_indexes_are_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So whoever looks a row up reads a part of the filter, not all of it; and all parts are checked."""
    monkeypatch.setattr(database_module, "METADATA_BYTES", 512)
    subtask = Subtask(tmp_path / "local")
    subtask.claim()
    path = file_of(subtask)
    subtask.worker.close()
    data = path.read_bytes()
    file = sst_checksums._File(memoryview(data))
    rows, others = file.blocks()
    assert len(rows) > 30
    assert len(others) > 10
    check_blocks(data, path)
    for at, size in others[::4]:
        spoiled = bytearray(data)
        spoiled[at + size // 2] ^= 1
        with pytest.raises(LocalDamage, match=path.name):
            check_blocks(spoiled, path)


@pytest.mark.parametrize("shape", ["little", "compacted", "removed"])
def test_files_of_every_shape_can_be_checked(subtask: Subtask, shape: str) -> None:
    subtask.put(range(40 if shape == "little" else KEYS))
    database = subtask.backend._objects._local.database
    if shape == "removed":
        rows = [row for some, _ in database.scan(b"", None) for row in some]
        changes = Changes()
        changes.delete(rows[::2])
        database.write(changes)
    frozen = subtask.backend.freeze()
    if shape == "compacted":
        subtask.put(range(KEYS), version=2)
        subtask.backend.freeze()
        database._db.compact_range(None, None)
        frozen = subtask.backend.freeze()
    found = list(frozen._path.glob("*.sst"))
    assert found
    for path in found:
        check_blocks(path.read_bytes(), path)


@pytest.mark.parametrize("where", ["data", "tail"])
def test_a_bit_that_flips_before_the_first_upload_is_in_no_checkpoint(subtask: Subtask, where: str) -> None:
    subtask.put(range(KEYS))
    with a_bit_flips(lambda size: size // 3 if where == "data" else size - 1_500):
        said = r"checkpoint-1/\d+.sst is damaged at byte \d+: expected a block" if where == "data" else "checkpoint-1"
        with pytest.raises(LocalDamage, match=said):
            subtask.write(1)
    assert not [path for path in subtask.storage.list("p") if FILES_PREFIX in path or ".f" in path]


# SF15
def test_a_bit_that_flips_before_a_file_is_written_again_is_in_no_checkpoint(subtask: Subtask) -> None:
    subtask.put(range(KEYS))
    subtask.write(1)  # it never completes, so the next one writes all files again
    with a_bit_flips(lambda size: size // 3), pytest.raises(LocalDamage, match=r"checkpoint-2/.* with checksum"):
        subtask.write(2)
    subtask.write(3)


def test_only_what_is_new_is_looked_at(subtask: Subtask, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def check(data: Any, path: Path) -> None:
        looked.append(path.name)

    monkeypatch.setattr(database_snapshot, "check_blocks", check)
    subtask.put(range(KEYS))
    first = subtask.checkpoint(1)
    assert sorted(looked) == sorted(part.name for part in files_of(first.entries[0].parts))
    looked.clear()
    subtask.put(range(60), version=1)
    second = subtask.checkpoint(2)
    assert sorted(looked) == sorted(part.name for part in written_by(second.entries[0].parts, 2))


def test_files_of_another_release_are_known_by_their_checksums(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have another format: a checkpoint has them, so they were sound."""
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "FORMAT_VERSION", 5)
        patch.setattr(database_snapshot, "check_blocks", lambda data, path: None)
        former = Subtask(tmp_path / "former", subtask.storage)
        former.claim()
        former.put(range(KEYS))
        manifest = former.checkpoint(1)
        former.worker.close()
    restored = Restored(subtask.storage, manifest, tmp_path / "other")
    heir = Subtask(tmp_path / "unused", subtask.storage)
    heir.claim()
    heir.backend, heir.expected = restored.backend, former.expected
    heir.put(range(60), version=1)
    later = heir.checkpoint(2)
    assert len(written_by(later.entries[0].parts, 2)) > 1, "nothing was shared"
    again = Restored(subtask.storage, later, tmp_path / "third")
    assert again.found == heir.expected
    for one in (restored.states, again.states, heir.worker):
        one.close()


def test_what_is_read_beside_checkpoints_is_local_damage(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path / "local")
    subtask.put(range(KEYS))
    frozen = subtask.backend.freeze()
    path = max(frozen._path.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    for at in range(0, len(data) // 2, 2_000):
        data[at] ^= 1
    path.unlink()
    path.write_bytes(data)
    rows = subtask.backend._objects._local.database.opened(path.parent)
    with pytest.raises(LocalDamage, match="block checksum mismatch"):
        list(rows.scan(b"", None))
    rows.close()
    subtask.worker.close()


def spoiled(data: bytes) -> bytes:
    at = len(data) // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def unsound(subtask: Subtask) -> Manifest:
    """Take a checkpoint with a file that was spoiled before its checksum was taken."""
    subtask.put(range(KEYS))
    original = database_snapshot._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database_snapshot, "check_blocks", lambda data, path: None)
        patch.setattr(
            database_snapshot,
            "_read",
            lambda path: spoiled(original(path)) if path.suffix == ".sst" else original(path),
        )
        manifest = subtask.checkpoint(1)
    assert subtask.log.files.verify(manifest) == []
    return manifest


# R57
@pytest.mark.parametrize("parallelism", [1, 2])
def test_an_unsound_checkpoint_is_named_by_its_own_file(subtask: Subtask, tmp_path: Path, parallelism: int) -> None:
    # R57
    manifest = unsound(subtask)
    (file,) = files_of(manifest.entries[0].parts)
    with pytest.raises(UnsoundFiles, match="block checksum mismatch") as caught:
        Restored(subtask.storage, manifest, tmp_path / "other", parallelism=parallelism)
    assert caught.value.path == f"p/{file.path}"
    assert str(tmp_path) not in str(caught.value)
    assert not list((tmp_path / "other").rglob("*.sst")), "nothing stays"


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("name", ["../escaped", "{root}/escaped", "CURRENT/../../escaped", "escaped"])
def test_a_checkpoint_from_elsewhere_writes_no_file_outside_of_its_own_directory(
    subtask: Subtask, tmp_path: Path, parallelism: int, name: str
) -> None:
    """Its checksums are right: who made it may have written anything."""
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    (entry,) = manifest.entries
    (described,) = (part for part in entry.parts if is_description(part) and part.section.startswith(FILES_PREFIX))
    sections = {one: [data] for one, data in decode_sections(read_part(subtask.storage, "p", described), "it").items()}
    data = b"".join(map(bytes, encode_sections({**sections, f"small/{name.format(root=tmp_path)}": [b"#!/bin/sh"]})))
    forged = replace(
        described, path="", inline=data, offset=0, size_bytes=len(data), checksum=xxhash.xxh3_64_intdigest(data)
    )
    parts = tuple(forged if part is described else part for part in entry.parts)
    with pytest.raises(UnsoundFiles, match=r"expected the bare name of a file, found '.*escaped'"):
        Restored(subtask.storage, manifest_of(1, parts), tmp_path / "other", parallelism=parallelism)
    assert not list(tmp_path.rglob("*escaped*"))


# R57
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_state_that_only_the_manifest_names_is_missed(subtask: Subtask, tmp_path: Path, parallelism: int) -> None:
    subtask.put(range(KEYS))
    parts = subtask.checkpoint(1).entries[0].parts
    rows = {"sum": {"value": KEYS, "list": 2 * KEYS, "gone": 3}}
    wrong = tuple(part if part.rows is None else replace(part, rows=rows) for part in parts)
    with pytest.raises(UnsoundFiles, match="expected 3 rows of state 'gone', found 0 rows"):
        Restored(subtask.storage, manifest_of(1, wrong), tmp_path / "other", parallelism=parallelism)


# R57
def test_what_is_near_and_goes_bad_is_fetched_before_anything_is_judged(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are right when they are looked at, and others when RocksDB reads them."""
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    subtask.kill()
    original = database_restore._is_linked
    linked: list[str] = []

    def goes_bad(path: Path, to: Path, part: Any) -> bool:
        if not original(path, to, part):
            return False
        linked.append(to.name)
        data = to.read_bytes()
        to.unlink()
        to.write_bytes(spoiled(data))
        return True

    monkeypatch.setattr(database_restore, "_is_linked", goes_bad)
    restored = Restored(subtask.storage, manifest, subtask.root)
    assert linked
    assert restored.continued
    assert restored.found == subtask.expected
    restored.states.close()


def torn(data: bytes) -> bytes:
    """Spoil the length of the last record of a MANIFEST, so that it seems to be written by half."""
    at = following = 0
    while following < len(data):
        at, following = following, following + 7 + int.from_bytes(data[following + 4 : following + 6], "little")
    return data[: at + 5] + bytes([data[at + 5] ^ 64]) + data[at + 6 :]


@contextmanager
def a_disk_that_spoils(file: str, spoiled: Callable[[bytes], bytes] = spoiled) -> Iterator[None]:
    original = database_restore._write

    def write(path: Path, data: Any) -> None:
        original(path, spoiled(bytes(data)) if file in path.name else data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database_restore, "_write", write)
        yield


# R57
@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("file", [".sst", "MANIFEST", "CURRENT"])
def test_a_disk_that_spoils_what_is_fetched_says_nothing_of_the_checkpoint(
    subtask: Subtask, tmp_path: Path, parallelism: int, file: str
) -> None:  # R57
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    with a_disk_that_spoils(file), pytest.raises(LocalDamage, match="what the checkpoint has") as caught:
        Restored(subtask.storage, manifest, tmp_path / "other", parallelism=parallelism)
    assert str(tmp_path / "other") in str(caught.value), "it names the disk"
    assert not list((tmp_path / "other").rglob("restored"))
    restored = Restored(subtask.storage, manifest, tmp_path / "another")
    assert restored.found == subtask.expected
    restored.states.close()


# R57
@pytest.mark.parametrize("parallelism", [1, 2])
def test_what_rocksdb_takes_for_a_torn_end_is_damage_of_the_disk(
    subtask: Subtask, tmp_path: Path, parallelism: int
) -> None:  # R57
    """It would ignore the last changes of a database, and say nothing."""
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    with a_disk_that_spoils("MANIFEST", torn), pytest.raises(LocalDamage, match=r"MANIFEST-\d+ is damaged"):
        Restored(subtask.storage, manifest, tmp_path / "other", parallelism=parallelism)


# R57
@pytest.mark.parametrize("parallelism", [1, 2])
def test_what_rocksdict_writes_anew_is_no_damage(subtask: Subtask, tmp_path: Path, parallelism: int) -> None:  # R57
    """Another release of it may write other bytes."""
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    with a_disk_that_spoils("rocksdict-config", lambda data: data + b" "):
        restored = Restored(subtask.storage, manifest, tmp_path / "other", parallelism=parallelism)
    assert restored.found.items() <= subtask.expected.items()
    assert restored.continued is (parallelism == 1)
    restored.states.close()


def bad_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int = 1) -> list[str]:
    """Have the ``at``-th call of what reads say that a file is damaged; return what is called."""
    original = getattr(owner, name)
    calls: list[str] = []

    def read(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == at:
            raise LocalDamage("/disk/db", 0, "a RocksDB database", "Corruption: block checksum mismatch")
        return original(*arguments)

    patch.setattr(owner, name, read)
    return calls


# R57
@pytest.mark.parametrize(
    ("owner", "name", "parallelism"),
    [
        *((database, "open_read_only", parallelism) for parallelism in (1, 2)),
        *((database_restore, "check_rows", parallelism) for parallelism in (1, 2)),
        *((Rows, "scan_rows", parallelism) for parallelism in (1, 2)),
        (Rows, "scan", 2),  # who goes on with files reads no values
    ],
)
def test_one_bad_read_says_nothing_of_the_checkpoint(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: int, owner: Any, name: str
) -> None:  # R57
    """The files are as the checkpoint has them when they are looked at."""
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    if (parallelism, name) == (2, "open_read_only"):
        owner = database_restore
    calls = bad_once(monkeypatch, owner, name)
    restored = Restored(subtask.storage, manifest, tmp_path / "other", parallelism=parallelism)
    assert len(calls) > 1
    assert restored.continued is (parallelism == 1)
    assert restored.found.items() <= subtask.expected.items()
    assert not list((tmp_path / "other").rglob("headgate-reading-*/*"))
    restored.states.close()


# R57
def test_one_bad_read_of_a_later_part_says_nothing_of_the_checkpoint(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subtask.put(range(KEYS))
    manifest = subtask.checkpoint(1)
    monkeypatch.setattr(database_restore, "PART_BYTES", 1 << 18)
    calls = bad_once(monkeypatch, database_restore, "encode_sections_of", at=3)
    restored = Restored(subtask.storage, manifest, tmp_path / "other", parallelism=2)
    assert len(calls) > 3
    assert 0 < len(restored.found) < KEYS
    assert restored.found.items() <= subtask.expected.items()
    restored.states.close()


def test_files_of_a_rescale_are_where_the_state_is_configured_to_be() -> None:
    fast, other = RocksState(1, "/fast"), RocksState(1, "/other")
    assert local_directory("sum", fast, (), "/spill") == "/fast"
    assert local_directory("sum", fast, (("sum", other),), "/spill") == "/other"
    assert local_directory("sum", RocksState(1), (), "/spill") == "/spill"
    assert local_directory("sum", fast, (("sum", MemoryState()),), "/spill") == "/spill"
    assert local_directory("sum", RocksState(1), (), None) is None


def test_a_worker_puts_files_of_a_rescale_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def read(*arguments: Any) -> None:
        asked.append(arguments[-1])

    monkeypatch.setattr(deployment, "read_restored", read)
    config = SimpleNamespace(name="p", state=RocksState(1, "/fast"), operator_states=(("other", MemoryState()),))
    made = deployment.Deployment.__new__(deployment.Deployment)
    made._definition = cast(Any, SimpleNamespace(plan=SimpleNamespace(vertices=()), config=config))
    made._message = cast(Any, SimpleNamespace(place="", restored=[]))
    made._storage, made._worker, made._local_directory = cast(Any, None), WorkerIndex(0), "/spill"
    assert made.runners() == []
    (directory,) = asked
    assert (directory("sum"), directory("other")) == ("/fast", "/spill")
