"""Files of a sink that are uploads in parts until their commit, on real servers of the S3 protocol.

Rule D17 of docs/spec/connectors.md.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv
import pytest
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.processes import START_S
from tests.servers.proxy import Wire

from headgate.connectors.base import SinkContext
from headgate.connectors.files import file_writer
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.connectors.files.file_sink import FileSink
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.base import PART_BYTES_MIN, Uploads
from headgate.storage.object_store import ObjectStorage
from headgate.storage.urls import open_storage

pytest.importorskip("botocore", reason="botocore is not installed (pip install -e '.[dev]')")

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
PERMIT = CommitPermit(CheckpointId(1), Generation(1))


@pytest.fixture(scope="module", params=["versitygw", pytest.param("moto_server", marks=pytest.mark.deep)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects"), only=request.param) as started:
        yield started


@pytest.fixture
def url(server: ObjectServer) -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(8)}/out"


def uploads_at(url: str) -> Uploads:
    uploads = open_storage(url).uploads
    assert uploads is not None
    return uploads


def table(first: int, rows: int, size: int = 3) -> pa.RecordBatch:
    return pa.record_batch([list(range(first, first + rows)), ["é" * size] * rows], schema=SCHEMA)


def prepared(sink: FileSink, *batches: pa.RecordBatch, checkpoint: int = 1, generation: int = 1) -> Committable:
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(generation), batches[0].schema))
    for batch in batches:
        writer.write(batch)
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    return Committable("out", CheckpointId(checkpoint), 0, Generation(generation), payload)


def committer(sink: FileSink, generation: int = 1, *keep: Committable) -> Any:
    opened = sink.open_committer("p", "out", Generation(generation))
    opened.recover(keep)
    return opened


def numbers(url: str) -> list[int]:
    listed = [path for path in open_storage(url).list("") if not path.startswith("_")]
    assert listed == committed_files(url)
    return sorted(read_committed(url).get_column("n").to_list()) if listed else []


def sink_at(url: str, **options: Any) -> FileSink:
    return FileSink(url, options.pop("format", "jsonl"), roll_interval=0, **options)


def test_a_file_is_an_upload_until_its_commit_which_moves_no_bytes(
    server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(url)
    committing = committer(sink)
    output = prepared(sink, table(0, 10, 500_000))
    storage = open_storage(url)
    assert [path for path in storage.list("") if not path.startswith("_claims")] == []
    ((name, _),) = uploads_at(url).list("")
    assert name.startswith("part-p.out-0000000001-")
    wire = Wire(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    through = sink.open_committer("p", "out", Generation(1))
    monkeypatch.undo()
    through.commit(PERMIT, [output])
    assert wire.asked_bytes < 50_000
    wire.close()
    assert numbers(url) == list(range(10))
    assert uploads_at(url).list("") == []
    committing.commit(PERMIT, [output])
    committer(sink, 2, output).commit(CommitPermit(CheckpointId(1), Generation(2)), [output])
    assert numbers(url) == list(range(10))
    assert storage.list("_staging") == []


@pytest.mark.parametrize("file_format", ["jsonl", "csv", "parquet"])
def test_a_large_file_is_encoded_and_uploaded_piece_by_piece(
    url: str, file_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "ENCODED_BYTES", 1 << 20)
    monkeypatch.setattr(file_writer, "PART_BYTES", PART_BYTES_MIN)
    sink = sink_at(url, format=file_format, buffer_bytes=1 << 20)
    committing = committer(sink)
    batches = [
        pa.record_batch([[number], [secrets.token_hex(400_000)]], schema=SCHEMA) for number in range(30)
    ]  # no codec makes them small
    output = prepared(sink, *batches)
    committing.commit(PERMIT, [output])
    (name,) = committed_files(url)
    data = open_storage(url).get(name)
    assert len(data) > 2 * PART_BYTES_MIN
    expected = pa.Table.from_batches(batches)
    if file_format == "csv":
        found = pyarrow.csv.read_csv(io.BytesIO(data))
    elif file_format == "jsonl":
        found = pl.read_ndjson(data).to_arrow().cast(SCHEMA)
    else:
        found = pl.read_parquet(data).to_arrow().cast(SCHEMA)
    assert found.to_pylist() == expected.to_pylist()


def test_columns_that_change_and_partitions_are_files_of_their_own(url: str) -> None:
    sink = sink_at(url, partition_by="text", format="parquet")
    committing = committer(sink)
    rows = pa.record_batch([[1, 2, 3], ["a b", "ü", None]], schema=SCHEMA)
    committing.commit(PERMIT, [prepared(sink, rows, rows)])
    assert numbers(url) == [1, 1, 2, 2, 3, 3]
    assert sorted(name.partition("/")[0] for name in committed_files(url)) == [
        "text=__HIVE_DEFAULT_PARTITION__", "text=a b", "text=ü",
    ]  # fmt: skip


@pytest.mark.parametrize("is_given", [True, False])
def test_a_commit_with_a_lost_answer_is_repeated_by_another_process(
    server: ObjectServer, url: str, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(url)
    committer(sink)
    outputs = [prepared(sink, table(0, 2)), prepared(sink, table(2, 2), checkpoint=2)]
    wire = Wire(server.port)
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
        patched.setattr("headgate.storage.multipart.TRIES_MAX", 1)
        cut = sink.open_committer("p", "out", Generation(1))
    wire.lose_answer(b"?uploadId=", is_given=is_given)
    permit = CommitPermit(CheckpointId(2), Generation(1))
    with pytest.raises(StorageError):
        cut.commit(permit, outputs)
    assert wire.lost_count == 1
    wire.close()
    for generation in (2, 3):
        committer(sink, generation, *outputs).commit(CommitPermit(CheckpointId(2), Generation(generation)), outputs)
        assert numbers(url) == [0, 1, 2, 3]
    assert uploads_at(url).list("") == []
    assert open_storage(url).list("_publishing") == []


def test_uploads_of_dead_attempts_are_aborted_and_no_others(url: str) -> None:
    sink = sink_at(url)
    committer(sink)
    kept, dropped = prepared(sink, table(0, 1)), prepared(sink, table(1, 1), checkpoint=2)
    newer = prepared(sink, table(2, 1), checkpoint=3, generation=9)
    of_another_sink = FileSink(url, roll_interval=0).open(SinkContext("p", "out2", 0, 1, Generation(1), SCHEMA))
    of_another_sink.write(table(3, 1))
    of_another_sink.seal(CheckpointId(1)).prepare()
    foreign = uploads_at(url).begin("part-of-somebody.jsonl")
    before = dict(uploads_at(url).list(""))
    assert len(before) == 5
    committer(sink, 2, kept)
    left = {name for name, _ in uploads_at(url).list("")}
    assert before.keys() - left == {"part-p.out-0000000002-00000-0000000001-00000.jsonl"}, dropped
    assert newer is not None
    committer(sink, 2, kept).commit(CommitPermit(CheckpointId(1), Generation(2)), [kept])
    assert numbers(url) == [0]
    uploads_at(url).abort("part-of-somebody.jsonl", foreign.id)


@pytest.mark.parametrize("below", ["test", "stage=test", "stage=test/deep"])
def test_a_sink_of_the_same_name_in_a_place_below_keeps_its_uploads(url: str, below: str) -> None:
    """The same program runs for trial in a directory of its own."""
    sink, trial = sink_at(url, partition_by="text"), sink_at(f"{url}/{below}")
    committing = committer(trial)
    output = prepared(trial, table(0, 1))
    committer(sink)
    prepared(sink, table(7, 1))
    committer(sink, 2)
    assert [path for path, _ in uploads_at(url).list("") if not path.startswith(below)] == []
    committing.commit(PERMIT, [output])
    assert numbers(f"{url}/{below}") == [0]


def test_a_store_that_lists_uploads_of_one_name_only_completes_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MinIO does."""
    sink = sink_at(url)
    committing = committer(sink)
    outputs = [prepared(sink, table(0, 1)), prepared(sink, table(1, 1), checkpoint=2)]
    monkeypatch.setattr(type(uploads_at(url)), "list", lambda *_: [])
    assert [committing.denial(output) for output in outputs] == ["", ""]
    for generation in (1, 2):
        permit = CommitPermit(CheckpointId(2), Generation(generation))
        committer(sink, generation, *outputs).commit(permit, outputs)
        assert numbers(url) == [0, 1]
    assert committing.denial(outputs[0]) == ""


@pytest.mark.parametrize("is_begun", [False, True], ids=["before the commit", "in a commit that was cut short"])
def test_an_upload_that_a_rule_of_the_bucket_removed_stops_the_pipeline(
    server: ObjectServer, url: str, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_begun and not server.keeps:
        pytest.skip("moto has an internal error where an upload is gone")
    sink = sink_at(url)
    committing = committer(sink)
    output = prepared(sink, table(0, 1))
    if is_begun:
        uploads = type(uploads_at(url))

        def fail(*_: object) -> None:
            raise StorageError("complete", "x", "the store is away")

        with monkeypatch.context() as patched:
            patched.setattr(uploads, "complete", fail)
            with pytest.raises(StorageError, match="is away"):
                committing.commit(PERMIT, [output])
    for name, upload in uploads_at(url).list(""):
        uploads_at(url).abort(name, upload)
    for generation in (1, 2):
        with pytest.raises(CorruptionError, match="neither it nor its staged form") as caught:
            committer(sink, generation, output).commit(CommitPermit(CheckpointId(1), Generation(generation)), [output])
        assert caught.value.is_output_gone
    assert numbers(url) == []


def test_a_store_that_says_yes_before_the_file_is_there_is_not_believed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versitygw does when it was killed while it completed the upload."""
    sink = sink_at(url)
    committing = committer(sink)
    output = prepared(sink, table(0, 1))
    with monkeypatch.context() as patched:
        patched.setattr(type(uploads_at(url)), "complete", lambda *_: None)
        with pytest.raises(StorageError, match="complete the upload of") as caught:
            committing.commit(PERMIT, [output])
        assert caught.value.is_transient
    assert numbers(url) == []
    committing.commit(PERMIT, [output])
    assert numbers(url) == [0]


def test_a_foreign_file_under_the_name_stops_the_pipeline_and_nothing_is_lost(url: str) -> None:
    sink = sink_at(url)
    committing = committer(sink)
    output = prepared(sink, table(0, 1))
    ((name, _),) = uploads_at(url).list("")
    open_storage(url).put(name, [b"of another"])
    with pytest.raises(CorruptionError):
        committing.commit(PERMIT, [output])
    open_storage(url).delete(name)
    committing.commit(PERMIT, [output])
    assert numbers(url) == [0]


def without_manifest(sink: FileSink, output: Committable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit, but for the manifest, as a process that is killed in front of it."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("headgate.connectors.files.publish_log.Ledger.add", die)
        with pytest.raises(KeyboardInterrupt):
            committer(sink, 1, output).commit(PERMIT, [output])


def test_what_a_given_up_commit_published_is_taken_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sink_at(url)
    committer(sink)
    without_manifest(sink, prepared(sink, table(0, 1)), monkeypatch)
    committer(sink, 2)
    assert open_storage(url).list("_staging") == open_storage(url).list("_publishing") == []
    assert uploads_at(url).list("") == []
    assert numbers(url) == []


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_recovery_that_was_cut_short_takes_nothing_from_a_later_one(
    server: ObjectServer, url: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint is restored, and dies; then the newer one is."""
    if is_cut and not server.keeps:
        pytest.skip("moto has an internal error where an upload is gone")
    sink = sink_at(url)
    committer(sink)
    output = prepared(sink, table(0, 1))
    without_manifest(sink, output, monkeypatch)
    if is_cut:
        with monkeypatch.context() as patched:

            def die(*_: object) -> None:
                raise KeyboardInterrupt

            patched.setattr("headgate.connectors.files.publish_log.Ledger.withdraw", die)
            with pytest.raises(KeyboardInterrupt):
                committer(sink, 2)
        assert [name for name in open_storage(url).list("") if not name.startswith("_")] == []
    for generation in (3, 4):
        committer(sink, generation, output).commit(CommitPermit(CheckpointId(1), Generation(generation)), [output])
        assert numbers(url) == [0]
    assert open_storage(url).list("_staging") == []


def test_prepare_that_failed_is_repeated_and_leaves_no_upload(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sink_at(url)
    committing = committer(sink)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    writer.write(table(0, 3))
    sealed = writer.seal(CheckpointId(1))
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise StorageError("put", "x", "no network")

        patched.setattr(type(uploads_at(url)), "put_part", fail)
        with pytest.raises(StorageError, match="no network"):
            sealed.prepare()
    assert uploads_at(url).list("") == []
    payload = sealed.prepare()
    assert payload is not None
    assert payload == sealed.prepare()
    committing.commit(PERMIT, [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
    assert numbers(url) == [0, 1, 2]
    assert uploads_at(url).list("") == []


def big(number: int) -> pa.RecordBatch:
    return pa.record_batch([[number], [secrets.token_hex(400_000)]], schema=SCHEMA)


def flowing(sink: FileSink) -> Any:
    """Return a writer whose first checkpoint has been."""
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    assert writer.seal(CheckpointId(3)).prepare() is None
    return writer


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("fails", [False, True], ids=["", "no network at first"])
def test_files_are_uploaded_while_records_flow(url: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "PART_BYTES", PART_BYTES_MIN)
    sink = sink_at(url, buffer_bytes=1 << 20, file_bytes=10 << 20)
    committing = committer(sink)
    writer = flowing(sink)
    kind, called = type(uploads_at(url)), threading.Event()
    put_part = kind.put_part

    def put(*given: Any) -> str:
        called.set()
        if fails:
            raise StorageError("put", "x", "no network")
        return put_part(*given)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "put_part", put)
        for number in range(20):
            writer.write(big(number))
        until(called.is_set)
        if fails:
            until(lambda: uploads_at(url).list("") == [])
        sealed = writer.seal(CheckpointId(7))
    for number in range(20, 25):
        writer.write(big(number))  # of the next checkpoint
    payload = sealed.prepare()
    assert payload is not None
    output = Committable("out", CheckpointId(7), 0, Generation(1), payload)
    committing.commit(CommitPermit(CheckpointId(7), Generation(1)), [output])
    assert numbers(url) == list(range(20))
    assert {name.split("-")[2] for name in committed_files(url)} == {"0000000004"}, "after the checkpoint before it"
    payload = writer.seal(CheckpointId(8)).prepare()
    assert payload is not None
    output = Committable("out", CheckpointId(8), 0, Generation(1), payload)
    committing.commit(CommitPermit(CheckpointId(8), Generation(1)), [output])
    assert numbers(url) == list(range(25))
    assert len(set(committed_files(url))) > 2
    assert uploads_at(url).list("") == []


def test_a_writer_that_is_closed_aborts_what_it_had_begun_to_upload(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "PART_BYTES", PART_BYTES_MIN)
    sink = sink_at(url, buffer_bytes=1 << 20, file_bytes=64 << 20)
    committer(sink)
    writer = flowing(sink)
    for number in range(10):
        writer.write(big(number))
    until(lambda: bool(uploads_at(url).list("")))
    writer.close()
    until(lambda: uploads_at(url).list("") == [])


def test_copies_and_uploads_may_be_mixed_over_restarts(url: str) -> None:
    """The option was changed in between, with output of a checkpoint that waits for its commit."""
    copies, uploads = sink_at(url, multipart=False), sink_at(url)
    committer(copies)
    outputs = [prepared(copies, table(0, 1)), prepared(uploads, table(1, 1), checkpoint=2)]
    for generation, sink in ((2, copies), (3, uploads)):
        committer(sink, generation, *outputs).commit(CommitPermit(CheckpointId(2), Generation(generation)), outputs)
        assert numbers(url) == [0, 1]


def test_a_driver_that_cannot_complete_uploads_says_what_it_needs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sink_at(url)
    committer(sink)
    output = prepared(sink, table(0, 1))
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "uploads", None)
        with pytest.raises(UsageError, match="needs the package botocore and"):
            committer(sink, 2, output).commit(CommitPermit(CheckpointId(1), Generation(2)), [output])
    committer(sink, 3, output).commit(CommitPermit(CheckpointId(1), Generation(3)), [output])
    assert numbers(url) == [0]


def test_the_size_of_parts_is_enough_for_every_size_of_files() -> None:
    for file_bytes in (1, 64 << 20, 6 << 30, 1 << 40):
        size = file_writer.part_bytes(file_bytes)
        assert PART_BYTES_MIN <= size <= 5 << 30
        assert size * 10_000 >= 40 * file_bytes


def test_a_reset_aborts_what_was_uploaded(url: str) -> None:
    from headgate.model.pipeline_identity import PipelineIdentity

    sink = sink_at(url)
    committer(sink)
    with contextlib.suppress(KeyError):
        sink.own("p", "out", PipelineIdentity("a" * 32, "here", "host", 1))
    prepared(sink, table(0, 1))
    life = PipelineIdentity("b" * 32, "here", "host", 2)
    sink.start_over("p", "out", Generation(2), life, None)  # type: ignore[arg-type]
    assert uploads_at(url).list("") == []
