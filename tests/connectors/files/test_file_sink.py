"""The file sink on local files, in an object store and in HDFS."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from pyspark import cloudpickle
from tests.conftest import IS_DEEP, few
from tests.servers.hdfs import HdfsCluster
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.proxy import Wire
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.connectors.base import SinkContext
from headgate.connectors.encode import encode
from headgate.connectors.files import file_committer as file_commit
from headgate.connectors.files import file_sink
from headgate.connectors.files import publish_log as file_ledger
from headgate.connectors.files.file_committer import FileCommitter, committed_files, read_committed
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.publish_log import SinkIdentity, StagedFile, decode_files, digest, encode_files
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.base import Storage
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage
from headgate.testing import Target, check_sink
from headgate.testing.sinks.scenarios import KillPoint, check_kill

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.large_string())])


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([list(numbers), [f"é{n}\n" for n in numbers]], schema=SCHEMA)


def context(subtask_index: int = 0, generation: int = 1, pipeline: str = "p", node: str = "out") -> SinkContext:
    return SinkContext(pipeline, node, subtask_index, 2, Generation(generation), SCHEMA)


def prepared(sink: FileSink, checkpoint: int, *numbers: int, where: SinkContext | None = None) -> list[Committable]:
    where = context() if where is None else where
    writer = sink.open(where)
    writer.write(batch(*numbers))
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    return [Committable(where.node, CheckpointId(checkpoint), where.subtask_index, where.generation, payload)]


def permit(checkpoint: int, generation: int = 1) -> CommitPermit:
    return CommitPermit(CheckpointId(checkpoint), Generation(generation))


def numbers_in(url: str) -> list[int]:
    frame = read_committed(url)
    return sorted(frame["n"].to_list()) if frame.width else []


def target(url: str, file_format: Any, roll_interval: Any = 0) -> Target:
    storage = open_storage(url)

    def read() -> list[dict[str, Any]]:
        names = [name for name in storage.list("") if not name.startswith("_")]
        frames = [
            pl.read_ndjson(storage.get(name)) if name.endswith(".jsonl") else pl.read_parquet(storage.get(name))
            for name in names
        ]
        rows = [row for frame in frames for row in frame.to_dicts()]
        assert set(committed_files(url)) <= set(names)
        return rows

    def lose_prepared() -> None:
        for path in storage.list("_staging"):
            storage.delete(path)

    def leftovers() -> list[str]:
        return storage.list("_staging") + storage.list("_publishing")

    def take() -> None:
        for path in storage.list(""):
            if not path.startswith("_"):
                storage.delete(path)

    return Target(FileSink(url, file_format, roll_interval=roll_interval), read, leftovers, lose_prepared, take)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file_format", "roll_interval"), few([("parquet", "1h"), ("jsonl", 0), ("jsonl", "1h"), ("parquet", 0)], 1)
)
def test_the_sink_survives_every_kill_point(file_format: str, roll_interval: Any) -> None:
    rescales, rows = ((1, 1), (2, 2), (1, 2), (5, 2), (2, 5)), (0, 1, 40)
    check_sink(
        lambda: target(f"memory://kit-{secrets.token_hex(8)}", file_format, roll_interval),
        rescales=rescales if IS_DEEP else rescales[2:4],
        rows=rows if IS_DEEP else rows[1:],
    )


@pytest.mark.long
def test_the_sink_survives_kill_points_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is cut here
    fresh = lambda: target(str(tmp_path / secrets.token_hex(8)), "jsonl")  # noqa: E731
    check_sink(fresh, rescales=[(2, 1)], overlaps=[2], rows=[3])


def test_readers_of_the_directory_see_only_committed_files(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, "parquet", roll_interval=0)
    committer = sink.open_committer("p", "out", Generation(1))
    committer.recover([])
    first = prepared(sink, 1, 1, 2)
    prepared(sink, 2, 3)
    assert pads.dataset(tmp_path, format="parquet").count_rows() == 0
    committer.commit(permit(1), first)
    assert pads.dataset(tmp_path, format="parquet").to_table()["n"].to_pylist() == [1, 2]
    assert pl.read_parquet(f"{tmp_path}/*.parquet")["n"].to_list() == [1, 2]
    assert [path.name for path in tmp_path.glob("*.parquet")] == committed_files(str(tmp_path))


def test_the_files_of_a_checkpoint_are_listed_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    both = prepared(sink, 1, 1) + prepared(sink, 1, 2, where=context(1))
    committer, faulty = faulty_committer(monkeypatch, sink, Fault(FaultKind.IO_ERROR, "rename_if_absent", first=2))
    with pytest.raises(StorageError):
        committer.commit(permit(1), both)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    assert committed_files(sink.url) == []
    committer.commit(permit(1), both)
    assert numbers_in(sink.url) == [1, 2]
    assert faulty.list("_staging") == []


def faulty_committer(
    monkeypatch: pytest.MonkeyPatch, sink: FileSink, *faults: Fault
) -> tuple[file_commit.FileCommitter, Storage]:
    faulty = FaultyStorage(open_storage(sink.url), faults)
    monkeypatch.setattr(file_sink, "open_storage", lambda url, access: faulty)
    committer = sink.open_committer("p", "out", Generation(1))
    assert isinstance(committer, file_commit.FileCommitter)
    return committer, faulty


class BadAtFirst(LocalStorage):
    """The first read of every object returns other bytes."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def get(self, path: str) -> bytes:
        data = super().get(path)
        self.read.append(path)
        return data if self.read.count(path) > 1 else bytes(byte ^ 1 for byte in data)


def test_one_bad_read_of_a_sinks_directory_denies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    made = prepared(sink, 1, 1, 2)
    life = PipelineIdentity("a", "/checkpoints", "here", 1)
    sink.own("p", "out", life)
    file = decode_files("here", made[0].payload)[0]
    staged = next((tmp_path / "_staging").rglob(f"{file.name}.tmp"))
    shutil.copyfile(staged, tmp_path / file.name)  # as an object store that died between copy and deletion
    bad = BadAtFirst(str(tmp_path))
    for module in (file_sink, file_commit):
        monkeypatch.setattr(module, "open_storage", lambda *_: bad)
    assert sink.owner("p", "out").life == life
    committer = sink.open_committer("p", "out", Generation(1))
    committer.commit(permit(1), made)
    assert file.name in bad.read, "the content was compared"
    bad.read.clear()
    assert file_commit.committed_files(str(tmp_path)) == [file.name]


@pytest.mark.parametrize("operation", ["rename_if_absent", "put_if_absent", "list"])
@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.TIMEOUT, FaultKind.TIMEOUT_AFTER_EFFECT])
def test_a_commit_whose_outcome_is_unknown_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, kind: FaultKind
) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    both = prepared(sink, 1, 1) + prepared(sink, 1, 2, where=context(1))
    committer, faulty = faulty_committer(monkeypatch, sink, Fault(kind, operation))
    with pytest.raises(StorageError):
        committer.commit(permit(1), both)
    committer.commit(permit(1), both)
    committer.commit(permit(1), both)
    assert numbers_in(sink.url) == [1, 2]
    assert len(faulty.list("_committed")) == 1


def test_prepare_can_be_repeated_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(tmp_path, roll_interval=0, buffer_bytes=1, file_bytes=30)
    faulty = FaultyStorage(open_storage(sink.url), [Fault(FaultKind.NO_SPACE, "put", first=2)])
    monkeypatch.setattr(file_sink, "open_storage", lambda url, access: faulty)
    writer = sink.open(context())
    for number in range(5):
        writer.write(batch(number))
    sealed = writer.seal(CheckpointId(1))
    with pytest.raises(StorageError):
        sealed.prepare()
    payload = sealed.prepare()
    assert payload is not None
    files = decode_files("payload", payload)
    assert [file.rows for file in files] == [2, 2, 1]
    committer = sink.open_committer("p", "out", Generation(1))
    committer.commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
    assert read_committed(sink.url).rows() == [(n, f"é{n}\n") for n in range(5)]


def test_an_empty_transaction_has_no_committable(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    writer = sink.open(context())
    assert writer.seal(CheckpointId(1)).prepare() is None
    writer.write(batch())
    assert writer.seal(CheckpointId(2)).prepare() is None
    sink.open_committer("p", "out", Generation(1)).commit(permit(2), [])
    assert open_storage(sink.url).list("") == []


def test_sinks_and_pipelines_that_share_a_directory_do_not_touch_each_other(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    names = [("p", "a.b"), ("p.a", "b"), ("p", "a~2eb"), ("ü/..", "b")]
    committables = {name: prepared(sink, 1, i, where=context(0, 1, *name)) for i, name in enumerate(names)}
    for name in names:
        sink.open_committer(*name, Generation(1)).recover(committables[name])
    assert len(open_storage(sink.url).list("_staging")) == 4
    for name in names:
        sink.open_committer(*name, Generation(1)).commit(permit(1), committables[name])
    assert numbers_in(sink.url) == [0, 1, 2, 3]


def test_a_changed_or_missing_file_stops_the_commit(tmp_path: Path) -> None:
    # as long as no manifest lists it
    sink = FileSink(tmp_path, roll_interval=0)
    committer = sink.open_committer("p", "out", Generation(1))
    one = prepared(sink, 1, 1)
    (path,) = tmp_path.glob("_staging/*/*")
    path.rename(tmp_path / path.name.removesuffix(".tmp"))  # as a version without intents left it
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(b"{}\n")
    with pytest.raises(CorruptionError, match=r"part-p\.out-0000000001.* expected checksum"):
        committer.commit(permit(1), one)
    path.unlink()
    with pytest.raises(CorruptionError, match="found neither it nor its staged form"):
        committer.commit(permit(1), one)


def test_a_permit_covers_only_its_checkpoint_and_the_older_ones(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    committer = sink.open_committer("p", "out", Generation(1))
    with pytest.raises(UsageError, match="output of checkpoint 2 must not be committed"):
        committer.commit(permit(1), prepared(sink, 2, 1))
    with pytest.raises(UsageError, match="committable of sink 'other'"):
        committer.commit(permit(1), prepared(sink, 1, 1, where=context(node="other")))
    assert committed_files(sink.url) == []


def test_an_older_generation_is_fenced(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    one = prepared(sink, 1, 1)
    old, new = (sink.open_committer("p", "out", Generation(g)) for g in (1, 2))
    old.recover([])
    new.recover([])
    new.recover([])
    with pytest.raises(FencedError, match="generation 1 was replaced by generation 2"):
        old.commit(permit(1), one)
    with pytest.raises(FencedError):
        old.recover([])
    with pytest.raises(FencedError):
        prepared(sink, 2, 1)
    assert open_storage(sink.url).list("") == ["_claims/p.out/0000000002"]


def test_manifests_are_merged_and_readers_do_not_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ledger, "MERGE_AFTER", 3)
    sink = FileSink(tmp_path, roll_interval=0)
    committer = sink.open_committer("p", "out", Generation(1))
    for checkpoint in range(1, 9):
        committer.commit(permit(checkpoint), prepared(sink, checkpoint, checkpoint))
        assert numbers_in(sink.url) == list(range(1, checkpoint + 1))
    assert len(open_storage(sink.url).list("_committed")) == 3
    committer.commit(permit(1), prepared(sink, 1, 1))
    assert numbers_in(sink.url) == list(range(1, 9))


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    files = [StagedFile("a", 1, 2, "x")]
    data = encode_files(files)
    assert decode_files("m", data) == files
    for position in range(len(data)):
        damaged = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(CorruptionError, match="m is damaged"):
            decode_files("m", damaged)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"version":2,"parts":[]}', "expected version 1, found version 2"),
        (b'{"version":1,"files":[{}]}', "expected the fields of this version"),
        (b"nonsense", "expected the fields of this version"),
    ],
)
def test_a_manifest_of_another_release_is_refused_with_one_sentence(body: bytes, problem: str) -> None:
    with pytest.raises(CorruptionError, match=f"m is damaged at byte 17: {problem}"):
        decode_files("m", digest([body]).encode() + b"\n" + body)


def test_going_back_to_an_older_checkpoint_keeps_later_files_and_writes_new_ones(tmp_path: Path) -> None:
    # K18: a smaller checkpoint id is not taken for one committed before
    sink = FileSink(tmp_path, roll_interval=0)
    sink.open_committer("p", "out", Generation(1)).commit(permit(5), prepared(sink, 5, 1))
    later = sink.open_committer("p", "out", Generation(2))
    later.recover([])
    later.commit(permit(3, 2), prepared(sink, 3, 1, where=context(generation=2)))
    assert numbers_in(sink.url) == [1, 1]


def test_names_never_clash() -> None:
    assert str(SinkIdentity("a.b", "c")) != str(SinkIdentity("a", "b.c"))
    assert str(SinkIdentity("a", "~")) != str(SinkIdentity("a", "~7e"))


def test_json_lines_hold_what_json_can_hold() -> None:
    table = pa.table({"f": [float("nan"), 1.5], "t": pa.array([0, 1], pa.timestamp("us")), "l": [[1], None]})
    lines = [json.loads(line) for line in bytes(encode("jsonl", table)).splitlines()]
    assert lines[0] == {"f": None, "t": "1970-01-01 00:00:00", "l": [1]}
    assert lines[1]["t"] == "1970-01-01 00:00:00.000001"


def test_wrong_use_is_refused_in_the_driver(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"format='orc'.* must be one of jsonl, csv, parquet"):
        FileSink(tmp_path, "orc")  # type: ignore[arg-type]
    for place in ("", 5, b"out", None):
        with pytest.raises(UsageError, match=r"FileSink: a path or a URL of a directory is needed, such as '\.', not"):
            FileSink(place)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prefix='_x'"):
        FileSink(tmp_path, prefix="_x")
    nested = pa.schema([("x", pa.large_list(pa.struct([("b", pa.large_binary())])))])
    with pytest.raises(UsageError, match=r"column 'x' has type .* which JSON cannot hold"):
        FileSink(tmp_path, roll_interval=0).check(nested)
    FileSink(tmp_path, "parquet").check(nested)
    with pytest.raises(UsageError, match="without columns"):
        FileSink(tmp_path, roll_interval=0).check(pa.schema([]))


def test_a_check_writes_nothing_and_says_where_nothing_could_be_written(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "new" / "out")
    sink.check(SCHEMA)
    assert sink.owner("p", "out") == Owner()
    FileSink("memory://unwritten").check(SCHEMA)
    assert list(tmp_path.iterdir()) == [] == open_storage("memory://unwritten").list("")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, problem in (
        ("file", "file is no directory"),
        ("file/out", "file is no directory"),
        ("link/out", "link to"),
    ):
        with pytest.raises(UsageError, match=rf"FileSink cannot write to .*/{place}: .*{problem}.*choose a writable"):
            FileSink(tmp_path / place).check(SCHEMA)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_directory_of_somebody_else_is_refused_while_the_pipeline_is_built(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="no right to write in"):
        FileSink(tmp_path / "out").check(SCHEMA)


def test_the_directory_is_made_once_the_run_has_begun(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "new" / "out")
    for _ in range(2):
        sink.make_target(SCHEMA)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "out"], "nothing of the probe is left"


@pytest.mark.parametrize(("is_transient", "expected"), [(True, StorageError), (False, UsageError)])
def test_a_target_that_refuses_is_tried_again_or_says_what_to_do(
    is_transient: bool, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("put", "x", "no rights", is_transient=is_transient)

    monkeypatch.setattr(MemoryStorage, "put", refuse)
    monkeypatch.setattr(MemoryStorage, "put_if_absent", refuse)
    sink = FileSink("memory://refusing")
    with pytest.raises(expected, match="no rights"):
        sink.make_target(SCHEMA)
    with pytest.raises(expected, match="no rights"):
        sink.own("p", "out", PipelineIdentity("a" * 32, "here", "host", 1))


def test_the_sink_is_configuration_that_travels(tmp_path: Path) -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(FileSink(tmp_path, "parquet")))
    assert repr(copy) == f"FileSink('{tmp_path}', 'parquet')"


IDENTITY = SinkIdentity("p", "out")


class Careless(MemoryStorage):
    """An object store that ignores the condition of a conditional put."""

    def put_if_absent(self, path: str, parts: Any) -> None:
        self.put(path, parts)


def test_a_sink_in_a_storage_that_ignores_the_condition_of_a_put_is_refused() -> None:
    storage = Careless("careless")
    with pytest.raises(UsageError, match="replaces an object that was to be written only if absent"):
        FileCommitter(storage, IDENTITY, Generation(1)).recover([])
    assert storage.list("") == []


def test_files_that_are_no_claims_are_passed_over() -> None:
    storage = MemoryStorage("stray")
    for name in ("README", ".DS_Store", "99", "0000000099.bak"):
        storage.put(f"{IDENTITY.claims}/{name}", [b"?"])
    FileCommitter(storage, IDENTITY, Generation(1)).recover([])
    FileCommitter(storage, IDENTITY, Generation(2)).recover([])
    assert IDENTITY.claim(Generation(2)) in storage.list(IDENTITY.claims)
    assert IDENTITY.claim(Generation(1)) not in storage.list(IDENTITY.claims)


NUMBERS = pa.schema([("n", pa.int64())])
SUBTASKS = 20


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


def object_target(
    url: str, file_format: Any, *, multipart: bool = True, crash: Callable[[], None] | None = None
) -> Target:
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
    return object_target(f"{root}/kit-{secrets.token_hex(8)}/deep", "jsonl", **options)


IN_PARTS = pytest.mark.parametrize("multipart", [True, False], ids=["uploads", "copies"])


KILLS = [*((point, True) for point in KillPoint), *few([(point, False) for point in KillPoint], 3)]


@pytest.mark.long
@pytest.mark.parametrize(("point", "multipart"), KILLS)
def test_the_sink_and_its_object_store_survive_every_kill_point(
    objects: ObjectServer, point: KillPoint, multipart: bool
) -> None:
    def crash() -> None:
        if objects.keeps:  # else it forgets its objects when it ends
            objects.fail()
            objects.heal()

    check_kill(fresh(f"s3://{BUCKET}", multipart=multipart, crash=crash), point, 2, 1, 2, 3)


@pytest.mark.deep
@IN_PARTS
def test_the_sink_passes_the_kit_in_an_object_store(objects: ObjectServer, multipart: bool) -> None:
    check_sink(lambda: fresh(f"s3://{BUCKET}", multipart=multipart), rescales=[(1, 2), (2, 1)], overlaps=[2], rows=[3])


@pytest.mark.deep
@pytest.mark.xdist_group("hdfs")
def test_the_sink_passes_the_kit_in_hdfs(hdfs: HdfsCluster) -> None:
    check_sink(lambda: fresh(hdfs.url), rescales=[(2, 1)], overlaps=[2], rows=[3])


def sealed(sink: FileSink, subtask: int, *numbers: int) -> Committable:
    writer = sink.open(SinkContext("p", "out", subtask, SUBTASKS, Generation(1), NUMBERS))
    writer.write(pa.record_batch([list(numbers)], schema=NUMBERS))
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
