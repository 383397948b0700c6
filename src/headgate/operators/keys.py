"""Keys of records: the check that stands before every hash edge, and the split of a batch by subtask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import LazyRows, Operator, as_batch
from headgate.operators.schemas import require_columns
from headgate.operators.user_functions import bad_records, described_rows, shortened
from headgate.state.key_hash import KEY_TYPES, hash_columns, is_key_type, key_groups
from headgate.state.values import Mask


@dataclass(frozen=True)
class KeyCheckSpec:
    """Divert records with a null or NaN in their key."""

    keys: tuple[str, ...]

    def build(self) -> Operator:
        return KeyCheckOperator(self.keys)

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return None if wanted is None else wanted | {*self.keys}

    def keys_after(self, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return keys

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``.

        Raises:
            UsageError: no key, an unknown column, one twice, or of a type that cannot be a key.
        """
        check_keys(node, schema, self.keys)
        return schema


def check_keys(node: str, schema: pa.Schema, keys: tuple[str, ...]) -> None:
    """Check that ``keys`` can be the key of ``schema``.

    Raises:
        UsageError
    """
    if not keys:
        raise UsageError(f"operator '{node}': key_by needs at least one column")
    require_columns(node, schema, keys)
    if len(set(keys)) != len(keys):
        raise UsageError(f"operator '{node}': a column is named twice in the key {list(keys)}")
    for key in keys:
        dtype = schema.field(key).type
        if not is_key_type(dtype):
            raise UsageError(f"operator '{node}': column '{key}' of type {dtype} cannot be a key; {KEY_TYPES}")


class KeyCheckOperator(Operator):
    """Passes on records with whole keys."""

    takes_lazy_rows = True

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys

    def process(self, batch: pa.RecordBatch | LazyRows) -> None:
        whole = whole_keys(batch, self._keys)
        if whole is not None:
            self._divert(as_batch(batch.filter(pa.array(~whole))))
            batch = batch.filter(pa.array(whole))
        self.output.emit(batch)

    def _divert(self, batch: pa.RecordBatch) -> None:
        rows = described_rows(batch)
        problems = [self._problem(row) for row in rows]
        positions = [str(self.context.origin)] * len(rows)
        self.output.divert(bad_records(self.context.node, problems, positions, [shortened(row) for row in rows]))

    def _problem(self, row: dict[str, object]) -> str:
        for key in self._keys:
            if row[key] is None:
                return f"its key '{key}' is null"
            if row[key] != row[key]:
                return f"its key '{key}' is NaN"
        raise AssertionError("a record without a broken key was refused")


def whole_keys(batch: pa.RecordBatch | LazyRows, keys: Sequence[str]) -> Mask | None:
    """Return which rows have a key without null and NaN; None: all."""
    whole: Mask | None = None
    for key in keys:
        column = batch.column(key)
        is_float = pa.types.is_floating(column.type)
        if column.null_count or is_float:
            valid = column.is_valid() if not is_float else pc.invert(column.is_null(nan_is_null=True))
            found = valid.to_numpy(zero_copy_only=False)
            whole = found if whole is None else whole & found
    return None if whole is None or whole.all() else whole


_TAKES_MAX = 3
"""Up to this many destinations one ``take`` each is fastest (measured); above, one sort and slices."""


def partition(
    batch: pa.RecordBatch, keys: Sequence[str], max_parallelism: int, parallelism: int
) -> list[pa.RecordBatch | None]:
    """Return, for each of ``parallelism`` subtasks, its rows of ``batch`` in order, or None where there are none.

    A batch that has one destination is handed on without a copy. Source: docs/spec/key-groups.md.
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
