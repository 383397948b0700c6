"""What a page shows of a run: the graph, the latest numbers, what happened lately, and the logs of its workers.

All of it is bounded. The observer of the run adds, requests of browsers read, in their own threads. Of
logs it reads files that ``spark.worker_main`` writes, and nothing else: a browser names a log, never a path.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from headgate.dataclass import dataclass
from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from headgate.model.graph import MAIN, Partitioner
from headgate.model.ids import CheckpointId, NodeName
from headgate.model.plan import PipelineDefinition, Plan, PlanEdge
from headgate.model.progress import NodeProgress, Progress, SubtaskAlignment
from headgate.operators.expressions import runs_with

FIRST_BYTES = 64 << 10
"""Of what was written before a browser opened the log."""
STEP_BYTES_MAX = 256 << 10
"""Of one file at once. Of a log that grows faster, the end is shown and ``LEFT_OUT`` stands before it."""
LEFT_OUT = "(lines left out: they come faster than they can be shown)\n"

_NAME = re.compile(r"worker-[0-9]{1,6}|spark")


class LogDirectory:
    """The logs of one pipeline. Empty until its run has said where they are."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @property
    def place(self) -> str:
        """The directory; "" while it is unknown, or if there is none."""
        return "" if self._directory is None else str(self._directory)

    def set_directory(self, directory: str) -> None:
        """The run writes its logs to ``directory``."""
        self._directory = Path(directory)

    def names(self) -> list[str]:
        """Return which logs there are on this machine, those of workers first, by number."""
        if self._directory is None:
            return []
        try:
            found = [path.stem for path in self._directory.iterdir() if path.suffix == ".log"]
        except OSError:  # the workers are on other machines
            return []
        return sorted((name for name in found if _NAME.fullmatch(name)), key=_order)

    def reader(self, name: str) -> LogReader | None:
        """Return one at the end of a log, None if there is no such log."""
        return LogReader(Path(self.place) / f"{name}.log") if name in self.names() else None


@dataclass(frozen=True, slots=True)
class _Place:
    inode: int
    offset: int


class LogReader:
    """Reads one log to its end, again and again; follows it when it is rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: _Place | None = None

    def read(self) -> str:
        """Return what is new, in whole lines; at first the last ones that were there. "" if there is nothing."""
        try:
            with self._path.open("rb") as file:
                inode, size_bytes = _inode_and_size(file.fileno())
                before = self._place
                rest = "" if before is None or before.inode == inode else self._rest_of_the_former(before)
                begin, is_cut = self._begin(inode, size_bytes)
                file.seek(begin)
                content = file.read(size_bytes - begin)
        except OSError:  # between two files of a rotation, or never begun
            return ""
        content = content[: content.rfind(b"\n") + 1]  # the rest of the line comes with the next look
        self._place = _Place(inode, begin + len(content))
        if is_cut:
            content = content[content.find(b"\n") + 1 :]  # it began in the middle of a line
            rest += LEFT_OUT if before is not None else ""
        return rest + content.decode(errors="replace")

    def _begin(self, inode: int, size_bytes: int) -> tuple[int, bool]:
        """Return where to read on in the file that has the log's name now, and whether that leaves something out."""
        place, begin = self._place, 0
        if place is not None and place.inode == inode and place.offset <= size_bytes:
            begin = place.offset
        most = FIRST_BYTES if place is None else STEP_BYTES_MAX
        return (size_bytes - FIRST_BYTES, True) if size_bytes - begin > most else (begin, False)

    def _rest_of_the_former(self, before: _Place) -> str:
        """Return the unread rest of the log before its rotation."""
        try:
            with self._path.with_name(f"{self._path.name}.1").open("rb") as file:
                inode, _ = _inode_and_size(file.fileno())
                if inode != before.inode:
                    return ""
                file.seek(before.offset)
                return file.read(STEP_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""


def _inode_and_size(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size


def _order(name: str) -> tuple[bool, int]:
    _, _, number = name.partition("-")
    return not number, int(number or 0)


CHECKPOINTS_MAX = 100
RESTARTS_MAX = 100
NOTES_MAX = 200
RATES_MAX = 600
"""Points of the curves, one per second: ten minutes."""
RATE_PERIOD_MS = 1_000
SUBTASKS_MAX = 200
"""Of those that a checkpoint held up: the ones that waited longest."""

JsonObject: TypeAlias = dict[str, Any]
"""What goes to browsers as JSON."""


class RunView:
    """The state of one run's page. Times are dates in milliseconds since 1970, for people to read."""

    def __init__(self, definition: PipelineDefinition) -> None:
        self._lock = threading.Lock()
        self._fixed = {"pipeline": definition.config.name, "settings": settings_of(definition)}
        self._graph = graph_of(definition.plan)
        self._sources = frozenset(node["name"] for node in self._graph["nodes"] if node["role"] == "source")
        self._sinks = frozenset(node["name"] for node in self._graph["nodes"] if node["role"] == "sink")
        self._progress: Progress | None = None
        self._rated_ms: int | None = None
        self._rates: deque[tuple[int, float, float]] = deque(maxlen=RATES_MAX)
        self._checkpoints: deque[JsonObject] = deque(maxlen=CHECKPOINTS_MAX)
        self._restarts: deque[JsonObject] = deque(maxlen=RESTARTS_MAX)
        self._notes: deque[JsonObject] = deque(maxlen=NOTES_MAX)
        self._alignments: Mapping[CheckpointId, Sequence[SubtaskAlignment]] = {}
        self._ended: JsonObject | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """A number that grows with every change."""
        return self._version

    def set_progress(self, progress: Progress, at_ms: int, uptime_ms: int) -> None:
        """Take the latest numbers. ``uptime_ms``: by a clock that only goes forward; it paces the curves."""
        with self._lock:
            self._progress = progress
            if self._rated_ms is None or uptime_ms - self._rated_ms >= RATE_PERIOD_MS:
                self._rated_ms = uptime_ms
                self._rates.append((at_ms, *self._rates_of(progress.nodes)))
            self._version += 1

    def set_alignments(self, alignments: Mapping[CheckpointId, Sequence[SubtaskAlignment]]) -> None:
        """Take how long the latest checkpoints held up each subtask; replaces what was there."""
        with self._lock:
            if alignments != self._alignments:
                self._alignments = alignments
                self._version += 1

    def alignment(self, checkpoint: int) -> JsonObject | None:
        """Return how long ``checkpoint`` held up each subtask, the longest first; None: nothing is known of it."""
        with self._lock:
            found = self._alignments.get(CheckpointId(checkpoint))
        if found is None:
            return None
        longest = sorted(found, key=lambda one: -one.aligned_us)
        shown = [asdict(one) for one in longest[:SUBTASKS_MAX]]
        return {"checkpoint": checkpoint, "subtasks": shown, "left_out": len(longest) - len(shown)}

    def add_checkpoint(self, checkpoint: int, duration_ms: int, size_bytes: int, at_ms: int) -> None:
        """Add a completed checkpoint."""
        shown = {"checkpoint": checkpoint, "duration_ms": duration_ms, "size_bytes": size_bytes, "at_ms": at_ms}
        self._add(self._checkpoints, shown)

    def add_restart(self, reason: str, delay_ms: int, at_ms: int) -> None:
        """Add a failure that the pipeline is started again after."""
        self._add(self._restarts, {"reason": reason, "delay_ms": delay_ms, "at_ms": at_ms})

    def add_note(self, text: str, at_ms: int) -> None:
        """Add one sentence."""
        self._add(self._notes, {"text": text, "at_ms": at_ms})

    def set_end(self, outcome: str, text: str, at_ms: int) -> None:
        """The run is over; this is the last call."""
        with self._lock:
            self._ended = {"outcome": outcome, "text": text, "at_ms": at_ms}
            self._version += 1

    def to_json(self) -> JsonObject:
        """Return everything as of now, for a browser."""
        with self._lock:
            return {
                **self._fixed,
                "version": self._version,
                "graph": self._graph,
                "progress": None if self._progress is None else _plain(asdict(self._progress)),
                "rates": list(self._rates),
                "checkpoints": [self._with_alignment(one) for one in self._checkpoints],
                "restarts": list(self._restarts),
                "notes": list(self._notes),
                "ended": self._ended,
            }

    def _add(self, to: deque[JsonObject], shown: JsonObject) -> None:
        with self._lock:
            to.append(shown)
            self._version += 1

    def _with_alignment(self, checkpoint: JsonObject) -> JsonObject:
        """Return ``checkpoint`` with the subtask that waited longest for its barriers; None: no report yet."""
        found = self._alignments.get(checkpoint["checkpoint"], ())
        longest = max(found, key=lambda one: one.aligned_us, default=None)
        return {**checkpoint, "longest": None if longest is None else asdict(longest)}

    def _rates_of(self, nodes: tuple[NodeProgress, ...]) -> tuple[float, float]:
        read = sum(node.records_out_per_second for node in nodes if node.node in self._sources)
        written = sum(node.records_in_per_second for node in nodes if node.node in self._sinks)
        return read, written


def graph_of(plan: Plan) -> JsonObject:
    """Return the operators and what flows between them: chained ones, too, which are a function call apart.

    ``index`` is that of an edge between chains, of which more is measured; None: within a chain.
    """
    last = runs_with(plan)

    def pass_of(name: NodeName) -> NodeName:
        return last.get(name, name)

    nodes = [
        {"name": str(node.name), "role": node.role.value, "chain": str(vertex.id), "columns": node.schema_text}
        for vertex in plan.vertices
        for node in vertex.nodes
    ]
    chained = [
        {
            "from": str(edge.upstream),
            "to": str(node.name),
            "how": "one pass" if pass_of(edge.upstream) == pass_of(node.name) else "chained",
            "is_feedback": False,
            "index": None,
        }
        for vertex in plan.vertices
        for node in vertex.nodes[1:]
        for edge in node.inputs
    ]
    return {"nodes": nodes, "edges": chained + [_edge(plan, edge) for edge in plan.edges]}


def settings_of(definition: PipelineDefinition) -> list[tuple[str, str]]:
    """Return what the pipeline was started with, for people: pairs of what and how."""
    config, checkpoints = definition.config, definition.config.checkpoints
    every = f"every {checkpoints.interval_ms:,} ms" if checkpoints.interval_ms else "only when asked for"
    return [
        ("parallelism", f"{config.parallelism}, at most {config.max_parallelism}"),
        ("guarantee", checkpoints.mode.value.replace("_", " ")),
        ("checkpoints", every),
        ("checkpoint directory", config.checkpoint_root),
        ("retained checkpoints", str(checkpoints.retained)),
        ("restart", _restart_text(config.restart)),
    ]


def _restart_text(strategy: RestartStrategy) -> str:
    match strategy:
        case NoRestart():
            return "never"
        case FixedDelay(attempts, delay_ms):
            return f"after {delay_ms:,} ms" + ("" if attempts is None else f", {attempts} times at most")
        case FailureRate(failures_max, interval_ms, delay_ms):
            return f"after {delay_ms:,} ms, unless more than {failures_max} failures come within {interval_ms:,} ms"
        case ExponentialDelay():
            return f"after {strategy.initial_ms:,} ms, then longer and longer, up to {strategy.max_ms:,} ms"


def _edge(plan: Plan, edge: PlanEdge) -> JsonObject:
    how = edge.partitioner.value
    if edge.partitioner is Partitioner.HASH:
        how = f"by {', '.join(edge.keys)}"
    if edge.tag != MAIN:
        how = f"{edge.tag}, {how}"
    target = plan.vertex(edge.target).head.name
    ends = {"from": str(edge.from_node), "to": str(target)}
    return {**ends, "how": how, "is_feedback": edge.is_feedback, "index": edge.index}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, Enum) else value
