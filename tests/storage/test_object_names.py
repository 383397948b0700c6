"""Names that a file says: only bare ones are joined to a directory."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.codec.snapshot import encode_sections
from headgate.connectors.files.publish_log import SinkIdentity, StagedFile, decode_files, encode_files
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.state.rocksdb.database_snapshot import Description, decode_description
from headgate.state.snapshot import OwnedKeys
from headgate.storage.base import read_name, read_path
from headgate.storage.local import LocalStorage

PIECES = [
    "..",
    ".",
    "/",
    "\\",
    "\0",
    "\n",
    "a",
    "part-1.jsonl",
    "~",
    "000012.sst",
    "CURRENT",
    "MANIFEST-000005",
    "\u0661",
]
NAMES = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
KEYS = OwnedKeys(KeyGroups(0, 128), 128)


@given(NAMES)
@example("/etc/passwd")
@example("../escaped")
@example("..")
@example("")
@example("a" * 300)
@example("CURRENT\n")
def test_a_name_that_is_read_stays_in_its_directory_or_is_refused(name: str) -> None:
    try:
        found = read_name(name, "a file")
    except CorruptionError as error:
        refused = error
    else:
        assert os.path.normpath(f"/directory/{found}") == f"/directory/{name}"
        assert PurePosixPath(found).name == name
        return
    assert refused.path == "a file"
    assert str(refused).isprintable(), "what is refused is said, and does nothing to a terminal"


@given(NAMES)
@example("chk-0000000001/../../escaped")
@example("/etc/passwd")
def test_a_path_that_is_read_stays_below_its_directory_or_is_refused(path: str) -> None:
    try:
        found = read_path(path, "a file")
    except CorruptionError:
        pass
    else:
        assert os.path.normpath(f"/directory/{found}") == f"/directory/{path}"


@given(NAMES, st.booleans())
@example("../escaped", True)
@example("/tmp/escaped", True)
@example("CURRENT/../../escaped", True)
@example("000012.sst/../../escaped", False)
def test_a_description_of_a_database_names_files_that_rocksdb_makes_or_is_damaged(name: str, is_small: bool) -> None:
    description = Description([], KEYS, [] if is_small else [name], (), {name: b"data"} if is_small else {})
    data = memoryview(b"".join(map(bytes, description.encode())))
    try:
        found = decode_description(data, "a snapshot")
    except CorruptionError:
        return
    for one in (*found.names, *found.small):
        assert one == "CURRENT" or one.startswith(("MANIFEST-", "OPTIONS-", "rocksdict-config")) or one.endswith(".sst")
        assert os.path.normpath(f"/directory/{one}") == f"/directory/{one}"


@given(NAMES)
@example("../../../etc/passwd")
@example("/etc/passwd")
def test_a_list_of_output_names_files_of_its_directory_or_is_damaged(name: str) -> None:
    try:
        (found,) = decode_files("a manifest", encode_files([StagedFile(name, 1, 1, "00")]))
    except CorruptionError:
        return
    assert os.path.normpath(f"/directory/{found.name}") == f"/directory/{name}"


@given(pipeline=st.text(min_size=1, max_size=20), node=st.text(min_size=1, max_size=20))
def test_what_a_file_sink_calls_its_files_is_read_again(pipeline: str, node: str) -> None:
    try:
        identity = SinkIdentity(pipeline, node)
        name = identity.file_name("part", CheckpointId(1), 0, Generation(1), 1, "jsonl")
    except UnicodeEncodeError:  # no name of a pipeline
        return
    file = StagedFile(name, 1, 1, "00")
    if len(name) <= 255:
        assert decode_files("a manifest", encode_files([file])) == [file]


def test_a_manifest_does_not_lead_a_reader_out_of_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    storage = LocalStorage(tmp_path / "checkpoints")
    part = SnapshotPart(6, 0, path="../../secret")
    with pytest.raises(CorruptionError, match=r"the path of a file, found 'p/\.\./\.\./secret'"):
        read_part(storage, "p", part)


def test_sections_of_a_description_that_are_no_files_are_left_alone() -> None:
    data = memoryview(b"".join(map(bytes, encode_sections({"../what": [b"{}"]}))))
    with pytest.raises(CorruptionError, match="what the files of a database are"):
        decode_description(data, "a snapshot")
