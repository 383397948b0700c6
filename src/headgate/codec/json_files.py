"""Files of one header line and JSON that a person can read.

Log entries, heartbeats, identity, lock, savepoint, sinks.

The header is ``<magic> <version> <xxh3-64 of the body, hex>`` in one line; a log entry's has its kind before the
hash. An entry of the log that does not verify is damage, never a smaller entry.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import msgspec
import xxhash

from headgate.codec.decodable import decodable
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.manifest import LOG_VERSION, SAVEPOINT_VERSION, Claim, LogEntry, Manifest, Savepoint
from headgate.model.pipeline_identity import (
    HEARTBEAT_VERSION,
    LIFE_VERSION,
    TARGETS_VERSION,
    Beat,
    PipelineIdentity,
    ResetOrder,
    Target,
)

_HEARTBEAT_MAGIC = b"headgate-heartbeat %d" % HEARTBEAT_VERSION
_IDENTITY_MAGIC = b"headgate-life"
_LOCK_MAGIC = b"headgate-lock 1"
_SAVEPOINT_MAGIC = b"headgate-savepoint"
_SINKS_MAGIC = b"headgate-targets"
_RESET_MAGIC = b"headgate-reset"

_T = TypeVar("_T")

MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""Other fields; no UTF-8, or what a value of the model refuses; numbers too large; what is nested too deeply."""


def not_beginning_with(magic: bytes, data: bytes, path: str, what: str) -> CorruptionError:
    """Return the error of a file that is not ``what``: damaged if it ends within ``magic``, else foreign."""
    is_cut = magic.startswith(data[: len(magic)])
    return (CorruptionError if is_cut else UnknownFormat)(path, 0, what, repr(data[:24]))


def readable_json(value: object) -> bytes:
    """Return ``value`` as JSON that a person can read. Equal values have equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _encoded(magic: bytes, version: int, value: object) -> bytes:
    body = readable_json(value)
    return b"%s %d %s\n%s" % (magic, version, xxhash.xxh3_64_hexdigest(body).encode(), body)


def _decoded(magic: bytes, version: int, data: bytes, path: str, what: str, kind: type[_T]) -> _T:
    """Return the value in ``data``, a file that is ``what``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is truncated, altered, or of a format that this version does not know.
    """
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != magic:
        raise not_beginning_with(magic, data, path, what)
    if words[1] != str(version).encode():
        raise UnknownFormat(path, len(magic) + 1, f"format version {version}", words[1].decode("latin-1"))
    found = xxhash.xxh3_64_hexdigest(body)
    if found.encode() != words[2]:
        raise CorruptionError(path, len(head) + 1, f"checksum {words[2].decode('latin-1')}", found)
    try:
        return msgspec.json.decode(body, type=decodable(kind))
    except MALFORMED as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error


def _sealed_line(magic: bytes, value: object) -> bytes:
    body = msgspec.json.encode(value) + b"\n"
    return b"%s %s\n%s" % (magic, xxhash.xxh3_64_hexdigest(body).encode(), body)


def _read_line(magic: bytes, data: bytes, kind: type[_T]) -> _T | None:
    head, _, body = data.partition(b"\n")
    if head != b"%s %s" % (magic, xxhash.xxh3_64_hexdigest(body).encode()):
        return None
    try:
        return msgspec.json.decode(body, type=decodable(kind))
    except MALFORMED:
        return None


# -- heartbeats ------------------------------------------------------------------------------------------------------


def encode_beat(beat: Beat) -> bytes:
    """Return the bytes of ``beat``."""
    return _sealed_line(_HEARTBEAT_MAGIC, beat)


def decode_beat(data: bytes) -> Beat | None:
    """Return what ``data`` says, or None when it is damaged or of another version."""
    return _read_line(_HEARTBEAT_MAGIC, data, Beat)


def mark_of(data: bytes) -> str:
    """Return a text that differs from beat to beat, whatever version wrote them."""
    return xxhash.xxh3_64_hexdigest(data)


def beat_path(pipeline: str, generation: int) -> str:
    """Return where a generation beats."""
    return f"{pipeline}/heartbeats/{generation:010d}"


def end_path(pipeline: str, generation: int) -> str:
    """Return where a generation records its end."""
    return f"{beat_path(pipeline, generation)}-ended"


def generation_of(name: str) -> int | None:
    """Return the generation of an object in ``heartbeats/``; None: its name is not one of ours."""
    number = name.removesuffix("-ended")
    return int(number) if len(number) >= 10 and number.isascii() and number.isdigit() else None


# -- identity of a pipeline, what it writes to, savepoints ----------------------------------------------------------


def encode_life(life: PipelineIdentity | None) -> bytes:
    """Return the bytes of ``life``; None: forgotten."""
    return _encoded(_IDENTITY_MAGIC, LIFE_VERSION, life)


def decode_life(data: bytes, path: str) -> PipelineIdentity | None:
    """Return the life in ``data``; raises CorruptionError, which names ``path``."""
    kind: Any = PipelineIdentity | None  # a union is no type[_T] to mypy
    found: PipelineIdentity | None = _decoded(_IDENTITY_MAGIC, LIFE_VERSION, data, path, "the life of a pipeline", kind)
    return found


def encode_savepoint(savepoint: Savepoint) -> bytes:
    """Return the bytes of ``savepoint``."""
    return _encoded(_SAVEPOINT_MAGIC, SAVEPOINT_VERSION, savepoint)


def decode_savepoint(data: bytes, path: str) -> Savepoint:
    """Return the savepoint in ``data``; raises CorruptionError, which names ``path``."""
    return _decoded(_SAVEPOINT_MAGIC, SAVEPOINT_VERSION, data, path, "a savepoint", Savepoint)


def encode_targets(targets: tuple[Target, ...]) -> bytes:
    """Return the bytes of what a pipeline writes to."""
    return _encoded(_SINKS_MAGIC, TARGETS_VERSION, targets)


def decode_targets(data: bytes, path: str) -> tuple[Target, ...]:
    """Return the targets in ``data``; raises CorruptionError, which names ``path``."""
    return _decoded(_SINKS_MAGIC, TARGETS_VERSION, data, path, "headgate-targets", tuple[Target, ...])


def encode_order(order: ResetOrder) -> bytes:
    """Return the bytes of an order to start over."""
    return _encoded(_RESET_MAGIC, TARGETS_VERSION, order)


def decode_order(data: bytes, path: str) -> ResetOrder:
    """Return the order in ``data``; raises CorruptionError, which names ``path``."""
    return _decoded(_RESET_MAGIC, TARGETS_VERSION, data, path, "headgate-reset", ResetOrder)


# -- the lock file of a pipeline -------------------------------------------------------------


class Ending(Enum):
    """How a run ended."""

    NONE = ""
    """It goes on, or has died without a word."""
    FINISHED = "finished"
    DRAINED = "drained"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    """And its checkpoints were removed."""
    FAILED = "failed"
    REPLACED = "replaced"
    """Another run has overwritten its word. Not in files."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock, or the last one that did.

    Attributes:
        owner: who runs the pipeline, for people.
        nonce: differs for every run, also of one process.
        takes_signals: whether SIGTERM stops the pipeline, SIGUSR1 drains it and SIGUSR2 has it read requests; else they
            would kill the process.
        checkpoint: the newest completed checkpoint of the run at its end.
        reason: of a failure.
        supervisor_pid: the process of its supervisor, which starts it again after a crash; 0 if there is none.
        claimant: the name under which it claims, exactly; "" if it does not claim.
        is_in_doubt: it was cancelled, and it is unknown whether its checkpoints are given up (C72).
    """

    owner: str
    host: str
    pid: int
    nonce: str
    takes_signals: bool = False
    ending: Ending = Ending.NONE
    checkpoint: int | None = None
    reason: str = ""
    supervisor_pid: int = 0
    claimant: str = ""
    is_in_doubt: bool = False


def encode_holder(holder: LockHolder) -> bytes:
    """Return the bytes of ``holder``."""
    return _sealed_line(_LOCK_MAGIC, holder)


def decode_holder(data: bytes) -> LockHolder | None:
    """Return what ``data`` says, or None when it is empty, half written or of another format."""
    return _read_line(_LOCK_MAGIC, data, LockHolder)


_MAGIC = b"headgate-log"
_KINDS: dict[bytes, type[Claim] | type[Manifest]] = {b"claim": Claim, b"manifest": Manifest}


def encode_log_entry(entry: LogEntry) -> bytes:
    """Return the bytes of ``entry``."""
    kind = b"claim" if isinstance(entry, Claim) else b"manifest"
    body = readable_json(entry)
    return b"%s %d %s %s\n%s" % (_MAGIC, LOG_VERSION, kind, xxhash.xxh3_64_hexdigest(body).encode(), body)


def decode_log_entry(data: bytes, path: str) -> LogEntry:
    """Return the entry in ``data``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is truncated, altered, or of a format that this version does not know.
    """
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 4 or words[0] != _MAGIC:
        raise not_beginning_with(_MAGIC, data, path, "a checkpoint log entry")
    if words[1] != str(LOG_VERSION).encode():
        raise UnknownFormat(path, len(_MAGIC) + 1, f"format version {LOG_VERSION}", words[1].decode("latin-1"))
    found = xxhash.xxh3_64_hexdigest(body)
    if found.encode() != words[3] or words[2] not in _KINDS:
        expected = f"{words[2].decode('latin-1')} with checksum {words[3].decode('latin-1')}"
        raise CorruptionError(path, len(head) + 1, expected, f"checksum {found}")
    try:
        return msgspec.json.decode(body, type=decodable(_KINDS[words[2]]))
    except MALFORMED as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error


def encode_hint(sequence: int) -> bytes:
    """Return what is noted beside the log: the newest sequence, with a checksum."""
    text = str(sequence)
    return f"{text} {xxhash.xxh3_64_hexdigest(text.encode())}\n".encode()


def decode_hint(data: bytes, path: str) -> int:
    """Return the sequence of a hint.

    Raises:
        CorruptionError
    """
    text, _, checksum = data.decode("latin-1").strip().partition(" ")
    if not (text.isascii() and text.isdigit()):
        raise CorruptionError(path, 0, "a number", repr(text[:20]))
    expected = xxhash.xxh3_64_hexdigest(text.encode())
    if checksum != expected:
        raise CorruptionError(path, 0, f"checksum {expected}", checksum)
    try:
        return int(text)
    except ValueError as error:  # so many digits that Python reads no number in them
        raise CorruptionError(path, 0, "a number", repr(text[:20])) from error
