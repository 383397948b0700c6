"""The file sink in an object store and in HDFS, on real servers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.servers.hdfs import HdfsCluster
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.proxy import Wire

from headgate.connectors.base import SinkContext
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.connectors.files.file_sink import FileSink
from headgate.errors import StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.urls import open_storage
from headgate.testing import Target, check_sink
from headgate.testing.sinks.scenarios import KillPoint, check_kill

SCHEMA = pa.schema([("n", pa.int64())])
SUBTASKS = 20


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


def target(url: str, file_format: Any, *, multipart: bool = True, crash: Callable[[], None] | None = None) -> Target:
    storage = open_storage(url)

    def uploads() -> list[tuple[str, str]]:
        return [] if storage.uploads is None else storage.uploads.list("")

    def lose() -> None:
        remove(storage.list("_staging"))
        for path, upload in uploads():
            assert storage.uploads is not None
            storage.uploads.abort(path, upload)

    def published() -> list[str]:
        return [name for name in storage.list("") if not name.startswith("_")]

    def read() -> list[dict[str, Any]]:
        decode = pl.read_ndjson if file_format == "jsonl" else pl.read_parquet
        rows = [row for name in published() for row in decode(storage.get(name)).to_dicts()]
        assert set(committed_files(url)) <= set(published())
        return rows

    def remove(names: list[str]) -> None:
        for name in names:
            storage.delete(name)

    return Target(
        FileSink(url, file_format, roll_interval=0, multipart=multipart),
        read,
        lambda: storage.list("_staging") + storage.list("_publishing") + [path for path, _ in uploads()],
        lose,
        lambda: remove(published()),
        crash=crash,
    )


def fresh(root: str, **options: Any) -> Target:
    return target(f"{root}/kit-{secrets.token_hex(8)}/deep", "jsonl", **options)


IN_PARTS = pytest.mark.parametrize("multipart", [True, False], ids=["uploads", "copies"])


@pytest.mark.long
@IN_PARTS
@pytest.mark.parametrize("point", KillPoint)
def test_the_sink_survives_every_kill_point_in_an_object_store(
    objects: ObjectServer, point: KillPoint, multipart: bool
) -> None:
    check_kill(fresh(f"s3://{BUCKET}", multipart=multipart), point, 2, 1, 2, 3)


@pytest.mark.long
@pytest.mark.parametrize("point", KillPoint)
def test_the_sink_and_its_server_survive_every_kill_point(objects: ObjectServer, point: KillPoint) -> None:
    def crash() -> None:
        objects.fail()
        objects.heal()

    if not objects.keeps:
        pytest.skip("this server of objects forgets them when it ends")
    check_kill(fresh(f"s3://{BUCKET}", crash=crash), point, 2, 1, 2, 3)


@pytest.mark.deep
@IN_PARTS
def test_the_sink_passes_the_kit_in_an_object_store(objects: ObjectServer, multipart: bool) -> None:
    check_sink(lambda: fresh(f"s3://{BUCKET}", multipart=multipart), rescales=[(1, 2), (2, 1)], overlaps=[2], rows=[3])


@pytest.mark.deep
@pytest.mark.xdist_group("hdfs")
def test_the_sink_passes_the_kit_in_hdfs(hdfs: HdfsCluster) -> None:
    check_sink(lambda: fresh(hdfs.url), rescales=[(2, 1)], overlaps=[2], rows=[3])


def sealed(sink: FileSink, subtask: int, *numbers: int) -> Committable:
    writer = sink.open(SinkContext("p", "out", subtask, SUBTASKS, Generation(1), SCHEMA))
    writer.write(pa.record_batch([list(numbers)], schema=SCHEMA))
    payload = writer.seal(CheckpointId(1)).prepare()
    assert payload is not None
    return Committable("out", CheckpointId(1), subtask, Generation(1), payload)


@IN_PARTS
def test_many_files_are_published_at_once_and_a_commit_cut_short_is_repeated(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch, multipart: bool
) -> None:
    url = f"s3://{BUCKET}/many-{multipart}"
    sink = FileSink(url, roll_interval=0, multipart=multipart)
    committer = sink.open_committer("p", "out", Generation(1))
    committer.recover([])
    committables = [sealed(sink, subtask, subtask) for subtask in range(SUBTASKS)]
    assert committed_files(url) == []
    wire = Wire(objects.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    cut = sink.open_committer("p", "out", Generation(1))
    monkeypatch.undo()
    wire.lose_answer(b"?uploadId=", is_given=True)  # of what completes the upload
    for committing in (cut, committer, committer):
        with contextlib.suppress(StorageError):
            committing.commit(CommitPermit(CheckpointId(1), Generation(1)), committables)
    wire.close()
    assert wire.lost_count == 1
    assert len(committed_files(url)) == SUBTASKS
    assert sorted(read_committed(url)["n"].to_list()) == list(range(SUBTASKS))
    committer.recover([])
    assert open_storage(url).list("_staging") == []
    assert open_storage(url).list("_publishing") == []
