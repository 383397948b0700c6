"""DataFrames at the ends of a pipeline: what they are to Headgate, and Parquet files that Spark reads and writes.

Counterparts: ``spark.captures``, ``api.dataframes`` and ``api.results``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate.errors import StorageError, UsageError
from headgate.operators.schemas import carried

_EXACT = {
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}
"""Options of a reader that count more than settings of its session."""


def active_session() -> Any:
    """Return the SparkSession that is active in this thread or process, or None."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def arrow_schema(dataframe: Any) -> pa.Schema:
    """Return the schema of ``dataframe`` in canonical types.

    Raises:
        UsageError: a column has a type that Headgate does not carry.
    """
    from headgate.spark.columns import schema_of_spark  # with the first DataFrame: it imports all of pyspark

    return schema_of_spark(dataframe.schema)


def collected(dataframe: Any) -> pa.Table:
    """Return the rows of ``dataframe``, which come from its partitions as Arrow batches, in canonical types.

    Raises:
        UsageError: a column has a type that Headgate does not carry.
        StorageError: Spark could not compute them.
    """
    schema = arrow_schema(dataframe)
    with spark_errors("collect", "a DataFrame"):
        table = dataframe.toArrow()
    return pa.Table.from_batches([carried(batch, schema, "a DataFrame") for batch in table.to_batches()], schema)


def spark_path(session: Any, path: str) -> str:
    """Return an absolute ``path`` in the form that Spark takes literally (N91).

    Spark decodes nothing, so this is no URL. ``exact_reader`` takes nothing for a pattern. Spark takes ``..`` for the
    parent of the name before it, which may be a link to somewhere else, so it is resolved.

    Raises:
        UsageError: the JVM cannot name it.
    """
    resolved = os.path.realpath(path) if ".." in Path(path).parts else path
    if not resolved.isascii():
        _check_nameable(session, resolved)
    return f"file://{resolved}"


def _check_nameable(session: Any, path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        told = ascii(path).strip("'")
        raise UsageError(f"Spark cannot name {told}, which is not UTF-8; choose another checkpoint directory") from None
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        session._jvm.java.io.File(path).toPath()
    except (PySparkException, Py4JJavaError):
        encoding = session._jvm.java.lang.System.getProperty("sun.jnu.encoding")
        raise UsageError(
            f"Spark cannot name {path}: its JVM was started with a locale whose encoding is {encoding}; start it with "
            "LC_ALL=C.UTF-8, or choose a checkpoint directory with a name in ASCII"
        ) from None


def exact_reader(session: Any) -> Any:
    """Return a reader of exactly the files that it is given, and of all rows in them, in any session."""
    reader = session.read.option("__globPaths__", "false")
    for name, value in _EXACT.items():
        reader = reader.option(name, value)
    return reader


@contextmanager
def spark_errors(operation: str, directory: str) -> Iterator[None]:
    """What Spark raises within this block becomes a StorageError."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise StorageError(operation, directory, str(error).split("\n", 1)[0], False) from error


def check_for_spark(session: Any, schema: pa.Schema) -> None:
    """Refuse records that Spark could not have as a DataFrame, before they are computed.

    Raises:
        UsageError: two columns or fields have one name to Spark, or it has no such type in files.
    """
    from headgate.spark.columns import check_for_files, spark_schema

    for field in schema:
        if _has_duration(field.type, but=pa.duration("us")):
            raise UsageError(
                f"column '{field.name}' has type {field.type}, and Spark has durations in microseconds only: cast it "
                "to pl.Duration('us')"
            )
    check_for_files(session, spark_schema(schema))


def read_parquet(session: Any, files: Sequence[str], schema: pa.Schema) -> Any:
    """Return the records of ``files`` as a DataFrame; without files an empty one of ``schema``.

    Spark is given the types: Parquet does not say that a number is a duration.

    Raises:
        UsageError: Spark cannot name the files.
    """
    from headgate.spark.columns import spark_schema

    if not files:
        return session.createDataFrame([], spark_schema(schema))
    paths = [spark_path(session, file) for file in files]
    return exact_reader(session).schema(spark_schema(schema)).parquet(*paths)


def _has_duration(dtype: pa.DataType, but: pa.DataType) -> bool:
    if pa.types.is_duration(dtype):
        return bool(dtype != but)
    return any(_has_duration(dtype.field(at).type, but) for at in range(dtype.num_fields))
