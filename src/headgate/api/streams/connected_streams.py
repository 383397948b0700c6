"""Two streams for one function: a broadcast one beside another, or two keyed ones.

With a broadcast stream, two operators are added: one that brings its records in one order, and the function, which has
two inputs (docs/spec/broadcast.md). In the body of a loop the first one is where its records are: in the loop, or in
front of it. Two keyed streams are two inputs of the function, each partitioned by its key. Nothing runs here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from headgate.api.config import StateChoice, operator_state
from headgate.api.streams.base_stream import Records
from headgate.api.unsupported import refuse_foreign_methods
from headgate.errors import UsageError
from headgate.model.config import StateConfig
from headgate.model.graph import BROADCAST_INPUT, MAIN_INPUT, Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.process.connected_process import (
    RIGHT_INPUT,
    BatchBroadcastProcessFunction,
    BatchCoProcessFunction,
    BroadcastOrderSpec,
    BroadcastProcessFunction,
    CoProcessFunction,
    broadcast_spec,
    co_process_spec,
)

S = TypeVar("S", bound=Records)


class ConnectedStreams(Generic[S]):
    """A stream connected with a broadcast stream, which every subtask receives, or two keyed streams.

    Two keyed streams share state and timers of each key.
    """

    def __init__(self, main: Records, side: Records, stream: type[S]) -> None:
        """For ``connect`` only."""
        self._main = main
        self._side = side
        self._stream = stream

    def __repr__(self) -> str:
        return f"ConnectedStreams({self._main!r}, {self._side!r})"

    def process(
        self,
        function: BroadcastProcessFunction | BatchBroadcastProcessFunction | CoProcessFunction | BatchCoProcessFunction,
        *,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> S:
        """Process the records of both sides.

        Args:
            function: an instance of ``BroadcastProcessFunction``, which is called per record, or of
                ``BatchBroadcastProcessFunction``, which is called per batch. For two keyed streams: of
                ``CoProcessFunction`` or ``BatchCoProcessFunction``. Its ``schema`` describes the results (default: the
                schema of the stream of which ``connect`` was called).
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
        if self._side._keys:
            return self._of_two_keys(node, function, where)
        spec = broadcast_spec(str(node), main._keys, function, main._schema)
        inputs = {MAIN_INPUT: main._schema, BROADCAST_INPUT: self._side._schema}
        with builder.all_or_nothing():
            edges = (*main._edges, self._ordered(node, by_row=isinstance(function, BroadcastProcessFunction)))
            main._add_with_inputs(node, spec, edges, inputs, refuses=True)
        builder.keep_state(node, where)
        return main._result(node, self._stream)

    def _of_two_keys(self, node: NodeName, function: object, where: StateConfig | None) -> S:
        left, right = self._main, self._side
        spec = co_process_spec(str(node), left._keys, right._keys, function, left._schema)
        inputs = {MAIN_INPUT: left._schema, RIGHT_INPUT: right._schema}
        edges = (*left._edges, *(replace(edge, input=RIGHT_INPUT) for edge in right._edges))
        left._add_with_inputs(node, spec, edges, inputs, refuses=True)
        left._pipeline._builder.keep_state(node, where)
        result = left._result(node, self._stream)
        has_both = left._time_column is not None and right._time_column is not None
        streams: list[Records] = [result, *result._side_outputs.values()]
        for stream in streams:  # the watermark is the lower one of both
            stream._time_column = (stream._time_column or right._time_column_in(stream._schema)) if has_both else None
        return result

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
        UsageError: ``side`` is no broadcast stream, nor a keyed one for a keyed one, or is of another pipeline.
    """
    if not isinstance(side, Records):
        raise UsageError(
            "connect takes a broadcast stream, such as rules.broadcast(), or a stream with a key, not "
            f"{type(side).__name__}"
        )
    if bool(side._keys) != bool(main._keys) and side._keys:
        raise UsageError(
            "connect brings two keyed streams together; call key_by(...) on this one as well, or broadcast() on the "
            "other one instead of key_by"
        )
    if not side._keys and any(edge.partitioner is not Partitioner.BROADCAST for edge in side._edges):
        raise UsageError(
            "connect takes a broadcast stream: stream.connect(rules.broadcast()); or call key_by(...) on both streams "
            "for a headgate.CoProcessFunction, whose state belongs to a key"
        )
    if side._pipeline is not main._pipeline:
        raise UsageError("connect brings streams of one pipeline together; these belong to two")
    if any(edge.partitioner is Partitioner.BROADCAST for edge in main._edges):
        raise UsageError(
            "both sides of connect are broadcast, but a record of the other one must come to one subtask; take "
            ".broadcast() from it"
        )
    return ConnectedStreams(main, side, stream)
