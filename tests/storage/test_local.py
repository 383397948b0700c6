"""Files and directories survive a power cut with what was acknowledged, whoever made them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.mutants.harness import patched
from tests.support.powercut import PowerCut, another_process

from headgate.errors import StorageError
from headgate.model.config import Access
from headgate.storage import local, local_files
from headgate.storage.base import TEMP_PREFIX, AlreadyExists, NotFound
from headgate.storage.local import LocalStorage
from headgate.storage.local_files import make_directories
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA


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
        patch.setattr(local_files, "SEEN_MAX", 8)
        patch.setattr(local_files, "PLACED_MAX", 4)
        patch.setattr(local_files, "SYNCED", local_files.SyncedDirectories())
        storage = LocalStorage(tmp_path / "objects")
        for number in range(30):
            storage.put(f"chk-{number}/file", [b"1"])
        assert (len(local_files.SYNCED.seen), len(local_files.SYNCED.placed)) == (8, 4)
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


WRITES: dict[str, Callable[[LocalStorage, str], object]] = {
    "put": lambda storage, path: storage.put(path, [b"content"]),
    "put_if_absent": lambda storage, path: storage.put_if_absent(path, [b"content"]),
    "rename_if_absent": lambda storage, path: storage.rename_if_absent(f"staged-{path[-1]}", path),
}


def prepared(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "objects")
    for name in ("a", "b"):
        storage.put(f"staged-{name}", [b"content"])
    return storage


def test_a_power_cut_takes_directories_that_were_not_synced(tmp_path: Path) -> None:
    """The model itself."""
    with PowerCut().watching() as power:
        (tmp_path / "lost").mkdir()
        (tmp_path / "lost" / "a").write_bytes(b"1")
        power.cut()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("access", [Access.OWNER, Access.GROUP])
@pytest.mark.parametrize("write", WRITES)
def test_what_two_workers_write_into_a_new_directory_survives(tmp_path: Path, write: str, access: Access) -> None:
    """One makes it and fails to sync it; the other one has written meanwhile, so that it cannot be removed again."""
    prepared(tmp_path)
    storage = LocalStorage(tmp_path / "objects", access)

    def other_worker() -> None:
        with another_process():
            WRITES[write](storage, "chk-1/b")

    with PowerCut().watching() as power:
        power.fail_directory_syncs(1, other_worker)
        with pytest.raises(StorageError):
            WRITES[write](storage, "chk-1/a")
        with contextlib.suppress(AlreadyExists):
            WRITES[write](storage, "chk-1/a")
        power.cut()
    assert storage.list("chk-1") == ["chk-1/a", "chk-1/b"]


@pytest.mark.parametrize("write", WRITES)
def test_a_directory_that_another_process_died_over_is_synced_by_who_writes_there(tmp_path: Path, write: str) -> None:
    storage = prepared(tmp_path)
    with PowerCut().watching() as power:
        (tmp_path / "objects" / "p" / "log").mkdir(parents=True)  # and died before it synced either
        WRITES[write](storage, "p/log/a")
        power.cut()
    assert storage.get("p/log/a") == b"content"


def test_a_directory_that_another_process_died_over_is_synced_by_who_looks(tmp_path: Path) -> None:
    storage = prepared(tmp_path)
    with PowerCut().watching() as power:
        (tmp_path / "objects" / "log").mkdir()
        os.link(tmp_path / "objects" / "staged-a", tmp_path / "objects" / "log" / "a")  # and died
        assert storage.list("log") == ["log/a"]
        power.cut()
    assert storage.get("log/a") == b"content"


def test_a_directory_that_was_removed_and_made_again_by_others_is_synced_again(tmp_path: Path) -> None:
    """Most file systems give the new one the inode number of the old one."""
    storage = prepared(tmp_path)
    with PowerCut().watching() as power:
        storage.put("chk-1/a", [b"content"])
        with another_process():
            storage.delete("chk-1/a")
        (tmp_path / "objects" / "chk-1").mkdir()  # and died before it synced
        storage.put("chk-1/b", [b"content"])
        power.cut()
    assert storage.get("chk-1/b") == b"content"


def test_the_directories_above_the_storage_are_synced_too(tmp_path: Path) -> None:
    with PowerCut().watching() as power:
        (tmp_path / "team" / "checkpoints").mkdir(parents=True)  # another driver, which died
        storage = LocalStorage(tmp_path / "team" / "checkpoints")
        storage.put("a", [b"content"])
        power.cut()
    assert storage.get("a") == b"content"


def test_a_directory_that_this_process_has_synced_is_not_synced_again(tmp_path: Path) -> None:
    """Checkpoints make directories often: the parent is synced once for each, whatever is written into it."""
    storage = prepared(tmp_path)
    with PowerCut().watching() as power:
        for number in (1, 2):
            for name in ("a", "b", "c"):
                storage.put(f"chk-{number}/{name}", [b"1"])
    objects = tmp_path / "objects"
    first, second = objects / "chk-1", objects / "chk-2"
    assert power.synced == [objects, first, first, first, objects, second, second, second]


def test_a_directory_that_could_not_be_made_durable_is_not_taken_for_durable(tmp_path: Path) -> None:
    with PowerCut().watching() as power:
        power.fail_directory_syncs(1)
        with pytest.raises(OSError, match="Input/output"):
            make_directories(tmp_path / "a")
        LocalStorage(tmp_path / "a").put("b", [b"content"])
        power.cut()
    assert (tmp_path / "a" / "b").read_bytes() == b"content"


def test_only_so_many_directories_are_held_open(tmp_path: Path) -> None:
    with another_process(), patched(local_files, "PLACED_MAX", 8):
        storage = LocalStorage(tmp_path / "objects")
        for number in range(20):
            storage.put(f"chk-{number}/a", [b"1"])
        assert held_open(tmp_path) == len(local_files.SYNCED.placed) == 8
        assert str(tmp_path / "objects") in local_files.SYNCED.placed, "what is used is not forgotten"
        for number in range(20):
            storage.delete(f"chk-{number}/a")
        assert held_open(tmp_path) == 1, "what was removed is held no longer"


@pytest.mark.parametrize("chunks", ["store/chunks", "elsewhere"])
def test_a_store_that_is_closed_holds_no_directory_open(tmp_path: Path, chunks: str) -> None:
    with another_process():
        with Store.open(tmp_path / "store", storage=LocalStorage(tmp_path / chunks)) as store:
            store.create_stream("s", TEXT_SCHEMA)
            with store.writer("s") as writer:
                writer.append(pa.record_batch([["x"]], schema=TEXT_SCHEMA))
            LocalStorage(tmp_path / "store-of-another").put("a/b", [b"1"])
            assert held_open(tmp_path / "store")
            assert held_open(tmp_path / chunks)
        assert held_open(tmp_path / "store") == held_open(tmp_path / chunks) == 0
        assert held_open(tmp_path / "store-of-another") == 2


def held_open(tmp_path: Path) -> int:
    """Return how many descriptors are open at ``tmp_path`` and below it."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread's
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(Path(link).is_relative_to(tmp_path) for link in links)


def test_a_directory_whose_parent_is_not_ours_to_sync_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody gave us a directory in one that we cannot read."""
    real = os.open
    (tmp_path / "given").mkdir()

    def refused(path: str | Path, *args: int) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied")
        return real(path, *args)

    monkeypatch.setattr(os, "open", refused)
    storage = LocalStorage(tmp_path / "given")
    storage.put("a", [b"content"])
    assert storage.get("a") == b"content"
    with pytest.raises(PermissionError):
        make_directories(tmp_path / "made")


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
