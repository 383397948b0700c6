"""Record batches as bytes of a snapshot section (one Arrow IPC stream)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.errors import CorruptionError


def encode_batches(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> list[pa.Buffer]:
    """Return ``batches`` of ``schema`` as the buffers of one section."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return [sink.getvalue()]


def decode_batches(data: memoryview, schema: pa.Schema, path: str) -> list[pa.RecordBatch]:
    """Return what ``encode_batches`` wrote, as views into ``data``.

    Raises:
        CorruptionError: it is not such a stream, or its schema is another one.
    """
    found, batches = decode_stream(data, path)
    if not found.equals(schema):
        raise CorruptionError(path, 0, f"columns {schema.names}", f"columns {found.names} or other types")
    return batches


def decode_stream(data: memoryview, path: str) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the schema and the batches that are in ``data``, as views into it.

    Raises:
        CorruptionError: it is not such a stream.
    """
    try:
        return read_stream(data)
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(path, 0, "an Arrow stream", str(error)) from error
