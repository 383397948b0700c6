"""The container of snapshots (codec/snapshot.py) and the Arrow sections in it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.loop_log import LOG_ROWS, LogChunk, LogOwner, encode_log, log_rows
from headgate.codec.snapshot import (
    MAGIC,
    decode_sections,
    encode_sections,
    output_path,
    section_views,
    snapshot_path,
    stored_file,
)
from headgate.codec.snapshot_rows import difference, stored_rows
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.protocol.checkpoints.retention import StoredFile
from headgate.state.snapshot import decode_batches, encode_batches
from headgate.storage.base import checked_path


def joined(sections: dict[str, list[bytes]]) -> bytes:
    return b"".join(bytes(memoryview(buffer)) for buffer in encode_sections(sections))


@given(st.dictionaries(st.text(max_size=5), st.lists(st.binary(max_size=20), max_size=3), max_size=4))
def test_sections_come_back_whole(sections: dict[str, list[bytes]]) -> None:
    found = decode_sections(joined(sections), "file")
    assert {name: bytes(data) for name, data in found.items()} == {n: b"".join(b) for n, b in sections.items()}


def test_the_layout_is_frozen() -> None:
    assert joined({"a": [b"xy", b"z"]}).hex() == (
        "4847534e41500d0a0100000013000000028219111b4d40b501006103000000000000001f1f416f65d2766278797a"
    )


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    data = joined({"node": [b"state of it"], "other": [b""]})
    for at in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(CorruptionError, match=r"state-7 is (damaged at byte|not in a format)"):
                decode_sections(damaged, "state-7")
        with pytest.raises(CorruptionError):
            decode_sections(data[:at], "state-7")
    with pytest.raises(CorruptionError, match="1 more bytes"):
        decode_sections(data + b"!", "state-7")


def test_another_version_is_named() -> None:
    data = bytearray(joined({}))
    data[len(MAGIC)] = 9
    with pytest.raises(CorruptionError, match="expected snapshot version 1, found version 9"):
        decode_sections(data, "state-7")


def test_payloads_are_not_copied() -> None:
    payload = pa.py_buffer(b"x" * 100)
    assert encode_sections({"a": [payload]})[1] is payload


def test_batches_come_back_and_another_schema_is_refused() -> None:
    schema = pa.schema([("a", pa.int64())])
    batch = pa.record_batch([[1, 2]], schema=schema)
    data = memoryview(encode_batches(schema, [batch, batch])[0])
    assert decode_batches(data, schema, "file") == [batch, batch]
    assert decode_batches(memoryview(encode_batches(schema, [])[0]), schema, "file") == []
    with pytest.raises(CorruptionError, match=r"expected columns \['b'\]"):
        decode_batches(data, pa.schema([("b", pa.int64())]), "file")
    with pytest.raises(CorruptionError, match="an Arrow stream"):
        decode_batches(memoryview(b"nonsense" * 4), schema, "file")


def test_sections_of_one_buffer_are_seen_without_a_copy_and_those_of_several_are_left_out() -> None:
    payload = bytearray(b"xyz")
    views = section_views(encode_sections({"empty": [b""], "one": [payload], "two": [b"a", b"b"], "last": [b"c"]}))
    assert {name: bytes(view) for name, view in views.items()} == {"empty": b"", "one": b"xyz", "last": b"c"}
    payload[0] = ord("!")
    assert bytes(views["one"]) == b"!yz"
    assert section_views(encode_sections({})) == {}


def test_an_arrow_stream_that_is_cut_is_damage() -> None:
    schema = pa.schema([("a", pa.int64())])
    data = memoryview(bytes(memoryview(encode_batches(schema, [pa.record_batch([[1, 2]], schema=schema)])[0])))
    for size in range(0, len(data) - 8, 5):
        with pytest.raises(CorruptionError, match="file is damaged"):
            decode_batches(data[:size], schema, "file")


NUMBERS = st.integers(0, 10**12)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
"""What the API takes for the name of a node."""
UPLOADS = st.tuples(
    NUMBERS.map(CheckpointId),
    st.builds(SubtaskId, NAMES.map(VertexId), st.integers(0, 9_999)),
    NUMBERS.map(Generation),
)


@given(UPLOADS, st.integers(0, 99))
def test_a_name_that_was_made_says_who_wrote_it(
    upload: tuple[CheckpointId, SubtaskId, Generation], number: int
) -> None:
    checkpoint, _, generation = upload
    for path in (snapshot_path(*upload, number), output_path(*upload, number)):
        assert checked_path(path) == path
        assert stored_file(path) == StoredFile(path, checkpoint, generation)


@given(st.lists(st.tuples(UPLOADS, st.integers(0, 3), st.booleans()), unique=True, max_size=6))
def test_no_two_uploads_write_the_same_file(
    files: list[tuple[tuple[CheckpointId, SubtaskId, Generation], int, bool]],
) -> None:
    paths = [output_path(*upload, n) if is_output else snapshot_path(*upload, n) for upload, n, is_output in files]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "log/0000000001",
        "chk-/sums-0.g1",
        "chk-x/sums-0.g1",
        "chk-0000000001",
        "chk-0000000001/",
        "ids/7",
        "chk-²/a.g1",
    ],
)
def test_what_is_no_file_of_a_snapshot_is_nobodys(path: str) -> None:
    assert stored_file(path) is None


@pytest.mark.parametrize("name", ["README", "sums-0.gx", "sums-0.g"])
def test_a_stray_file_among_snapshots_is_of_no_generation(name: str) -> None:
    """It may go like any leftover (SF8)."""
    assert stored_file(f"chk-0000000007/{name}") == StoredFile(f"chk-0000000007/{name}", CheckpointId(7), Generation(0))


SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.large_string())])


def batch_of(rows: int) -> pa.RecordBatch:
    return pa.record_batch([list(range(rows)), [None] * rows], schema=SCHEMA)


def stream_of(*rows: int) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for count in rows:
            writer.write_batch(batch_of(count))
    return memoryview(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("counts", [(), (0,), (3,), (1, 0, 70_000)])
def test_rows_of_all_batches_of_an_arrow_stream_count(counts: tuple[int, ...]) -> None:
    assert stored_rows({"state": stream_of(*counts)}, "here") == {"state": sum(counts)}


@pytest.mark.parametrize(
    ("data", "rows"),
    [(b'{"a": 1, "b": {"c": 2}}', 2), (b"{}", 0), (b"[1, 2]", 0), (b"7", 0), (b"", 0), (b"\xfe\xff", 0), (b"{", 0)],
)
def test_entries_of_a_json_object_count_and_nothing_else_has_rows(data: bytes, rows: int) -> None:
    assert stored_rows({"meta": memoryview(data)}, "here") == {"meta": rows}


def test_a_stream_that_is_cut_is_named_with_its_state() -> None:
    whole = stream_of(100)
    for size in range(4, len(whole) - 8, 7):  # the last 8 bytes only say that nothing follows
        with pytest.raises(CorruptionError, match="here, state 'sums' is damaged at byte 0: expected an Arrow stream"):
            stored_rows({"sums": whole[:size]}, "here")


@pytest.mark.parametrize("owner", [LogOwner(1, 2, 6, ("key",), 3, 3), LogOwner(0, 1, 0, (), 0, 0)])
@pytest.mark.parametrize("rows", [(), (4,), (4, 1, 2)])
def test_the_records_of_a_loop_log_count(owner: LogOwner, rows: tuple[int, ...]) -> None:
    groups = np.zeros(owner.groups_count, np.uint32)
    chunks = []
    for count in rows:
        counts = groups.copy()
        counts[:1] = count
        chunks.append(LogChunk(batch_of(count).serialize(), count, counts))
    data = b"".join(bytes(memoryview(part)) for part in encode_log(owner, SCHEMA, chunks))
    sections = decode_sections(data, "log")
    assert log_rows(sections) == sum(rows)
    assert stored_rows(sections, "here") == {LOG_ROWS: sum(rows)}


@pytest.mark.parametrize("header", [b"", b"nonsense", b"\x80"])
def test_what_only_looks_like_a_loop_log_is_counted_section_by_section(header: bytes) -> None:
    sections = {"header": memoryview(header), "chunks": memoryview(b"")}
    assert log_rows(sections) is None
    assert stored_rows(sections, "here") == {"header": 0, "chunks": 0}


def test_the_first_state_with_other_rows_is_named() -> None:
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 2, "more": 5}) is None
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ("2 rows of state 'b'", "3 rows")
    assert difference({"gone": 4}, {}) == ("4 rows of state 'gone'", "0 rows")
    assert difference({"empty": 0}, {}) is None
