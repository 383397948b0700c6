"""State by row whose values expire: what is kept for one key, and which part of it lives.

A value is a pair of what was stored and its expiry; a list has such a pair for each element, a map for each entry. They
stand in the order of their expiry (TL3), so what has expired is always at the beginning. Counterparts:
``operators.process.expiring``, which writes them; ``state.memory.expiring_cells``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeAlias

from headgate.state.backend import RowCells
from headgate.state.descriptors import StateKind

Timed: TypeAlias = tuple[Any, int]
"""What was stored, and from when on it is gone."""

_expiry = itemgetter(1)


def live_value(cells: RowCells, key: Any, now_ms: int) -> Timed | None:
    """Return the value of ``key``, or None; forget one that has expired."""
    found: Timed | None = cells.get(key)
    if found is None or found[1] > now_ms:
        return found
    cells.remove(key)
    return None


def live_elements(cells: RowCells, key: Any, now_ms: int) -> list[Timed] | None:
    """Return the list of ``key``, or None; forget elements that have expired."""
    found: list[Timed] | None = cells.get(key)
    if found is None or found[0][1] > now_ms:
        return found
    expired = bisect_right(found, now_ms, key=_expiry)
    if expired == len(found):
        cells.remove(key)
        return None
    kept: list[Timed] = cells.writable(key)
    del kept[:expired]
    return kept


def live_entries(cells: RowCells, key: Any, now_ms: int) -> dict[Any, Timed] | None:
    """Return the map of ``key``, or None; forget entries that have expired."""
    found: dict[Any, Timed] | None = cells.get(key)
    if found is None or next(iter(found.values()))[1] > now_ms:
        return found
    expired = []
    for map_key, pair in found.items():
        if pair[1] > now_ms:
            break
        expired.append(map_key)
    if len(expired) == len(found):
        cells.remove(key)
        return None
    kept: dict[Any, Timed] = cells.writable(key)
    for map_key in expired:
        del kept[map_key]
    return kept


DROP_EXPIRED = {StateKind.VALUE: live_value, StateKind.LIST: live_elements, StateKind.MAP: live_entries}
"""By kind: what of a key lives; the rest is forgotten."""


def last_expiry(kind: StateKind, found: Any) -> int:
    """Return from when on nothing of a key's object lives."""
    match kind:
        case StateKind.VALUE:
            expires: int = found[1]
        case StateKind.LIST:
            expires = found[-1][1]
        case StateKind.MAP:
            expires = next(reversed(found.values()))[1]
    return expires


def live_objects(kind: StateKind, objects: Iterable[tuple[Any, Any]], now_ms: int) -> Iterator[tuple[Any, Any]]:
    """Yield keys with what lives of their objects; changes nothing, so that a snapshot can be encoded again (TL6)."""
    for key, found in objects:
        if last_expiry(kind, found) <= now_ms:
            continue
        match kind:
            case StateKind.VALUE:
                yield key, found
            case StateKind.LIST:
                yield key, found[bisect_right(found, now_ms, key=_expiry) :]
            case StateKind.MAP:
                yield key, {map_key: pair for map_key, pair in found.items() if pair[1] > now_ms}


def no_longer_than(kind: StateKind, found: Any, limit_ms: int) -> Any:
    """Return a key's object, of which nothing lives longer than until ``limit_ms``, in the order of expiry (TL7)."""
    match kind:
        case StateKind.VALUE:
            return found[0], min(found[1], limit_ms)
        case StateKind.LIST:
            return [(stored, min(expires, limit_ms)) for stored, expires in found]
        case StateKind.MAP:
            clipped = [(map_key, (stored, min(expires, limit_ms))) for map_key, (stored, expires) in found.items()]
            return dict(sorted(clipped, key=lambda entry: entry[1][1]))
