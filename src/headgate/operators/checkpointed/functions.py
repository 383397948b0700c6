"""What users derive from to hear of checkpoints, and to keep state that belongs to no key (docs/spec/listeners.md).

Counterparts: ``runtime.worker.hooks`` calls them, ``operators.checkpointed.lists`` holds their state. For functions
given to the verbs of a stream, and for a user's own sources and sinks, their readers and writers; objects in the driver
(hooks, ``on_round=``) may listen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headgate.operators.checkpointed.lists import OperatorList, OperatorLists, UnionList
from headgate.state.evolution import NO_EVOLUTION, Evolution


class CheckpointListener:
    """Hears how checkpoints end. Best effort: what is said may be lost, and then nobody says it again (HL3).

    ``notify_checkpoint_complete(n)`` is about everything up to ``n``: the checkpoint may be older than the newest
    snapshot, and what was said of one before may have been lost. Act on all ids ≤ ``n``, never on "the last one".
    Calls come from the thread that processes records, so a slow one holds up its worker. One that raises has the
    pipeline start again from the newest completed checkpoint, which stays completed.
    """

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Checkpoint ``checkpoint_id`` is durable; no older one is under way any more. Does nothing by default."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """It is as if ``checkpoint_id`` had never begun: throw nothing away, a later one covers it (HL5).

        Does nothing by default.
        """


class RestoreContext:
    """Given to ``CheckpointedFunction.restore``: who is asking, and the lists that it keeps.

    Attributes:
        operator: name of the operator, source or sink.
        subtask_index: of ``parallelism`` copies, this is the one with this number.
        is_restored: the pipeline goes on from a checkpoint; False on a first start.
    """

    def __init__(self, lists: OperatorLists, *, is_restored: bool) -> None:
        """For Headgate only."""
        self._lists = lists
        self.operator = lists.node
        self.subtask_index = lists.subtask_index
        self.parallelism = lists.parallelism
        self.is_restored = is_restored

    def list(self, name: str, type: Any, *, evolution: Evolution = NO_EVOLUTION) -> OperatorList:
        """Declare a list of elements of ``type`` (Arrow, Polars or Python), and return it with what it had.

        At another parallelism the elements of all subtasks are dealt out in turn, each to one subtask. ``evolution``
        says what becomes of elements that an older version of the program wrote.
        """
        return self._lists.declare(name, type, evolution)

    def union(self, name: str, type: Any, *, evolution: Evolution = NO_EVOLUTION) -> UnionList:
        """Declare a list whose elements every subtask gets to see after a restore, beside its own."""
        return self._lists.declare_union(name, type, evolution)

    def forget(self, name: str) -> None:
        """Leave behind what older checkpoints have of the list ``name``, which is not declared any more."""
        self._lists.forget(name)


@dataclass(frozen=True, slots=True)
class SnapshotContext:
    """Given to ``CheckpointedFunction.snapshot``."""

    checkpoint_id: int


class CheckpointedFunction:
    """Keeps operator state: lists that belong to a subtask, not to a key. They are in every checkpoint.

    Every subtask works on a copy of the instance.
    """

    def restore(self, context: RestoreContext) -> None:
        """Declare the lists, always the same ones: ``self.pending = context.list("pending", str)``.

        Called once per subtask before its first record, on a first start too, and once on a copy when the pipeline is
        built (all lists are empty then).
        """

    def snapshot(self, context: SnapshotContext) -> None:
        """A checkpoint freezes the lists directly after this call: bring them up to date. Does nothing by default."""
