"""A stream with a broadcast one beside it: ``stream.connect(rules.broadcast()).process(function)``.

Adds two operators: one that brings the records of the broadcast side in one order, and the function, which has two
inputs (docs/spec/broadcast.md). In the body of a loop the first one is where its records are: in the loop, or in front
of it. Nothing runs here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from headgate.api.base_stream import Records
from headgate.api.config import StateChoice, operator_state
from headgate.api.unsupported import refuse_foreign_methods
from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN, MAIN_INPUT, Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators import catalog
from headgate.operators.process.broadcast_process import (
    BatchBroadcastProcessFunction,
    BroadcastOrderSpec,
    BroadcastProcessFunction,
)

S = TypeVar("S", bound=Records)


class ConnectedStreams(Generic[S]):
    """A stream, keyed or not, connected with a broadcast stream. Every subtask receives all broadcast records."""

    def __init__(self, main: Records, side: Records, stream: type[S]) -> None:
        """For ``connect`` only."""
        self._main = main
        self._side = side
        self._stream = stream

    def __repr__(self) -> str:
        return f"ConnectedStreams({self._main!r}, {self._side!r})"

    def process(
        self,
        function: BroadcastProcessFunction | BatchBroadcastProcessFunction,
        *,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> S:
        """Process the records of both sides.

        Args:
            function: an instance of ``BroadcastProcessFunction``, which is called per record, or of
                ``BatchBroadcastProcessFunction``, which is called per batch. Its ``schema`` describes the results
                (default: the schema of the stream that is not broadcast).
            name: name of the operator.
            state: where keyed state and timers are kept, if not in the state backend of the pipeline. Broadcast state
                is always in memory.

        Raises:
            UsageError: ``function`` is not such an instance, or declares its state wrongly.
        """
        builder, main = self._main._pipeline._builder, self._main
        where = operator_state(state)
        node = builder.claim_name("process", name)
        refuse_foreign_methods(str(node), function)
        spec = catalog.broadcast_spec(str(node), main._keys, function, main._schema)
        inputs = {MAIN_INPUT: main._schema, BROADCAST_INPUT: self._side._schema}
        made = catalog.output_schemas(spec, inputs, str(node))[MAIN]
        text, rules = catalog.state_text(spec, str(node)), catalog.state_rules(spec, str(node))
        with builder.all_or_nothing():
            edges = (*main._edges, self._ordered(node, by_row=isinstance(function, BroadcastProcessFunction)))
            builder.add(node, Role.OPERATOR, edges, spec, made, state_text=text, state_rules=rules, refuses=True)
        builder.keep_state(node, where)
        return self._stream(main._pipeline, (Edge(node),), made, main._time_column_in(made))

    def _ordered(self, node: NodeName, *, by_row: bool) -> Edge:
        """Add the operator that puts the records of the broadcast side in one order; return the edge from it."""
        side, builder = self._side, self._side._pipeline._builder
        ordering = builder.claim_name(f"{node}-broadcast", None, part_of=node)
        edges = tuple(replace(edge, partitioner=Partitioner.FIRST) for edge in side._edges)
        spec = BroadcastOrderSpec(side._time_column is not None, by_row)
        builder.add(ordering, Role.OPERATOR, edges, spec, side._schema, refuses=by_row)
        return Edge(ordering, Partitioner.BROADCAST, input=BROADCAST_INPUT)


def connected(main: Records, side: object, stream: type[S]) -> ConnectedStreams[S]:
    """Return ``main`` with ``side`` beside it.

    Raises:
        UsageError: ``side`` is no broadcast stream, or is of another pipeline.
    """
    if not isinstance(side, Records):
        raise UsageError(f"connect takes a broadcast stream, such as rules.broadcast(), not {type(side).__name__}")
    if any(edge.partitioner is not Partitioner.BROADCAST for edge in side._edges):
        raise UsageError(
            "connect takes a broadcast stream: stream.connect(rules.broadcast()); functions of two streams of which "
            "none is broadcast are not there yet; union them with a column that tells them apart, and keep state in a "
            "headgate.ProcessFunction"
        )
    if side._pipeline is not main._pipeline:
        raise UsageError("connect brings streams of one pipeline together; these belong to two")
    if any(edge.partitioner is Partitioner.BROADCAST for edge in main._edges):
        raise UsageError(
            "both sides of connect are broadcast, but a record of the other one must come to one subtask; take "
            ".broadcast() from it"
        )
    return ConnectedStreams(main, side, stream)
