"""Split a batch by destination subtask for HASH edges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headgate.state.key_hash import hash_columns, key_groups

_TAKES_MAX = 3
"""Up to this many destinations one ``take`` each is fastest (measured); above, one sort and slices."""


def partition(
    batch: pa.RecordBatch, keys: Sequence[str], max_parallelism: int, parallelism: int
) -> list[pa.RecordBatch | None]:
    """Return, for each of ``parallelism`` subtasks, its rows of ``batch`` in order, or None where there are none.

    A batch that has one destination is handed on without a copy. Source: KG7 of docs/spec/key-groups.md.
    """
    if parallelism == 1:
        return [batch if batch.num_rows else None]
    groups = key_groups(hash_columns(batch, keys), max_parallelism)
    of_group = np.arange(max_parallelism, dtype=np.int64) * parallelism // max_parallelism
    destinations = of_group.astype(np.uint16).take(groups)
    parts: list[pa.RecordBatch | None] = [None] * parallelism
    if len(destinations) == 0:
        return parts
    first = int(destinations[0])
    if (destinations == first).all():
        parts[first] = batch
    elif parallelism <= _TAKES_MAX:
        for i in range(parallelism):
            rows = np.flatnonzero(destinations == i)
            if len(rows):
                parts[i] = batch.take(pa.array(rows))
    else:
        ordered = batch.take(pa.array(np.argsort(destinations, kind="stable")))
        start = 0
        for i, count in enumerate(np.bincount(destinations, minlength=parallelism).tolist()):
            if count:
                parts[i] = ordered.slice(start, count)
            start += count
    return parts
