"""Changes of tables, decoded from messages of pgoutput (protocol version 1) many at a time.

All messages that came are one array of bytes. Columns are found and copied by arrays of positions, so that no change
is handled by itself. Messages about transactions and tables other than changes are few. Counterpart: ``changes``.
Source: PostgreSQL's documentation, "Logical Replication Message Formats".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.connectors.postgres.catalogue import TEXT, Table, parsed
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import DELETE, INSERT, OP, OPS, UPDATE_AFTER, UPDATE_BEFORE, op_column

HEADER = 25
"""Bytes of a message in front of what the plugin wrote."""
EPOCH_US = 946_684_800_000_000
"""2000-01-01, at which the server's times begin."""

COMMIT = ord("C")
_BEGIN, _RELATION, _MESSAGE, _TRUNCATE = map(ord, "BRMT")
_INSERT, _UPDATE, _DELETE = map(ord, "IUD")
_NEW, _OLD = map(ord, "NO")
_TEXT, _UNCHANGED = map(ord, "tu")
_PADDING = bytes(16)

COMMIT_TIME, LSN, TRANSACTION = "commit_time", "lsn", "transaction"
METADATA = {COMMIT_TIME: pa.timestamp("us", tz="UTC"), LSN: pa.int64(), TRANSACTION: pa.int64()}

TABLE = "table"
"""Where records of several tables say which one they are of."""

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Point:
    """How far changes were read.

    Attributes:
        lsn: all transactions that were committed before it.
        index: and so many changes of the transaction that was committed at it.
    """

    lsn: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Decoded:
    """What some messages say.

    Attributes:
        batch: the changes.
        point: reading continues there.
        commit_ms: of the last transaction; None: there was none.
        messages: what was written as messages of the database, by prefix.
    """

    batch: pa.RecordBatch
    point: Point
    commit_ms: int | None
    messages: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the columns of the table are in messages; None: it did not have it then."""

    relation: int
    columns_count: int
    places: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Rows in messages: of each column in each row the kind of its value, where it is, and its length."""

    kinds: list[Bytes]
    starts: list[Numbers]
    lengths: list[Numbers]
    ends: Numbers

    def take(self, rows: Numbers) -> _Tuples:
        return _Tuples(
            [k[rows] for k in self.kinds], [s[rows] for s in self.starts], [x[rows] for x in self.lengths], self.ends
        )

    @staticmethod
    def concat(parts: Sequence[_Tuples]) -> _Tuples:
        columns = range(len(parts[0].kinds))
        return _Tuples(
            [np.concatenate([part.kinds[c] for part in parts]) for c in columns],
            [np.concatenate([part.starts[c] for part in parts]) for c in columns],
            [np.concatenate([part.lengths[c] for part in parts]) for c in columns],
            np.empty(0, np.int64),
        )


_Part: TypeAlias = tuple[_Tuples, Numbers, int, int]
"""Rows, the messages that they are in, what is done to them, and their order within a message."""


class _Followed:
    """A table, and how its columns are laid out in the messages that come; None: no change of it came."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.layout: Layout | None = None
        self.first = 0
        """The first message that is not decoded yet, of those of this call."""


_Decoded: TypeAlias = tuple[pa.RecordBatch, Numbers]
"""Changes of a table, and the messages that they are in."""


class Decoder:
    """Decodes the changes of tables from one connection, from its beginning."""

    def __init__(
        self,
        tables: Sequence[Table],
        schema: pa.Schema,
        begin: Point,
        *,
        whole_publication: str = "",
        ignores_truncate: bool,
        end_lsn: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            tables: whose changes are returned.
            schema: what is returned: ``table`` if there are several, the columns, ``op``, and metadata.
            begin: what was read before is left out.
            whole_publication: the publication of which all tables are read: another one may not come; "": it may.
            ignores_truncate: a table may be emptied at once, which is no change then.
            end_lsn: transactions that were committed there or later are left out.
        """
        self._tables = {(table.schema, table.name): _Followed(table) for table in tables}
        self._schema, self._whole_publication = schema, whole_publication
        self._begin, self._ignores_truncate = begin, ignores_truncate
        self._end_lsn = end_lsn
        self._has_others = len(self._tables) > 1
        """Whether a change may be one of another table."""
        self._point = begin
        self._is_open = False
        """Whether a transaction was begun and not ended by the messages so far; then this is it."""
        self._open = (0, 0, 0, 0)
        """LSN of its commit, time, id, and number of its changes so far."""

    @property
    def point(self) -> Point:
        """Where reading continues."""
        return self._point

    def passed(self, lsn: int) -> None:
        """The server has read so far, and had nothing to send."""
        if not self._is_open and lsn > self._point.lsn:
            self._point = Point(lsn)

    def decode(self, messages: Sequence[bytes | memoryview]) -> Decoded:
        """Return what the next messages say.

        Raises:
            UsageError: the table has changed, or a change lacks what is needed.
        """
        data = np.frombuffer(b"".join([*messages, _PADDING]), np.uint8)
        lengths = np.fromiter(map(len, messages), np.int64, len(messages))
        bodies = np.cumsum(lengths) - lengths + HEADER
        types = data[bodies]
        begins = np.flatnonzero(types == _BEGIN)
        is_change = (types == _INSERT) | (types == _UPDATE) | (types == _DELETE)
        commits, times, ids, numbers = self._transactions(data, bodies, types, begins, is_change)
        wanted = is_change.copy()
        # of a transaction that was read in part the server sends the first changes again
        if self._begin.index:
            wanted &= ~((commits == self._begin.lsn) & (numbers < self._begin.index))
        if self._end_lsn is not None:
            wanted &= commits < self._end_lsn
        transactions = (commits, times, ids)
        parts: list[_Decoded] = []
        told = []
        for at in np.flatnonzero((types == _RELATION) | (types == _MESSAGE) | (types == _TRUNCATE)):
            body = bytes(data[bodies[at] : bodies[at] - HEADER + lengths[at]])
            if types[at] == _MESSAGE:
                told.append(_message(body))
            elif types[at] == _TRUNCATE:
                if self._end_lsn is None or commits[at] < self._end_lsn:
                    self._check_truncate(body)
            elif (followed := self._followed_in(body)) is not None:
                layout = _layout_in(body, followed.table)
                if layout != followed.layout:
                    # what came before is decoded in the columns that it had
                    parts += self._changes(followed, data, bodies, types, wanted, int(at), transactions)
                    followed.layout, followed.first = layout, int(at)
        for followed in self._tables.values():
            parts += self._changes(followed, data, bodies, types, wanted, len(messages), transactions)
            # the next call has messages of its own
            followed.first = 0
        self._move(data, bodies, types, transactions, numbers)
        return Decoded(
            self._in_order(parts),
            self._point,
            int((times[-1] + EPOCH_US) // 1000) if len(times) else None,
            told,
        )

    def _in_order(self, parts: Sequence[_Decoded]) -> pa.RecordBatch:
        """Return all changes in the order of their messages, of which each is of one table."""
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=self._schema)
        if len(parts) == 1:
            return parts[0][0]
        order = np.argsort(np.concatenate([messages for _, messages in parts]), kind="stable")
        return pa.concat_batches([batch for batch, _ in parts]).take(pa.array(order))

    # -- transactions

    def _transactions(
        self, data: Bytes, bodies: Numbers, types: Bytes, begins: Numbers, is_change: npt.NDArray[np.bool_]
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return of each message: LSN and time of the commit and id of its transaction, and changes in it before."""
        at = bodies[begins]
        lsn, time, number, carried = self._open
        of = np.cumsum(types == _BEGIN)
        commits = np.concatenate([[lsn], _integers(data, at + 1, 8)])[of]
        times = np.concatenate([[time], _integers(data, at + 9, 8)])[of]
        ids = np.concatenate([[number], _integers(data, at + 17, 4)])[of]
        counted: Numbers = np.cumsum(is_change) - is_change
        numbers = counted - np.concatenate([[-carried], counted[begins]])[of]
        return commits, times, ids, numbers

    def _move(
        self,
        data: Bytes,
        bodies: Numbers,
        types: Bytes,
        transactions: tuple[Numbers, Numbers, Numbers],
        numbers: Numbers,
    ) -> None:
        if not len(types):
            return
        last = len(types) - 1
        if types[last] == COMMIT:
            self._point = Point(int(_integers(data, bodies[last:] + 10, 8)[0]))
            self._is_open, self._open = False, (0, 0, 0, 0)
            return
        commits, times, ids = transactions
        is_change = types[last] in (_INSERT, _UPDATE, _DELETE)
        count = int(numbers[last]) + is_change
        self._is_open, self._open = True, (int(commits[last]), int(times[last]), int(ids[last]), count)
        # while changes come again that were read before, the position stays in front of what follows them
        if self._open[0] != self._begin.lsn or count >= self._begin.index:
            self._point = Point(self._open[0], count)

    # -- what is in messages

    def _followed_in(self, body: bytes) -> _Followed | None:
        """Return the table that a message describes; None: it is not one of ours."""
        schema, _, rest = body[5:].partition(b"\0")
        name = rest.partition(b"\0")[0].decode()
        found = self._tables.get((schema.decode() or "pg_catalog", name))
        if found is None:
            self._has_others = True
            if self._whole_publication:
                raise UsageError(
                    f"publication '{self._whole_publication}' has a new table {schema.decode()}.{name}; start the "
                    "pipeline over, so that it takes a snapshot with its rows, or name the tables that are read"
                )
        return found

    def _check_truncate(self, body: bytes) -> None:
        count = int.from_bytes(body[1:5], "big")
        relations = [int.from_bytes(body[at : at + 4], "big") for at in range(6, 6 + 4 * count, 4)]
        for one in self._tables.values():
            if one.layout is not None and one.layout.relation in relations and not self._ignores_truncate:
                raise UsageError(
                    f"table {one.table.where} was truncated, which does not say which rows went; start the pipeline "
                    "over, so that it takes a new snapshot, or give truncate='ignore' to keep the rows that were there"
                )

    # -- rows

    def _changes(
        self,
        followed: _Followed,
        data: Bytes,
        bodies: Numbers,
        types: Bytes,
        wanted: npt.NDArray[np.bool_],
        end: int,
        transactions: tuple[Numbers, Numbers, Numbers],
    ) -> list[_Decoded]:
        """Return the changes of a table among messages up to ``end``, in which it has one layout."""
        layout, table = followed.layout, followed.table
        at = followed.first + np.flatnonzero(wanted[followed.first : end])
        if layout is None or not len(at):
            return []
        if self._has_others:
            at = at[_integers(data, bodies[at] + 1, 4) == layout.relation]
        count = layout.columns_count
        kinds = types[at]
        inserts, updates, deletes = (at[kinds == kind] for kind in (_INSERT, _UPDATE, _DELETE))
        parts: list[_Part] = []
        if len(inserts):
            parts.append((_tuples(data, bodies[inserts] + 6, count), inserts, OPS.index(INSERT), 1))
        if len(updates):
            parts += _updates(table, data, bodies, updates, count)
        if len(deletes):
            parts.append((_tuples(data, bodies[deletes] + 6, count), deletes, OPS.index(DELETE), 0))
        if not parts:
            return []
        found, messages = parts[0][0], np.concatenate([part[1] for part in parts])
        codes = np.concatenate([np.full(len(part[1]), part[2], np.int8) for part in parts])
        if len(parts) > 1:
            within = np.concatenate([np.full(len(part[1]), part[3], np.int64) for part in parts])
            order = np.argsort(messages * 2 + within, kind="stable")
            found = _Tuples.concat([part[0] for part in parts]).take(order)
            messages, codes = messages[order], codes[order]
        return [(self._batch(table, layout, data, found, messages, codes, transactions), messages)]

    def _batch(
        self,
        table: Table,
        layout: Layout,
        data: Bytes,
        found: _Tuples,
        rows: Numbers,
        codes: npt.NDArray[np.int8],
        transactions: tuple[Numbers, Numbers, Numbers],
    ) -> pa.RecordBatch:
        commits, times, ids = transactions
        metadata = {COMMIT_TIME: times + EPOCH_US, LSN: commits, TRANSACTION: ids}
        columns = dict(
            zip((one.name for one in table.columns), zip(table.columns, layout.places, strict=True), strict=True)
        )
        arrays = []
        for field in self._schema:
            if field.name in columns:
                column, place = columns[field.name]
                if place is None:
                    arrays.append(pa.nulls(len(rows), column.arrow))
                else:
                    texts = _texts(data, found.kinds[place], found.starts[place], found.lengths[place])
                    arrays.append(parsed(texts, column))
            elif field.name == OP:
                arrays.append(op_column(codes))
            elif field.name == TABLE:
                arrays.append(pa.repeat(pa.scalar(table.where, TEXT), len(rows)))
            elif field.name in metadata:
                arrays.append(pa.array(metadata[field.name][rows]).cast(METADATA[field.name]))
            else:  # another table has it
                arrays.append(pa.nulls(len(rows), field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _layout_in(body: bytes, table: Table) -> Layout:
    """Return how columns are laid out from a message on.

    Raises:
        UsageError: the table has changed.
    """
    where = table.where
    relation = int.from_bytes(body[1:5], "big")
    rest = body[5:].partition(b"\0")[2].partition(b"\0")[2]
    identity, count, rest = chr(rest[0]), int.from_bytes(rest[1:3], "big"), rest[3:]
    if (identity == "f") != table.has_whole_rows:
        raise UsageError(
            f"the REPLICA IDENTITY of table {where} is not what it was when the pipeline began; set it back, or "
            "start the pipeline over"
        )
    found: dict[str, tuple[int, int, int]] = {}
    for place in range(count):
        column, _, rest = rest[1:].partition(b"\0")
        found[column.decode()] = (
            place,
            int.from_bytes(rest[:4], "big"),
            int.from_bytes(rest[4:8], "big", signed=True),
        )
        rest = rest[8:]
    known = {column.name: column for column in table.columns}
    for new in found:
        if new not in known:
            raise UsageError(
                f"table {where} has a new column '{new}'; stop the pipeline and start its program again, which "
                "takes the new columns"
            )
    for name_, column_ in known.items():
        if name_ in found and found[name_][1:] != (column_.type_oid, column_.modifier):
            raise UsageError(
                f"column '{name_}' of table {where} had another type when this was changed, or has another one "
                "now; start the pipeline over, so that it takes a new snapshot"
            )
    places = tuple(found[column.name][0] if column.name in found else None for column in table.columns)
    return Layout(relation, count, places)


def _updates(table: Table, data: Bytes, bodies: Numbers, updates: Numbers, count: int) -> list[_Part]:
    marks = data[bodies[updates] + 5]
    has_old = marks != _NEW
    begins = bodies[updates] + 6
    parts: list[_Part] = []
    old = None
    if has_old.any():
        old = _tuples(data, begins[has_old], count)
        begins = begins.copy()
        begins[has_old] = old.ends + 1
    new = _tuples(data, begins, count)
    for column in range(count):
        lacking = new.kinds[column] == _UNCHANGED
        if not lacking.any():
            continue
        if old is None or not has_old[lacking].all() or (marks[lacking] != _OLD).any():
            raise UsageError(
                f"an update of table {table.where} left a large value as it was, and so does not have "
                f"it; ALTER TABLE {table.where} REPLICA IDENTITY FULL, and start the pipeline over"
            )
        from_old = (np.cumsum(has_old) - 1)[lacking]
        new.kinds[column][lacking] = old.kinds[column][from_old]
        new.starts[column][lacking] = old.starts[column][from_old]
        new.lengths[column][lacking] = old.lengths[column][from_old]
    if old is not None:  # without retractions it is there because the key is another one now
        op = UPDATE_BEFORE if table.has_whole_rows else DELETE
        parts.append((old, updates[has_old], OPS.index(op), 0))
    return [*parts, (new, updates, OPS.index(UPDATE_AFTER), 1)]


def _tuples(data: Bytes, begins: Numbers, count: int) -> _Tuples:
    """Read rows that begin with the number of their columns."""
    at = begins + 2
    kinds, starts, lengths = [], [], []
    for _ in range(count):
        kind = data[at]
        is_text = kind == _TEXT
        length = np.where(is_text, _integers(data, at + 1, 4), 0)
        kinds.append(kind)
        starts.append(at + 5)
        lengths.append(length)
        at = at + 1 + np.where(is_text, length + 4, 0)
    return _Tuples(kinds, starts, lengths, at)


def _texts(data: Bytes, kinds: Bytes, starts: Numbers, lengths: Numbers) -> pa.Array:
    """Copy texts out of ``data``; what is no text is null.

    All of ``data`` is seen as texts: one that is wanted, what follows it, the next one, and so on. Every second one
    is taken.
    """
    rows = np.arange(len(starts))
    if not (starts[1:] > starts[:-1]).all():  # what an update left as it was is where its old row has it
        starts, first, rows = np.unique(starts, return_index=True, return_inverse=True)
        lengths = lengths[first]
    offsets = np.stack([starts, starts + lengths], axis=1)
    texts = pa.Array.from_buffers(TEXT, 2 * len(starts) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return texts.take(pa.array(2 * rows, mask=kinds != _TEXT))


def _integers(data: Bytes, at: Numbers, size: int) -> Numbers:
    """Read integers of ``size`` bytes; where there are none, any number."""
    found = np.zeros(len(at), np.int64)
    last = len(data) - 1
    for offset in range(size):
        found = (found << 8) | data[np.minimum(at + offset, last)]
    return found


def _message(body: bytes) -> tuple[str, bytes]:
    prefix, _, rest = body[10:].partition(b"\0")
    return prefix.decode(), rest[4:]
