"""``KeyCheck``: records with a null or NaN key are bad records; stands before every hash edge (OP6).

Costs almost nothing when there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import UsageError
from headgate.operators.bad_records import bad_records
from headgate.operators.base import Operator
from headgate.operators.schemas import require_columns
from headgate.operators.unreadable import described_rows
from headgate.operators.user_function import shortened
from headgate.state.key_hash import is_key_type


@dataclass(frozen=True)
class KeyCheckSpec:
    """Divert records whose key has a null or NaN."""

    keys: tuple[str, ...]

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return KeyCheckOperator(self.keys)

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
            raise UsageError(
                f"operator '{node}': column '{key}' of type {dtype} cannot be a key; use numbers, booleans, "
                "times, strings or binaries"
            )


class KeyCheckOperator(Operator):
    """Passes on records with whole keys."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        bad = None
        for key in self._keys:
            column = batch.column(key)
            if column.null_count:
                bad = _either(bad, column.is_null().to_numpy(zero_copy_only=False))
            if pa.types.is_floating(column.type):
                is_nan = pc.is_nan(column).fill_null(False).to_numpy(zero_copy_only=False)
                if is_nan.any():
                    bad = _either(bad, is_nan)
        if bad is not None:
            self._divert(batch.filter(pa.array(bad)))
            batch = batch.filter(pa.array(np.logical_not(bad)))
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


def _either(
    left: np.ndarray[tuple[int], np.dtype[np.bool_]] | None, right: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return right if left is None else left | right
