"""The bytes of a loop log: everything comes back, damage never does."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from headgate.codec.loop_log import LogChunk, LogHeader, LogOwner, decode_log, encode_log
from headgate.codec.snapshot import decode_sections, encode_sections
from headgate.errors import CorruptionError

SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.large_string())])
KEYED = LogOwner(1, 2, 6, ("key",), 3, 3)
PLAIN = LogOwner(0, 1, 0, (), 0, 0)


def chunk(rows: list[tuple[int, str | None]], counts: list[int]) -> LogChunk:
    batch = pa.record_batch([[key for key, _ in rows], [text for _, text in rows]], schema=SCHEMA)
    return LogChunk(batch.serialize(), len(rows), np.array(counts, dtype=np.uint32))


def joined(owner: LogOwner, chunks: list[LogChunk]) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in encode_log(owner, SCHEMA, chunks))


def with_sections(data: bytes, **changes: bytes) -> bytes:
    """Return the log with other sections, under valid checksums."""
    sections = {name: [bytes(part)] for name, part in decode_sections(data, "log").items()}
    sections |= {name: [part] for name, part in changes.items()}
    return b"".join(bytes(memoryview(part)) for part in encode_sections(sections))


TWO = joined(KEYED, [chunk([(1, "a"), (2, None), (2, "b")], [1, 0, 2]), chunk([(3, "c")], [0, 1, 0])])


def test_a_log_comes_back_onlyby_chunk() -> None:
    log = decode_log(TWO, SCHEMA, "log")
    assert (log.owner, log.rows, log.group_rows.tolist()) == (KEYED, 4, [1, 1, 2])
    assert [one.batch(SCHEMA, "log").to_pydict() for one in log.chunks] == [
        {"key": [1, 2, 2], "text": ["a", None, "b"]},
        {"key": [3], "text": ["c"]},
    ]
    assert [one.group_rows.tolist() for one in log.chunks] == [[1, 0, 2], [0, 1, 0]]


def test_an_empty_log_still_says_of_every_owned_key_group_that_it_is_empty() -> None:
    data = joined(KEYED, [])
    assert decode_sections(data, "log")["groups"] == bytes(3 * 8)
    log = decode_log(data, SCHEMA, "log")
    assert (log.rows, log.group_rows.tolist(), log.chunks) == (0, [0, 0, 0], ())


def test_a_log_without_a_key_has_no_key_groups() -> None:
    log = decode_log(joined(PLAIN, [chunk([(1, "a"), (9, "b")], [])]), SCHEMA, "log")
    assert (log.owner, log.rows, len(log.group_rows)) == (PLAIN, 2, 0)


def test_the_layout_is_frozen() -> None:
    sections = decode_sections(TWO, "log")
    assert list(sections) == ["header", "schema", "groups", "chunks", "batches"]
    assert msgspec.msgpack.decode(sections["header"]) == {
        "format": "headgate-looplog",
        "version": 1,
        "owner": {
            "subtask_index": 1,
            "parallelism": 2,
            "max_parallelism": 6,
            "keys": ["key"],
            "first_group": 3,
            "groups_count": 3,
        },
        "chunks_count": 2,
    }
    sizes = [len(memoryview(one.message)).to_bytes(8, "little") for one in decode_log(TWO, SCHEMA, "log").chunks]
    counts = ["0300000000000000010000000000000002000000", "0100000000000000000000000100000000000000"]
    assert bytes(sections["chunks"]) == b"".join(
        size + bytes.fromhex(count) for size, count in zip(sizes, counts, strict=True)
    )
    assert bytes(sections["groups"]) == bytes.fromhex("010000000000000001000000000000000200000000000000")


def test_every_flipped_byte_and_every_truncation_is_found() -> None:
    for at in range(len(TWO)):
        damaged = bytearray(TWO)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptionError, match=r"the log of x is (damaged at byte|not in a format)"):
            decode_log(damaged, SCHEMA, "the log of x")
        with pytest.raises(CorruptionError):
            decode_log(TWO[:at], SCHEMA, "the log of x")


def test_another_version_is_named() -> None:
    header = msgspec.msgpack.encode(LogHeader("headgate-looplog", 2, KEYED, 2))
    with pytest.raises(CorruptionError, match="expected headgate-looplog version 1, found headgate-looplog version 2"):
        decode_log(with_sections(TWO, header=header), SCHEMA, "log")


def test_another_schema_is_refused() -> None:
    with pytest.raises(CorruptionError, match="expected columns"):
        decode_log(TWO, pa.schema([("key", pa.int32()), ("text", pa.large_string())]), "log")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"header": b"\xc1"}, "the header of a loop log"),
        ({"schema": b"no"}, "a schema"),
        ({"groups": bytes(16)}, "row counts of 3 key groups"),
        ({"groups": bytes(24)}, "as their key groups say"),
        ({"chunks": b""}, "2 chunks of 28 bytes"),
        ({"batches": b""}, "bytes of batches"),
        ({"chunks": bytes(8) + (3).to_bytes(8, "little") + bytes(12) + bytes(28)}, "3 rows in a chunk"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(changes: dict[str, bytes], problem: str) -> None:
    with pytest.raises(CorruptionError, match=problem):
        decode_log(with_sections(TWO, **changes), SCHEMA, "log")


def test_a_container_that_is_no_loop_log_is_refused() -> None:
    data = b"".join(bytes(memoryview(part)) for part in encode_sections({"accumulators": [b""]}))
    with pytest.raises(CorruptionError, match=r"sections .* of a loop log"):
        decode_log(data, SCHEMA, "log")


def test_a_onlythat_is_no_batch_of_its_size_is_refused() -> None:
    good = decode_log(TWO, SCHEMA, "log").chunks[0]
    with pytest.raises(CorruptionError, match="a chunk of 4 rows"):
        LogChunk(good.message, 4, good.group_rows).batch(SCHEMA, "log")
    with pytest.raises(CorruptionError, match="a record batch"):
        LogChunk(b"nonsense", 4, good.group_rows).batch(SCHEMA, "log")


def test_the_messages_of_chunks_are_not_copied() -> None:
    one = chunk([(1, "a")], [1, 0, 0])
    assert encode_log(KEYED, SCHEMA, [one])[-1] is one.message
