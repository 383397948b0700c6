"""Values are of the kinds that those who ask expect: SQLite keeps anything in any column.

Counterpart: ``soundness``, which is asked where a value is not, and says which one and where. Source: CT14 of
docs/spec/stream-store.md. What a verb computes with trips over such a value by itself; what it only hands on would be
tripped over elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, TypeAlias, TypeVar

Kind: TypeAlias = type | UnionType

_Row = TypeVar("_Row", bound=Sequence[Any])
_T = TypeVar("_T")


def of_kinds(row: _Row, *kinds: Kind) -> _Row:
    """Return ``row``, whose values are of these kinds, one after the other.

    Raises:
        TypeError: one is not.
    """
    for value, kind in zip(row, kinds, strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} where {kind} is expected")
    return row


def all_of(values: Iterable[Any], kind: type[_T]) -> list[_T]:
    """Return ``values``, which are all of one kind.

    Raises:
        TypeError: one is not.
    """
    found = list(values)
    of_kinds(found, *[kind] * len(found))
    return found
