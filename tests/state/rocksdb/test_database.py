"""A database and its files: who may read them, what remains of them, and what is said when they are damaged."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import rocksdict
from tests.state.backends import GROUPS, OWNER, Parts, payload_of, rows_in, sections_of

from headgate.errors import CorruptionError, StorageError
from headgate.model.config import RocksState
from headgate.model.manifest import KeyGroups
from headgate.state.backend import RowBackend
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.rocksdb import database as database_module
from headgate.state.rocksdb import database as rocks_database
from headgate.state.rocksdb import database_restore
from headgate.state.rocksdb import database_snapshot as rocks_frozen
from headgate.state.rocksdb.database import Changes, Database, Rows, SharedMemory, Use
from headgate.state.rocksdb.database_restore import PortableRows
from headgate.state.worker_backends import WorkerStates, worker_states

KEYS = KeyColumns(("id",), (pa.int64(),))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.large_string())
LIST = StateDescriptor("list", StateKind.LIST, pa.int64())


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    made = worker_states(RocksState(16 << 20, str(tmp_path)), None)
    yield made
    made.close()


def filled(worker: WorkerStates, keys: int = 3_000) -> RowBackend:
    backend = worker.of("node", 0, GROUPS).by_row(KEYS, [VALUE])
    for key in range(keys):
        backend.cells(VALUE).put(key, f"value {key} {hash(str(key))}")
    return backend


def the_checkpoint(root: Path) -> Path:
    (found,) = root.rglob("checkpoint-*")
    return found


def test_only_this_user_may_look_into_the_directory_and_two_workers_have_two(
    worker: WorkerStates, tmp_path: Path
) -> None:
    filled(worker, 1)
    other = worker_states(RocksState(16 << 20, str(tmp_path)), None)
    filled(other, 1)
    (parent,) = tmp_path.iterdir()
    assert parent.name == f"headgate-state-{os.getuid()}"
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    assert len([path for path in parent.iterdir() if path.is_dir()]) == 2
    other.close()
    other.close()
    assert len([path for path in parent.iterdir() if path.is_dir()]) == 1
    worker.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_worker_left_is_removed_by_the_next_one(worker: WorkerStates, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from headgate.state.rocksdb.local_databases import LocalDatabases; "
        "LocalDatabases(16 << 20, sys.argv[1]).new_database('left'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.rglob("*left*")
    backend = filled(worker, 1)
    assert left.exists(), "somebody who restores may need it"
    backend.freeze()
    assert not left.exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = worker_states(RocksState(16 << 20, str(tmp_path / "file")), None)
    said = r"cannot open .*/file/headgate-state-.*: Not a directory; give headgate.RocksDB\(dir=\) a directory that"
    with pytest.raises(StorageError, match=said):
        filled(made, 1)
    made.close()


def test_a_directory_that_somebody_removes_is_named(tmp_path: Path) -> None:
    made = worker_states(RocksState(16 << 20, str(tmp_path)), None)
    filled(made, 1)
    shutil.rmtree(tmp_path / f"headgate-state-{os.getuid()}")
    with pytest.raises(StorageError, match=r"cannot open .*: No such file or directory; give headgate.RocksDB\(dir=\)"):
        filled(made, 1)
    made.close()


def test_a_directory_that_somebody_removes_while_files_are_fetched_is_named(tmp_path: Path) -> None:
    database = Database(tmp_path / "db", SharedMemory(16 << 20))
    shutil.rmtree(tmp_path / "db")
    with pytest.raises(StorageError, match=r"cannot write .*/db: No such file or directory"):
        database.continue_from(tmp_path / "restored")


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("kind", ["state", "reading"])
def test_a_directory_that_another_user_has_made_takes_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_link: bool
) -> None:
    (tmp_path / "mine").mkdir()
    theirs = tmp_path / f"headgate-{kind}-{os.getuid()}"
    theirs.symlink_to(tmp_path / "mine") if is_link else theirs.mkdir()
    another, lstat = os.geteuid() + 1, os.lstat

    def of_another(path: Any, **options: Any) -> Any:
        return SimpleNamespace(st_uid=another) if path == theirs else lstat(path, **options)

    if is_link:  # what it leads to is ours, the link is not
        monkeypatch.setattr(os, "lstat", of_another)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: another)
    monkeypatch.setattr(database_restore, "read_description", lambda stored: None)
    states = worker_states(RocksState(16 << 20, str(tmp_path)), None)
    stored: Any = SimpleNamespace(size_bytes=1)
    unread = PortableRows(stored, theirs, KeyGroups(0, GROUPS))
    with pytest.raises(StorageError, match=r"belongs to user \d+, who could read and change"):
        _ = filled(states, 1) if kind == "state" else unread._open()
    assert [*theirs.iterdir()] == []


def test_there_is_no_write_ahead_log(worker: WorkerStates, tmp_path: Path) -> None:
    filled(worker).freeze()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.log")) == 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.sst")) > 0


def test_a_frozen_state_is_links_and_goes_when_it_is_released_or_forgotten(
    worker: WorkerStates, tmp_path: Path
) -> None:
    backend = filled(worker)
    frozen = backend.freeze()
    links = [path.stat().st_nlink for path in the_checkpoint(tmp_path).glob("*.sst")]
    assert set(links) == {2}
    frozen.release()
    assert not list(tmp_path.rglob("checkpoint-*"))
    dropped = backend.freeze()
    del dropped
    assert not list(tmp_path.rglob("checkpoint-*"))


def flip(file: Path, data: bytes) -> None:
    changed = bytearray(data)
    changed[len(data) // 3] ^= 1
    file.write_bytes(changed)


DAMAGES: dict[str, Callable[[Path, bytes], Any]] = {
    "flipped": flip,
    "truncated": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "missing": lambda file, data: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_frozen_state_is_named_and_nothing_is_left_out(
    worker: WorkerStates, tmp_path: Path, damage: str
) -> None:
    frozen = filled(worker).freeze()
    (file,) = the_checkpoint(tmp_path).glob("*.sst")
    data = file.read_bytes()
    file.unlink()  # it is a link: the database keeps its own
    DAMAGES[damage](file, data)
    with pytest.raises(CorruptionError, match="checkpoint-1 is damaged") as told:
        payload_of(frozen)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_under_a_running_database_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "db"
    database = Database(path, SharedMemory(16 << 20))
    rows = [number.to_bytes(8, "big") for number in range(5_000)]
    changes = Changes()
    changes.put(rows, [f"value {hash(row)}".encode() for row in rows])
    database.write(changes)
    database.checkpoint(tmp_path / "copy")
    database.close()
    (file,) = path.glob("*.sst")
    data = file.read_bytes()
    file.unlink()
    DAMAGES[damage](file, data)
    reads: list[Callable[[Rows], Any]] = [
        lambda found: found.get(rows),
        lambda found: list(found.scan(b"", None)),
        lambda found: list(found.scan_rows(b"", None)),
        lambda found: list(found.of_keys(rows, [1] * len(rows))),
    ]
    for read in reads:
        with pytest.raises(CorruptionError, match=f"{path} is damaged"):
            read(database.opened(path))


def test_rows_of_a_key_that_are_missing_are_named(tmp_path: Path) -> None:
    database = Database(tmp_path / "db", SharedMemory(16 << 20))
    changes = Changes()
    changes.put([b"a1", b"a2", b"b1"], [b"", b"", b""])
    database.write(changes)
    assert [row for row, _ in database.of_keys([b"a", b"b"], [2, 1])] == [b"a1", b"a2", b"b1"]
    for counts in ([3, 1], [2, 2]):
        with pytest.raises(CorruptionError, match="rows of a key"):
            list(database.of_keys([b"a", b"b"], counts))
    database.close()


def test_a_full_disk_is_one_sentence_and_what_was_frozen_before_stays(
    worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RocksDB said it on a disk of 3 MB."""
    backend = filled(worker, 100)
    before = backend.freeze()

    def full(*_: object) -> None:
        raise Exception(
            "IO error: No space left on device: While appending to file: 000016.sst: No space left on device"
        )

    backend.cells(VALUE).put(1, "more")
    monkeypatch.setattr(Database, "_written", full)
    with pytest.raises(
        StorageError, match=r"no space is left on this disk; free some, or give headgate.RocksDB\(dir=\)"
    ):
        backend.freeze()
    assert len(rows_in(sections_of(before))["value"]) == 100


def test_a_closed_database_is_told_and_closing_never_fails(worker: WorkerStates, tmp_path: Path) -> None:
    backend = filled(worker, 10)
    frozen = backend.freeze()
    backend.cells(VALUE).put(1, "more")
    worker.close()
    with pytest.raises(StorageError, match="the database is closed already"):
        backend.freeze()
    with pytest.raises((StorageError, CorruptionError)):
        payload_of(frozen)
    assert list(tmp_path.iterdir()) == []


def test_many_databases_of_a_process_leave_it_files_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = ([database_module.open_files(count, limit) for count in range(1, 17)] for limit in (1_024, 100_000))
    assert few[0] == 128
    assert sum(few) < 640, "the others are for everybody else"
    assert set(many) == {128}
    asked = []

    def open_files(databases_count: int, limit: int) -> int:
        asked.append(databases_count)
        return 64

    monkeypatch.setattr(database_module, "open_files", open_files)
    shared = SharedMemory(16 << 20)
    for _ in range(3):
        shared.joined(Use.SEARCHED)
        shared.options()
    assert asked == [1, 2, 3]


def test_all_databases_of_a_worker_share_its_memory() -> None:
    memory = SharedMemory(64 << 20)
    memory.joined(Use.SEARCHED)
    assert memory.cache_bytes == 32 << 20
    for _ in range(3):
        memory.joined(Use.NUMBERS)
    assert memory.cache_bytes == 8 << 20


def test_of_numbers_alone_rocksdb_keeps_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(
        rocksdict.Cache, "set_capacity", lambda self, size_bytes: given.append(size_bytes), raising=False
    )
    memory = SharedMemory(64 << 20)
    for count in (1, 2):
        memory.joined(Use.NUMBERS)
        assert memory.cache_bytes == (48 << 20) // count
    assert given == []
    memory.joined(Use.LOOKED_UP)
    assert memory.cache_bytes == (32 << 20) // 3
    memory.joined(Use.SEARCHED)
    assert given == [32 << 20], "told once, and RocksDB has room for blocks again"


def merged_at(path: Path) -> int:
    """Return how many new files of a database are merged with the others, as RocksDB noted it."""
    return int(option(path, "level0_file_num_compaction_trigger"))


def option(path: Path, name: str) -> str:
    """Return an option of a database, as RocksDB noted it."""
    options = max(path.glob("OPTIONS-*"), key=lambda file: int(file.name.split("-")[1])).read_text()
    (found,) = re.findall(rf"^\s*{name}=(.*)$", options, re.MULTILINE)
    return str(found)


def test_files_of_what_is_only_looked_up_wait_longer_to_be_merged(worker: WorkerStates, tmp_path: Path) -> None:
    states = worker.of("node", 0, GROUPS)
    states.by_column(KEYS, [VALUE])
    states.by_row(KEYS, [VALUE])
    states.by_row(
        KEYS, [StateDescriptor("sums", StateKind.VALUE, pa.struct([("id", pa.int64()), ("sum", pa.int64())]))]
    )
    for make in (states.by_column, states.by_row):
        make(KEYS, [VALUE, LIST])
        make(KEYS, [VALUE], has_timers=True)
    room = worker._databases  # type: ignore[attr-defined]
    assert [merged_at(place.database.path) for place in room._open] == [16] * 2 + [8] + [4] * 4
    looked_up = room._open[0].database
    looked_up.checkpoint(tmp_path / "copy")
    for options in (tmp_path / "copy").glob("OPTIONS-*"):
        options.unlink()  # as of every checkpoint
    looked_up.continue_from(tmp_path / "copy")
    assert merged_at(looked_up.path) == 16, "also when it goes on with the files of a checkpoint"


def test_rows_of_numbers_are_neither_packed_nor_copied_to_be_read(worker: WorkerStates) -> None:
    states = worker.of("node", 0, GROUPS)
    number, text_key = StateDescriptor("n", StateKind.VALUE, pa.int64()), KeyColumns(("id",), (pa.large_string(),))
    for make in (states.by_column, states.by_row):
        make(KEYS, [number])
        make(KEYS, [VALUE])
        make(text_key, [number])
    room = worker._databases  # type: ignore[attr-defined]
    found = [
        [option(place.database.path, name) for name in ("compression", "allow_mmap_reads")] for place in room._open
    ]
    assert found == [["kNoCompression", "true"], ["kLZ4Compression", "false"], ["kLZ4Compression", "false"]] * 2


SHORTENED = """
import sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from headgate.errors import CorruptionError
from headgate.model.config import RocksState
from headgate.state.worker_backends import worker_states
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind

root = Path(sys.argv[1])
number = StateDescriptor("n", StateKind.VALUE, pa.int64())
worker = worker_states(RocksState(16 << 20, str(root)), None)
state = worker.of("node", 0, 128).by_column(KeyColumns(("id",), (pa.int64(),)), [number])
keys = pa.array(np.arange(200_000))
state.values(number).put(state.slots([keys]), keys)
state.freeze()
state._evict_at = 0
state._local._memory._memory_bytes = 0
state.prepare()
state.slots([keys.slice(0, 10)])
for file in root.rglob("*/db/*.sst"):
    with file.open("r+b") as opened:
        opened.truncate(4_096)
try:
    found = state.values(number).get(state.slots([keys]))
except CorruptionError:
    sys.exit(3)
print("read", found.equals(keys), flush=True)
"""


def test_a_file_of_numbers_that_is_cut_off_meanwhile_ends_the_process_and_gives_no_wrong_value(tmp_path: Path) -> None:
    """What is read where it is ends with the file: the system says so by a signal, as when a worker is killed."""
    command = [sys.executable, "-c", SHORTENED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode in (3, -signal.SIGBUS), ended.stderr
    assert "read" not in ended.stdout


def test_many_parts_hold_each_key_once(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = filled(worker)
    monkeypatch.setattr(rocks_frozen, "PART_BYTES", 1 << 12)
    monkeypatch.setattr(rocks_frozen, "_BATCH_ROWS", 7)
    monkeypatch.setattr(rocks_database, "SCAN_ROWS", 3)
    target = Parts()
    frozen = backend.freeze()
    frozen.write_to(target)
    assert len(target.parts) > 8, "what is in memory at a time is bounded, however large the state is"
    again = worker.of("node", 0, GROUPS).by_row(KEYS, [VALUE])
    for _, part in target.parts:
        again.restore(part, "part", OWNER)
    assert again.freeze().rows() == frozen.rows() == {"value": 3_000}
    assert rows_in(sections_of(again.freeze())) == rows_in(sections_of(frozen))
