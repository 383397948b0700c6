"""Why a checkpoint did not complete: a closed list, each with a text and whether it counts (C23, C25)."""

from __future__ import annotations

from enum import Enum


class AbortReason(Enum):
    """Reason for an abort or a decline."""

    EXPIRED = "it did not complete within its timeout"
    SNAPSHOT_FAILED = "a subtask could not write its snapshot"
    MANIFEST_FAILED = "its manifest could not be written"
    RESERVE_FAILED = "its id could not be recorded in the checkpoint storage"
    HOOK_FAILED = "a hook of the coordinator failed"
    HOOK_TIMED_OUT = "a hook of the coordinator did not answer within its timeout"
    MARKER_MISSED = "a source went past its marker without having met it everywhere"
    MARKER_AHEAD = "a source still reads towards its marker, for which the next one has more time"
    MARKER_NOT_MET = "a source met no marker however long it read"
    SUBSUMED = "a newer checkpoint completed first"
    OVERTAKEN = "a newer barrier arrived before it was aligned"
    CANCELLED_UPSTREAM = "an upstream subtask gave it up"

    @property
    def text(self) -> str:
        """The reason as a clause."""
        return self.value

    @property
    def counts_as_failure(self) -> bool:
        """Whether it counts towards ``tolerable_failures``."""
        return self in _COUNTED


_COUNTED = frozenset(
    {
        AbortReason.EXPIRED,
        AbortReason.SNAPSHOT_FAILED,
        AbortReason.MANIFEST_FAILED,
        AbortReason.RESERVE_FAILED,
        AbortReason.HOOK_FAILED,
        AbortReason.HOOK_TIMED_OUT,
        AbortReason.MARKER_MISSED,
        AbortReason.MARKER_NOT_MET,
    }
)
