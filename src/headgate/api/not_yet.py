"""What Headgate will do but does not do yet: one sentence each, instead of an AttributeError."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NoReturn

from headgate.errors import UsageError


def not_there_yet(what: str, instead: str = "") -> NoReturn:
    """Raise the sentence for ``what`` (with its article or in quotes); ``instead`` says what to use today.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{what} is not there yet" + (f"; {instead}" if instead else ""))


_BY_SPARK = "read it with Spark and give headgate.DataFrameSource(df)"
_BY_STREAM = (
    "let Spark read it and write a stream with writeStream.format('headgate'), and read that with headgate.StreamSource"
)
_TO_STREAM = "write with headgate.StreamSink, and let Spark read that with readStream.format('headgate') and write it"
_WRITE_FILES = "write with headgate.FileSink or headgate.StreamSink and load that"
_PROCESS = "keep state in a headgate.ProcessFunction"
UNION = f"union them with a column that tells them apart, and {_PROCESS}"

NAMES_TO_COME = {
    "ParquetSource": "the source of Parquet files is called headgate.ParquetFiles",
    "FileSource": "the sources of files are called headgate.TextFiles, headgate.JsonLines and headgate.ParquetFiles",
    "ParquetSink": "the sink of Parquet files is headgate.FileSink(url, 'parquet')",
    "CoProcessFunction": f"functions of two streams are not there yet; {UNION}",
}
"""Names of the package that people try, and what to do today."""

SYSTEMS_TO_COME = {
    "kafka": "Kafka is",
    "kinesis": "Kinesis is",
    "pulsar": "Pulsar is",
    "rabbit": "RabbitMQ is",
    "mqtt": "MQTT is",
    "csv": "CSV is",
    "avro": "Avro is",
    "orc": "ORC is",
    "delta": "Delta tables are",
    "iceberg": "Iceberg tables are",
    "hudi": "Hudi tables are",
    "jdbc": "databases are",
    "postgres": "databases are",
    "mysql": "databases are",
    "sqlite": "databases are",
    "redis": "databases are",
    "mongo": "databases are",
    "elastic": "Elasticsearch is",
}
"""Foreign systems and formats, as they occur in names, such as ``KafkaSource`` and ``read_csv``."""

ENDLESS = ("kafka", "kinesis", "pulsar", "rabbit", "mqtt")
"""Systems whose input goes on: a DataFrame that is captured once would be the wrong advice."""


def why_no_name(name: str, names: Sequence[str]) -> str:
    """Return what the error about an unknown ``name`` says to use instead; "" if there is no hint."""
    if name in NAMES_TO_COME:
        return f": {NAMES_TO_COME[name]}"
    words = name.lower().replace("_", "")
    for part, what in SYSTEMS_TO_COME.items():
        if part in words:
            is_sink = "sink" in words or "write" in words
            read, write = (_BY_STREAM, _TO_STREAM) if part in ENDLESS else (_BY_SPARK, _WRITE_FILES)
            instead = write if is_sink else read if words != part else f"{read}; to write it, {write}"
            return f": {what} not there yet; {instead}"
    if "join" in words:
        return f": joins are not there yet; {UNION}"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean '{near[0]}'?" if near else ""


METHODS_TO_COME = {
    "handleInputRows": "a stateful processor of PySpark's is for transform_with_state or its twin with _in_pandas",
    "onTimer": "the method is called on_timer",
    "handleExpiredTimer": "timers of either kind call on_timer",
    "on_event_time": "timers of either kind call on_timer",
    "on_processing_time": "timers of either kind call on_timer",
    "process_element": "the method is called process",
    "processElement": "the method is called process",
    "close": "functions are not told of their end yet",
}
"""Methods that people give their functions because other engines call them."""


def refuse_methods_to_come(node: str, function: object) -> None:
    """Refuse a function with a method that would never be called.

    Raises:
        UsageError
    """
    refuse_unheard(f"operator '{node}'", function, ("notify_checkpoint_", "snapshot", "restore"))
    for name, why in METHODS_TO_COME.items():
        if callable(getattr(type(function), name, None)):
            raise UsageError(
                f"operator '{node}': {type(function).__name__}.{name} would never be called: {why}; remove the method, "
                "or give it another name if it is for your own use"
            )


def refuse_life_cycle(verb: str, function: object) -> None:
    """Refuse a function of a verb without state that wants to be opened, closed or timed: nobody would do it.

    Raises:
        UsageError
    """
    for name in ("open", "close", "on_timer"):
        if callable(getattr(type(function), name, None)):
            raise UsageError(
                f"{verb}: {type(function).__name__}.{name} would never be called: {verb} calls the object alone; make "
                "what it needs at its first call, or use a headgate.ProcessFunction behind key_by, or give the method "
                "another name if it is for your own use"
            )


def refuse_unheard(where: str, function: object, names: tuple[str, ...] = ("notify_checkpoint_",)) -> None:
    """Refuse an object with a method that begins with one of ``names`` and is called of those only who derive from a
    class that it does not derive from (HL1), and a method of an object that listens or keeps lists (HL20).

    Raises:
        UsageError
    """
    from headgate.operators.checkpointed.exploring import hidden, unheard

    problem = unheard(function, names)
    if problem:
        raise UsageError(f"{where}: {problem}")
    inner = hidden(function)
    if inner is not None:
        raise UsageError(
            f"{where}: {type(inner).__name__} listens to checkpoints or keeps operator state, and would not be called, "
            "because only a method of it, or a function around it, is given; give the object itself, with __call__"
        )


def refuse_lists(where: str, found: object) -> None:
    """Refuse an object in the driver that wants to keep operator state: only subtasks have some (HL20).

    Raises:
        UsageError
    """
    from headgate.operators.checkpointed.functions import CheckpointedFunction

    if isinstance(found, CheckpointedFunction):
        raise UsageError(
            f"{where}: {type(found).__name__} is a headgate.CheckpointedFunction, but is called in the driver, which "
            "keeps no operator state; keep the lists in a function given to a verb of a stream"
        )
