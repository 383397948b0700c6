"""The header of a record batch (format v2): what brokers store, and what ``Fetch`` and ``Produce`` carry.

Layout: Kafka's documentation, "Record Batch". Used by ``record_decoder`` and ``record_encoder``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

from headgate.codec.arrow import MOMENT
from headgate.codec.kafka.wire import Buffer
from headgate.distribution import install_command
from headgate.errors import UsageError

try:
    import crc32c
except ImportError:
    crc32c = None  # type: ignore[assignment]

MAGIC, MAGIC_BEGIN = 2, 16
"""The number of the format, and where it is in a batch, also of older formats."""
HEADER = struct.Struct(">qiibIhiqqqhii")
CRC_BEGIN = 21
"""The checksum is of everything after itself."""
LENGTH_BEGIN = 12
"""The length is of everything after itself."""

CODEC_MASK, APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
"""Bits of the attributes."""

NO_TIMESTAMP, NO_PRODUCER_ID, NO_SEQUENCE, NO_EPOCH = -1, -1, -1, -1
SEQUENCES = 1 << 31
"""How many sequence numbers there are: after the last one comes 0."""

RECORD_BYTES_MIN = 7
"""A record without key, value and headers."""

ABORT, COMMIT = 0, 1
"""Types of control records."""


class BatchHeader(NamedTuple):
    """The fields in front of the records of a batch."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int


HEADERS_TYPE = pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())]))

RECORDS = pa.schema(
    [("value", pa.large_binary()), ("key", pa.large_binary()), ("offset", pa.int64()), ("timestamp", MOMENT)]
)
"""The columns of records. A timestamp is null where a record has none, or one that is no date."""

RECORDS_WITH_HEADERS = RECORDS.append(pa.field("headers", HEADERS_TYPE))


def checksum(data: Buffer, begin: int = 0) -> int:
    """Return the CRC-32C of ``data`` after what has the checksum ``begin``.

    Raises:
        UsageError: the package that computes it is not installed.
    """
    if crc32c is None:
        raise UsageError(f"Kafka needs the package crc32c: {install_command('kafka')}, on every worker")
    return crc32c.crc32c(data, begin)
