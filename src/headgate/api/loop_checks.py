"""What can be wrong with a loop, one sentence each. Called while the pipeline is written, at the line that is wrong.

Counterparts: ``api.loops`` makes loops, ``api.builder`` knows which nodes are in them. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa

from headgate.api.not_yet import refuse_lists, refuse_unheard
from headgate.errors import UsageError
from headgate.model.graph import Node
from headgate.model.ids import NodeName
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.process.by_batch import BatchProcessFunction, BatchProcessSpec
from headgate.operators.process.by_key import KeyFunctionSpec
from headgate.operators.process.by_row import ProcessSpec
from headgate.operators.process.functions import ProcessFunction
from headgate.operators.types import schema_text

ROUND_COLUMN_DEFAULT = "round"
"""Where ``max_rounds`` or ``on_round`` need rounds and the user named no column for them."""


def head_spec(
    loop: NodeName,
    schema: pa.Schema,
    keys: tuple[str, ...],
    max_rounds: int | None,
    round_column: str | None,
    on_round: Any,
) -> LoopHeadSpec:
    """Return the head of a loop over records of ``schema``.

    Raises:
        UsageError: a value is wrong, or the input has the round column already.
    """
    if max_rounds is not None and (isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1):
        raise UsageError(f"loop '{loop}': max_rounds must be an integer of at least 1, but is {max_rounds!r}")
    if on_round is not None and not callable(on_round):
        raise UsageError(f"loop '{loop}': on_round must be a function of the round's number, not {on_round!r}")
    refuse_unheard(f"on_round of loop '{loop}'", on_round)
    refuse_lists(f"on_round of loop '{loop}'", on_round)
    if round_column is None and (max_rounds is not None or on_round is not None):
        round_column = ROUND_COLUMN_DEFAULT
    if round_column is None:
        return LoopHeadSpec(keys, schema)
    if not isinstance(round_column, str) or not round_column:
        raise UsageError(f"loop '{loop}': round_column must be the name of a column, not {round_column!r}")
    if schema.get_field_index(round_column) >= 0:
        raise UsageError(
            f"loop '{loop}': its input already has a column '{round_column}'; name another one for the rounds with "
            f"round_column= (the columns are {schema_text(schema)})"
        )
    counted = schema.append(pa.field(round_column, pa.int64()))
    return LoopHeadSpec(keys, counted, round_column, max_rounds, on_round)


def check_feedback_schema(loop: NodeName, spec: LoopHeadSpec, upstream: NodeName, schema: pa.Schema) -> None:
    """Check that what comes back looks like what went in.

    Raises:
        UsageError: naming the first column that differs.
    """
    if schema.equals(spec.schema):
        return
    raise UsageError(
        f"loop '{loop}': the feedback '{upstream}' must have the columns of the loop stream, but "
        f"{_difference(spec, schema)} (the loop has {schema_text(spec.schema)}; the feedback has {schema_text(schema)})"
    )


def _difference(spec: LoopHeadSpec, schema: pa.Schema) -> str:
    for field in spec.schema:
        if schema.get_field_index(field.name) < 0:
            if field.name == spec.round_column:
                return f"the round column '{field.name}' is missing; pass it on through the body"
            return f"column '{field.name}' is missing"
        found = schema.field(field.name).type
        if not found.equals(field.type):
            return f"column '{field.name}' is {found} instead of {field.type}"
    for name in schema.names:
        if spec.schema.get_field_index(name) < 0:
            return f"column '{name}' is new; leave it out with .select(...)"
    names = ", ".join(f"'{name}'" for name in spec.schema.names)
    return f"its columns are in another order; end it with .select({names})"


def check_keys_of_feedback(
    loop: NodeName, keys: tuple[str, ...], upstream: NodeName, feedback_keys: tuple[str, ...]
) -> None:
    """Check the key of a feedback stream that has one.

    Raises:
        UsageError: it is not the loop's.
    """
    if not keys:
        raise UsageError(
            f"loop '{loop}' has no key, but its feedback '{upstream}' is keyed by {', '.join(feedback_keys)}; call "
            "key_by before iterate for a loop by key, or feed back the stream as it is before key_by"
        )
    if feedback_keys != keys:
        raise UsageError(
            f"loop '{loop}' is keyed by {', '.join(keys)}, but its feedback '{upstream}' by "
            f"{', '.join(feedback_keys)}; feed back the stream as it is before key_by, the loop brings it to its key"
        )


def check_feedback_place(loop: Node, upstream: NodeName, loops: tuple[NodeName, ...]) -> None:
    """Check where a feedback stream comes from (L31).

    Raises:
        UsageError: from outside the loop, from the loop stream itself, or out of the reach of probes.
    """
    spec = cast(LoopHeadSpec, loop.spec)
    if loop.name not in loops:
        raise UsageError(
            f"loop '{loop.name}': the feedback '{upstream}' does not come from the loop; make it in the body, out of "
            "the stream that the body is given"
        )
    if upstream == loop.name and spec.max_rounds is None:
        raise UsageError(
            f"loop '{loop.name}' feeds back its own stream as it is, so every record would circulate for ever; feed "
            "back what still has to be done, such as loop.filter(...), or set max_rounds="
        )
    around = [name for name in loops[: loops.index(loop.name)] if name not in loop.loops]
    if around:  # L33: an inner head gets its probes from the loop around it
        raise UsageError(
            f"loop '{loop.name}': the feedback '{upstream}' also comes from loop '{around[0]}' around it, while the "
            f"loop begins with records from outside of it; unite those with a stream of '{around[0]}' before iterate"
        )


def check_feedback_once(loop: NodeName, upstreams: Sequence[object]) -> None:
    """Check that no stream is fed back twice.

    Raises:
        UsageError
    """
    if not upstreams:
        raise UsageError(f"loop '{loop}': the body feeds nothing back; what needs no feedback needs no iterate")
    if len(set(upstreams)) != len(upstreams):
        raise UsageError(f"loop '{loop}': one stream is fed back twice; its records would be counted twice")


def check_listener(node: NodeName, spec: object, loops: tuple[NodeName, ...], has_rounds: bool) -> None:
    """Check that an operator or a head in ``loops`` that wants to hear of finished rounds can be told.

    Raises:
        UsageError: it is in no loop, rounds are not counted, or it is in an inner loop; or it has timers in a loop.
    """
    if loops and isinstance(spec, ProcessSpec | BatchProcessSpec | KeyFunctionSpec) and spec.has_timers:
        has = "a time mode, so it has timers" if isinstance(spec, KeyFunctionSpec) else "on_timer"
        raise UsageError(
            f"operator '{node}' has {has}, but is in loop '{loops[-1]}', which has ended when nothing goes round "
            "any more, so a timer may not send anything into it; use it before the loop or after it"
        )  # TM11
    if not _listens(spec):
        return
    if not loops:
        raise UsageError(
            f"operator '{node}' has on_round, but is in no loop, so it would never be called; use it in the body of an "
            "iterate, or take on_round out"
        )
    if len(loops) > 1:
        raise UsageError(
            f"operator '{node}' has on_round, but loop '{loops[-1]}' is inside loop '{loops[0]}', and a round "
            "finishes for all only in an outermost loop; move on_round there"
        )
    if not has_rounds:
        raise UsageError(
            f"operator '{node}' has on_round, but loop '{loops[0]}' does not count rounds; give its iterate a "
            "round_column="
        )


def _listens(spec: object) -> bool:
    """Whether ``spec`` is a loop's with a callback, or holds a process function that overrides ``on_round``."""
    if isinstance(spec, LoopHeadSpec):
        return spec.on_round is not None
    if isinstance(spec, ProcessSpec):
        return type(spec.function).on_round is not ProcessFunction.on_round
    return isinstance(spec, BatchProcessSpec) and type(spec.function).on_round is not BatchProcessFunction.on_round
