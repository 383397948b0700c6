"""Errors on their way from a server to its clients: each is the same there as here.

Counterparts: ``serving.carrying`` sends them, ``client`` raises them. Source: SS18 of docs/spec/served-store.md. Never
makes anything of bytes but the errors of this list.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headgate.errors import (
    CorruptionError,
    FencedError,
    HeadgateError,
    ProtocolViolation,
    StorageError,
    TruncatedError,
    UsageError,
    gone,
)
from headgate.model.life import Owner
from headgate.storage.base import AlreadyExists, NotFound
from headgate.store.served.values import decode, encode
from headgate.store.streams import OtherLayoutError, OtherSchemaError, RemovedFileError

Argument: TypeAlias = str | int | bool


class UnjudgedError(Exception):
    """The server asks whether what ``owner`` wrote is the caller's own (SS17). Expected: not a HeadgateError."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self.owner = owner


class Failure(msgspec.Struct, frozen=True):
    """An error: its kind, and what it was made of."""

    kind: str
    arguments: tuple[Argument, ...] = ()
    is_output_gone: bool = False
    owner: Owner | None = None


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        UsageError, OtherLayoutError, OtherSchemaError, CorruptionError, FencedError, TruncatedError, StorageError,
        AlreadyExists, NotFound, RemovedFileError,
    )
}  # fmt: skip


def encode_failure(error: Exception) -> bytes | None:
    """Return the bytes of an error; None: it is none that a caller knows, but a mistake of ours."""
    if isinstance(error, UnjudgedError):
        return encode(Failure(UnjudgedError.__name__, owner=error.owner))
    if isinstance(error, ProtocolViolation):
        return None
    kind = next((of.__name__ for of in type(error).__mro__ if _KINDS.get(of.__name__) is of), None)
    if kind is None:
        return None
    is_output_gone = isinstance(error, HeadgateError) and error.is_output_gone
    return encode(Failure(kind, error.args, is_output_gone))


def decode_failure(data: bytes, root: str, url: str) -> Exception:
    """Return the error in ``data``. Where a user is told of the server's directory ``root`` it is the store's URL.

    Raises:
        ProtocolViolation: it is none.
    """
    failure = decode(data, Failure)
    if failure.kind == UnjudgedError.__name__ and failure.owner is not None:
        return UnjudgedError(failure.owner)
    kind = _KINDS.get(failure.kind)
    if kind is None:
        raise ProtocolViolation("served store", f"an error of the unknown kind {failure.kind!r}")
    arguments = failure.arguments
    if issubclass(kind, UsageError):
        arguments = tuple(x.replace(root, url) if isinstance(x, str) else x for x in arguments)
    try:
        error = kind(*arguments)
    except TypeError as unfit:
        raise ProtocolViolation("served store", f"an error made of other things: {unfit}") from unfit
    return gone(error) if failure.is_output_gone and isinstance(error, HeadgateError) else error
