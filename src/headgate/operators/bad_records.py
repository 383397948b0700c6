"""Bad records: one schema for everything that a source or operator refuses.

A bad record either fails the pipeline (default) or goes to the dead-letter sink, within the same checkpoint as
the records around it, so that it is counted exactly once too.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.plain_text import encodable, printable

RECORD_CHARS_MAX = 4_096
"""A shortened repr is kept of longer records, to bound memory."""

SCHEMA = pa.schema(
    [
        pa.field("node", pa.large_string()),
        pa.field("problem", pa.large_string()),
        pa.field("position", pa.large_string()),
        pa.field("record", pa.large_string()),
    ]
)


def bad_records(node: str, problems: Sequence[str], positions: Sequence[str], records: Sequence[str]) -> pa.RecordBatch:
    """Return bad records as a batch of ``SCHEMA``; the three sequences have equal length."""
    assert len(problems) == len(positions) == len(records)
    short = [r if len(r) <= RECORD_CHARS_MAX else r[:RECORD_CHARS_MAX] + "…" for r in records]
    texts = [[printable(text) for text in column] for column in ([node] * len(short), problems, positions)]
    return pa.record_batch([*texts, [encodable(text) for text in short]], schema=SCHEMA)
