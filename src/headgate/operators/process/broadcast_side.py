"""What the broadcast side of an operator keeps: maps that are the same in every subtask (docs/spec/broadcast.md).

They live in memory, whatever the backend: each subtask looks at all of them. The first subtask writes its copy, which
stands for those of all, and everybody goes on with it. Where barriers overtake, copies differ, and each is written
beside what was in flight to it. Counterparts: ``broadcast_states``, through which functions by row and by batch reach
them; ``operators.ordering``, which has records come to every subtask in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError, UsageError
from headgate.model.evolution import Misfit
from headgate.operators.base import OperatorContext, RestoredState
from headgate.state.descriptors import KeyColumns, StateDescriptor, section_schema
from headgate.state.evolving import evolved_values, is_same_key
from headgate.state.frozen import FrozenState
from headgate.state.ipc import decode_stream, encode_batches
from headgate.state.meta import MetaSection
from headgate.state.row_values import Conversion, conversion, python_values
from headgate.state.timers import RESERVED_PREFIX

_NO_KEY = KeyColumns((), ())
_COPIES = MetaSection(f"{RESERVED_PREFIX}copies", "copies of broadcast state")

Entries = dict[Any, Any]
"""Of one map: stored keys to stored values, in the order in which keys came in."""


class BroadcastMap:
    """One map in one subtask; to its handles the cells of a ``state.backend.RowCells`` that has one map for all keys.

    Attributes:
        version: another one after every change.
    """

    def __init__(self, descriptor: StateDescriptor) -> None:
        self.descriptor = descriptor
        self.version = 0
        self._entries: Entries = {}
        self._is_frozen = False

    def get(self, key: object) -> Entries | None:
        """See ``RowCells``."""
        return self._entries or None

    def writable(self, key: object) -> Entries | None:
        """See ``RowCells``. What was frozen stays as it is."""
        if self._is_frozen:
            self._entries, self._is_frozen = dict(self._entries), False
        self.version += 1
        return self._entries or None

    def put(self, key: object, value: Entries) -> None:
        """See ``RowCells``."""
        self._entries, self._is_frozen = value, False
        self.version += 1

    def remove(self, key: object) -> None:
        """See ``RowCells``."""
        self.put(key, {})

    def keys(self) -> Sequence[object]:
        """See ``RowCells``."""
        return ((),) if self._entries else ()

    def batch(self) -> pa.RecordBatch:
        """Return the entries as they are now, in two columns."""
        return FrozenMap(self.descriptor, self._entries).batch()

    def frozen(self) -> FrozenMap:
        """Return the map as it is now; later changes go to a copy."""
        self._is_frozen = True
        return FrozenMap(self.descriptor, self._entries)


@dataclass(frozen=True, slots=True)
class FrozenMap:
    """One map at a barrier."""

    descriptor: StateDescriptor
    entries: Entries

    def batch(self) -> pa.RecordBatch:
        """Return the entries in two columns, the key and the value, in their order."""
        of_keys, of_values = conversions(self.descriptor)
        columns = [
            pa.array([of_keys.loaded(key) for key in self.entries], self.descriptor.key_type),
            pa.array([of_values.loaded(value) for value in self.entries.values()], self.descriptor.type),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=section_schema(_NO_KEY, self.descriptor))


class FrozenBroadcast(FrozenState):
    """The maps of one operator at a barrier. ``is_own``: others have theirs beside them (BC6)."""

    def __init__(self, maps: Sequence[FrozenMap], *, is_own: bool) -> None:
        super().__init__()
        self._maps = list(maps)
        self._is_own = is_own

    def _rows(self) -> Mapping[str, int]:
        return {one.descriptor.name: len(one.entries) for one in self._maps}

    def _encode(self) -> Sequence[Buffer]:
        batches = {one.descriptor.name: one.batch() for one in self._maps}
        sections = {name: encode_batches(batch.schema, [batch]) for name, batch in batches.items()}
        meta: dict[str, Sequence[Buffer]] = {_COPIES.name: [_COPIES.encode(own=1)]} if self._is_own else {}
        return encode_sections({**sections, **meta})

    def _forget(self) -> None:
        self._maps = []


class BroadcastSide:
    """All broadcast states of one operator in one subtask, and what may be done with them now."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._maps: dict[str, BroadcastMap] = {}
        self._is_open = False
        self._is_writing = False

    def declare(self, descriptor: StateDescriptor) -> BroadcastMap:
        """Return the map of one state, which is empty."""
        return self._maps.setdefault(descriptor.name, BroadcastMap(descriptor))

    @property
    def descriptors(self) -> tuple[StateDescriptor, ...]:
        """What was declared."""
        return tuple(one.descriptor for one in self._maps.values())

    def begin(self) -> None:
        """Everything is declared: from now on states can be read."""
        self._is_open = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A record of the broadcast side is processed: states can be written."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    def check_readable(self, name: str) -> None:
        """Refuse a look at state ``name`` before it is there.

        Raises:
            UsageError
        """
        if not self._is_open:
            raise UsageError(
                f"broadcast state '{name}' of operator '{self._node}' has nothing in open(), because what a checkpoint "
                "has of it comes later; use it in process_broadcast() and process()"
            )

    def check_writable(self, name: str) -> None:
        """Refuse a change of state ``name`` that other subtasks would not make (BC4).

        Raises:
            UsageError
        """
        self.check_readable(name)
        if not self._is_writing:
            raise UsageError(
                f"broadcast state '{name}' of operator '{self._node}' can be changed in process_broadcast() only, "
                "because every subtask must make the same changes; elsewhere it can be read"
            )

    def freeze(self, context: OperatorContext, *, is_own: bool) -> FrozenBroadcast | None:
        """Return all maps as they are now; None: another subtask's stand for them (BC5), or there is nothing.

        ``is_own``: copies differ, because barriers may overtake records of the side (BC6).
        """
        if not self._maps or (context.subtask_index and not is_own):
            return None
        found = [one.frozen() for one in self._maps.values() if is_own or one.get(None)]
        return FrozenBroadcast(found, is_own=is_own) if found else None

    def restore(self, states: Sequence[RestoredState], context: OperatorContext) -> None:
        """Take over what ``FrozenBroadcast`` wrote: of copies that differ the one whose records in flight come here.

        Raises:
            CorruptionError: it is something else.
        """
        path = f"broadcast state of '{self._node}'"
        found = [(state, decode_sections(state.payload, path)) for state in states]
        copies = [one for one in found if _COPIES.found_in(one[1], path) is not None]
        for state, sections in copies or found:
            mine = context.subtask_index if state.parallelism == context.parallelism else 0
            if copies and state.subtask_index != mine:
                continue
            for one in self._maps.values():
                former = one.descriptor.evolution.renamed_from or ""
                data = sections.get(one.descriptor.name, sections.get(former))  # EV5
                if data is not None:
                    _fill(one, data, path)


def conversions(descriptor: StateDescriptor) -> tuple[Conversion, Conversion]:
    """Return how keys and values of a map are stored."""
    return conversion(descriptor.key_type), conversion(descriptor.type)


def _fill(one: BroadcastMap, data: memoryview, path: str) -> None:
    """Add the entries that are in ``data``, which an older program may have written (EV1)."""
    descriptor = one.descriptor
    found, batches = decode_stream(data, path)
    wanted = section_schema(_NO_KEY, descriptor)
    if found.names != wanted.names or not is_same_key(found.field(0).type, descriptor.key_type):
        raise CorruptionError(path, 0, f"columns {wanted}", f"columns {found}")
    of_keys, of_values = conversions(descriptor)
    entries = dict(one.get(None) or {})
    for batch in batches:
        values = evolved_values(batch.column(1), descriptor.type, descriptor.evolution)
        if isinstance(values, Misfit):
            raise CorruptionError(path, 0, f"values of {descriptor.type}", f"{found.field(1).type}: {values.why}")
        keys = batch.column(0).cast(descriptor.key_type)  # EV12
        pairs = zip(python_values(keys), python_values(values), strict=True)
        entries |= {of_keys.store(key): of_values.store(value) for key, value in pairs}
    one.put(None, entries)
