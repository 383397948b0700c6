"""Types of what state holds, without Arrow: read from the texts of manifests and declarations (EV1).

A type is what Arrow writes of it. Names of fields may hold what stands between names; such a text reads as another type
or as none. So nobody converts anything by what was read here alone: ``state.evolving`` judges once more, by the types
that the bytes have. Counterpart: ``model.evolution``, which compares two types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Plain:
    """A type without others in it, such as ``int64``, ``timestamp[us]`` or ``decimal128(10, 2)``."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of elements of one type."""

    element: ValueType

    def __str__(self) -> str:
        return f"large_list<item: {self.element}>"


@dataclass(frozen=True, slots=True)
class StructOf:
    """Fields by name; also the columns of a record."""

    fields: tuple[tuple[str, ValueType], ...]

    def __str__(self) -> str:
        return f"struct<{columns_text(self.fields)}>"


ValueType: TypeAlias = Plain | ListOf | StructOf

_LIST = "large_list<item: "
_STRUCT = "struct<"
_NAME = re.compile(r"([^:;,<>]+): ")
_PLAIN = re.compile(r"\w+(\[\w+(, tz=UTC)?\]|\(\d+, -?\d+\))?")

NESTED_MAX = 100
"""So deeply is a type nested at most, which is deeper than Arrow writes any: no text takes more stack than there is."""


def columns_text(columns: tuple[tuple[str, ValueType], ...]) -> str:
    """Return ``name: type, …``."""
    return ", ".join(f"{name}: {dtype}" for name, dtype in columns)


def read_type(text: str) -> ValueType | None:
    """Return the type that ``text`` says; None if it reads as none."""
    try:
        found, end = _type_at(text, 0, 0)
    except _UnreadableError:
        return None
    return found if end == len(text) else None


def read_columns(text: str) -> tuple[tuple[str, ValueType], ...] | None:
    """Return the columns that ``name: type, …`` says; None if it does not read as columns."""
    found = read_type(f"{_STRUCT}{text}>")
    return found.fields if isinstance(found, StructOf) else None


def inner_paths(dtype: ValueType, path: str = "") -> Iterator[tuple[str, ValueType]]:
    """Yield every field in ``dtype`` by its path, such as ``address.zip``; elements of lists add nothing to a path."""
    if isinstance(dtype, ListOf):
        yield from inner_paths(dtype.element, path)
    elif isinstance(dtype, StructOf):
        for name, inner in dtype.fields:
            here = path_of(path, name)
            yield here, inner
            yield from inner_paths(inner, here)


def path_of(parent: str, name: str) -> str:
    """Return the path of the field ``name`` in what has the path ``parent``."""
    return f"{parent}.{name}" if parent else name


class _UnreadableError(Exception):
    """The text is no type."""


def _type_at(text: str, at: int, depth: int) -> tuple[ValueType, int]:
    """Return the type that begins at ``at``, inside ``depth`` others, and where it ends."""
    if depth > NESTED_MAX:
        raise _UnreadableError
    if text.startswith(_LIST, at):
        element, end = _type_at(text, at + len(_LIST), depth + 1)
        return ListOf(element), _after(text, end, ">")
    if text.startswith(_STRUCT, at):
        return _fields_at(text, at + len(_STRUCT), depth + 1)
    found = _PLAIN.match(text, at)
    if found is None:
        raise _UnreadableError
    return Plain(found.group()), found.end()


def _fields_at(text: str, at: int, depth: int) -> tuple[StructOf, int]:
    fields: list[tuple[str, ValueType]] = []
    while not text.startswith(">", at):
        at = _after(text, at, ", ") if fields else at
        name = _NAME.match(text, at)
        if name is None:
            raise _UnreadableError
        dtype, at = _type_at(text, name.end(), depth)
        fields.append((name.group(1), dtype))
    return StructOf(tuple(fields)), at + 1


def _after(text: str, at: int, wanted: str) -> int:
    if not text.startswith(wanted, at):
        raise _UnreadableError
    return at + len(wanted)
