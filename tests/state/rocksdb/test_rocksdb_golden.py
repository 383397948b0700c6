"""Files of RocksDB that earlier releases wrote to checkpoints: whoever restores, or looks, finds what was there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.state.backends import IN_FILES, states
from tests.state.moved import Written, restore
from tests.state.rocksdb import increments
from tests.state.rocksdb import test_rocksdb_packed as packed
from tests.state.rocksdb import test_rocksdb_timed_files as timed
from tests.state.rocksdb.test_rocksdb_windows import taken

import headgate as hg
from headgate.codec.log_entry import decode_log_entry
from headgate.model.manifest import FILES_VERSION, PACKED_FILES_VERSION, TIMED_FILES_VERSION, Manifest
from headgate.state.timers import TimeKind
from headgate.storage.urls import open_storage

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
later = pytest.mark.parametrize(("later", "parallelism"), [(IN_FILES, 1), (IN_FILES, 3), ("memory", 1), ("memory", 2)])


def written(tmp_path: Path, directory: str, pipeline: str, entry: int, version: int) -> Written:
    root = tmp_path / directory
    shutil.copytree(GOLDEN / directory, root, dirs_exist_ok=True)
    data = (root / pipeline / f"log/{entry:010}").read_bytes()
    assert data.startswith(b"headgate-log %d " % version)
    manifest = decode_log_entry(data, "golden")
    assert isinstance(manifest, Manifest)
    return Written(open_storage(str(root)), manifest.parts, 0, 1, manifest.max_parallelism, pipeline)


@later
def test_files_of_earlier_releases_are_restored(later: str, parallelism: int, tmp_path: Path) -> None:  # RB24, RB21
    found = written(tmp_path, "rocksdb_6", "p", 3, FILES_VERSION)
    wanted = {key: increments.text(key, 1 if key < 5 else 0) for key in range(30)}
    assert dict(hg.read_state(tmp_path / "rocksdb_6/p", "sum", "value").rows()) == wanted
    values: dict[int, str] = {}
    with states(later) as worker:
        for index in range(parallelism):
            made: Any = worker.of("sum", index, increments.GROUPS).by_row(increments.KEYS, increments.STATES)
            assert restore(made, [found], index, parallelism) == (later == IN_FILES and parallelism == 1)
            keys = made.all_keys()
            values |= {key: made.cells(increments.VALUE).get(key) for key in keys}
            assert all(made.cells(increments.LIST).get(key) == [key, int(key < 5)] for key in keys)
    assert values == wanted


@later
def test_timers_and_expiries_in_files_that_were_written_once_are_restored(
    later: str, parallelism: int, tmp_path: Path
) -> None:  # RB24
    found = written(tmp_path, "rocksdb_11", "function", 2, TIMED_FILES_VERSION)
    keys = range(20)
    assert len(hg.read_state(tmp_path / "rocksdb_11/function", "node", "headgate.timers.event_time")) == 40
    with states(later) as worker:
        for index in range(parallelism):
            function = timed.Function("rows", worker, index)
            function.backend.time.now_ms = timed.HOUR_MS
            assert restore(function.backend, [found], index, parallelism) == (later == IN_FILES and parallelism == 1)
            mine = timed.owned_by(keys, parallelism, index)
            assert function.get(timed.EXPIRES, mine) == {key: key for key in mine if not key % 2}
            assert function.fire() == timed.in_order(timed.timers_of(mine))
            assert sorted(function.fire(kind=TimeKind.PROCESSING_TIME)) == [(key, 900) for key in mine]


@later
def test_windows_in_files_that_were_written_once_are_restored(
    later: str, parallelism: int, tmp_path: Path
) -> None:  # RB24
    found = written(tmp_path, "rocksdb_11", "windows", 2, TIMED_FILES_VERSION)
    with states(later) as worker:
        for index in range(parallelism):
            state, mine = timed.windows(worker, "kept", index), timed.owned_by(range(20), parallelism, index)
            assert restore(state, [found], index, parallelism) == (later == IN_FILES and parallelism == 1)
            for window in (0, 1):
                rows = taken(state, window)
                assert {key: [row[3] for row in rows if row[0] == key] for key in mine if key % 2 == window} == {
                    key: [0, 1] for key in mine if key % 2 == window
                }


@later
@pytest.mark.parametrize(("directory", "version"), [("rocksdb_6", FILES_VERSION), ("rocksdb_12", PACKED_FILES_VERSION)])
def test_numbers_by_batch_that_were_written_once_are_restored(
    directory: str, version: int, later: str, parallelism: int, tmp_path: Path
) -> None:  # RB27: of version 6, each state has rows of its own
    found = written(tmp_path, directory, "columns", 2, version)
    wanted = {
        "count": {key: key for key in range(0, 60, 2)},
        "last": {key: key / 4 for key in range(0, 60, 3)},
        "open": {key: bool(key % 2) for key in range(0, 60, 5)},
        "name": {key: f"n{key}" for key in range(0, 60, 7)},
        "seen": {key: [key] for key in range(0, 60, 11)},
    }
    for name in ("count", "last", "open", "name"):
        assert dict(hg.read_state(tmp_path / directory / "columns", "node", name).rows()) == wanted[name]
    with states(later) as worker:
        for index in range(parallelism):
            back = packed.State(worker, subtask=index)
            goes_on = restore(back.backend, [found], index, parallelism)
            assert goes_on == (later == IN_FILES and parallelism == 1 and version == PACKED_FILES_VERSION)
            mine = timed.owned_by(range(60), parallelism, index)
            assert back.held(mine) == {
                name: {key: value for key, value in held.items() if key in mine} for name, held in wanted.items()
            }
