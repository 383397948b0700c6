"""``iterate``: makes the head of a loop, calls the user's body, and ties what it feeds back to the head.

Structured by construction (docs/spec/loops.md): a body sees only the stream of its own loop, so loops nest and
stand side by side, and every cycle goes through a head. Counterpart: ``api.validation``, which refuses everything
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast

from headgate.api.streams.base_stream import Records
from headgate.api.validation import (
    check_feedback_once,
    check_feedback_place,
    check_feedback_schema,
    check_keys_of_feedback,
    head_spec,
)
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.keys import KeyCheckSpec
from headgate.operators.loop_head import LoopHeadSpec

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
    spec = head_spec(name, stream._schema, stream._keys, options.max_rounds, options.round_column, options.on_round)
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
    check_feedback_once(name, [(edge.upstream, edge.tag) for back in feedback for edge in back._edges])
    edges: tuple[Edge, ...] = ()
    for back in feedback:
        _check_pipeline(stream, name, "feedback", back)
        first = back._edges[0].upstream
        for edge in back._edges:
            check_feedback_place(builder.node(name), edge.upstream, builder.loops_of(edge.upstream))
        if back._keys:
            check_keys_of_feedback(name, spec.keys, first, back._keys)
        check_feedback_schema(name, spec, first, back._schema)
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
