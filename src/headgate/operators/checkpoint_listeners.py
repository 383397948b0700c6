"""Functions that listen to checkpoints or keep operator state (docs/spec/listeners.md), and their inspection.

For functions given to the verbs of a stream, and for a user's own sources and sinks, their readers and writers;
objects in the driver (hooks, ``on_round=``) may listen. ``operators.operator_state`` holds their state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import pyarrow as pa

from headgate.environment import ThreadEnded
from headgate.errors import UsageError
from headgate.model.schema_evolution import NO_OPERATOR_RULES, OperatorRules
from headgate.operators.operator_state import OperatorList, OperatorLists, UnionList
from headgate.operators.schemas import as_schema
from headgate.operators.user_functions import HookError, copied, user_traceback
from headgate.state.descriptors import NO_EVOLUTION, Evolution


class CheckpointListener:
    """Hears how checkpoints end. This is best effort: a notification may be lost, and is then not repeated.

    ``notify_checkpoint_complete(n)`` covers all checkpoints up to ``n``. The checkpoint may be older than the newest
    snapshot, and the notification of an earlier checkpoint may have been lost. So act on all ids ≤ ``n``, never on "the
    last one". The thread that processes records makes the calls, so a slow call delays its worker. If a call raises,
    the pipeline restarts from the newest completed checkpoint, which stays completed.
    """

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Called when checkpoint ``checkpoint_id`` is durable and no older checkpoint is in progress any more.

        Does nothing by default.
        """

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
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


LIST = "pending"
"""Name of the list of operator state that holds what is not known to be public."""


class PublishOnCheckpoint(CheckpointedFunction, CheckpointListener):
    """Publishes items once a completed checkpoint covers the records from which they were made.

    Derive from this class, call ``ready`` for each item while processing, and implement ``publish``. After a failure an
    item may be published again, so ``publish`` must tolerate repetition: for example, name files or number messages by
    the content of the item. Then each item is published exactly once in effect, and no item is published that a restart
    takes back.

    If you override ``restore`` or ``snapshot``, call the method of this class as well.

    Attributes:
        item_type: the Arrow, Polars or Python type of the items.
    """

    item_type: Any = str

    _ready: list[Any]
    _pending: dict[int, list[Any]]
    _kept: OperatorList

    def ready(self, item: Any) -> None:
        """Publish ``item`` when the next checkpoint or a later one completes.

        Whatever the item refers to must be durable by then. Finish a file that is still growing in ``snapshot``, before
        you call the ``snapshot`` of this class.
        """
        self._ready.append(item)

    def publish(self, items: list[Any]) -> None:
        """Make ``items`` public, oldest first. Some of them may have been published before."""
        raise NotImplementedError

    def restore(self, context: RestoreContext) -> None:
        """Publish all pending items of the restored checkpoint, because it is unknown which were published before."""
        pair = pa.struct(
            {"checkpoint": pa.int64(), "item": as_schema(context.operator, {"item": self.item_type})[0].type}
        )
        self._kept = context.list(LIST, pair)
        self._ready, self._pending = [], {}
        items = [entry["item"] for entry in self._kept.get()]
        if items:
            self.publish(items)
        self._kept.clear()

    def snapshot(self, context: SnapshotContext) -> None:
        """Make the ready items pending. The checkpoint contains all pending items."""
        if self._ready:
            self._pending[context.checkpoint_id] = self._ready
            self._ready = []
        self._kept.put(
            {"checkpoint": checkpoint, "item": item} for checkpoint, items in self._pending.items() for item in items
        )

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Publish the items that are pending up to ``checkpoint_id``, oldest first, and then forget them."""
        covered = [checkpoint for checkpoint in self._pending if checkpoint <= checkpoint_id]
        items = [item for checkpoint in covered for item in self._pending[checkpoint]]
        if items:
            self.publish(items)
        for checkpoint in covered:
            del self._pending[checkpoint]


F = TypeVar("F")


def own_copy_of(node: str, function: F) -> F:
    """Return ``function`` for one subtask: a copy if checkpoints have to do with it (HL2), else itself.

    Raises:
        UsageError: it cannot be copied.
    """
    if isinstance(function, CheckpointListener | CheckpointedFunction):
        return copied(node, function)  # type: ignore[no-any-return]
    return function


def uncalled_method(found: object, names: tuple[str, ...] = ("notify_checkpoint_",)) -> str | None:
    """Return why ``found`` would not be called: a method begins with one of ``names``, and it derives from no class
    whose objects are (HL1); None if nothing is wrong.
    """
    for name, mixin in _CALLED.items():
        has_it = name.startswith(names) and callable(getattr(type(found), name, None))
        if has_it and not isinstance(found, mixin):
            return (
                f"{type(found).__name__}.{name} would never be called: derive the class from "
                f"headgate.{mixin.__name__}, too, or give the method another name if it is for your own use"
            )
    return None


def hidden_listener(function: object) -> object | None:
    """Return the object of a bound method or partial function that would not be called (HL20)."""
    if isinstance(function, partial):
        inner: object = function.func
    elif isinstance(function, MethodType):
        inner = function.__self__
    else:
        return None
    return inner if isinstance(inner, CheckpointListener | CheckpointedFunction) else hidden_listener(inner)


_CALLED = {
    "notify_checkpoint_complete": CheckpointListener,
    "notify_checkpoint_aborted": CheckpointListener,
    "snapshot": CheckpointedFunction,
    "restore": CheckpointedFunction,
}
"""Who derives from what, has such a method called."""


def lists_text(node: str, function: object) -> str:
    """Return the identity of the operator state that ``function`` declares, learned from a copy; "" for none (HL14).

    Raises:
        UsageError: a wrong declaration.
        HookError: its ``restore`` raised.
    """
    lists = _declared(node, function)
    return "" if lists is None else lists.text()


def lists_rules(node: str, function: object) -> OperatorRules:
    """Return what ``function`` says about its lists in older checkpoints, as ``lists_text`` learns them.

    Raises:
        UsageError, HookError
    """
    lists = _declared(node, function)
    return NO_OPERATOR_RULES if lists is None else lists.rules()


def _declared(node: str, function: object) -> OperatorLists | None:
    if not isinstance(function, CheckpointedFunction):
        return None
    lists = OperatorLists(node)
    restored(copied(node, function), lists, is_restored=False)
    return lists


def restored(function: CheckpointedFunction, lists: OperatorLists, *, is_restored: bool) -> None:
    """Call the function's ``restore``.

    Raises:
        UsageError: a wrong declaration, or one that does not fit the checkpoint.
        HookError: it raised.
    """
    try:
        function.restore(RestoreContext(lists, is_restored=is_restored))
    except (UsageError, ThreadEnded, KeyboardInterrupt):  # a pipeline may just be being built
        raise
    except BaseException as error:
        raise HookError(lists.node, "restore()", user_traceback(error)) from None
    lists.close()
