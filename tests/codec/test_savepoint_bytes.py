"""A savepoint's own file: it comes back, people can read it, and nothing damaged or foreign passes for one."""

from __future__ import annotations

import pytest
import xxhash

from headgate.codec.json_files import decode_savepoint, encode_savepoint
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, Savepoint, SnapshotPart, SubtaskEntry

ENTRY = SubtaskEntry(SubtaskId(VertexId("sums"), 1), (SnapshotPart(3, 7, "", b"abc"),), ())
MANIFEST = Manifest(CheckpointId(4), Generation(3), 2, 128, (ENTRY,), (), {"source": "rows"}, False, 5, 6)
SAVEPOINT = Savepoint("0123abcd", "orders ä", 1_700_000_000_000, "files-0123abcd", MANIFEST)


def test_a_savepoint_comes_back() -> None:
    assert decode_savepoint(encode_savepoint(SAVEPOINT), "here") == SAVEPOINT


def test_a_person_can_read_whose_it_is() -> None:
    head, _, body = encode_savepoint(SAVEPOINT).partition(b"\n")
    assert head.startswith(b"headgate-savepoint 1 ")
    assert '"pipeline": "orders ä"'.encode() in body
    assert body.count(b"\n") > 10


def test_no_flipped_bit_and_no_truncation_is_a_savepoint() -> None:
    data = encode_savepoint(SAVEPOINT)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptionError, match=r"here is (damaged at byte|not in a format)"):
            decode_savepoint(bytes(damaged), "here")
        with pytest.raises(CorruptionError, match=r"here is (damaged at byte|not in a format)"):
            decode_savepoint(data[:at], "here")


@pytest.mark.parametrize("version", [b"0", b"2", b"x"])
def test_another_version_of_a_savepoint_is_named(version: bytes) -> None:
    data = encode_savepoint(SAVEPOINT).replace(b"headgate-savepoint 1", b"headgate-savepoint " + version, 1)
    with pytest.raises(CorruptionError, match=f"expected format version 1, found {version.decode()}"):
        decode_savepoint(data, "here")


@pytest.mark.parametrize("body", [b"{}", b"[]", b"nonsense", b'{"id": 5}'])
def test_a_savepoint_with_other_fields_is_refused(body: bytes) -> None:
    data = b"headgate-savepoint 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    with pytest.raises(CorruptionError, match="expected the fields of this version"):
        decode_savepoint(data, "here")
