"""A table of a database as sink, through SQLAlchemy: what users configure, the ledger, and how rows are written.

The records of a checkpoint are in the checkpoint. When it is completed the driver writes them in one transaction, with
their names in the table ``headgate_commits``; the newest generation of each sink is in ``headgate_sinks``, whose row
every transaction locks. Counterpart: ``postgres.sink`` writes by other means. Source: docs/spec/two-phase-commit.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import sqlalchemy as sa

from headgate.connectors.base import Holding, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import Fence, OutputName
from headgate.connectors.ledger_sink import LedgerOutput, LedgerSink, output_checkpoint
from headgate.connectors.secret import is_secret_place, read_secret
from headgate.connectors.sql import mysql as mysqls
from headgate.connectors.sql.dialects import (
    DUCKDB_TYPES,
    delete_statement,
    fits,
    quoted_table,
    sql_type,
    upsert_statement,
)
from headgate.connectors.sql.records import (
    RowWriter,
    check_change_keys,
    check_rows,
    check_upsert_columns,
    last_changes,
    row_schema,
    upsert_columns,
)
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.config import check_switches
from headgate.model.lineage import Location
from headgate.model.pipeline_identity import Mine
from headgate.operators.changes import OP

CHUNK_ROWS = 1 << 17
"""So many rows are written, or looked through for changes of one key, at a time."""

UPSERTS = ("sqlite", "duckdb", "mysql", "mariadb", "postgresql")
"""Dialects with a statement for it."""

STAGED_ROWS, STAGED_KEYS = "headgate_rows", "headgate_keys"
"""Where rows to upsert, and keys to delete, are for a moment, where a database has something faster than values."""

SQLITE_LASTING = ("SQLITE_ERROR", "SQLITE_READONLY")
"""What SQLite says of a table that is missing, and of a file that it may not write to."""

_IN_INNODB: dict[str, Any] = {
    f"{name}_{option}": value
    for name in mysqls.BACKENDS
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}
"""Others keep tables without transactions, or texts without all characters."""

_WITH_ROOM: dict[str, Any] = {"postgresql_with": {"fillfactor": 70}}
"""A row that is replaced stays in its page of PostgreSQL, and its index as it is (a heap-only tuple)."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The two tables that remember owners and what was written, beside the table of the sink."""

    sinks: sa.Table
    commits: sa.Table

    @staticmethod
    @functools.cache  # a statement is compiled once for each table that is another object
    def in_schema(schema: str | None) -> Ledger:
        """Return the tables in ``schema``; None: that of the connection."""
        metadata = sa.MetaData(schema=schema)
        name = sa.Text().with_variant(mysqls.TEXT_OF_NAMES, *mysqls.BACKENDS)
        sinks = sa.Table(
            "headgate_sinks",
            metadata,
            sa.Column("owner", name, primary_key=True),
            sa.Column("generation", sa.BigInteger, nullable=False),
            sa.Column("life", sa.Text, nullable=False),
            sa.Column("writes", sa.BigInteger, nullable=False),
            # below this checkpoint commits may have been removed
            sa.Column("forgotten", sa.BigInteger, nullable=False),
            **_IN_INNODB,
        )
        commits = sa.Table(
            "headgate_commits",
            metadata,
            sa.Column("owner", name, primary_key=True),
            sa.Column("name", name, primary_key=True),
            sa.Column("checkpoint", sa.BigInteger),
            **_IN_INNODB,
        )
        return Ledger(sinks, commits)


class Transaction(Protocol):
    """An open transaction of the database."""

    def rows(self, statement: sa.Executable) -> list[tuple[Any, ...]]:
        """Execute a statement that returns rows."""

    def run(self, statement: sa.Executable) -> None:
        """Execute a statement."""

    def append(self, rows: pa.RecordBatch) -> None:
        """Insert rows into the table."""

    def change(self, rows: pa.RecordBatch, gone: pa.RecordBatch) -> None:
        """Upsert rows, and delete those with the keys ``gone``; no key is in both, or twice."""


@dataclass(frozen=True, kw_only=True)
class SqlSink(LedgerSink):
    """Writes records to a table of a database that SQLAlchemy knows, each exactly once.

    The rows of a checkpoint become visible in one transaction when it completes. The records wait in the checkpoint
    until then; only the driver connects to the database. Tried with SQLite, DuckDB and MariaDB; MySQL, which differs
    from MariaDB in the names of collations, was not. Of other databases it needs transactions, and it only appends. For
    PostgreSQL there is ``PostgresSink``, which copies rows in bulk.

    The sink remembers in the tables ``headgate_sinks`` and ``headgate_commits`` which pipeline it belongs to, and what
    was written.

    Attributes:
        url: of SQLAlchemy, such as ``"sqlite:////data/shop.db"`` or ``"mysql+pymysql://writer@host/shop"``, without a
            password.
        table: the name of the table, as it is; ``"schema.table"`` unless ``schema`` is given.
        schema: the schema that the table is in, and those two; None: the connection's.
        upsert: the columns of the key: a record replaces the row of its key. The key of the table, or a unique
            constraint, must be exactly that. Needed for streams with changes, whose key it must be. (): records are
            appended.
        create: create the table if it is missing, with ``upsert`` as its primary key.
        secret: where the password is found in the driver: ``"env:NAME"`` or ``"file:/path"``; "": there is none.
        takes_changes: whether the stream has changes; set by Headgate.
    """

    url: str = field(kw_only=False)
    table: str = field(kw_only=False)
    schema: str | None = None
    upsert: str | Sequence[str] = ()
    create: bool = False
    secret: str = field(default="", repr=False)
    takes_changes: bool = field(default=False, repr=False)

    has_arrays: ClassVar[bool] = False
    has_nul: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value.
        """
        kind = type(self).__name__
        check_switches(f"{kind}: ", create=self.create)
        object.__setattr__(self, "upsert", upsert_columns(kind, self.upsert))
        if self.schema is None and "." in self.table:
            schema, _, table = self.table.partition(".")
            object.__setattr__(self, "schema", schema)
            object.__setattr__(self, "table", table)
        if not self.table or self.schema == "":
            raise UsageError(f"{kind}(table=) names no table")
        if self.secret and not is_secret_place(self.secret):
            raise UsageError(
                f"{kind}(secret=) must be 'env:NAME' or 'file:/path', which says where the password is found; the "
                "password itself must not be part of a program"
            )
        self._check_url()

    def _check_url(self) -> None:
        try:
            url = sa.make_url(self.url)
            backend = url.get_backend_name()
            url.get_dialect()
        except (sa.exc.ArgumentError, ImportError) as error:
            raise UsageError(
                f"SqlSink cannot use its URL: {_first_line(error)}; give one such as 'sqlite:////data/shop.db'"
            ) from None
        if backend == "postgresql":
            raise UsageError("SqlSink is not for PostgreSQL: use headgate.PostgresSink, with the same arguments")
        if url.password is not None or any("passw" in name.lower() for name in url.query):
            raise UsageError(
                f"SqlSink: the URL of the database at {url.host} has a password in it; leave it out, and say with "
                "secret='env:NAME' or secret='file:/path' where it is found"
            )
        if backend in ("sqlite", "duckdb"):
            if url.database in (None, "", ":memory:"):
                raise UsageError(f"SqlSink(url={self.url!r}) is in memory; give a file, such as 'sqlite:////data/a.db'")
            absolute = url.set(database=os.path.abspath(str(url.database)))
            # the driver and workers may run in other directories
            object.__setattr__(self, "url", absolute.render_as_string(hide_password=False))

    # -- what it writes ---------------------------------------------------------------------------------------------

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key; none: records are appended."""
        assert isinstance(self.upsert, tuple)
        return self.upsert

    def for_changes(self, keys: tuple[str, ...] | None, *, retractions: bool) -> SqlSink:
        kind = type(self).__name__
        if keys is None:
            return self
        if not self.keys:
            found = ", ".join(repr(key) for key in keys) or "'id'"
            raise UsageError(
                f"{kind} without upsert= appends rows, and this stream has changes of rows; give upsert=({found},) to "
                "keep the table that they describe, or call .changes_as_records() before to append the changes"
            )
        check_change_keys(kind, self.keys, keys)
        return replace(self, takes_changes=True)

    def columns(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns of the table that records of ``schema`` fill."""
        names = [name for name in schema.names if name != OP or not self.takes_changes]
        return pa.schema([schema.field(name) for name in names])

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink``: also that the table is there and fits."""
        kind = type(self).__name__
        check_upsert_columns(kind, self.keys, schema)
        check_rows(schema, has_arrays=self.has_arrays)
        with self.translated("look at"), self._connected() as connection:
            if self.keys and mysqls.kind_of(connection) not in UPSERTS:
                raise UsageError(f"{kind}(upsert=) is not there yet for {mysqls.kind_of(connection)}; leave it out")
            self._target(mysqls.kind_of(connection), schema)
            if self._has_table(connection, self.table):
                self._check_table(connection, schema)
            elif not self.create:
                raise UsageError(
                    f"{kind}: there is no table {self._name} in {self.place}; create it, or give create=True"
                )

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: create the table when it is missing."""
        with self.translated("create"), self._connected() as connection:
            if self.create and not self._has_table(connection, self.table):
                target = self._target(mysqls.kind_of(connection), schema)
                connection.execute(sa.schema.CreateTable(target, if_not_exists=True))
                connection.commit()
        self.check(schema)

    def open(self, context: SinkContext) -> SinkWriter:
        schema = row_schema(context.schema, has_arrays=self.has_arrays)
        inner = super().open(replace(context, schema=schema))
        has_nan = sa.make_url(self.url).get_backend_name() not in mysqls.BACKENDS
        return RowWriter(inner, schema, self.keys, has_nul=self.has_nul, has_nan=has_nan)

    def locations(self) -> tuple[Location, ...]:
        """See ``Sink``. Without the host, which may change."""
        name = f"{self.place}:{self._name}"
        return (Location(name, name),)

    @property
    def _name(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"

    @property
    def place(self) -> str:
        """The database, for messages."""
        url = sa.make_url(self.url)
        return f"{url.get_backend_name()}:{url.database or ''}"

    # -- the ledger -------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The tables that remember."""
        return Ledger.in_schema(self.schema)

    def claim(self, fence: Fence) -> None:
        sinks = self.ledger.sinks
        with self.translated("claim"):
            with self._connected() as connection:
                if not self._has_table(connection, "headgate_commits"):
                    sinks.metadata.create_all(connection)
                    connection.commit()
            with self.transaction() as transaction:
                found = self.locked(transaction, fence)
                values = {"generation": fence.generation, "life": fence.life}
                if found is None:
                    transaction.run(sa.insert(sinks).values(owner=fence.owner, writes=0, forgotten=0, **values))
                else:
                    transaction.run(sa.update(sinks).where(sinks.c.owner == fence.owner).values(**values))

    def locked(self, transaction: Transaction, fence: Fence) -> Fence | None:
        """Lock the row of the owner until the end of the transaction; return the fence that it has.

        Raises:
            FencedError: it is newer, or another pipeline's.
        """
        sinks = self.ledger.sinks
        mine = sinks.c.owner == fence.owner
        # a write, because it locks the row in every database; for reading it only some have a lock
        transaction.run(sa.update(sinks).where(mine).values(writes=sinks.c.writes + 1))
        rows = transaction.rows(sa.select(sinks.c.owner, sinks.c.generation, sinks.c.life).where(mine))
        found = Fence(*rows[0]) if rows else None
        fence.refuse_if_replaced_by(found)
        return found

    def claimed(self, owner: str) -> Fence | None:
        return next((fence for fence in self.all_claimed() if fence.owner == owner), None)

    def all_claimed(self) -> Iterable[Fence]:
        sinks = self.ledger.sinks
        with self.translated("look at"), self._connected() as connection:
            if not self._has_table(connection, sinks.name):
                return []
            return [
                Fence(*row) for row in connection.execute(sa.select(sinks.c.owner, sinks.c.generation, sinks.c.life))
            ]

    def publish(self, outputs: Sequence[LedgerOutput], fence: Fence) -> None:
        commits = self.ledger.commits
        with self.translated("write to"), self._writing() as transaction:
            self.locked(transaction, fence)
            names = [output.name for output in outputs]
            mine = commits.c.owner == fence.owner
            known = {
                name for (name,) in transaction.rows(sa.select(commits.c.name).where(mine, commits.c.name.in_(names)))
            }
            for output in outputs:
                if output.name in known:
                    # an earlier call committed it, and its answer was lost
                    continue
                for rows in chunks(output):
                    if self.keys:
                        transaction.change(*last_changes(rows, self.keys, has_op=self.takes_changes))
                    else:
                        transaction.append(rows)
                checkpoint = output_checkpoint(output.name)
                # in the transaction of the rows: who has the name has the rows
                transaction.run(sa.insert(commits).values(owner=fence.owner, name=output.name, checkpoint=checkpoint))

    def may_have_forgotten(self, name: str) -> bool:
        sinks, commits = self.ledger.sinks, self.ledger.commits
        found = OutputName.parse(name)
        assert found is not None, "names are those of output"
        with self.translated("look at"), self._connected() as connection:
            mine = commits.c.owner == found.owner
            if connection.execute(sa.select(commits.c.name).where(mine, commits.c.name == name)).first() is not None:
                return False
            row = connection.execute(sa.select(sinks.c.forgotten).where(sinks.c.owner == found.owner)).first()
            return row is not None and found.number < row[0]

    def forget(self, owner: str, before: int) -> None:
        sinks, commits = self.ledger.sinks, self.ledger.commits
        with self.translated("forget in"), self.transaction() as transaction:
            mine = sinks.c.owner == owner
            # with the names, in one transaction: ``may_have_forgotten`` goes by it
            transaction.run(sa.update(sinks).where(mine, sinks.c.forgotten < before).values(forgotten=before))
            transaction.run(sa.delete(commits).where(commits.c.owner == owner, commits.c.checkpoint < before))

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``Sink``. The table may have rows of others, so none is deleted."""
        where, known = f"table {self._name} in {self.place}", self.owner(pipeline, node)
        if known.is_unknown or known.is_forgotten:
            return Holding("", where)
        problem = f"{where} keeps what was written to it; empty it yourself, or leave it as it is"
        return Holding("all its output", where, problem=problem)

    # -- the database -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        """Give a connection for looking around; what is not committed is rolled back."""
        url = sa.make_url(self.url)
        if self.secret:
            url = url.set(password=read_secret(self.secret, self.place))
        with _engine(url, SYSTEM_ENVIRONMENT.process_id).connect() as connection:
            yield connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Give a transaction, which is committed unless it raises."""
        with self._connected() as connection:
            transaction = _Connection(connection, self)
            yield transaction
            connection.commit()

    def _writing(self) -> contextlib.AbstractContextManager[Transaction]:
        """Give a transaction that rows are written in."""
        return self.transaction()

    @contextlib.contextmanager
    def translated(self, operation: str) -> Iterator[None]:
        """Turn errors of the database into ours."""
        try:
            yield
        except HeadgateError:
            raise
        except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
            is_mysql = sa.make_url(self.url).get_backend_name() in mysqls.BACKENDS
            is_lasting = getattr(error.orig, "sqlite_errorname", "") in SQLITE_LASTING
            if is_lasting or (is_mysql and not mysqls.passes(error)):
                raise UsageError(self.refusal(operation, _first_line(error))) from None
            raise StorageError(operation, self.place, _first_line(error)) from None
        except sa.exc.DBAPIError as error:
            # of two first claims at once one meets the row of the other, and finds it with the next try
            if error.connection_invalidated or (operation == "claim" and isinstance(error, sa.exc.IntegrityError)):
                raise StorageError(operation, self.place, _first_line(error)) from None
            raise UsageError(self.refusal(operation, _first_line(error))) from None

    def refusal(self, operation: str, said: str) -> str:
        """Return what to say when the database refuses something for good."""
        return (
            f"the database refuses to {operation} table {self._name} in {self.place}: {said}; change the table, the "
            "rights or the records, and start again"
        )

    def _has_table(self, connection: sa.Connection, name: str) -> bool:
        if mysqls.kind_of(connection) == "duckdb":
            return bool(self._reflected(connection, name))
        return bool(sa.inspect(connection).has_table(name, schema=self.schema))

    def _target(self, dialect: str, schema: pa.Schema) -> sa.Table:
        """Return the table as it is created."""
        columns = [
            sa.Column(
                sa.quoted_name(one.name, quote=True),
                self.column_type(dialect, one),
                primary_key=one.name in self.keys,
                autoincrement=False,
            )
            for one in self.columns(schema)
        ]
        name, place = sa.quoted_name(self.table, quote=True), None
        if self.schema is not None:
            place = sa.quoted_name(self.schema, quote=True)
        options = _IN_INNODB | (_WITH_ROOM if self.keys and dialect == "postgresql" else {})  # DuckDB's is made of it
        return sa.Table(name, sa.MetaData(), *columns, schema=place, **options)

    def column_type(self, dialect: str, column: pa.Field) -> sa.types.TypeEngine[Any]:
        """Return the type of a column of a table that is created.

        Raises:
            UsageError: the database has none for it.
        """
        found = sql_type(dialect, column.type)
        if found is None:
            raise UsageError(
                f"column '{column.name}' has type {column.type}, which SqlSink does not write to {dialect}; cast it, "
                "such as to text or an integer"
            )
        is_key = column.name in self.keys
        return mysqls.key_type(dialect, found) if is_key and dialect in mysqls.BACKENDS else found

    def _check_table(self, connection: sa.Connection, schema: pa.Schema) -> None:
        """Check that the table takes records of ``schema``.

        Raises:
            UsageError
        """
        found = {column["name"]: column for column in self._reflected(connection, self.table)}
        columns = self.columns(schema)
        is_mysql = mysqls.kind_of(connection) in mysqls.BACKENDS
        for column in columns:
            if column.name not in found:
                raise self.misfit(f"has no column '{column.name}'; it has {', '.join(found)}")
            theirs = found[column.name]["type"]
            if not is_mysql and not fits(column.type, theirs, mysqls.kind_of(connection)):
                raise self.misfit(
                    f"has type {theirs} in '{column.name}', and the records have {column.type}; cast the column before "
                    "the sink, or change the table"
                )
        for name, one in found.items():
            is_filled = one.get("default") is not None or one.get("identity") or one.get("autoincrement") is True
            if name not in columns.names and not one["nullable"] and not is_filled and not one.get("computed"):
                raise self.misfit(f"needs a value in '{name}', which the records do not have")
        unique = self._unique(connection) if self.keys else []
        if self.keys:
            self.check_unique(unique)
        if is_mysql:
            problem = mysqls.table_problem(connection, self.schema, self.table, columns, self.keys)
            if problem := problem or mysqls.others_problem(unique if self.keys else (), self.keys):
                raise self.misfit(problem)

    def _reflected(self, connection: sa.Connection, table: str) -> list[Any]:
        """Return the columns of a table, as SQLAlchemy describes them; of DuckDB it cannot."""
        if mysqls.kind_of(connection) in mysqls.BACKENDS:
            return mysqls.reflected(connection, self.schema, table)
        if mysqls.kind_of(connection) != "duckdb":
            return list(sa.inspect(connection).get_columns(table, schema=self.schema))
        query = sa.text(
            "select column_name, data_type, is_nullable = 'YES', column_default from information_schema.columns "
            "where table_catalog = current_database() "
            "and table_schema = coalesce(:schema, current_schema()) and table_name = :name"
        )
        rows = connection.execute(query, {"schema": self.schema, "name": table})
        return [
            {
                "name": name,
                "type": DUCKDB_TYPES.get(kind.partition("(")[0], sa.types.NULLTYPE),
                "nullable": null,
                "default": own,
            }
            for name, kind, null, own in rows
        ]

    def _unique(self, connection: sa.Connection) -> list[Sequence[str]]:
        """Return the sets of columns that are unique."""
        if mysqls.kind_of(connection) in mysqls.BACKENDS:
            return mysqls.unique(connection, self.schema, self.table)
        if mysqls.kind_of(connection) == "duckdb":
            query = sa.text(
                "select constraint_column_names from duckdb_constraints() where constraint_type in ('PRIMARY KEY', "
                "'UNIQUE') and database_name = current_database() "
                "and schema_name = coalesce(:schema, current_schema()) and table_name = :name"
            )
            return [names for (names,) in connection.execute(query, {"schema": self.schema, "name": self.table})]
        inspector = sa.inspect(connection)
        found: list[Sequence[str]] = [
            inspector.get_pk_constraint(self.table, schema=self.schema)["constrained_columns"]
        ]
        with contextlib.suppress(NotImplementedError):
            for constraint in inspector.get_unique_constraints(self.table, schema=self.schema):
                found.append(constraint["column_names"])
        for index in inspector.get_indexes(self.table, schema=self.schema):
            if index["unique"]:
                found.append([str(name) for name in index["column_names"]])
        return found

    def check_unique(self, unique: Iterable[Sequence[str]]) -> None:
        """Check that the key is among the sets of columns that are unique in the table.

        Raises:
            UsageError
        """
        if not any(set(columns) == set(self.keys) for columns in unique):
            raise self.misfit(f"has no primary key or unique constraint of exactly {', '.join(self.keys)}")

    def misfit(self, problem: str) -> UsageError:
        """Return the error about a table that does not fit."""
        return UsageError(f"{type(self).__name__}: table {self._name} in {self.place} {problem}")


def chunks(output: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the records in batches of a good size for a database."""
    waiting: list[pa.RecordBatch] = []
    # None at the end: what is left is yielded by the same lines
    for batch in itertools.chain(output, [None]):
        if waiting and (batch is None or sum(map(len, waiting)) + len(batch) > CHUNK_ROWS):
            yield pa.concat_batches(waiting)
            waiting = []
        if batch is not None and len(batch):
            waiting.append(batch)


@functools.lru_cache(maxsize=16)
def _engine(url: sa.URL, pid: int) -> sa.Engine:
    """Return what connects in this process; it keeps no connection."""
    options = {"timeout": 30} if url.get_backend_name() == "sqlite" else {}
    engine = sa.create_engine(url, poolclass=sa.pool.NullPool, connect_args=options)
    if url.get_backend_name() in mysqls.BACKENDS:
        sa.event.listen(engine, "connect", mysqls.prepare_session, insert=True)
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine, "connect", _sync_directories)
    return engine


def _sync_directories(connection: Any, _: object) -> None:
    """Have SQLite sync the directory that a commit removes its journal from: else a power cut may bring it back."""
    connection.execute("pragma synchronous = extra")


class _Connection:
    """A transaction of SQLAlchemy: see ``Transaction``."""

    def __init__(self, connection: sa.Connection, sink: SqlSink) -> None:
        self._connection, self._sink = connection, sink
        self._dialect = mysqls.kind_of(connection)

    def rows(self, statement: sa.Executable) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._connection.execute(statement)]

    def run(self, statement: sa.Executable) -> None:
        self._connection.execute(statement)

    def append(self, rows: pa.RecordBatch) -> None:
        target = self._target(rows.schema)
        if self._dialect == "duckdb":
            with self._staged(STAGED_ROWS, rows) as staged:
                self.run(sa.insert(target).from_select(rows.schema.names, staged.select()))
        else:
            self._connection.execute(sa.insert(target), self._values(rows))

    def change(self, rows: pa.RecordBatch, gone: pa.RecordBatch) -> None:
        names, keys = rows.schema.names, self._sink.keys
        target = self._target(rows.schema)
        if self._dialect == "duckdb":
            with self._staged(STAGED_ROWS, rows) as staged:
                self.run(upsert_statement(self._dialect, target, names, keys, staged.select()))
            with self._staged(STAGED_KEYS, gone) as staged:
                self.run(delete_statement(target, keys, staged))
            return
        if len(rows):
            self._connection.execute(upsert_statement(self._dialect, target, names, keys), self._values(rows))
        if len(gone):
            same = [target.c[key] == sa.bindparam(f"key{at}") for at, key in enumerate(keys)]
            named = gone.rename_columns([f"key{at}" for at in range(len(keys))])
            self._connection.execute(sa.delete(target).where(*same), self._values(named))

    def _target(self, schema: pa.Schema) -> sa.Table:
        columns: list[Any] = [
            sa.Column(sa.quoted_name(one.name, quote=True), sql_type(self._dialect, one.type)) for one in schema
        ]
        schema = None if self._sink.schema is None else sa.quoted_name(self._sink.schema, quote=True)
        return sa.Table(sa.quoted_name(self._sink.table, quote=True), sa.MetaData(), *columns, schema=schema)

    @contextlib.contextmanager
    def _staged(self, name: str, rows: pa.RecordBatch) -> Iterator[sa.TableClause]:
        """Give rows to DuckDB, which reads them where they are."""
        database: Any = self._connection.connection.driver_connection
        database.register(name, pa.Table.from_batches([rows]))
        try:
            yield quoted_table(name, rows.schema.names)
        finally:
            database.unregister(name)

    def _values(self, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return rows as drivers take them. Moments are in UTC, without a zone."""
        columns = [_without_zone(column) for column in rows.columns]
        made: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, names=rows.schema.names).to_pylist()
        return made


def _without_zone(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        return column.cast(pa.timestamp(column.type.unit))
    if pa.types.is_time64(column.type):
        return column.cast(pa.time64("us"), safe=False)
    return column


def _first_line(error: BaseException) -> str:
    """Return what the driver said, without the statement and its values."""
    said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return said.splitlines()[0].rstrip(".")
