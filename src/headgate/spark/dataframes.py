"""DataFrames at the ends of a pipeline: captured once as Parquet files, read back as Parquet files.

Counterparts: ``api.dataframes`` and ``api.results``. Never reads a DataFrame twice for one pipeline.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate.errors import StorageError, UsageError
from headgate.operators.types import canonical_schema
from headgate.storage.access import access_in, restrict
from headgate.storage.local import make_directories

CAPTURED = "_SUCCESS"
"""Spark's committer writes it when all files are in place."""


def active_session() -> Any:
    """Return the SparkSession that is active in this thread or process, or None."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def arrow_schema(dataframe: Any) -> pa.Schema:
    """Return the schema of ``dataframe`` in canonical types; times are instants in UTC.

    Raises:
        UsageError: a column has a type that Headgate does not carry.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return canonical_schema(to_arrow_schema(dataframe.schema, timezone="UTC"))
    except PySparkException as error:
        raise UsageError(f"the DataFrame has a column that Headgate does not carry: {error}") from error


def capture(dataframe: Any, directory: str) -> None:
    """Write the rows of ``dataframe`` to ``directory``, unless that has been done completely before.

    Raises:
        StorageError: Spark could not compute or write them.
    """
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    target = Path(directory)
    if (target / CAPTURED).exists():
        return
    shutil.rmtree(target, ignore_errors=True)  # what a start that was interrupted left
    make_directories(target.parent, access_in(target.parent))
    try:
        dataframe.write.option("compression", "snappy").parquet(target.as_uri())
    except (PySparkException, Py4JJavaError) as error:
        raise StorageError("capture a DataFrame in", directory, str(error).split("\n", 1)[0], False) from error
    restrict(target)  # Hadoop has a umask of its own


def read_parquet(session: Any, files: Sequence[str], schema: pa.Schema) -> Any:
    """Return the records of ``files`` as a DataFrame; without files an empty one of ``schema``."""
    from pyspark.sql.pandas.types import from_arrow_schema

    if files:
        return session.read.parquet(*(Path(file).as_uri() for file in files))
    return session.createDataFrame([], from_arrow_schema(schema))
