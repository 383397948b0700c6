"""Functions that listen to checkpoints or keep operator state, and their inspection (docs/spec/listeners.md).

For functions given to the verbs of a stream, and for a user's own sources and sinks, their readers and writers;
objects in the driver (hooks, ``on_round=``) may listen. Operator state is lists of a subtask, which a restore deals
out again. Values are stored as keyed state stores them (``state.values``), so that they cannot be
changed from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.environment import ThreadEnded
from headgate.errors import CorruptionError, UsageError
from headgate.model.schema_evolution import NO_OPERATOR_RULES, Misfit, OperatorRules
from headgate.model.state_schema import StateIdentity, declared
from headgate.operators.base import RestoredState
from headgate.operators.schemas import as_schema
from headgate.operators.user_functions import HookError, copied, is_of_one_subtask, user_traceback
from headgate.state.descriptors import (
    NO_EVOLUTION,
    Evolution,
    check_names,
    checked_evolution,
    evolved_values,
    type_text,
)
from headgate.state.snapshot import FrozenState
from headgate.state.values import Conversion, conversion, mismatch, python_values

_COLUMN = "value"


@dataclass(frozen=True)
class ListDescriptor:
    """One declared list.

    Attributes:
        is_union: after a restore every subtask sees the elements of all.
        evolution: what becomes of elements that an older program wrote.
    """

    name: str
    type: pa.DataType
    is_union: bool = False
    evolution: Evolution = field(default=NO_EVOLUTION, compare=False)

    def text(self) -> str:
        """Return its part of the identity of the operator's state."""
        return declared("union" if self.is_union else "list", self.name, type_text(self.type))


class OperatorList:
    """A list of one subtask. A checkpoint contains the elements that the list has when the checkpoint is taken."""

    def __init__(self, node: str, descriptor: ListDescriptor, stored: list[Any], values: Conversion) -> None:
        """For Headgate only; declare lists with ``RestoreContext``."""
        self._node = node
        self._descriptor = descriptor
        self._stored = stored
        self._values = values

    def get(self) -> list[Any]:
        """Return a new list of the elements; changing it does not change the state."""
        return [self._values.loaded(element) for element in self._stored]

    def put(self, values: Iterable[Any]) -> None:
        """Replace all elements. If one does not fit the type, nothing is replaced.

        Raises:
            UsageError: an element does not fit, or is None.
        """
        self._stored = [self._checked(value) for value in values]

    def append(self, value: Any) -> None:
        """Add one element at the end.

        Raises:
            UsageError: the element does not fit, or is None.
        """
        self._stored.append(self._checked(value))

    def clear(self) -> None:
        """Remove all elements."""
        self._stored = []

    def __len__(self) -> int:
        return len(self._stored)

    def frozen(self) -> FrozenList:
        """Return the elements as they are now; for Headgate only."""
        return FrozenList(self._descriptor.type, self._values, list(self._stored))

    def _checked(self, value: Any) -> Any:
        try:
            if value is None:
                raise ValueError("an element cannot be null")
            return self._values.store(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise UsageError(
                f"list '{self._descriptor.name}' of operator '{self._node}' holds {self._descriptor.type}, "
                f"but was given {mismatch(value, error)}"
            ) from None


class UnionList(OperatorList):
    """A list of one subtask that also shows the elements of all subtasks in the restored checkpoint."""

    def __init__(
        self, node: str, descriptor: ListDescriptor, stored: list[Any], values: Conversion, everybodys: list[Any]
    ) -> None:
        """For Headgate only; declare lists with ``RestoreContext``."""
        super().__init__(node, descriptor, stored, values)
        self._everybodys = everybodys

    @property
    def restored(self) -> list[Any]:
        """The elements of all subtasks in the restored checkpoint, in the order of the subtasks, as a new list.

        They never change. ``get`` returns the elements of this subtask.
        """
        return [self._values.loaded(element) for element in self._everybodys]


@dataclass(frozen=True)
class FrozenList:
    """The elements of a list at a barrier."""

    type: pa.DataType
    values: Conversion
    stored: list[Any]

    def encode(self) -> Buffer:
        """Return them as an Arrow stream of one column."""
        column = pa.array([self.values.loaded(element) for element in self.stored], self.type)
        sink = pa.BufferOutputStream()
        schema = pa.schema([pa.field(_COLUMN, self.type)])
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([column], schema=schema))
        return sink.getvalue()


class FrozenLists(FrozenState):
    """Lists of one operator at a barrier."""

    def __init__(self, lists: Mapping[str, FrozenList]) -> None:
        super().__init__()
        self._lists = dict(lists)

    def _rows(self) -> Mapping[str, int]:
        return {name: len(frozen.stored) for name, frozen in self._lists.items()}

    def _encode(self) -> Sequence[Buffer]:
        return encode_sections({name: [frozen.encode()] for name, frozen in self._lists.items()})

    def _forget(self) -> None:
        self._lists = {}


@dataclass(frozen=True)
class RestoredElements:
    """What one former subtask had in one list."""

    subtask_index: int
    elements: pa.Array


L = TypeVar("L", bound=OperatorList)


@dataclass
class OperatorLists:
    """All lists of one operator in one subtask. ``formers_count``: the former parallelism, 0 without a checkpoint."""

    node: str
    subtask_index: int = 0
    parallelism: int = 1
    restored: dict[str, list[RestoredElements]] = field(default_factory=dict)
    formers_count: int = 0
    _declared: dict[str, tuple[ListDescriptor, OperatorList]] = field(default_factory=dict)
    _forgotten: set[str] = field(default_factory=set)
    _is_closed: bool = False

    def take(self, states: Sequence[RestoredState]) -> None:
        """Take what ``FrozenLists`` wrote, by former subtask. Before anything is declared.

        Raises:
            CorruptionError: a part is not what was written.
        """
        for state in states:
            self.formers_count = state.parallelism
            path = f"operator state of '{self.node}', subtask {state.subtask_index}"
            for name, data in decode_sections(state.payload, path).items():
                found = RestoredElements(state.subtask_index, _decoded(data, path))
                self.restored.setdefault(name, []).append(found)

    def declare(self, name: str, type: Any, evolution: Evolution = NO_EVOLUTION) -> OperatorList:
        """See ``RestoreContext.list``."""
        descriptor, values, own, _ = self._described(name, type, evolution, is_union=False)
        return self._kept(descriptor, OperatorList(self.node, descriptor, own, values))

    def declare_union(self, name: str, type: Any, evolution: Evolution = NO_EVOLUTION) -> UnionList:
        """See ``RestoreContext.union``."""
        descriptor, values, own, everybodys = self._described(name, type, evolution, is_union=True)
        return self._kept(descriptor, UnionList(self.node, descriptor, own, values, everybodys))

    def forget(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise UsageError(f"operator '{self.node}': forget takes the name of a list, not {name!r}")
        self._forgotten.add(name)

    def rules(self) -> OperatorRules:
        """Return what was said about lists in older checkpoints."""
        said = tuple((name, descriptor.evolution.rules()) for name, (descriptor, _) in self._declared.items())
        return OperatorRules(lists=said, forgotten_lists=frozenset(self._forgotten))

    def close(self) -> None:
        """End the declarations.

        Raises:
            UsageError: the checkpoint has a list that was not declared, or an old name is declared.
        """
        self._is_closed = True
        evolutions = {name: descriptor.evolution for name, (descriptor, _) in self._declared.items()}
        check_names(f"operator '{self.node}'", evolutions, self._forgotten)
        former = {evolution.renamed_from for evolution in evolutions.values()}
        for name in self.restored:
            if name not in self._declared and name not in self._forgotten and name not in former:
                raise UsageError(
                    f"the restored checkpoint holds a list '{name}' of operator '{self.node}', which its function does "
                    "not declare any more; declare it again, or run under another pipeline name"
                )
        self.restored = {}

    def text(self) -> str:
        """Return the identity of the state, "" when nothing is declared."""
        texts = [descriptor.text() for _, (descriptor, _) in sorted(self._declared.items())]
        return StateIdentity.of_lists(texts).text

    def freeze(self, *, is_union: bool) -> FrozenLists | None:
        """Return all lists of one kind as they are now; None when they are empty."""
        found = {
            name: kept.frozen()
            for name, (descriptor, kept) in self._declared.items()
            if descriptor.is_union == is_union and len(kept)
        }
        return FrozenLists(found) if found else None

    def _kept(self, descriptor: ListDescriptor, made: L) -> L:
        self._declared[descriptor.name] = (descriptor, made)
        return made

    def _described(
        self, name: str, type: Any, evolution: Evolution, *, is_union: bool
    ) -> tuple[ListDescriptor, Conversion, list[Any], list[Any]]:
        where = f"operator '{self.node}'"
        if self._is_closed:
            raise UsageError(f"{where}: list '{name}' must be declared in restore()")
        if not isinstance(name, str) or not name:
            raise UsageError(f"{where}: a list's name must be text, not {name!r}")
        if name in self._declared:
            raise UsageError(f"{where}: two lists are named '{name}'; give each a name of its own")
        try:
            dtype = as_schema(self.node, {name: type}).field(0).type
        except UsageError as error:
            raise UsageError(f"{where}: list '{name}': {error.message}") from None
        checked_evolution(f"{where}: list '{name}'", evolution, dtype)
        descriptor, values = ListDescriptor(name, dtype, is_union, evolution), conversion(dtype)
        own, everybodys = self._shares(descriptor, values)
        return descriptor, values, own, everybodys

    def _shares(self, descriptor: ListDescriptor, values: Conversion) -> tuple[list[Any], list[Any]]:
        """Return this subtask's elements, and those of all subtasks if they are known."""
        former = descriptor.evolution.renamed_from or ""
        restored = self.restored.get(descriptor.name) or self.restored.get(former, [])
        parts = sorted(restored, key=lambda part: part.subtask_index)
        by_former: list[tuple[int, list[Any]]] = []
        for part in parts:
            elements = evolved_values(part.elements, descriptor.type, descriptor.evolution)
            if isinstance(elements, Misfit):
                raise UsageError(
                    f"list '{descriptor.name}' of operator '{self.node}' holds {part.elements.type} in the restored "
                    f"checkpoint, but is declared as {descriptor.type} now: {elements.why}; restore the old "
                    "declaration, or give the list, the operator or the pipeline another name"
                )
            by_former.append((part.subtask_index, [values.store(value) for value in python_values(elements)]))
        everybodys = [element for _, elements in by_former for element in elements]
        if self.formers_count == self.parallelism:
            return [e for index, elements in by_former if index == self.subtask_index for e in elements], everybodys
        return everybodys[self.subtask_index :: self.parallelism], everybodys


def _decoded(data: memoryview, path: str) -> pa.Array:
    try:
        schema, batches = read_stream(data)
        return pa.Table.from_batches(batches, schema).column(_COLUMN).combine_chunks()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise CorruptionError(path, 0, "a list of operator state", str(error)) from error


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
    """Return ``function``, a source or a sink for one subtask: a copy if checkpoints have to do with it, else itself.

    Raises:
        UsageError: it cannot be copied.
    """
    if isinstance(function, CheckpointListener | CheckpointedFunction):
        return copied(node, function)  # type: ignore[no-any-return]
    return function


def own_function_of(node: str, function: F) -> F:
    """Return ``function`` as ``own_copy_of`` does; also a copy if it is opened, closed or counts.

    Raises:
        UsageError: it cannot be copied.
    """
    return copied(node, function) if is_of_one_subtask(function) else own_copy_of(node, function)


def uncalled_method(found: object, names: tuple[str, ...] = ("notify_checkpoint_",)) -> str | None:
    """Return why ``found`` would not be called; None if nothing is wrong.

    It is not called if the name of a method begins with one of ``names`` and no base class is a listener.
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
    """Return the object of a bound method or partial function that would not be called."""
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
    """Return the identity of the operator state that ``function`` declares, learned from a copy; "" for none.

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
