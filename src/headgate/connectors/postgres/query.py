"""A table or query of PostgreSQL as a bounded source, read in ranges of a key, in parallel and in the order of the key.

A position is the last value of the key that was delivered in a range, so that reading continues after it, whatever
became of the rows before. Rows with one value of the key stay together. The bounds of the ranges are found when the
pipeline is built, and are part of positions. Counterpart: ``values``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.decodable import decodable
from headgate.connectors.base import FailStopReader, Source, SourceBatch, SourceContext, owner_of_split
from headgate.connectors.postgres.catalogue import Column, identifier, parsed, schema_of, with_texts
from headgate.connectors.postgres.connection import (
    check_url,
    client_libraries,
    connect,
    connect_arrow,
    database_of,
    translated,
)
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment, ThreadEnded
from headgate.errors import CorruptionError, UsageError
from headgate.model.lineage import Location

BATCH_ROWS = 65_536
READY_MAX = 2
RANGES_MAX = 10_000
WAKEUP_MS = 5
_KEY = "headgate_key"
_INTEGERS = ("int2", "int4", "int8")
_WITHOUT_LENGTH = {"bpchar": "bpchar", "bit": "varbit"}
"""By type: one to cast to. ``character`` and ``bit`` without a length have length 1, and a cast cuts values off."""


class RangePosition(msgspec.Struct, frozen=True):
    """A position as checkpoints store it: texts of values of the key.

    Attributes:
        above, upto: the range: greater than, and at most; None: without bound.
        last: the last value that was delivered; None: none was.
        is_done: all were.
    """

    above: str | None
    upto: str | None
    last: str | None = None
    is_done: bool = False

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RangePosition:
        """Return the position.

        Raises:
            CorruptionError
        """
        try:
            return msgspec.json.decode(data, type=decodable(cls))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptionError("position of a query", 0, "a range of a key", str(error)) from error


@dataclass(frozen=True, slots=True)
class _Shape:
    """Columns of the query, type of the key in SQL, and bounds of the ranges between them."""

    columns: tuple[Column, ...]
    key: str
    key_type: str
    bounds: tuple[str, ...]


class PostgresQuery(Source):
    """Reads the rows of a table or query of PostgreSQL, as a bounded source.

    ``PostgresQuery("postgresql://headgate@db/shop", "SELECT id, total FROM orders WHERE total > 10", key="id")`` reads
    in the order of ``id``. Rows that change while it reads are read as they are when it comes to them. Needs the
    package adbc-driver-postgresql: ``pip install 'headgate-streams[postgres]'``.
    """

    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT

    def __init__(self, url: str, query: str, *, key: str = "", ranges: int = 1, as_text: Sequence[str] = ()) -> None:
        """Configure.

        Args:
            url: the database, as ``"postgresql://user@host/database"``, without a password.
            query: the name of a table, or a SELECT.
            key: a column without nulls by which the rows are ordered, best one with an index. Default: the primary
                key, if ``query`` is a table with one of one column.
            ranges: into how many ranges of the key to divide the rows. Subtasks read them in parallel.
            as_text: columns that are read as the text that the server writes.

        Raises:
            UsageError: an option is wrong, or the package is not installed.
        """
        check_url(url, "", "PostgresQuery")
        self.url, self.key, self.ranges, self.as_text = url, key, ranges, tuple(as_text)
        self.query = query.strip().rstrip(";")
        self.is_table = " " not in self.query
        if not isinstance(ranges, int) or not 1 <= ranges <= RANGES_MAX:
            raise UsageError(f"ranges={ranges!r} of PostgresQuery must be a number from 1 to {RANGES_MAX:,}")
        if not self.is_table and not key:
            raise UsageError("PostgresQuery of a SELECT needs key=..., the column in whose order it is read")
        with client_libraries("PostgresQuery"):
            import adbc_driver_postgresql
            import psycopg  # noqa: F401

            assert adbc_driver_postgresql
        self._known: _Shape | None = None

    def __repr__(self) -> str:
        return f"PostgresQuery({database_of(self.url)!r}, {self.query[:60]!r})"

    @property
    def sql(self) -> str:
        """What is read, as it stands after FROM."""
        if not self.is_table:
            return f"({self.query}) q"
        return f"{'.'.join(map(identifier, self.query.split('.')))} q"

    def shape(self) -> _Shape:
        """Return columns and ranges: found once, in the driver.

        Raises:
            UsageError: it cannot be read like this.
        """
        if self._known is None:
            import psycopg

            try:
                with connect(self.url) as connection:
                    self._known = self._look(connection)
            except psycopg.ProgrammingError as error:
                said = str(error).splitlines()[0]
                raise UsageError(f"{self!r} cannot be read: {said}") from None
        return self._known

    def schema(self) -> pa.Schema:
        return schema_of(self.shape().columns)

    def identity(self) -> str:
        """See ``Source``: positions are values of the key."""
        return f"query of PostgreSQL by {self.shape().key}: {self.query}"

    def locations(self) -> tuple[Location, ...]:
        place = f"postgresql:{database_of(self.url)}"
        return (Location(place, place),)

    def open(self, context: SourceContext) -> QueryReader:
        """Return a reader of the ranges that belong to this subtask."""
        return QueryReader(self, context)

    def begins(self) -> dict[str, RangePosition]:
        """Return the ranges, from their beginnings."""
        bounds = [None, *self.shape().bounds, None]
        pairs = pairwise(bounds)
        return {str(number): RangePosition(above, upto) for number, (above, upto) in enumerate(pairs)}

    def _look(self, connection: Any) -> _Shape:
        found = connection.execute(f"SELECT * FROM {self.sql} LIMIT 0").description
        names = dict(
            connection.execute(
                "SELECT oid, typname FROM pg_type WHERE oid = ANY(%s)", ([column.type_code for column in found],)
            ).fetchall()
        )
        columns = []
        for one in found:
            modifier = -1 if one.precision is None else ((one.precision << 16) | ((one.scale or 0) & 0x7FF)) + 4
            columns.append(Column(one.name, names[one.type_code], one.type_code, modifier))
        all_names = [column.name for column in columns]
        key = self.key or self._primary_key(connection)
        for name in (key, *self.as_text):
            if name not in all_names:
                raise UsageError(f"{self!r} has no column '{name}'; it has {', '.join(all_names)}")
        kind = next(column.type_name for column in columns if column.name == key)
        key_type = connection.execute(
            "SELECT %s::oid::regtype::text", (next(column.type_oid for column in columns if column.name == key),)
        ).fetchone()[0]
        key_type = _WITHOUT_LENGTH.get(kind, key_type)
        quoted = identifier(key)
        if connection.execute(f"SELECT EXISTS (SELECT FROM {self.sql} WHERE q.{quoted} IS NULL)").fetchone()[0]:
            raise UsageError(f"column '{key}' of {self!r} has nulls, so it cannot be the key; give another key=")
        return _Shape(with_texts(columns, self.as_text), key, key_type, self._bounds(connection, quoted, kind))

    def _primary_key(self, connection: Any) -> str:
        rows = connection.execute(
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
            "AND a.attnum = ANY(i.indkey) WHERE i.indrelid = to_regclass(%s) AND i.indisprimary",
            (".".join(map(identifier, self.query.split("."))),),
        ).fetchall()
        if len(rows) != 1:
            raise UsageError(f"{self!r} has no primary key of one column; give key=..., a column to read in order of")
        return str(rows[0][0])

    def _bounds(self, connection: Any, key: str, kind: str) -> tuple[str, ...]:
        if self.ranges == 1:
            return ()
        if kind in _INTEGERS:
            low, high = connection.execute(f"SELECT min(q.{key}), max(q.{key}) FROM {self.sql}").fetchone()
            if low is None:
                return ()
            step = (high - low + 1) / self.ranges
            return tuple(dict.fromkeys(str(low + int(step * number) - 1) for number in range(1, self.ranges)))
        at = ", ".join(str(number / self.ranges) for number in range(1, self.ranges))
        row = connection.execute(
            f"SELECT percentile_disc(ARRAY[{at}]) WITHIN GROUP (ORDER BY q.{key})::text[] FROM {self.sql}"
        ).fetchone()
        return tuple(dict.fromkeys(row[0] or ()))


class QueryReader(FailStopReader):
    """Reads the ranges of one subtask, one after the other; a thread of its own reads ahead."""

    def __init__(self, source: PostgresQuery, context: SourceContext) -> None:
        """Use ``PostgresQuery.open``."""
        self._source, self._shape = source, source.shape()
        found = source.begins()
        if context.positions:
            found = {split: RangePosition.decode(data) for split, data in context.positions.items()}
        self._places = {
            split: found[split]
            for number, split in enumerate(sorted(found, key=int))
            if owner_of_split(number, context.parallelism) == context.subtask_index
        }
        self._changed = source.environment.condition()
        self._ready: deque[tuple[str, pa.RecordBatch, RangePosition]] = deque()
        self._problem: BaseException | None = None
        self._is_closed = False
        self._thread = source.environment.thread(self._run, "postgres-query")
        self._thread.start()

    def splits(self) -> Sequence[str]:
        return [split for split, place in self._places.items() if not place.is_done]

    def wakeup_ms(self) -> int:
        return WAKEUP_MS

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(1)

    def _poll(self) -> SourceBatch | None:
        with self._changed:
            if not self._ready:
                # after everything that was read before it
                if self._problem is not None:
                    raise self._problem
                return None
            split, batch, place = self._ready.popleft()
            self._changed.notify_all()
        self._places[split] = place
        return SourceBatch(split, batch, is_split_finished=place.is_done)

    def _has_ended(self) -> bool:
        return not self.splits()

    def _positions(self) -> dict[str, bytes]:
        return {split: place.encode() for split, place in self._places.items()}

    def _run(self) -> None:
        # a copy: the mailbox thread moves the others while this one reads ahead
        places: Mapping[str, RangePosition] = dict(self._places)
        try:
            for split, place in places.items():
                if not place.is_done:
                    for batch, now in self._read(place):
                        with self._changed:
                            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < READY_MAX, None)
                            if self._is_closed:
                                return
                            self._ready.append((split, batch, now))
        except ThreadEnded:
            raise
        except BaseException as error:
            with self._changed:
                self._problem = error

    def _read(self, place: RangePosition) -> Iterator[tuple[pa.RecordBatch, RangePosition]]:
        """Yield the rest of a range; each batch ends where the key changes."""
        source, shape, key = self._source, self._shape, f"q.{identifier(self._shape.key)}"
        begin = place.above if place.last is None else place.last
        bounds = [f"{key} > {_literal(begin)}::{shape.key_type}"] if begin is not None else []
        bounds += [f"{key} <= {_literal(place.upto)}::{shape.key_type}"] if place.upto is not None else []
        where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
        expressions = ", ".join(column.expression("q.") for column in shape.columns)
        query = f"SELECT {expressions}, concat({key}) AS {_KEY} FROM {source.sql}{where} ORDER BY {key}"
        held: list[pa.RecordBatch] = []
        with (
            translated(source.url, "read rows of"),
            connect_arrow(source.url) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(query)
            for found in cursor.fetch_record_batch():
                for first in range(0, found.num_rows, BATCH_ROWS):
                    part = found.slice(first, BATCH_ROWS)
                    keys = part.column(part.num_columns - 1)
                    whole = pc.sum(pc.not_equal(keys, keys[-1])).as_py() or 0  # before rows of the last key
                    if whole:
                        yield self._joined([*held, part.slice(0, whole)], place)
                        held = []
                    elif held and held[-1].column(part.num_columns - 1)[-1] != keys[-1]:
                        yield self._joined(held, place)
                        held = []
                    # kept until the key changes: a position is a key, and would skip the rest of rows that share it
                    held.append(part.slice(whole))
        batch, last = self._joined(held, place) if held else (pa.RecordBatch.from_pylist([], source.schema()), place)
        yield batch, msgspec.structs.replace(last, is_done=True)

    def _joined(self, parts: list[pa.RecordBatch], place: RangePosition) -> tuple[pa.RecordBatch, RangePosition]:
        table = pa.Table.from_batches(parts).combine_chunks()
        arrays = []
        for at, column in enumerate(self._shape.columns):
            arrays.append(parsed(pa.concat_arrays(table.column(at).chunks), column))
        last = str(table.column(table.num_columns - 1)[-1].as_py())
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._source.schema())
        return batch, msgspec.structs.replace(place, last=last)


def _literal(text: str) -> str:
    quoted = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{quoted}'"
