"""Decodes Debezium's envelopes in Avro, as most of its users write them: with the schemas of a registry.

An envelope is a record with ``before`` and ``after``, which are rows or null, and with ``op``; everything else in it,
such as ``source`` and ``ts_ms``, is passed over. Counterpart: ``changes.DebeziumDecoder`` for JSON.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.codec.avro_schema import AvroField, AvroType
from headgate.connectors.files.line_decoders import Decoded
from headgate.connectors.kafka.changes import changes_of, with_op
from headgate.connectors.kafka.schemas.avro import AvroDecoder
from headgate.connectors.kafka.schemas.schema_registry import FoundSchema, RegistryClient
from headgate.errors import UsageError
from headgate.operators.changes import OP

_WHERE = "the schema of a Kafka source"
_NULL = AvroType("null", pa.null())


class DebeziumAvroDecoder:
    """See the module.

    Attributes:
        schema: of the changes that it makes: the fields of the row, and ``op``.
    """

    def __init__(self, given: FoundSchema, registry: RegistryClient | None, *, cuts_times: bool = False) -> None:
        """Prepare for ``given``: the schema of a row, or of envelopes, which it must be without a registry.

        Raises:
            UsageError: it is neither, or its rows cannot be columns.
        """
        whole = given.parse(_WHERE, is_partial=True)
        row = _row_in(whole)
        if row is None and registry is None:
            raise UsageError(
                f"{_WHERE} is no envelope of Debezium, a record with before, after and op; without registry= it must be"
            )
        found = row or whole
        if found.kind != "record":
            raise UsageError(f"{_WHERE} is of kind {found.kind}, not a record with the fields of a row")
        if found.problem:
            raise UsageError(f"{_WHERE}: {found.problem}")
        self._inner = AvroDecoder(_envelope(found), registry, whole, cuts_times=cuts_times)
        self.schema = with_op(pa.schema(list(found.column)))

    def decode(self, values: pa.Array, rows: npt.NDArray[np.int64], headers: pa.Array | None) -> Decoded:
        """Return the changes, as ``changes_of`` has them, and the refused values. ``rows``: what to call each value."""
        decoded = self._inner.decode(values, rows, headers)
        before, after, op = decoded.batch.columns
        return changes_of(before, after, op, decoded.starts, self.schema, decoded.refused)


def _row_in(whole: AvroType) -> AvroType | None:
    """Return the rows of an envelope; None: it is none."""
    fields = {one.name: one.type for one in whole.fields}
    if whole.kind != "record" or not {"after", OP} <= fields.keys():
        return None
    after = fields["after"]
    branches = after.inner if after.kind == "union" else (after,)
    return next((one for one in branches if one.kind == "record"), None)


def _envelope(row: AvroType) -> AvroType:
    """Return what is read of an envelope. A field that it lacks is null."""
    row_or_null = AvroType("union", row.column, inner=(_NULL, row))
    text = AvroType("union", pa.large_string(), inner=(_NULL, AvroType("string", pa.large_string())))
    types = {"before": row_or_null, "after": row_or_null, OP: text}
    fields = tuple(AvroField(name, one, (), True, None) for name, one in types.items())
    column = pa.struct([pa.field(name, one.column) for name, one in types.items()])
    return AvroType("record", column, "Envelope", fields)
