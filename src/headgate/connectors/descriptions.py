"""Positions and committables of a checkpoint as text for people (RS10).

Never unpickles anything, and never fails: what it does not know is shown as bytes only.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict

import msgspec

from headgate.connectors.files.line_file import FilePosition
from headgate.connectors.files.parquet import ParquetPosition
from headgate.connectors.streams import decode_position
from headgate.errors import CorruptionError, UsageError
from headgate.model.state_schema import Form, StateIdentity

_STREAM_START = b"\xff\xff\xff\xff"
"""Every Arrow stream begins so."""


def position_text(identity: StateIdentity, split: str, data: bytes) -> str | None:
    """Return what a position says, or None. ``identity``: of the source that wrote it."""
    form = identity.form
    with contextlib.suppress(CorruptionError, UsageError):  # damaged, or of an earlier version
        if form is Form.LINES:
            return json.dumps(asdict(FilePosition.decode(split, data)))
        if form is Form.PARQUET:
            return json.dumps(asdict(ParquetPosition.decode(split, data)))
        if form is Form.STREAM:
            place = decode_position(split, data)
            position, end = place.position, place.end
            return json.dumps(
                ({"position": position} if place.is_begun else {}) | ({} if end is None else {"end": end})
            )
        if form in (Form.GENERATOR, Form.ROWS) and len(data) == 8:
            return json.dumps({"row": int.from_bytes(data, "little")})
    return readable(data)


def committable_text(payload: bytes) -> str | None:
    """Return what a prepared output says, or None: the files, the transaction, or its name."""
    head, _, rest = payload.partition(b"\n")
    if not rest:
        return readable(payload)
    if rest.startswith(b"{"):  # a checksum, and the list of files
        return readable(rest)
    name, _, records = rest.partition(b"\n")
    if head == b"2":  # how many pieces there are stands behind it
        return readable(name)
    return readable(name if head == b"1" and records.startswith(_STREAM_START) else rest if head == b"1" else payload)


def readable(data: bytes) -> str | None:
    """Return ``data`` as text if it is text, or as JSON if it is msgpack of a list or a map; else None."""
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode()
        return text if text.isprintable() or text.strip().startswith(("{", "[")) else None
    with contextlib.suppress(msgspec.DecodeError, TypeError, ValueError):
        found = msgspec.msgpack.decode(data)
        if isinstance(found, list | dict):
            return msgspec.json.encode(found).decode()
    return None
