"""Bytes of a savepoint's own file: one header line, then JSON that a person can read.

``headgate-savepoint <version> <xxh3-64 of the body, hex>\\n`` followed by the body. Counterpart:
``runtime.checkpoints.savepoints``.
"""

from __future__ import annotations

import msgspec
import xxhash

from headgate.codec.malformed import MALFORMED, not_beginning_with
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.savepoint import SAVEPOINT_VERSION, Savepoint

_MAGIC = b"headgate-savepoint"


def encode_savepoint(savepoint: Savepoint) -> bytes:
    """Return the bytes of ``savepoint``."""
    body = msgspec.json.format(msgspec.json.encode(savepoint), indent=1)
    return b"%s %d %s\n%s" % (_MAGIC, SAVEPOINT_VERSION, xxhash.xxh3_64_hexdigest(body).encode(), body)


def decode_savepoint(data: bytes, path: str) -> Savepoint:
    """Return the savepoint in ``data``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is truncated, altered, or of a format that this version does not know (SV6).
    """
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC:
        raise not_beginning_with(_MAGIC, data, path, "a savepoint")
    if words[1] != str(SAVEPOINT_VERSION).encode():
        expected = f"format version {SAVEPOINT_VERSION} or less"
        raise UnknownFormat(path, len(_MAGIC) + 1, expected, words[1].decode("latin-1"))
    found = xxhash.xxh3_64_hexdigest(body)
    if found.encode() != words[2]:
        raise CorruptionError(path, len(head) + 1, f"checksum {words[2].decode('latin-1')}", found)
    try:
        return msgspec.json.decode(body, type=Savepoint)
    except MALFORMED as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error
