"""Tables of the catalogue, version 4.

Counterpart: ``opening`` makes them, and raises those of older versions. Source: docs/spec/stream-store.md §3. Never
holds events, only where they are.
"""

from __future__ import annotations

import sqlalchemy as sa

CATALOGUE_VERSION = 4
"""Raised with every change that an older release could not work with; opening a newer one is refused (CT3).

1: Headgate 0.1. It has no table ``owners``, and it forgets outcomes by their number in the whole store.
2: ``owners``; outcomes are remembered for each owner (S17).
3: segments have an id, keys and the layouts that they belong to; streams have the number of their layout (CT6).
4: ``markers`` (S60): an older release would leave those of a stream that it deletes.
"""

metadata = sa.MetaData()

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
    sqlite_with_rowid=False,
)
"""All segments that a stream ever had: ``streams.Segment``."""

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False, index=True),
    sa.Column("path", sa.String, nullable=False, unique=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
)

parts = sa.Table(
    "parts",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("segment_id", sa.Integer, primary_key=True),
    sa.Column("start", sa.BigInteger, primary_key=True),
    sa.Column("events_count", sa.BigInteger, nullable=False),
    sa.Column("chunk_id", sa.Integer, nullable=False, index=True),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""Events readers may see: ``events_count`` from position ``start`` of a segment."""

prepared_parts = sa.Table(
    "prepared_parts",
    metadata,
    sa.Column("transaction_id", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("segment_id", sa.Integer, nullable=False),
    sa.Column("events_count", sa.BigInteger, nullable=False),
    sa.Column("chunk_id", sa.Integer, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

transactions = sa.Table(
    "transactions",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("stream_id", sa.Integer, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("content", sa.String, nullable=False),
    sa.Column("events_count", sa.BigInteger, nullable=False),
    sa.Column("changed_ms", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("stream_id", "name"),
    sqlite_autoincrement=True,
)

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

writers = sa.Table(
    "writers",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("writer_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)
"""Stable writers: the newest epoch and the last sequence number appended (S7)."""
