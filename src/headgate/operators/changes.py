"""The convention of streams with changes: the column ``op``, and the operator that takes foreign changes in.

Counterpart: ``api.streams.changes`` says which verbs keep a stream one with changes (docs/spec/changes.md).
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import Operator
from headgate.operators.keys import KeyCheckOperator, check_keys
from headgate.operators.schemas import describe, require_columns
from headgate.operators.user_functions import bad_records, described_rows, shortened

OP = "op"
"""The column that says what a record does to the table that a stream with changes describes."""

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = "insert", "update_before", "update_after", "delete"

OPS = (INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE)

OP_FIELD = pa.field(OP, pa.large_string())

Codes = npt.NDArray[np.int8]
"""Of each record the place of its ``op`` in ``OPS``."""


@functools.cache
def _names() -> pa.Array:
    """Return ``OPS`` as a column. Arrow imports pandas to make an array of a list, so not before it is needed."""
    return pa.array(OPS, pa.large_string())


def op_column(codes: Codes) -> pa.Array:
    """Return the column ``op``."""
    return _names().take(pa.array(codes))


def op_codes(column: pa.Array) -> Codes:
    """Return the codes of a column ``op``; -1 where it is none of ``OPS``."""
    found: Codes = pc.index_in(column, _names()).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int8)
    return found


Signs = npt.NDArray[np.int64]
"""1 for each row that comes, -1 for each that goes."""


def signs(column: pa.Array) -> Signs:
    """Return 1 for each row that comes, -1 for each that goes."""
    codes = op_codes(column)
    assert codes.min(initial=0) >= 0, f"op is none of {', '.join(OPS)}"
    return np.array([1, -1, 1, -1], np.int64)[codes]


@dataclass(frozen=True)
class ChangeCheckSpec:
    """Divert records without a valid ``op`` or whole keys, and drop ``update_before`` unless ``retractions``."""

    keys: tuple[str, ...]
    retractions: bool

    def build(self) -> Operator:
        return ChangeCheckOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``.

        Raises:
            UsageError: no column ``op`` of texts, or a wrong key.
        """
        require_columns(node, schema, [OP])
        if schema.field(OP).type != OP_FIELD.type:
            raise UsageError(
                f"operator '{node}': column 'op' must be text, one of {', '.join(OPS)}; the columns are "
                f"{describe(schema)}"
            )
        if self.keys:
            check_keys(node, schema, self.keys)
        if OP in self.keys:
            raise UsageError(f"operator '{node}': column 'op' says what changes, and cannot be a key")
        return schema


class ChangeCheckOperator(KeyCheckOperator):
    """Passes on changes with a valid ``op`` and whole keys."""

    takes_lazy_rows = False

    def __init__(self, spec: ChangeCheckSpec) -> None:
        super().__init__(spec.keys)
        self._retractions = spec.retractions

    def process(self, batch: pa.RecordBatch) -> None:
        codes = op_codes(batch.column(OP))
        if (codes < 0).any():
            bad = batch.filter(pa.array(codes < 0))
            rows = described_rows(bad)
            problems = [f"its op is {row[OP]!r}, none of {', '.join(OPS)}" for row in rows]
            positions = [str(self.context.origin)] * len(rows)
            self.output.divert(bad_records(self.context.node, problems, positions, [shortened(row) for row in rows]))
        kept = codes >= 0
        if not self._retractions:
            kept &= codes != OPS.index(UPDATE_BEFORE)
        if not kept.all():
            batch = batch.filter(pa.array(kept))
        if batch.num_rows:
            super().process(batch)
