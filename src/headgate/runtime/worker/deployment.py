"""Builds the subtasks of one worker from the pipeline's definition and what the coordinator deploys.

Counterpart: ``runtime.driver.supervisor_host``, which sends the ``Deploy`` message. Nothing runs here yet: the worker
starts the subtasks when every peer is connected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

import pyarrow as pa

from headgate.codec.messages import Deploy
from headgate.connectors.base import (
    AnyReader,
    InducedReader,
    Sink,
    SinkContext,
    SinkWriter,
    Source,
    SourceContext,
)
from headgate.environment import SYSTEM_THREADS, Clock, Threads
from headgate.errors import CorruptionError, UsageError
from headgate.model.graph import BAD_RECORDS, BROADCAST_INPUT, MAIN, Edge, Graph, Node, OutputTag, Role
from headgate.model.ids import ChannelIndex, CheckpointId, Generation, NodeName, SubtaskId, VertexId, WorkerIndex
from headgate.model.lineage import Location, Relocation
from headgate.model.manifest import Place
from headgate.model.plan import PipelineDefinition, Plan, PlanEdge, Vertex
from headgate.operators.base import Operator, OperatorContext, OperatorSpec, RestoredState
from headgate.operators.checkpoint_listeners import own_copy_of
from headgate.operators.expressions import ExpressionsSpec, fuse, fused_groups
from headgate.operators.joins.broadcast_join import BroadcastJoinSpec
from headgate.operators.loop_head import LoopHeadOperator, LoopHeadSpec
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.operators.windows.aligned_windows import WindowBufferSpec, WindowMergeSpec
from headgate.operators.windows.session_windows import SessionMergeSpec
from headgate.protocol.subtasks.loops import LoopPlace
from headgate.protocol.watermarks import SplitAligner, alignment_period_ms
from headgate.runtime.checkpoints.channel_state import named_channels, restored_records
from headgate.runtime.checkpoints.restore import RestoredSnapshots, read_restored
from headgate.runtime.checkpoints.snapshot_files import storage_at
from headgate.runtime.checkpoints.snapshot_writer import SnapshotWriter
from headgate.runtime.wire.exchange import Exchange
from headgate.runtime.wire.spill import SpillBudget
from headgate.runtime.worker.chain import Chain, EdgeOutlet, SourceHead, Stopwatch
from headgate.runtime.worker.listeners import SubtaskListeners
from headgate.runtime.worker.loop_head import LoopHeadRunner, LoopLog, LoopState, log_owner, replay_logs
from headgate.runtime.worker.source_runner import REPORTS_PER_TIMEOUT
from headgate.runtime.worker.subtask_parts import RateLimit, SubtaskParts, SubtaskReports
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.runtime.worker.unaligned import ChannelRecorder, UnalignedOptions
from headgate.state.snapshot import FrozenState
from headgate.state.worker_backends import WorkerStates, local_directory, worker_states
from headgate.storage.base import NotFound, Storage


class SinkHead(Operator):
    """Stands for a sink in its chain: records go to the writer's current transaction."""

    def __init__(self, writer: SinkWriter, sink: object = None) -> None:
        self._writer = writer
        self.user_object = writer
        self.opened_by = sink

    def process(self, batch: pa.RecordBatch) -> None:
        """Write records."""
        self._writer.write(batch)

    def on_watermark(self, watermark_ms: int) -> None:
        """Tell the writer, too."""
        self._writer.on_watermark(watermark_ms)
        super().on_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """Tell the writer, too."""
        self._writer.on_idle(is_idle)
        super().on_idle(is_idle)

    def freeze(self) -> FrozenState | None:
        """Return what the writer holds back; its transaction has been sealed."""
        return self._writer.freeze()

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Give the writer what former ones held back.

        Raises:
            UsageError: it is of a sink that never holds anything back (D15).
        """
        if not self._writer.can_hold_back:
            raise UsageError(
                f"the restored checkpoint holds records that sink '{self.context.node}' had not written yet, but now "
                "it is of another kind that cannot take them over: bring the former sink back under this name"
            )
        self._writer.restore(states)

    def finish(self) -> None:
        """Have the writer hold nothing back any more."""
        self._writer.finish()


def edge_schemas(definition: PipelineDefinition) -> list[pa.Schema]:
    """Return the schema of the records on each plan edge, by edge index."""
    return [cast(pa.Schema, definition.schema(edge.from_node, edge.tag)) for edge in definition.plan.edges]


def event_delay_ms(graph: Graph, name: NodeName, *, of_all: bool = False) -> int | None:
    """Return by how much what windows in front of a node emit may be earlier than the watermark (S91).

    None: what comes there has no event times, or, with ``of_all``, not everything has. The table of a broadcast join
    does not count.
    """
    delays: dict[NodeName, int | None] = {}
    for node in graph.nodes:
        # nodes are in topological order: the delays of all inputs are known; those of back edges do not count
        edges = [edge for edge in node.inputs if not _is_table(node, edge)]
        found = [delays.get(edge.upstream) for edge in edges if edge.tag != BAD_RECORDS]
        known = [delay for delay in found if delay is not None]
        incoming = max(known) if known and (len(known) == len(edges) or not of_all) else None
        if node.name == name:
            return incoming
        if isinstance(node.spec, WithTimestampsSpec):
            delays[node.name] = 0
        elif incoming is not None:
            is_held_back = getattr(node.spec, "holds_back", False)
            delays[node.name] = (0 if is_held_back else incoming) + int(getattr(node.spec, "output_delay_ms", 0))
    return None


def _is_table(node: Node, edge: Edge) -> bool:
    return isinstance(node.spec, BroadcastJoinSpec) and edge.input == BROADCAST_INPUT


def is_window_of_windows(graph: Graph, name: NodeName) -> bool:
    """Return whether a node is a window of results of other windows, which may come when it has ended."""
    spec = graph.node(name).spec
    is_window = isinstance(spec, WindowMergeSpec | WindowBufferSpec | SessionMergeSpec) and not spec.holds_back
    return is_window and bool(event_delay_ms(graph, name))


def late_output(graph: Graph, name: NodeName) -> OutputTag | None:
    """Return the output that takes late records of a window, the only one beside its results; None: none is read."""
    tags = (edge.tag for node in graph.nodes for edge in node.inputs if edge.upstream == name)
    return next((tag for tag in tags if tag not in (MAIN, BAD_RECORDS)), None)


class Deployment:
    """Makes the runners of one worker for one generation."""

    def __init__(
        self,
        definition: PipelineDefinition,
        worker: WorkerIndex,
        message: Deploy,
        storage: Storage,
        exchange: Exchange,
        make_writer: Callable[[SubtaskId], SnapshotWriter],
        reports: SubtaskReports,
        budget: SpillBudget,
        clock: Clock,
        is_interrupted: Callable[[], bool] = lambda: False,
        states: WorkerStates | None = None,
        local_directory: str | None = None,
        threads: Threads = SYSTEM_THREADS,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._threads, self._wake = threads, wake
        self._local_directory = local_directory
        self._states = states or worker_states(definition.config.state, None, definition.config.operator_states)
        self._is_interrupted = is_interrupted
        self._definition = definition
        self._worker = worker
        self._message = message
        self._storage = storage
        self._exchange = exchange
        self._make_writer = make_writer
        self._reports = reports
        self._budget = budget
        self._clock = clock
        self.watch = Stopwatch(clock.monotonic_ns)
        """Of the thread in which all runners run."""
        self._induced: set[VertexId] = set()
        """Sources that set their own barriers, as far as they have been opened: before what they lead to."""

    def runners(self) -> list[SubtaskRunner]:
        """Return the subtasks of this worker, opened and restored, downstream vertices first.

        Raises:
            CorruptionError: a snapshot is damaged (the coordinator verified it moments ago).
            UsageError: the positions of a source contradict each other.
        """
        plan, pipeline = self._definition.plan, self._definition.config.name
        storage = self._storage
        if self._message.place:
            place = Place.parse(self._message.place)
            try:
                storage, pipeline = storage_at(place), place.prefix
            except NotFound as error:
                raise CorruptionError(error.path, 0, "a savepoint, or checkpoints", "no directory") from error
        config = self._definition.config

        def directory(node: str) -> str | None:
            return local_directory(node, config.state, config.operator_states, self._local_directory)

        restored = read_restored(storage, pipeline, self._worker, plan, self._message.restored, directory)
        # built upstream first, so that what sets its own barriers is known to what is downstream of it; run the other
        # way round
        runners = [self._runner(vertex, restored) for vertex in plan.vertices]
        return list(reversed(runners))

    def _runner(self, vertex: Vertex, restored: RestoredSnapshots) -> SubtaskRunner:
        plan = self._definition.plan
        subtask = SubtaskId(vertex.id, int(self._worker))
        chain = Chain(vertex, self.watch)
        sinks: dict[str, SinkWriter] = {}
        reader: AnyReader | None = None
        for group in fused_groups(vertex, plan):
            operator, opened = self._operator(group, subtask, restored, sinks)
            reader = reader or opened
            upstream = None if group[0] is vertex.head else group[0].inputs[0]
            context, diverts = self._context(group[-1], subtask), self._definition.diverts
            chain.add(group[-1], upstream, operator, context, diverts, passes=group[:-1])
        if isinstance(reader, InducedReader):
            self._induced.add(vertex.id)
        outlets = [self._attach(chain, edge, plan, subtask) for edge in plan.outputs(vertex.id)]
        # after every edge is attached: an operator may emit from its first call on
        chain.open()
        states = {str(node.name): restored.states(str(node.name), vertex) for node in vertex.nodes}
        # what a loop head's snapshot holds under its own name is the loop log: records to be replayed, not an
        # operator's state
        log = states.pop(str(vertex.head.name)) if vertex.is_loop_head else []
        chain.restore({name: found for name, found in states.items() if found})
        broadcasts = {str(node.name): restored.broadcast(str(node.name)) for node in vertex.nodes}
        chain.restore_broadcast({name: found for name, found in broadcasts.items() if found})
        if restored.is_partly_finished(vertex):
            chain.resume()
        listeners = SubtaskListeners(chain)
        listeners.restore(lambda node: restored.lists(node, vertex), is_restored=not restored.is_empty)
        parts = SubtaskParts(
            subtask,
            chain,
            self._exchange.inputs(subtask),
            outlets,
            sinks,
            reader,
            lambda: self._make_writer(subtask),
            self._reports,
            is_restored_finished=restored.is_finished(vertex),
            is_draining=self._message.is_draining,
            place=loop_place(plan, subtask),
            rounds=restored.rounds(vertex),
            input_names=[channel.edge.input for channel in plan.inputs(subtask)],
            mode=self._definition.config.checkpoints.mode,
            listeners=listeners,
            first_checkpoint=CheckpointId(self._message.first_checkpoint),
            recorder=self._recorder(vertex, subtask, restored),
            unaligned=self._unaligned(),
            late_inputs=late_inputs(plan, subtask, self._induced),
            aligner=self._aligner(vertex),
            rate_limit=self._rate_limit(vertex),
            reads_on_ms=max(1, self._definition.config.checkpoints.timeout_ms // REPORTS_PER_TIMEOUT),
            clock_ns=self._clock.monotonic_ns,
        )
        if vertex.is_loop_head:
            return LoopHeadRunner(parts, self._loop_state(chain, subtask, log))
        return SubtaskRunner(parts)

    def _aligner(self, vertex: Vertex) -> SplitAligner | None:
        plan = self._definition.plan
        if not vertex.is_source or not self._definition.config.runtime.aligns_sources:
            return None
        group = [one for one in plan.vertices if one.is_timed_source]
        # without others only its own splits are aligned with each other
        has_others = vertex in group and len(group) * plan.parallelism > 1
        return SplitAligner(has_others=has_others, period_ms=alignment_period_ms(plan))

    def _rate_limit(self, vertex: Vertex) -> RateLimit | None:
        rate = vertex.head.rate_limit
        return None if rate is None else RateLimit(rate, self._definition.plan.parallelism, self._clock.monotonic_ns)

    def _recorder(self, vertex: Vertex, subtask: SubtaskId, restored: RestoredSnapshots) -> ChannelRecorder:
        plan = self._definition.plan
        if vertex.nest is not None:
            # inside a loop barriers never overtake, so nothing was recorded and nothing is replayed
            return ChannelRecorder()  # UA2
        ways = named_channels(plan, subtask, edge_schemas(self._definition))
        parts = restored.in_flight(vertex)
        return ChannelRecorder(ways, restored_records(parts, ways, plan, subtask) if parts else None)

    def _unaligned(self) -> UnalignedOptions | None:
        timeout_ms = self._definition.config.checkpoints.alignment_timeout_ms
        if timeout_ms is None:
            return None
        return UnalignedOptions(timeout_ms, self._clock.monotonic_ms, self._is_interrupted)

    def _loop_state(self, chain: Chain, subtask: SubtaskId, log: Sequence[RestoredState]) -> LoopState:
        """Return what a loop head has beside an ordinary subtask; ``log``: of the former heads."""
        plan = self._definition.plan
        spec = cast(LoopHeadSpec, chain.vertex.head.spec)
        owner = log_owner(spec.keys, plan.max_parallelism, plan.parallelism, subtask.index)
        name = f"loop '{subtask.vertex}'"
        return LoopState(
            cast(LoopHeadOperator, chain.head.operator),
            LoopLog(name, spec.schema, owner, self._budget),
            replay_logs(log, spec.schema, owner, name),
            self._budget.memory_bytes,
        )

    def _operator(
        self,
        group: Sequence[Node],
        subtask: SubtaskId,
        restored: RestoredSnapshots,
        sinks: dict[str, SinkWriter],
    ) -> tuple[Operator, AnyReader | None]:
        node = group[-1]
        match node.role:
            case Role.SOURCE:
                context = self._source_context(node, subtask, restored.positions(str(node.name)))
                source = own_copy_of(context.node, cast(Source, node.spec))
                reader = source.open(context)
                return SourceHead(reader, source), reader
            case Role.SINK:
                sink = own_copy_of(str(node.name), cast(Sink, node.spec))
                writer = sink.open(self._sink_context(node, subtask))
                sinks[str(node.name)] = writer
                return SinkHead(writer, sink), None
            case Role.OPERATOR | Role.LOOP_HEAD:
                if len(group) > 1:
                    return fuse([cast(ExpressionsSpec, n.spec) for n in group]).build(), None
                return cast(OperatorSpec, node.spec).build(), None

    def _source_context(self, node: Node, subtask: SubtaskId, positions: dict[str, bytes] | None) -> SourceContext:
        return SourceContext(
            self._definition.config.name,
            str(node.name),
            subtask.index,
            self._definition.plan.parallelism,
            positions,
            Generation(self._message.generation),
            self._clock.monotonic_ms,
            self._message.life,
            self._definition.config.checkpoints.interval_ms > 0,
            cast(pa.Schema, self._definition.schema(node.name)),
            self._relocation(str(node.name)),
        )

    def _relocation(self, source: str) -> Relocation | None:
        before = tuple(Location(*names) for names in self._message.read_before.get(source, ()))
        if not before:
            return None
        now = self._definition.lineages[source].locations
        return Relocation(before, now, self._definition.config.start.moved)

    def _sink_context(self, node: Node, subtask: SubtaskId) -> SinkContext:
        upstream = node.inputs[0]
        schema = cast(pa.Schema, self._definition.schema(upstream.upstream, upstream.tag))
        return SinkContext(
            self._definition.config.name,
            str(node.name),
            subtask.index,
            self._definition.plan.parallelism,
            Generation(self._message.generation),
            schema,
            self._clock.monotonic_ms,
            event_delay_ms(self._definition.graph, node.name, of_all=True),
        )

    def _context(self, node: Node, subtask: SubtaskId) -> OperatorContext:
        plan = self._definition.plan
        holds_back = getattr(node.spec, "holds_back", False)
        return OperatorContext(
            self._definition.config.name,
            str(node.name),
            subtask.index,
            plan.parallelism,
            plan.max_parallelism,
            clock_ms=self._clock.monotonic_ms,
            wall_ms=self._clock.wall_ms,
            diverts=self._definition.diverts,
            flush_ms=self._message.flush_ms,
            states=self._states.of(str(node.name), subtask.index, plan.max_parallelism),
            threads=self._threads,
            wake=self._wake,
            event_delay_ms=event_delay_ms(self._definition.graph, node.name) or 0 if holds_back else 0,
        )

    def _attach(self, chain: Chain, edge: PlanEdge, plan: Plan, subtask: SubtaskId) -> EdgeOutlet:
        outlet = EdgeOutlet(edge, plan, self._exchange.outputs(edge), subtask.index, self._clock.monotonic_ns)
        chain.attach(edge.from_node, edge.tag, outlet)
        return outlet


def loop_place(plan: Plan, subtask: SubtaskId) -> LoopPlace | None:
    """Return where ``subtask`` stands in its nest of loops, or None outside any."""
    nest = plan.vertex(subtask.vertex).nest
    if nest is None:
        return None
    inputs = plan.inputs(subtask)
    return LoopPlace(
        inside=frozenset(i.channel for i in inputs if i.edge.nest is not None and not i.edge.is_feedback),
        outside=frozenset(i.channel for i in inputs if i.edge.nest is None),
        feedback=frozenset(i.channel for i in inputs if i.edge.is_feedback),
        is_leaf=all(edge.nest is None for edge in plan.outputs(subtask.vertex)),
    )


def late_inputs(plan: Plan, subtask: SubtaskId, induced: Collection[VertexId]) -> frozenset[ChannelIndex]:
    """Return the inputs with barriers that take credit: one of the ``induced`` sources is upstream (UA20)."""
    late = {found for source in induced for found in (source, *plan.downstream(source))}
    return frozenset(found.channel for found in plan.inputs(subtask) if found.upstream.vertex in late)
