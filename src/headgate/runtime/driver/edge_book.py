"""What one driver knows of the edges between chains: the latest reports of all workers, added up edge by edge (OM14).

Part of ``progress_book``. It tells how things are now, so a generation begins with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headgate.model.ids import NodeName
from headgate.model.metrics import (
    BUSY_MS,
    CLOCK_S,
    EDGE,
    FILL,
    HELD_BACK_MS,
    QUEUED_BATCHES,
    QUEUED_BYTES,
    RECORDS,
    Samples,
)
from headgate.model.plan import Plan, PlanEdge
from headgate.model.progress import EdgeProgress

Measured = dict[str, int | float]
"""What was measured of one edge in one worker, by name."""


class EdgeBook:
    """The edges of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._targets = {edge.index: plan.vertex(edge.target).head.name for edge in plan.edges}
        self._edges = plan.edges
        self._now: dict[int, dict[str, Measured]] = {}
        self._lately: dict[int, dict[str, Measured]] = {}
        self._clocks_s: dict[int, float] = {}

    def begin(self) -> None:
        """A generation starts."""
        self._now, self._lately, self._clocks_s = {}, {}, {}

    def add(self, worker: int, samples: Samples) -> None:
        """A worker of the running generation reported."""
        edges: dict[str, Measured] = {}
        for sample in samples:
            edge = sample.label(EDGE)
            if edge is not None:
                edges.setdefault(edge, {})[sample.name] = sample.value
        clock_s = float(samples.value(CLOCK_S) or 0.0)
        passed_s = clock_s - self._clocks_s.get(worker, clock_s)
        if passed_s > 0:
            former = self._now.get(worker, {})
            self._lately[worker] = {
                edge: _per_second(former.get(edge, {}), measured, passed_s) for edge, measured in edges.items()
            }
        self._now[worker], self._clocks_s[worker] = edges, clock_s

    def edges(self) -> tuple[EdgeProgress, ...]:
        """Return all edges, in the order of the plan; none before the first report."""
        return tuple(map(self._edge, self._edges)) if self._now else ()

    def _edge(self, edge: PlanEdge) -> EdgeProgress:
        key = str(edge.index)
        now = [nodes.get(key, {}) for nodes in self._now.values()]
        lately = [nodes.get(key, {}) for nodes in self._lately.values()]
        return EdgeProgress(
            edge.index,
            NodeName(edge.from_node),
            self._targets[edge.index],
            sum(_each(lately, RECORDS)),
            busy=_share(lately, BUSY_MS),
            held_back=_share(lately, HELD_BACK_MS),
            queued_batches=int(sum(_each(now, QUEUED_BATCHES))),
            queued_bytes=int(sum(_each(now, QUEUED_BYTES))),
            fill=max(_each(now, FILL), default=0.0),
        )


def _each(found: Iterable[Mapping[str, int | float]], name: str) -> list[float]:
    return [float(measured.get(name, 0)) for measured in found]


def _share(lately: Iterable[Mapping[str, int | float]], name: str) -> float:
    """Return the share of the subtask that spent most of a second so."""
    return min(max(_each(lately, name), default=0.0) / 1_000, 1.0)


def _per_second(former: Measured, now: Measured, passed_s: float) -> Measured:
    return {name: max(value - former.get(name, 0), 0) / passed_s for name, value in now.items()}
