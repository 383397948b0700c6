"""A table of PostgreSQL as sink: rows go there by binary COPY, through ADBC.

The ledger is that of ``sql.sink``. With ``commit="prepared"`` workers write while records flow: a prepared transaction
has the rows of one subtask and checkpoint, and a row in ``headgate_commits``, because a server that does not know a
transaction any more may have committed it or not. Source: docs/spec/two-phase-commit.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from headgate.connectors.base import Committer, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import Fence, OutputName, in_order, owner_of
from headgate.connectors.ledger_sink import LedgerSink
from headgate.connectors.postgres.connection import as_ours, check_url, connection_text, place_of, said_by, state_of
from headgate.connectors.postgres.copy import created_type, fits, sent
from headgate.connectors.sql.dialects import delete_statement, quoted_table, upsert_statement
from headgate.connectors.sql.records import RowWriter, row_schema, row_type
from headgate.connectors.sql.sink import STAGED_KEYS, STAGED_ROWS, SqlSink, Transaction
from headgate.connectors.two_phase_sink import TwoPhaseSink
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.protocol.checkpoints.commit import CommitPermit

_DIALECT: Any = postgresql.psycopg.PGDialect_psycopg(paramstyle="named")  # type: ignore[no-untyped-call]
_DIALECT._backslash_escapes = False

DURABLE = "select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'"
"""What a connection begins with: a server where it is off loses transactions after it has committed them."""

_QUERY = """
select a.attname, case t.typtype when 'e' then 'enum' else
       format_type(case t.typtype when 'd' then t.typbasetype else a.atttypid end, null) end,
       not a.attnotnull or a.atthasdef or a.attidentity <> '', a.attgenerated <> '' or a.attidentity = 'a'
from pg_attribute a join pg_type t on t.oid = a.atttypid
where a.attrelid = to_regclass({name}) and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
_UNIQUE = """
select (select array_agg(a.attname::text) from pg_attribute a
        where a.attrelid = i.indrelid and a.attnum = any(i.indkey))
from pg_index i where i.indrelid = to_regclass({name})
and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null
"""
_UNLOGGED = """
select format('%I.%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relpersistence = 'u' and (c.oid = any(array[{names}]::regclass[])
or c.oid in (select relid from pg_partition_tree(to_regclass({name}))))
order by c.oid
"""


def text_of(statement: sa.Executable) -> str:
    """Return a statement with its values in it."""
    compiled: Any = statement
    return str(compiled.compile(dialect=_DIALECT, compile_kwargs={"literal_binds": True}))


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table: its type, whether it may be left out, and whether the database fills it."""

    kind: str
    is_optional: bool
    is_generated: bool


@dataclass(frozen=True, kw_only=True)
class PostgresSink(SqlSink):
    """Writes records to a table of PostgreSQL, each exactly once.

    The rows of a checkpoint become visible in one transaction when it completes. The records wait in the checkpoint
    until then; only the driver connects to the server, and copies them in binary form. With ``commit="prepared"`` the
    workers copy them while they come, and prepare a transaction on the server that the driver commits. Needs the
    packages psycopg and adbc-driver-postgresql: ``pip install 'headgate-streams[postgres]'``.

    The sink remembers in the tables ``headgate_sinks`` and ``headgate_commits`` which pipeline it belongs to, and what
    was written.

    Attributes:
        url: of the server and database, as for psql, such as ``"postgresql://writer@host:5432/shop"``; settings of
            libpq such as ``?sslmode=verify-full`` may follow. Without a password: libpq finds it in ``~/.pgpass`` or
            ``$PGPASSWORD``, or ``secret`` says where it is.
        table: the name of the table, as it is; ``"schema.table"`` unless ``schema`` is given.
        schema: the schema that the table is in, and those two; None: the first one of the search path.
        upsert: the columns of the key: a record replaces the row of its key. The primary key of the table, or a unique
            index, must be exactly that. Needed for streams with changes, whose key it must be. (): records are
            appended.
        commit: ``"ledger"``, or ``"prepared"``: for appended records only, and the server must allow prepared
            transactions (``max_prepared_transactions``). Each subtask's rows become visible by themselves.
        create: create the table if it is missing, with ``upsert`` as its primary key and room for rows that are
            replaced (``fillfactor = 70``).
        secret: where the password is found: ``"env:NAME"`` or ``"file:/path"``; "": where libpq finds it.
        takes_changes: whether the stream has changes; set by Headgate.
    """

    commit: Literal["ledger", "prepared"] = "ledger"

    has_arrays: ClassVar[bool] = True
    has_nul: ClassVar[bool] = False

    def _check_url(self) -> None:
        check_url(self.url, self.secret, type(self).__name__)
        if self.commit not in ("ledger", "prepared"):
            raise UsageError(f"PostgresSink(commit={self.commit!r}) must be 'ledger' or 'prepared'")
        if self.commit == "prepared" and self.keys:
            raise UsageError(
                "PostgresSink(commit='prepared') appends records: upserts would wait for rows that transactions of "
                "former checkpoints have locked; leave commit= or upsert= out"
            )

    @property
    def place(self) -> str:
        return place_of(self.url)

    @property
    def qualified(self) -> str:
        """The name of the table as SQL says it."""
        return text_name(self.table, self.schema)

    def ledger_name(self, table: str) -> str:
        """Return the name of a table of the ledger as SQL says it."""
        return text_name(table, self.schema)

    def connection_text(self, **options: str) -> str:
        """Return what libpq takes, with the password: for one connection."""
        return connection_text(self.url, self.secret, {"application_name": "headgate", **options})

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        with _engine(self.connection_text(), SYSTEM_ENVIRONMENT.process_id).connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Transaction]:
        transaction = self.begin_copy()
        try:
            yield transaction
            transaction.connection.commit()
        except BaseException:
            transaction.close()
            raise
        transaction.keep_connection()

    def begin_copy(self) -> CopyTransaction:
        """Return a transaction with a connection of its own."""
        key = self.connection_text(), SYSTEM_ENVIRONMENT.process_id
        # taken out in one step, so that no other thread gets it; by process, because a fork must not share it
        return CopyTransaction(_usable(_spare.pop(key, None)) or connected(self), self, key)

    def close_spare(self) -> None:
        """Close the connection that is kept for the next checkpoint."""
        close_spare(self.connection_text())

    def open(self, context: SinkContext) -> SinkWriter:
        if self.commit == "ledger":
            return super().open(context)
        schema = row_schema(context.schema, has_arrays=True)
        inner = PreparedTransactions(self).open(replace(context, schema=schema))
        return RowWriter(inner, schema, (), has_nul=False)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        return PostgresCommitter(self, pipeline, node, generation)

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: create the table when it is missing."""
        super().make_target(schema)
        if self.commit == "prepared":
            PreparedTransactions(self).check_server()

    @contextlib.contextmanager
    def translated(self, operation: str) -> Iterator[None]:
        import adbc_driver_manager
        import psycopg

        try:
            yield
        except HeadgateError:
            raise
        except (sa.exc.DBAPIError, adbc_driver_manager.Error, psycopg.Error) as error:
            found = as_ours(error, operation, self.place)
            if found is None and operation == "write to":
                found = UsageError(self.refusal(operation, said_by(error)))
            raise found or StorageError(operation, self.place, said_by(error), is_transient=False) from None

    def column_type(self, dialect: str, column: pa.Field) -> sa.types.TypeEngine[Any]:
        return created_type(column.type)

    def _check_table(self, connection: sa.Connection, schema: pa.Schema) -> None:
        database: Any = connection.connection.driver_connection  # which takes a text as it is
        found = as_columns(database.execute(columns_query(self.qualified)))
        columns = self.columns(schema)
        for column in columns:
            if column.name not in found:
                raise self.misfit(f"has no column '{column.name}'; it has {', '.join(found)}")
            theirs = found[column.name]
            if theirs.is_generated:
                raise self.misfit(f"fills '{column.name}' by itself; leave the column out of the records")
            if not fits(row_type(column.type, has_arrays=True), theirs.kind):
                raise self.misfit(
                    f"has type {theirs.kind} in '{column.name}', and the records have {column.type}; cast the column "
                    "before the sink, or change the table"
                )
        for name, one in found.items():
            if name not in columns.names and not one.is_optional and not one.is_generated:
                raise self.misfit(f"needs a value in '{name}', which the records do not have")
        if self.keys:
            self.check_unique([names for (names,) in database.execute(unique_query(self.qualified))])
        for (unlogged,) in database.execute(self._unlogged_query()):
            raise self.misfit(
                f"relies on {unlogged}, which is unlogged, so that a crash of the server empties it; ALTER TABLE "
                f"{unlogged} SET LOGGED"
            )

    def _unlogged_query(self) -> str:
        """Return the query for tables that a crash empties: of the ledger, the target, and its partitions."""
        tables = (self.qualified, *(self.ledger_name(table.name) for table in (self.ledger.sinks, self.ledger.commits)))
        names = ", ".join(f"to_regclass({_literal(table)})" for table in tables)
        return _UNLOGGED.format(names=names, name=_literal(self.qualified))


@functools.lru_cache(maxsize=16)
def _engine(text: str, pid: int) -> sa.Engine:
    """Return what connects in this process; it keeps no connection."""
    import psycopg

    def connect() -> psycopg.Connection[Any]:
        connection = psycopg.connect(text)
        connection.execute(DURABLE)
        connection.commit()
        return connection

    return sa.create_engine("postgresql+psycopg://", creator=connect, poolclass=sa.pool.NullPool)


def text_name(table: str, schema: str | None) -> str:
    """Return the name of a table as SQL says it."""
    quoted = _DIALECT.identifier_preparer.quote_identifier
    return quoted(table) if schema is None else f"{quoted(schema)}.{quoted(table)}"


def columns_query(qualified: str) -> str:
    """Return the query for ``as_columns``."""
    return _QUERY.format(name=_literal(qualified))


def unique_query(qualified: str) -> str:
    """Return the query for the sets of columns that are unique in a table."""
    return _UNIQUE.format(name=_literal(qualified))


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def as_columns(rows: Any) -> dict[str, TableColumn]:
    """Return the columns of a table by name."""
    return {name: TableColumn(*rest) for name, *rest in rows}


_spare: dict[tuple[str, int], Any] = {}
"""Connections of ADBC for the next checkpoint, by what they were made with.

Making one takes the longer, the more tables the database has: it reads the catalogue of types, of which each table is
one.
"""


@atexit.register
def close_spare(text: str = "") -> None:
    """Close the connections that were made with ``text``; "": all of this process."""
    for key in list(_spare):
        if (
            key[1] == SYSTEM_ENVIRONMENT.process_id
            and text in ("", key[0])
            and (connection := _spare.pop(key, None)) is not None
        ):
            with contextlib.suppress(Exception):
                connection.close()


def _usable(connection: Any) -> Any:
    """Return ``connection``, or None if its server went in the meantime."""
    import adbc_driver_manager

    if connection is not None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("select 1")
        except adbc_driver_manager.Error:
            connection.close()
            return None
    return connection


def connected(sink: PostgresSink, **options: str) -> Any:
    """Return a connection of ADBC."""
    from adbc_driver_postgresql import dbapi

    connection = dbapi.connect(sink.connection_text(**options))
    with connection.cursor() as cursor:
        cursor.execute(DURABLE)
    connection.commit()
    return connection


class CopyTransaction:
    """A transaction of ADBC: see ``sql.sink.Transaction``."""

    def __init__(self, connection: Any, sink: PostgresSink, key: tuple[str, int]) -> None:
        """``key``: what the connection was made with, and where."""
        self.connection, self._sink, self._key = connection, sink, key
        self.is_prepared = self.is_rolled_back = False
        self._columns: dict[str, TableColumn] = {}
        self._is_staged = False

    def rows(self, statement: sa.Executable) -> list[tuple[Any, ...]]:
        return self.query(text_of(statement))

    def run(self, statement: sa.Executable) -> None:
        self.execute(text_of(statement))

    def append(self, rows: pa.RecordBatch) -> None:
        self._copy(self._sink.table, rows, db_schema_name=self._sink.schema)

    def change(self, rows: pa.RecordBatch, gone: pa.RecordBatch) -> None:
        names, keys = rows.schema.names, self._sink.keys
        target = quoted_table(self._sink.table, names, self._sink.schema)
        if not self._is_staged:
            for name, columns in ((STAGED_ROWS, names), (STAGED_KEYS, list(keys))):
                wanted = text_of(quoted_table(self._sink.table, columns, self._sink.schema).select())
                self.execute(f"create temp table {name} on commit drop as {wanted} with no data")
            self._is_staged = True
        if len(rows):
            self._copy(STAGED_ROWS, rows, temporary=True)
            staged = quoted_table(STAGED_ROWS, names, "pg_temp")
            self.run(upsert_statement("postgresql", target, names, keys, staged.select()))
            self.execute(f"truncate pg_temp.{STAGED_ROWS}")
        if len(gone):
            self._copy(STAGED_KEYS, gone, temporary=True)
            self.run(delete_statement(target, keys, quoted_table(STAGED_KEYS, keys, "pg_temp")))
            self.execute(f"truncate pg_temp.{STAGED_KEYS}")

    def execute(self, text: str) -> None:
        """Execute a statement."""
        with self.connection.cursor() as cursor:
            cursor.execute(text)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """Execute a statement that returns rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(text)
            return [tuple(row) for row in cursor.fetchall()]

    def close(self) -> None:
        """Close the connection; what was neither committed nor prepared is rolled back."""
        self.connection.close()

    def keep_connection(self) -> None:
        """Keep the connection for the next transaction, or close it if another one is kept."""
        # in one step: several threads may end a transaction at once
        if _spare.setdefault(self._key, self.connection) is not self.connection:
            self.close()

    def _copy(self, table: str, rows: pa.RecordBatch, **options: Any) -> None:
        if not self._columns:
            self._columns = as_columns(self.query(columns_query(self._sink.qualified)))
        columns = [
            sent(column, self._kind(name), name) for name, column in zip(rows.schema.names, rows.columns, strict=True)
        ]
        made = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
        with self.connection.cursor() as cursor:
            cursor.adbc_ingest(table, made, mode="append", **options)

    def _kind(self, name: str) -> str:
        """Return the type of a column, which was there when the pipeline began."""
        if name not in self._columns:
            raise self._sink.misfit(f"has no column '{name}' any more; bring it back, and start again")
        return self._columns[name].kind


# -- output that is prepared on the server --------------------------------------------------------------------------

_UNKNOWN = "42704"
"""There is no such prepared transaction: it was committed, rolled back, or never there."""


class PreparedTransactions(TwoPhaseSink[CopyTransaction]):
    """The sink in workers, and what the driver does with what they prepared."""

    transient_errors = ()

    def __init__(self, sink: PostgresSink) -> None:
        self._sink = sink

    def begin(self, name: str, schema: pa.Schema) -> CopyTransaction:
        with self._sink.translated("write to"):
            return self._sink.begin_copy()

    def write(self, transaction: CopyTransaction, batch: pa.RecordBatch) -> None:
        with self._sink.translated("write to"):
            transaction.append(batch)

    def prepare(self, transaction: CopyTransaction, name: str, fence: Fence) -> None:
        """See ``TwoPhaseSink``. No lock is kept on the row of the owner, which the next generation has to change."""
        if transaction.is_prepared:  # and the answer was lost
            return
        if transaction.is_rolled_back:
            raise StorageError("prepare output of", self._sink.place, "it was rolled back when that failed", False)
        transaction.is_rolled_back = True  # by the server, unless all that follows succeeds
        commits, sinks = self._sink.ledger.commits, self._sink.ledger.sinks
        with self._sink.translated("prepare output of"):
            rows = transaction.rows(sa.select(sinks.c.generation).where(sinks.c.owner == fence.owner))
            fence.refuse_if_older_than(rows[0][0] if rows else None)
            # part of what is prepared: the name becomes visible with the rows, or not at all
            transaction.run(sa.insert(commits).values(owner=fence.owner, name=name))
            database = transaction.query("select current_database()")[0][0]
            transaction.execute(f"prepare transaction '{self._gid(database, name)}'")
            transaction.is_prepared, transaction.is_rolled_back = True, False

    def close(self, transaction: CopyTransaction) -> None:
        """See ``TwoPhaseSink``. A connection with nothing open is kept for the next checkpoint."""
        with contextlib.suppress(Exception):
            if transaction.is_prepared:
                transaction.connection.commit()  # for the client a transaction is open: it begins the next one
                transaction.keep_connection()
            else:
                transaction.close()

    # -- in the driver ----------------------------------------------------------------------------------------------

    def claim(self, fence: Fence) -> None:
        self._sink.claim(fence)

    def claimed(self, owner: str) -> Fence | None:
        return self._sink.claimed(owner)

    def all_claimed(self) -> Iterable[Fence]:
        return self._sink.all_claimed()

    def prepared(self, owner: str) -> Iterable[str]:
        with self._deciding() as database:
            prefix = self._prefix(database.info.dbname, owner)
            query = "select gid from pg_prepared_xacts where database = current_database() and starts_with(gid, %s)"
            return [f"{owner}-{gid.removeprefix(prefix)}" for (gid,) in database.execute(query, [prefix])]

    def commit(self, names: Sequence[str], fence: Fence) -> None:
        """See ``TwoPhaseSink``. The row of the owner stays locked meanwhile, so that no newer generation begins."""
        with self._fenced(fence), self._deciding() as database:
            for name in names:
                # not known to the server, it was committed before, if the name that is part of it is there
                if not self._decide(database, "commit", name) and name not in self._remembered_names(
                    database, fence.owner, name
                ):
                    raise UsageError(
                        f"{name} is neither prepared nor committed in {self._sink.place}: it was rolled back there by "
                        "hand, or another server was put in its place"
                    )

    def abort(self, name: str, fence: Fence) -> None:
        with self._fenced(fence), self._deciding() as database:
            self._decide(database, "rollback", name)

    def committed(self, owner: str) -> Iterable[str]:
        with self._deciding() as database:
            return self._remembered_names(database, owner)

    def forget(self, names: Sequence[str]) -> None:
        commits = self._sink.ledger.commits
        with self._sink.translated("forget in"), self._sink.transaction() as transaction:
            for some in (names[at : at + 1_000] for at in range(0, len(names), 1_000)):
                transaction.run(sa.delete(commits).where(commits.c.name.in_(some)))

    def check_server(self) -> None:
        """Check that the server allows prepared transactions.

        Raises:
            UsageError: it does not.
        """
        with self._deciding() as database:
            allowed = int(database.execute("show max_prepared_transactions").fetchone()[0])
        if allowed == 0:
            raise UsageError(
                f"PostgresSink(commit='prepared') needs prepared transactions, and {self._sink.place} allows none: set "
                "max_prepared_transactions there to at least twice the parallelism and restart it, or leave commit= out"
            )

    def _remembered_names(self, database: Any, owner: str, name: str = "") -> list[str]:
        """Return the names of prepared output that was committed, as far as it is remembered."""
        commits = self._sink.ledger_name("headgate_commits")
        query = f"select name from {commits} where owner = %s and checkpoint is null and %s in ('', name)"
        return [found for (found,) in database.execute(query, [owner, name])]

    def _decide(self, database: Any, decision: str, name: str) -> bool:
        """Commit or roll back; return whether the server knew the transaction."""
        import psycopg

        try:
            database.execute(f"{decision} prepared '{self._gid(database.info.dbname, name)}'")
        except psycopg.Error as error:
            if state_of(error) != _UNKNOWN:
                raise
            return False
        return True

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[Any]:
        """Give a connection without transactions."""
        import psycopg

        with (
            self._sink.translated("decide about output of"),
            # the server decides prepared transactions outside of any other one only
            psycopg.connect(self._sink.connection_text(), autocommit=True) as database,
        ):
            yield database

    @contextlib.contextmanager
    def _fenced(self, fence: Fence) -> Iterator[None]:
        """Keep other generations from beginning.

        Raises:
            FencedError: a newer one has begun.
        """
        with self._sink.translated("lock"), self._sink.transaction() as transaction:
            self._sink.locked(transaction, fence)
            yield

    def _prefix(self, database: str, owner: str) -> str:
        """Return what the names of transactions of an owner begin with on a server; they have fewer than 200 bytes."""
        place = "\0".join((database, self._sink.schema or "", owner))
        return f"headgate:{hashlib.sha256(place.encode()).hexdigest()[:32]}:"

    def _gid(self, database: str, name: str) -> str:
        found = OutputName.parse(name)
        assert found is not None, "names are those of output"
        return self._prefix(database, found.owner) + name.removeprefix(f"{found.owner}-")


def is_prepared(committable: Committable) -> bool:
    """Whether output was prepared on the server; other output is in the checkpoint."""
    return b"\n" not in committable.payload[2:]


class PostgresCommitter(Committer):
    """Commits output of both kinds: the option may have changed since a checkpoint."""

    can_forget = True

    def __init__(self, sink: PostgresSink, pipeline: str, node: str, generation: Generation) -> None:
        self._sink, self._owner = sink, owner_of(pipeline, node)
        self._ledger = LedgerSink.open_committer(sink, pipeline, node, generation)
        self._prepared = PreparedTransactions(sink).open_committer(pipeline, node, generation)
        self.knows_outcomes = sink.commit == "prepared"

    def read_pieces_with(self, read: Callable[[SnapshotPart], memoryview]) -> None:
        self._ledger.read_pieces_with(read)

    def recover(self, keep: Sequence[Committable]) -> None:
        self._ledger.recover(())
        self._prepared.recover([one for one in keep if is_prepared(one)])

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        # neighbours, not all of a kind: older checkpoints stay in front of newer ones (K2)
        for prepared, some in itertools.groupby(in_order(permit, committables), is_prepared):
            (self._prepared if prepared else self._ledger).commit(permit, list(some))

    def denial(self, committable: Committable) -> str:
        return self._prepared.denial(committable) if is_prepared(committable) else ""

    def may_have_forgotten(self, committable: Committable) -> bool:
        of = self._prepared if is_prepared(committable) else self._ledger
        return of.may_have_forgotten(committable)

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        self._ledger.forget(before, promised)
        self._prepared.forget(before, lambda: [one for one in promised() if is_prepared(one)])

    def close(self) -> None:
        """Close the connection that is kept for the next checkpoint."""
        self._sink.close_spare()
