"""Bytes of what a pipeline writes to, and of an order to start over.

``headgate-targets <version> <xxh3-64 of the body, hex>\\n`` followed by JSON, and the same with ``headgate-reset``.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from headgate.codec.malformed import MALFORMED, not_beginning_with
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.targets import TARGETS_VERSION, ResetOrder, Target

_TARGETS, _RESET = b"headgate-targets", b"headgate-reset"

_T = TypeVar("_T")


def encode_targets(targets: tuple[Target, ...]) -> bytes:
    """Return the bytes of a record. Equal targets have equal bytes."""
    return _encoded(_TARGETS, targets)


def decode_targets(data: bytes, path: str) -> tuple[Target, ...]:
    """Return the targets in ``data``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is damaged, or of a format that this version does not know.
    """
    return _decoded(_TARGETS, data, path, tuple[Target, ...])


def encode_order(order: ResetOrder) -> bytes:
    """Return the bytes of an order to start over."""
    return _encoded(_RESET, order)


def decode_order(data: bytes, path: str) -> ResetOrder:
    """Return the order in ``data``; ``path`` names it in errors.

    Raises:
        CorruptionError: it is damaged, or of a format that this version does not know.
    """
    return _decoded(_RESET, data, path, ResetOrder)


def _encoded(magic: bytes, value: object) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(value), indent=1)
    return b"%s %d %s\n%s" % (magic, TARGETS_VERSION, xxhash.xxh3_64_hexdigest(body).encode(), body)


def _decoded(magic: bytes, data: bytes, path: str, kind: type[_T]) -> _T:
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != magic:
        raise not_beginning_with(magic, data, path, magic.decode())
    if words[1] != str(TARGETS_VERSION).encode():
        raise UnknownFormat(path, len(magic) + 1, f"format version {TARGETS_VERSION}", words[1].decode("latin-1"))
    found = xxhash.xxh3_64_hexdigest(body)
    if found.encode() != words[2]:
        raise CorruptionError(path, len(head) + 1, f"checksum {words[2].decode('latin-1')}", found)
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as error:
        raise CorruptionError(path, len(head) + 1, "the fields of this version", str(error)) from error
