"""Bytes of a checkpoint log entry: one header line, then JSON that a person can read.

``headgate-log <version> <kind> <xxh3-64 of the body, hex>\\n`` followed by the body. Counterpart:
``runtime.checkpoints.log``. An entry that does not verify is damage, never a smaller entry. Entries of version 1 are
read: the one snapshot of a subtask becomes its only part (SF2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import xxhash

from headgate.codec.json_files import MALFORMED, not_beginning_with
from headgate.codec.snapshot import (
    CHUNKS_DESCRIPTION,
    FILES_PREFIX,
    IN_FLIGHT_PREFIX,
)
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import (
    CHUNKS_VERSION,
    FILES_VERSION,
    FORMER_CHUNKS_VERSION,
    IN_FLIGHT_VERSION,
    LATER_LIFE_VERSION,
    LEFT_VERSION,
    MANIFEST_VERSION,
    ORDER_VERSION,
    PACKED_FILES_VERSION,
    PIECES_VERSION,
    TIMED_FILES_VERSION,
    Claim,
    Committable,
    HookState,
    LogEntry,
    Manifest,
    SnapshotDelays,
    SnapshotPart,
    SubtaskEntry,
)

_MAGIC = b"headgate-log"
_KNOWN = (
    1,
    MANIFEST_VERSION,
    IN_FLIGHT_VERSION,
    LATER_LIFE_VERSION,
    PIECES_VERSION,
    FILES_VERSION,
    ORDER_VERSION,
    LEFT_VERSION,
    FORMER_CHUNKS_VERSION,
    CHUNKS_VERSION,
    TIMED_FILES_VERSION,
    PACKED_FILES_VERSION,
)
_VERSIONS = {str(version).encode(): version for version in _KNOWN}
_LEFT_OUT: dict[str, Any] = {"origin": None, "place": None, "order": None, "left": (), "totals": {}, "lineages": {}}
"""What is not written where it says nothing, so that entries without it are what they were before."""
_KINDS: dict[bytes, type[Claim] | type[Manifest]] = {b"claim": Claim, b"manifest": Manifest}


def encode_log_entry(entry: LogEntry) -> bytes:
    """Return the bytes of ``entry``."""
    kind = b"claim" if isinstance(entry, Claim) else b"manifest"
    body = msgspec.json.format(msgspec.json.encode(_fields(entry)), indent=1)
    checksum = xxhash.xxh3_64_hexdigest(body).encode()
    return b"%s %d %s %s\n%s" % (_MAGIC, _version(entry), kind, checksum, body)


def _version(entry: LogEntry) -> int:
    """Return what a reader must know (UA18, LV7, SF14, SF16, SO9, SV26, MC8)."""
    if isinstance(entry, Claim) and entry.order is not None:
        return ORDER_VERSION
    parts = entry.parts if isinstance(entry, Manifest) else ()
    files = [part.name for part in parts if part.section.startswith(FILES_PREFIX)]
    if CHUNKS_DESCRIPTION in files:
        return CHUNKS_VERSION
    if isinstance(entry, Manifest) and entry.left:
        return LEFT_VERSION
    if files:
        return FILES_VERSION
    if isinstance(entry, Manifest) and any(committable.pieces for committable in entry.committables):
        return PIECES_VERSION
    if entry.life:
        return LATER_LIFE_VERSION
    has_records = any(part.section.startswith(IN_FLIGHT_PREFIX) for part in parts)
    return IN_FLIGHT_VERSION if has_records else MANIFEST_VERSION


class _Undelayed(msgspec.Struct, frozen=True):
    """What a subtask that measured no delays contributed: a ``SubtaskEntry`` without them."""

    subtask: SubtaskId
    parts: tuple[SnapshotPart, ...]
    committables: tuple[Committable | _Whole, ...]


class _Delayed(_Undelayed, frozen=True):
    """The same with delays."""

    delays: SnapshotDelays


class _Whole(msgspec.Struct, frozen=True):
    """Output that is not in pieces: a ``Committable`` without them."""

    sink: str
    checkpoint: CheckpointId
    subtask_index: int
    generation: Generation
    payload: bytes
    stored: SnapshotPart | None


def _fields(entry: LogEntry) -> dict[str, Any]:
    """Return the fields of ``entry`` as they are written, without the delays of subtasks that measured none.

    Output that is not in pieces does not say so, so that releases that know of none read it as ever (SF14).
    A pipeline that was never restored by name does not say so in each manifest, nor do its hooks, nor
    one in its first life, nor one that never went back. A claim names an order only if it is one (SO9).
    """
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    if not entry.life:
        del fields["life"]
    if isinstance(entry, Manifest):
        fields["entries"] = [_written(subtask) for subtask in entry.entries]
        fields["carried"] = [_written_output(committable) for committable in entry.carried]
        fields["hooks"] = [_written_hook(hook) for hook in entry.hooks]
    return {name: value for name, value in fields.items() if name not in _LEFT_OUT or value != _LEFT_OUT[name]}


def _written(entry: SubtaskEntry) -> _Undelayed:
    output = tuple(_written_output(committable) for committable in entry.committables)
    if entry.delays is None:
        return _Undelayed(entry.subtask, entry.parts, output)
    return _Delayed(entry.subtask, entry.parts, output, entry.delays)


def _written_output(output: Committable) -> Committable | _Whole:
    if output.pieces:
        return output
    return _Whole(
        output.sink, output.checkpoint, output.subtask_index, output.generation, output.payload, output.stored
    )


def _written_hook(hook: HookState) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(hook)
    return {name: value for name, value in fields.items() if value is not None or name != "checkpoint"}


def decode_log_entry(data: bytes, path: str) -> LogEntry:
    """Return the entry in ``data``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is truncated, altered, or of a format that this version does not know.
    """
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 4 or words[0] != _MAGIC:
        raise not_beginning_with(_MAGIC, data, path, "a checkpoint log entry")
    if words[1] not in _VERSIONS:
        expected = f"format version {max(_KNOWN)} or less"
        raise UnknownFormat(path, len(_MAGIC) + 1, expected, words[1].decode("latin-1"))
    found = xxhash.xxh3_64_hexdigest(body)
    if found.encode() != words[3] or words[2] not in _KINDS:
        expected = f"{words[2].decode('latin-1')} with checksum {words[3].decode('latin-1')}"
        raise CorruptionError(path, len(head) + 1, expected, f"checksum {found}")
    try:
        if _VERSIONS[words[1]] == 1 and words[2] == b"manifest":
            return _manifest_of_version_1(body)
        entry = msgspec.json.decode(body, type=_KINDS[words[2]])
    except (*MALFORMED, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error
    if _VERSIONS[words[1]] not in (1, _version(entry)):  # the checksum is that of the body
        expected = f"format version {_version(entry)}"
        raise CorruptionError(path, len(_MAGIC) + 1, expected, words[1].decode("latin-1"))
    return entry


def _manifest_of_version_1(body: bytes) -> Manifest:
    """Return a manifest whose subtasks have one snapshot each: the fields of its handle are those of a part."""
    fields = msgspec.json.decode(body)
    for entry in fields["entries"]:
        entry["parts"] = [entry.pop("handle")]
    return msgspec.convert(fields, Manifest)


def encode_hint(sequence: int) -> bytes:
    """Return what is noted beside the log: the newest sequence, with a checksum (R53)."""
    text = str(sequence)
    return f"{text} {xxhash.xxh3_64_hexdigest(text.encode())}\n".encode()


def decode_hint(data: bytes, path: str) -> int:
    """Return the sequence of a hint; version 0.1 wrote it without a checksum.

    Raises:
        CorruptionError
    """
    text, _, checksum = data.decode("latin-1").strip().partition(" ")
    if not (text.isascii() and text.isdigit()):
        raise CorruptionError(path, 0, "a number", repr(text[:20]))
    expected = xxhash.xxh3_64_hexdigest(text.encode())
    if checksum and checksum != expected:
        raise CorruptionError(path, 0, f"checksum {expected}", checksum)
    try:
        return int(text)
    except ValueError as error:  # so many digits that Python reads no number in them
        raise CorruptionError(path, 0, "a number", repr(text[:20])) from error
