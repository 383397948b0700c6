"""Captures of DataFrames on a disk that forgets what was not synced; a class does what Spark does there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest
from tests.powercut import PowerCut, another_process

from headgate.errors import StorageError
from headgate.spark.dataframes import capture, is_captured

SCHEMA = pa.schema({"id": pa.int64()})
PARTS = ("part-0.snappy.parquet", "part-1.snappy.parquet")


class WritesAsSparkDoes:
    """A DataFrame whose rows are two files: renamed to their places, then marked by Spark, nothing synced."""

    def __init__(self) -> None:
        self.write = self.sparkSession = self.conf = self

    def get(self, name: str) -> str:
        return ""

    def option(self, name: str, value: str) -> WritesAsSparkDoes:
        return self

    def parquet(self, url: str) -> None:
        target = Path(url.removeprefix("file://"))
        os.mkdir(target)
        for name in (*PARTS, "_SUCCESS"):
            (target.parent / name).write_text(name)
            os.rename(target.parent / name, target / name)


@pytest.mark.parametrize("is_cut_in_between", [True, False])
def test_a_power_cut_leaves_all_of_a_capture_or_none(tmp_path: Path, is_cut_in_between: bool) -> None:
    directory = tmp_path / "in"
    with another_process(), PowerCut().watching() as power:
        if is_cut_in_between:
            power.fail_directory_syncs(100)
            with pytest.raises(StorageError):
                capture(WritesAsSparkDoes(), str(directory), SCHEMA)
        else:
            capture(WritesAsSparkDoes(), str(directory), SCHEMA)
        power.cut()
    assert is_captured(str(directory)) != is_cut_in_between
    if not is_cut_in_between:
        assert sorted(path.name for path in directory.iterdir()) == ["_SUCCESS", "_captured", *PARTS]


def test_a_capture_that_cannot_be_made_durable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, fsync, synced = tmp_path / "in", os.fsync, []

    def full(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.name)
        if path.name == PARTS[1] and synced.count(path.name) == 1:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="Disk quota exceeded"):
        capture(WritesAsSparkDoes(), str(directory), SCHEMA)
    assert not is_captured(str(directory))
    capture(WritesAsSparkDoes(), str(directory), SCHEMA)
    assert is_captured(str(directory))
    assert {*PARTS} <= set(synced)
