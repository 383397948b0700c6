"""Bytes of a checkpoint log entry: one header line, then JSON that a person can read.

``headgate-log <version> <kind> <xxh3-64 of the body, hex>`` in one line, then the body. Counterpart:
``runtime.checkpoints.log``. An entry that does not verify is damage, never a smaller entry.
"""

from __future__ import annotations

import msgspec
import xxhash

from headgate.codec.json_files import MALFORMED, not_beginning_with, readable_json
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.manifest import LOG_VERSION, Claim, LogEntry, Manifest

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
        return msgspec.json.decode(body, type=_KINDS[words[2]])
    except MALFORMED as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error


def encode_hint(sequence: int) -> bytes:
    """Return what is noted beside the log: the newest sequence, with a checksum (R53)."""
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
