"""What the latest checkpoints cost each subtask, as workers report it. Part of ``progress_book``."""

from __future__ import annotations

from collections.abc import Iterable

from headgate.codec.messages import AlignmentMetrics
from headgate.model.ids import CheckpointId
from headgate.model.progress import SubtaskAlignment

ALIGNED_CHECKPOINTS_MAX = 100
"""As many as a page shows (``web.story``)."""


class AlignmentBook:
    """The alignments of the checkpoints with the highest numbers."""

    def __init__(self) -> None:
        self._by_checkpoint: dict[CheckpointId, dict[tuple[str, int], SubtaskAlignment]] = {}

    def add(self, worker: int, reported: Iterable[AlignmentMetrics]) -> None:
        """A worker reported; it runs the subtask of its own number of every vertex."""
        for one in reported:
            subtasks = self._by_checkpoint.setdefault(CheckpointId(one.checkpoint), {})
            subtasks[one.vertex, worker] = SubtaskAlignment(f"{one.vertex}[{worker}]", one.align_us, one.freeze_us)
            if len(self._by_checkpoint) > ALIGNED_CHECKPOINTS_MAX:
                del self._by_checkpoint[min(self._by_checkpoint)]

    def latest(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        """Return them by checkpoint, in order of subtasks. From any thread."""
        found = {number: subtasks.copy() for number, subtasks in self._by_checkpoint.copy().items()}
        return {number: tuple(found[number][key] for key in sorted(found[number])) for number in sorted(found)}
