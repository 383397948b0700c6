"""Checkpoint listeners and operator state of one subtask: users' functions, readers and writers (HL7).

Found once, when the subtask is built: a subtask without any is called for nothing. Everything happens in the mailbox
thread. ``subtask_runner`` says when; users derive from ``operators.checkpoint_listeners``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.codec.snapshot import LISTS_PREFIX, UNION_PREFIX
from headgate.connectors.base import SinkWriter
from headgate.environment import ThreadEnded
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.operators.base import RestoredState
from headgate.operators.checkpoint_listeners import (
    CheckpointedFunction,
    CheckpointListener,
    OperatorLists,
    SnapshotContext,
    restored,
    uncalled_method,
)
from headgate.operators.user_functions import HookError, user_traceback
from headgate.runtime.worker.chain import Chain, Link, NodeError
from headgate.state.snapshot import FrozenState


class SubtaskListeners:
    """The objects of one subtask that listen or keep lists, each in the order of the chain."""

    def __init__(self, chain: Chain) -> None:
        """Find them; ``chain`` is open."""
        objects = [(str(link.node.name), found, link.context) for link in chain.links for found in _objects_of(link)]
        self._listeners = [(node, found) for node, found, _ in objects if isinstance(found, CheckpointListener)]
        self._functions = [
            (found, OperatorLists(node, context.subtask_index, context.parallelism))
            for node, found, context in objects
            if isinstance(found, CheckpointedFunction)
        ]
        keeping = [lists.node for _, lists in self._functions]
        self._others = [str(link.node.name) for link in chain.links if str(link.node.name) not in keeping]
        self._completed = CheckpointId(0)
        for node in keeping:
            if keeping.count(node) > 1:
                raise UsageError(
                    f"'{node}' and what its open() returns are both headgate.CheckpointedFunctions, and their lists "
                    "would have the same names; keep the lists in one of them"
                )
        for function, lists in self._functions:
            if isinstance(function, SinkWriter) and function.can_hold_back:
                raise UsageError(
                    f"the writer of sink '{lists.node}' is a CheckpointedFunction, and has freeze() and finish() of a "
                    "writer that holds records back: restore() cannot mean both; keep what it holds in lists"
                )

    @property
    def is_listening(self) -> bool:
        """Whether anybody hears of checkpoints."""
        return bool(self._listeners)

    def restore(self, states_of: Callable[[str], Sequence[RestoredState]], *, is_restored: bool) -> None:
        """Have functions declare their lists, with what the checkpoint has of them; after keyed state.

        Raises:
            NodeError: naming the operator.
            UsageError: there are lists of an operator that keeps none any more.
        """
        for node in self._others:
            # lists that no function takes over would be missing from the next checkpoint, in silence
            if states_of(node):
                raise UsageError(
                    f"the restored checkpoint holds operator state of '{node}', which keeps none any more; make it a "
                    "headgate.CheckpointedFunction again, or run under another pipeline name"
                )
        for function, lists in self._functions:
            lists.take(states_of(lists.node))
            try:
                restored(function, lists, is_restored=is_restored)
            except ThreadEnded:
                raise
            except BaseException as error:
                raise NodeError(lists.node, error) from error

    def snapshot(self, checkpoint: CheckpointId) -> dict[tuple[str, str], FrozenState]:
        """Call ``snapshot`` of all functions, and freeze their lists.

        Raises:
            NodeError: naming the operator.
        """
        frozen: dict[tuple[str, str], FrozenState] = {}
        for function, lists in self._functions:
            try:
                function.snapshot(SnapshotContext(int(checkpoint)))
            except ThreadEnded:
                raise
            except BaseException as error:
                raise _error(lists.node, f"snapshot() for checkpoint {checkpoint}", error, may_pass=False) from error
            for prefix, is_union in ((LISTS_PREFIX, False), (UNION_PREFIX, True)):
                state = lists.freeze(is_union=is_union)
                if state is not None:
                    frozen[prefix, lists.node] = state
        return frozen

    def completed(self, checkpoint: CheckpointId) -> None:
        """Tell all listeners; ids rise, and nothing is said twice.

        Raises:
            NodeError: naming the operator.
        """
        if checkpoint <= self._completed:
            return
        self._completed = checkpoint
        for node, listener in self._listeners:
            try:
                listener.notify_checkpoint_complete(int(checkpoint))
            except ThreadEnded:
                raise
            except BaseException as error:
                raise _error(node, f"notify_checkpoint_complete({checkpoint})", error) from error

    def aborted(self, checkpoint: CheckpointId) -> None:
        """Tell all listeners.

        Raises:
            NodeError: naming the operator.
        """
        for node, listener in self._listeners:
            try:
                listener.notify_checkpoint_aborted(int(checkpoint))
            except ThreadEnded:
                raise
            except BaseException as error:
                raise _error(node, f"notify_checkpoint_aborted({checkpoint})", error) from error


def _objects_of(link: Link) -> list[object]:
    """Return what a user gave to one node, each object once: a source before its reader, a sink before its writer.

    Raises:
        UsageError: a reader or writer has a method that is never called; others are refused earlier.
    """
    maker, found = link.operator.opened_by, link.operator.user_object
    if maker is not None:
        problem = uncalled_method(found)
        if problem:
            raise UsageError(f"operator '{link.node.name}': {problem}")
    return [found] if maker is None or maker is found else [maker, found]


def _error(node: str, call: str, error: BaseException, *, may_pass: bool = True) -> NodeError:
    return NodeError(node, HookError(node, call, user_traceback(error), may_pass))
