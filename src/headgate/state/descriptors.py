"""What keyed state is declared to be: a name, a kind and Arrow types. Identity of the state in checkpoints (ST1, ST2).

Counterpart: ``operators.process.functions`` makes descriptors from what a user's ``open`` asks for; backends hold the
state; both forms of process functions write the same snapshot sections, so a function may change its form. Operators
of Headgate itself name the section that they want (``Section``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import pyarrow as pa

from headgate.model.state_schema import StateIdentity, declared
from headgate.state.schema_evolution import NO_EVOLUTION, Evolution
from headgate.state.ttl import TTL, with_expiry


class StateKind(Enum):
    """Shape of what one key has."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True)
class StateDescriptor:
    """One state of an operator, in canonical types.

    Attributes:
        key_type: of a map's own keys, None for other kinds.
        ttl: how long what is in it lives; None: until it is removed.
        evolution: what becomes of it where an older program wrote it.
    """

    name: str
    kind: StateKind
    type: pa.DataType
    key_type: pa.DataType | None = None
    ttl: TTL | None = None
    evolution: Evolution = field(default=NO_EVOLUTION, compare=False)

    def text(self) -> str:
        """Return the state's part of ``state_text``. The TTL is none: it may change between two runs (TL7)."""
        inner = f"{self.key_type} -> {self.type}" if self.kind is StateKind.MAP else str(self.type)
        return declared(self.kind.value, self.name, inner)


def broadcast_text(descriptor: StateDescriptor) -> str:
    """Return the part of a map that belongs to no key, but is the same in every subtask (BC1)."""
    return declared("broadcast map", descriptor.name, f"{descriptor.key_type} -> {descriptor.type}")


@dataclass(frozen=True)
class KeyColumns:
    """The key of the stream: names and canonical types of its columns."""

    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]

    @property
    def section_names(self) -> list[str]:
        """Names of the key's columns in snapshots: by position, so that no state's column can have the same."""
        return [f"key{i}" for i in range(len(self.names))]


def state_identity(keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False) -> str:
    """Return the identity of all states of one operator, or "" when there are none (ST2).

    Neither the order of declaration nor the form of the function (rows or batches) is part of it.
    """
    columns = [(name, str(dtype)) for name, dtype in zip(keys.names, keys.types, strict=True)]
    states = [d.text() for d in sorted(descriptors, key=lambda d: d.name)]
    return StateIdentity.of_keyed(columns, states, has_timers=has_timers).text


@dataclass(frozen=True)
class Section:
    """A part of a snapshot: an Arrow stream of ``schema``, with the key in the columns ``key_names``.

    Attributes:
        evolution: what becomes of rows that an older program wrote.
        evolves: the column that it is about; "": the whole record.
    """

    name: str
    schema: pa.Schema
    key_names: tuple[str, ...]
    evolution: Evolution = field(default=NO_EVOLUTION, compare=False)
    evolves: str = field(default="", compare=False)


def section_of(keys: KeyColumns, descriptor: StateDescriptor) -> Section:
    """Return the section of a declared state (ST3): the key, a map's own key, the value or element."""
    schema, names = section_schema(keys, descriptor), tuple(keys.section_names)
    return Section(descriptor.name, schema, names, descriptor.evolution, evolves="value")


def section_schema(keys: KeyColumns, descriptor: StateDescriptor) -> pa.Schema:
    """Return the columns of a declared state's section."""
    fields = [pa.field(name, dtype) for name, dtype in zip(keys.section_names, keys.types, strict=True)]
    if descriptor.kind is StateKind.MAP:
        fields.append(pa.field("map_key", descriptor.key_type))
    schema = pa.schema([*fields, pa.field("value", descriptor.type)])
    return schema if descriptor.ttl is None else with_expiry(schema)  # TL6
