"""Joins: ``left.join(right, on="id", within=("-10s", "5s"))``.

Adds an operator per side that handles null keys, or one that brings the rows of a broadcast table in one order
(docs/spec/broadcast-join.md), and the join, which has two inputs (docs/spec/joins.md). Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias, TypeGuard, TypeVar

import pyarrow as pa

from headgate.api.config import StateChoice, operator_state
from headgate.api.streams.base_stream import Records
from headgate.api.streams.changes import Changes
from headgate.api.streams.windowed_stream import Sliding, Tumbling, misses_results
from headgate.connectors.base import Source
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Duration, StateConfig, duration_ms
from headgate.model.graph import BROADCAST_INPUT, MAIN_INPUT, Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.changes import OP
from headgate.operators.joins.broadcast_join import HOWS as BROADCAST_HOWS
from headgate.operators.joins.broadcast_join import BroadcastJoinSpec, TableOrderSpec
from headgate.operators.joins.changing_join import ChangingJoinSpec
from headgate.operators.joins.join_plan import (
    HOWS,
    LEFT_INPUT,
    NULL_KEYS,
    RIGHT_INPUT,
    AsOf,
    Bound,
    Changing,
    How,
    Input,
    JoinInputSpec,
    JoinPlan,
    JoinSide,
    SameWindow,
    Unbounded,
    Within,
)
from headgate.operators.joins.stream_joins import StreamJoinSpec
from headgate.operators.schemas import schema_text
from headgate.operators.specs import output_schemas, state_text
from headgate.operators.timestamps import EventTime, event_time
from headgate.state.ttl import TTL

S = TypeVar("S", bound=Records)

On: TypeAlias = str | Sequence[str]
"""The names of one or several columns."""

UNSET: Any = object()
"""Stands for an argument that was not given, where None means something."""

_BOUNDS = (
    'within=("-10s", "5s") for rows that are near in time, window=headgate.Tumbling("10s") for rows of the same '
    'window, or ttl="1h" for how long each row waits for partners (ttl=None: for ever)'
)


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The arguments of ``join``."""

    on: On | None
    left_on: On | None
    right_on: On | None
    how: How
    within: tuple[Duration, Duration] | None
    window: object
    ttl: Any
    suffix: str
    wait: object
    name: str | None
    state: StateChoice | None


def joined(left: Records, right: object, options: JoinOptions, stream: type[S]) -> S:
    """Return the stream of ``left`` joined with ``right``.

    Raises:
        UsageError: see ``Stream.join``.
    """
    where = operator_state(options.state)
    builder = left._pipeline._builder
    node = builder.claim_name("join", options.name)
    if is_broadcast(right):
        return _with_table(node, left, right, options, stream)
    other = _other_side(node, left, right)
    if options.wait is not None:
        raise UsageError(
            f"operator '{node}': wait= is for a join with a table that every subtask keeps: table.broadcast()"
        )
    if options.how not in HOWS:
        raise UsageError(f"operator '{node}': how= must be one of {', '.join(HOWS)}, not {options.how!r}")
    keys = key_pairs(node, options.on, options.left_on, options.right_on)
    bound = _bound(node, options, (left, other))
    has_changes = left._changes is not None or other._changes is not None
    if isinstance(bound, Unbounded) and (has_changes or options.how in ("left", "right", "full", "anti")):
        inputs = [_input(node, side, columns) for side, columns in ((left, keys[0]), (other, keys[1]))]
        bound = Changing(bound.ttl, *inputs)
    return _added(node, left, other, keys, options.how, bound, options.suffix, where, stream)


def _input(node: NodeName, side: Records, keys: tuple[str, ...]) -> Input:
    """Return what the rows of a side are.

    Raises:
        UsageError: it has changes that the join cannot take.
    """
    if side._changes is None:
        return "records"
    if OP in keys:
        raise UsageError(f"operator '{node}': column 'op' says what changes, and cannot be a key")
    if side._changes.retractions:
        return "retractions"
    if set(side._changes.keys) == set(keys):  # by more columns an update may reach another row than the one it replaces
        return "upserts"
    upstream = side._all_edges[0].upstream
    raise UsageError(
        f"operator '{node}': the changes of '{upstream}' do not say which row they replace, so that only a join by "
        f"exactly their key ({', '.join(side._changes.keys)}) can take them; join by that, or give '{upstream}' "
        "retractions=True"
    )


def _changes_of(left: Records, other: Records, keys: list[tuple[str, ...]], how: str) -> Changes:
    """Return what is known of the results of a join that are changes.

    They keep the key of the left rows if each has one result at most, which one subtask makes for ever: a row with
    another join key goes at one subtask and comes at another one, in any order.
    """
    known = left._changes.keys if left._changes is not None else ()
    of_right = other._changes.keys if other._changes is not None else ()
    is_single = how in ("semi", "anti") or (how in ("inner", "left") and bool(of_right) and {*of_right} <= {*keys[1]})
    return Changes(known if is_single and {*keys[0]} <= {*known} else (), retractions=True)


def joined_as_of(
    left: Records,
    right: object,
    by: tuple[On | None, On | None, On | None],
    how: str,
    tolerance: Duration | None,
    suffix: str,
    name: str | None,
    state: StateChoice | None,
    stream: type[S],
) -> S:
    """Return each record of ``left`` with the latest one of ``right``; ``by``: the keys of both, of left, of right.

    Raises:
        UsageError: see ``Stream.join_asof``.
    """
    where = operator_state(state)
    node = left._pipeline._builder.claim_name("join-asof", name)
    other = _other_side(node, left, right)
    if how not in ("left", "inner"):
        raise UsageError(f"operator '{node}': how= of join_asof must be left or inner, not {how!r}")
    keys = key_pairs(node, *by, names=("by", "by_left", "by_right"))
    changed = other._change_keys
    if changed is not None and set(changed) != set(keys[1]):
        raise UsageError(
            f"operator '{node}': the right side has changes of rows with the key ({', '.join(changed)}), so join by "
            f"that, not by ({', '.join(keys[1])})"
        )
    tolerance_ms = None if tolerance is None else duration_ms(tolerance, f"operator '{node}': tolerance")
    bound = AsOf(tolerance_ms, changed is not None)
    return _added(node, left, other, keys, how, bound, suffix, where, stream)


def _added(
    node: NodeName,
    left: Records,
    other: Records,
    keys: list[tuple[str, ...]],
    how: str,
    bound: Bound,
    suffix: str,
    where: StateConfig | None,
    stream: type[S],
) -> S:
    """Add the operators of a join; return the stream of its results."""
    builder = left._pipeline._builder
    if not isinstance(suffix, str) or not suffix:
        raise UsageError(f"operator '{node}': suffix= must be text such as '_right', not {suffix!r}")
    sides = [
        JoinSide(side._schema, columns, None if isinstance(bound, Unbounded | Changing) else time_of(node, side, which))
        for side, columns, which in ((left, keys[0], "left"), (other, keys[1], "right"))
    ]
    made_of = ChangingJoinSpec if isinstance(bound, Changing) else StreamJoinSpec
    spec = made_of(JoinPlan(sides[0], sides[1], how, bound, suffix))
    output = output_schemas(spec, {LEFT_INPUT: left._schema, RIGHT_INPUT: other._schema}, str(node))
    edges, null_keys = [], []
    with builder.all_or_nothing():
        for side, name, columns in zip((left, other), (LEFT_INPUT, RIGHT_INPUT), spec.edge_keys, strict=True):
            before = JoinInputSpec(spec.plan, name)
            part = builder.claim_name(f"{node}-{name}", None, part_of=node)
            made = dict(output_schemas(before, {}, str(part)))
            outputs = {tag: schema for tag, schema in made.items() if tag == NULL_KEYS}
            main = next(schema for tag, schema in made.items() if tag != NULL_KEYS)
            takes_changes = isinstance(bound, Changing) or (isinstance(bound, AsOf) and side is other)
            upstream = side._all_edges if takes_changes else side._edges
            builder.add(part, Role.OPERATOR, upstream, before, main, side_outputs=outputs)
            edges.append(Edge(part, Partitioner.HASH, columns, input=name))
            null_keys += [Edge(part, tag=tag) for tag in outputs]
        schema = next(iter(output.values()))
        builder.add(node, Role.OPERATOR, tuple(edges), spec, schema, state_text=state_text(spec))
    builder.keep_state(node, where)
    changes = _changes_of(left, other, keys, how) if isinstance(bound, Changing) else None
    return stream(left._pipeline, (Edge(node), *null_keys), schema, spec.plan.time_column, (), changes)


def _with_table(node: NodeName, left: Records, table: Records, options: JoinOptions, stream: type[S]) -> S:
    if left._keys or table._pipeline is not left._pipeline:
        _other_side(node, left, table)
    has_bound = options.within is not None or options.window is not None or options.ttl is not UNSET
    if has_bound or options.state is not None:
        raise UsageError(
            f"operator '{node}': a broadcast table has the last row of each key, in memory, so leave within=, window=, "
            "ttl= and state= out; or leave broadcast() out to join two streams"
        )
    keys = key_pairs(node, options.on, options.left_on, options.right_on)
    return broadcast_joined(
        left, table, node, (keys[0], keys[1]), how=options.how, suffix=options.suffix, wait=options.wait, stream=stream
    )


def _other_side(node: NodeName, left: Records, right: object) -> Records:
    if not isinstance(right, Records):
        raise UsageError(f"operator '{node}': join takes a stream, not {type(right).__name__}")
    if right._keys or left._keys:
        raise UsageError(f"operator '{node}': join takes its key by on=; leave key_by out")
    if right._pipeline is not left._pipeline:
        raise UsageError(f"operator '{node}': join brings streams of one pipeline together; these belong to two")
    for side in (left, right):
        if any(edge.partitioner is Partitioner.BROADCAST for edge in side._all_edges):
            raise UsageError(
                f"operator '{node}': join sends each row where its key is, so leave broadcast() out; to have all rows "
                "of one side everywhere, broadcast the right one"
            )
    return right


def key_pairs(
    node: NodeName,
    on: On | None,
    left_on: On | None,
    right_on: On | None,
    names: tuple[str, str, str] = ("on", "left_on", "right_on"),
) -> list[tuple[str, ...]]:
    """Return the key columns of both sides.

    Raises:
        UsageError: they are missing, named twice, or not as many on each side.
    """
    if on is not None and (left_on is not None or right_on is not None):
        raise UsageError(f"operator '{node}': give either {names[0]}= or {names[1]}= and {names[2]}=")
    given = (left_on, right_on) if on is None else (on, on)
    if any(one is None or (isinstance(one, str | list | tuple) and not one) for one in given):
        raise UsageError(
            f"operator '{node}': join needs its key: {names[0]}='id', or {names[1]}='id' and {names[2]}='order_id'"
        )
    if any(not isinstance(one, str | list | tuple) for one in given):
        raise UsageError(f"operator '{node}': a join's keys are names of columns; compute a key with with_columns(...)")
    found = [(one,) if isinstance(one, str) else tuple(one) for one in given if one is not None]
    if any(not isinstance(column, str) for columns in found for column in columns):
        raise UsageError(f"operator '{node}': a join's keys are names of columns; compute a key with with_columns(...)")
    if len(found[0]) != len(found[1]):
        raise UsageError(
            f"operator '{node}': {names[1]}= has {len(found[0])} columns and {names[2]}= has {len(found[1])}; "
            "name as many"
        )
    return found


def _bound(node: NodeName, options: JoinOptions, sides: tuple[Records, Records]) -> Bound:
    given = [options.within is not None, options.window is not None, options.ttl is not UNSET]
    if sum(given) != 1:
        problem = "needs to know how long rows wait" if not any(given) else "takes only one bound"
        raise UsageError(f"operator '{node}': join {problem}: give {_BOUNDS}")
    if options.within is not None:
        return _within(node, options.within)
    if options.window is not None:
        if not isinstance(options.window, Tumbling | Sliding):
            raise UsageError(
                f"operator '{node}': window= must be a window such as headgate.Tumbling('10s') or "
                f"headgate.Sliding('10s', '2s'), not {options.window!r}"
            )
        window = options.window
        return SameWindow(window.aligned(), any(misses_results(side, window, lateness_ms=0) for side in sides))
    ttl = options.ttl
    return Unbounded(ttl if ttl is None or isinstance(ttl, TTL) else TTL(ttl))


def _within(node: NodeName, given: object) -> Within:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UsageError(
            f"operator '{node}': within= is the least and the greatest value of right time - left time, such as "
            f'("-10s", "5s"), not {given!r}'
        )
    lower_ms, upper_ms = (signed_ms(one, f"operator '{node}': a bound of within=") for one in given)
    if lower_ms > upper_ms:
        raise UsageError(f"operator '{node}': the first bound of within= must not be later than the second: {given!r}")
    return Within(lower_ms, upper_ms)


def signed_ms(value: Any, what: str) -> int:
    """Return a duration that may be negative, in milliseconds.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, str) and value.strip().startswith("-"):
        return -duration_ms(value.strip()[1:].strip(), what)
    if isinstance(value, timedelta) and value < timedelta():
        return -duration_ms(-value, what)
    return duration_ms(value, what)


def time_of(node: NodeName, side: Records, which: str) -> EventTime:
    """Return where the event time of a side is.

    Raises:
        UsageError: it has none.
    """
    if side._time_column is None:
        raise UsageError(
            f"operator '{node}': the {which} side of the join, '{side._all_edges[0].upstream}', has no event times; "
            "call .with_timestamps(column) before and keep that column"
        )
    return event_time(str(node), side._schema, side._time_column)


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
    if how not in BROADCAST_HOWS:
        raise UsageError(
            f"operator '{node}': how= of a join with a broadcast table must be one of {', '.join(BROADCAST_HOWS)}, "
            f"not {how!r}: every subtask has the whole table, so no one knows which of its rows found no partner"
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
