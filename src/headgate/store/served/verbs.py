"""The verbs that a server offers, with the types of what they take and give: those of catalogue and storage.

Counterparts: ``served_catalogue`` and ``served_storage`` ask, ``serving.carrying`` carries out. Source: SS5 and SS6 of
docs/spec/served-store.md. A verb that the catalogue gets is offered, too: its declaration is all that there is to say.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias, get_args, get_type_hints

import msgspec

from headgate.model.life import Life, Owner
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.retention import RetentionPolicy

PROTOCOL_VERSION = 3
"""Of all that client and server say to each other. Raised with every change of a type that is sent, and with every
version of the catalogue's tables: whoever does not know what is in them must not write there (SS5)."""

OF_THE_CATALOGUE, OF_THE_STORAGE = "catalogue", "storage"

NO_VERBS = frozenset({"path", "is_untouched", "close", "changes", "audit"})
"""Of the catalogue, what is no verb. The server checks its store by itself (SS16)."""

READING = frozenset(
    {
        "find_stream", "describe_stream", "list_streams", "observe", "schemas", "layout", "layout_and_extents", "look",
        "passed", "find_append", "parts", "extents", "cut_at", "holds", "retention_cut", "frontier", "find_group",
        "groups", "group_cuts", "group_unread", "begin", "transactions", "known_chunks", "find_shared", "owner",
        "chunk_paths", "contents",
    }
)  # fmt: skip
"""Verbs that change nothing: asked again when an answer is lost."""

REPEATED = frozenset({"seal_stream", "truncate"})
"""Verbs that change something, and nothing more when they are asked again: their callers need not know of a loss."""

STORAGE_VERBS = ("list", "delete", "rename_if_absent", "sweep_unfinished")
"""What is said of chunks beside their bytes."""

REPEATED_STORAGE_VERBS = frozenset({"list", "delete", "sweep_unfinished"})

Named: TypeAlias = tuple[str, Any]
"""One of several kinds of values: the name of its kind, and its fields."""

Judged: TypeAlias = list[tuple[Owner, bool]]
"""Owners that a pipeline was asked about, and whether what they wrote is its own (SS17)."""


class Reset(msgspec.Struct, frozen=True):
    """``StreamReset``, without its question."""

    streams: Mapping[str, tuple[int, str | None, RetentionPolicy | None] | None]
    owner: str
    epoch: int
    life: Life
    of: str
    judged: Judged


_INSTEAD: dict[tuple[str, str], Any] = {("contents", "mine"): Judged, ("start_over", "reset"): Reset}
"""Questions are answered where they come from: what is sent instead."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a verb takes and gives.

    Attributes:
        kinds: of an argument that is one of several kinds of values, the kinds by name.
        takes: a struct of its arguments, by name.
        gives: type of its answer.
    """

    name: str
    kinds: Mapping[str, Mapping[str, type]]
    takes: type[msgspec.Struct]
    gives: Any

    def bound(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, as they are sent."""
        given = dict(zip(self.takes.__struct_fields__, arguments, strict=False)) | dict(named)
        return {name: _named(value) if name in self.kinds else value for name, value in given.items()}


def _named(value: object) -> Named:
    return type(value).__name__, value


def _signature(owner: type, name: str) -> Signature:
    verb = getattr(owner, name)
    hints = get_type_hints(verb)
    kinds, fields = {}, []
    for parameter in list(inspect.signature(verb).parameters.values())[1:]:
        of = hints[parameter.name]
        among = _kinds(of)
        if among:
            kinds[parameter.name], of = among, Named
        of = _INSTEAD.get((name, parameter.name), of)
        is_needed = parameter.default is inspect.Parameter.empty
        fields.append((parameter.name, of) if is_needed else (parameter.name, of, parameter.default))
    return Signature(name, kinds, msgspec.defstruct(f"Arguments_{name}", fields, kw_only=True), hints["return"])


def _kinds(of: Any) -> dict[str, type]:
    """Return the kinds of values by name, if ``of`` is several."""
    members = [member for member in get_args(of) if member is not type(None)] if isinstance(of, types.UnionType) else []
    is_named = len(members) > 1 and all(is_dataclass(member) for member in members)
    return {member.__name__: member for member in members} if is_named else {}


def _of(owner: type, names: list[str]) -> dict[str, Signature]:
    return {name: _signature(owner, name) for name in names}


CATALOGUE_SIGNATURES = _of(Catalogue, sorted({x for x in vars(Catalogue) if not x.startswith("_")} - NO_VERBS))
STORAGE_SIGNATURES = _of(Storage, sorted(STORAGE_VERBS))
