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


class CheckpointListener:  # HL3
    """Is told how checkpoints end. This is best effort: a notification may be lost, and is then not repeated.

    ``notify_checkpoint_complete(n)`` covers all checkpoints up to ``n``. The checkpoint may be older than the newest
    snapshot, and the notification of an earlier checkpoint may have been lost. So act on all ids ≤ ``n``, never on "the
    last one". The thread that processes records makes the calls, so a slow call delays its worker. If a call raises,
    the pipeline restarts from the newest completed checkpoint, which stays completed.
    """

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Called when checkpoint ``checkpoint_id`` is durable and no older checkpoint is in progress any more.

        Does nothing by default.
        """

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:  # HL5
        """Called when checkpoint ``checkpoint_id`` was aborted, as if it had never begun.

        Discard nothing: a later checkpoint covers it. Does nothing by default.
        """


class RestoreContext:
    """The argument of ``CheckpointedFunction.restore``: identifies the subtask, and declares the lists that it keeps.

    Attributes:
        operator: the name of the operator, source or sink.
        subtask_index: the number of this subtask, among ``parallelism`` subtasks.
        is_restored: whether the pipeline continues from a checkpoint; False on a first start.
    """

    def __init__(self, lists: OperatorLists, *, is_restored: bool) -> None:
        """For Headgate only."""
        self._lists = lists
        self.operator = lists.node
        self.subtask_index = lists.subtask_index
        self.parallelism = lists.parallelism
        self.is_restored = is_restored

    def list(self, name: str, type: Any, *, evolution: Evolution = NO_EVOLUTION) -> OperatorList:
        """Declare a list of elements of ``type`` (Arrow, Polars or Python), and return it with its restored elements.

        At another parallelism, the elements of all subtasks are distributed in turn, each to one subtask. ``evolution``
        describes how to convert elements that an older version of the program wrote.
        """
        return self._lists.declare(name, type, evolution)

    def union(self, name: str, type: Any, *, evolution: Evolution = NO_EVOLUTION) -> UnionList:
        """Declare a list for which every subtask sees, after a restore, the elements of all subtasks."""
        return self._lists.declare_union(name, type, evolution)

    def forget(self, name: str) -> None:
        """Drop the list ``name`` of older checkpoints, which the program no longer declares."""
        self._lists.forget(name)


@dataclass(frozen=True, slots=True)
class SnapshotContext:
    """The argument of ``CheckpointedFunction.snapshot``."""

    checkpoint_id: int


class CheckpointedFunction:
    """A function with operator state: lists that belong to a subtask, not to a key. They are part of every checkpoint.

    Every subtask works on a copy of the instance.
    """

    def restore(self, context: RestoreContext) -> None:
        """Declare the lists, always the same ones: ``self.pending = context.list("pending", str)``.

        Called once per subtask before its first record, also on a first start, and once on a copy when the pipeline is
        built. All lists are empty in that call.
        """

    def snapshot(self, context: SnapshotContext) -> None:
        """Bring the lists up to date: the checkpoint freezes them directly after this call. Does nothing by default."""
