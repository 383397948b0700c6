"""The physical plan (chains of nodes, edges between them, channels), and the whole definition of a pipeline.

Chaining (docs/spec/plan.md): a node joins the vertex of its upstream when it has exactly one input and that is
forwarded, so that its records need no channel. ``PipelineDefinition`` is made by ``headgate.api`` and read by
``headgate.spark``, ``headgate.testing`` and the simulator.
"""

from __future__ import annotations

from dataclasses import field

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import PipelineConfig
from headgate.model.graph import MAIN, MAIN_INPUT, Graph, InputName, Node, OutputTag, Partitioner, Role
from headgate.model.ids import ChannelIndex, NodeName, SubtaskId, VertexId
from headgate.model.lineage import Lineage
from headgate.model.pipeline_identity import Target
from headgate.model.schema_evolution import OperatorRules


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """An edge between two vertices.

    ``from_node`` (inside ``source``) emits on ``tag``; records go to the ``input`` of the head node of ``target``.
    ``index`` is the edge's position in ``Plan.edges``. ``nest`` is the outermost loop that both ends are in: probes of
    that loop travel along this edge. A feedback edge leads back to the head of its loop and is never aligned.
    """

    index: int
    source: VertexId
    from_node: NodeName
    tag: OutputTag
    target: VertexId
    partitioner: Partitioner
    keys: tuple[str, ...]
    is_feedback: bool = False
    nest: NodeName | None = None
    input: InputName = MAIN_INPUT


@dataclass(frozen=True, slots=True)
class Vertex:
    """A chain: its head and every node chained to it, in topological order."""

    id: VertexId
    nodes: tuple[Node, ...]

    @property
    def head(self) -> Node:
        """The node that receives the vertex's input."""
        return self.nodes[0]

    @property
    def is_source(self) -> bool:
        """Whether the chain starts with a source (it is then triggered by the coordinator)."""
        return self.head.role is Role.SOURCE

    @property
    def is_timed_source(self) -> bool:
        """Whether it starts with a source and takes event times: it is read side by side with all others like it."""
        return self.is_source and any(hasattr(node.spec, "out_of_orderness_ms") for node in self.nodes)

    @property
    def is_loop_head(self) -> bool:
        """Whether the chain starts with the head of a loop."""
        return self.head.role is Role.LOOP_HEAD

    @property
    def nest(self) -> NodeName | None:
        """The outermost loop that the vertex's first node is in."""
        return self.head.loops[0] if self.head.loops else None


@dataclass(frozen=True, slots=True)
class InputChannel:
    """One input channel of a subtask: the edge it belongs to and the subtask that sends on it."""

    channel: ChannelIndex
    edge: PlanEdge
    upstream: SubtaskId


@dataclass(frozen=True, slots=True)
class LoopNest:
    """An outermost loop with every loop inside it: what comes to its end together.

    Attributes:
        name: of the outermost loop.
        heads: the vertices of the outermost loop's head and of the heads inside, the outermost first.
        entrances: vertices in the nest that records enter from outside.
        leaves: vertices in the nest that send nothing on within it.
    """

    name: NodeName
    heads: tuple[VertexId, ...]
    entrances: tuple[VertexId, ...]
    leaves: tuple[VertexId, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a deployment runs."""

    vertices: tuple[Vertex, ...]
    edges: tuple[PlanEdge, ...]
    parallelism: int
    max_parallelism: int

    def vertex(self, vertex: VertexId) -> Vertex:
        """Return the vertex with this id (it must exist)."""
        return next(v for v in self.vertices if v.id == vertex)

    def inputs(self, subtask: SubtaskId) -> tuple[InputChannel, ...]:
        """Return the input channels of ``subtask``, edges in plan order, upstream index ascending.

        Feedback edges come last.
        """
        channels: list[InputChannel] = []
        for edge in self.edges:
            if edge.target != subtask.vertex:
                continue
            senders = (subtask.index,) if edge.partitioner is Partitioner.FORWARD else tuple(range(self.parallelism))
            for sender in senders:
                upstream = SubtaskId(edge.source, sender)
                channels.append(InputChannel(ChannelIndex(len(channels)), edge, upstream))
        return tuple(channels)

    def outputs(self, vertex: VertexId) -> tuple[PlanEdge, ...]:
        """Return the edges that leave ``vertex``."""
        return tuple(edge for edge in self.edges if edge.source == vertex)

    def downstream(self, vertex: VertexId) -> frozenset[VertexId]:
        """Return the vertices that records of ``vertex`` may reach."""
        found: set[VertexId] = set()
        at = [vertex]
        while at:
            targets = {edge.target for edge in self.outputs(at.pop())} - found
            found |= targets
            at += sorted(targets)
        return frozenset(found)

    def subtasks(self) -> tuple[SubtaskId, ...]:
        """Return every subtask, in vertex order and then by index: the participants of a checkpoint (C8)."""
        return tuple(SubtaskId(v.id, i) for v in self.vertices for i in range(self.parallelism))

    def nests(self) -> tuple[LoopNest, ...]:
        """Return the outermost loops, in vertex order."""
        found: list[LoopNest] = []
        for name in dict.fromkeys(vertex.nest for vertex in self.vertices if vertex.nest is not None):
            inside = [vertex.id for vertex in self.vertices if vertex.nest == name]
            heads = [v.id for v in self.vertices if v.is_loop_head and v.id in inside]
            entered = {edge.target for edge in self.edges if edge.target in inside and edge.nest is None}
            heads.sort(key=lambda vertex: vertex != str(name))
            sending = {edge.source for edge in self.edges if edge.nest == name}
            entrances = tuple(v for v in inside if v in entered)
            leaves = tuple(v for v in inside if v not in sending)
            found.append(LoopNest(name, tuple(heads), entrances, leaves))
        return tuple(found)

    def state_rules(self) -> dict[str, OperatorRules]:
        """Return what the user said about state in older checkpoints, of every node (docs/spec/evolution.md)."""
        return {str(node.name): node.state_rules for vertex in self.vertices for node in vertex.nodes}

    def state_texts(self) -> dict[str, str]:
        """Return ``node name → state_text`` of every node (stored with each checkpoint)."""
        return {str(node.name): node.state_text for vertex in self.vertices for node in vertex.nodes}


def make_plan(graph: Graph, parallelism: int, max_parallelism: int) -> Plan:
    """Chain the nodes of ``graph`` and return its plan.

    Raises:
        UsageError: duplicate names, an unknown upstream, no sink, or parallelism out of range.
    """
    _check(graph, parallelism, max_parallelism)
    vertex_of: dict[NodeName, VertexId] = {}
    chains: dict[VertexId, list[Node]] = {}
    for node in graph.nodes:
        is_chained = len(node.inputs) == 1 and node.inputs[0].partitioner is Partitioner.FORWARD
        is_alone = _is_alone(node) or any(_is_alone(graph.node(edge.upstream)) for edge in node.inputs)
        if is_chained and node.role is not Role.LOOP_HEAD and not is_alone:
            vertex = vertex_of[node.inputs[0].upstream]
        else:
            vertex = VertexId(str(node.name))
        vertex_of[node.name] = vertex
        chains.setdefault(vertex, []).append(node)
    vertices = tuple(Vertex(v, tuple(nodes)) for v, nodes in chains.items())
    edges: list[PlanEdge] = []
    for vertex_ in vertices:
        head = vertex_.head
        ways = [(edge, False) for edge in head.inputs] + [(edge, True) for edge in head.feedback]
        for edge, is_feedback in ways:
            nest = _common_nest(graph.node(edge.upstream), head)
            edges.append(
                PlanEdge(
                    len(edges),
                    vertex_of[edge.upstream],
                    edge.upstream,
                    edge.tag,
                    vertex_.id,
                    edge.partitioner,
                    edge.keys,
                    is_feedback,
                    nest,
                    edge.input,
                )
            )
    return Plan(vertices, tuple(edges), parallelism, max_parallelism)


def _is_alone(node: Node) -> bool:
    """Whether a node is a vertex of its own: it holds its input up, and sends records that came earlier."""
    return bool(getattr(node.spec, "is_alone", False))


def _common_nest(source: Node, target: Node) -> NodeName | None:
    """Return the outermost loop that both are in. Loops nest, so two nodes share it or share none."""
    return target.loops[0] if target.loops and target.loops[0] in source.loops else None


def _check(graph: Graph, parallelism: int, max_parallelism: int) -> None:
    if not 1 <= parallelism <= max_parallelism:
        raise UsageError(f"parallelism must be between 1 and {max_parallelism}, but is {parallelism}")
    seen: set[NodeName] = set()
    for node in graph.nodes:
        if node.name in seen:
            raise UsageError(f"two operators are named '{node.name}'; give one of them another name=")
        for edge in node.inputs:
            if edge.upstream not in seen:
                raise UsageError(f"operator '{node.name}' reads from unknown operator '{edge.upstream}'")
        seen.add(node.name)
    _check_loops(graph, seen)
    if not any(node.role is Role.SINK for node in graph.nodes):
        raise UsageError("the pipeline has no sink; end at least one stream with .sink(...)")


def _check_loops(graph: Graph, names: set[NodeName]) -> None:
    for node in graph.nodes:
        if (node.role is Role.LOOP_HEAD) != bool(node.feedback):
            raise UsageError(f"operator '{node.name}' must be a loop head with feedback, or neither")
        for edge in node.feedback:
            if edge.upstream not in names or node.name not in graph.node(edge.upstream).loops:
                raise UsageError(f"the feedback '{edge.upstream}' of loop '{node.name}' does not come from the loop")
    loops_before: dict[NodeName, set[NodeName]] = {}  # the loops with records that may reach a node
    for node in graph.nodes:
        reached = {loop for edge in node.inputs for loop in loops_before[edge.upstream]}
        inputs = [graph.node(edge.upstream) for edge in node.inputs]
        for loop in node.loops:
            if loop != node.name and not any(loop in upstream.loops for upstream in inputs):
                raise UsageError(f"operator '{node.name}' is in loop '{loop}', but reads nothing from it")
            for upstream in inputs:  # it would wait for the loop's end, and the loop for its end
                if loop in loops_before[upstream.name] and loop not in upstream.loops:
                    raise UsageError(f"operator '{node.name}' brings output '{upstream.name}' of loop '{loop}' back")
        loops_before[node.name] = reached | set(node.loops)


@dataclass(frozen=True, slots=True)
class HookSpec:
    """A hook of the coordinator, under its name.

    ``hook`` is a ``connectors.base.CoordinatorHook``. It stays in the driver: the definition travels to the workers
    without it.
    """

    name: str
    hook: object
    timeout_ms: int

    def __reduce__(self) -> tuple[type[HookSpec], tuple[str, None, int]]:
        """Leave the hook where it is."""
        return HookSpec, (self.name, None, self.timeout_ms)


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    """A pipeline that can be run: graph, functions, schemas and options.

    Attributes:
        outputs: ``node → tag → pyarrow.Schema`` of each of its outputs, for every node of the graph (a sink's entry is
            the schema of the records that it receives, as its main output).
        diverts: bad records go to the sink node ``bad-records`` (else the first one fails the pipeline).
        hooks: of the coordinator, in the order in which they were added.
        forgotten_hooks: names of hooks that do not need their data in an old checkpoint any more (EI9).
        derived_names: operators that the user gave no name.
        lineages: by which nodes are found again in an edited program (EV13); of nodes for which it matters.
        targets: of all sinks, as a start records them; None: nothing is recorded.
    """

    config: PipelineConfig
    graph: Graph
    plan: Plan
    outputs: dict[NodeName, dict[OutputTag, object]]
    diverts: bool = False
    hooks: tuple[HookSpec, ...] = ()
    forgotten_hooks: frozenset[str] = frozenset()
    derived_names: frozenset[str] = frozenset()
    targets: tuple[Target, ...] | None = None
    lineages: dict[str, Lineage] = field(default_factory=dict)

    def schema(self, node: NodeName, tag: OutputTag = MAIN) -> object:
        """Return the ``pyarrow.Schema`` of one output of ``node``."""
        return self.outputs[node][tag]
