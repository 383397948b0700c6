"""``KeyedStream.over``: aggregates over the records before each record. Nothing runs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import polars as pl

from headgate.api.config import StateChoice, operator_state
from headgate.api.streams.base_stream import Records
from headgate.api.streams.windowed_stream import late_tag
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.graph import Edge
from headgate.model.ids import NodeName
from headgate.operators.aggregation.frame import Frame
from headgate.operators.aggregation.over_aggregates import over_spec
from headgate.operators.timestamps import event_time
from headgate.state.ttl import TTL

S = TypeVar("S", bound=Records)

UNBOUNDED = "unbounded"


@dataclass(frozen=True, slots=True)
class OverOptions:
    """The arguments of ``over``."""

    range: Duration | None
    rows: int | str | None
    ttl: TTL | None
    late_output: str | None
    state: StateChoice | None


def over(keyed: Records, node: NodeName, aggregates: Sequence[pl.Expr], options: OverOptions, stream: type[S]) -> S:
    """Return the stream of the records of ``keyed`` with their aggregates.

    Raises:
        UsageError: see ``KeyedStream.over``.
    """
    where = operator_state(options.state)
    builder = keyed._pipeline._builder
    frame = _frame(node, options.range, options.rows)
    _ = keyed._edges  # refuses changes, which have no event time either
    if keyed._time_column is None:
        raise UsageError(
            f"operator '{node}': over needs event times, which order the records of a key; call "
            ".with_timestamps(column) before key_by and keep that column"
        )
    time = event_time(str(node), keyed._schema, keyed._time_column)
    late = late_tag(options.late_output)
    spec = over_spec(str(node), keyed._keys, keyed._schema, time, frame, aggregates, late=late, ttl=options.ttl)
    keyed._add(node, spec)
    builder.keep_state(node, where)
    result = stream(keyed._pipeline, (Edge(node),), spec.output, keyed._time_column)
    if late is not None:
        result._side_outputs = {str(late): stream(keyed._pipeline, (Edge(node, tag=late),), keyed._schema)}
    return result


def _frame(node: NodeName, range: Duration | None, rows: int | str | None) -> Frame:
    """Return the frame that was given.

    Raises:
        UsageError: none or two were given, or it is none.
    """
    if (range is None) == (rows is None):
        raise UsageError(
            f"operator '{node}': over needs range= or rows=, and not both: range='1h' for the records of the last "
            "hour, range='0s' for those of its very time, rows=10 for the record and the 10 before it, "
            "range='unbounded' for all so far"
        )
    if UNBOUNDED in (range, rows):
        return Frame(range is not None, None)
    if range is not None:
        range_ms = duration_ms(range, f"operator '{node}': range=")
        if range_ms < 0:
            raise UsageError(f"operator '{node}': range= must not be negative; give a duration such as '1h'")
        return Frame(True, range_ms)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise UsageError(
            f"operator '{node}': rows= is how many records before each one are in its frame, from 1 on, or "
            f"'{UNBOUNDED}', not {rows!r}"
        )
    return Frame(False, rows)
