"""Checkpoints that the coordinator aborted before any barrier of them came (A8, GM15).

A part of the machines that meet barriers: ``align``, ``overtake`` and ``track``. Remembers only ids that were given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headgate.model.ids import CheckpointId


class AbortedIds:
    """The newest ids that were aborted early, in the order in which that was heard."""

    COUNT_MAX = 128
    """As many as Flink remembers; barriers of older ones cannot arrive any more."""

    def __init__(self) -> None:
        self._ids: OrderedDict[CheckpointId, None] = OrderedDict()

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        """Return whether ``checkpoint`` is remembered."""
        return checkpoint in self._ids

    def __iter__(self) -> Iterator[CheckpointId]:
        """Go through all of them."""
        return iter(self._ids)

    def add(self, checkpoint: CheckpointId) -> None:
        """Remember ``checkpoint``; forget the one that was heard of first if there are too many."""
        self._ids[checkpoint] = None
        if len(self._ids) > self.COUNT_MAX:
            self._ids.popitem(last=False)

    def discard(self, checkpoint: CheckpointId) -> bool:
        """Forget ``checkpoint``; return whether it was remembered."""
        return self._ids.pop(checkpoint, self) is None

    def discard_up_to(self, checkpoint: CheckpointId) -> bool:
        """Forget ``checkpoint`` and everything older; return whether it was remembered itself."""
        was_aborted = checkpoint in self._ids
        for old in [c for c in self._ids if c <= checkpoint]:
            del self._ids[old]
        return was_aborted
