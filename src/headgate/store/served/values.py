"""Values of verbs as bytes, and back: msgpack, of the types that the verbs are declared with.

Counterpart: ``verbs``, which says of which type a value is. Source: SS6 of docs/spec/served-store.md. Never makes
anything of bytes but values of the type that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import xxhash

from headgate.codec.malformed import MALFORMED
from headgate.errors import ProtocolViolation, UsageError

_T = TypeVar("_T")


def encode(value: object) -> bytes:
    """Return the bytes of a value.

    Raises:
        UsageError: a text or a number in it cannot be sent.
    """
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError) as error:
        raise UsageError(f"a name or number cannot be sent to the server of a store: {error}") from error


def decode(data: bytes, of: type[_T]) -> _T:
    """Return the value of type ``of`` in ``data``.

    Raises:
        ProtocolViolation: it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=of, dec_hook=_special)
    except (*MALFORMED, pa.ArrowException, TypeError, OSError) as error:
        raise ProtocolViolation("served store", f"bytes that are no {of}: {error}") from error


def checksum_of(*parts: Any) -> str:
    """Return what stands in front of bytes on their way, so that it is noticed if they are others when they arrive."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _plain(value: object) -> object:
    """Return what msgpack knows instead of ``value``."""
    if isinstance(value, pa.Schema):
        return value.serialize().to_pybytes()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AbstractSet):
        return list(value)
    if hasattr(value, "__index__"):
        return int(value.__index__())
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _special(of: type, value: Any) -> Any:
    if of is pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(value))
    raise NotImplementedError(f"no {of} is sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
