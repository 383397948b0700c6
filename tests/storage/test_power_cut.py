"""What counts as written survives a power cut, although the first sync of its directory failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.powercut import PowerCut, another_process

from headgate.errors import StorageError
from headgate.storage import fsync
from headgate.storage.base import AlreadyExists
from headgate.storage.local import LocalStorage


def test_what_exists_already_is_durable(tmp_path: Path) -> None:
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path / "objects")
        storage.put_if_absent("a/first", [b"1"])
        power.fail_directory_syncs(1)
        with pytest.raises(StorageError):
            storage.put_if_absent("a/b", [b"content"])
        with pytest.raises(AlreadyExists):
            storage.put_if_absent("a/b", [b"content"])
        power.cut()
        assert storage.get("a/b") == b"content"


def test_what_cannot_be_synced_is_not_said_to_exist(tmp_path: Path) -> None:
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path / "objects")
        storage.put_if_absent("a/first", [b"1"])
        power.fail_directory_syncs(2)
        for _ in range(2):
            with pytest.raises(StorageError):
                storage.put_if_absent("a/b", [b"content"])


@pytest.mark.parametrize("look", [lambda storage: storage.list("a"), lambda storage: storage.get("a/b")])
def test_what_is_listed_or_read_survives_a_power_cut(tmp_path: Path, look: Callable[[LocalStorage], object]) -> None:
    """Whoever finds its own write done will not repeat it."""
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path / "objects")
        storage.put("a/first", [b"1"])
        power.fail_directory_syncs(2)
        with pytest.raises(StorageError):
            storage.put("a/b", [b"content"])
        with pytest.raises(StorageError):
            look(storage)
        look(storage)
        power.cut()
        assert storage.get("a/b") == b"content"


def test_what_another_process_did_not_sync_is_synced_by_the_first_look(tmp_path: Path) -> None:
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path / "objects")
        storage.put("a/first", [b"1"])
        (tmp_path / "b").write_bytes(b"content")
        os.link(tmp_path / "b", tmp_path / "objects" / "a" / "b")  # and died before it synced
        with another_process():
            assert storage.list("a") == ["a/b", "a/first"]
        power.cut()
        assert storage.get("a/b") == b"content"


def test_a_directory_that_was_removed_and_made_again_is_synced_by_the_first_look(tmp_path: Path) -> None:
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path / "objects")
        storage.put("a/first", [b"1"])
        storage.delete("a/first")  # and the directory, which is empty
        (tmp_path / "b").write_bytes(b"content")
        (tmp_path / "objects" / "a").mkdir()
        os.link(tmp_path / "b", tmp_path / "objects" / "a" / "b")  # another process, which died before it synced
        assert storage.list("a") == ["a/b"]
        power.cut()
        assert storage.get("a/b") == b"content"


def test_only_so_many_directories_are_remembered(tmp_path: Path) -> None:
    with PowerCut().watching() as power, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsync, "SEEN_MAX", 8)
        patch.setattr(fsync, "PLACED_MAX", 4)
        patch.setattr(fsync, "SYNCED", fsync.SyncedDirectories())
        storage = LocalStorage(tmp_path / "objects")
        for number in range(30):
            storage.put(f"chk-{number}/file", [b"1"])
        assert (len(fsync.SYNCED.seen), len(fsync.SYNCED.placed)) == (8, 4)
        (tmp_path / "b").write_bytes(b"content")
        os.link(tmp_path / "b", tmp_path / "objects" / "chk-0" / "b")
        assert storage.list("chk-0") == ["chk-0/b", "chk-0/file"], "which was forgotten, so it is synced again"
        power.cut()
        assert storage.get("chk-0/b") == b"content"


def test_who_may_not_sync_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path / "objects")
    storage.put("a/b", [b"content"])

    def refused(descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refused)
    with another_process():
        assert storage.get("a/b") == b"content"


def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    """The model itself: what nobody looked at is gone."""
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path / "objects")
        storage.put_if_absent("a/first", [b"1"])
        power.fail_directory_syncs(1)
        with pytest.raises(StorageError):
            storage.put_if_absent("a/b", [b"content"])
        power.cut()
        assert storage.list("a") == ["a/first"]
