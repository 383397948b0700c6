"""Hints for what Headgate does not support yet, or calls by another name: one sentence instead of an AttributeError."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import NoReturn

from headgate.errors import UsageError


def not_there_yet(what: str, instead: str = "") -> NoReturn:
    """Raise that ``what`` (with its article or in quotes) is not there yet; ``instead`` says what to use.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{what} is not there yet" + (f"; {instead}" if instead else ""))


def refused(why: str) -> Callable[..., NoReturn]:
    """Return a method that a class does not have: a call raises UsageError with what to do instead."""

    def refuse(*args: object, **options: object) -> NoReturn:
        raise UsageError(why)

    return refuse


_BY_SPARK = "read it with Spark and give headgate.DataFrameSource(df)"
_BY_STREAM = (
    "let Spark read it and write a stream with writeStream.format('headgate'), and read that with headgate.StreamSource"
)
_TO_STREAM = "write with headgate.StreamSink, and let Spark read that with readStream.format('headgate') and write it"
_WRITE_FILES = "write with headgate.FileSink or headgate.StreamSink and load that"

NAMES_TO_COME = {
    "CsvSource": "the source of CSV files is called headgate.CsvFiles",
    "read_csv": "the source of CSV files is called headgate.CsvFiles",
    "CsvSink": "the sink of CSV files is headgate.FileSink(url, 'csv')",
    "ParquetSource": "the source of Parquet files is called headgate.ParquetFiles",
    "FileSource": "the sources of files are called headgate.TextFiles, JsonLines, CsvFiles and ParquetFiles",
    "KafkaSource": "the source of Kafka is called headgate.Kafka",
    "PostgresSource": "changes of a table of PostgreSQL are read by headgate.PostgresChanges",
    "HybridSource": "the source of several sources is called headgate.Hybrid",
    "AsyncDataStream": "calls that do not block are stream.map_async(function, schema) of a headgate.Stream",
    "ParquetSink": "the sink of Parquet files is headgate.FileSink(url, 'parquet')",
    "KeyedCoProcessFunction": "it is headgate.CoProcessFunction",
}
"""Names of the package that people try, and what to do today."""

SYSTEMS_TO_COME = {
    "kinesis": "Kinesis is",
    "pulsar": "Pulsar is",
    "rabbit": "RabbitMQ is",
    "mqtt": "MQTT is",
    "avro": "Avro files are",
    "orc": "ORC is",
    "hudi": "Hudi tables are",
    "jdbc": "databases are",
    "mysql": "databases are",
    "sqlite": "databases are",
    "redis": "databases are",
    "mongo": "databases are",
    "elastic": "Elasticsearch is",
}
"""Foreign systems and formats, as they occur in names, such as ``PulsarSource`` and ``read_csv``."""

ENDLESS = ("kinesis", "pulsar", "rabbit", "mqtt")
"""Systems with endless input: a DataFrame that is captured once would be the wrong advice."""


def name_hint(name: str, names: Sequence[str]) -> str:
    """Return the hint for an unknown ``name`` of the package; "" if there is none."""
    if name in NAMES_TO_COME:
        return f": {NAMES_TO_COME[name]}"
    words = name.lower().replace("_", "")
    for part, what in SYSTEMS_TO_COME.items():
        if part in words:
            is_sink = "sink" in words or "write" in words
            read, write = (_BY_STREAM, _TO_STREAM) if part in ENDLESS else (_BY_SPARK, _WRITE_FILES)
            if what == "databases are" and is_sink and part not in ("redis", "mongo"):
                return ": tables of databases are written with headgate.PostgresSink and headgate.SqlSink"
            instead = write if is_sink else read if words != part else f"{read}; to write it, {write}"
            return f": {what} not there yet; {instead}"
    if "join" in words:
        return ": joins are made with stream.join(other, on='id', within=('-10s', '5s'))"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean '{near[0]}'?" if near else ""


METHODS_TO_COME = {
    "handleInputRows": "a stateful processor of PySpark's is for transform_with_state or its twin with _in_pandas",
    "onTimer": "the method is called on_timer",
    "handleExpiredTimer": "timers of either kind call on_timer",
    "on_event_time": "timers of either kind call on_timer",
    "on_processing_time": "timers of either kind call on_timer",
    **dict.fromkeys(["process_element1", "processElement1"], "the method is called process_left"),
    **dict.fromkeys(["process_element2", "processElement2"], "the method is called process_right"),
    "process_element": "the method is called process",
    "processElement": "the method is called process",
}
"""Methods of functions for other engines, which Headgate never calls."""


def refuse_foreign_methods(node: str, function: object) -> None:
    """Refuse a function with a method that would never be called.

    Raises:
        UsageError
    """
    refuse_uncalled_methods(f"operator '{node}'", function, ("notify_checkpoint_", "snapshot", "restore"))
    for name, why in METHODS_TO_COME.items():
        if callable(getattr(type(function), name, None)):
            raise UsageError(
                f"operator '{node}': {type(function).__name__}.{name} would never be called: {why}; remove the method, "
                "or give it another name if it is for your own use"
            )


def check_life_cycle(verb: str, function: object) -> None:
    """Check the methods that are called besides a function object itself.

    Raises:
        UsageError: ``open`` or ``close`` takes arguments, or there is an ``on_timer``, which would never be called.
    """
    from headgate.operators.user_functions import own_method

    kind = type(function)
    if callable(getattr(kind, "on_timer", None)):
        raise UsageError(
            f"{verb}: {kind.__name__}.on_timer would never be called; use a headgate.ProcessFunction after key_by, or "
            "give the method another name if it is for your own use"
        )
    for name in ("open", "close"):
        method = own_method(function, name)
        if method is None:
            continue
        if inspect.iscoroutinefunction(method):
            raise UsageError(f"{verb}: {kind.__name__}.{name} must not be async; map_async takes such functions")
        parameters = inspect.signature(method).parameters.values()
        if any(one.default is one.empty and one.kind in _GIVEN for one in parameters):
            raise UsageError(f"{verb}: {kind.__name__}.{name} is called without arguments: take none but self")


_GIVEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_uncalled_methods(where: str, function: object, names: tuple[str, ...] = ("notify_checkpoint_",)) -> None:
    """Refuse an object with methods that would never be called, because its class lacks a base class or is hidden.

    Methods that begin with one of ``names`` are called only of objects of certain base classes, and only of the
    object itself, not of one of which only a method is given.

    Raises:
        UsageError
    """
    from headgate.operators.checkpoint_listeners import hidden_listener, uncalled_method

    problem = uncalled_method(function, names)
    if problem:
        raise UsageError(f"{where}: {problem}")
    inner = hidden_listener(function)
    if inner is not None:
        raise UsageError(
            f"{where}: {type(inner).__name__} listens to checkpoints or keeps operator state, and would not be called, "
            "because only a method of it, or a function around it, is given; give the object itself, with __call__"
        )


def refuse_operator_state(where: str, found: object) -> None:
    """Refuse an object in the driver that keeps operator state: only subtasks have some.

    Raises:
        UsageError
    """
    from headgate.operators.checkpoint_listeners import CheckpointedFunction

    if isinstance(found, CheckpointedFunction):
        raise UsageError(
            f"{where}: {type(found).__name__} is a headgate.CheckpointedFunction, but is called in the driver, which "
            "keeps no operator state; keep the lists in a function given to a verb of a stream"
        )


_RUNNING = "use window(...).agg(...) for a result per window, agg(...) for a running one"
_KEY = f"call key_by('column') first, then {_RUNNING}"
_TIMES = "it is with_timestamps('column', out_of_orderness='5s')"
_COLUMNS = "use select or with_columns with Polars expressions"
_SINK = "it is sink(headgate.FileSink(...)), or another sink"
_LOOK = "use take(n) or show(n) to look at a few records, collect(limit=n) for a table"
_TWO = "use union, or connect two keyed streams for a function of both"

STREAM_HINTS = {
    **dict.fromkeys(["groupBy", "keyBy", "partition_by", "repartition"], "it is key_by('column')"),
    **dict.fromkeys(
        ["mapAsync", "async_map", "ordered_wait", "unordered_wait", "orderedWait"], "it is map_async(function, schema)"
    ),
    "flatMap": "it is flat_map(function, schema=...)",
    **dict.fromkeys(["mapInArrow", "mapInPandas", "mapPartitions"], "it is map_batches(function, schema=...)"),
    **dict.fromkeys(["withColumn", "withColumns", "assign", "rename", "drop"], _COLUMNS),
    "where": "it is filter",
    **dict.fromkeys(["withWatermark", "assign_timestamps_and_watermarks", "assign_timestamps"], _TIMES),
    **dict.fromkeys(["count", "sum", "min", "max", "mean", "aggregate"], _KEY),
    **dict.fromkeys(
        ["distinct", "unique", "drop_duplicates", "dropDuplicates", "dropDuplicatesWithinWatermark"],
        "it is key_by('column').deduplicate('first', within='1h')",
    ),
    **dict.fromkeys(["top_k", "rank", "row_number"], "it is key_by('column').top(10, by='price', within=None)"),
    **dict.fromkeys(["print", "head", "limit", "to_pandas", "to_polars"], _LOOK),
    **dict.fromkeys(["writeStream", "write", "add_sink", "addSink", "sink_to", "sinkTo", "to"], _SINK),
    **dict.fromkeys(["foreach", "for_each", "foreachBatch"], f"map calls a function; for output, {_SINK}"),
    **dict.fromkeys(["merge", "concat"], _TWO),
    **dict.fromkeys(["shuffle"], "it is rebalance()"),
    "timer": "timers are set in a headgate.ProcessFunction after key_by, which has on_timer",
    "state": "state is declared in open() of a headgate.ProcessFunction after key_by",
}
"""Of a stream, keyed or not, unless it has the verb itself."""

KEYED_HINTS = {
    **dict.fromkeys(["count", "sum", "min", "max", "mean", "aggregate", "apply"], _RUNNING),
    "fold": "use reduce, or a headgate.ProcessFunction if the result has another type",
    "transformWithState": "it is transform_with_state",
    "transformWithStateInPandas": "it is transform_with_state_in_pandas",
}

PIPELINE_HINTS = {
    "execute": "it is run(), or start() to go on at once",
    **dict.fromkeys(["add_source", "from_source", "read", "readStream", "read_stream"], "it is source(...)"),
    **dict.fromkeys(["from_collection", "from_rows", "from_elements"], "it is source(headgate.FromRows(rows))"),
    "stop": "start() returns a handle, which has stop()",
    "wait": "start() returns a handle, which has wait()",
    "add_listener": "derive the function that shall hear of checkpoints from headgate.CheckpointListener",
}


def raise_no_attribute(kind: str, name: str, words: dict[str, str], names: Sequence[str]) -> NoReturn:
    """Raise an AttributeError with a hint: from ``words``, or the nearest of ``names``.

    Raises:
        AttributeError: always.
    """
    near = difflib.get_close_matches(name, [name for name in names if not name.startswith("_")], n=1, cutoff=0.7)
    why = f": {words[name]}" if name in words else f"; did you mean '{near[0]}'?" if near else ""
    raise AttributeError(f"'{kind}' object has no attribute '{name}'{why}")
