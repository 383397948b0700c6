"""Lookups: rows of a table of a database for the keys of records, with one query for the keys of many records.

Built on ``map_async``, whose requests are part of checkpoints: after a restore they are asked for again. The table is
reached through SQLAlchemy. Queries run in threads, since drivers of databases block.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa

from headgate.codec.exact_values import MisfitError, described, exact_array
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import StorageError, UsageError
from headgate.operators.async_map import AsyncBatchFunction
from headgate.operators.schemas import as_schema, frame_of

KEYS_MAX = 500
"""Keys in one query: databases bound the number of parameters."""

GATHER_S = 0.002
"""How long a key waits for others to be asked for together."""

Key: TypeAlias = tuple[Any, ...]
Found: TypeAlias = tuple[Any, ...]
"""A row of the table: the values of its columns."""

_DIGITS_MAX = 38


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A table of a database.

    Attributes:
        url: of SQLAlchemy, without a password.
        table: its name, with the schema in front if it is not the default one.
        on: maps columns of records to columns of the table.
        columns: what is added, by name in the table: name and type in the result.
    """

    url: str
    table: str
    on: Mapping[str, str]
    columns: Mapping[str, tuple[str, pa.DataType]]


def lookup_table(
    url: str,
    table: str,
    on: str | Sequence[str] | Mapping[str, str],
    columns: Sequence[str],
    schema: pa.Schema,
    suffix: str,
) -> LookupTable:
    """Return the table, after a look at its columns.

    Args:
        url, table, on, columns, suffix: as in ``Stream.lookup``.
        schema: of the records.

    Raises:
        UsageError: it is not there, or does not have the columns.
    """
    pairs = {on: on} if isinstance(on, str) else dict(on) if isinstance(on, Mapping) else {name: name for name in on}
    if not pairs:
        raise UsageError("lookup needs on=..., the columns by which rows are found")
    for name in pairs:
        if name not in schema.names:
            raise UsageError(f"lookup: the records have no column '{name}'; they have {', '.join(schema.names)}")
        if pa.types.is_nested(schema.field(name).type):
            raise UsageError(
                f"lookup: column '{name}' is {schema.field(name).type}, by which no row is found; take a part"
            )
    engine = _engine(url)
    try:
        found = _reflected(engine, table, url)
    finally:
        engine.dispose()
    names = [column.name for column in found.columns]
    for name in [*pairs.values(), *columns]:
        if name not in names:
            raise UsageError(f"lookup: table {table} has no column '{name}'; it has {', '.join(names)}")
    wanted = columns or [name for name in names if name not in pairs.values()]
    results: dict[str, tuple[str, pa.DataType]] = {}
    for name in wanted:
        result = name if name not in schema.names else f"{name}{suffix}"
        if result in schema.names or result in [one for one, _ in results.values()]:
            raise UsageError(f"lookup: the result would have two columns '{result}'; give another suffix=, or columns=")
        results[name] = (result, _arrow(found.columns[name].type))
    return LookupTable(url, table, pairs, results)


def _engine(url: str) -> sa.Engine:
    try:
        made = sa.engine.make_url(url)
        if made.password is not None or "password" in made.query:
            raise UsageError(
                f"the URL of the database at {made.host} has a password in it; leave it out, since the URL is shown in "
                "plans and logs, and give it in a way of the database's client, such as ~/.pgpass"
            )
        if made.drivername in ("postgresql", "postgres"):
            made = made.set(drivername="postgresql+psycopg")
        return sa.create_engine(made, pool_pre_ping=True)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError) as error:
        raise UsageError(
            f"lookup: {str(error).splitlines()[0]}; a URL such as postgresql://user@host/db is needed"
        ) from None
    except ModuleNotFoundError as error:
        raise UsageError(f"lookup needs the package {error.name}, in the driver and on every worker") from None


def _shown(url: str) -> str:
    return sa.engine.make_url(url).render_as_string(hide_password=True)


def _reflected(engine: sa.Engine, table: str, url: str) -> sa.Table:
    schema, dot, name = table.rpartition(".")
    try:
        return sa.Table(name, sa.MetaData(), schema=schema if dot else None, autoload_with=engine)
    except sa.exc.NoSuchTableError:
        raise UsageError(f"lookup: there is no table {table} in {_shown(url)}") from None
    except sa.exc.SQLAlchemyError as error:
        raise StorageError("look at", _shown(url), str(error).splitlines()[0]) from error


def _arrow(kind: sa.types.TypeEngine[Any]) -> pa.DataType:
    """Return the type of a column in Arrow; others are text."""
    if isinstance(kind, sa.Boolean):
        return pa.bool_()
    if isinstance(kind, sa.Integer):
        return pa.int64()
    if isinstance(kind, sa.Float):
        return pa.float64()
    if isinstance(kind, sa.Numeric) and kind.precision is not None and kind.precision <= _DIGITS_MAX:
        return pa.decimal128(kind.precision, kind.scale or 0)
    if isinstance(kind, sa.DateTime):
        return pa.timestamp("us", tz="UTC" if kind.timezone else None)
    if isinstance(kind, sa.Date):
        return pa.date32()
    if isinstance(kind, sa.LargeBinary):
        return pa.large_binary()
    return pa.large_string()


class Lookup(AsyncBatchFunction):
    """Adds the rows of a table to records. Records that are asked for at one time share queries."""

    def __init__(
        self, table: LookupTable, how: Literal["left", "inner"], cache_rows: int, ttl_ms: int, connections: int
    ) -> None:
        """``cache_rows`` keys are kept for ``ttl_ms``; 0: none. ``connections``: so many queries run at a time."""
        self._table, self._how, self._cache_rows, self._ttl_ms = table, how, cache_rows, ttl_ms
        self._connections = connections

    async def open(self) -> None:
        """Connect, and look at the table."""
        self._threads = ThreadPoolExecutor(self._connections, "headgate-lookup")
        self._cache: OrderedDict[Key, tuple[int, list[Found]]] = OrderedDict()
        self._waiting: dict[Key, asyncio.Future[list[Found]]] = {}
        self._asked: dict[Key, asyncio.Future[list[Found]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._askers = 0
        """Of the tasks, those that will look at ``_waiting`` again: one per connection at most."""
        self._schema = as_schema("lookup", pa.schema([pa.field(*one) for one in self._table.columns.values()]))
        await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare)

    def _prepare(self) -> None:
        self._sql = _engine(self._table.url)
        table = _reflected(self._sql, self._table.table, self._table.url)
        self._keys = [table.columns[name] for name in self._table.on.values()]
        self._query = sa.select(*self._keys, *(table.columns[name] for name in self._table.columns))

    async def call_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return each record with each row of its key; a record without one as ``how`` says."""
        keys, numbers = distinct(batch.select(list(self._table.on)))
        found = await self._found(keys)
        counts = np.array([len(rows) for rows in found], np.int64)
        of_records = counts[numbers]
        repeated = np.maximum(of_records, 1) if self._how == "left" else of_records
        records = np.repeat(np.arange(len(numbers)), repeated)
        within = np.arange(len(records)) - (np.cumsum(repeated) - repeated)[records]
        places = (np.cumsum(counts) - counts)[numbers][records] + within
        taken = pa.array(places, mask=(of_records == 0)[records])
        added = [column.take(taken) for column in self._columns([row for rows in found for row in rows])]
        schema = pa.schema([*batch.schema, *self._schema])
        return pa.RecordBatch.from_arrays([*batch.take(pa.array(records)).columns, *added], schema=schema)

    def _columns(self, rows: Sequence[Found]) -> list[pa.Array]:
        """Return rows of the table as columns.

        Raises:
            ValueError: a value does not fit, as SQLite allows.
        """
        columns = zip(*rows, strict=True) if rows else [()] * len(self._schema)
        found = []
        for name, field, values in zip(self._table.columns, self._schema, columns, strict=True):
            try:
                found.append(exact_array(values, field.type))
            except MisfitError as error:
                raise ValueError(
                    f"table {self._table.table} has {described(error.value)} in column '{name}', which is {field.type}"
                ) from None
        return found

    async def _found(self, keys: Sequence[Key]) -> list[list[Found]]:
        """Return the rows of each key; of one with a null, none."""
        now_ms, loop = SYSTEM_CLOCK.monotonic_ms(), asyncio.get_running_loop()
        found: list[list[Found]] = [[] for _ in keys]
        asked: dict[int, asyncio.Future[list[Found]]] = {}
        for at, key in enumerate(keys):
            if None in key:
                continue
            kept = self._cache.get(key)
            if kept is not None and kept[0] > now_ms:
                self._cache.move_to_end(key)
                found[at] = kept[1]
                continue
            # another record asks for this key already: one query serves both
            future = self._waiting.get(key) or self._asked.get(key)
            if future is None:
                future = self._waiting[key] = loop.create_future()
            asked[at] = future
        while self._askers < min(self._connections, -(-len(self._waiting) // KEYS_MAX)):
            self._askers += 1
            task = loop.create_task(self._ask())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if asked:
            await asyncio.wait(set(asked.values()))  # which are not cancelled with this: others may wait for them
        for at, future in asked.items():
            found[at] = future.result()
        return found

    async def _ask(self) -> None:
        """Ask for keys while some wait."""
        # records that come in this moment share the query
        await asyncio.sleep(GATHER_S)
        while self._waiting:
            part = {key: self._waiting.pop(key) for key in list(islice(self._waiting, KEYS_MAX))}
            self._asked |= part
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, list(part))
            except Exception as error:
                for key, future in part.items():
                    del self._asked[key]
                    future.set_exception(error)
                    future.exception()  # a request that timed out does not look at it
                continue
            until_ms = SYSTEM_CLOCK.monotonic_ms() + self._ttl_ms
            for key, future in part.items():
                del self._asked[key]
                future.set_result(found[key])
                if self._cache_rows and self._ttl_ms:
                    # also that there is no row: it is asked for again after the same time
                    self._cache[key] = (until_ms, found[key])
                    self._cache.move_to_end(key)
            while len(self._cache) > self._cache_rows:
                self._cache.popitem(last=False)
        self._askers -= 1

    def _fetch(self, keys: Sequence[Key]) -> dict[Key, list[Found]]:
        """Return the rows of keys. In a thread."""
        found: dict[Key, list[Found]] = {key: [] for key in keys}
        wanted: dict[Key, list[list[Found]]] = {}
        for key, rows in found.items():
            wanted.setdefault(self._compared(key), []).append(rows)
        if len(self._keys) == 1:
            chosen = self._keys[0].in_([key[0] for key in keys])
        else:
            chosen = sa.tuple_(*self._keys).in_(list(keys))
        names = list(self._table.columns.values())
        width = len(self._keys)
        with self._sql.connect() as connection:
            for one in connection.execute(self._query.where(chosen)):
                values = zip(one[width:], names, strict=True)
                row = tuple(_value(value, kind) for value, (_, kind) in values)
                for rows in wanted.get(self._compared(one[:width]), ()):  # a database may find texts of other case
                    rows.append(row)
        return found

    def _compared(self, key: Sequence[Any]) -> Key:
        """Return a key as it is compared: blanks at the end of CHAR do not count, and a UUID may be a text."""
        found = []
        for value, column in zip(key, self._keys, strict=True):
            if isinstance(column.type, sa.CHAR) and isinstance(value, str):
                value = value.rstrip(" ")
            elif isinstance(column.type, sa.Uuid):
                value = str(value).lower()
            found.append(value)
        return tuple(found)

    async def close(self) -> None:
        """Close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._sql.dispose)
        self._threads.shutdown(wait=False)


def distinct(keys: pa.RecordBatch) -> tuple[list[Key], npt.NDArray[np.int64]]:
    """Return the different rows, and for each row which of them it is."""
    frame = frame_of(keys)
    frame.columns = names = [f"{number}" for number in range(frame.width)]
    different = frame.unique(maintain_order=True)
    numbered = frame.join(different.with_row_index("at"), names, "left", nulls_equal=True, maintain_order="left")
    return different.rows(), numbered["at"].to_numpy().astype(np.int64)


def _value(value: Any, kind: pa.DataType) -> Any:
    if value is None or not pa.types.is_large_string(kind) or isinstance(value, str):
        return value
    return str(value)
