"""What is particular to HDFS: lost answers, leftovers, servers that do not answer, rights, forks, URLs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.hdfs import HdfsCluster
from tests.servers.proxy import Wire
from typer.testing import CliRunner

from headgate.cli.app import app
from headgate.errors import StorageError, UsageError
from headgate.storage import hdfs
from headgate.storage.base import TEMP_PREFIX, AlreadyExists, NotFound
from headgate.storage.hdfs import HdfsStorage
from headgate.storage.urls import absolute_location, is_missing, open_storage

pytestmark = pytest.mark.xdist_group("hdfs")


@pytest.fixture
def cluster(hdfs: HdfsCluster) -> HdfsCluster:
    return hdfs


@pytest.fixture
def url(cluster: HdfsCluster, tmp_path: Path) -> str:
    return f"{cluster.url}/{tmp_path.name}"


@pytest.fixture
def storage(url: str) -> HdfsStorage:
    return HdfsStorage(url)


@pytest.fixture
def wire(cluster: HdfsCluster) -> Iterator[Wire]:
    made = Wire(cluster.port)
    yield made
    made.close()


def everything(cluster: HdfsCluster, directory: str) -> list[str]:
    """Return the names of all files, temporary ones, too."""
    from hdfs_native import Client

    found = Client(cluster.url).list_status(f"/{directory}", recursive=True)
    return sorted(status.path.removeprefix(f"/{directory}/") for status in found if not status.isdir)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_put_with_a_lost_answer_to_its_rename_is_known_as_ones_own(
    cluster: HdfsCluster, wire: Wire, tmp_path: Path, is_given: bool
) -> None:
    storage = HdfsStorage(f"hdfs://127.0.0.1:{wire.port}/{tmp_path.name}")
    assert storage.list("") == []
    wire.lose_answer(b"rename2", is_given=is_given)
    storage.put_if_absent("a", [b"the same"])
    assert wire.lost_count == 1
    with pytest.raises(AlreadyExists):  # the same bytes of another writer are another's
        storage.put_if_absent("a", [b"the same"])
    assert storage.get("a") == b"the same"
    assert everything(cluster, tmp_path.name) == ["a"]


@pytest.mark.parametrize("question", [b"\x06create", b"\x08complete"])
def test_a_put_with_a_lost_answer_before_its_rename_shows_nothing_and_is_repeated(
    wire: Wire, tmp_path: Path, question: bytes
) -> None:
    storage = HdfsStorage(f"hdfs://127.0.0.1:{wire.port}/{tmp_path.name}")
    storage.put("b", [b"1"])
    wire.lose_answer(question, is_given=True)
    with pytest.raises(StorageError) as caught:
        storage.put_if_absent("a", [b"1"])
    assert caught.value.is_transient
    assert wire.lost_count == 1
    assert storage.list("") == ["b"]  # the temporary file may be left for the next sweep
    storage.put_if_absent("a", [b"1"])
    assert storage.list("") == ["a", "b"]


def test_a_replacement_and_a_rename_with_lost_answers_take_effect(wire: Wire, tmp_path: Path) -> None:
    storage = HdfsStorage(f"hdfs://127.0.0.1:{wire.port}/{tmp_path.name}")
    storage.put("a", [b"old"])
    wire.lose_answer(b"rename2", is_given=True)
    storage.put("a", [b"new"])
    wire.lose_answer(b"rename2", is_given=True)
    storage.rename_if_absent("a", "b")
    assert wire.lost_count == 2
    assert (storage.list(""), storage.get("b")) == (["b"], b"new")


def test_a_temporary_file_that_was_taken_away_is_an_error_and_not_a_put(
    storage: HdfsStorage, cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hdfs_native import Client

    def taken(_: str) -> None:
        for name in everything(cluster, tmp_path.name):
            Client(cluster.url).delete(f"/{tmp_path.name}/{name}")

    monkeypatch.setattr(hdfs.fault_points, "reach", taken)
    for put in (storage.put, storage.put_if_absent):
        with pytest.raises(StorageError) as caught:
            put("a", [b"1"])
        assert caught.value.is_transient
    assert storage.list("") == []


LEFT = """
import os, signal, sys
from hdfs_native import Client
file = Client(sys.argv[1]).create(sys.argv[2])
file.write(b"half")
file.hsync()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_swept_when_it_is_old_and_is_in_no_way(
    storage: HdfsStorage, cluster: HdfsCluster, tmp_path: Path
) -> None:
    from hdfs_native import Client

    storage.put("d/a", [b"1"])
    names = [f"d/{TEMP_PREFIX}{number}" for number in range(2)]
    for name in names:
        subprocess.run([sys.executable, "-c", LEFT, cluster.url, f"/{tmp_path.name}/{name}"], check=False, timeout=120)
    assert everything(cluster, tmp_path.name) == sorted([*names, "d/a"])
    assert storage.list("") == ["d/a"]
    assert storage.sweep_unfinished() == 0
    client = Client(cluster.url)
    now = client.get_file_info(f"/{tmp_path.name}/{names[1]}").modification_time
    client.set_times(f"/{tmp_path.name}/{names[0]}", now - 2 * hdfs.UNFINISHED_MS, now)
    assert storage.sweep_unfinished("elsewhere") == 0
    assert storage.sweep_unfinished("d") == 1
    assert everything(cluster, tmp_path.name) == sorted([names[1], "d/a"])


def test_a_name_node_that_does_not_answer_is_given_up_and_asked_again(
    storage: HdfsStorage, cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a", [b"1"])
    cluster.pause("name_node")
    try:
        monkeypatch.setattr(hdfs, "RPC_S", 1.0)
        for call in (storage.list, storage.get, storage.delete):
            with pytest.raises(StorageError, match="no answer within 1 s") as caught:
                call("b")
            assert caught.value.is_transient
    finally:
        cluster.resume("name_node")
    monkeypatch.undo()
    assert storage.get("a") == b"1"


def test_lack_of_rights_is_permanent_and_told_in_a_line(cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "guest")
    guest = HdfsStorage(f"{cluster.url}/not-yours")
    with pytest.raises(StorageError, match="Permission denied: user=guest, access=WRITE") as caught:
        guest.put("a", [b"1"])
    assert not caught.value.is_transient
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_object_and_its_name_is_taken(storage: HdfsStorage) -> None:
    storage.put("d/a", [b"1"])
    with pytest.raises(AlreadyExists):
        storage.put_if_absent("d", [b"2"])
    with pytest.raises(StorageError):
        storage.put("d", [b"2"])
    with pytest.raises(NotFound):
        storage.get("d/a/b")
    storage.delete("d")
    with pytest.raises(NotFound):
        storage.rename_if_absent("d", "e")
    assert (storage.list(""), storage.list("d/a")) == (["d/a"], [])


def test_directories_that_became_empty_are_removed_up_to_the_root(storage: HdfsStorage, cluster: HdfsCluster) -> None:
    from hdfs_native import Client

    storage.put("d/e/a", [b"1"])
    storage.put("b", [b"1"])
    storage.delete("d/e/a")
    top = storage.url.removeprefix(cluster.url)
    assert [status.path for status in Client(cluster.url).list_status(top)] == [f"{top}/b"]
    storage.delete("b")
    assert Client(cluster.url).get_file_info(top).isdir


def test_large_objects_come_back_whole_and_in_parts(storage: HdfsStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "PART_BYTES", 100_000)
    content = bytes(range(250)) * 4_001
    storage.put("a", [memoryview(content)[:7], bytearray(content[7:])])
    assert storage.get("a") == content
    assert storage.get_range("a", 99_999, 300_002) == content[99_999:400_001]


FORK = """
import os, sys
from headgate.errors import StorageError
from headgate.storage.urls import open_storage
storage = open_storage(sys.argv[1])
storage.put("parent", [b"1"])
storage.get("parent")
child = os.fork()
if child == 0:
    problems = 0
    for used in (storage, open_storage(sys.argv[1])):
        try:
            used.get("parent")
        except StorageError as error:
            problems += "forked" in str(error) and not error.is_transient
    os._exit(40 + problems)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert storage.get("parent") == b"1"
"""


def test_a_forked_process_is_refused_and_does_not_hang(url: str) -> None:
    subprocess.run([sys.executable, "-c", FORK, url], check=True, timeout=240)


def test_looking_makes_no_directory(cluster: HdfsCluster) -> None:
    from hdfs_native import Client

    nowhere = f"{cluster.url}/nowhere"
    assert not is_missing(nowhere)
    assert open_storage(nowhere).list("") == []
    for command in (
        ["checkpoints", "list", "p", "--dir", nowhere],
        ["savepoints", "list", nowhere],
        ["state", "show", f"{nowhere}/p"],
        ["status", "p", "--dir", nowhere],
    ):
        CliRunner().invoke(app, command)
    assert "/nowhere" not in [status.path for status in Client(cluster.url).list_status("/")]


def test_hadoops_configuration_names_the_file_system(
    cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(cluster.configuration))
    for url in (f"hdfs:/{tmp_path.name}", f"hdfs:///{tmp_path.name}/", f"HDFS:///{tmp_path.name}"):
        assert absolute_location(url).lower().startswith("hdfs:///")
        open_storage(url).put("a", [b"1"])
        assert HdfsStorage(f"{cluster.url}/{tmp_path.name}").list("") == ["a"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("hdfs:///x", "HADOOP_CONF_DIR"),
        ("hdfs:/x", "HADOOP_CONF_DIR"),
        ("hdfs://nameservice/x", "HADOOP_CONF_DIR"),
        ("viewfs://nowhere/x", "HADOOP_CONF_DIR"),
        ("hdfs://guest@127.0.0.1:8020/x", "HADOOP_USER_NAME"),
        ("hdfs://guest:very-secret@127.0.0.1:8020/x", "has a password"),
        ("hdfs://127.0.0.1:8020/a:b", "no paths with ':'"),
        ("hdfs://127.0.0.1:8020/a/../b", "no paths with"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match=problem) as caught:
        open_storage(url)
    assert "very-secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_hdfs_does_not_have_are_refused(storage: HdfsStorage) -> None:
    with pytest.raises(UsageError, match="no names with ':'"):
        storage.put("hour=10:00/a", [b"1"])
