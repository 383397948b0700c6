"""``iterate``: makes the head of a loop, calls the user's body, and ties what it feeds back to the head.

Structured by construction (docs/spec/loops.md): a body sees only the stream of its own loop, so loops nest and
stand side by side, and every cycle goes through a head. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast

import pyarrow as pa

from headgate.api.streams.base_stream import Records
from headgate.api.unsupported import refuse_operator_state, refuse_uncalled_methods
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import Edge, Node, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.keys import KeyCheckSpec
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.schemas import schema_text

_ROUND_COLUMN_DEFAULT = "round"
"""The round column if ``max_rounds`` or ``on_round`` need one and the user named none."""

Feedback: TypeAlias = Records | Sequence[Records]
"""What a body may feed back."""

Output = TypeVar("Output")
"""What a body gives out, and ``iterate`` returns: a stream or a tuple of streams."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The options of ``iterate``."""

    max_rounds: int | None
    round_column: str | None
    on_round: Callable[[int], object] | None
    name: str | None


def iterate(stream: Records, body: Callable[[Any], tuple[Feedback, Output]], options: LoopOptions) -> Output:
    """Add a loop after ``stream`` and return the outputs of its body.

    Raises:
        UsageError: an option, or what the body returned, is wrong. Nothing of the loop remains then.
    """
    if not callable(body):
        raise UsageError(f"iterate needs a function body(loop) that returns (feedback, output), not {body!r}")
    builder = stream._pipeline._builder
    name = builder.claim_name("iterate", options.name)
    spec = _head_spec(name, stream._schema, stream._keys, options.max_rounds, options.round_column, options.on_round)
    with builder.loop(name, stream._edges, spec):
        # Its records are where their keys belong; it has no event time (L37).
        feedback, output = _pair(name, body(stream._like((Edge(name),), spec.schema)))
        builder.feed_back(name, _feedback_edges(stream, name, spec, _streams(name, "feedback", feedback)))
        leaving = tuple(_leaving(stream, name, s) for s in _streams(name, "output", output))
    return cast(Output, leaving if isinstance(output, tuple) else leaving[0])


def _pair(name: NodeName, returned: object) -> tuple[object, object]:
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    what = f"{len(returned)} values" if isinstance(returned, tuple) else repr(returned)
    raise UsageError(f"loop '{name}': the body must return a pair (feedback, output), but returned {what}")


def _streams(name: NodeName, what: str, given: object) -> list[Records]:
    several = list(given) if isinstance(given, tuple) or (isinstance(given, list) and what == "feedback") else [given]
    for one in several:
        if not isinstance(one, Records):
            raise UsageError(f"loop '{name}': the {what} must be a stream or a tuple of streams, not {one!r}")
    return cast(list[Records], several)


def _feedback_edges(
    stream: Records, name: NodeName, spec: LoopHeadSpec, feedback: Sequence[Records]
) -> tuple[Edge, ...]:
    builder = stream._pipeline._builder
    _check_feedback_once(name, [(edge.upstream, edge.tag) for back in feedback for edge in back._edges])
    edges: tuple[Edge, ...] = ()
    for back in feedback:
        _check_pipeline(stream, name, "feedback", back)
        first = back._edges[0].upstream
        for edge in back._edges:
            _check_feedback_place(builder.node(name), edge.upstream, builder.loops_of(edge.upstream))
        if back._keys:
            _check_keys_of_feedback(name, spec.keys, first, back._keys)
        _check_feedback_schema(name, spec, first, back._schema)
        edges += _to_keys(back, name, spec.keys) if spec.keys else back._edges
    return edges


def _to_keys(back: Records, name: NodeName, keys: tuple[str, ...]) -> tuple[Edge, ...]:
    """Route feedback to the subtask of its key. A record without a key is a bad record, as in ``key_by``."""
    if back._keys:
        return tuple(replace(edge, partitioner=Partitioner.HASH, keys=keys) for edge in back._edges)
    builder = back._pipeline._builder
    check = builder.claim_name(f"{name}-feedback", None, name)
    builder.add(check, Role.OPERATOR, back._edges, KeyCheckSpec(keys), back._schema, refuses=True)
    return (Edge(check, Partitioner.HASH, keys),)


def _leaving(stream: Records, name: NodeName, output: Records) -> Records:
    """Return an output as it leaves the loop: without event time (L37)."""
    _check_pipeline(stream, name, "output", output)
    return output._like(output._edges, output._schema)


def _check_pipeline(stream: Records, name: NodeName, what: str, other: Records) -> None:
    if other._pipeline is not stream._pipeline:
        raise UsageError(
            f"loop '{name}' is in pipeline '{stream._pipeline.name}', but its {what} '{other._edges[0].upstream}' in "
            f"pipeline '{other._pipeline.name}'"
        )


def _head_spec(
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
    refuse_uncalled_methods(f"on_round of loop '{loop}'", on_round)
    refuse_operator_state(f"on_round of loop '{loop}'", on_round)
    if round_column is None and (max_rounds is not None or on_round is not None):
        round_column = _ROUND_COLUMN_DEFAULT
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


def _check_feedback_schema(loop: NodeName, spec: LoopHeadSpec, upstream: NodeName, schema: pa.Schema) -> None:
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


def _check_keys_of_feedback(
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


def _check_feedback_place(loop: Node, upstream: NodeName, loops: tuple[NodeName, ...]) -> None:
    """Check where a feedback stream comes from.

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


def _check_feedback_once(loop: NodeName, upstreams: Sequence[object]) -> None:
    """Check that no stream is fed back twice.

    Raises:
        UsageError
    """
    if not upstreams:
        raise UsageError(f"loop '{loop}': the body feeds nothing back; what needs no feedback needs no iterate")
    if len(set(upstreams)) != len(upstreams):
        raise UsageError(f"loop '{loop}': one stream is fed back twice; its records would be counted twice")
