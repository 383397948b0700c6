"""The live operators of one subtask: a chain of nodes, a function call apart, with state that can be frozen.

Counterpart: ``workload``, whose plain model says what must come out. Knows nothing of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.model.graph import Node, OutputTag, Partitioner
from headgate.model.ids import NodeName
from headgate.model.keygroups import subtask_of_key_group
from headgate.model.plan import Plan, PlanEdge, Vertex
from headgate.sim import workload
from headgate.sim.history import Record
from headgate.sim.workload import Kind, spec_of

State = dict[str, Any]
"""JSON-like: what a snapshot file holds."""


class Chain:
    """The nodes of one vertex in one subtask."""

    def __init__(
        self,
        plan: Plan,
        vertex: Vertex,
        send: Callable[[PlanEdge, int, tuple[Record, ...]], None],
        write: Callable[[NodeName, list[Record]], None],
        subtask_index: int,
    ) -> None:
        """Make the chain. ``send`` takes records for one receiver of an edge; ``write`` those for a sink."""
        self._plan = plan
        self._vertex = vertex
        self._index = subtask_index
        self._send = send
        self._write = write
        self._children: dict[tuple[NodeName, OutputTag], list[Node]] = {}
        for node in vertex.nodes[1:]:
            edge = node.inputs[0]
            self._children.setdefault((edge.upstream, edge.tag), []).append(node)
        self._edges: dict[tuple[NodeName, OutputTag], list[PlanEdge]] = {}
        for out in plan.outputs(vertex.id):
            self._edges.setdefault((out.from_node, out.tag), []).append(out)
        self._turn = 0
        self._watermark_ms = -(1 << 63)
        self._keyed: dict[str, State] = {
            str(n.name): {} for n in vertex.nodes if spec_of(n).kind in (Kind.COUNT, Kind.WINDOW)
        }
        self._positions: dict[str, int] = {}
        if spec_of(vertex.head).kind is Kind.SOURCE:
            splits = spec_of(vertex.head).splits[subtask_index :: plan.parallelism]
            self._splits = dict(splits)
            self._positions = dict.fromkeys(self._splits, 0)

    # -- the source ---------------------------------------------------------------------------------------------

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that have not ended."""
        return tuple(s for s, at in self._positions.items() if at < len(self._splits[s]))

    def poll(self, split: str, count: int) -> int:
        """Read up to ``count`` records of ``split`` and process them; return their latest event time."""
        at = self._positions[split]
        records = list(self._splits[split][at : at + count])
        self._positions[split] = at + len(records)
        self._emit(self._vertex.head.name, OutputTag.MAIN, records)
        return max(r[4] for r in records)

    # -- records ------------------------------------------------------------------------------------------------

    def process(self, records: tuple[Record, ...]) -> None:
        """Process records that came in."""
        self._apply(self._vertex.head, list(records))

    def advance(self, watermark_ms: int) -> None:
        """Event time advanced: windows fire, in chain order."""
        self._watermark_ms = watermark_ms
        for node in self._vertex.nodes:
            if spec_of(node).kind is Kind.WINDOW:
                self._fire(str(node.name), node.name)

    def finish(self) -> None:
        """All input has ended: every node emits the rest, in chain order."""
        for node in self._vertex.nodes:
            name, kind = str(node.name), spec_of(node).kind
            if kind is Kind.COUNT:
                sums = [workload.summed(name, int(k), c, t) for k, (c, t) in sorted(self._keyed[name].items())]
                self._emit(node.name, OutputTag.MAIN, sums)

    def _apply(self, node: Node, records: list[Record]) -> None:
        name, spec = str(node.name), spec_of(node)
        main, bad = records, []
        match spec.kind:
            case Kind.MAP:
                main = [workload.mapped(r, name) for r in records if not (spec.diverts and workload.is_bad(r))]
                if spec.diverts:
                    bad = [workload.rejected(r, name) for r in records if workload.is_bad(r)]
            case Kind.FILTER:
                main = [(f"{r[0]}.{name}", *r[1:]) for r in records if workload.passes(r)]
            case Kind.COUNT:
                main = self._count(name, records)
            case Kind.WINDOW:
                self._collect(name, records)
                return
            case Kind.SINK:
                self._write(node.name, records)
                return
            case Kind.SOURCE:
                raise AssertionError("a source has no input")
        self._emit(node.name, OutputTag.MAIN, main)
        if bad:
            self._emit(node.name, OutputTag.BAD_RECORDS, bad)

    def _count(self, name: str, records: list[Record]) -> list[Record]:
        state, out = self._keyed[name], []
        for record in records:
            count, total = state.get(str(record[2]), (0, 0))
            state[str(record[2])] = [count + 1, total + record[3]]
            out.append(workload.counted(name, record[2], count + 1))
        return out

    def _collect(self, name: str, records: list[Record]) -> None:
        state = self._keyed[name]
        for record in records:
            start = workload.window_start(record[4])
            if start + workload.WINDOW_MS - 1 <= self._watermark_ms:
                continue  # late: never with correct watermarks, so the model would miss it
            key = f"{record[2]}:{start}"
            state[key] = state.get(key, 0) + 1

    def _fire(self, name: str, node: NodeName) -> None:
        state = self._keyed[name]
        ripe = [(int(k.split(":")[1]), int(k.split(":")[0]), k) for k in state]
        ripe = sorted(r for r in ripe if r[0] + workload.WINDOW_MS - 1 <= self._watermark_ms)
        out = [workload.windowed(name, key, start, state.pop(text)) for start, key, text in ripe]
        if out:
            self._emit(node, OutputTag.MAIN, out)

    def _emit(self, node: NodeName, tag: OutputTag, records: list[Record]) -> None:
        if not records:
            return
        for child in self._children.get((node, tag), ()):
            self._apply(child, records)
        for edge in self._edges.get((node, tag), ()):
            self._route(edge, records)

    def _route(self, edge: PlanEdge, records: list[Record]) -> None:
        match edge.partitioner:
            case Partitioner.FORWARD:
                self._send(edge, self._index, tuple(records))
            case Partitioner.HASH:
                groups: dict[int, list[Record]] = {}
                for record in records:
                    groups.setdefault(self._owner(record[2]), []).append(record)
                for receiver, found in sorted(groups.items()):
                    self._send(edge, receiver, tuple(found))
            case Partitioner.REBALANCE:
                self._turn = (self._turn + 1) % self._plan.parallelism
                self._send(edge, self._turn, tuple(records))
            case Partitioner.BROADCAST:
                for receiver in range(self._plan.parallelism):
                    self._send(edge, receiver, tuple(records))

    def _owner(self, key: int) -> int:
        group = (key * 7) % self._plan.max_parallelism
        return subtask_of_key_group(group, self._plan.max_parallelism, self._plan.parallelism)

    # -- state --------------------------------------------------------------------------------------------------

    def freeze(self) -> State:
        """Return a copy of the state."""
        return {"positions": dict(self._positions), "keyed": {name: dict(s) for name, s in self._keyed.items()}}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the frozen states of former subtasks: positions of the splits and state of the keys owned."""
        for state in states:
            self._positions.update({s: at for s, at in state["positions"].items() if s in self._positions})
            for name, keyed in state["keyed"].items():
                self._keyed[name].update({key: value for key, value in keyed.items() if self._owns(key)})

    def _owns(self, text: str) -> bool:
        """Whether this subtask owns a key of keyed state: ``key`` or ``key:window`` (KG8)."""
        return self._owner(int(text.split(":")[0])) == self._index
