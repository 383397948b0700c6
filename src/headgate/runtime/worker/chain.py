"""The operator chain of one subtask: a tree of operators that call each other, from the head to the edges out of it.

Interprets nothing of the protocol: ``subtask_runner`` tells it when to flush, snapshot and finish. Records go depth
first through the tree, so an operator's children have seen a batch before its next one comes. On an edge records are
routed by the partitioner; everything else goes to every channel of the edge, in line with the records.

Busy time, read twice a second by ``metrics``, costs two readings of the clock for each call of an operator, so for each
batch, never for each record. Time is charged to the operator that runs now: an operator's own time, without that of
those below it in the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import pyarrow as pa

from headgate.codec.frames import Element, Idle, Watermark, batch_element
from headgate.codec.snapshot import BROADCAST_PREFIX
from headgate.dataclass import dataclass
from headgate.environment import ThreadEnded, close_all
from headgate.errors import BadRecord
from headgate.model.graph import BAD_RECORDS, MAIN, MAIN_INPUT, Edge, InputName, Node, OutputTag, Partitioner
from headgate.model.ids import ChannelIndex, NodeName
from headgate.model.manifest import Totals
from headgate.model.plan import Plan, PlanEdge, Vertex
from headgate.model.progress import BAD_RECORDS as BAD_RECORDS_COUNTED
from headgate.model.progress import RECORDS_IN, RECORDS_OUT
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    LazyRows,
    Operator,
    OperatorContext,
    RestoredState,
    as_batch,
    with_encoded_text,
)
from headgate.operators.expressions import ExpressionsOperator
from headgate.operators.keys import partition
from headgate.operators.timestamps import WithTimestampsOperator
from headgate.protocol.watermarks import Origin
from headgate.runtime.wire.channels import OutputChannel, ReceivingChannel
from headgate.state.snapshot import FrozenState


@dataclass(slots=True)
class NodeTotals:
    """What went through one node since the generation began, and what it cost."""

    records_in: int = 0
    records_out: int = 0
    watermark_ms: int | None = None
    bad_records: int = 0
    busy_ns: int = 0
    node: str = ""


class Stopwatch:
    """Charges the time of one thread to one operator at a time."""

    def __init__(self, clock_ns: Callable[[], int] = lambda: 0) -> None:
        """``clock_ns``: of the surroundings; without one nothing is measured."""
        self._clock_ns = clock_ns
        self._since_ns = 0
        self.running: NodeTotals | None = None
        """The operator that runs now; None: the runtime itself."""

    def switch(self, to: NodeTotals | None) -> NodeTotals | None:
        """Charge ``to`` from now on; return the operator charged until now, to switch back to.

        There is no switch back when an operator raises: its worker ends, and ``running`` still names the operator.
        """
        now_ns = self._clock_ns()
        before = self.running
        if before is not None:
            before.busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns
        self.running = to
        return before


class HeldBack:
    """How long one subtask could not work because the channels out of it had no room (backpressure)."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._total_ns = 0
        self._since_ns: int | None = None

    @property
    def lasts(self) -> bool:
        """Whether it was when it was noted last."""
        return self._since_ns is not None

    def note(self, is_held_back: bool) -> None:
        """Say whether it is; the clock is read only when that changes."""
        # asked at each step of the mailbox, so mostly it returns here
        if is_held_back is (self._since_ns is not None):
            return
        now_ns = self._clock_ns()
        if self._since_ns is not None:
            self._total_ns += now_ns - self._since_ns
        self._since_ns = now_ns if is_held_back else None

    @property
    def total_ns(self) -> int:
        """Until now."""
        return self._total_ns + (0 if self._since_ns is None else self._clock_ns() - self._since_ns)


@dataclass(slots=True)
class EdgeInput:
    """The receiving end of one edge, seen from one subtask."""

    channels: list[ReceivingChannel]
    busy_ns: int = 0

    @property
    def queued(self) -> tuple[int, int]:
        """How many elements wait, set aside or not, and how many bytes their records have."""
        return sum(map(len, self.channels)), sum(channel.size_bytes for channel in self.channels)

    @property
    def fill(self) -> float:
        """The share of the credit that waits on the fullest channel."""
        return max(channel.fill for channel in self.channels)


class InputMeter:
    """The edges that end at one subtask. It costs two readings of the clock for each batch."""

    def __init__(self, inputs: Sequence[ReceivingChannel], clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self.edges: dict[int, EdgeInput] = {}
        for channel in inputs:
            self.edges.setdefault(channel.key.edge, EdgeInput([])).channels.append(channel)
        self._by_channel = [self.edges[channel.key.edge] for channel in inputs]

    def work(self, channel: ChannelIndex, call: Callable[[], object]) -> None:
        """Make ``call``, which is the work on what came on ``channel``."""
        began_ns = self._clock_ns()
        call()
        self._by_channel[channel].busy_ns += self._clock_ns() - began_ns


BATCH_BYTES_MAX = 8 << 20
"""Larger batches are cut before they are sent, so that one batch cannot overdraw a credit window many times."""


class EdgeOutlet:
    """One plan edge, seen from one upstream subtask.

    ``channels`` are ordered by downstream subtask (a FORWARD edge has one). Measured of it: ``records`` sent,
    and ``held_back``, which the subtask runner notes.
    """

    def __init__(
        self,
        edge: PlanEdge,
        plan: Plan,
        channels: Sequence[OutputChannel],
        subtask_index: int,
        clock_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self.edge = edge
        self.records = 0
        self.held_back = HeldBack(clock_ns)
        self._plan = plan
        self._channels = list(channels)
        assert self._channels, "an edge leads to a subtask"
        assert edge.partitioner is not Partitioner.FORWARD or len(self._channels) == 1, "FORWARD has one receiver"
        self._next = subtask_index % len(self._channels)  # rebalancing starts spread over the receivers

    @property
    def can_send(self) -> bool:
        """Whether every channel has credit left."""
        return all(channel.can_send for channel in self._channels)

    def send(self, batch: pa.RecordBatch) -> None:
        """Route ``batch`` to its downstream subtasks."""
        if batch.nbytes > BATCH_BYTES_MAX and batch.num_rows > 1:
            # Halved by rows until it fits: a slice's size is known only once it is cut. One row is sent however large
            # it is.
            half = batch.num_rows // 2
            self.send(batch.slice(0, half))
            self.send(batch.slice(half))
            return
        self.records += batch.num_rows
        match self.edge.partitioner:
            case Partitioner.FORWARD | Partitioner.FIRST:
                self._channels[0].send(batch_element(batch))
            case Partitioner.HASH:
                plan = self._plan
                parts = partition(batch, self.edge.keys, plan.max_parallelism, plan.parallelism)
                for channel, part in zip(self._channels, parts, strict=True):
                    # no empty batches: each would cost a frame and a turn of its receiver
                    if part is not None:
                        channel.send(batch_element(part))
            case Partitioner.REBALANCE:
                self._channels[self._next].send(batch_element(batch))
                self._next = (self._next + 1) % len(self._channels)
            case Partitioner.BROADCAST:
                element = batch_element(batch)
                for channel in self._channels:
                    channel.send(element)

    def send_watermark(self, watermark_ms: int) -> None:
        """Send a watermark on every channel."""
        self.send_element(Watermark(watermark_ms))

    def send_idle(self, is_idle: bool) -> None:
        """Send an idleness change on every channel."""
        self.send_element(Idle(is_idle))

    def send_element(self, element: Element) -> None:
        """Send anything but records on every channel."""
        for channel in self._channels:
            channel.send(element)


_T = TypeVar("_T")

RECORD_CHARS_SHOWN = 500
"""Of a record in an error message."""


class Outlet(Protocol):
    """An edge out of the vertex, seen from inside the chain (``EdgeOutlet``)."""

    def send(self, batch: pa.RecordBatch) -> None:
        """Route records to the downstream subtasks."""

    def send_watermark(self, watermark_ms: int) -> None:
        """Send a watermark on every channel."""

    def send_idle(self, is_idle: bool) -> None:
        """Send an idleness change on every channel."""


class NodeError(Exception):
    """An operator raised. Carries which one, so that the user sees a name instead of our frames."""

    def __init__(self, node: str, error: BaseException) -> None:
        super().__init__(node, error)
        self.node = node
        self.error = error


@dataclass(slots=True)
class Tagged:
    """The receivers of one output of a node: its children in the chain, each with its input, and edges."""

    children: list[tuple[Link, InputName]] = field(default_factory=list)
    outlets: list[Outlet] = field(default_factory=list)

    @property
    def takes_lazy_rows(self) -> bool:
        """Whether all records go to one operator that takes lazy rows: columns are made once."""
        return len(self.children) == 1 and not self.outlets and self.children[0][0].operator.takes_lazy_rows


class NodeOutput:
    """The ``operators.base.Output`` of one node: by output, its children in the chain, then its edges.

    Event time goes with every output but bad records, which have none.
    """

    def __init__(self, node: Node, totals: NodeTotals, diverts: bool) -> None:
        self._node = node
        self._totals = totals
        self._diverts = diverts
        self._main = Tagged()
        self._tagged: dict[OutputTag, Tagged] = {MAIN: self._main}

    @property
    def takes_lazy_rows(self) -> bool:
        """Whether what it emits is handed on as lazy rows."""
        return self._main.takes_lazy_rows

    def tagged(self, tag: OutputTag) -> Tagged:
        """Return the receivers of the output ``tag``, to be added to."""
        return self._tagged.setdefault(tag, Tagged())

    def emit(self, batch: pa.RecordBatch | LazyRows) -> None:
        """Hand records to every child and every edge of the main output."""
        rows = batch.num_rows
        # an operator that filtered everything out may emit nothing; below it every batch has rows
        if rows == 0:
            return
        self._totals.records_out += rows
        # columns are made once here, not by each receiver
        self._send(self._main, batch if self._main.takes_lazy_rows else as_batch(batch))

    def emit_to(self, tag: OutputTag, batch: pa.RecordBatch) -> None:
        """Hand records to every child and every edge of the output ``tag``, if there is any."""
        if batch.num_rows and tag in self._tagged:
            self._totals.records_out += batch.num_rows
            self._send(self._tagged[tag], batch)

    def emit_watermark(self, watermark_ms: int) -> None:
        """Hand a watermark on."""
        self._totals.watermark_ms = watermark_ms
        for tagged in self._timed():
            for child, _ in tagged.children:
                child.on_watermark(watermark_ms)
            for outlet in tagged.outlets:
                outlet.send_watermark(watermark_ms)

    def emit_idle(self, is_idle: bool) -> None:
        """Hand an idleness change on."""
        for tagged in self._timed():
            for child, _ in tagged.children:
                child.operator.on_idle(is_idle)
            for outlet in tagged.outlets:
                outlet.send_idle(is_idle)

    def divert(self, bad: pa.RecordBatch) -> None:
        """Send bad records to the dead-letter sink, or raise the first one."""
        if bad.num_rows == 0:
            return
        # without a dead-letter sink the first bad record ends the run: skipping it would lose it in silence
        if not self._diverts:
            row = bad.slice(0, 1).to_pylist()[0]
            record = str(row["record"])[:RECORD_CHARS_SHOWN]
            raise BadRecord(str(row["node"] or self._node.name), str(row["problem"]), str(row["position"]), record)
        self._totals.bad_records += bad.num_rows
        self.emit_to(BAD_RECORDS, bad)

    def _timed(self) -> Iterator[Tagged]:
        return (tagged for tag, tagged in self._tagged.items() if tag != BAD_RECORDS)

    @staticmethod
    def _send(tagged: Tagged, batch: pa.RecordBatch | LazyRows) -> None:
        for child, name in tagged.children:
            child.process(batch, name)
        for outlet in tagged.outlets:
            outlet.send(batch)


class Link:
    """A node in the chain: its operator with the bookkeeping around it."""

    def __init__(
        self,
        node: Node,
        operator: Operator,
        context: OperatorContext,
        output: NodeOutput,
        watch: Stopwatch,
        passes: Sequence[Node] = (),
    ) -> None:
        """``passes``: the nodes above it that ``operator`` runs in one pass with it."""
        self.node = node
        self._passes = passes
        self._switch = watch.switch
        self.operator = operator
        self.context = context
        self.output = output
        self.totals = output._totals
        self.has_ticks = type(operator).next_tick_ms is not Operator.next_tick_ms

    def measured(self) -> list[NodeTotals]:
        """Return the totals of the node, after those of the operators that run in one pass with it.

        The pass is one call of the operator, which counts what its steps keep; its time is that of the node.
        """
        if not self._passes:
            return [self.totals]
        tallies = cast(ExpressionsOperator, self.operator).tallies
        watermark_ms = self.totals.watermark_ms
        inside = [
            NodeTotals(tally.records_in, tally.records_out, watermark_ms, node=str(node.name))
            for node, tally in zip(self._passes, tallies, strict=False)
        ]
        return [*inside, replace(self.totals, records_in=tallies[-1].records_in)]

    def process(self, batch: pa.RecordBatch | LazyRows, name: InputName = MAIN_INPUT) -> None:
        """Count and process one batch that came on input ``name``; name the node in whatever is raised."""
        self.totals.records_in += batch.num_rows
        before = self._switch(self.totals)
        try:
            # The call goes on through the tree: an operator further down that raised has named itself already, and
            # keeps its name.
            self.operator.process_input(name, batch)
        except (NodeError, BadRecord, ThreadEnded):
            raise
        except BaseException as error:
            raise NodeError(str(self.node.name), error) from error
        self._switch(before)

    def reenter(self, batch: pa.RecordBatch, forward: Callable[[pa.RecordBatch], None]) -> None:
        """Count and process one batch that came back to this loop head; name the node in whatever is raised."""
        self.totals.records_in += batch.num_rows
        self.run(partial(forward, batch))

    def on_watermark(self, watermark_ms: int) -> None:
        """Pass a watermark to the operator; name the node in whatever is raised."""
        self.run(partial(self.operator.on_watermark, watermark_ms))

    def run(self, call: Callable[[], _T]) -> _T:
        """Make ``call``, which is the operator's work; name the node in whatever is raised."""
        try:
            return self.timed(call)
        except (NodeError, BadRecord, ThreadEnded):
            raise
        except BaseException as error:
            raise NodeError(str(self.node.name), error) from error

    def timed(self, call: Callable[[], _T]) -> _T:
        """Make ``call`` in the operator's time."""
        before = self._switch(self.totals)
        found = call()
        # not in a finally: of a call that raised, the driver is to hear which operator was running
        self._switch(before)
        return found


class Chain:
    """All operators of one subtask, in topological order."""

    def __init__(self, vertex: Vertex, watch: Stopwatch | None = None) -> None:
        """``watch``: of the worker; without one nothing is measured."""
        self.vertex = vertex
        self._watch = watch or Stopwatch()
        self.links: list[Link] = []
        self.totals: dict[NodeName, NodeTotals] = {}
        self._by_name: dict[NodeName, Link] = {}
        self._context: list[OperatorContext] = []
        self._watermark_ms = WATERMARK_MIN_MS

    def add(
        self,
        node: Node,
        upstream: Edge | None,
        operator: Operator,
        context: OperatorContext,
        diverts: bool,
        passes: Sequence[Node] = (),
    ) -> NodeOutput:
        """Append ``node`` below the node that ``upstream`` names (None: it is the head); ``passes``: see ``Link``."""
        assert (upstream is None) == (not self.links), "a chain has one head, its first node"
        assert node.name not in self._by_name, "a node is in one place of its chain"
        totals = self.totals[node.name] = NodeTotals(node=str(node.name))
        output = NodeOutput(node, totals, diverts)
        link = Link(node, operator, context, output, self._watch, passes)
        if upstream is not None:
            parent = self._by_name[upstream.upstream]
            parent.output.tagged(upstream.tag).children.append((link, upstream.input))
        self.links.append(link)
        self._by_name[node.name] = link
        self._context.append(context)
        return output

    def attach(self, node: NodeName, tag: OutputTag, outlet: Outlet) -> None:
        """Connect an edge that leaves the vertex at ``node``."""
        self._by_name[node].output.tagged(tag).outlets.append(outlet)

    @property
    def head(self) -> Link:
        """The node that receives the vertex's input."""
        return self.links[0]

    def open(self) -> None:
        """Open every operator, in chain order."""
        for link in self.links:
            self._guard(link, partial(link.operator.open, link.context, link.output))

    def restore(self, states: dict[str, list[RestoredState]]) -> None:
        """Give every operator that has one its state."""
        for link in self.links:
            if str(link.node.name) in states:
                self._guard(link, partial(link.operator.restore, states[str(link.node.name)]))

    def restore_broadcast(self, states: Mapping[str, Sequence[RestoredState]]) -> None:
        """Give every operator that has one its broadcast state."""
        for link in self.links:
            if str(link.node.name) in states:
                self._guard(link, partial(link.operator.restore_broadcast, states[str(link.node.name)]))

    def set_origin(self, origin: Origin) -> None:
        """Tell every operator where the next batch comes from."""
        for context in self._context:
            context.origin = origin

    def set_busy(self, is_busy: bool) -> None:
        """Tell every operator whether the worker is saturated."""
        for context in self._context:
            context.is_busy = is_busy

    def set_stopping(self) -> None:
        """Tell every operator that the last barrier before a stop has passed."""
        for context in self._context:
            context.is_stopping = True

    def event_times(self) -> dict[Origin, tuple[int | None, bool]]:
        """Return the watermark of each origin that has event time in this chain, and whether it is idle.

        If several branches take event times, those of the first one.
        """
        takers = (link.operator for link in self.links if isinstance(link.operator, WithTimestampsOperator))
        taker = next(takers, None)
        return {} if taker is None else taker.origins()

    def advance(self, watermark_ms: int) -> None:
        """Pass a watermark through the chain unless it has passed already."""
        # finish() sends the last watermark, too, and it may have passed with the end of every input before
        if watermark_ms > self._watermark_ms:
            self._watermark_ms = watermark_ms
            self.head.on_watermark(watermark_ms)

    def on_splits(self, origins: Sequence[Origin]) -> None:
        """Tell every operator which splits the source owns."""
        for link in self.links:
            link.operator.on_splits(origins)

    def on_split_finished(self, origin: Origin) -> None:
        """Tell every operator that a split has ended."""
        for link in self.links:
            link.run(partial(link.operator.on_split_finished, origin))

    def tick(self, now_ms: int) -> None:
        """Call ``on_tick`` of every operator that is due."""
        for link in self.links:
            if link.has_ticks:
                due = link.operator.next_tick_ms()
                if due is not None and due <= now_ms:
                    link.run(partial(link.operator.on_tick, now_ms))

    def next_tick_ms(self) -> int | None:
        """Return the earliest time any operator waits for."""
        due = [t for link in self.links if link.has_ticks and (t := link.operator.next_tick_ms()) is not None]
        return min(due) if due else None

    def before_barrier(self) -> None:
        """Flush what belongs in front of the barrier, upstream first."""
        for link in self.links:
            link.run(link.operator.before_barrier)

    def on_round(self, round_: int, nest: NodeName) -> None:
        """Tell the operators of ``nest`` that a round of it is over, upstream first (L35).

        Each one first sends what it holds back, with what operators above it made of the end of the round: to the
        next one that is still the round.
        """
        for link in self.links:
            link.run(link.operator.before_barrier)
            if nest in link.node.loops:
                link.run(partial(link.operator.on_round, round_))

    def freeze(self) -> dict[str, FrozenState]:
        """Freeze every stateful operator."""
        frozen: dict[str, FrozenState] = {}
        for link in self.links:
            state = link.run(link.operator.freeze)
            if state is not None:
                frozen[str(link.node.name)] = state
        return frozen

    def freeze_broadcast(self, *, is_own: bool) -> dict[tuple[str, str], FrozenState]:
        """Freeze broadcast state, by prefix and node. ``is_own``: each subtask writes its own copy."""
        found = {
            (BROADCAST_PREFIX, str(link.node.name)): link.run(partial(link.operator.freeze_broadcast, is_own=is_own))
            for link in self.links
        }
        return {name: state for name, state in found.items() if state is not None}

    def finish(self) -> None:
        """Send the last watermark through the chain, then finish every operator, upstream first."""
        # first the end of event time, which closes what is still open, then finish(), which may send what is left
        self.advance(WATERMARK_MAX_MS)
        for link in self.links:
            link.run(link.operator.finish)

    def resume(self) -> None:
        """Tell every operator that input goes on after the end that its restored state knows of."""
        for link in self.links:
            link.run(link.operator.on_resumed)

    def counted(self) -> Totals:
        """Return how many records each operator has counted since the generation began, by its name."""
        counted: Totals = {}
        for link in self.links:
            for totals in link.measured():
                counted[totals.node] = {
                    RECORDS_IN: totals.records_in,
                    RECORDS_OUT: totals.records_out,
                    BAD_RECORDS_COUNTED: totals.bad_records,
                }
            # counters of the user's own under the last node of a pass: the others have no context
            counted[str(link.node.name)].update(link.context.metrics.counters)
        return counted

    def close(self) -> None:
        """Close every operator; the first error is raised after all have been closed."""
        close_all(link.operator.close for link in self.links)

    def _guard(self, link: Link, call: Callable[[], None]) -> None:
        try:
            call()
        except (NodeError, BadRecord, ThreadEnded):
            raise
        except BaseException as error:
            raise NodeError(str(link.node.name), error) from error


class SourceHead(Operator):
    """Stands for the source in its chain: the runner hands it what the reader polled."""

    def __init__(self, reader: object = None, source: object = None) -> None:
        self.user_object = reader
        self.opened_by = source

    def process(self, batch: pa.RecordBatch) -> None:
        """Pass records on, encoded text as lazy rows."""
        self.output.emit(with_encoded_text(batch))
