"""How the columns of a stream may change: pure decisions about an update of its schema.

Counterparts: ``store.catalogue.stream_rows`` asks inside the transaction that applies the answer; ``store.streams``
converts events. Source: S76 and S77 of docs/spec/stream-store.md; which numbers are wider ones is EV2 of
docs/spec/evolution.md. Never lets a value that was written become another one.
"""

from __future__ import annotations

from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.schema_evolution import is_widening
from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType, path_of

Columns: TypeAlias = tuple[tuple[str, ValueType], ...]
"""Columns in their order, each with its type."""

_GAINS_ZONE = ("timestamp[us]", "timestamp[us, tz=UTC]")
"""A local time becomes the moment of the same number."""

_LARGER = {("string", "large_string"), ("binary", "large_binary")}
_WHOLE = ("int", "uint")


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The stream has these columns already: this very update was made, or nothing was asked for."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The stream gets these columns: ``added`` new ones, and ``widened`` ones of another type, by name."""

    added: tuple[str, ...]
    widened: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Incompatible:
    """No update. ``problem`` names the column and both its types, and says what may be asked for."""

    problem: str


Answer: TypeAlias = Unchanged | Updated | Incompatible

_MAY = "columns can be added at the end, and numbers can become wider ones"


def update(present: Columns, wanted: Columns, routing_key: str | None) -> Answer:
    """Decide whether a stream with the columns ``present`` may get all of ``wanted`` instead (S76)."""
    types = dict(wanted)
    for name, old in present:
        if name not in types:
            return Incompatible(f"column '{name}' ({old}) would be removed; {_MAY}")
        problem = _why_not(old, types[name], name)
        if problem:
            return Incompatible(f"column '{name}' would change from {old} to {types[name]}: {problem}; {_MAY}")
        if name == routing_key and _hashes_differently(old, types[name]):
            return Incompatible(
                f"column '{name}' would change from {old} to {types[name]}, but it is the routing key, and equal keys "
                "would go to other segments than before; keep its type, or let it be a wider whole number"
            )
    names = [name for name, _ in present]
    first = [name for name, _ in wanted[: len(present)]]
    if first != names:
        at = next(name for name, there in zip(names, first, strict=True) if name != there)
        return Incompatible(f"column '{at}' ({dict(present)[at]}) would be at another place; {_MAY}")
    widened = tuple(name for name, old in present if types[name] != old)
    added = tuple(name for name, _ in wanted[len(present) :])
    return Updated(added, widened) if added or widened else Unchanged()


def holds(old: ValueType, new: ValueType) -> bool:
    """Whether every value of ``old`` has an equal one in ``new`` (S76)."""
    return not _why_not(old, new, "")


def fits_if_small(old: ValueType, new: ValueType) -> bool:
    """Whether values of ``old`` may be read as ``new`` if each value fits, which a reader can check (S77)."""
    if (new, old) in {(Plain(small), Plain(large)) for small, large in _LARGER} or (str(new), str(old)) == _GAINS_ZONE:
        return True
    return _is_whole(old) and _is_whole(new)


def _why_not(old: ValueType, new: ValueType, path: str) -> str:
    """Return why not every value of ``old`` has an equal one in ``new``; "" if all have."""
    if old == new:
        return ""
    if isinstance(old, ListOf) and isinstance(new, ListOf):
        return _why_not(old.element, new.element, path)
    if isinstance(old, StructOf) and isinstance(new, StructOf):
        types = dict(new.fields)
        for name, dtype in old.fields:
            inner = path_of(path, name)
            problem = _why_not(dtype, types[name], inner) if name in types else f"'{inner}' would be removed"
            if problem:
                return problem
        return ""
    is_plain, texts = isinstance(old, Plain) and isinstance(new, Plain), (str(old), str(new))
    if is_plain and (is_widening(*texts) or texts == _GAINS_ZONE or texts in _LARGER):
        return ""
    return f"not every {old} can be kept as a {new}"


def _hashes_differently(old: ValueType, new: ValueType) -> bool:
    """Whether equal values of both have other hashes: whole numbers have the same in every width, floats others."""
    return _is_whole(old) and not _is_whole(new)


def _is_whole(dtype: ValueType) -> bool:
    return isinstance(dtype, Plain) and dtype.text.startswith(_WHOLE)
