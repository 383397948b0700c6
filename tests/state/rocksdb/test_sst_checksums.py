"""What a local disk spoils goes into no checkpoint: every byte of a new file is looked at before it is written."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.state.rocksdb.increments import Restored, Subtask, files_of, written_by

from headgate.codec.snapshot import FILES_PREFIX
from headgate.state.rocksdb import database as database_module
from headgate.state.rocksdb import database_snapshot, sst_checksums
from headgate.state.rocksdb.database import Changes
from headgate.state.rocksdb.row_backend import RocksRowBackend
from headgate.state.rocksdb.sst_checksums import check_blocks
from headgate.state.snapshot import LocalDamage

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
