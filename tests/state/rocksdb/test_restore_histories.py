"""Any history of a database, read in part, says what all of its files say: rows that were removed stay away."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import rocksdict

from headgate.model.manifest import KeyGroups
from headgate.state.rocksdb import database
from headgate.state.rocksdb.database import Changes, Database, SharedMemory, open_read_only
from headgate.state.rocksdb.database_restore import check_files, files_of_key_groups
from headgate.state.rocksdb.database_snapshot import Description
from headgate.state.rocksdb.row_encoding import group_start
from headgate.state.snapshot import OwnedKeys

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
