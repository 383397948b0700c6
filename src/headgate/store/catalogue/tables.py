"""Tables of the catalogue, and checks of what their rows hold.

Counterpart: ``opening`` makes them. Source: CT14 and §3 of docs/spec/stream-store.md. SQLite keeps anything in any
column, so values that a verb only hands on are checked here. Never holds events, only where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, TypeAlias, TypeVar

import sqlalchemy as sa

ColumnType: TypeAlias = type | UnionType

_Row = TypeVar("_Row", bound=Sequence[Any])
_T = TypeVar("_T")


def checked_row(row: _Row, *kinds: ColumnType) -> _Row:
    """Return ``row``, whose values are of these kinds, one after the other.

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


CATALOGUE_VERSION = 9
"""Raised with every change that an older release could not work with; opening a newer one is refused (CT3).

1: Headgate 0.1. It has no table ``owners``, and it forgets outcomes by their number in the whole store.
2: ``owners``; outcomes are remembered for each owner (S17).
3: segments have an id, keys and the layouts that they belong to; streams have the number of their layout (CT6).
4: ``markers`` (S60): an older release would leave those of a stream that it deletes.
5: heads, holds, retention (S65 to S71): an older release would read truncated streams from 0.
6: transactions know by which layout their events were routed, ``passed`` (S75, SC40): an older release would take the
   segments that a stream has now for all that it ever had.
7: policies of scaling (S79), ``former_schemas`` (S76): an older release would read chunks of one schema in another.
   ``chunks.path`` is ``file``, so that one which has the store open fails.
8: ``reader_groups`` (RG16): an older release that has the store open goes on, and keeps what groups hold.
9: ``shared_transactions`` and ``participants`` (TX1): an older release that has the store open goes on, and cannot list
   transactions while one is open.
"""

metadata = sa.MetaData()

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""Of what there may be billions. SQLite numbers rows by itself only where it says INTEGER, which has 64 bits there."""

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)

DATED_SINCE = "dated_since_ms"
"""Key in ``meta``: when a store was raised that had recorded no dates; what has none counts from then on."""

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
    sqlite_with_rowid=False,
)
"""All segments that a stream ever had: ``layouts.Segment``. ``latest_ms``: when its last part became visible."""

present_segments = sa.Index("present_segments", segments.c.stream_id, segments.c.closed_epoch)
"""Finds those that take events, however many did before: see ``present``."""

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
    sqlite_with_rowid=False,
)
"""Events readers may see: ``events_count`` from position ``start`` of a segment, since ``visible_ms`` (S66)."""

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
"""Which life of a pipeline an owner is (``codec.life``)."""

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
"""Where a stream ended when a checkpoint of ``owner`` began (S60)."""

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
"""Closed segments whose events have all gone through a pipeline, so that others may read what follows them (SC40)."""

writers = sa.Table(
    "writers",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("writer_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)
"""Stable writers: the newest epoch and the last sequence number appended (S7)."""

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
"""Who needs the events of a stream, and from where on (S69)."""

garbage = sa.Table(
    "garbage",
    metadata,
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False, index=True),
    sqlite_with_rowid=False,
)
"""Chunk files that no part refers to any more and that are to be deleted; a row goes after its file (S68). Those of no
stream, ``NOBODYS``, were removed as orphans: their rows stay, and the files are never recorded (S89)."""

NO_STREAM = 0
"""Number of no stream: those of streams begin with 1."""

former_authors = sa.Table(
    "former_authors",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("directory", sa.String, primary_key=True),
    sqlite_with_rowid=False,
)
"""Who wrote what was truncated: the directories of the chunks (LV9)."""

reader_groups = sa.Table(
    "reader_groups",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""Reader groups (``group_rows``). ``version``: one more with every change."""


def open_segments(stream_id: int) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that rows of ``segments`` are those of a stream that take events.

    Asked for their numbers only, SQLite takes them from ``present_segments``; for all of them at once it would look
    through every segment that the stream ever had (CT15).
    """
    own = segments.alias()
    numbers = sa.select(own.c.segment_id).where(own.c.stream_id == stream_id, own.c.closed_epoch.is_(None))
    return segments.c.stream_id == stream_id, segments.c.segment_id.in_(numbers)
