"""DataFrames at the ends of a pipeline: captured once as Parquet files, read back as Parquet files.

Counterparts: ``api.dataframes`` and ``api.results``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate.errors import StorageError, UsageError
from headgate.operators.types import carried
from headgate.storage.access import FILE_MODES, access_in, restrict
from headgate.storage.durable import sync_directory, sync_file, sync_names
from headgate.storage.local import make_directories

CAPTURED = "_SUCCESS"
"""Written when all files are in place and durable. Spark's committer has it, too, but syncs nothing before."""
MARKED_BY_SPARK = "mapreduce.fileoutputcommitter.marksuccessfuljobs"


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
    with _spark_errors("collect", "a DataFrame"):
        table = dataframe.toArrow()
    return pa.Table.from_batches([carried(batch, schema, "a DataFrame") for batch in table.to_batches()], schema)


def is_captured(directory: str) -> bool:
    """Return whether ``directory`` holds all rows of a DataFrame."""
    return (Path(directory) / CAPTURED).exists()


def capture(dataframe: Any, directory: str) -> None:
    """Write the rows of ``dataframe`` to ``directory``, durably (N72); what an interrupted start left is replaced.

    Raises:
        StorageError: Spark could not compute or write them.
    """
    target = Path(directory)
    with _disk_errors("capture a DataFrame in", directory):
        shutil.rmtree(target, ignore_errors=True)
        make_directories(target.parent, access_in(target.parent))
    with _spark_errors("capture a DataFrame in", directory):
        writer = dataframe.write.option("compression", "snappy").option(MARKED_BY_SPARK, "false")
        writer.parquet(target.as_uri())
    with _disk_errors("capture a DataFrame in", directory):
        restrict(target)  # Hadoop has a umask of its own
        _mark_as_captured(target)


def _mark_as_captured(target: Path) -> None:
    for path in target.iterdir():
        sync_file(path)
    sync_directory(target)
    (target / CAPTURED).touch(FILE_MODES[access_in(target.parent)])
    sync_names(target)


def difference(dataframe: Any, directory: str) -> str | None:
    """Return how the rows of ``dataframe`` differ from those captured in ``directory`` (N45); None: not at all.

    Both are read once. Neither order nor the division into files matters; how often a row is there does.

    Raises:
        StorageError: Spark could not compute or read them.
    """
    with _spark_errors("compare a DataFrame with", directory):
        captured = dataframe.sparkSession.read.parquet(Path(directory).as_uri())
        then, now = _columns(captured), _columns(dataframe)
        if then != now:
            return f"it had the columns {then} then, and has {now} now"
        (rows_then, sum_then), (rows_now, sum_now) = _digest(captured), _digest(dataframe)
    if rows_then != rows_now:
        return f"it had {rows_then:,} rows then, and has {rows_now:,} now"
    return None if sum_then == sum_now else f"it has {rows_now:,} rows, as then, but not the same ones"


def _columns(dataframe: Any) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in dataframe.schema)


def _digest(dataframe: Any) -> tuple[int, int]:
    """Return the number of rows, and the sum of their hashes: the same in any order."""
    from pyspark.sql import functions

    hashed = functions.xxhash64("*").cast("decimal(38,0)")
    row = dataframe.select(hashed.alias("hash")).agg(functions.count("*"), functions.sum("hash")).collect()[0]
    return int(row[0]), int(row[1] or 0)


@contextmanager
def _disk_errors(operation: str, directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(operation, directory, error.strerror or str(error), False) from error


@contextmanager
def _spark_errors(operation: str, directory: str) -> Iterator[None]:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise StorageError(operation, directory, str(error).split("\n", 1)[0], False) from error


def check_for_spark(session: Any, schema: pa.Schema) -> None:
    """Refuse records that Spark could not have as a DataFrame, before they are computed.

    Raises:
        UsageError: two columns have one name to Spark, or durations are not in microseconds.
    """
    folded: dict[str, str] = {}
    is_exact = session.conf.get("spark.sql.caseSensitive") == "true"
    for field in schema:
        twin = folded.setdefault(field.name if is_exact else field.name.lower(), field.name)
        if twin != field.name:
            raise UsageError(f"columns '{twin}' and '{field.name}' are one column to Spark: rename or drop one of them")
        if _has_duration(field.type, but=pa.duration("us")):
            raise UsageError(
                f"column '{field.name}' has type {field.type}, and Spark has durations in microseconds only: cast it "
                "to pl.Duration('us')"
            )


def read_parquet(session: Any, files: Sequence[str], schema: pa.Schema) -> Any:
    """Return the records of ``files`` as a DataFrame; without files an empty one of ``schema``.

    Parquet does not say that a number is a duration, so Spark is told.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from headgate.spark.columns import schema_for_spark, with_intervals

    if not files:
        return session.createDataFrame([], from_arrow_schema(schema_for_spark(schema)))
    uris = [Path(file).as_uri() for file in files]
    found = session.read.parquet(*uris)
    if not any(_has_duration(field.type) for field in schema):
        return found
    return session.read.schema(with_intervals(found.schema, schema)).parquet(*uris)


def _has_duration(dtype: pa.DataType, but: pa.DataType | None = None) -> bool:
    if pa.types.is_duration(dtype):
        return bool(dtype != but)
    return any(_has_duration(dtype.field(at).type, but) for at in range(dtype.num_fields))
