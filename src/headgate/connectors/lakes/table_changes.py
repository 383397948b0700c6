"""The newest row of each key in a table with a log: changes wait in the checkpoint, and a commit merges them.

A subtask keeps the last change of each key of a batch, in the types of the table. When the checkpoint is completed, the
driver merges the last change of each key into the table, in one commit with the names of the outputs. What is kept says
by which keys: the program may have others at the next start. Counterparts: ``table_sink`` commits and finds commits,
``ledger_sink`` has the output in the checkpoint. Source: docs/spec/lakes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.decodable import decodable
from headgate.connectors.base import SealedTransaction, SinkContext, SinkWriter
from headgate.connectors.lakes.data_files import NamedOutput, as_table
from headgate.connectors.ledger_sink import LedgerOutput, LedgerWriter, PieceReader
from headgate.connectors.sql.records import newest_changes, refuse_null_keys
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable
from headgate.operators.changes import DELETE, OP

CHANGES_MARK = b"changes-1 "
"""The payload of a committable begins so; how it is merged follows, and then the payload of a ledger."""

PENDING_ROWS = 1 << 20
"""The driver drops older changes of the same key at least whenever it holds so many."""


class ChangeForm(msgspec.Struct, frozen=True):
    """How the changes of one output are merged.

    Attributes:
        base: the version of the table when the subtask began.
        keys: the columns of the key.
        columns: of the changes, without ``op``.
        has_op: whether the column ``op`` says what a change is; otherwise each record is the new row of its key.
    """

    base: int
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    has_op: bool


class ChangeOutput(NamedOutput, frozen=True):
    """The changes that one subtask has for one checkpoint."""

    changes: LedgerOutput
    form: ChangeForm


def encode_changes(form: ChangeForm, payload: bytes) -> bytes:
    """Return the payload of a committable: that of a ledger, and how it is merged."""
    return b"%s%s\n%s" % (CHANGES_MARK, msgspec.json.encode(form), payload)


def decode_changes(committable: Committable, read: PieceReader) -> ChangeOutput:
    """Return what a committable holds.

    Raises:
        CorruptionError: it has another form.
    """
    head, _, payload = committable.payload.partition(b"\n")
    try:
        form = msgspec.json.decode(head.removeprefix(CHANGES_MARK), type=decodable(ChangeForm))
    except msgspec.DecodeError as error:
        where = f"committable of sink '{committable.sink}' for checkpoint {committable.checkpoint}"
        raise CorruptionError(where, 0, "changes of version 1", repr(head[:20])) from error
    changes = LedgerOutput(replace(committable, payload=payload), read)
    return ChangeOutput(changes.name, form.base, changes, form)


def gone_column(columns: Sequence[str]) -> str:
    """Return the name of the column that says which keys have no row any more: none of ``columns``."""
    name = "is_gone"
    while name in columns:
        name += "_"
    return name


class ChangeWriter(SinkWriter):
    """Keeps the changes of one subtask, in the types of the table."""

    def __init__(
        self,
        context: SinkContext,
        table: pa.Schema,
        base: int,
        keys: Sequence[str],
        *,
        filled: Sequence[str],
        has_op: bool,
        piece_bytes: int,
    ) -> None:
        """``filled``: those of the keys in which a text must not be empty. ``base``: the version of the table."""
        self._keys, self._filled, self._has_op = keys, filled, has_op
        names = [name for name in context.schema.names if name != OP or not has_op]
        self._form = ChangeForm(base, tuple(keys), tuple(names), has_op)
        self._records = pa.schema([context.schema.field(name) for name in names])
        self._never_null = [name for name in names if not table.field(name).nullable]
        self._columns = pa.schema([table.field(name).with_nullable(True) for name in names])
        written = self._columns.append(context.schema.field(OP)) if has_op else self._columns
        self._inner = LedgerWriter(replace(context, schema=written), piece_bytes)

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``.

        Raises:
            UsageError: a value does not fit the table.
        """
        refuse_null_keys(batch, self._keys)
        newest = newest_changes(batch, self._keys, has_op=self._has_op)
        if newest.num_rows == 0:
            return
        self._refuse_values(newest)
        rows = as_table([newest.select(self._records.names)], self._records, self._columns)
        if self._has_op:
            rows = rows.append_column(batch.schema.field(OP), newest.column(OP))
        for one in rows.to_batches():
            self._inner.write(one)

    def _refuse_values(self, newest: pa.RecordBatch) -> None:
        rows = newest.filter(pc.not_equal(newest.column(OP), DELETE)) if self._has_op else newest
        for name in self._never_null:
            if rows.column(name).null_count:
                raise UsageError(f"column '{name}' of the table is never null, and a record has null there")
        for name in self._filled:
            if pc.any(pc.equal(newest.column(name), "")).as_py():
                raise UsageError(
                    f"a record has an empty text in '{name}', which is a key and a partition of the table, where it "
                    f"would be null; leave such records out with filter(pl.col('{name}') != '')"
                )

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        return _Sealed(self._inner.seal(checkpoint), self._form)

    def close(self) -> None:
        self._inner.close()


class _Sealed(SealedTransaction):
    """The changes of one checkpoint and subtask: see ``SealedTransaction``."""

    def __init__(self, inner: SealedTransaction, form: ChangeForm) -> None:
        self._inner, self._form = inner, form

    @property
    def pieces_count(self) -> int:
        return self._inner.pieces_count

    def piece(self, number: int) -> bytes:
        return self._inner.piece(number)

    def prepare(self) -> bytes | None:
        payload = self._inner.prepare()
        return None if payload is None else encode_changes(self._form, payload)


def last_rows(outputs: Sequence[ChangeOutput]) -> pa.Table:
    """Return the last change of each key of outputs of one form, with the column ``gone_column`` instead of ``op``."""
    form = outputs[0].form
    newest = _newest((batch for output in outputs for batch in output.changes), form.keys, has_op=form.has_op)
    if not form.has_op:
        return newest.append_column(gone_column(newest.column_names), pa.repeat(False, newest.num_rows))
    rows = newest.drop_columns([OP])
    return rows.append_column(gone_column(rows.column_names), pc.equal(newest.column(OP), DELETE))


def _newest(batches: Iterable[pa.RecordBatch], keys: Sequence[str], *, has_op: bool) -> pa.Table:
    pending: list[pa.Table] = []
    room = PENDING_ROWS
    for batch in batches:
        table = pa.Table.from_batches([batch])
        pending.append(table)
        room -= table.num_rows
        if room < 0:
            pending = [newest_changes(pa.concat_tables(pending, promote_options="permissive"), keys, has_op=has_op)]
            room = max(PENDING_ROWS, pending[0].num_rows)
    return newest_changes(pa.concat_tables(pending, promote_options="permissive"), keys, has_op=has_op)
