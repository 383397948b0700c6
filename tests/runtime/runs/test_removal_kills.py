"""SIGKILL of driver and workers between any two files that a pipeline removes, shared files of RocksDB among them."""

# Rules: F3

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from tests.conftest import IS_DEEP
from tests.runtime import removal_program

from headgate import fault_points
from headgate.codec.snapshot import FILES_PREFIX
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

ROWS, KEYS = 9_000, 9
"""So many that the input does not end before the last death: on a busy machine checkpoints are further apart."""


def started(root: Path, kill_at: str | None = None) -> int:
    """Run the program; return how it ended."""
    environment = {**os.environ} if kill_at is None else {**os.environ, fault_points.VARIABLE: kill_at}
    words = [sys.executable, removal_program.__file__, str(root), str(ROWS), str(KEYS)]
    return subprocess.run(words, env=environment, timeout=600, check=False).returncode


def manifests(root: Path) -> list[Manifest]:
    observed = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe()
    return [entry.content for entry in observed.counted() if isinstance(entry.content, Manifest)]


def files_there(root: Path) -> set[str]:
    own = root / "checkpoints" / "p"
    return {str(path.relative_to(own)) for path in own.glob("chk-*/*")}


def check_files(root: Path) -> None:
    """Whatever was removed, every file is there that a checkpoint needs which a start may restore."""
    needed = {path for manifest in manifests(root)[-2:] for path in manifest.files}
    assert needed <= files_there(root)


@pytest.mark.timeout(900)
@pytest.mark.early
def test_a_pipeline_dies_between_any_two_files_that_it_removes(tmp_path: Path) -> None:  # KP31, SF4, SF8
    shared = 0
    for count in (1, 2, 3, 5, 9, 14, 22) if IS_DEEP else (5,):
        marker = tmp_path / f"killed-{count}"
        assert started(tmp_path, f"in-removal:{count}:{marker}") == -signal.SIGKILL, (
            f"it did not die at removal {count}"
        )
        assert marker.exists()
        check_files(tmp_path)
        own = [f"chk-{manifest.checkpoint:010d}/" for manifest in manifests(tmp_path)]
        parts = [part for manifest in manifests(tmp_path)[-1:] for part in manifest.parts]
        shared += sum(part.section.startswith(FILES_PREFIX) and not part.path.startswith(own[-1]) for part in parts)
    assert shared, "no checkpoint shared a file when it died"
    assert started(tmp_path) == 0
    check_files(tmp_path)
    assert files_there(tmp_path) == {path for manifest in manifests(tmp_path) for path in manifest.files}, "files leak"
    found = read_committed(str(tmp_path / "rows"))
    expected = pl.DataFrame({"key": [n % KEYS for n in range(ROWS)], "n": [n // KEYS + 1 for n in range(ROWS)]})
    assert found.sort("key", "n").equals(expected.sort("key", "n"))
