"""The live operators of one subtask: a chain of nodes, a function call apart, with state that can be frozen.

Counterpart: ``workload``, whose plain model says what must come out. Knows nothing of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.model.graph import BAD_RECORDS, MAIN, Node, OutputTag, Partitioner
from headgate.model.ids import NodeName
from headgate.model.key_groups import subtask_of_key_group
from headgate.model.plan import Plan, PlanEdge, Vertex
from headgate.sim import kinds
from headgate.sim.history import Record
from headgate.sim.kinds import KEYED, STATELESS, Kind, spec_of

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
        self._keyed: dict[str, State] = {str(n.name): {} for n in vertex.nodes if spec_of(n).kind in KEYED}
        self._held: dict[str, list[Record]] = {}
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
        self._emit(self._vertex.head.name, MAIN, records)
        return max(r[4] for r in records)

    # -- records ------------------------------------------------------------------------------------------------

    def process(self, records: tuple[Record, ...]) -> None:
        """Process records that came in."""
        self._apply(self._vertex.head, list(records))

    def flush(self) -> None:
        """Let operators send what they keep back, in chain order."""
        for node in self._vertex.nodes:
            if spec_of(node).kind is Kind.HOLD:
                self._release(node)

    def close_round(self, round_: int) -> None:
        """A round of the loops around is over: operators within sum it up, in chain order."""
        for node in self._vertex.nodes:
            if spec_of(node).kind is Kind.HOLD:
                self._release(node)
            elif node.loops and spec_of(node).kind is Kind.ROUND_SUM:
                self._sum_up(node, round_)

    def advance(self, watermark_ms: int) -> None:
        """Event time advanced: windows fire, in chain order."""
        self.flush()
        self._watermark_ms = watermark_ms
        for node in self._vertex.nodes:
            if spec_of(node).kind is Kind.WINDOW:
                self._fire(str(node.name), node.name)

    def finish(self) -> None:
        """All input has ended: every node emits the rest, in chain order."""
        for node in self._vertex.nodes:
            name, kind = str(node.name), spec_of(node).kind
            if kind is Kind.HOLD:
                self._release(node)
            if kind in (Kind.COUNT, Kind.TALLY, Kind.VISITS):
                state = self._keyed[name]
                sums = [kinds.summed(name, int(k), c, t) for k, (_, c, t) in sorted(state.items()) if c]
                self._keyed[name] = {k: [number, 0, 0] for k, (number, _, _) in state.items()}  # R17: forgotten
                self._emit(node.name, MAIN, sums)

    def _apply(self, node: Node, records: list[Record]) -> None:
        name, spec = str(node.name), spec_of(node)
        main, bad = records, []
        match spec.kind:
            case Kind.MAP:
                main = [kinds.mapped(r, name) for r in records if not (spec.diverts and kinds.is_bad(r))]
                if spec.diverts:
                    bad = [kinds.rejected(r, name) for r in records if kinds.is_bad(r)]
            case Kind.FILTER:
                main = [(f"{r[0]}.{name}", *r[1:]) for r in records if kinds.passes(r)]
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
            case Kind.HEAD:
                pass
            case Kind.TALLY | Kind.VISITS:
                main = self._tally(node, records)
            case Kind.ROUND_SUM:
                self._add_up(node, records)
                return
            case Kind.HOLD:
                self._hold(node, records)
                return
            case _:
                assert spec.kind in STATELESS
                main = [made for r in records for made in kinds.transformed(spec, name, r)]
        self._emit(node.name, MAIN, main)
        if bad:
            self._emit(node.name, BAD_RECORDS, bad)

    def _count(self, name: str, records: list[Record]) -> list[Record]:
        state, out = self._keyed[name], []
        for record in records:
            number = self._add_one(state, record)
            out.append(kinds.counted(name, record[2], number))
        return out

    def _add_one(self, state: State, record: Record) -> int:
        """Count and sum up ``record``, until the end; return how many there were of its key."""
        number, count, total = state.get(str(record[2]), (0, 0, 0))
        state[str(record[2])] = [number + 1, count + 1, total + record[3]]
        return int(number) + 1

    def _tally(self, node: Node, records: list[Record]) -> list[Record]:
        """Count and sum up, passing the records on (TALLY) or their numbers (VISITS); summaries are passed by."""
        name, state, out = str(node.name), self._keyed[str(node.name)], list[Record]()
        for record in records:
            counts = not kinds.is_summary(record)
            number = self._add_one(state, record) if counts else 0
            if counts and spec_of(node).kind is Kind.VISITS:
                out.append(kinds.counted(name, record[2], number))
            else:
                out.append((f"{record[0]}.{name}", *record[1:]))
        return out

    def _add_up(self, node: Node, records: list[Record]) -> None:
        """Sum up by key and round until the round is over."""
        state = self._keyed[str(node.name)]
        for record in records:
            if not kinds.is_summary(record):
                key = f"{record[2]}:{kinds.trips(record, str(node.loops[0]))}"
                count, total = state.get(key, (0, 0))
                state[key] = [count + 1, total + record[3]]

    def _sum_up(self, node: Node, round_: int) -> None:
        name, state, out = str(node.name), self._keyed[str(node.name)], list[Record]()
        for round_of, key, text in sorted((int(k.split(":")[1]), int(k.split(":")[0]), k) for k in state):
            if round_of <= round_:
                out.append(kinds.round_sum(name, str(node.loops[0]), round_of, key, *state.pop(text)))
        if spec_of(node).marks_rounds:
            out.append(kinds.round_mark(name, round_, self._index))
        self._emit(node.name, MAIN, out)

    HELD_MAX = 2
    """Records that a HOLD keeps back, as an operator that fills batches does."""

    def _hold(self, node: Node, records: list[Record]) -> None:
        held = self._held.setdefault(str(node.name), [])
        held += records
        if len(held) > self.HELD_MAX:
            self._release(node)

    def _release(self, node: Node) -> None:
        name, records = str(node.name), self._held.pop(str(node.name), [])
        out = [made for r in records for made in kinds.transformed(spec_of(node), name, r)]
        self._emit(node.name, MAIN, out)

    def _collect(self, name: str, records: list[Record]) -> None:
        state = self._keyed[name]
        for record in records:
            start = kinds.window_start(record[4])
            if start + kinds.WINDOW_MS - 1 <= self._watermark_ms or kinds.is_timeless(record):
                continue  # late: never with correct watermarks, so the model would miss it
            key = f"{record[2]}:{start}"
            state[key] = state.get(key, 0) + 1

    def _fire(self, name: str, node: NodeName) -> None:
        state = self._keyed[name]
        ripe = [(int(k.split(":")[1]), int(k.split(":")[0]), k) for k in state]
        ripe = sorted(r for r in ripe if r[0] + kinds.WINDOW_MS - 1 <= self._watermark_ms)
        out = [kinds.windowed(name, key, start, state.pop(text)) for start, key, text in ripe]
        if out:
            self._emit(node, MAIN, out)

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

    def group_of(self, key: int) -> int:
        """Return the key group of ``key``."""
        return (key * 7) % self._plan.max_parallelism

    def _owner(self, key: int) -> int:
        return subtask_of_key_group(self.group_of(key), self._plan.max_parallelism, self._plan.parallelism)

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
