"""How long a checkpoint waits for sources that read towards its marker (rules EI34–EI37 of docs/spec/induced.md).

Part of the ``Coordinator``. A restart would have such a source read the same records again and come no further, so a
checkpoint that only waits for its cut is not a failure. Counterpart: ``runtime.worker.sources``, which tells that a
source reads on. Never ends a checkpoint: it only says what an expiry means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headgate.model.ids import SubtaskId, VertexId
from headgate.protocol.checkpoints.reasons import AbortReason

TIMEOUTS_MAX = 64
"""Timeouts within which a source that reads on must have met a marker: beyond them it has perhaps none (EI37)."""


@dataclass(slots=True)
class MarkerWait:
    """What is known of the sources that a pending checkpoint waits for.

    Attributes:
        timeouts_max: of how many timeouts it may take before they are cut.
        timeouts: of how many it has begun.
        uncut: sources that read and had not met the marker when they last said so.
        reading: those of them that have said so since the last timeout began.
    """

    timeouts_max: int = 1
    timeouts: int = 1
    uncut: set[SubtaskId] = field(default_factory=set)
    reading: set[SubtaskId] = field(default_factory=set)

    def told(self, subtask: SubtaskId, *, is_uncut: bool) -> bool:
        """A source has read on; return whether it was the last one that had to be cut."""
        if is_uncut:
            self.uncut.add(subtask)
            self.reading.add(subtask)
            return False
        is_known = subtask in self.uncut
        self.uncut.discard(subtask)
        self.reading.discard(subtask)
        return is_known and not self.uncut


class MarkerPatience:
    """How many timeouts the next checkpoint may take before its sources are cut."""

    def __init__(self, behind: Mapping[VertexId, Collection[VertexId]]) -> None:
        """``behind``: of each source, the vertices that its records may reach."""
        self._behind = behind
        self._timeouts = 1

    def begun(self) -> MarkerWait:
        """Return what a checkpoint that begins now may take."""
        return MarkerWait(self._timeouts)

    def expired(self, wait: MarkerWait, missing: Collection[SubtaskId]) -> AbortReason | None:
        """A timeout is over, and ``missing`` have not acknowledged. Return why to give up; None: wait for another."""
        if not self._only_reads(wait, missing):
            return AbortReason.EXPIRED
        wait.reading.clear()
        if wait.timeouts < wait.timeouts_max:
            wait.timeouts += 1
            return None
        if wait.timeouts_max == TIMEOUTS_MAX:
            return AbortReason.MARKER_NOT_MET
        self._timeouts = max(self._timeouts, 2 * wait.timeouts_max)
        return AbortReason.MARKER_AHEAD

    def completed(self, wait: MarkerWait) -> None:
        """The next one may take as long as this one did, and may take longer when it turns out that it must."""
        self._timeouts = wait.timeouts

    def _only_reads(self, wait: MarkerWait, missing: Collection[SubtaskId]) -> bool:
        """Whether nothing is missing but the cuts of sources that have come forward, and what is behind them."""
        waiting = wait.uncut.intersection(missing)
        if not waiting or not waiting <= wait.reading:
            return False
        behind = {vertex for source in waiting for vertex in self._behind.get(source.vertex, ())}
        return all(subtask in waiting or subtask.vertex in behind for subtask in missing)
