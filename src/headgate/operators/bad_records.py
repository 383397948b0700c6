"""Bad records: their schema, and records that no Python function can be given.

A bad record either fails the pipeline (the default) or goes to the dead-letter sink, within the same checkpoint as
the records around it, so that it is counted exactly once, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.operators.base import Operator
from headgate.operators.user_functions import shortened
from headgate.plain_text import encodable, printable
from headgate.state.key_hash import column_words

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


_DAY_US = 86_400_000_000
_YEAR_1_DAY, _YEAR_10000_DAY = -719_162, 2_932_897
"""Days from 1970-01-01 to 0001-01-01 and to 10000-01-01."""


def unreadable_rows(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return which rows of a time column are outside the years 1 to 9999, or None where all are inside."""
    if pa.types.is_timestamp(column.type):
        low, high = _YEAR_1_DAY * _DAY_US, _YEAR_10000_DAY * _DAY_US
    elif pa.types.is_date32(column.type):
        low, high = _YEAR_1_DAY, _YEAR_10000_DAY
    else:
        return None
    words = column_words(column)
    if len(words) == 0 or (words.min() >= low and words.max() < high):
        return None
    return (words < low) | (words >= high)


def described_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the records as dicts for messages; columns with unreadable times as their integers."""
    columns = []
    for column in batch.columns:
        if unreadable_rows(column) is not None:
            column = column.view(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()  # type: ignore[no-any-return]


def divert_unreadable(operator: Operator, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Hand records over as bad ones that a Python function could not be given; return the others."""
    for name in batch.schema.names:
        unreadable = unreadable_rows(batch.column(name))
        if unreadable is None:
            continue
        rows = described_rows(batch.filter(pa.array(unreadable)))
        problem = f"its time '{name}' is outside the years 1 to 9999, which Python's datetime can hold"
        context = operator.context
        operator.output.divert(
            bad_records(
                context.node, [problem] * len(rows), [str(context.origin)] * len(rows), [shortened(r) for r in rows]
            )
        )
        batch = batch.filter(pa.array(np.logical_not(unreadable)))
    return batch
