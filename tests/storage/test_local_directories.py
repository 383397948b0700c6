"""Directories of processes, while others come and go in the same place."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.storage import local, local_directories
from headgate.storage.local_directories import ProcessDirectory


def test_the_place_may_be_removed_by_another_process_that_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, times = tmp_path / "place", iter([True, True, False])
    refuse = local_directories.refuse_foreign_directory

    def removed_before(directory: Path) -> None:
        if next(times):
            directory.rmdir()
        refuse(directory)

    monkeypatch.setattr(local_directories, "refuse_foreign_directory", removed_before)
    made = ProcessDirectory(place, is_users=True)
    assert made.path.is_dir()
    made.remove()
    assert not place.exists()


def test_the_place_may_be_removed_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, times = tmp_path / "place", iter([True])
    sync = local.sync_path

    def removed_before(path: Path, *, is_new: bool = False) -> None:
        if path == place and next(times, False):
            path.rmdir()
        sync(path, is_new=is_new)

    monkeypatch.setattr(local, "sync_path", removed_before)
    assert ProcessDirectory(place, is_users=True).path.is_dir()


@pytest.mark.parametrize("where", ["link", "link/place", "gone"])
def test_a_place_that_can_never_be_made_is_an_error(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(FileNotFoundError):
        ProcessDirectory(Path("gone") if where == "gone" else tmp_path / where)


def test_what_dead_processes_left_is_removed_and_what_living_ones_have_is_not(tmp_path: Path) -> None:
    living, dead = ProcessDirectory(tmp_path), ProcessDirectory(tmp_path, keeps_abandoned=True)
    dead.leave()
    made = ProcessDirectory(tmp_path)
    assert living.path.is_dir()
    assert made.path.is_dir()
    assert not dead.path.exists()
