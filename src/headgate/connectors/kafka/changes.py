"""Changes in Kafka: topics of upserts, in which a record without a value deletes its key, and Debezium's envelopes.

The key of a record is the bytes of its key column if that is one text or binary column, and otherwise a JSON object of
the key columns. Counterpart: ``operators.changes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.encode import check_json, json_lines
from headgate.connectors.files.line_decoders import Decoded, JsonDecoder, Refused, valid_text
from headgate.connectors.files.lines import Lines
from headgate.connectors.kafka.schemas.avro import AvroKeyDecoder
from headgate.errors import UsageError
from headgate.operators.changes import (
    DELETE,
    INSERT,
    OP,
    OP_FIELD,
    OPS,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    op_codes,
    op_column,
)
from headgate.operators.schemas import canonical_schema

Rows = npt.NDArray[np.int64]

_UPDATE_BEFORE = OPS.index(UPDATE_BEFORE)
_NEW_LINE = 10


def lines_of(batch: pa.RecordBatch) -> pa.Array:
    """Return each record as JSON in a column of bytes."""
    data = np.frombuffer(json_lines(batch), np.uint8)
    ends = np.flatnonzero(data == _NEW_LINE)
    assert len(ends) == batch.num_rows, "a record as JSON is one line"
    bounds = np.concatenate(([0], ends - np.arange(batch.num_rows)))
    content = data[data != _NEW_LINE]
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), batch.num_rows, buffers)


def is_bytes(dtype: pa.DataType) -> bool:
    """Whether a column is text or binary."""
    return bool(
        pa.types.is_string(dtype)
        or pa.types.is_large_string(dtype)
        or pa.types.is_binary(dtype)
        or pa.types.is_large_binary(dtype)
    )


def check_keys_of_records(schema: pa.Schema, keys: Sequence[str]) -> None:
    """Check that keys of records can be made of these columns.

    Raises:
        UsageError
    """
    if len(keys) > 1 or not is_bytes(schema.field(keys[0]).type):
        check_json(pa.schema([schema.field(key) for key in keys]))


def keys_of_records(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.Array:
    """Return the keys of records in Kafka."""
    if len(keys) == 1 and is_bytes(batch.schema.field(keys[0]).type):
        return batch.column(keys[0]).cast(pa.large_binary())
    return lines_of(batch.select(list(keys)))


def without_update_before(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the changes that a table by keys needs."""
    is_kept = op_codes(batch.column(OP)) != _UPDATE_BEFORE
    return batch if is_kept.all() else batch.filter(pa.array(is_kept))


def upsert_values(
    batch: pa.RecordBatch, content: pa.RecordBatch, encode: Callable[[pa.RecordBatch], pa.Array]
) -> pa.Array:
    """Return the values of ``content``, null for what is deleted: of that often nothing but the key is known."""
    is_delete = pc.equal(batch.column(OP), DELETE).to_numpy(zero_copy_only=False)
    if not is_delete.any():
        return encode(content)
    if is_delete.all():
        return pa.nulls(batch.num_rows, pa.large_binary())
    values = encode(content.filter(pa.array(~is_delete)))
    return values.take(pa.array(np.cumsum(~is_delete) - 1, mask=is_delete))


def envelopes(batch: pa.RecordBatch, content: pa.RecordBatch, *, retractions: bool) -> pa.RecordBatch:
    """Return Debezium's envelopes of changes, as Flink writes them: with retractions an update is ``d``, then ``c``."""
    codes = op_codes(batch.column(OP))
    names = {INSERT: "c", UPDATE_BEFORE: "d", UPDATE_AFTER: "c" if retractions else "u", DELETE: "d"}
    ops = pa.array([names[op] for op in OPS], pa.large_string()).take(pa.array(codes))
    is_gone = pc.equal(ops, "d")
    fields = list(content.schema)
    before = pa.StructArray.from_arrays(content.columns, fields=fields, mask=pc.invert(is_gone))
    after = pa.StructArray.from_arrays(content.columns, fields=fields, mask=is_gone)
    return pa.RecordBatch.from_arrays([before, after, ops], schema=envelope_schema(content.schema))


def envelope_schema(rows: pa.Schema) -> pa.Schema:
    """Return the fields of envelopes of such rows."""
    row = pa.struct(list(rows))
    return pa.schema([pa.field("before", row), pa.field("after", row), pa.field(OP, pa.large_string())])


def changes_of(
    before: pa.Array, after: pa.Array, op: pa.Array, starts: Rows, schema: pa.Schema, refused: Refused
) -> Decoded:
    """Return what envelopes say as changes.

    ``c`` and ``r`` are inserts, ``d`` is a delete, and ``u`` is an update: ``update_before``, if the envelope has the
    old row, and ``update_after``. So a value can become two records, and ``starts`` has that of an update twice.

    Args:
        schema: of the changes.
        refused: gets what is no change.
    """
    has_before, has_after = (part.is_valid().to_numpy(zero_copy_only=False) for part in (before, after))
    known = {name: pc.equal(op, name).fill_null(False).to_numpy(zero_copy_only=False) for name in "crud"}
    comes = (known["c"] | known["r"] | known["u"]) & has_after
    goes = (known["d"] | (known["u"] & has_after)) & has_before
    bad = np.flatnonzero(~comes & ~goes)
    if len(bad):
        texts = pa.array([f"op {one!r}" for one in op.take(pa.array(bad)).to_pylist()])
        refused.add("it is no envelope of Debezium with an op of c, r, u, d and its row", starts[bad], texts)
    gone, came = np.flatnonzero(goes), np.flatnonzero(comes)
    rows = np.concatenate([gone, came])
    ops = np.concatenate(
        [
            np.where(known["u"][gone], _UPDATE_BEFORE, OPS.index(DELETE)),
            np.where(known["u"][came], OPS.index(UPDATE_AFTER), OPS.index(INSERT)),
        ]
    ).astype(np.int8)
    order = np.argsort(rows, kind="stable")
    record = pa.concat_arrays([before.take(pa.array(gone)), after.take(pa.array(came))]).take(pa.array(order))
    columns = [*(record.field(name) for name in schema.names[:-1]), op_column(ops[order])]
    return Decoded(pa.RecordBatch.from_arrays(columns, schema=schema), starts[rows[order]], refused)


class DebeziumDecoder:
    """Each value is an envelope as JSON, with ``before``, ``after`` and ``op``, or one with such a ``payload``."""

    def __init__(self, schema: pa.Schema) -> None:
        """Prepare for rows of ``schema``.

        Raises:
            UsageError: a type cannot be read from JSON, or a field is called ``op``.
        """
        rows = pa.schema([pa.field(field.name, field.type) for field in schema])
        self.schema = with_op(canonical_schema(rows))
        envelope = envelope_schema(rows)
        self._inner = JsonDecoder(envelope.append(pa.field("payload", pa.struct(list(envelope)))))

    def decode(self, lines: Lines) -> Decoded:
        """Return the changes, as ``changes_of`` has them."""
        decoded = self._inner.decode(lines)
        batch, starts, refused = decoded.batch, decoded.starts, decoded.refused
        payload = batch.column("payload")
        before, after, op = (
            pc.if_else(payload.is_valid(), payload.field(name), batch.column(name)) for name in ("before", "after", OP)
        )
        return changes_of(before, after, op, starts, self.schema, refused)


def with_op(schema: pa.Schema) -> pa.Schema:
    """Return a schema of values with the column ``op``.

    Raises:
        UsageError: it has one.
    """
    if OP in schema.names:
        raise UsageError("values of a Kafka source with changes have a field 'op', which is to say what changes")
    return schema.append(OP_FIELD)


class UpsertKeys:
    """The keys of a topic of upserts: what a record without a value deletes."""

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        avro: AvroKeyDecoder | None = None,
        *,
        has_registry: bool = False,
    ) -> None:
        """Prepare for values of ``schema``.

        Args:
            keys: which fields are the key.
            avro: decodes keys that are Avro; None: they are text, bytes or JSON.
            has_registry: values have ids of schemas, so that keys by mistake may have some, too.

        Raises:
            UsageError: a key is no field of it.
        """
        for key in keys:
            if key not in schema.names:
                raise UsageError(
                    f"upsert={list(keys)} of a Kafka source names '{key}', which values do not have; they have "
                    f"{', '.join(schema.names)}"
                )
        self._schema, self._keys, self._avro, self._has_registry = schema, keys, avro, has_registry
        fields = [schema.field(key) for key in keys]
        self._text = fields[0].type if len(keys) == 1 and is_bytes(fields[0].type) else None
        self._decoder = None if self._text is not None else JsonDecoder(pa.schema(fields), keys)

    def changes(self, batch: pa.RecordBatch, kept: Rows, records: pa.RecordBatch, refused: Refused) -> Decoded:
        """Return the decoded values ``batch`` of the records ``kept`` as changes, with those without a value."""
        batch, kept = self._without_nulls(batch, kept, refused)
        gone = np.flatnonzero(records.column("value").is_null().to_numpy(zero_copy_only=False))
        found = {name: batch.column(name) for name in self._schema.names}
        rows = kept
        if len(gone):
            given = records.column("key").take(pa.array(gone))
            has_key = given.is_valid().to_numpy(zero_copy_only=False)
            refused.add("it has neither value nor key", gone[~has_key], pa.array([""] * int((~has_key).sum())))
            given, gone = given.filter(pa.array(has_key)), gone[has_key]
            keys, gone = self._decoded(given, gone, records, refused)
            rows = np.concatenate([kept, gone])
            for name, column in found.items():
                found[name] = pa.concat_arrays([column, keys.get(name, pa.nulls(len(gone), column.type))])
        ops = np.full(len(rows), OPS.index(UPDATE_AFTER), np.int8)
        ops[len(kept) :] = OPS.index(DELETE)
        order = np.argsort(rows, kind="stable")
        columns = [*(column.take(pa.array(order)) for column in found.values()), op_column(ops[order])]
        made = pa.RecordBatch.from_arrays(columns, schema=with_op(self._schema))
        return Decoded(made, rows[order], refused)

    def _decoded(
        self, given: pa.Array, gone: Rows, records: pa.RecordBatch, refused: Refused
    ) -> tuple[dict[str, pa.Array], Rows]:
        """Return the columns of the keys ``given``, of the records ``gone``, and which of these have one."""
        if self._avro is not None:
            decoded = self._avro.decode(given, gone, records.column("headers").take(pa.array(gone)))
            problems = [f"its key: {problem}" for problem in decoded.refused.problems]
            refused.extend(Refused(problems, decoded.refused.starts, decoded.refused.texts))
            batch, gone = self._without_nulls(decoded.batch, decoded.starts, refused)
        elif self._decoder is None:
            if not pa.types.is_large_binary(self._text):
                given, gone = self._without_ids(given, gone, refused)
                given, gone = valid_text(Lines(given, gone), refused)
            return {self._keys[0]: given}, gone
        else:
            decoded = self._decoder.decode(Lines(given, gone))
            refused.extend(decoded.refused)
            batch, gone = decoded.batch, decoded.starts
        return dict(zip(batch.schema.names, batch.columns, strict=True)), gone

    def _without_ids(self, given: pa.Array, gone: Rows, refused: Refused) -> tuple[pa.Array, Rows]:
        """Refuse texts that begin with the id of a schema: as a text they would be the key of no row."""
        has_id = pc.starts_with(given, pattern="\0") if self._has_registry else None
        if has_id is None or not pc.any(has_id).as_py():
            return given, gone
        is_other = has_id.to_numpy(zero_copy_only=False)
        problem = "its key begins with the id of a schema; give key_format='avro' with format='avro' if keys are Avro"
        refused.add(problem, gone[is_other], pa.array([""] * int(is_other.sum())))
        return given.filter(pc.invert(has_id)), gone[~is_other]

    def _without_nulls(self, batch: pa.RecordBatch, rows: Rows, refused: Refused) -> tuple[pa.RecordBatch, Rows]:
        """Refuse records in which a part of the key is null."""
        for key in self._keys:
            if (column := batch.column(key)).null_count:
                is_null = column.is_null().to_numpy(zero_copy_only=False)
                refused.add(f"field '{key}' is missing or null", rows[is_null], pa.array([""] * column.null_count))
                batch, rows = batch.filter(column.is_valid()), rows[~is_null]
        return batch, rows
