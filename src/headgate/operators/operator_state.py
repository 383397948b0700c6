"""Operator state: lists of a subtask, which a restore deals out again (HL10–HL14 of docs/spec/listeners.md).

Counterparts: ``checkpoint_listeners`` is what users derive from. Values are stored as keyed state stores them
(``state.row_values``), so that they cannot be changed from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError, UsageError
from headgate.model.schema_evolution import Misfit, OperatorRules
from headgate.model.state_schema import StateIdentity, declared
from headgate.operators.base import RestoredState
from headgate.operators.schemas import as_schema
from headgate.state.descriptors import NO_EVOLUTION, Evolution, check_names, checked_evolution
from headgate.state.row_values import Conversion, conversion, mismatch, python_values
from headgate.state.schema_evolution import evolved_values
from headgate.state.snapshot import FrozenState

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
        return declared("union" if self.is_union else "list", self.name, str(self.type))


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
        """See ``RestoreContext.forget``."""
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
            UsageError: the checkpoint has a list that was not declared (HL14), or an old name is declared (EV8).
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
        """Return the identity of the state, "" when nothing is declared (HL14)."""
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
        """Return this subtask's elements, and those of all subtasks if they are known (HL12, HL13)."""
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
