"""Rows that users give, whatever they are a table of: Polars, pandas, Arrow or Spark. Nothing goes row by row.

Counterpart: ``api.written_state``, which writes them as state.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError

Frame: TypeAlias = Any
"""A Polars or pandas frame, an Arrow table, batch or reader of batches, or a (not streaming) Spark DataFrame."""


def arrow_table(rows: Frame, what: str) -> pa.Table:
    """Return ``rows`` as an Arrow table; those of Spark come partition by partition as Arrow batches.

    Raises:
        UsageError: it is no table; ``what`` says what it was given for.
        StorageError: Spark could not compute it.
    """
    if isinstance(rows, pl.LazyFrame):
        rows = rows.collect()
    if isinstance(rows, pl.DataFrame):
        return rows.to_arrow()
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.read_all()
    if hasattr(rows, "sparkSession") and hasattr(rows, "toArrow"):
        return _of_spark(rows, what)
    if type(rows).__module__.startswith("pandas."):
        return pa.Table.from_pandas(rows, preserve_index=False)
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    raise UsageError(f"{what}: a frame is needed, of Polars, pandas, Arrow or Spark, not {type(rows).__name__}")


def _of_spark(rows: Any, what: str) -> pa.Table:
    if rows.isStreaming:
        raise UsageError(f"{what}: a streaming DataFrame has no end; give a bounded one")
    from headgate.spark.dataframes import collected

    return collected(rows)
