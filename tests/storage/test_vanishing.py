"""Directories that somebody else removes, because they are empty, between two system calls of ours."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import patched

from headgate.storage import local, local_files
from headgate.storage.base import TEMP_PREFIX, AlreadyExists, NotFound
from headgate.storage.local import LocalStorage


def before_first(call: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    """Return ``call``, which finds when it is first called that ``act`` was done meanwhile."""
    todo = [act]

    def wrapped(*args: Any, **more: Any) -> Any:
        if todo:
            todo.pop()()
        return call(*args, **more)

    return wrapped


def test_a_directory_that_goes_while_it_is_listed_has_nothing(tmp_path: Path) -> None:
    """Another process takes the last object out of it."""
    LocalStorage(tmp_path).put("staged/a", [b"1"])
    LocalStorage(tmp_path).put("kept", [b"2"])
    local_files.SYNCED.forget(tmp_path / "staged")
    another = LocalStorage(tmp_path)
    with patched(local, "sync_before_reading", before_first_in("staged", lambda: another.delete("staged/a"))):
        assert LocalStorage(tmp_path).list("") == ["kept"]
    assert LocalStorage(tmp_path).list("") == ["kept"]


def before_first_in(name: str, act: Callable[[], object]) -> Callable[[Path], None]:
    real, todo = local.sync_before_reading, [act]

    def sync(directory: Path) -> None:
        if directory.name == name and todo:
            todo.pop()()
        real(directory)

    return sync


def test_a_rename_is_done_although_the_directory_of_its_source_goes(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("staged/a", [b"1"])
    with patched(os, "unlink", unlink_and_remove_the_directory(os.unlink)):
        storage.rename_if_absent("staged/a", "shown/a")
    assert storage.list("") == ["shown/a"]
    assert storage.get("shown/a") == b"1"


def unlink_and_remove_the_directory(real: Callable[..., None]) -> Callable[..., None]:
    def unlink(path: Any) -> None:
        real(path)
        os.rmdir(os.path.dirname(path))

    return unlink


def test_a_rename_makes_the_directory_of_its_target_again(tmp_path: Path) -> None:
    """Somebody took the last object out of it behind our look."""
    storage = LocalStorage(tmp_path)
    storage.put("staged/a", [b"1"])
    storage.put("shown/b", [b"2"])
    another = LocalStorage(tmp_path)
    with patched(os, "link", before_first(os.link, lambda: another.delete("shown/b"))):
        storage.rename_if_absent("staged/a", "shown/a")
    assert storage.list("") == ["shown/a"]


def test_a_target_that_was_taken_and_goes_meanwhile_is_free(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("staged/a", [b"1"])
    storage.put("shown/a", [b"2"])
    same = before_first(os.path.samefile, lambda: LocalStorage(tmp_path).delete("shown/a"))
    with patched(os.path, "samefile", same):
        storage.rename_if_absent("staged/a", "shown/a")
    assert storage.get("shown/a") == b"1"


def test_a_source_that_goes_meanwhile_is_not_found(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("staged/a", [b"1"])
    another = LocalStorage(tmp_path)
    with (
        patched(os, "link", before_first(os.link, lambda: another.delete("staged/a"))),
        pytest.raises(NotFound, match="staged/a"),
    ):
        storage.rename_if_absent("staged/a", "shown/a")
    assert storage.list("") == []


def test_a_put_makes_its_directory_as_often_as_it_goes(tmp_path: Path) -> None:
    """Somebody removes what was just made of it."""
    storage = LocalStorage(tmp_path)
    sync = before_first(local_files.sync_directory, lambda: shutil.rmtree(tmp_path / "run"))
    with patched(local_files, "sync_directory", sync):
        storage.put("run/7/a", [b"1"])
    assert storage.list("") == ["run/7/a"]


@pytest.mark.parametrize(("call", "put"), [("link", "put_if_absent"), ("replace", "put")])
def test_a_sweep_leaves_what_is_being_written(tmp_path: Path, call: str, put: str) -> None:
    """A driver that was stopped in its recovery goes on with it, while its heir commits."""
    swept: list[int] = []
    another = LocalStorage(tmp_path)
    (tmp_path / f"{TEMP_PREFIX}77-crash").write_bytes(b"half")
    real = getattr(os, call)
    with patched(os, call, before_first(real, lambda: swept.append(another.sweep_unfinished()))):
        getattr(LocalStorage(tmp_path), put)("_committed/a", iter([b"1", b"2"]))
    assert swept == [1], "what a crash has left goes"
    assert another.get("_committed/a") == b"12"
    assert another.sweep_unfinished() == 0


def test_a_sweep_that_comes_first_costs_a_file_and_no_write(tmp_path: Path) -> None:
    """Between the creation of the file and its lock."""
    another, swept = LocalStorage(tmp_path), list[int]()
    with patched(fcntl, "flock", before_first(fcntl.flock, lambda: swept.append(another.sweep_unfinished()))):
        LocalStorage(tmp_path).put_if_absent("a", iter([b"1"]))
    assert swept == [1]
    assert another.get("a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_what_is_deleted_right_behind_its_put_was_put(tmp_path: Path, put: str) -> None:
    another = LocalStorage(tmp_path)
    with patched(local, "sync_directory", before_first(local.sync_directory, lambda: another.delete("d/a"))):
        getattr(LocalStorage(tmp_path), put)("d/a", [b"1"])
    assert another.list("") == []
    another.put("d/a", [b"1"])
    with (
        patched(local, "sync_directory", before_first(local.sync_directory, lambda: another.delete("d/a"))),
        pytest.raises(AlreadyExists),
    ):
        LocalStorage(tmp_path).put_if_absent("d/a", [b"2"])
