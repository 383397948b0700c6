"""DataFrames at the ends of a pipeline: their columns, Parquet files that Spark reads and writes, and captures.

A capture is the rows of a DataFrame as Parquet files, with a mark that says that all are there
(docs/decisions/0007-dataframes-are-captured.md). Counterparts: ``api.dataframe_source``, ``api.collect``, and
``connectors.files.parquet``, which reads the files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema, to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimeType,
    UserDefinedType,
)

from headgate.errors import StorageError, UsageError
from headgate.operators.schemas import canonical_schema, carried
from headgate.storage.local import LocalStorage
from headgate.storage.local_files import access_in, make_directories, restrict, sync_directory, sync_file

BATCH_ROWS_MAX = 65_536
"""Of a batch that goes to the JVM."""

_EXAMPLES: dict[type, Any] = {int: 42, str: "tea", bool: True}

_WIDER = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0)}


def for_spark(dtype: pa.DataType) -> pa.DataType:
    """Return the type in which Spark takes ``dtype``: unsigned integers become wider signed ones."""
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, for_spark(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype) or pa.types.is_list(dtype):
        return pa.list_(for_spark(dtype.value_type))
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype):
        return pa.binary()
    return cast(pa.DataType, _WIDER.get(dtype, dtype))


def schema_for_spark(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` in the types in which Spark takes its columns."""
    return pa.schema([pa.field(field.name, for_spark(field.type)) for field in schema])


def spark_schema(schema: pa.Schema) -> StructType:
    """Return ``schema`` as Spark has it in files, with all nanoseconds of a time of day."""
    found = from_arrow_schema(schema_for_spark(schema))
    return cast(StructType, with_leaves(found, lambda leaf: TimeType(9) if isinstance(leaf, TimeType) else leaf))


def with_leaves(kind: DataType, change: Callable[[DataType], DataType]) -> DataType:
    """Return ``kind`` with other types in the place of those that are not made of others; all may be null."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, with_leaves(field.dataType, change)) for field in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(with_leaves(kind.elementType, change))
    if isinstance(kind, MapType):
        return MapType(with_leaves(kind.keyType, change), with_leaves(kind.valueType, change))
    return change(kind)


def batches_for_spark(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the columns of ``schema`` in its types, in batches that the JVM can take.

    Raises:
        UsageError: Spark has no such value.
    """
    for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
        yield carried(batch.slice(start, BATCH_ROWS_MAX), schema, "for Spark")


def schema_of_spark(schema: Any) -> pa.Schema:
    """Return Spark's ``schema`` in canonical types: ``TIMESTAMP`` is a moment, ``TIMESTAMP_NTZ`` a local time.

    Raises:
        UsageError: a column has a type that Headgate does not carry.
    """
    for field in schema:
        _refuse(field.name, field.dataType)
    return canonical_schema(to_arrow_schema(schema, timezone="UTC"))


def _refuse(name: str, kind: Any) -> None:
    """Refuse a type that Arrow does not have, or has as a struct that looks like others: a VARIANT."""
    if isinstance(kind, StructType | ArrayType | MapType):
        for inner in _inner_types(kind):
            _refuse(name, inner)
    elif not _has_arrow_type(kind):
        spark_name = kind.simpleString()
        raise UsageError(
            f"column '{name}' of the DataFrame has type {spark_name}, which Headgate does not carry; cast it"
        )


def _has_arrow_type(kind: Any) -> bool:
    try:
        dtype = to_arrow_type(kind, timezone="UTC")
    except PySparkException:
        return False
    return not (pa.types.is_struct(dtype) or pa.types.is_null(dtype))


def check_for_files(session: Any, schema: StructType) -> None:
    """Refuse columns that ``session`` does not write to Parquet files, or does not read from them.

    Raises:
        UsageError: naming a column and its type.
    """
    if not schema.names:
        raise UsageError("a DataFrame without columns cannot be written to files; select at least one")
    is_exact = _is_set(session, "spark.sql.caseSensitive")
    twins = _twins(schema, is_exact)
    if twins is not None:
        raise UsageError(f"columns {twins} are one column to Spark: rename or drop one of them")
    for field in schema:
        for kind in _all_types(field.dataType):
            why = _problem(kind, is_exact) if not isinstance(kind, TimeType) else _problem_of_times(session)
            if why is not None:
                raise UsageError(f"column '{field.name}' has type {field.dataType.simpleString()}: {why}")


def _is_set(session: Any, setting: str) -> bool:
    return str(session.conf.get(setting)).lower() == "true"


def _problem(kind: DataType, is_exact: bool) -> str | None:
    if isinstance(kind, StructType):
        if not kind.names:
            return "Spark does not write structs without fields to files; drop it"
        twins = _twins(kind, is_exact)
        return None if twins is None else f"its fields {twins} are one field to Spark; rename or drop one of them"
    if isinstance(kind, MapType) and any(_is_collated(each) for each in _all_types(kind.keyType)):
        return "Spark does not write maps whose keys have a collation to files; cast them to STRING"
    return None


def _problem_of_times(session: Any) -> str | None:
    if _is_set(session, "spark.sql.timeType.enabled"):
        return None
    return "Spark has it in files only with spark.sql.timeType.enabled=true; set that, or cast the column to text"


def _is_collated(kind: DataType) -> bool:
    return isinstance(kind, StringType) and not kind.isUTF8BinaryCollation()


def _twins(struct: StructType, is_exact: bool) -> str | None:
    seen: dict[str, str] = {}
    for name in struct.names:
        folded = name if is_exact else name.lower()
        if folded in seen:
            return f"'{seen[folded]}' and '{name}'"
        seen[folded] = name
    return None


def _all_types(kind: DataType) -> Iterator[DataType]:
    yield kind
    for inner in _inner_types(kind):
        yield from _all_types(inner)


def _inner_types(kind: DataType) -> list[DataType]:
    """Return the types that ``kind`` is made of, without itself."""
    if isinstance(kind, StructType):
        return [field.dataType for field in kind]
    if isinstance(kind, MapType):
        return [kind.keyType, kind.valueType]
    return [kind.elementType] if isinstance(kind, ArrayType) else []


def keys_in(text: str, columns: Sequence[pa.Field], owner: str) -> list[Any]:
    """Return the keys that the option ``keys`` lists as JSON: values, or tuples if a key has several columns.

    Args:
        text: the option.
        columns: those of the key.
        owner: of the keys, for the errors.

    Raises:
        UsageError: these are no keys of these columns, or ``columns`` have types with values that JSON does not have.
    """
    types = [_type_in_json(column.type) for column in columns]
    described = ", ".join(f"{column.name}: {column.type}" for column in columns)
    if None in types:
        raise UsageError(
            f"the option keys takes integers, text and booleans, but a key of {owner} is ({described}): filter the "
            "DataFrame instead"
        )
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    rows: list[Any] = [key if len(columns) > 1 else [key] for key in given] if isinstance(given, list) else [None]
    if not all(isinstance(row, list) and [type(value) for value in row] == types for row in rows):
        example: Any = [_EXAMPLES[kind] for kind in types if kind is not None]
        shown = json.dumps([example] if len(columns) > 1 else example)
        raise UsageError(f"a key of {owner} is ({described}): keys must be a list in JSON, such as {shown}, not {text}")
    for index, column in enumerate(columns):
        try:
            pa.array([row[index] for row in rows], column.type)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise UsageError(f"a key of {owner} is ({described}), not one of {text}: {error}") from None
    return [tuple(row) if len(columns) > 1 else row[0] for row in rows]


def _type_in_json(dtype: pa.DataType) -> type | None:
    if pa.types.is_integer(dtype):
        return int
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        return str
    return bool if pa.types.is_boolean(dtype) else None


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
        # rows without a mark: a start was cut short, and they may not be all
        shutil.rmtree(target, ignore_errors=True)
        make_directories(target.parent, access_in(target.parent))
    place = spark_path(dataframe.sparkSession, directory)
    with spark_errors("capture a DataFrame in", directory):
        dataframe.write.option("compression", "snappy").parquet(place)
    with _disk_errors("capture a DataFrame in", directory):
        restrict(target)  # Hadoop has a umask of its own
        # Spark does not wait for the disk
        for path in target.iterdir():
            sync_file(path)
        sync_directory(target)
    # last: with the mark all rows are there, without it the next start captures again
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
    # as decimals: a sum of long integers could overflow
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
