"""Join with a broadcast table: ``events.join(table.broadcast(), on="id")``.

Adds an operator that brings the rows of the table in one order, and the join, which has two inputs
(docs/spec/broadcast-join.md). Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard, TypeVar

import pyarrow as pa

from headgate.api.streams.base_stream import Records
from headgate.connectors.base import Source
from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN_INPUT, Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.joins.broadcast_join import HOWS, BroadcastJoinSpec, TableOrderSpec
from headgate.operators.schemas import schema_text

S = TypeVar("S", bound=Records)


def is_broadcast(side: object) -> TypeGuard[Records]:
    """Whether ``side`` is a stream on which ``broadcast`` was called."""
    return isinstance(side, Records) and all(edge.partitioner is Partitioner.BROADCAST for edge in side._all_edges)


def broadcast_joined(
    left: Records,
    table: Records,
    node: NodeName,
    keys: tuple[Sequence[str], Sequence[str]],
    *,
    how: str,
    suffix: str,
    wait: object,
    stream: type[S],
) -> S:
    """Return the stream of ``left`` joined with the broadcast ``table``.

    Raises:
        UsageError: see ``Stream.join``.
    """
    builder = left._pipeline._builder
    if not isinstance(suffix, str) or not suffix:
        raise UsageError(f"operator '{node}': suffix= must be text such as '_right', not {suffix!r}")
    if how not in HOWS:
        raise UsageError(
            f"operator '{node}': how= of a join with a broadcast table must be one of {', '.join(HOWS)}, not {how!r}: "
            "every subtask has the whole table, so no one knows which of its rows found no partner"
        )
    if any(edge.partitioner is Partitioner.BROADCAST for edge in left._edges):
        raise UsageError(f"operator '{node}': both sides of the join are broadcast; take .broadcast() from the stream")
    has_changes = table._changes is not None
    if table._changes is not None and set(table._changes.keys) != set(keys[1]):
        rows = ", ".join(f"'{key}'" for key in table._changes.keys) or "no known keys"
        raise UsageError(
            f"operator '{node}': the table has changes of rows by {rows}, so join it by exactly these columns; its "
            "last row of another key could not be told when a row is deleted"
        )
    spec = BroadcastJoinSpec(
        left._schema,
        table._schema,
        tuple(keys[0]),
        tuple(keys[1]),
        how,
        suffix,
        _waits(node, left, table, wait),
        has_changes,
    )
    inputs: dict[str, pa.Schema] = {MAIN_INPUT: left._schema, BROADCAST_INPUT: table._schema}
    spec.output_schemas(inputs, str(node))  # type: ignore[arg-type]
    with builder.all_or_nothing():
        ordering = builder.claim_name(f"{node}-table", None, part_of=node)
        edges = tuple(replace(edge, partitioner=Partitioner.FIRST) for edge in table._all_edges)
        order = TableOrderSpec(is_timed=False, by_row=False, keys=spec.right_keys, schema=table._schema)
        builder.add(ordering, Role.OPERATOR, edges, order, table._schema)
        to_join = Edge(ordering, Partitioner.BROADCAST, input=BROADCAST_INPUT)
        left._add_with_inputs(node, spec, (*left._edges, to_join), inputs)  # type: ignore[arg-type]
    return left._result(node, stream)


def _waits(node: NodeName, left: Records, table: Records, wait: object) -> bool:
    """Return whether records wait for the end of the table.

    Raises:
        UsageError: they shall, and it has no end.
    """
    if wait is not None and not isinstance(wait, bool):
        raise UsageError(f"operator '{node}': wait= must be True, False or None, not {wait!r}")
    if wait is False:
        return False
    builder = left._pipeline._builder
    names = [edge.upstream for edge in table._all_edges]
    endless = [
        str(one.name)
        for one in builder.upstream_of(names).nodes
        if one.role is Role.SOURCE and isinstance(one.spec, Source) and one.spec.how_to_end() is not None
    ]
    in_loop = [name for name in names if builder.loops_of(name)]
    if wait and (endless or in_loop):
        why = f"its source '{endless[0]}' never ends" if endless else f"'{in_loop[0]}' is in a loop"
        raise UsageError(
            f"operator '{node}': with wait=True records wait until the table has been read to its end, but {why} "
            f"(the table has {schema_text(table._schema)}); leave wait out, so that they see the table as it is"
        )
    return not endless and not in_loop
