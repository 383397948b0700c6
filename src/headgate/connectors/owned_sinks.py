"""Sinks whose target remembers whose it is, and can be emptied (docs/spec/lives.md, docs/spec/starting-over.md).

Optional for a sink (``connectors.base``). Counterparts: ``runtime.driver.lives`` and ``runtime.driver.starting_over``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headgate.connectors.base import Sink
from headgate.model.ids import Generation
from headgate.model.life import Life, Mine, Owner
from headgate.model.targets import Target


@runtime_checkable
class OwnedSink(Sink, Protocol):
    """A sink whose target remembers which life of the pipeline writes to it (docs/spec/lives.md).

    Optional: a sink without these methods is not asked, and cannot tell a pipeline that starts over from one that
    goes on. All calls come from the driver, before a generation is claimed, and may be repeated.
    """

    def owner(self, pipeline: str, node: str) -> Owner:
        """Return what the target remembers; ``Owner()`` when it knows nothing of this sink. Changes nothing.

        ``others``: which other sinks of a pipeline of that name have written to the same target, as it remembers them.
        One of them may be this sink under its former name (LV9).

        Raises:
            StorageError
        """

    def own(self, pipeline: str, node: str, life: Life) -> Owner:
        """Remember ``life`` durably, in one step, if ``lives.may_own`` says so; return who owns the target then.

        Raises:
            StorageError: the caller repeats it.
        """

    def how_to_forget(self, pipeline: str, node: str) -> str:
        """Return what a user does so that the target lets the next life have it, such as a command."""


@runtime_checkable
class NeighbouringSink(OwnedSink, Protocol):
    """A sink whose target lists all sinks of a pipeline in ``Owner.others``, so that one answer is that of all (LV11).

    Optional: without it each sink is asked for itself.
    """

    @property
    def shared_target(self) -> str:
        """Return which target it is: sinks of one class with the same one share it."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What starting over would delete at a target.

    Attributes:
        what: for people, such as ``12 files with 1,234 records``; "" when there is nothing.
        where: the directory, stream or place it is in.
        stays: names of what somebody else has put there.
        problem: why it cannot be deleted, and what to do, as a sentence; "" when it can.
    """

    what: str
    where: str
    stays: tuple[str, ...] = ()
    problem: str = ""


KEPT = (
    "was made to forget whose it is, so it keeps what it holds; to start over, empty it yourself, or give the sink "
    "another place"
)
"""What stands against a target of which nobody knows any more who wrote it (SO4)."""


@runtime_checkable
class ResettableSink(OwnedSink, Protocol):
    """A sink whose target can be emptied, so that the pipeline starts over (docs/spec/starting-over.md).

    Optional: a pipeline with a sink that keeps something and has no such methods cannot be reset.
    """

    def recorded(self, node: str) -> Target:
        """Return what the sink called ``node`` writes to, as it is written down at each start."""

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """Return what is there of this sink. Changes nothing.

        ``mine`` says whose output would go, where several sinks write to one target.

        Raises:
            CorruptionError, StorageError
        """

    def start_over(self, pipeline: str, node: str, generation: Generation, life: Life, mine: Mine) -> None:
        """Fence all generations before ``generation``, delete what they wrote, then let ``life`` own the target.

        In this order, so that a call that was cut short can be repeated. Does nothing if ``life`` owns it already.
        ``mine`` as for ``holding``; whose the target is, was asked a moment ago.

        Raises:
            FencedError: a newer generation owns the target.
            UsageError: somebody else's output is among it.
            CorruptionError, StorageError: repeating is safe.
        """
