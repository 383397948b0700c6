"""Identifiers. Each is its own type, so that a checkpoint id is never passed where a generation is meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

CheckpointId = NewType("CheckpointId", int)
"""Strictly increasing over all generations of one pipeline; the first is 1."""

Generation = NewType("Generation", int)
"""One life of the whole pipeline; fences older ones. The first is 1."""

ChannelIndex = NewType("ChannelIndex", int)
"""Position of an input channel within its subtask: 0 ≤ index < number of input channels."""

VertexId = NewType("VertexId", str)
"""Name of a chain of operators: the name of its first node."""

NodeName = NewType("NodeName", str)
"""Name of one operator, unique in its pipeline and stable across restarts."""

WorkerIndex = NewType("WorkerIndex", int)
"""Index of a worker, equal to the index of the subtasks it hosts."""


@dataclass(frozen=True, slots=True, order=True)
class SubtaskId:
    """One parallel instance of a vertex: ``vertex`` and ``index`` (0 ≤ index < parallelism)."""

    vertex: VertexId
    index: int

    def __str__(self) -> str:
        return f"{self.vertex}[{self.index}]"
