"""Bytes of a heartbeat: ``headgate-heartbeat <version> <xxh3-64 of the body, hex>\\n`` followed by JSON.

Counterparts: ``runtime.driver.heart`` writes, ``runtime.driver.lookout`` reads. What does not verify says nothing
(SB5).
"""

from __future__ import annotations

import msgspec
import xxhash

from headgate.codec.malformed import MALFORMED
from headgate.model.heartbeat import HEARTBEAT_VERSION, Beat

_MAGIC = b"headgate-heartbeat %d" % HEARTBEAT_VERSION


def encode_beat(beat: Beat) -> bytes:
    """Return the bytes of ``beat``."""
    fields = msgspec.to_builtins(beat)
    if not beat.was_draining:
        del fields["was_draining"]  # the bytes are those of releases that do not know it
    body = msgspec.json.encode(fields) + b"\n"
    return b"%s %s\n%s" % (_MAGIC, xxhash.xxh3_64_hexdigest(body).encode(), body)


def decode_beat(data: bytes) -> Beat | None:
    """Return what ``data`` says, or None when it is damaged or of another version."""
    head, _, body = data.partition(b"\n")
    if head != b"%s %s" % (_MAGIC, xxhash.xxh3_64_hexdigest(body).encode()):
        return None
    try:
        return msgspec.json.decode(body, type=Beat)
    except MALFORMED:
        return None


def mark_of(data: bytes) -> str:
    """Return a text that differs from beat to beat, whatever version wrote them."""
    return xxhash.xxh3_64_hexdigest(data)


def beat_path(pipeline: str, generation: int) -> str:
    """Return where a generation beats."""
    return f"{pipeline}/heartbeats/{generation:010d}"


def end_path(pipeline: str, generation: int) -> str:
    """Return where a generation records its end (SB3)."""
    return f"{beat_path(pipeline, generation)}-ended"


def generation_of(name: str) -> int | None:
    """Return whose an object in ``heartbeats/`` is; None: not ours."""
    number = name.removesuffix("-ended")
    return int(number) if len(number) >= 10 and number.isascii() and number.isdigit() else None
