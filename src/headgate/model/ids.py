"""Identifiers, each of its own type, so that a checkpoint id is never passed where a generation is meant.

Key groups.
"""

from __future__ import annotations

from typing import NewType

from headgate.dataclass import dataclass

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


MAX_PARALLELISM_DEFAULT = 128
MAX_PARALLELISM_MAX = 32_768


def key_groups_of_subtask(subtask_index: int, max_parallelism: int, parallelism: int) -> range:
    """Return the contiguous range of key groups that ``subtask_index`` owns."""
    assert 0 <= subtask_index < parallelism <= max_parallelism, "a subtask owns key groups of its parallelism"
    start = -(-subtask_index * max_parallelism // parallelism)
    end = -(-(subtask_index + 1) * max_parallelism // parallelism)
    return range(start, end)
