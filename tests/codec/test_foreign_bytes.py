"""Whatever bytes a codec is given, also under a right checksum: it answers, or refuses them with its own error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.codec import messages
from headgate.codec.json_files import (
    Ending,
    LockHolder,
    decode_beat,
    decode_hint,
    decode_holder,
    decode_life,
    decode_log_entry,
    decode_order,
    decode_savepoint,
    decode_targets,
    encode_hint,
    encode_holder,
    encode_life,
    encode_log_entry,
)
from headgate.codec.snapshot import FILES_PREFIX, IN_FLIGHT_PREFIX
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Claim, Committable, LogEntry, Manifest, SnapshotDelays, SnapshotPart, SubtaskEntry
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.checkpoints.coordinator_events import Acknowledged

PART = SnapshotPart(3, 7, "", b"abc", {"sum": {"accumulators": 250_000}})
IN_FLIGHT = SnapshotPart(3, 7, "", b"abc", section=f"{IN_FLIGHT_PREFIX}sum", name="a way")
FILE = SnapshotPart(3, 7, "chk-4/f", section=f"{FILES_PREFIX}sum", name="000012.sst")
OUTPUT = Committable("out", CheckpointId(4), 1, Generation(3), b"\x00\xff")
IN_PIECES = dataclasses.replace(OUTPUT, pieces=(SnapshotPart(3, 7, "chk-4/a"), SnapshotPart(4, 8, "chk-4/b")))


def manifest_of(part: SnapshotPart = PART, output: Committable = OUTPUT, life: int = 0) -> Manifest:
    subtask = SubtaskId(VertexId("source"), 1)
    entry = SubtaskEntry(subtask, (PART, part), (output,), SnapshotDelays(1, 2))
    held = Manifest(CheckpointId(4), Generation(3), 2, 128, (entry,), (output,), {"source": "rows"}, False, 5, 6)
    return dataclasses.replace(held, life=life)


ENTRIES: list[LogEntry] = [
    Claim(Generation(3), "process 1 on host ä", 1_700_000_000_000),
    manifest_of(),
    manifest_of(IN_FLIGHT),
    manifest_of(life=2),
    manifest_of(output=IN_PIECES, life=2),
    manifest_of(FILE, IN_PIECES),
]

TOO_DEEP = b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
NOT_UTF8 = b'{"generation":3,"owner":"\xff","claimed_ms":1,"pipeline":"\xff","entries":"\xff","host":"\xff"}'


def summed(head: bytes, body: bytes) -> bytes:
    """Return what has ``body`` behind ``head`` and its right checksum."""
    return b"%s %s\n%s" % (head, xxhash.xxh3_64_hexdigest(body).encode(), body)


def altered(data: st.DataObject, raw: bytes) -> bytes:
    """Return some other bytes made of ``raw``: cut off, with a flipped bit, with bytes put in, or all at once."""
    found = bytearray(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    if found and data.draw(st.booleans()):
        found[data.draw(st.integers(0, len(found) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    at = data.draw(st.integers(0, len(found)))
    found[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    return bytes(found)


@given(st.sampled_from(ENTRIES), st.data())
def test_an_altered_entry_is_refused(entry: LogEntry, data: st.DataObject) -> None:
    whole = encode_log_entry(entry)
    raw = altered(data, whole)
    with contextlib.nullcontext() if raw == whole else pytest.raises(CorruptionError, match="log/1"):
        decode_log_entry(raw, "log/1")


@given(st.sampled_from(ENTRIES), st.data())
def test_other_fields_under_a_right_checksum_are_an_entry_or_refused(entry: LogEntry, data: st.DataObject) -> None:
    head, _, body = encode_log_entry(entry).partition(b"\n")
    raw = summed(b" ".join(head.split(b" ")[:3]), altered(data, body))
    with contextlib.suppress(CorruptionError):
        assert isinstance(decode_log_entry(raw, "log/1"), Claim | Manifest)


@given(st.binary(max_size=40), st.data())
@example(b"1" * 5_000, None)
def test_other_bytes_are_a_hint_or_refused(raw: bytes, data: st.DataObject | None) -> None:
    for found in (raw, *([] if data is None else [altered(data, encode_hint(4_711))])):
        with contextlib.suppress(CorruptionError):
            assert decode_hint(found, "log-hint") >= 0


HOLDERS = [
    LockHolder("process 7 of ü", "host", 7, "nonce"),
    LockHolder("o", "h", 1, "n", True, Ending.FAILED, 12, "storage\nis full", 9),
]


@given(st.sampled_from(HOLDERS), st.data())
def test_an_altered_holder_says_nothing(holder: LockHolder, data: st.DataObject) -> None:
    whole = encode_holder(holder)
    raw = altered(data, whole)
    assert decode_holder(raw) == (holder if raw == whole else None)
    body = altered(data, whole.partition(b"\n")[2])
    found = decode_holder(summed(b"headgate-lock 1", body))
    assert found is None or isinstance(found, LockHolder)


@pytest.mark.parametrize("body", [TOO_DEEP, NOT_UTF8, b"\xff", b'"\xff"', b"[1]", b'{"entries":[1]}', b"1e999"])
@pytest.mark.parametrize(
    ("head", "decode"),
    [
        ("headgate-log 1 claim", decode_log_entry),
        ("headgate-log 1 manifest", decode_log_entry),
        ("headgate-savepoint 1", decode_savepoint),
        ("headgate-life 1", decode_life),
        ("headgate-targets 1", decode_targets),
        ("headgate-reset 1", decode_order),
    ],
)
def test_nonsense_under_a_right_checksum_is_refused(
    head: str, decode: Callable[[bytes, str], object], body: bytes
) -> None:
    with pytest.raises(CorruptionError, match="here"):
        decode(summed(head.encode(), body), "here")


@pytest.mark.parametrize("body", [TOO_DEEP, NOT_UTF8, b"\xff", b'"\xff"', b"[1]"])
def test_nonsense_under_a_right_checksum_is_no_holder_and_no_beat(body: bytes) -> None:
    assert decode_holder(summed(b"headgate-lock 1", body)) is None
    assert decode_beat(summed(b"headgate-heartbeat 1", body)) is None


@given(st.data())
def test_an_altered_life_is_refused(data: st.DataObject) -> None:
    whole = encode_life(PipelineIdentity("a", "/home", "host", 1))
    raw = altered(data, whole)
    with contextlib.nullcontext() if raw == whole else pytest.raises(CorruptionError, match="here"):
        decode_life(raw, "here")


ACKNOWLEDGED = Acknowledged(
    Generation(1), CheckpointId(2), SubtaskEntry(SubtaskId(VertexId("sink"), 1), (PART,), (IN_PIECES,))
)
FAILED = Failure(FailureKind.LOST, "the data connection with worker 0 was lost")
MESSAGES: list[messages.Message] = [
    messages.Register(1, 2, 3, 0, messages.Address("127.0.0.1", 65_535), 77, "abc"),
    messages.Acknowledge(ACKNOWLEDGED),
    messages.Failed(1, FAILED, 0),
    messages.Deploy(
        4, [messages.Address("h", 1)], [messages.Restored(ACKNOWLEDGED.entry.subtask, 2, (PART,))], 1, 5, 2
    ),
    messages.Stop("finished", True),
    messages.DataRefused(3, "another generation"),
]
DECODERS = (messages.decode_from_worker, messages.decode_to_worker, messages.decode_greeting)


@given(st.sampled_from(MESSAGES), st.data())
@example(b"\x82\xa4type\xa5ready\xa1x" + b"\x91" * 20_000, None)
@example(b"\x82\xa4type\xa4stop\xa6reason\xa2\xff\xff", None)
def test_altered_messages_are_a_message_or_refused(message: messages.Message | bytes, data: st.DataObject) -> None:
    """Cut off, flipped and with bytes put in: a length in the middle then says something else."""
    raw = message if isinstance(message, bytes) else altered(data, messages.encode_message(message))
    for decode in DECODERS:
        with contextlib.suppress(ProtocolViolation):
            assert isinstance(decode(raw), msgspec.Struct)


@given(st.sampled_from(MESSAGES), st.data())
def test_messages_with_other_values_are_a_message_or_refused(message: messages.Message, data: st.DataObject) -> None:
    """Well formed, so that what is refused is refused for its meaning."""
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    raw = msgspec.msgpack.encode(with_another_value(fields, data))
    for decode in DECODERS:
        with contextlib.suppress(ProtocolViolation):
            assert isinstance(decode(raw), msgspec.Struct)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
ODD: st.SearchStrategy[object] = st.none() | st.booleans() | NUMBERS | st.text(max_size=3) | st.just([]) | st.just({})


def with_another_value(fields: object, data: st.DataObject) -> object:
    """Return ``fields`` with something odd in the place of one value, however deep."""
    if not isinstance(fields, dict | list) or not fields or data.draw(st.integers(0, 3)) == 0:
        return data.draw(ODD)
    if isinstance(fields, dict):
        name = data.draw(st.sampled_from(list(fields)))
        return {**fields, name: with_another_value(fields[name], data)}
    at = data.draw(st.integers(0, len(fields) - 1))
    return [*fields[:at], with_another_value(fields[at], data), *fields[at + 1 :]]
