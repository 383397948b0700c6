"""Schema evolution: what a program says about state of its older versions, and its conversion (docs/spec/evolution.md).

The only place that converts state, for all backends (EV10). The types in the bytes decide, by the same rules by which
the driver decided before the start (``model.schema_evolution``). ``state.backend`` calls it in every restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.errors import CorruptionError
from headgate.model.schema_evolution import (
    Conversion,
    Elements,
    FieldFrom,
    Fields,
    Kept,
    Misfit,
    Widened,
    conversion_of,
)
from headgate.state.descriptors import Evolution, Section, value_type


def section_data(sections: Mapping[str, memoryview], section: Section, path: str) -> memoryview | None:
    """Return the bytes of a state under the name that it has, or had (EV5); None: it is new (EV7).

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
        columns = [c if i == at else c.cast(schema.field(i).type) for i, c in enumerate(batch.columns)]  # EV12
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
        if new.name != section.evolves and not is_same_key(old.type, new.type):  # EV6
            return Misfit(f"'{old.name}' never changes its type")
    old_type, new_type = (value_type(schema.field(section.evolves).type) for schema in (found, section.schema))
    return conversion_of(old_type, new_type, section.evolution.rules())


def is_same_key(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether keys of ``old`` are those of ``new``: the same type, or moments that were local times (EV12)."""
    return bool(old == new or (old, new) == (LOCAL_TIME, MOMENT))


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
