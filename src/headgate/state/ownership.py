"""Restoring at another parallelism: which rows of a former snapshot belong to this subtask (KG8)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.model.key_groups import key_groups_of_subtask
from headgate.state.key_hash import hash_columns, key_groups


def owned_rows(
    batch: pa.RecordBatch, keys: Sequence[str], max_parallelism: int, parallelism: int, subtask_index: int
) -> pa.RecordBatch:
    """Return the rows of ``batch`` whose key group is owned by this subtask."""
    owned = key_groups_of_subtask(subtask_index, max_parallelism, parallelism)
    groups = key_groups(hash_columns(batch, keys), max_parallelism)
    mask = (groups >= owned.start) & (groups < owned.stop)
    return batch if mask.all() else batch.filter(pa.array(mask))
