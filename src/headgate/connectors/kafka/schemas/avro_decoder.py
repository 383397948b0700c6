"""Decodes Kafka's values of Avro: plain ones, and those that a schema registry knows the schemas of.

With a registry a value begins with a zero byte and the id of its schema in four bytes, or the header
``__value_schema_id`` has that, or the schema's GUID. Values of each schema are decoded together, into the reader's
schema. New ids are asked for while the pipeline runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import DecodedValues, UnreadableSchemaError, decode_values
from headgate.codec.avro_schema import AvroField, AvroType
from headgate.connectors.files.line_decoders import Decoded, Refused
from headgate.connectors.kafka.schemas.frames import FRAME_BYTES, ID_HEADER, KEY_ID_HEADER, NO_FRAME
from headgate.connectors.kafka.schemas.schema_registry import RegistryClient
from headgate.errors import UsageError

_ID_MAGIC, _GUID_MAGIC = 0, 1

_Rows: TypeAlias = npt.NDArray[np.int64]
_Key: TypeAlias = int | str
"""An id, or a GUID."""


class AvroDecoder:
    """See the module.

    Attributes:
        schema: of the records that it makes; a schema that is no record becomes a column ``value``.
    """

    def __init__(
        self,
        reader: AvroType,
        registry: RegistryClient | None,
        writer: AvroType | None = None,
        *,
        cuts_times: bool = False,
        id_header: str = ID_HEADER,
    ) -> None:
        """Prepare for values that are to be read as ``reader``.

        Args:
            registry: None for values without ids.
            writer: what values without ids have; None: the reader's.
            cuts_times: whether parts of a microsecond are left out of times.
            id_header: the header that may name the schema.
        """
        self._id_header = id_header
        self._reader, self._registry = reader, registry
        self._plain, self._cuts_times = writer or reader, cuts_times
        self._writers: dict[_Key, AvroType] = {}
        is_record = self._reader.kind == "record"
        self.schema = pa.schema(list(self._reader.column) if is_record else [("value", self._reader.column)])

    def decode(self, values: pa.Array, rows: _Rows, headers: pa.Array | None) -> Decoded:
        """Return the records and the refused values. ``rows``: what to call each value."""
        refused = Refused()
        parts: list[tuple[_Rows, pa.Array]] = []
        if self._registry is None:
            self._decode(values, np.arange(len(values)), 0, self._plain, parts, refused, rows)
        else:
            left = self._by_header(values, rows, headers, parts, refused)
            self._by_frame(values, left, rows, parts, refused)
        if not parts:
            return Decoded(pa.RecordBatch.from_pylist([], schema=self.schema), rows[:0], refused)
        (which, column) = parts[0]
        if len(parts) > 1:
            which = np.concatenate([some for some, _ in parts])
            order = np.argsort(which, kind="stable")
            which, column = which[order], pa.concat_arrays([some for _, some in parts]).take(pa.array(order))
        columns = column.flatten() if self._reader.kind == "record" else [column]
        return Decoded(pa.RecordBatch.from_arrays(columns, schema=self.schema), rows[which], refused)

    def _by_header(
        self,
        values: pa.Array,
        rows: _Rows,
        headers: pa.Array | None,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
    ) -> _Rows:
        """Decode values whose schema a header names; return which are left."""
        everything = np.arange(len(values))
        if headers is None:
            return everything
        flat = headers.flatten()
        is_id = pc.equal(pc.struct_field(flat, "key"), self._id_header)
        if not pc.any(is_id).as_py():
            return everything
        owners = pc.list_parent_indices(headers).filter(is_id).to_numpy()
        named = pc.struct_field(flat, "value").filter(is_id).dictionary_encode()
        numbers = named.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        for number in np.unique(numbers):
            which = np.unique(owners[numbers == number])
            key = _key_of(None if number < 0 else named.dictionary[int(number)].as_py())
            self._decode_with(key, f"header {self._id_header} is damaged", values, which, 0, parts, refused, rows)
        return np.setdiff1d(everything, owners)

    def _by_frame(
        self,
        values: pa.Array,
        which: _Rows,
        rows: _Rows,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
    ) -> None:
        """Decode values that begin with the id of their schema."""
        if not len(which):
            return
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
        data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
        begins = offsets[:-1][which]
        is_long = offsets[1:][which] - begins >= FRAME_BYTES
        is_framed = is_long.copy()
        is_framed[is_long] = data[begins[is_long]] == _ID_MAGIC
        if not is_framed.all():
            other = which[~is_framed]
            refused.add(NO_FRAME, rows[other], values.take(pa.array(other)))
            which, begins = which[is_framed], begins[is_framed]
        if not len(which):
            return
        ids = np.ascontiguousarray(data[begins[:, None] + np.arange(1, FRAME_BYTES)]).view(">u4").reshape(-1)
        for schema_id in np.unique(ids):
            some = which if (ids == schema_id).all() else which[ids == schema_id]
            self._decode_with(int(schema_id), "", values, some, FRAME_BYTES, parts, refused, rows)

    def _decode_with(
        self,
        key: _Key | None,
        damage: str,
        values: pa.Array,
        which: _Rows,
        skip: int,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
        rows: _Rows,
    ) -> None:
        """Decode values whose schema has a key. ``damage``: what is wrong if there is none."""
        writer = damage if key is None else self._writer(key)
        if isinstance(writer, str):
            refused.add(writer, rows[which], values.take(pa.array(which)))
            return
        try:
            self._decode(values, which, skip, writer, parts, refused, rows)
        except UnreadableSchemaError as error:
            problem = f"its schema, {_called(key)}, does not go together with that of the source: {error}"
            refused.add(problem, rows[which], values.take(pa.array(which)))

    def _writer(self, key: _Key) -> AvroType | str:
        """Return the schema with an id, or what is wrong with it."""
        if (found := self._writers.get(key)) is not None:
            return found
        assert self._registry is not None
        known = self._registry.by_id(key) if isinstance(key, int) else self._registry.by_guid(key)
        if known is None:
            return f"its schema, {_called(key)}, is not in the registry"
        try:
            self._writers[key] = known.parse(f"its schema, {_called(key)}", is_partial=True)
        except UsageError as error:
            return str(error)
        return self._writers[key]

    def _decode(
        self,
        values: pa.Array,
        which: _Rows,
        skip: int,
        writer: AvroType,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
        rows: _Rows,
    ) -> None:
        some = values if len(which) == len(values) else values.take(pa.array(which))
        found = self._read(some, skip, writer)
        column = found.column
        if found.problems:
            is_good = np.ones(len(which), np.bool_)
            for row, problem in sorted(found.problems.items()):
                is_good[row] = False
                refused.add(problem, rows[which[row : row + 1]], some.slice(row, 1))
            column, which = column.filter(pa.array(is_good)), which[is_good]
        parts.append((which, column))

    def _read(self, values: pa.Array, skip: int, writer: AvroType) -> DecodedValues:
        return decode_values(values, skip, writer, self._reader, cuts_times=self._cuts_times)


class AvroKeyDecoder(AvroDecoder):
    """Decodes keys: records with the fields of a key, or the value of its only field."""

    def __init__(self, fields: Sequence[AvroField], registry: RegistryClient, *, cuts_times: bool) -> None:
        """``fields``: of the key, as values have them."""
        column = pa.struct([pa.field(one.name, one.type.column) for one in fields])
        reader = AvroType("record", column, "Key", tuple(fields))
        super().__init__(reader, registry, cuts_times=cuts_times, id_header=KEY_ID_HEADER)

    def _read(self, values: pa.Array, skip: int, writer: AvroType) -> DecodedValues:
        if writer.kind == "record" or len(self._reader.fields) > 1:
            return super()._read(values, skip, writer)
        only = self._reader.fields[0].type
        found = decode_values(values, skip, writer, only, cuts_times=self._cuts_times)
        column = found.column.cast(only.column)
        return DecodedValues(pa.StructArray.from_arrays([column], fields=list(self._reader.column)), found.problems)


def _key_of(named: bytes | None) -> _Key | None:
    """Return the id or the GUID in a header."""
    if named is not None and len(named) == FRAME_BYTES and named[0] == _ID_MAGIC:
        return int.from_bytes(named[1:], "big")
    if named is not None and len(named) == 17 and named[0] == _GUID_MAGIC:
        return str(UUID(bytes=named[1:]))
    return None


def _called(key: _Key | None) -> str:
    return f"id {key}" if isinstance(key, int) else f"GUID {key}"
