"""One conformance suite over every storage backend."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from tests.servers.clouds import cloud_server
from tests.servers.hdfs import HdfsCluster
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from typer.testing import CliRunner

import headgate as hg
from headgate.cli.app import app
from headgate.errors import StorageError, UsageError
from headgate.storage.base import TEMP_PREFIX, AlreadyExists, NotFound, Storage
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage, forget_memory_storage
from headgate.storage.object_store import ObjectStorage
from headgate.storage.urls import absolute_location, open_storage

HDFS = pytest.param("hdfs", marks=pytest.mark.xdist_group("hdfs"))
AZURE = pytest.param("azure", marks=(pytest.mark.deep, pytest.mark.xdist_group("azure")))


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    with cloud_server("google") as server:
        yield server.url


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    with cloud_server("azure") as server:
        yield server.url


@pytest.fixture(params=["local", "memory", "obstore+file", "obstore+memory", "faulty", HDFS, "google", AZURE])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    match request.param:
        case "local":
            return open_storage(str(tmp_path / "objects"))
        case "memory":
            forget_memory_storage("suite")
            return open_storage("memory://suite")
        case "obstore+file":
            return open_storage(f"obstore+file://{tmp_path}/objects")
        case "obstore+memory":
            return open_storage("obstore+memory:///")
        case "hdfs":
            cluster: HdfsCluster = request.getfixturevalue("hdfs")
            return open_storage(f"{cluster.url}/{tmp_path.name}")
        case "google" | "azure":
            return open_storage(f"{request.getfixturevalue(request.param)}/{tmp_path.name}")
        case _:
            return FaultyStorage(MemoryStorage())


def test_an_object_is_the_concatenation_of_its_parts(storage: Storage) -> None:
    storage.put("a/b", [b"one", bytearray(b"two"), memoryview(b"three")])
    assert storage.get("a/b") == b"onetwothree"


def test_an_object_may_be_empty(storage: Storage) -> None:
    storage.put("a", [])
    storage.put("b", [b""])
    assert (storage.get("a"), storage.get("b")) == (b"", b"")


def test_put_replaces(storage: Storage) -> None:
    storage.put("a", [b"a longer content"])
    storage.put("a", [b"new"])
    assert storage.get("a") == b"new"


def test_put_if_absent_refuses_a_taken_path_and_keeps_its_content(storage: Storage) -> None:
    storage.put_if_absent("x/y", [b"first"])
    with pytest.raises(AlreadyExists) as caught:
        storage.put_if_absent("x/y", [b"second"])
    assert caught.value.path == "x/y"
    assert storage.get("x/y") == b"first"


def test_one_of_many_concurrent_creators_wins(storage: Storage) -> None:
    winners: list[bytes] = []
    start = threading.Barrier(6)

    def create(me: bytes) -> None:
        start.wait()
        try:
            storage.put_if_absent("claim/1", [me])
        except AlreadyExists:
            return
        winners.append(me)

    threads = [threading.Thread(target=create, args=(b"%d" % i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners == [storage.get("claim/1")]


def test_a_missing_object_is_not_found(storage: Storage) -> None:
    storage.put("dir/a", [b"1"])
    for path in ("nothing", "no/thing", "dir"):
        with pytest.raises(NotFound):
            storage.get(path)
        with pytest.raises(NotFound):
            storage.get_range(path, 0, 1)


def test_a_range_is_shorter_at_the_end(storage: Storage) -> None:
    storage.put("a", [b"0123456789"])
    assert storage.get_range("a", 3, 4) == b"3456"
    assert storage.get_range("a", 8, 100) == b"89"
    assert storage.get_range("a", 10, 1) == b""
    assert storage.get_range("a", 99, 1) == b""
    assert storage.get_range("a", 2, 0) == b""


def test_list_is_recursive_sorted_and_of_whole_directories(storage: Storage) -> None:
    for path in ("b/2", "b/1", "b/deep/3", "bb/4", "a"):
        storage.put(path, [b"x"])
    assert storage.list("b") == ["b/1", "b/2", "b/deep/3"]
    assert storage.list("b/") == storage.list("b")
    assert storage.list("") == ["a", "b/1", "b/2", "b/deep/3", "bb/4"]
    assert storage.list("nowhere/deep") == []


def test_odd_but_legal_names_come_back_as_they_were(storage: Storage) -> None:
    names = ["d/x y", "d/é", "d/a=b", "d/100%", "d/a+b", "d/..a", "d/a#b"]
    for name in names:
        storage.put(name, [name.encode()])
    assert storage.list("d") == sorted(names)
    assert [storage.get(name) for name in names] == [name.encode() for name in names]


def test_delete_of_present_and_missing_objects(storage: Storage) -> None:
    storage.put("d/a", [b"1"])
    storage.delete("d/a")
    storage.delete("d/a")
    storage.delete("never/was")
    assert storage.list("") == []
    storage.put("d/a", [b"again"])
    assert storage.get("d/a") == b"again"


def test_rename_moves(storage: Storage) -> None:
    storage.put("from/a", [b"1"])
    storage.rename_if_absent("from/a", "to/deep/b")
    assert storage.list("") == ["to/deep/b"]
    assert storage.get("to/deep/b") == b"1"


def test_rename_refuses_a_taken_target_and_leaves_the_source(storage: Storage) -> None:
    storage.put("a", [b"1"])
    storage.put("b", [b"2"])
    with pytest.raises(AlreadyExists):
        storage.rename_if_absent("a", "b")
    assert (storage.get("a"), storage.get("b")) == (b"1", b"2")


def test_rename_of_nothing_is_not_found(storage: Storage) -> None:
    storage.put("b", [b"2"])
    with pytest.raises(NotFound):
        storage.rename_if_absent("a", "b")
    with pytest.raises(NotFound):
        storage.rename_if_absent("a", "c")


def test_unusable_paths_are_refused(storage: Storage) -> None:
    for path in ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\\b", "a\0", TEMP_PREFIX + "1"]:
        with pytest.raises(UsageError, match="not usable"):
            storage.put(path, [b"1"])
        with pytest.raises(UsageError, match="not usable"):
            storage.get(path)


def test_handles_on_one_url_see_the_same_objects(tmp_path: Path) -> None:
    for url in (str(tmp_path / "a"), f"file://{tmp_path}/b%20c", "memory://shared", f"obstore+file://{tmp_path}/d"):
        open_storage(url).put("x", [b"1"])
        assert open_storage(url).get("x") == b"1"
    assert (tmp_path / "b c" / "x").read_bytes() == b"1"
    forget_memory_storage("shared")


def test_object_store_schemes_open_without_a_network() -> None:
    assert isinstance(open_storage("s3://bucket/prefix"), ObjectStorage)
    assert open_storage("gs://bucket").url == "gs://bucket"


@pytest.mark.parametrize("url", ["", "ftp://host/x", "file://host/x"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_storage(url)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be created"):
        LocalStorage(tmp_path / "file" / "x")


def test_a_leftover_of_a_crashed_write_is_neither_listed_nor_in_the_way(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("d/a", [b"1"])
    (tmp_path / "d" / (TEMP_PREFIX + "77-crash")).write_bytes(b"half")
    assert storage.list("") == ["d/a"]
    assert storage.sweep_unfinished() == 1
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["a"]


def test_a_storage_with_faults_sweeps_what_its_inner_one_left(tmp_path: Path) -> None:
    inner = LocalStorage(tmp_path)
    inner.put("d/a", [b"1"])
    (tmp_path / "d" / (TEMP_PREFIX + "77-crash")).write_bytes(b"half")
    storage = FaultyStorage(inner, [Fault(FaultKind.IO_ERROR, operation="sweep_unfinished")])
    with pytest.raises(StorageError):
        storage.sweep_unfinished("d")
    assert storage.sweep_unfinished("d") == 1
    assert storage.sweep_unfinished() == 0


def test_a_sweep_removes_nothing_that_is_listed(storage: Storage) -> None:
    storage.put("d/a", [b"1"])
    storage.put("d/e/b", [b"2"])
    assert storage.sweep_unfinished("d") == 0
    assert storage.sweep_unfinished("nowhere") == 0
    assert storage.list("") == ["d/a", "d/e/b"]


def test_data_is_synced_before_its_name_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("first", [b"1"])  # syncs the path of the directory, too
    steps: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def spy(name: str) -> None:
        def call(*args: object) -> object:
            is_directory = name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
            steps.append("fsync directory" if is_directory else name)
            return real[name](*args)

        monkeypatch.setattr(os, name, call)

    for name in real:
        spy(name)
    storage.put("a", [b"1"])
    assert steps == ["fsync", "replace", "fsync directory"]
    steps.clear()
    storage.put_if_absent("b", [b"1"])
    assert steps == ["fsync", "link", "fsync directory"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_or_broken_disk_is_a_transient_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    storage = LocalStorage(tmp_path)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, call, fail)
        with pytest.raises(StorageError) as caught:
            storage.put_if_absent("a", [b"1"])
    assert caught.value.is_transient
    assert os.strerror(code) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    storage.put_if_absent("a", [b"1"])  # no repair needed


def test_lack_of_rights_is_a_permanent_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)

    def fail(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StorageError) as caught:
        storage.put("a", [b"1"])
    assert not caught.value.is_transient


def test_a_rename_interrupted_between_link_and_unlink_can_be_repeated(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", [b"1"])
    os.link(tmp_path / "a", tmp_path / "b")
    storage.rename_if_absent("a", "b")
    assert storage.list("") == ["b"]


def test_a_rename_of_an_object_store_that_was_cut_leaves_both_names_and_is_finished_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = open_storage("obstore+memory:///")
    storage.put("a", [b"1"])

    def cannot(*_: object, **__: object) -> None:
        raise NotImplementedError

    def dies(*_: object) -> None:
        raise OSError(errno.EIO, "the process died here")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "rename", cannot)
        patch.setattr(obstore, "delete", dies)
        with pytest.raises(StorageError):
            storage.rename_if_absent("a", "b")
        assert storage.list("") == ["a", "b"]
        with pytest.raises(AlreadyExists):
            storage.rename_if_absent("a", "b")
    assert storage.get("b") == b"1"


def test_faults_hit_the_operations_they_name() -> None:
    inner = MemoryStorage()
    waits: list[float] = []
    storage = FaultyStorage(
        inner,
        [
            Fault(FaultKind.NO_SPACE, "put", path_part="log/", first=2, times=2),
            Fault(FaultKind.SLOW, "get", delay_ms=250),
        ],
        wait=waits.append,
    )
    storage.put("log/1", [b"1"])
    storage.put("other", [b"1"])
    for _ in range(2):
        with pytest.raises(StorageError, match="No space"):
            storage.put("log/2", [b"2"])
    storage.put("log/2", [b"2"])
    storage.get("other")
    storage.get("other")
    assert waits == [0.25]
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "delete"))
    with pytest.raises(StorageError):
        storage.delete("other")
    assert inner.list("") == ["log/1", "log/2"]
    storage.inject(Fault(FaultKind.TORN, "put"))
    with pytest.raises(StorageError):
        storage.put("torn", [b"12", b"34"])
    assert inner.get("torn") == b"12"
    storage.inject(Fault(FaultKind.IO_ERROR, times=9))
    storage.heal()
    storage.list("")


def test_an_object_store_gets_each_object_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload in parts that is aborted leaves parts that nobody sees and somebody pays for."""
    seen: list[object] = []
    real = obstore.put

    def put(*args: Any, **options: Any) -> Any:
        seen.append(options.get("use_multipart"))
        return real(*args, **options)

    monkeypatch.setattr(obstore, "put", put)
    storage = open_storage("obstore+memory:///")
    storage.put("a", [bytes(6 << 20)])
    storage.put_if_absent("b", [bytes(6 << 20)])
    assert seen == [False, False]
    assert len(storage.get("a")) == 6 << 20


def test_a_part_of_an_object_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("obstore+memory:///")
    storage.put("a", [b"0123456789"])
    asked: list[str] = []
    for name in ("head", "get_range"):
        usual = getattr(obstore, name)
        monkeypatch.setattr(
            obstore, name, lambda *a, _name=name, _usual=usual, **k: asked.append(_name) or _usual(*a, **k)
        )
    assert [storage.get_range("a", offset, 4) for offset in (0, 8)] == [b"0123", b"89"]
    assert asked == ["get_range"] * 2
    assert storage.get_range("a", 10, 4) == b""
    assert asked[2:] == ["get_range", "head"]


def test_a_storage_says_whether_its_requests_travel(tmp_path: Path) -> None:
    assert [open_storage(url).is_afar for url in (str(tmp_path), "memory://x", "obstore+memory:///")] == [
        False,
        False,
        True,
    ]
    assert FaultyStorage(open_storage("obstore+memory:///")).is_afar


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:very-secret@bucket/checkpoints",
        "obstore+s3://key:very-secret@bucket/a",
        "s3://key%3Avery-secret@bucket/a",
        "s3://bucket/checkpoints?secret=very-secret",
        "https://account.blob.core.windows.net/c?sv=1&sig=very-secret",
        "s3://bucket/a?aws_secret_access_key=very-secret#x",
        "gs://bucket/a?X-Goog-Signature=very-secret",
    ],
)
def test_a_url_with_a_secret_is_refused_wherever_it_is_given_and_not_shown(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[Callable[[], object]] = [
        lambda: open_storage(url),
        lambda: absolute_location(url),
        lambda: hg.FileSink(url),
        lambda: hg.ParquetFiles(url),
    ]
    for give in given:
        with pytest.raises(UsageError, match="has a password or key in it") as caught:
            give()
        assert "very-secret" not in str(caught.value)
    for command in (["savepoints", "list", url], ["state", "show", url], ["stop", "p", "--dir", url]):
        found = CliRunner().invoke(app, command)
        assert found.exit_code != 0
        assert "has a password or key in it" in f"{found.output} {found.exception}"
        assert "very-secret" not in f"{found.output} {found.exception}"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://bucket/a/../b", "must not be empty, '.' or '..'"),
        ("s3://bucket/..", "must not be empty, '.' or '..'"),
        ("gs://bucket/./a", "must not be empty, '.' or '..'"),
        ("s3://bucket//a", "must not be empty, '.' or '..'"),
        ("az://bucket/a//", "must not be empty, '.' or '..'"),
        ("s3://bucket:9000/a", "the address of a server belongs into the environment"),
        ("s3://user@bucket/a", "'user@bucket' is no name of a bucket"),
        ("s3:/bucket/a", "write s3://bucket/path"),
        (str(Path("s3://bucket/a")), "write s3://bucket/path"),
        ("s3:///a", "write s3://bucket/path"),
        ("s3://bucket/a\nb", "'s3://bucket/a\\nb' is not usable: it has control characters"),
    ],
)
def test_a_url_that_a_store_would_take_for_another_place_is_refused_wherever_it_is_given(
    url: str, problem: str
) -> None:
    given: list[Callable[[], object]] = [
        lambda: open_storage(url),
        lambda: absolute_location(url),
        lambda: hg.JsonLines(url, {"n": int}),
    ]
    for give in given:
        with pytest.raises(UsageError) as caught:
            give()
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a b+c%20#/",
        "s3://b/",
        "/a/b:c@d",
        "a?secret=1",
        "abfss://container@account.dfs.core.windows.net/a",
        "s3://b/k",
    ],
)
def test_a_url_or_path_without_a_secret_is_taken(url: str) -> None:
    assert absolute_location(url).endswith(url)
