"""Sources of files read object stores and HDFS, on real servers, which are killed and changed under them."""

from __future__ import annotations

import gzip
import io
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import from_url
from tests.connectors.files.test_file_sink import sealed
from tests.connectors.source_reading import context, read_all, read_over_subtasks
from tests.servers.clouds import cloud_server
from tests.servers.hdfs import HdfsCluster
from tests.servers.objects import BUCKET, ObjectServer, object_server

import headgate as hg
from headgate.connectors.base import SourceReader
from headgate.connectors.files import object_reader
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.connectors.files.object_reader import KnownObjects
from headgate.connectors.files.selection import glob_expression, is_shown
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.base import StoredFile
from headgate.storage.urls import open_storage
from headgate.testing import running
from headgate.testing.source_kit import Growing, check_late_splits, check_source

SCHEMA = {"n": int}
_directories = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        if not server.keeps:
            pytest.skip("versitygw is not installed (scripts/setup.sh servers gets it)")
        yield server


class Bucket:
    """A prefix of its own."""

    def __init__(self) -> None:
        self.prefix = f"{next(_directories)}"
        self.url = f"s3://{BUCKET}/{self.prefix}/"
        self._store = from_url(f"s3://{BUCKET}")

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._store, f"{self.prefix}/{name}", data, use_multipart=False)

    def delete(self, name: str) -> None:
        obstore.delete(self._store, f"{self.prefix}/{name}")


@pytest.fixture
def bucket(server: ObjectServer) -> Bucket:
    return Bucket()


def numbers(first: int, count: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in range(first, first + count))


def found(source: hg.JsonLines, positions: dict[str, bytes] | None = None) -> list[int]:
    source.schema()
    reader = source.open(context(positions=positions))
    rows, bad = read_all(reader, until=lambda: not reader.splits())
    assert not bad
    return sorted(row["n"] for row in rows)


def begun(
    source: hg.JsonLines | hg.ParquetFiles, records: int, positions: dict[str, bytes] | None = None
) -> SourceReader:
    """Read at least so many records."""
    source.schema()
    reader: Any = source.open(context(positions=positions))
    rows = 0
    while rows < records:
        batch = reader.poll()
        rows += batch.batch.num_rows if batch is not None else 0
    return cast("SourceReader", reader)


def test_names_are_taken_as_the_store_shows_them(bucket: Bucket) -> None:
    names = [
        "a b.json",
        "50%.json",
        "a%20b.json",
        "é.json",
        "day=1/x.json",
        "_day=1/x.json",
        "q?[1].json",
        "a+b#c.json",
    ]
    for number, name in enumerate(names):
        bucket.put(name, numbers(number, 1))
    for name in ("_SUCCESS", "_temporary/0/x.json", ".x.json", "a/.hidden/x.json", "b.json._COPYING_", "empty.json"):
        bucket.put(name, b"" if name == "empty.json" else b"no JSON\n")
    rows = read_over_subtasks(hg.JsonLines(bucket.url, SCHEMA, include_path=True), 3)
    assert {row["path"]: row["n"] for row in rows} == {bucket.url + name: at for at, name in enumerate(names)}
    for pattern, expected in {
        "*.json": 6,
        "day=*/*.json": 1,
        "**/x.json": 2,
        "a b.json": 1,
        "q[?][[]1].json": 1,
    }.items():
        assert len(read_over_subtasks(hg.JsonLines(bucket.url + pattern, SCHEMA), 1)) == expected, pattern
    assert len(read_over_subtasks(hg.JsonLines(bucket.url, SCHEMA, pattern="*b*"), 1)) == 3


def test_a_restart_delivers_what_followed(bucket: Bucket) -> None:
    for number in range(3):
        bucket.put(f"{number}.json", numbers(10 * number, 3))
    bucket.put("3.json.gz", gzip.compress(numbers(30, 3)))
    rows = check_source(hg.JsonLines(bucket.url, SCHEMA), parallelisms=(2,))
    assert len(rows) == 12


def test_objects_that_appear_later_are_read_once(server: ObjectServer) -> None:
    def fresh() -> Growing:
        bucket, later = Bucket(), itertools.count(1)
        bucket.put("0.json", numbers(0, 2))

        def add() -> list[dict[str, Any]]:
            at = next(later)
            bucket.put(f"{at}.json", numbers(10 * at, 2))
            return [{"n": 10 * at}, {"n": 10 * at + 1}]

        source = hg.JsonLines(bucket.url, SCHEMA, follow=True, discovery_interval="1ms")
        return Growing(source, [{"n": 0}, {"n": 1}], add)

    check_late_splits(fresh, parallelisms=(1, 2))


@pytest.mark.usefixtures("small_ranges")
def test_large_objects_are_read_in_ranges_from_any_place_on(bucket: Bucket) -> None:
    count = 300_000
    bucket.put("large.json", numbers(0, count))
    bucket.put("large.json.gz", gzip.compress(numbers(count, count), 1))
    source, rows = hg.JsonLines(bucket.url, SCHEMA), []
    positions: dict[str, bytes] | None = None
    source.schema()
    for part in itertools.count(1):
        reader = source.open(context(positions=positions))
        for _ in range(8 * part):
            batch = None if reader.is_finished() else reader.poll()
            rows += [] if batch is None else batch.batch.column("n").to_pylist()
        positions = reader.positions()
        reader.close()
        if reader.is_finished():
            break
    assert sorted(rows) == list(range(2 * count))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("records", [1, 3], ids=["begun", "read"])
def test_a_replaced_object_is_an_error_or_is_read_again(bucket: Bucket, records: int, follow: bool) -> None:
    bucket.put("a.json", numbers(0, 3))
    source = hg.JsonLines(bucket.url, SCHEMA, follow=follow)
    reader = begun(source, 3)
    if records == 3:
        read_all(reader, until=lambda: not reader.splits())
    positions = reader.positions()
    bucket.put("a.json", numbers(0, 3))  # the same once more
    assert found(source, positions) == []
    bucket.put("a.json", numbers(5, 3))
    with pytest.raises(UsageError, match=r'a.json was replaced.*or give replaced="read"'):
        found(source, positions)
    assert found(hg.JsonLines(bucket.url, SCHEMA, replaced="read", follow=follow), positions) == [5, 6, 7]


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_reader, "RANGE_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_ranges")
def test_an_object_that_is_replaced_while_it_is_read_is_noticed(bucket: Bucket) -> None:
    count = 400_000  # 5 MB: more than is fetched ahead
    for replaced in ("fail", "read"):
        bucket.put("a.json", numbers(0, count))
        source = hg.JsonLines(bucket.url, SCHEMA, replaced=replaced)  # type: ignore[arg-type]
        reader = begun(source, 1)
        bucket.put("a.json", numbers(7, 2))
        if replaced == "fail":
            with pytest.raises(UsageError, match=r"a.json was replaced"):
                read_all(reader)
        else:
            assert [row["n"] for row in read_all(reader)[0]][-2:] == [7, 8]


def test_a_deleted_object_is_a_bad_record_with_what_was_read_of_it(bucket: Bucket) -> None:
    bucket.put("a.json", numbers(0, 3))
    bucket.put("b.json", numbers(3, 3))
    source = hg.JsonLines(bucket.url, SCHEMA)
    source.schema()
    bucket.delete("a.json")
    reader = source.open(context())
    rows, bad = read_all(reader)
    assert [row["n"] for row in rows] == [3, 4, 5]
    assert [each["position"] for each in bad] == [f"{bucket.url}a.json"]
    assert "deleted when 0 bytes of it were read" in bad[0]["problem"]
    assert read_all(source.open(context(positions=reader.positions()))) == ([], [])


def test_an_object_that_was_read_may_be_deleted(bucket: Bucket) -> None:
    bucket.put("a.json", numbers(0, 3))
    bucket.put("b.json", numbers(3, 3))
    source = hg.JsonLines(bucket.url, SCHEMA)
    reader = begun(source, 6)
    read_all(reader)
    bucket.delete("a.json")
    assert found(source, reader.positions()) == []


def test_a_bounded_source_may_be_followed_later_and_the_other_way_round(bucket: Bucket) -> None:
    bucket.put("a.json", numbers(0, 3))
    bounded = hg.JsonLines(bucket.url, SCHEMA)
    followed = hg.JsonLines(bucket.url, SCHEMA, follow=True, discovery_interval="1ms")
    reader = begun(bounded, 3)
    read_all(reader)
    bucket.put("b.json", numbers(3, 3))
    again = begun(followed, 3, reader.positions())
    read_all(again, until=lambda: not again.splits())
    assert not again.is_finished()
    bucket.put("c.json", numbers(6, 3))
    assert found(bounded, again.positions()) == [6, 7, 8]


@pytest.mark.usefixtures("small_ranges")
def test_the_server_may_be_killed_while_objects_are_found_and_read(bucket: Bucket, server: ObjectServer) -> None:
    count = 400_000
    bucket.put("a.json", numbers(0, count))
    source = hg.JsonLines(bucket.url, SCHEMA, follow=True, discovery_interval="1ms")
    source.schema()
    reader, rows = source.open(context()), 0

    def read(until: int) -> None:
        nonlocal rows
        while rows < until:
            batch = reader.poll()
            rows += 0 if batch is None else batch.batch.num_rows

    read(1)
    server.fail()
    for _ in range(50):
        batch = reader.poll()
        rows += 0 if batch is None else batch.batch.num_rows
    server.heal()
    read(count)
    server.fail()
    for _ in range(50):
        assert reader.poll() is None or not reader.splits()
    server.heal()
    bucket.put("b.json", numbers(0, 3))
    read(count + 3)
    reader.close()


def test_what_cannot_be_read_is_refused_in_one_sentence(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"there is no file at s3://.*; correct the URL, or use follow=True to wait"):
        hg.TextFiles(bucket.url).schema()
    with pytest.raises(UsageError, match=r"cannot be read by one source; make a source for each"):
        hg.TextFiles([bucket.url, "/tmp"])
    with pytest.raises(UsageError, match=r"files cannot be read from http://host; give a local path"):
        hg.TextFiles("http://host/a.txt")
    with pytest.raises(UsageError, match=r"has a password or key in it"):
        hg.TextFiles("s3://user:secret@bucket/a.txt")
    with pytest.raises(UsageError, match=r"replaced= is for URLs"):
        hg.TextFiles("/tmp", replaced="read")
    bucket.put("a.zip", b"x")
    with pytest.raises(UsageError, match=r"a.zip is compressed in a way"):
        hg.TextFiles(bucket.url).schema()


def parquet(first: int, count: int, rows_of_group: int = 100) -> bytes:
    file = io.BytesIO()
    columns = {"n": range(first, first + count), "text": [f"{n}" for n in range(first, first + count)]}
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), file, rows_of_group)
    return file.getvalue()


def test_parquet_files_are_read_and_read_on_after_a_restart(bucket: Bucket) -> None:
    bucket.put("_temporary/x.parquet", b"no Parquet")
    for number in range(2):
        bucket.put(f"day=1/{number}.parquet", parquet(10 * number, 5, 3))
    assert len(check_source(hg.ParquetFiles(bucket.url, batch_rows=2), parallelisms=(2,))) == 10
    rows = read_over_subtasks(hg.ParquetFiles(f"{bucket.url}*/1.parquet", columns=["text"]), 2)
    assert [row["text"] for row in rows] == ["10", "11", "12", "13", "14"]


def test_parquet_files_that_appear_later_are_read_once(server: ObjectServer) -> None:
    def fresh() -> Growing:
        bucket, later = Bucket(), itertools.count(1)
        bucket.put("0.parquet", parquet(0, 2))

        def add() -> list[dict[str, Any]]:
            at = next(later)
            bucket.put(f"{at}.parquet", parquet(10 * at, 2))
            return [{"n": 10 * at}, {"n": 10 * at + 1}]

        source = hg.ParquetFiles(bucket.url, columns=["n"], follow=True, discovery_interval="1ms", batch_rows=1)
        return Growing(source, [{"n": 0}, {"n": 1}], add)

    check_late_splits(fresh, parallelisms=(2,))


def test_a_parquet_file_that_is_replaced_or_deleted_is_noticed(bucket: Bucket, server: ObjectServer) -> None:
    bucket.put("a.parquet", parquet(0, 1_000))
    source = hg.ParquetFiles(bucket.url, columns=["n"])
    positions = begun(source, 1).positions()
    server.fail()
    server.heal()
    reader = begun(source, 1, positions)
    bucket.put("a.parquet", parquet(5_000, 1_000))
    with pytest.raises(UsageError, match=r"a.parquet was replaced"):
        read_all(reader)
    again = hg.ParquetFiles(bucket.url, columns=["n"], replaced="read")
    reader = begun(again, 1, positions)
    bucket.delete("a.parquet")
    _, bad = read_all(reader)
    assert ["was deleted when" in each["problem"] for each in bad] == [True]
    with pytest.raises(UsageError, match=r"there is no file at"):
        again.schema()


def test_a_pipeline_reads_a_prefix_exactly_once_although_worker_and_server_are_killed(
    bucket: Bucket, server: ObjectServer, tmp_path: Path
) -> None:
    for number in range(20):
        bucket.put(f"{number}.json", numbers(100 * number, 100))
    p = hg.Pipeline("objects", parallelism=2, checkpointing=hg.Checkpointing("50ms"))
    records = p.source(hg.JsonLines(bucket.url, SCHEMA, follow=True, discovery_interval="20ms"), rate_limit=4_000)
    records.sink(hg.FileSink(tmp_path / "out", "jsonl", roll_interval="1ms"))
    checkpoints = tmp_path / "checkpoints"

    def written() -> list[int]:
        rows = read_committed(str(tmp_path / "out"))
        return sorted(rows["n"].to_list()) if len(rows) else []

    def await_written(count: int) -> None:
        until = time.monotonic() + 300
        while len(written()) < count:
            assert time.monotonic() < until
            time.sleep(0.05)

    with running(p, checkpoint_dir=checkpoints, kill_worker_after_checkpoint=2):
        await_written(500)
        server.fail()
        server.heal()
        await_written(2_000)
        bucket.put("20.json", numbers(2_000, 100))
        await_written(2_100)
    bucket.put("21.json", numbers(2_100, 100))
    with running(p, checkpoint_dir=checkpoints, parallelism=3):
        await_written(2_200)
    assert written() == list(range(2_200))


@pytest.mark.parametrize(
    ("pattern", "fits", "misses"),
    [
        ("**/*", ["a", "a/b", "a/b/c.d"], []),
        ("*.json", ["a.json", ".json"], ["a/b.json", "a.jsonx"]),
        ("**/*.json", ["a.json", "x/y/a.json"], ["a.txt"]),
        ("a?c[!0-9]", ["abcx"], ["abc1", "a/cx"]),
        ("[ab^]/[]x]", ["^/]", "a/x"], ["c/x"]),
        ("a+(b).c", ["a+(b).c"], ["aab.c"]),
    ],
)
def test_globs_fit_names(pattern: str, fits: list[str], misses: list[str]) -> None:
    expression = glob_expression(pattern)
    assert all(expression.fullmatch(name) for name in fits)
    assert not any(expression.fullmatch(name) for name in misses)


def test_hidden_names_are_those_of_hadoop_and_spark() -> None:
    assert all(map(is_shown, ["a", "a_b/c", "_day=1/x", "a/_day=1/x"]))
    assert not any(map(is_shown, ["", "_a", "a/_b/c", ".a", "a/.b", "a._COPYING_", "directory/", "a/_SUCCESS"]))


def test_objects_that_were_read_are_forgotten_when_they_are_old() -> None:
    known = KnownObjects(max_age_ms=100)
    files = [StoredFile(f"s3://b/{at}", 1, at, "v") for at in range(0, 300, 10)]
    for file in files:
        known.add(file)
    known.looked(290)
    assert len(known.encode()) < 11 * 32 + 10
    assert all(known.has(file) for file in files)
    assert known.has(StoredFile("s3://b/new", 1, 189, "v"))  # as old as what was forgotten
    assert known.has(StoredFile("s3://b/new", 1, 190, "v")) is False
    assert known.has(StoredFile("s3://b/290", 1, 300, "w")) is None
    again = KnownObjects(max_age_ms=100)
    again.restore("name", known.encode(), lambda key: True)
    assert again.encode() == known.encode()


@pytest.mark.xdist_group("hdfs")
def test_files_of_hdfs_are_read_and_replacements_noticed(hdfs: HdfsCluster) -> None:
    storage = open_storage(f"{hdfs.url}/input")
    for name in ("a b.json", "day=1/x.json", "_SUCCESS", "é%.json"):
        storage.put(name, [numbers(len(name), 3)])
    storage.put("empty.json", [])
    storage.put("a.parquet", [parquet(0, 3)])
    url = f"{hdfs.url}/input/"
    rows = read_over_subtasks(hg.JsonLines(f"{url}**/*.json", SCHEMA, include_path=True), 2)
    assert {row["path"] for row in rows} == {f"{url}{name}" for name in ("a b.json", "day=1/x.json", "é%.json")}
    assert [row["n"] for row in read_over_subtasks(hg.ParquetFiles(url), 1)] == [0, 1, 2]
    source = hg.JsonLines(f"{url}a b.json", SCHEMA)
    positions = begun(source, 3).positions()
    assert found(source, positions) == []
    storage.put("a b.json", [numbers(50, 4)])
    with pytest.raises(UsageError, match=r"a b.json was replaced"):
        found(source, positions)
    followed = hg.JsonLines(url, SCHEMA, pattern="*.json", follow=True, discovery_interval="1ms", replaced="read")
    reader = begun(followed, 7)
    storage.put("b.json", [numbers(60, 3)])
    rows = []
    while len(rows) < 3:
        batch = reader.poll()
        rows += [] if batch is None else batch.batch.to_pylist()
    assert [row["n"] for row in rows] == [60, 61, 62]
    reader.close()


NAMES = ["a b", "100%", "a%20b", "a#b", "a", "äöü", "day=1", "a+b", "a&b", "'a\"", "x" * 200]
"""``a%20b`` is not ``a b``, and ``a#b`` is not ``a``."""

HDFS = pytest.param("hdfs", marks=[pytest.mark.xdist_group("hdfs"), pytest.mark.deep])


@pytest.fixture(scope="module", params=["google", "s3", HDFS])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A directory that no other test uses."""
    match request.param:
        case "google":
            with cloud_server("google") as server:
                yield f"{server.url}/odd"
        case "s3":
            with object_server(tmp_path_factory.mktemp("objects")):
                yield f"s3://{BUCKET}/odd"
        case _:
            yield f"{request.getfixturevalue('shared_hdfs').url}/odd"


def read(url: str) -> list[int]:
    source = hg.JsonLines(url, {"n": int})
    source.schema()
    reader = source.open(context())
    rows, bad = read_all(reader, until=lambda: not reader.splits())
    assert not bad
    return sorted(row["n"] for row in rows)


def test_each_odd_name_is_a_place_of_its_own_to_sink_and_source(place: str) -> None:
    for number, name in enumerate(NAMES):
        sink = hg.FileSink(f"{place}/{name}", roll_interval=0)
        committer = sink.open_committer("p", "out", Generation(1))
        committer.recover([])
        committer.commit(CommitPermit(CheckpointId(1), Generation(1)), [sealed(sink, 0, number)])
    directories = {path.partition("/")[0] for path in open_storage(place).list("")}
    assert directories == set(NAMES)
    for number, name in enumerate(NAMES):
        (file,) = committed_files(f"{place}/{name}")
        assert read(f"{place}/{name}/") == [number]
        assert read(f"{place}/{name}/{file}") == [number]


def test_compressed_files_may_have_several_parts_and_records_across_them(place: str) -> None:
    parts = [b'{"n": 1}\n{"n"', b": 2}\n", b"", b'{"n": 3}']
    storage = open_storage(f"{place}-parts")
    storage.put("a.json.gz", [gzip.compress(part) for part in parts])
    storage.put("b.json", [b""])
    assert read(f"{place}-parts/") == [1, 2, 3]


def test_an_object_with_the_name_of_a_directory_is_refused_and_not_read_instead_of_it() -> None:
    with cloud_server("google") as server:
        storage = open_storage(server.url)
        for path, number in (("both", 1), ("both/a.json", 2), ("both/sub", 3)):
            storage.put(path, [b'{"n": %d}\n' % number])
        with pytest.raises(UsageError, match=r"gs://headgate/both is an object, and there are others below"):
            read(f"{server.url}/both")
        assert read(f"{server.url}/both/") == [2, 3]
        assert read(f"{server.url}/[b]oth") == [1]


def test_markers_of_directories_are_no_files() -> None:
    with cloud_server("google") as server:
        storage = open_storage(server.url)
        for path in ("marked", "marked/sub", "marked/sub_$folder$"):  # the store's client leaves out a slash at the end
            storage.put(path, [b""])
        storage.put("marked/a.json", [b'{"n": 1}\n'])
        assert read(f"{server.url}/marked/") == [1]
