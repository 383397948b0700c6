"""``explode``: a row for each element of a list, as UNNEST of SQL has them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import Operator
from headgate.operators.schemas import describe, require_columns

_OUTPUT_ROWS = 65_536
"""Results are sent on in parts of about so many rows, however long the lists are together."""


@dataclass(frozen=True)
class ExplodeSpec:
    """Put each element of the list in ``column`` in its place, in a row of its own.

    Attributes:
        keep_empty: a row with no element, or null instead of a list, stays, with null.
        position: a column for the place of the element, from 0 on, that is added; "": none.
    """

    column: str
    keep_empty: bool = False
    position: str = ""

    def build(self) -> Operator:
        return ExplodeOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema`` with the elements, and with the position as last column.

        Raises:
            UsageError: the column is no list, or there is one called as the position.
        """
        require_columns(node, schema, [self.column])
        at = schema.get_field_index(self.column)
        if not pa.types.is_large_list(schema.field(at).type):
            raise UsageError(
                f"operator '{node}': explode needs a column of lists or maps, and '{self.column}' is none; the columns "
                f"are {describe(schema)}"
            )
        schema = schema.set(at, pa.field(self.column, schema.field(at).type.value_type))
        if not self.position:
            return schema
        if self.position in schema.names:
            raise UsageError(f"operator '{node}': there is a column '{self.position}' already; name another position=")
        return schema.append(pa.field(self.position, pa.int64()))


class ExplodeOperator(Operator):
    """Takes the rows of a batch as often as their lists have elements."""

    def __init__(self, spec: ExplodeSpec) -> None:
        self._spec = spec
        self._schema: pa.Schema | None = None

    def process(self, batch: pa.RecordBatch) -> None:
        if self._schema is None:
            self._schema = self._spec.output_schema(batch.schema, self.context.node)
        lengths = batch.column(self._spec.column).value_lengths().fill_null(0).to_numpy()
        ends = np.cumsum(np.maximum(lengths, 1) if self._spec.keep_empty else lengths)
        start = 0
        while start < batch.num_rows:
            sent = ends[start - 1] if start else 0
            end = max(start + 1, int(np.searchsorted(ends, sent + _OUTPUT_ROWS, side="right")))
            self._emit(batch.slice(start, end - start), self._schema)
            start = end

    def _emit(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        lists = batch.column(self._spec.column)
        lengths = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        counts = np.maximum(lengths, 1) if self._spec.keep_empty else lengths
        rows = np.repeat(np.arange(batch.num_rows), counts)
        if len(rows) == 0:
            return
        position = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(np.cumsum(lengths) - lengths, counts) + position
        is_empty = np.repeat(lengths == 0, counts)
        taken = pa.array(rows)
        columns = [
            lists.flatten().take(pa.array(at, mask=is_empty)) if name == self._spec.column else column.take(taken)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        if self._spec.position:
            columns.append(pa.array(position, mask=is_empty))
        self.output.emit(pa.RecordBatch.from_arrays(columns, schema=schema))
