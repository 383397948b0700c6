"""A Spark DataFrame as bounded source.

A DataFrame is recomputed whenever it is read, possibly with other rows or in another order. So it is captured once,
as Parquet files in the pipeline's directory, and every restart reads the same files.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headgate.api.placed import place
from headgate.connectors.base import Source, SourceContext, SourceReader
from headgate.connectors.files.parquet import ParquetFiles
from headgate.errors import UsageError

INPUTS = "inputs"


class DataFrameSource:
    """The rows of a Spark DataFrame, in no particular order; the source ends with them."""

    def __init__(self, dataframe: Any) -> None:
        """Configure.

        Args:
            dataframe: a (not streaming) ``pyspark.sql.DataFrame``.

        Raises:
            UsageError: it is something else.
        """
        if not hasattr(dataframe, "sparkSession") or not hasattr(dataframe, "toArrow"):
            raise UsageError(f"DataFrameSource needs a Spark DataFrame, not {type(dataframe).__name__}")
        if dataframe.isStreaming:
            raise UsageError("DataFrameSource needs a bounded DataFrame; a streaming one cannot be captured")
        self._dataframe = dataframe

    def __repr__(self) -> str:
        return "DataFrameSource()"

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the DataFrame."""
        from headgate.spark.dataframes import arrow_schema

        return arrow_schema(self._dataframe)

    def identity(self) -> str:
        """Positions are kept by captured file."""
        return "captured DataFrame, version 1"

    def at(self, root: str, pipeline: str, node: str) -> CapturedDataFrame:
        """See ``PlacedSource``."""
        return CapturedDataFrame(self._dataframe, place(root, pipeline, INPUTS, node))

    def open(self, context: SourceContext) -> SourceReader:
        """Never called: the source is captured first."""
        raise AssertionError("a DataFrame must be captured before it is read")


class CapturedDataFrame(DataFrameSource):
    """A DataFrame with the directory that its rows are captured in."""

    def __init__(self, dataframe: Any, directory: str) -> None:
        super().__init__(dataframe)
        self._directory = directory

    def at(self, root: str, pipeline: str, node: str) -> CapturedDataFrame:
        """It has its place already."""
        return self

    def capture(self) -> Any:
        """Write the rows unless an earlier start did; return their SparkSession."""
        from headgate.spark.dataframes import capture

        capture(self._dataframe, self._directory)
        return self._dataframe.sparkSession

    def captured(self) -> Source:
        """Return the source of the captured files."""
        source = ParquetFiles(self._directory)
        source.schema()  # finds the files, the same for all subtasks
        return source
