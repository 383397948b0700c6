"""Files with odd names and contents on stores that are not local: what the sink writes, the source reads."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import pytest
from tests.connectors.files.test_file_sink_objects import sealed
from tests.connectors.source_reading import context, read_all
from tests.servers.clouds import cloud_server
from tests.servers.objects import BUCKET, object_server

import headgate as hg
from headgate.connectors.files.file_committer import committed_files
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.urls import open_storage

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
