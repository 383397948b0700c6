"""Collects the nodes of a pipeline while the user writes it, and checks each at once.

Never runs anything. The verbs of streams add nodes; ``headgate.api.pipeline`` takes the finished graph, and has its
sources read the columns that are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace

import pyarrow as pa

from headgate.api.validation import check_listener
from headgate.connectors.base import Sink, Source
from headgate.dataclass import dataclass
from headgate.display.progress import in_notebook
from headgate.errors import UsageError
from headgate.model.config import StateConfig
from headgate.model.graph import BAD_RECORDS, MAIN, Edge, Graph, Node, OutputTag, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.model.schema_evolution import NO_OPERATOR_RULES, OperatorRules
from headgate.operators import user_functions
from headgate.operators.async_map import AsyncMapSpec
from headgate.operators.functions import RowFunctionSpec
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.schemas import canonical_schema, schema_text
from headgate.operators.specs import ColumnsSpec, PartitionedSpec, output_schema

BAD_RECORDS_NODE = NodeName("bad-records")
"""The implicit sink of diverted records."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it may name a ``what``: it becomes part of paths and of transaction ids.

    Raises:
        UsageError
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{what} must be named with 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit, "
            f"not {name!r}"
        )
    return name


@dataclass(slots=True)
class GraphBuilder:
    """The graph of a pipeline while it is written: nodes in topological order, as they were added.

    Attributes:
        outputs: schema of every output of each node (of a sink: what it receives, as its main output). Nodes that may
            hand over bad records have an output ``BAD_RECORDS``.
        open_loops: the loops that are being defined right now, outermost first.
        explored: nodes that ``collect`` or a similar call reads: nothing else needs to read them.
        derived: nodes without a name from the user.
        states: the state configuration of nodes that have one of their own.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: dict[NodeName, dict[OutputTag, pa.Schema]] = field(default_factory=dict)
    open_loops: list[NodeName] = field(default_factory=list)
    explored: set[NodeName] = field(default_factory=set)
    derived: set[NodeName] = field(default_factory=set)
    states: dict[NodeName, StateConfig] = field(default_factory=dict)

    def node(self, name: NodeName) -> Node:
        """Return the node called ``name`` (it must exist)."""
        return next(node for node in self.nodes if node.name == name)

    def loops_of(self, name: NodeName) -> tuple[NodeName, ...]:
        """Return the loops that node ``name`` is in, outermost first."""
        return next((node.loops for node in self.nodes if node.name == name), ())

    def keep_state(self, name: NodeName, state: StateConfig | None) -> None:
        """Set the state configuration of node ``name``; None: that of the pipeline."""
        if state is not None:
            self.states[name] = state

    def claim_name(self, kind: str, name: str | None, part_of: NodeName | None = None) -> NodeName:
        """Return the name of a new node: ``name``, or ``kind``, ``kind-2``, … in order of appearance.

        Derived names depend only on the operators before, so that a rerun of the same program finds its state. One that
        is ``part_of`` a node with a name of its own counts as named.

        Raises:
            UsageError: it is taken, reserved, or not a name.
        """
        taken = {str(node.name) for node in self.nodes} | {str(BAD_RECORDS_NODE)}
        if name is None:
            number = 1
            while (derived := kind if number == 1 else f"{kind}-{number}") in taken:
                number += 1
            if part_of is None or part_of in self.derived:
                self.derived.add(NodeName(derived))
            return NodeName(derived)
        check_name(name, "an operator")
        if name == BAD_RECORDS_NODE:
            raise UsageError(f"the name '{name}' is reserved for the sink of diverted records; choose another name=")
        if name in taken:
            raise UsageError(f"two operators are named '{name}'; give one of them another name={_again()}")
        return NodeName(name)

    def add(
        self,
        name: NodeName,
        role: Role,
        edges: tuple[Edge, ...],
        spec: object,
        schema: pa.Schema,
        *,
        state_text: str = "",
        state_rules: OperatorRules = NO_OPERATOR_RULES,
        refuses: bool = False,
        side_outputs: Mapping[OutputTag, pa.Schema] | None = None,
        rate_limit: float | None = None,
    ) -> NodeName:
        """Add a node and return its name.

        The node belongs to those loops being defined from which it gets records.

        Args:
            name: from ``claim_name``.
            role: what kind of node it is.
            edges: its inputs.
            spec: its configuration.
            schema: the schema of its main output.
            state_text: identifies its state.
            state_rules: how its state may change between two versions of a program.
            refuses: it may divert bad records, to the side output ``BAD_RECORDS``.
            side_outputs: schemas of its other side outputs, to which it sends with ``Output.emit_to``.
            rate_limit: of a source, in records per second.

        Raises:
            UsageError: it has ``on_round``, which would never be called; or a side output has a wrong name.
        """
        for tag in side_outputs or {}:
            check_name(tag, f"a side output of operator '{name}'")
        reserved = {MAIN, BAD_RECORDS} & (side_outputs or {}).keys()
        assert not reserved, f"side outputs of '{name}' have reserved tags: {reserved}"
        unknown = [edge for edge in edges if edge.tag not in self.outputs[edge.upstream]]
        assert not unknown, f"'{name}' reads outputs that do not exist: {unknown}"
        # with its own name: the head of a loop is in that loop
        entered = {loop for edge in edges for loop in self.loops_of(edge.upstream)} | {name}
        loops = tuple(loop for loop in self.open_loops if loop in entered)
        node = Node(
            name,
            role,
            edges,
            spec,
            schema_text(schema),
            state_text,
            loops=loops,
            state_rules=state_rules,
            rate_limit=rate_limit,
        )
        check_listener(name, spec, loops, has_rounds=self._counts_rounds(node))
        self.nodes.append(node)
        self.outputs[name] = {MAIN: schema, **(side_outputs or {})}
        if refuses:
            self.outputs[name][BAD_RECORDS] = canonical_schema(user_functions.BAD_RECORD_SCHEMA)
        return name

    @contextmanager
    def loop(self, name: NodeName, edges: tuple[Edge, ...], spec: LoopHeadSpec) -> Iterator[None]:
        """Add the head of a loop; the body is defined within the context. If that fails, nothing of the loop remains.

        Afterwards: the body must have called ``feed_back``.
        """
        self.open_loops.append(name)
        try:
            with self.all_or_nothing():
                self.add(name, Role.LOOP_HEAD, edges, spec, spec.schema, state_text=spec.state_text())
                yield
        finally:
            self.open_loops.pop()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Add several nodes; if that fails, none of them remains."""
        before = len(self.nodes)
        try:
            yield
        except BaseException:
            self._forget({node.name for node in self.nodes[before:]})
            raise

    def feed_back(self, name: NodeName, edges: tuple[Edge, ...]) -> None:
        """Connect the feedback ``edges`` to the loop head ``name``."""
        assert self.node(name).role is Role.LOOP_HEAD, f"'{name}' is no loop head"
        assert not self.node(name).feedback, f"loop '{name}' is closed twice"
        self.nodes = [replace(node, feedback=edges) if node.name == name else node for node in self.nodes]

    def finished(
        self, dead_letters: Sink | None, diverts_exceptions: bool = False
    ) -> tuple[Graph, dict[NodeName, dict[OutputTag, pa.Schema]]]:
        """Return the graph, with the sink of diverted records if there is one, and the schemas of every node.

        ``diverts_exceptions``: records for which a function on rows raises are diverted, too.

        Raises:
            UsageError: the pipeline is empty, has no sink, has a stream that leads nowhere, or the body of a loop is
                being written.
        """
        self._check()
        sinks = [node.name for node in self.nodes if node.role is Role.SINK]
        # what only collect() or show() has read does not run here
        needed = self.upstream_of(sinks) if self.explored else self
        nodes, outputs = list(needed.nodes), dict(needed.outputs)
        refusing = [name for name, schemas in outputs.items() if BAD_RECORDS in schemas]
        if dead_letters is not None and refusing:
            edges = tuple(Edge(name, Partitioner.FORWARD, (), BAD_RECORDS) for name in refusing)
            schema = outputs[refusing[0]][BAD_RECORDS]
            nodes.append(Node(BAD_RECORDS_NODE, Role.SINK, edges, dead_letters, schema_text(schema)))
            outputs[BAD_RECORDS_NODE] = {MAIN: schema}
        if diverts_exceptions:
            nodes = [_diverting(node) for node in nodes]
        return Graph(tuple(nodes)), outputs

    def upstream_of(self, names: Iterable[NodeName]) -> GraphBuilder:
        """Return a builder of the nodes ``names`` and of what they need, in the same order."""
        needed: set[NodeName] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                node = self.node(name)
                waiting += [edge.upstream for edge in node.inputs + node.feedback]
        nodes = [node for node in self.nodes if node.name in needed]
        outputs = {node.name: self.outputs[node.name] for node in nodes}
        states = {name: state for name, state in self.states.items() if name in needed}
        return GraphBuilder(nodes, outputs, derived=self.derived & needed, states=states)

    def leave_hooks_out(self) -> None:
        """Remove the hooks that sources bring along."""
        self.nodes = [
            replace(node, spec=node.spec.without_hook()) if isinstance(node.spec, Source) else node
            for node in self.nodes
        ]

    def _counts_rounds(self, node: Node) -> bool:
        spec = node.spec if node.role is Role.LOOP_HEAD else self.node(node.loops[0]).spec if node.loops else None
        return isinstance(spec, LoopHeadSpec) and spec.round_column is not None

    def _forget(self, names: set[NodeName]) -> None:
        self.nodes = [node for node in self.nodes if node.name not in names]
        self.outputs = {name: schemas for name, schemas in self.outputs.items() if name not in names}

    def refuse_in_loop_body(self) -> None:
        """Refuse to run while the body of a loop is being written.

        Raises:
            UsageError
        """
        if self.open_loops:
            raise UsageError(
                f"the body of loop '{self.open_loops[-1]}' is still being written; return the stream as output of the "
                "loop, and run or describe the pipeline after that"
            )

    def _check(self) -> None:
        self.refuse_in_loop_body()
        if not self.nodes:
            raise UsageError("the pipeline is empty; begin with .source(...) and end with .sink(...)")
        if not any(node.role is Role.SINK for node in self.nodes):
            raise UsageError("the pipeline has no sink; end at least one stream with .sink(...)")
        read = {edge.upstream for node in self.nodes for edge in node.inputs + node.feedback}
        for node in self.nodes:
            if node.role is not Role.SINK and node.name not in read | self.explored:
                raise UsageError(
                    f"nothing reads the stream of operator '{node.name}'; end it with .sink(...) or remove it{_again()}"
                )


def _again() -> str:
    """Return what a notebook's user may have done: a cell that is run again adds its operators again."""
    return "; in a notebook, begin again with the cell that makes the Pipeline" if in_notebook() else ""


def _diverting(node: Node) -> Node:
    """Return ``node``; one that calls a function on rows diverts its exceptions."""
    if not isinstance(node.spec, RowFunctionSpec | AsyncMapSpec):
        return node
    return replace(node, spec=replace(node.spec, diverts_exceptions=True))


Outputs = dict[NodeName, dict[OutputTag, pa.Schema]]


def read_used_columns(graph: Graph, outputs: Outputs) -> tuple[Graph, Outputs]:
    """Return the graph with sources that read what is used, and the schemas that follow from that.

    What an operator reads is known where it is chained to a source and says so (``ColumnsSpec``). Every other
    one reads all columns. Behind an exchange all are kept: an older program's records may come out of a checkpoint.
    Not for pipelines that divert bad records: these are diverted whole, and every value is looked at.
    """
    used = _used(graph)
    nodes: list[Node] = []
    found = dict(outputs)
    narrowed: set[NodeName] = set()
    for node in graph.nodes:
        columns = used[node.name]
        if isinstance(node.spec, Source):
            if columns:
                node = _narrow_source(node, found, columns, narrowed)
        elif len(node.inputs) == 1 and node.inputs[0].upstream in narrowed and columns is not None:
            schema = output_schema(node.spec, found[node.inputs[0].upstream][MAIN], str(node.name))  # type: ignore[arg-type]
            if schema != found[node.name][MAIN]:
                found[node.name] = found[node.name] | {MAIN: schema}
                node = replace(node, schema_text=schema_text(schema))
                narrowed.add(node.name)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), found


def leave_out_shuffles(graph: Graph) -> Graph:
    """Return the graph without shuffles of records that are in the subtask of their key already.

    They come from a join, or another operator by key (``PartitionedSpec``), with nothing but operators in
    between that keep the columns of the key.
    """
    keys_of: dict[NodeName, tuple[str, ...] | None] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        edge = node.inputs[0] if len(node.inputs) == 1 and not node.feedback else None
        before = None if edge is None or edge.tag != MAIN else keys_of[edge.upstream]
        if edge is not None and edge.partitioner is Partitioner.HASH:
            is_there = before == edge.keys and node.role is Role.OPERATOR
            if is_there and graph.node(edge.upstream).loops == node.loops:
                node = replace(node, inputs=(replace(edge, partitioner=Partitioner.FORWARD, keys=()),))
        elif edge is None or edge.partitioner is not Partitioner.FORWARD:
            before = None
        if isinstance(node.spec, PartitionedSpec):
            keys_of[node.name] = node.spec.keys_after(before)
        else:
            keys_of[node.name] = None
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _narrow_source(node: Node, found: Outputs, columns: frozenset[str], narrowed: set[NodeName]) -> Node:
    schema = found[node.name][MAIN]
    assert isinstance(node.spec, Source)
    projected = node.spec.project([name for name in schema.names if name in columns])
    if projected is None:
        return node
    source, schema = projected
    found[node.name] = found[node.name] | {MAIN: schema}
    narrowed.add(node.name)
    return replace(node, spec=source, schema_text=schema_text(schema))


def _used(graph: Graph) -> Mapping[NodeName, frozenset[str] | None]:
    """Return which columns of the main output of each node are used; None: all of them."""
    used: dict[NodeName, frozenset[str] | None] = {node.name: frozenset() for node in graph.nodes}
    for node in reversed(graph.nodes):
        wanted = used[node.name]
        is_chained = len(node.inputs) == 1 and node.inputs[0].partitioner is Partitioner.FORWARD and not node.feedback
        reads: frozenset[str] | None = None
        if is_chained and isinstance(node.spec, ColumnsSpec):
            reads = node.spec.columns_read(wanted)
        for edge in (*node.inputs, *node.feedback):
            before = used[edge.upstream]
            if edge.tag == BAD_RECORDS:
                continue
            used[edge.upstream] = None if reads is None or before is None or edge.tag != MAIN else before | reads
    return used
