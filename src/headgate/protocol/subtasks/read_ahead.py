"""Which batches of a source may be processed at most once (rules GM30–GM32 of docs/spec/guarantees.md).

One ``ReadAhead`` per source subtask, in that mode only. It counts batches in the order in which they were read, and
never sees one. Counterparts: ``runtime.worker.ahead_reader``, which holds them, and the ``Coordinator``, whose
completions release them.
"""

from __future__ import annotations

from headgate.model.ids import CheckpointId


class ReadAhead:
    """A batch may be processed once a completed checkpoint holds a position behind it."""

    def __init__(self) -> None:
        self._read = 0
        self._taken = 0
        self._released = 0
        self._covered: dict[CheckpointId, int] = {}
        self._is_over = False

    @property
    def held(self) -> int:
        """Batches that were read and not yet processed."""
        return self._read - self._taken

    @property
    def may_take(self) -> bool:
        """Whether the oldest batch that is held may be processed (GM30)."""
        return not self._is_over and self._taken < self._released

    def read(self) -> None:
        """One more batch was read, and is held."""
        self._read += 1

    def take(self) -> None:
        """The oldest batch that is held is processed now."""
        assert self.may_take, "nothing is processed that a restore might read again (GM30)"
        self._taken += 1

    def cut(self, checkpoint: CheckpointId, *, is_last: bool) -> bool:
        """A snapshot is taken; return whether its positions go behind everything that was read.

        Those of the last one before a stop go in front of what is held: nothing of it is processed any more (GM32).
        """
        self._is_over = self._is_over or is_last
        if not is_last:
            self._covered[checkpoint] = self._read
        return not is_last

    def completed(self, checkpoint: CheckpointId) -> None:
        """Everything that this checkpoint, or an older one, covers may be processed (C16)."""
        covered = [count for older, count in self._covered.items() if older <= checkpoint]
        self._released = max([self._released, *covered])
        self._covered = {newer: count for newer, count in self._covered.items() if newer > checkpoint}
        assert self._taken <= self._released <= self._read
