"""Rows of state are counted in the bytes, whoever wrote them: Arrow streams, JSON, loop logs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headgate.codec.loop_log import LOG_ROWS, LogChunk, LogOwner, encode_log, log_rows
from headgate.codec.snapshot import decode_sections
from headgate.codec.snapshot_rows import difference, stored_rows
from headgate.errors import CorruptionError

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
