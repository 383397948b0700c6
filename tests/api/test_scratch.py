"""Directories of runs that are only looked at, while other processes make and remove theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headgate.api import pipeline_registry
from headgate.api.collect import SCRATCH, ScratchDirectory
from headgate.storage import local_directories


@pytest.mark.parametrize("times", [1, 3])
def test_others_may_remove_the_directory_of_all_looks_at_any_time(tmp_path: Path, times: int) -> None:  # N41
    opening, left = local_directories.open_lock, [times]

    def removed_before(path: Path) -> int:
        if left[0]:
            left[0] -= 1
            path.parent.rmdir()  # as ``remove`` of another process, whose look was the last
        return opening(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_directories, "open_lock", removed_before)
        mine = ScratchDirectory(str(tmp_path))
    assert not left[0]
    assert mine.path.is_dir()
    other = ScratchDirectory(str(tmp_path))
    mine.remove()
    assert other.path.is_dir()
    other.remove()
    assert not (tmp_path / SCRATCH).exists()


def test_another_place_is_mentioned_although_a_record_of_a_third_goes(tmp_path: Path) -> None:
    reading = Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if reading(path, *args, **options).endswith("b/"):
            path.unlink()
        return reading(path, *args, **options)

    for name in "ab":
        (tmp_path / name / "p" / "log").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        for name in ("a/", "b/", "c/"):
            pipeline_registry.remember_pipeline("p", os.path.join(tmp_path, name))
        patch.setattr(Path, "read_text", lambda path, *a, **o: read(path, *a, **o))
        assert pipeline_registry.remember_pipeline("p", os.path.join(tmp_path, "c/")) == [os.path.join(tmp_path, "a/")]
