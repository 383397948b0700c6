"""Workers that cannot go on because a peer left: what they say is held back until the peer's own words are heard (G15).

Each worker's words come on a connection of its own, so a peer may be heard before the one that it blames, however much
earlier that one spoke. Counterpart: ``supervisor``, which asks for the cause after each report, and sets the limit.
"""

from __future__ import annotations

from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision.events import WorkerFailed, WorkerLost


class Blames:
    """What was heard of one generation since the first of its workers blamed a peer."""

    def __init__(self) -> None:
        self._reports: dict[WorkerIndex, WorkerFailed] = {}
        self._losses: dict[WorkerIndex, Failure] = {}

    @property
    def is_open(self) -> bool:
        """Whether anybody's word is awaited."""
        return bool(self._reports)

    @property
    def first(self) -> Failure:
        """What was said first."""
        return next(iter(self._reports.values())).failure

    def report(self, event: WorkerFailed) -> Failure | None:
        """``event.peer`` is blamed. Return the cause if nobody's word is awaited any more."""
        assert event.peer is not None
        self._reports.setdefault(event.worker, event)
        return self._cause()

    def lost(self, event: WorkerLost) -> Failure | None:
        """A worker is gone, and will say no more than it has. Return the cause if nobody's word is awaited any more."""
        self._losses.setdefault(event.worker, loss_of(event))
        return self._cause()

    def clear(self) -> None:
        """The generation is over."""
        self._reports.clear()
        self._losses.clear()

    def _cause(self) -> Failure | None:
        """Who left without a word is the cause; if all have spoken, the connections between them are."""
        blamed = [report.peer for report in self._reports.values() if report.peer not in self._reports]
        if not all(peer in self._losses for peer in blamed):
            return None
        return next((self._losses[peer] for peer in blamed if peer is not None), self.first)


def loss_of(event: WorkerLost) -> Failure:
    """Return the failure that the loss of a worker is."""
    return Failure(FailureKind.LOST, f"worker {event.worker} was lost: {event.reason}")
