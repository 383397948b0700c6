"""Verbs of other engines that people try, and what they are called here: an AttributeError with a sentence.

Counterpart: ``headgate.api.not_yet``, for what has no counterpart here. Never an alias: one word, one meaning.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NoReturn

_RUNNING = "use window(...).agg(...) for a result per window, reduce or process for a running one"
_KEY = f"call key_by('column') first, then {_RUNNING}"
_TIMES = "it is with_timestamps('column', out_of_orderness='5s')"
_COLUMNS = "use select or with_columns with Polars expressions"
_SINK = "it is sink(headgate.FileSink(...)), or another sink"
_LOOK = "use take(n) or show(n) to look at a few records, collect(limit=n) for a table"
_TWO = "use union; functions of two streams are not there yet"

STREAM = {
    **dict.fromkeys(["groupBy", "keyBy", "partition_by", "repartition"], "it is key_by('column')"),
    **dict.fromkeys(["flatMap", "explode"], "it is flat_map(function, schema=...)"),
    **dict.fromkeys(["mapInArrow", "mapInPandas", "mapPartitions"], "it is map_batches(function, schema=...)"),
    **dict.fromkeys(["withColumn", "withColumns", "assign", "rename", "drop"], _COLUMNS),
    "where": "it is filter",
    **dict.fromkeys(["withWatermark", "assign_timestamps_and_watermarks", "assign_timestamps"], _TIMES),
    **dict.fromkeys(["count", "sum", "min", "max", "mean", "aggregate"], _KEY),
    **dict.fromkeys(
        ["distinct", "unique", "drop_duplicates", "dropDuplicates", "deduplicate"],
        "keep what was seen in a headgate.ProcessFunction after key_by; examples/first_payments.py does",
    ),
    **dict.fromkeys(["print", "head", "limit", "to_pandas", "to_polars"], _LOOK),
    **dict.fromkeys(["writeStream", "write", "add_sink", "addSink", "sink_to", "sinkTo", "to"], _SINK),
    **dict.fromkeys(["foreach", "for_each", "foreachBatch"], f"map calls a function; for output, {_SINK}"),
    **dict.fromkeys(["merge", "concat"], _TWO),
    **dict.fromkeys(["shuffle"], "it is rebalance()"),
    "timer": "timers are set in a headgate.ProcessFunction after key_by, which has on_timer",
    "state": "state is declared in open() of a headgate.ProcessFunction after key_by",
}
"""Of a stream, keyed or not, unless it has the verb itself."""

KEYED = {
    **dict.fromkeys(["count", "sum", "min", "max", "mean", "aggregate", "apply"], _RUNNING),
    "fold": "use reduce, or a headgate.ProcessFunction if the result has another type",
    "transformWithState": "it is transform_with_state",
    "transformWithStateInPandas": "it is transform_with_state_in_pandas",
}

PIPELINE = {
    "execute": "it is run(), or start() to go on at once",
    **dict.fromkeys(["add_source", "from_source", "read", "readStream", "read_stream"], "it is source(...)"),
    **dict.fromkeys(["from_collection", "from_rows", "from_elements"], "it is source(headgate.FromRows(rows))"),
    "stop": "start() returns a handle, which has stop()",
    "wait": "start() returns a handle, which has wait()",
    "add_listener": "derive the function that shall hear of checkpoints from headgate.CheckpointListener",
}


def no_attribute(kind: str, name: str, words: dict[str, str], names: Sequence[str]) -> NoReturn:
    """Say that an object of ``kind`` has no ``name``, and what it is called: a guess, or the nearest of ``names``.

    Raises:
        AttributeError: always.
    """
    near = difflib.get_close_matches(name, [name for name in names if not name.startswith("_")], n=1, cutoff=0.7)
    why = f": {words[name]}" if name in words else f"; did you mean '{near[0]}'?" if near else ""
    raise AttributeError(f"'{kind}' object has no attribute '{name}'{why}")
