"""What one driver knows of its operators: the reports of all workers, added up operator by operator.

Part of ``progress_book``. Two kinds of totals: what the pipeline's state has counted, from its beginning, which a
restart takes back to the checkpoint (OM1), and the work that this process has seen, which never decreases (OM3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from headgate.codec.snapshot import BROADCAST_PREFIX, FILES_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX
from headgate.model.ids import NodeName
from headgate.model.manifest import Manifest, Totals
from headgate.model.metrics import (
    BAD_RECORDS,
    BUSY_MS,
    CLOCK_S,
    HELD_BACK_MS,
    IDLE_MS,
    LATE_RECORDS,
    NODE,
    OF_EVERY_NODE,
    QUEUED_BATCHES,
    QUEUED_BYTES,
    RECORDS_IN,
    RECORDS_OUT,
    WATERMARK_MS,
    Samples,
)
from headgate.model.progress import NodeProgress, SubtaskProgress

OF_STATE = (STATE_PREFIX, LISTS_PREFIX, UNION_PREFIX, BROADCAST_PREFIX, FILES_PREFIX)
GAUGES = frozenset({QUEUED_BATCHES, QUEUED_BYTES, WATERMARK_MS})
END_MS = 1 << 62
"""No event has such a time: a watermark beyond it is that of the end of all input."""

RATE_WINDOW_S = 2.0
"""Rates are those between reports of one worker, by its own clock, over about this time: a worker reports when it can,
so a time of the driver's would have one report more or fewer in it."""

Measured = dict[str, int | float]
"""What was measured of one operator in one worker, by name."""


class NodeBook:
    """The operators of one run."""

    def __init__(self, wall_ms: Callable[[], int], runs_with: Mapping[NodeName, NodeName] | None = None) -> None:
        """``runs_with``: as ``NodeProgress`` tells it, by operator (OM15)."""
        self._wall_ms = wall_ms
        self._runs_with = runs_with or {}
        self._before: Totals = {}
        self._worked: dict[int, dict[str, Measured]] = {}
        self._now: dict[int, dict[str, Measured]] = {}
        self._clocks_s: dict[int, float] = {}
        self._shares: dict[int, dict[str, tuple[float, float]]] = {}
        self._lately: dict[int, deque[tuple[float, dict[str, Measured]]]] = {}
        self._completed: Totals = {}
        self._state: dict[str, tuple[int, int]] = {}

    def begin(self, before: Totals) -> None:
        """A generation starts, from a checkpoint that had counted ``before``: its workers count from zero."""
        for worker, nodes in self._now.items():
            worked = self._worked.setdefault(worker, {})
            for node, measured in nodes.items():
                worked[node] = _sum(worked.get(node, {}), measured)
        self._before, self._completed = before, before
        self._now, self._clocks_s, self._shares, self._lately = {}, {}, {}, {}

    def add(self, worker: int, samples: Samples) -> None:
        """A worker of the running generation reported."""
        nodes: dict[str, Measured] = {}
        for sample in samples:
            node = sample.label(NODE)
            if node is not None:
                nodes.setdefault(node, {})[sample.name] = sample.value
        clock_s = float(samples.value(CLOCK_S) or 0.0)
        passed_ms = 1_000 * (clock_s - self._clocks_s.get(worker, clock_s))
        if passed_ms > 0:
            former = self._now.get(worker, {})
            self._shares[worker] = {
                node: _shares(former.get(node, {}), measured, passed_ms) for node, measured in nodes.items()
            }
        self._now[worker], self._clocks_s[worker] = nodes, clock_s
        lately = self._lately.setdefault(worker, deque())
        lately.append((clock_s, nodes))
        while len(lately) > 2 and lately[1][0] <= clock_s - RATE_WINDOW_S:
            lately.popleft()

    def completed(self, manifest: Manifest) -> None:
        """A checkpoint of the running generation is complete."""
        self._completed = manifest.totals
        sizes: dict[str, tuple[int, int]] = {}
        for part in (part for entry in manifest.entries for part in entry.parts):
            prefix = next((prefix for prefix in OF_STATE if part.section.startswith(prefix)), None)
            if prefix is not None:
                rows, size_bytes = sizes.get(node := part.section.removeprefix(prefix), (0, 0))
                counted = sum((part.rows or {}).get(node, {}).values())
                sizes[node] = rows + counted, size_bytes + part.size_bytes
        self._state = sizes

    def totals(self) -> Totals:
        """Return what the state has counted until now; no less than what the newest checkpoint has."""
        totals = {node: dict(counts) for node, counts in self._before.items()}
        for nodes in self._now.values():
            for node, measured in nodes.items():
                of_node = totals.setdefault(node, {})
                for name in (RECORDS_IN, RECORDS_OUT, BAD_RECORDS, *_own(measured)):
                    of_node[name] = of_node.get(name, 0) + int(measured.get(name, 0))
        for node, counts in self._completed.items():  # its workers may have gone without a last report
            of_node = totals.setdefault(node, {})
            of_node.update({name: max(count, of_node.get(name, 0)) for name, count in counts.items()})
        return totals

    def nodes(self) -> tuple[NodeProgress, ...]:
        """Return all operators, in the order in which workers name them."""
        return tuple(self._node(node, counts) for node, counts in self.totals().items())

    def _rate(self, node: str, name: str) -> float:
        """Return how many a second it was lately, in all workers together."""
        rate = 0.0
        for reports in self._lately.values():
            (begun_s, before), (now_s, now) = reports[0], reports[-1]
            if now_s > begun_s:
                counted = now.get(node, {}).get(name, 0) - before.get(node, {}).get(name, 0)
                rate += max(counted, 0) / (now_s - begun_s)
        return rate

    def _node(self, node: str, counts: Mapping[str, int]) -> NodeProgress:
        subtasks = tuple(self._subtask(worker, node) for worker in sorted({*self._now, *self._worked}))
        busiest = max(subtasks, key=lambda s: (s.busy, s.held_back), default=SubtaskProgress(0))
        runs_with = self._runs_with.get(NodeName(node))
        is_measured = runs_with is None and busiest.busy_ms + busiest.held_back_ms + busiest.idle_ms > 0
        watermark_ms = lowest_watermark(nodes.get(node, {}).get(WATERMARK_MS) for nodes in self._now.values())
        rows, size_bytes = self._state.get(node, (0, 0))
        return NodeProgress(
            NodeName(node),
            counts.get(RECORDS_IN, 0),
            counts.get(RECORDS_OUT, 0),
            self._rate(node, RECORDS_IN),
            self._rate(node, RECORDS_OUT),
            tuple(sorted(_own(counts).items())),
            bad_records=counts.get(BAD_RECORDS, 0),
            late_records=counts.get(LATE_RECORDS, 0),
            busy=busiest.busy,
            held_back=busiest.held_back,
            idle=max(1.0 - busiest.busy - busiest.held_back, 0.0) if is_measured else 0.0,
            busy_ms=sum(s.busy_ms for s in subtasks),
            held_back_ms=sum(s.held_back_ms for s in subtasks),
            idle_ms=sum(s.idle_ms for s in subtasks),
            queued_batches=sum(s.queued_batches for s in subtasks),
            queued_bytes=sum(s.queued_bytes for s in subtasks),
            watermark_ms=watermark_ms,
            lag_ms=None if watermark_ms is None else max(self._wall_ms() - watermark_ms, 0),
            state_rows=rows,
            state_bytes=size_bytes,
            subtasks=subtasks,
            runs_with=runs_with,
        )

    def _subtask(self, worker: int, node: str) -> SubtaskProgress:
        now = self._now.get(worker, {}).get(node, {})
        worked = _sum(self._worked.get(worker, {}).get(node, {}), now)
        busy, held_back = self._shares.get(worker, {}).get(node, (0.0, 0.0))
        return SubtaskProgress(
            worker,
            records_in=int(worked.get(RECORDS_IN, 0)),
            records_out=int(worked.get(RECORDS_OUT, 0)),
            bad_records=int(worked.get(BAD_RECORDS, 0)),
            busy_ms=int(worked.get(BUSY_MS, 0)),
            held_back_ms=int(worked.get(HELD_BACK_MS, 0)),
            idle_ms=int(worked.get(IDLE_MS, 0)),
            busy=busy,
            held_back=held_back,
            queued_batches=int(now.get(QUEUED_BATCHES, 0)),
            queued_bytes=int(now.get(QUEUED_BYTES, 0)),
            watermark_ms=lowest_watermark([now.get(WATERMARK_MS)]),
            counters=tuple(sorted(_own(worked).items())),
        )


def lowest_watermark(found: Iterable[int | float | None]) -> int | None:
    """Return the lowest watermark; None before the first one and behind the end of all input: no time is meant then."""
    lowest = min((int(watermark) for watermark in found if watermark is not None), default=None)
    return None if lowest is None or abs(lowest) >= END_MS else lowest


def _own(measured: Mapping[str, int | float]) -> dict[str, int]:
    """Return what an operator counts itself."""
    return {name: int(value) for name, value in measured.items() if name not in OF_EVERY_NODE}


def _sum(one: Mapping[str, int | float], other: Mapping[str, int | float]) -> Measured:
    names: Iterable[str] = dict.fromkeys([*one, *other])
    return {name: one.get(name, 0) + other.get(name, 0) for name in names if name not in GAUGES}


def _shares(former: Measured, now: Measured, passed_ms: float) -> tuple[float, float]:
    """Return which share of ``passed_ms`` an operator was busy, and held back."""
    busy, held_back = (
        min(max((now.get(name, 0) - former.get(name, 0)) / passed_ms, 0.0), 1.0) for name in (BUSY_MS, HELD_BACK_MS)
    )
    return busy, held_back
