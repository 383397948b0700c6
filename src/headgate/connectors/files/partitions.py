"""Directories of a partitioned file sink, ``day=2015-07-15/minute=00%3A01``: the form that Hive, Spark and DuckDB read.

A directory stands for the value of a column, which the files below it do not have. Characters are escaped as Spark
does. Source: rule D16 of docs/spec/connectors.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value of a directory for nulls, and for empty texts, which no directory can have."""

VALUE_BYTES_MAX = 240
"""File systems allow 255 bytes in a name, the name of the column included."""

DIRECTORY = re.compile(r"[A-Za-z0-9][^/\\\x00-\x1f=]*=[^/\\\x00-\x1f]+")
"""A directory of a value. None of the sink's own directories has this form, and none leads elsewhere."""

_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{}\[\]^]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")


def check_partitions(columns: Sequence[str], schema: pa.Schema) -> None:
    """Refuse columns that records cannot be divided by.

    Raises:
        UsageError: one is not there, its values cannot name directories, or no other column is left.
    """
    for name in columns:
        if name not in schema.names:
            raise UsageError(f"FileSink(partition_by=) names '{name}'; the records have {', '.join(schema.names)}")
        if DIRECTORY.fullmatch(f"{name}=x") is None:
            raise UsageError(f"FileSink(partition_by=) names '{name}', which cannot begin the name of a directory")
        kind = schema.field(name).type
        tests = (
            pa.types.is_large_string,
            pa.types.is_string,
            pa.types.is_integer,
            pa.types.is_date,
            pa.types.is_boolean,
        )
        if not any(test(kind) for test in tests):
            raise UsageError(
                f"FileSink(partition_by=) names '{name}' of type {kind}; it takes texts, whole numbers, dates, booleans"
            )
    if columns and len(columns) == len(schema.names):
        raise UsageError("FileSink(partition_by=) names every column, but files need one that is left")


def divided(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Return the directory and the records of each partition, in the order in which they come: always the same.

    Records without one of the columns, which are older than it, belong to its nulls.

    Raises:
        UsageError: a value is too long for the name of a directory.
    """
    frame = pl.DataFrame(table)
    there = [name for name in columns if name in frame.columns]
    places = pl.concat_str(*(_directory(frame, name) for name in columns), separator="/") if columns else pl.lit("")
    found = frame.select(places.alias("place")).to_series()
    rest = table.drop_columns(there)
    groups = pl.DataFrame({"place": found}).with_row_index("row").group_by("place", maintain_order=True).agg("row")
    for place, rows in groups.iter_rows():
        yield place, rest if len(rows) == len(frame) else rest.take(pa.array(rows, pa.uint32()))


def values_of(path: str) -> dict[str, str | None]:
    """Return what the directories of a file say, as texts."""
    pairs = (part.partition("=") for part in path.split("/")[:-1])
    return {name: None if value == NULL else _plain(value) for name, _, value in pairs}


def is_partition(path: str) -> bool:
    """Whether ``path`` is nothing but directories of values."""
    return all(DIRECTORY.fullmatch(part) is not None and part[-1] not in " ." for part in path.split("/"))


def _directory(frame: pl.DataFrame, name: str) -> pl.Expr:
    """Return the directory of each record for one column."""
    if name not in frame.columns:
        return pl.lit(f"{name}={NULL}")
    texts = frame[name].cast(pl.String)
    escaped = {text: _escaped(name, text) for text in texts.unique().to_list()}
    return pl.lit(texts.replace_strict(list(escaped), list(escaped.values()), return_dtype=pl.String))


def _escaped(name: str, text: str | None) -> str:
    value = _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text or NULL)
    if text == NULL:  # the text, not a null
        value = f"%{ord(value[0]):02X}{value[1:]}"
    if value[-1] in " .":  # some file systems drop them
        value = f"{value[:-1]}%{ord(value[-1]):02X}"
    directory = f"{name}={value}"
    if len(directory.encode()) > VALUE_BYTES_MAX:
        raise UsageError(
            f"FileSink(partition_by=) cannot name a directory '{directory[:60]}...': it has {len(directory.encode())} "
            f"bytes, and at most {VALUE_BYTES_MAX} are possible; partition by a shorter value"
        )
    return directory


def _plain(value: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), value)
