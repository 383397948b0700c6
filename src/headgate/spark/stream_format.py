"""``format("headgate")``: streams of the store in ``spark.read``, ``readStream``, ``write`` and ``writeStream``.

A PySpark Python data source on Arrow batches. Counterparts: ``spark.stream_reader``, ``spark.stream_writer``. Source:
docs/spec/spark-streams.md.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema

from headgate.errors import UsageError
from headgate.spark.dataframes import schema_of_spark
from headgate.spark.stream_options import EARLIEST, READING, STREAMING, WRITING, Options
from headgate.spark.stream_reader import CutRange, MicroBatchReader, StreamReader, StreamSelection
from headgate.spark.stream_writer import MicroBatchWriter, StreamTarget, StreamWriter

AT_ONCE = 8
"""So many tasks are thought to run at one time where a session does not tell: Spark Connect."""


class StreamDataSource(DataSource):  # type: ignore[misc]
    """``format("headgate")``; the name of the stream is the argument of ``load``, ``save`` or ``start``.

    Options:
        store: directory of the store, or its URL; default as for ``StreamSource``.
        start, end: where reading begins and ends: ``earliest``, ``latest``, a stream cut, or a date and time
            (``readStream`` has no end).
        columns: names of columns, separated by commas; default: all.
        keys: the routing keys that ``read`` reads, as a JSON list; default: all. Only segments that can have them are
            read.
        place: true adds the columns ``_segment`` and ``_position``.
        rows_per_partition: the maximum number of rows of a partition of ``read``, each of one segment; default: equal
            partitions, one for each core, or a multiple of that where they would have more than 512 MiB.
        rows_per_batch: the maximum number of rows of a micro-batch of ``readStream``.
        holder: the name under which the store keeps the events that a ``readStream`` still needs.
        routing_key, segments: the routing key and the number of segments of a stream that ``write`` or ``writeStream``
            creates.
    """

    at_once = AT_ONCE
    """How many tasks run at one time: that of the session, where it is known (``register_streams``)."""

    _span: CutRange | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "headgate"

    def schema(self) -> Any:
        """Return the columns as Spark has them."""
        if self.options.keys() & (set(STREAMING) - set(READING)):
            return from_arrow_schema(StreamSelection.of(self._options(STREAMING)).schema)
        return from_arrow_schema(self._loaded().selected.schema)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return what ``spark.read`` reads with."""
        return StreamReader(self._loaded(), schema, self._options(READING).number("rows_per_partition"), self.at_once)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - PySpark's name
        """Return what ``spark.readStream`` reads with."""
        options = self._options(STREAMING)
        return MicroBatchReader(
            StreamSelection.of(options),
            schema,
            options.text("start") or EARLIEST,
            options.number("rows_per_batch"),
            options.text("holder"),
        )

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        """Return what ``df.write`` writes with."""
        return StreamWriter(self._written(schema, overwrite=overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - PySpark's name
        """Return what ``df.writeStream`` writes with."""
        return MicroBatchWriter(self._written(schema, overwrite=overwrite))

    def _written(self, schema: Any, *, overwrite: bool) -> StreamTarget:
        options = self._options(WRITING)
        if overwrite:
            raise UsageError(
                f"stream '{options.stream}' is appended to: use mode('append') or outputMode('append'); to begin it "
                "anew, delete or truncate it first (headgate streams)"
            )
        return StreamTarget.of(options, schema_of_spark(schema))

    def _options(self, known: tuple[str, ...]) -> Options:
        return Options(self.options, known)

    def _loaded(self) -> CutRange:
        """Find stream and cuts, once: the source is pickled with them."""
        if self._span is None:
            self._span = CutRange.of(self._options(READING))
        return self._span


def register_streams(spark: Any) -> None:
    """Register ``format("headgate")`` in a session.

    Raises:
        UsageError: the argument is not a SparkSession.
    """
    if not hasattr(spark, "dataSource"):
        raise UsageError(f"register_streams needs the SparkSession that shall read or write, not {spark!r}")
    context = getattr(spark, "sparkContext", None)
    at_once = AT_ONCE if context is None else max(1, context.defaultParallelism)
    spark.dataSource.register(type(StreamDataSource.__name__, (StreamDataSource,), {"at_once": at_once}))
