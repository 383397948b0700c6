"""DataFrames at the ends of a pipeline: their columns, Parquet files that Spark reads and writes, and captures.

A capture is the rows of a DataFrame as Parquet files, with a mark that says that all are there
(docs/decisions/0007-dataframes-are-captured.md). Counterparts: ``api.dataframe_source``, ``api.collect``, and
``connectors.files.parquet``, which reads the files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import functions
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructType,
    TimeType,
    UserDefinedType,
)

from headgate.errors import StorageError, UsageError
from headgate.operators.schemas import carried
from headgate.spark.columns import spark_schema, with_leaves
from headgate.storage.local import LocalStorage
from headgate.storage.local_files import access_in, make_directories, restrict, sync_directory, sync_file

_EXACT = {
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}
"""Options of a reader that count more than settings of its session."""


def active_session() -> Any:
    """Return the SparkSession that is active in this thread or process, or one on its context; None: it has none."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    has_context = SparkContext._active_spark_context is not None
    return SparkSession.builder.getOrCreate() if found is None and has_context else found


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
    """Return an absolute ``path`` in the form that Spark takes literally.

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
        text = ascii(path).strip("'")
        raise UsageError(f"Spark cannot name {text}, which is not UTF-8; choose another checkpoint directory") from None
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


MARK = "_captured"
"""Written when all files are in place and durable. Spark ignores files with such names."""

_FORMAT = b"captured DataFrame, version 2\n"
"""Begins a mark; the schema of the rows follows, as Arrow writes it."""

_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": ("TIMESTAMP_MILLIS", "TIMESTAMP_MICROS"),
    "spark.sql.parquet.datetimeRebaseModeInWrite": ("LEGACY", "CORRECTED"),
    "spark.sql.parquet.int96RebaseModeInWrite": ("LEGACY", "CORRECTED"),
}
"""Settings of a session with which Spark writes other times than it has, and values with which it does not."""


def is_captured(directory: str) -> bool:
    """Return whether ``directory`` holds all rows of a DataFrame."""
    return (Path(directory) / MARK).exists()


def capture(dataframe: Any, directory: str, schema: pa.Schema) -> None:
    """Write the rows of ``dataframe`` to ``directory``, durably; what an interrupted start left is replaced.

    Args:
        dataframe: what to write.
        directory: where; absolute.
        schema: of the rows, in canonical types; the mark keeps it.

    Raises:
        UsageError: Spark cannot name the directory, or is set to write other values.
        StorageError: Spark could not compute or write them.
    """
    _check_settings(dataframe)
    target = Path(directory)
    with _disk_errors("capture a DataFrame in", directory):
        shutil.rmtree(target, ignore_errors=True)
        make_directories(target.parent, access_in(target.parent))
    place = spark_path(dataframe.sparkSession, directory)
    with spark_errors("capture a DataFrame in", directory):
        dataframe.write.option("compression", "snappy").parquet(place)
    with _disk_errors("capture a DataFrame in", directory):
        restrict(target)  # Hadoop has a umask of its own
        for path in target.iterdir():
            sync_file(path)
        sync_directory(target)
    LocalStorage(target, access_in(target.parent)).put(MARK, [_FORMAT, schema.serialize()])


def _check_settings(dataframe: Any) -> None:
    for name, (wrong, right) in _SETTINGS.items():
        if str(dataframe.sparkSession.conf.get(name)).upper() == wrong:
            raise UsageError(
                f"with {name}={wrong} Spark may write other times and dates than the DataFrame has; set it to {right}"
            )


def captured_schema(directory: str) -> pa.Schema:
    """Return the schema of the rows that were captured in ``directory``, in canonical types.

    Raises:
        UsageError: another version of Headgate has captured them.
        StorageError: the mark cannot be read.
    """
    with _disk_errors("read a capture in", directory):
        mark = (Path(directory) / MARK).read_bytes()
    try:
        if mark.startswith(_FORMAT):
            return pa.ipc.read_schema(pa.py_buffer(mark[len(_FORMAT) :]))
    except (pa.ArrowInvalid, OSError):  # what Arrow says of bytes that are no schema
        pass
    raise UsageError(
        f"{Path(directory) / MARK} is not a file of this version of Headgate, so the rows beside it cannot be used; "
        "start over with run(fresh=True)"
    )


def columns_difference(schema: pa.Schema, directory: str) -> str | None:
    """Return how columns differ from those captured in ``directory``; None: not at all.

    Raises:
        UsageError, StorageError: see ``captured_schema``.
    """
    then = captured_schema(directory)
    if then.equals(schema):
        return None
    return f"it had the columns {_text(then)} then, and has {_text(schema)} now"


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in spark_schema(schema))


def rows_difference(dataframe: Any, directory: str) -> str | None:
    """Return how the rows of ``dataframe`` differ from those captured in ``directory``; None: not at all.

    Both are read once, and have the same columns. Neither order nor the division into files matters; how often a row
    is there does.

    Raises:
        StorageError: Spark could not compute or read them.
    """
    place = spark_path(dataframe.sparkSession, directory)
    with spark_errors("compare a DataFrame with", directory):
        captured = exact_reader(dataframe.sparkSession).schema(_as_written(dataframe.schema)).parquet(place)
        (rows_then, sum_then), (rows_now, sum_now) = _digest(captured), _digest(dataframe)
    if rows_then != rows_now:
        return f"it had {rows_then:,} rows then, and has {rows_now:,} now"
    return None if sum_then == sum_now else f"it has {rows_now:,} rows, as then, but not the same ones"


def _as_written(kind: DataType) -> DataType:
    """Return ``kind`` without collations, classes and the digits of times, which a pipeline does not get."""

    def plain(leaf: DataType) -> DataType:
        if isinstance(leaf, UserDefinedType):
            return _as_written(leaf.sqlType())
        if isinstance(leaf, TimeType):
            return TimeType(9)
        return StringType() if isinstance(leaf, StringType) else leaf

    return with_leaves(kind, plain)


def _digest(dataframe: Any) -> tuple[int, int]:
    """Return the number of rows, and the sum of their hashes: the same in any order."""
    names = [f"c{at}" for at in range(len(dataframe.columns))]  # a name may be one that Spark takes for an expression
    kinds = [field.dataType for field in dataframe.schema]
    parts = [part for name, kind in zip(names, kinds, strict=True) for part in _flagged(functions.col(name), kind)]
    hashed = dataframe.toDF(*names).select(functions.xxhash64(*parts).cast("decimal(38,0)").alias("hash"))
    row = hashed.agg(functions.count("*"), functions.sum("hash")).collect()[0]
    return int(row[0]), int(row[1] or 0)


def _flagged(value: Any, kind: DataType) -> list[Any]:
    """Return what tells ``value`` from every other one of its type: ``xxhash64`` skips nulls, so they have a flag."""
    return [value.isNull(), *_parts(value, kind)]


def _parts(value: Any, kind: DataType) -> list[Any]:
    """Return columns that have different ``xxhash64`` values where the values, which are not null, differ.

    It skips nulls in arrays, too, and does not notice where one ends; it takes no maps, because
    their entries have no order; it takes texts for equal that their collation does, and 0.0 and -0.0.
    """
    if isinstance(kind, UserDefinedType):
        return _parts(functions.unwrap_udt(value), kind.sqlType())
    if isinstance(kind, StructType):
        return [part for field in kind for part in _flagged(value.getField(field.name), field.dataType)]
    if isinstance(kind, ArrayType):
        hashes = functions.transform(value, lambda each: functions.xxhash64(*_flagged(each, kind.elementType)))
        return [functions.array_size(value), hashes]
    if isinstance(kind, MapType):
        hashes = functions.transform(
            functions.map_entries(value),
            lambda entry: functions.xxhash64(
                *_parts(entry.getField("key"), kind.keyType), *_flagged(entry.getField("value"), kind.valueType)
            ),
        )
        return [functions.array_size(hashes), functions.array_sort(hashes)]
    if isinstance(kind, StringType):
        return [value.cast("binary")]
    if isinstance(kind, FloatType | DoubleType):
        return [value, (value == 0) & value.cast("string").startswith("-")]
    return [value]


@contextmanager
def _disk_errors(operation: str, directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(operation, directory, error.strerror or str(error), False) from error
