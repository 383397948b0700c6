"""A Spark DataFrame as a bounded source.

A DataFrame is recomputed whenever it is read, possibly with other rows or in another order. So it is captured once,
as Parquet files in the pipeline's directory, and every restart reads the same files. A later start notices when the
DataFrame has changed.
"""

from __future__ import annotations

import glob
from collections.abc import Collection
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa

from headgate.connectors.base import Source, SourceContext, SourceReader
from headgate.connectors.files.parquet import ParquetFiles
from headgate.errors import UsageError
from headgate.model.graph import Graph
from headgate.model.lineage import Location
from headgate.storage.urls import local_directory

INPUTS = "inputs"
"""Of the pipeline's directory: where the rows are captured."""

PATTERN = "part-*.parquet"
"""Of the names that Spark gives files."""

Changed: TypeAlias = Literal["refuse", "keep"]


class DataFrameSource(Source):
    """A bounded source of the rows of a Spark DataFrame, in no particular order."""

    def __init__(self, dataframe: Any, *, changed: Changed = "refuse") -> None:
        """Configure.

        Args:
            dataframe: a ``pyspark.sql.DataFrame`` that is not a streaming one.
            changed: what a later start of the pipeline does if the DataFrame no longer has the rows that were captured.
                "refuse": the start computes the DataFrame once more, compares it, and is refused if it differs. "keep":
                the start reads the captured rows, whatever the DataFrame contains now; use it for a DataFrame that
                differs each time.

        Raises:
            UsageError: ``dataframe`` is not such a DataFrame.
        """
        if changed not in get_args(Changed):
            raise UsageError(f"DataFrameSource(changed={changed!r}) must be 'refuse' or 'keep'")
        self._changed: Changed = changed
        if not hasattr(dataframe, "sparkSession") or not hasattr(dataframe, "toArrow"):
            raise UsageError(f"DataFrameSource needs a Spark DataFrame, not {type(dataframe).__name__}")
        if dataframe.isStreaming:
            raise UsageError("DataFrameSource needs a bounded DataFrame; a streaming one cannot be captured")
        self._dataframe = dataframe

    def __repr__(self) -> str:
        return "DataFrameSource()"

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the DataFrame.

        Raises:
            UsageError: a column cannot be captured, or has a type that Headgate does not carry.
        """
        from headgate.spark.dataframes import arrow_schema, check_for_files

        schema = arrow_schema(self._dataframe)
        check_for_files(self._dataframe.sparkSession, self._dataframe.schema)
        return schema

    def identity(self) -> str:
        """Positions are kept by captured file."""
        return "captured DataFrame, version 1"

    def locations(self) -> tuple[Location, ...]:
        """See ``Source``. It is at none: what was captured is compared with the DataFrame."""
        return ()

    def at(self, root: str, pipeline: str, node: str) -> CapturedDataFrame:
        """Return the source with its directory, ``<root>/<pipeline>/inputs/<node>``.

        Raises:
            UsageError: ``root``, the checkpoint directory, is not a directory of this machine (or mounted on it).
        """
        local = local_directory(root)
        if local is None:
            raise UsageError(
                f"operator '{node}': DataFrames are exchanged through the checkpoint directory, which must be a "
                f"directory and not {root}; use ParquetFiles and FileSink with an object store"
            )
        return CapturedDataFrame(self._dataframe, str(local / pipeline / INPUTS / node), changed=self._changed)

    def open(self, context: SourceContext) -> SourceReader:
        """Never called: the source is captured first."""
        raise AssertionError("a DataFrame must be captured before it is read")


class CapturedDataFrame(DataFrameSource):
    """A DataFrame with the directory that its rows are captured in."""

    def __init__(self, dataframe: Any, directory: str, *, changed: Changed) -> None:
        super().__init__(dataframe, changed=changed)
        self._directory = directory

    def at(self, root: str, pipeline: str, node: str) -> CapturedDataFrame:
        """Return the source itself: it already has a directory."""
        return self

    def capture(self) -> Any:
        """Write the rows unless an earlier start did; return their SparkSession.

        Raises:
            UsageError: an earlier start did, and they were others.
            StorageError: Spark could not compute, write or compare them.
        """
        from headgate.spark import dataframes

        if not dataframes.is_captured(self._directory):
            dataframes.capture(self._dataframe, self._directory, self.schema())
        elif (problem := dataframes.columns_difference(self.schema(), self._directory)) is not None:
            raise UsageError(
                f"the DataFrame has other columns than at the first start of this pipeline: {problem}; to process it, "
                "start over with run(fresh=True) or give the pipeline another name; to go on with the rows that were "
                "captured then, give DataFrameSource a DataFrame with their columns"
            )
        elif self._changed == "refuse":
            self._refuse_other_rows(dataframes.rows_difference(self._dataframe, self._directory))
        return self._dataframe.sparkSession

    def _refuse_other_rows(self, problem: str | None) -> None:
        if problem is not None:
            raise UsageError(
                f"the DataFrame is another one than at the first start of this pipeline: {problem}; to process it, "
                "start over with run(fresh=True) or give the pipeline another name; to go on with the rows that were "
                "captured then, use DataFrameSource(df, changed='keep')"
            )

    def captured(self) -> Source:
        """Return the source of the captured files."""
        files = f"{glob.escape(self._directory)}/{PATTERN}"
        return ParquetFiles(files).read_as(self.schema())  # the same files for all subtasks


def check_captures(graph: Graph, derived: Collection[str]) -> None:
    """Refuse captures that nothing tells apart but the order of the program (EV14): kept, they are never compared.

    Args:
        graph: the program.
        derived: nodes without a name of their own.

    Raises:
        UsageError
    """
    found = {
        str(node.name): node.spec
        for node in graph.nodes
        if isinstance(node.spec, DataFrameSource) and str(node.name) in derived
    }
    if len(found) > 1 and any(source._changed == "keep" for source in found.values()):
        raise UsageError(
            f"the sources {', '.join(map(repr, found))} are DataFrames without names of their own, which are numbered "
            "in the order of the program, and changed='keep' reads what was captured under a name whatever the "
            "DataFrame is now: give each of them a name (name=)"
        )
