"""Bytes of a pipeline's life, in its checkpoint directory and in the targets of its sinks.

``headgate-life <version> <xxh3-64 of the body, hex>\\n`` followed by JSON; the body ``null`` says that it is forgotten.
"""

from __future__ import annotations

import msgspec
import xxhash

from headgate.codec.malformed import MALFORMED, not_beginning_with
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.life import LIFE_VERSION, Life

_MAGIC = b"headgate-life"


def encode_life(life: Life | None) -> bytes:
    """Return the bytes of ``life``; None: forgotten."""
    body = msgspec.json.format(msgspec.json.encode(life), indent=1)
    return b"%s %d %s\n%s" % (_MAGIC, LIFE_VERSION, xxhash.xxh3_64_hexdigest(body).encode(), body)


def decode_life(data: bytes, path: str) -> Life | None:
    """Return the life in ``data``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is truncated, altered, or of a format that this version does not know.
    """
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC:
        raise not_beginning_with(_MAGIC, data, path, "the life of a pipeline")
    if words[1] != str(LIFE_VERSION).encode():
        raise UnknownFormat(path, len(_MAGIC) + 1, f"format version {LIFE_VERSION}", words[1].decode("latin-1"))
    found = xxhash.xxh3_64_hexdigest(body)
    if found.encode() != words[2]:
        raise CorruptionError(path, len(head) + 1, f"checksum {words[2].decode('latin-1')}", found)
    try:
        return msgspec.json.decode(body, type=Life | None)
    except MALFORMED as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error
