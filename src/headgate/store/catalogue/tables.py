"""Tables of the catalogue, and checks of what their rows hold.

Counterpart: ``sql`` makes them. Source: docs/spec/stream-store.md. SQLite keeps anything in any
column, so values that a verb only hands on are checked here. Never holds events, only where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import UsageError
from headgate.store.catalogue.base import Catalogue

ColumnType: TypeAlias = type | UnionType

_Row = TypeVar("_Row", bound=Sequence[Any])
_T = TypeVar("_T")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked_row(row: _Row, *kinds: ColumnType) -> _Row:
    """Return ``row`` after checking that its values are of these kinds, one after the other.

    Raises:
        TypeError: one is not.
    """
    for value, kind in zip(row, kinds, strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} where {kind} is expected")
    return row


def checked_values(values: Iterable[Any], kind: type[_T]) -> list[_T]:
    """Return ``values``, which are all of one kind.

    Raises:
        TypeError: one is not.
    """
    found = list(values)
    checked_row(found, *[kind] * len(found))
    return found


CATALOGUE_VERSION = 2
"""Raised with every change of a table; a store of another version is refused."""

STORE_OPTION = "headgate_store"
"""Execution option of each connection: where its store is, for messages."""

metadata = sa.MetaData()

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""Of what there may be billions. SQLite numbers rows by itself only where it says INTEGER, which has 64 bits there."""

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)

streams = sa.Table(
    "streams",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("schema", sa.LargeBinary, nullable=False),
    sa.Column("segments_count", sa.Integer, nullable=False),
    sa.Column("routing_key", sa.String),
    sa.Column("is_sealed", sa.Boolean, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("layout_epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("retention", sa.String),
    sa.Column("schema_version", sa.Integer, nullable=False, server_default="0"),
    sa.Column("scaling", sa.String),
    sa.Column("scaled_ms", sa.BigInteger, nullable=False, server_default="0"),
    sqlite_autoincrement=True,  # an id names a directory of chunks: never reused
)

segments = sa.Table(
    "segments",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("segment_id", sa.Integer, primary_key=True),
    sa.Column("key_low", sa.BigInteger, nullable=False),
    sa.Column("key_high", sa.BigInteger, nullable=False),
    sa.Column("created_epoch", sa.Integer, nullable=False),
    sa.Column("closed_epoch", sa.Integer),
    sa.Column("end_position", sa.BigInteger, nullable=False),
    sa.Column("head_position", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("latest_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("event_ms", sa.BigInteger),
    sa.Index("present_segments", "stream_id", "closed_epoch"),
    sqlite_with_rowid=False,
)
"""All segments that a stream ever had: ``layouts.Segment``. ``latest_ms``: when its last part became visible.
``event_ms``: no event that will be appended is as early as that, as writers say (S90); null: they say nothing. The
index finds those that take events, however many did before: see ``open_segments``."""

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("id", _NUMBER, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False, index=True),
    sa.Column("file", sa.String, nullable=False, unique=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False, server_default="0"),
)
"""Chunk files. ``schema_version``: in which schema of the stream their events were written (S77)."""

former_schemas = sa.Table(
    "former_schemas",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("schema", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""The schemas that a stream had before that of ``streams``, from version 0 on (S76)."""

parts = sa.Table(
    "parts",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("segment_id", sa.Integer, primary_key=True),
    sa.Column("start", sa.BigInteger, primary_key=True),
    sa.Column("events_count", sa.BigInteger, nullable=False),
    sa.Column("chunk_id", _NUMBER, nullable=False, index=True),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sa.Column("visible_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("event_ms", sa.BigInteger),
    sqlite_with_rowid=False,
)
"""Events readers may see: ``events_count`` from position ``start`` of a segment, since ``visible_ms``. ``event_ms``: no
event after them is as early as that; null: their writer says nothing about event time."""

event_times = sa.Table(
    "event_times",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("event_ms", sa.BigInteger, nullable=False),
    sa.Column("noted_ms", sa.BigInteger, nullable=False),
)
"""How far each owner of transactions has come in event time, and when it said so (S90); and the stream itself, as
``OF_THE_STREAM``."""

OF_THE_STREAM = ""
"""No owner: it would need a name."""

prepared_parts = sa.Table(
    "prepared_parts",
    metadata,
    sa.Column("transaction_id", _NUMBER, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("segment_id", sa.Integer, nullable=False),
    sa.Column("events_count", sa.BigInteger, nullable=False),
    sa.Column("chunk_id", _NUMBER, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

transactions = sa.Table(
    "transactions",
    metadata,
    sa.Column("id", _NUMBER, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("content", sa.String, nullable=False),
    sa.Column("events_count", sa.BigInteger, nullable=False),
    sa.Column("changed_ms", sa.BigInteger, nullable=False),
    sa.Column("layout_epoch", sa.Integer, nullable=False, server_default="0"),
    sa.UniqueConstraint("stream_id", "name"),
    sqlite_autoincrement=True,
)

shared_transactions = sa.Table(
    "shared_transactions",
    metadata,
    sa.Column("transaction_id", sa.Integer, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False),
    sa.Column("begun_ms", sa.BigInteger, nullable=False),
    sa.Column("lease_ms", sa.BigInteger, nullable=False),
    sa.Column("due_ms", sa.BigInteger),
    sa.Column("suspected_ms", sa.BigInteger),
    sa.Column("is_expired", sa.Boolean, nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Index("open_transactions", "stream_id", "due_ms"),
)
"""What ``transactions`` does not have of those that several processes write. ``due_ms``: when the lease of an open one
is over; null: it is not open; the index finds the first one. ``size_bytes``: of its events as they are stored."""

participants = sa.Table(
    "participants",
    metadata,
    sa.Column("transaction_id", sa.Integer, primary_key=True),
    sa.Column("participant", sa.String, primary_key=True),
    sa.Column("token", sa.String, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("events_count", sa.BigInteger, nullable=False),
)
"""Who writes a transaction: the token of its present life, and the number of its last write (TX3, TX4)."""

fences = sa.Table(
    "fences",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
)

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("life", sa.LargeBinary, nullable=False),
)
"""Which life of a pipeline an owner is (``codec.json_files``)."""

markers = sa.Table(
    "markers",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("generation", sa.BigInteger, primary_key=True),
    sa.Column("checkpoint", sa.BigInteger, primary_key=True),
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("segment_id", sa.Integer, primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""Where a stream ended when a checkpoint of ``owner`` began."""

passed = sa.Table(
    "passed",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("reader", sa.String, primary_key=True),
    sa.Column("life", sa.String, primary_key=True),
    sa.Column("generation", sa.BigInteger, primary_key=True),
    sa.Column("segment_id", sa.Integer, primary_key=True),
    sqlite_with_rowid=False,
)
"""Closed segments that a pipeline has read to their end, so that others may read their successors."""

writers = sa.Table(
    "writers",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("writer_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)
"""Stable writers: the newest epoch and the last sequence number appended."""

holds = sa.Table(
    "holds",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("holder", sa.String, primary_key=True),
    sa.Column("segment_id", sa.Integer, primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("life", sa.String, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""Who needs the events of a stream, and from where on."""

garbage = sa.Table(
    "garbage",
    metadata,
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False, index=True),
    sqlite_with_rowid=False,
)
"""Chunk files that no part refers to any more and that are to be deleted; a row goes after its file. Those of no
stream, ``NO_STREAM``, were removed as orphans: their rows stay, and the files are never recorded."""

NO_STREAM = 0
"""Number of no stream: those of streams begin with 1."""

former_authors = sa.Table(
    "former_authors",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("directory", sa.String, primary_key=True),
    sqlite_with_rowid=False,
)
"""Who wrote what was truncated: the directories of the chunks."""

reader_groups = sa.Table(
    "reader_groups",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""Reader groups (``group_rows``). ``version``: one more with every change."""


def open_segments(stream_id: int | sa.BindParameter[int]) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that rows of ``segments`` are those of a stream that take events.

    Asked for their numbers only, SQLite takes them from ``present_segments``; for all of them at once it would look
    through every segment that the stream ever had.
    """
    numbers = sa.select(_own.c.segment_id).where(_own.c.stream_id == stream_id, _own.c.closed_epoch.is_(None))
    return segments.c.stream_id == stream_id, segments.c.segment_id.in_(numbers)


_own = segments.alias()

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""By the name of a verb: the function that carries it out within a transaction."""


def implements(
    verb: Callable[Concatenate[Catalogue, _P], _R],
) -> Callable[[Callable[Concatenate[Connection, _P], _R]], Callable[Concatenate[Connection, _P], _R]]:
    """Say that the decorated function carries out ``verb`` on a connection: it takes and returns the same."""

    def register(function: Callable[Concatenate[Connection, _P], _R]) -> Callable[Concatenate[Connection, _P], _R]:
        assert verb.__name__ not in IMPLEMENTATIONS, f"two functions implement the verb {verb.__name__}"
        IMPLEMENTATIONS[verb.__name__] = function
        return function

    return register


def store_of(connection: Connection) -> str:
    """Return where the store of a connection is, for messages."""
    return str(connection.get_execution_options()[STORE_OPTION])


def make_tables(connection: Connection, metadata: sa.MetaData = metadata) -> None:
    """Make the tables if there are none; ``metadata``: as this kind of database has them.

    Raises:
        UsageError: there are tables of another version.
    """
    if not sa.inspect(connection).has_table(meta.name):
        metadata.create_all(connection)
        connection.execute(meta.insert().values(key="version", value=str(CATALOGUE_VERSION)))
        return
    found = connection.execute(sa.select(meta.c.value).where(meta.c.key == "version")).scalar_one()
    check_version(int(found), store_of(connection))


def check_version(version: int, where: str) -> None:
    """Check that this release knows tables of ``version``.

    Raises:
        UsageError: another release made them.
    """
    if version != CATALOGUE_VERSION:
        raise UsageError(
            f"stream store at {where} has version {version}, this Headgate reads version {CATALOGUE_VERSION}; open it "
            "with the Headgate that made it, or upgrade Headgate"
        )
