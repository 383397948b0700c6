"""Declarations of keyed state: a name, a kind and Arrow types.

And their evolution (docs/spec/evolution.md).

Counterpart: ``operators.process.declarations`` makes descriptors from what a user's ``open`` asks for; backends
hold the state; both forms of process functions write the same snapshot sections, so a function may change its form.
Operators of Headgate itself name the section that they want (``Section``).

All state is converted here, for all backends. The types in the bytes decide, by the same rules by which the
driver decided before the start (``model.schema_evolution``). ``state.backend`` calls it in every restore.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.errors import CorruptionError, UsageError
from headgate.model.config import check_switches
from headgate.model.schema_evolution import (
    Conversion,
    Elements,
    FieldFrom,
    Fields,
    Kept,
    Misfit,
    StateRules,
    Widened,
    conversion_of,
)
from headgate.model.state_schema import (
    ListOf,
    Plain,
    Rule,
    StateIdentity,
    StructOf,
    ValueType,
    column_text,
    columns_text,
    declared,
    inner_paths,
    path_of,
)
from headgate.state.ttl import TTL, with_expiry


@dataclass(frozen=True, slots=True)
class Evolution:
    """Describes how to convert state that an older version of the program wrote: ``evolution=hg.Evolution(...)``.

    Wider number types and removed fields need no description. Name a field by its path: ``"address.zip"`` is the field
    ``zip`` of the struct ``address``. Elements of lists add nothing to the path. State that already has the declared
    type stays as it is, so you can leave an evolution in the program.

    Attributes:
        defaults: the values that added fields get in old state: ``{"address.zip": None}``.
        renamed: fields that have another name now: ``{"old": "new"}``.
        renamed_from: the former name of the state itself.
        starts_empty: whether older checkpoints may lack this state. It is then empty for every key.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    renamed_from: str | None = None
    starts_empty: bool = False

    def __post_init__(self) -> None:
        check_switches("Evolution: ", starts_empty=self.starts_empty)
        for name, found in (("defaults", self.defaults), ("renamed", self.renamed)):
            if not isinstance(found, Mapping) or any(not isinstance(path, str) for path in found):
                raise UsageError(f"{name} of an Evolution is a dict by paths of fields, not {found!r}")
        if any(not isinstance(path, str) for path in self.renamed.values()):
            raise UsageError(f"renamed of an Evolution is {{'old': 'new'}}, not {self.renamed!r}")
        if self.renamed_from is not None and not (isinstance(self.renamed_from, str) and self.renamed_from):
            raise UsageError(f"renamed_from of an Evolution is the name of a state, not {self.renamed_from!r}")

    def rules(self) -> StateRules:
        """Return what decides; for Headgate only."""
        renamed = tuple(sorted(self.renamed.items()))
        return StateRules(self.renamed_from or "", renamed, frozenset(self.defaults), self.starts_empty)

    def check(self, where: str, dtype: pa.DataType) -> None:
        """Make sure that it fits a declaration; for Headgate only. ``where``: begins messages.

        Raises:
            UsageError: it names fields that there are not, or a default does not fit.
        """
        fields = dict(inner_paths(value_type(dtype)))
        there = f"the fields are {', '.join(fields)}" if fields else "it has no fields"
        for path in (*self.defaults, *self.renamed.values()):
            if path not in fields:
                raise UsageError(f"{where}: its Evolution names the field '{path}', but {there}")
        for old, new in self.renamed.items():
            if old in fields:
                raise UsageError(
                    f"{where}: its Evolution has '{new}' renamed from '{old}', which is still a field of it; a "
                    "field is one or the other"
                )
            if list(self.renamed.values()).count(new) > 1:
                raise UsageError(
                    f"{where}: its Evolution must name one old field for '{new}', not {dict(self.renamed)}"
                )
            if old.rpartition(".")[0] != self._former_path(new.rpartition(".")[0]):
                raise UsageError(f"{where}: its Evolution has '{new}' renamed from '{old}', a field of another struct")
        for path, value in self.defaults.items():
            found = field_type(dtype, path)
            try:
                exact_array([value], found)
            except MisfitError as error:
                raise UsageError(
                    f"{where}: the default {value!r} of field '{path}' does not fit {found} ({error})"
                ) from None

    def _former_path(self, path: str) -> str:
        """Return the path that a field had; its structs may have had other names too."""
        former = next((old for old, new in self.renamed.items() if new == path), None)
        if former is not None or not path:
            return former or ""
        parent, _, name = path.rpartition(".")
        return path_of(self._former_path(parent), name)


NO_EVOLUTION = Evolution()


def checked_evolution(where: str, given: object, dtype: pa.DataType) -> Evolution:
    """Return what was given as ``evolution=`` of something of ``dtype``.

    Raises:
        UsageError: it is none, or does not fit.
    """
    if not isinstance(given, Evolution):
        raise UsageError(f"{where}: its evolution is an Evolution(defaults={{'field': value}}), not {given!r}")
    given.check(where, dtype)
    return given


def check_names(where: str, declared: Mapping[str, Evolution], forgotten: Collection[str] = ()) -> None:
    """Make sure that no name that is declared is said to be an old one.

    Raises:
        UsageError
    """
    for name, evolution in declared.items():
        former = evolution.renamed_from
        if former is not None and former in declared:
            raise UsageError(f"{where}: '{name}' is said to be renamed from '{former}', which is declared as well")
        if [one.renamed_from for one in declared.values()].count(former) > 1 and former is not None:
            raise UsageError(f"{where}: two are said to be renamed from '{former}'")
        if name in forgotten:
            raise UsageError(f"{where}: '{name}' is declared, and forget('{name}') leaves it behind; do one of both")
        if former is not None and former in forgotten:
            raise UsageError(f"{where}: '{name}' is renamed from '{former}', and forget('{former}') leaves that behind")


def value_type(dtype: pa.DataType) -> ValueType:
    """Return a type in canonical form without Arrow."""
    if pa.types.is_large_list(dtype):
        return ListOf(value_type(dtype.value_type))
    if pa.types.is_struct(dtype):
        return StructOf(tuple((one.name, value_type(one.type)) for one in dtype))
    return Plain(str(dtype))


def type_text(dtype: pa.DataType) -> str:
    """Return a type as identities of states have it."""
    return str(value_type(dtype))


def schema_identity(schema: pa.Schema) -> str:
    """Return columns as identities of states have them: ``name: type, …``."""
    return columns_text(tuple((one.name, value_type(one.type)) for one in schema))


def column_identity(column: pa.Field) -> str:
    """Return one of these columns."""
    return column_text(column.name, type_text(column.type))


def field_type(dtype: pa.DataType, wanted: str, path: str = "") -> pa.DataType | None:
    """Return the type of the field ``wanted``; None if there is none."""
    if pa.types.is_large_list(dtype):
        return field_type(dtype.value_type, wanted, path)
    if pa.types.is_struct(dtype):
        for one in dtype:
            here = path_of(path, one.name)
            found = one.type if here == wanted else field_type(one.type, wanted, here)
            if found is not None:
                return found
    return None


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
        """Return the state's part of ``state_text``. The TTL is none: it may change between two runs."""
        inner = _map_text(self) if self.kind is StateKind.MAP else type_text(self.type)
        return declared(self.kind.value, self.name, inner)


def broadcast_text(descriptor: StateDescriptor) -> str:
    """Return the part of a map that belongs to no key, but is the same in every subtask."""
    return declared("broadcast map", descriptor.name, _map_text(descriptor))


def _map_text(descriptor: StateDescriptor) -> str:
    return f"{descriptor.key_type} -> {type_text(descriptor.type)}"


@dataclass(frozen=True)
class KeyColumns:
    """The key of the stream: names and canonical types of its columns."""

    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]

    @property
    def section_names(self) -> list[str]:
        """Names of the key's columns in snapshots: by position, so that no state's column can have the same."""
        return [f"key{i}" for i in range(len(self.names))]


def state_identity(
    keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False, rule: Rule | None = None
) -> str:
    """Return the identity of all states of one operator, or "" when there are none.

    Neither the order of declaration nor the form of the function (rows or batches) is part of it.
    """
    columns = [(name, str(dtype)) for name, dtype in zip(keys.names, keys.types, strict=True)]
    states = [d.text() for d in sorted(descriptors, key=lambda d: d.name)]
    return StateIdentity.of_keyed(columns, states, has_timers=has_timers, rule=rule).text


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
    """Return the section of a declared state: the key, a map's own key, the value or element."""
    schema, names = section_schema(keys, descriptor), tuple(keys.section_names)
    return Section(descriptor.name, schema, names, descriptor.evolution, evolves="value")


def section_schema(keys: KeyColumns, descriptor: StateDescriptor) -> pa.Schema:
    """Return the columns of a declared state's section."""
    fields = [pa.field(name, dtype) for name, dtype in zip(keys.section_names, keys.types, strict=True)]
    if descriptor.kind is StateKind.MAP:
        fields.append(pa.field("map_key", descriptor.key_type))
    schema = pa.schema([*fields, pa.field("value", descriptor.type)])
    return schema if descriptor.ttl is None else with_expiry(schema)


def section_data(sections: Mapping[str, memoryview], section: Section, path: str) -> memoryview | None:
    """Return the bytes of a state under the name that it has, or had; None: it is new (EV7).

    Raises:
        CorruptionError: there is no such state, and it is not said to be new.
    """
    found = sections.get(section.name)
    if found is None and section.evolution.renamed_from is not None:
        found = sections.get(section.evolution.renamed_from)
    if found is None and not section.evolution.starts_empty:
        raise CorruptionError(path, 0, f"state '{section.name}'", f"states {sorted(sections)}")
    return found


@dataclass(frozen=True, slots=True)
class RowConversion:
    """What becomes of rows of a section: of their column ``evolves``, or, if that is "", of the whole record."""

    section: Section
    conversion: Conversion

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows as they were written in the columns of the section."""
        schema, defaults = self.section.schema, self.section.evolution.defaults
        if batch.schema.equals(schema):
            return batch
        if not self.section.evolves:
            if isinstance(self.conversion, Kept):
                return batch
            record = converted(batch.to_struct_array(), pa.struct(list(schema)), self.conversion, defaults)
            return pa.RecordBatch.from_arrays(record.flatten(), schema=schema)
        at = schema.get_field_index(self.section.evolves)
        columns = list(batch.columns)
        columns[at] = converted(columns[at], schema.field(at).type, self.conversion, defaults)
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def row_conversion(found: pa.Schema, section: Section, where: str) -> RowConversion:
    """Return what becomes of rows with the columns ``found``.

    Raises:
        CorruptionError: they can never become those of the section, although what the manifest says of them can.
    """
    if found.equals(section.schema):
        return RowConversion(section, Kept())
    conversion = _of_value(found, section) if section.evolves else _of_record(found, section)
    if isinstance(conversion, Misfit):
        raise CorruptionError(
            where, 0, f"columns {schema_text(section.schema)}", f"columns {schema_text(found)} ({conversion.why})"
        )
    return RowConversion(section, conversion)


def _of_record(found: pa.Schema, section: Section) -> Conversion | Misfit:
    old, new = (value_type(pa.struct(list(schema))) for schema in (found, section.schema))
    return conversion_of(old, new, section.evolution.rules(), section.key_names)  # EV6


def _of_value(found: pa.Schema, section: Section) -> Conversion | Misfit:
    if found.names != section.schema.names:
        return Misfit("it is another kind of state, or has another key")
    for old, new in zip(found, section.schema, strict=True):
        if new.name != section.evolves and old.type != new.type:  # EV6
            return Misfit(f"'{old.name}' never changes its type")
    old_type, new_type = (value_type(schema.field(section.evolves).type) for schema in (found, section.schema))
    return conversion_of(old_type, new_type, section.evolution.rules())


def evolved_values(values: pa.Array, dtype: pa.DataType, evolution: Evolution) -> pa.Array | Misfit:
    """Return ``values`` as values of ``dtype``, or why they cannot become these."""
    conversion = conversion_of(value_type(values.type), value_type(dtype), evolution.rules())
    return conversion if isinstance(conversion, Misfit) else converted(values, dtype, conversion, evolution.defaults)


def converted(values: pa.Array, dtype: pa.DataType, conversion: Conversion, defaults: Mapping[str, Any]) -> pa.Array:
    """Return ``values`` as values of ``dtype``; nulls stay nulls."""
    match conversion:
        case Kept():
            return values
        case Widened():
            return values.cast(dtype)
        case Elements():
            return _list(values, dtype, conversion, defaults)
        case Fields():
            return _struct(values, dtype, conversion, defaults)


def _list(values: pa.Array, dtype: pa.DataType, conversion: Elements, defaults: Mapping[str, Any]) -> pa.Array:
    elements = converted(values.flatten(), dtype.value_type, conversion.of, defaults)  # nothing of nulls, nor around
    lengths = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    has = np.append(values.is_valid().to_numpy(zero_copy_only=False), True)
    return pa.LargeListArray.from_arrays(pa.array(ends, mask=~has), elements, type=dtype)


def _struct(values: pa.Array, dtype: pa.DataType, conversion: Fields, defaults: Mapping[str, Any]) -> pa.Array:
    if len(dtype) == 0:
        return pa.array([None if is_null else {} for is_null in values.is_null().to_pylist()], dtype)
    columns = [_field(values, one, field.type, defaults) for one, field in zip(conversion.fields, dtype, strict=True)]
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(columns, fields=list(dtype), mask=mask)


def _field(values: pa.Array, one: FieldFrom, dtype: pa.DataType, defaults: Mapping[str, Any]) -> pa.Array:
    if one.old is None:
        return pa.repeat(pa.array([defaults[one.path]], dtype)[0], len(values))
    return converted(values.field(one.old), dtype, one.conversion, defaults)


def schema_text(schema: pa.Schema) -> str:
    """Return ``name: type, …`` for messages."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
