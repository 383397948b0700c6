"""Streams of the embedded store: ``source`` reads them; ``sink`` writes to them exactly once, with ``transactions``.

Source: docs/spec/stream-store.md, chapter 7. Counterpart: ``headgate.store.store.Store``.
"""

from headgate.connectors.streams.group_source import GroupSource
from headgate.connectors.streams.segments import decode_position
from headgate.connectors.streams.stream_sink import (
    StreamCommitter,
    StreamSink,
    StreamSinkWriter,
    StreamsOfOneSink,
    checkpoint_of,
    owner_of,
    transaction_name,
    transaction_of,
)
from headgate.connectors.streams.stream_source import StreamCutReader, StreamSource, StreamSourceReader

__all__ = [
    "GroupSource",
    "StreamCommitter",
    "StreamCutReader",
    "StreamSink",
    "StreamSinkWriter",
    "StreamSource",
    "StreamSourceReader",
    "StreamsOfOneSink",
    "checkpoint_of",
    "decode_position",
    "owner_of",
    "transaction_name",
    "transaction_of",
]
