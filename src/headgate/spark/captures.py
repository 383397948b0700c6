"""Captures: the rows of a DataFrame as Parquet files, with a mark that says that all are there, and their columns.

Counterparts: ``api.dataframes``, and ``connectors.files.parquet``, which reads the files. The decision is 0007.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from headgate.spark.columns import spark_schema, with_leaves
from headgate.spark.dataframes import exact_reader, spark_errors, spark_path
from headgate.storage.fsync import sync_directory, sync_file
from headgate.storage.local import LocalStorage, make_directories
from headgate.storage.permissions import access_in, restrict

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
    """Write the rows of ``dataframe`` to ``directory``, durably (N72); what an interrupted start left is replaced.

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
    """Return how columns differ from those captured in ``directory`` (N45); None: not at all.

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
    """Return how the rows of ``dataframe`` differ from those captured in ``directory`` (N45); None: not at all.

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
    """Return columns that ``xxhash64`` tells apart where values are, which are not null.

    It skips nulls in arrays, too, and does not notice where one ends; it takes no maps, whose entries have no order;
    it takes texts for equal that their collation does, and 0.0 and -0.0.
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
