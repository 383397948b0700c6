"""Whatever the umask is, only those who should can read what is written, and take the locks."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headgate.errors import UsageError
from headgate.model.config import Access
from headgate.storage import local_files
from headgate.storage.local import LocalStorage
from headgate.storage.local_files import (
    ProcessDirectory,
    access_in,
    is_open_to_others,
    make_directory,
    make_root,
    open_lock,
    restrict,
)
from headgate.store.store import Store

NOBODY = 65534
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture(autouse=True)
def _permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user of this machine may enter and read."""
    made = Path(tempfile.mkdtemp(prefix="headgate-public-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def modes(root: Path) -> dict[str, int]:
    """Return the modes of ``root`` and of everything below it."""
    found = [root, *root.rglob("*")]
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in found}


def assert_modes(root: Path, files: int, directories: int) -> None:
    found = modes(root)
    assert found
    wrong = {
        name: oct(mode) for name, mode in found.items() if mode != (directories if (root / name).is_dir() else files)
    }
    assert wrong == {}


def write_everything(storage: LocalStorage) -> None:
    storage.put("a/b/put", [b"1"])
    storage.put_if_absent("a/c/once", [b"2"])
    storage.put("a/d/staged", [b"3"])
    storage.rename_if_absent("a/d/staged", "e/renamed")


def test_objects_are_their_owners_alone_under_a_permissive_umask(tmp_path: Path) -> None:
    write_everything(LocalStorage(tmp_path / "parent" / "root"))
    assert_modes(tmp_path / "parent", 0o600, 0o700)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_directory_that_is_shared_with_its_group_says_so_to_all_that_write_there(tmp_path: Path, umask: int) -> None:
    os.umask(umask)
    make_root(tmp_path / "root", Access.GROUP, "checkpoint directory")
    write_everything(LocalStorage(tmp_path / "root"))
    make_root(tmp_path / "root", Access.GROUP, "checkpoint directory")
    assert_modes(tmp_path / "root", 0o660, 0o2770)


def test_below_a_teams_directory_nothing_is_shared_unless_somebody_says_so(tmp_path: Path) -> None:
    team = tmp_path / "team"
    team.mkdir()
    team.chmod(0o2775)
    write_everything(LocalStorage(team / "root"))
    assert_modes(team / "root" / "a" / "b", 0o600, 0o2700)
    assert not is_open_to_others(team / "root")


def test_sharing_a_directory_that_is_not_shared_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(0o755)
    with pytest.raises(UsageError, match=r"is not shared with its group.*chmod -R g\+rwX"):
        make_root(tmp_path / "old", Access.GROUP, "checkpoint directory")
    with pytest.raises(UsageError, match=r"Store.open\(access=\) must be 'owner' or 'group', not 'all'"):
        Store.open(tmp_path / "store", access="all")


def test_a_directory_of_version_0_1_keeps_working_and_new_files_are_private(tmp_path: Path) -> None:
    old = tmp_path / "root" / "a" / "b"
    old.mkdir(parents=True)
    (old / "before").write_bytes(b"0")
    (old / "before").chmod(0o644)
    storage = LocalStorage(tmp_path / "root")
    write_everything(storage)
    assert storage.get("a/b/before") == b"0"
    found = modes(tmp_path / "root")
    assert (found["a/b/put"], found["a/b/before"], found["a/b"]) == (0o600, 0o644, 0o777)


@pytest.mark.parametrize(("access", "files", "directories"), [("owner", 0o600, 0o700), ("group", 0o660, 0o2770)])
def test_a_store_is_private_with_its_write_ahead_log(tmp_path: Path, access: str, files: int, directories: int) -> None:
    with Store.open(tmp_path / "store", access=access) as store:
        store.create_stream("s", SCHEMA)
        with store.writer("s") as writer:
            appended = writer.append(pa.record_batch([[1, 2, 3]], schema=SCHEMA))
            writer.flush()
            appended.result(30)
        assert {"catalogue.sqlite-wal", "catalogue.sqlite-shm", "catalogue.lock"} <= set(modes(tmp_path / "store"))
        assert_modes(tmp_path / "store", files, directories)
    with Store.open(tmp_path / "store") as store:
        assert store.describe("s").ends
    assert_modes(tmp_path / "store", files, directories)


def test_a_store_of_version_0_1_opens(tmp_path: Path) -> None:
    Store.open(tmp_path / "store").close()
    for path in (tmp_path / "store").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with Store.open(tmp_path / "store") as store:
        store.create_stream("s", SCHEMA)


def test_a_lock_that_everybody_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"held")
    path.chmod(0o644)
    os.close(open_lock(path))
    assert modes(path) == {".": 0o600}
    assert path.read_bytes() == b"held"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_may_look_into_the_directory_cannot_hold_the_lock(public: Path) -> None:
    os.close(open_lock(public / "lock"))
    os.seteuid(NOBODY)
    try:
        with pytest.raises(PermissionError):
            os.open(public / "lock", os.O_RDONLY)
    finally:
        os.seteuid(0)
    descriptor = open_lock(public / "lock")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_shared_directory_is_never_seen_before_it_is_shared(tmp_path: Path) -> None:
    make_directory(tmp_path / "made", Access.GROUP)
    (tmp_path / "made" / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "made", Access.GROUP)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert access_in(tmp_path / "made" / "not" / "there") is Access.GROUP


def test_what_spark_wrote_gets_the_modes_of_the_directory_it_is_in(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "rows" / "part").mkdir(parents=True)
    (tmp_path / "rows" / "part" / "1.parquet").write_bytes(b"")
    restrict(tmp_path / "rows")
    assert_modes(tmp_path / "rows", 0o600, 0o700)


@pytest.mark.parametrize(
    ("mode", "is_open"),
    [(0o700, False), (0o2770, False), (0o2700, False), (0o750, True), (0o755, True), (0o2775, True)],
)
def test_a_directory_tells_whether_others_can_read_it(tmp_path: Path, mode: int, is_open: bool) -> None:
    tmp_path.chmod(mode)
    assert is_open_to_others(tmp_path) is is_open


def test_what_goes_while_a_tree_is_restricted_needs_no_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows" / "part").mkdir(parents=True)
    for name in "ab":
        (tmp_path / "rows" / "part" / name).touch(mode=0o644)
    changing = os.chmod

    def gone_before(path: str, mode: int) -> None:
        if str(path).endswith("a"):
            os.unlink(path)
        changing(path, mode)

    monkeypatch.setattr(os, "chmod", gone_before)
    restrict(tmp_path / "rows")
    assert modes(tmp_path / "rows")["part/b"] == 0o600


def test_the_place_may_be_removed_by_another_process_that_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, times = tmp_path / "place", iter([True, True, False])
    refuse = local_files.refuse_foreign_directory

    def removed_before(directory: Path) -> None:
        if next(times):
            directory.rmdir()
        refuse(directory)

    monkeypatch.setattr(local_files, "refuse_foreign_directory", removed_before)
    made = ProcessDirectory(place, is_users=True)
    assert made.path.is_dir()
    made.remove()
    assert not place.exists()


def test_the_place_may_be_removed_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, times = tmp_path / "place", iter([True])
    sync = local_files.sync_path

    def removed_before(path: Path, *, is_new: bool = False) -> None:
        if path == place and next(times, False):
            path.rmdir()
        sync(path, is_new=is_new)

    monkeypatch.setattr(local_files, "sync_path", removed_before)
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
