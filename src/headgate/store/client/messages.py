"""Messages between a server of a store and its clients: values, errors, and the signatures of verbs.

Counterparts: ``remote_store`` asks, ``server.handlers`` carries out. Source: SS18 of docs/spec/served-
store.md. A verb that the catalogue gets is offered, too: its declaration is all that there is to say. Never makes
anything of bytes but values of the type that was asked for, and errors of one list.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec
import pyarrow as pa
import xxhash

from headgate.codec.decodable import decodable
from headgate.codec.json_files import MALFORMED
from headgate.dataclass import dataclass
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
from headgate.model.pipeline_identity import Mine, Owner
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.store.catalogue.base import VERBS, Catalogue
from headgate.store.streams import OtherLayoutError, OtherSchemaError, RemovedFileError

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
        return msgspec.msgpack.decode(data, type=decodable(of), dec_hook=_special)
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


Argument: TypeAlias = str | int | bool


class UnjudgedError(Exception):
    """The server asks whether what ``owner`` wrote is the caller's own. Expected: not a HeadgateError."""

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
    """Return the error in ``data``, with the store's URL in place of the server's directory ``root``.

    Raises:
        ProtocolViolation: it is none.
    """
    failure = decode(data, Failure)
    if failure.owner is not None:
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


PROTOCOL_VERSION = 4
"""Of all that client and server say to each other. Raised with every change of a type that is sent, and with every
version of the catalogue's tables: a release that does not know what is in them must not write there."""

OF_THE_CATALOGUE, OF_THE_STORAGE = "catalogue", "storage"

STORAGE_VERBS = ("list", "delete", "rename_if_absent", "sweep_unfinished")
"""What is said of chunks beside their bytes."""

REPEATED_STORAGE_VERBS = frozenset({"list", "delete", "sweep_unfinished"})

Named: TypeAlias = tuple[str, Any]
"""One of several kinds of values: the name of its kind, and its fields."""

Judged: TypeAlias = list[tuple[Owner, bool]]
"""Owners that a pipeline was asked about, and whether what they wrote is its own."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a verb takes and gives, as its declaration says.

    Attributes:
        kinds: of an argument that is one of several kinds of values, the kinds by name.
        judge: the argument that is a question about owners, which is answered where it comes from; its answers
            are sent instead. Empty: there is none.
        takes: a struct of its arguments, by name.
        gives: type of its answer.
    """

    name: str
    kinds: Mapping[str, Mapping[str, type]]
    judge: str
    takes: type[msgspec.Struct]
    gives: Any

    def bound(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, as they are sent."""
        given = dict(zip(self.takes.__struct_fields__, arguments, strict=False)) | dict(named)
        return {name: (type(value).__name__, value) if name in self.kinds else value for name, value in given.items()}


def _signature(owner: type, name: str) -> Signature:
    verb = getattr(owner, name)
    hints = get_type_hints(verb)
    kinds, judge, fields = {}, "", []
    for parameter in list(inspect.signature(verb).parameters.values())[1:]:
        of = hints[parameter.name]
        among = _kinds(of)
        if among:
            kinds[parameter.name], of = among, Named
        if of == Mine:
            judge, of = parameter.name, Judged
        is_needed = parameter.default is inspect.Parameter.empty
        fields.append((parameter.name, of) if is_needed else (parameter.name, of, parameter.default))
    takes = msgspec.defstruct(f"Arguments_{name}", fields, kw_only=True)
    return Signature(name, kinds, judge, takes, hints["return"])


def _kinds(of: Any) -> dict[str, type]:
    """Return the kinds of values by name, if ``of`` is several."""
    members = [member for member in get_args(of) if member is not type(None)] if isinstance(of, types.UnionType) else []
    is_named = len(members) > 1 and all(is_dataclass(member) for member in members)
    return {member.__name__: member for member in members} if is_named else {}


def _of(owner: type, names: list[str]) -> dict[str, Signature]:
    return {name: _signature(owner, name) for name in names}


CATALOGUE_SIGNATURES = _of(Catalogue, sorted(VERBS))
STORAGE_SIGNATURES = _of(Storage, sorted(STORAGE_VERBS))
