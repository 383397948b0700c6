"""Broadcast state: maps that are the same in every subtask, and their handles (docs/spec/broadcast.md).

They live in memory, whatever the backend: each subtask looks at all of them. The first subtask writes its copy, which
stands for those of all, and all go on with it. With unaligned barriers copies differ, and each is written with the
records in flight to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.codec.snapshot import Buffer, MetaSection, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UsageError
from headgate.model.schema_evolution import Misfit
from headgate.operators.base import OperatorContext, RestoredState
from headgate.operators.process.row_state import CurrentKey, MapState
from headgate.operators.schemas import fitted, frame_of
from headgate.state.backend import RESERVED_PREFIX
from headgate.state.descriptors import KeyColumns, StateDescriptor, evolved_values, section_schema
from headgate.state.snapshot import FrozenState, decode_stream, encode_batches
from headgate.state.values import Conversion, conversion, python_values

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
        return self._entries or None

    def writable(self, key: object) -> Entries | None:
        """See ``RowCells``. What was frozen stays as it is."""
        # a snapshot still reads the former one
        if self._is_frozen:
            self._entries, self._is_frozen = dict(self._entries), False
        self.version += 1
        return self._entries or None

    def put(self, key: object, value: Entries) -> None:
        self._entries, self._is_frozen = value, False
        self.version += 1

    def remove(self, key: object) -> None:
        self.put(key, {})

    def keys(self) -> Sequence[object]:
        return ((),) if self._entries else ()

    @property
    def has_entries(self) -> bool:
        """Whether there is any entry."""
        return bool(self._entries)

    def fill(self, data: memoryview, path: str) -> None:
        """Add the entries that are in ``data``.

        Raises:
            CorruptionError: it is something else.
        """
        _fill(self, data, path)

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

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self.entries)

    def batch(self) -> pa.RecordBatch:
        """Return the entries in two columns, the key and the value, in their order."""
        of_keys, of_values = conversions(self.descriptor)
        columns = [
            pa.array([of_keys.loaded(key) for key in self.entries], self.descriptor.key_type),
            pa.array([of_values.loaded(value) for value in self.entries.values()], self.descriptor.type),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=section_schema(_NO_KEY, self.descriptor))


class FrozenPart(Protocol):
    """One broadcast state at a barrier."""

    @property
    def descriptor(self) -> StateDescriptor: ...

    @property
    def size(self) -> int:
        """The number of its rows."""

    def batch(self) -> pa.RecordBatch:
        """Return its rows."""


class BroadcastPart(Protocol):
    """One broadcast state in one subtask."""

    @property
    def descriptor(self) -> StateDescriptor: ...

    @property
    def has_entries(self) -> bool:
        """Whether there is anything in it."""

    def frozen(self) -> FrozenPart:
        """Return it as it is now."""

    def fill(self, data: memoryview, path: str) -> None:
        """Add what a frozen one wrote."""


class FrozenBroadcast(FrozenState):
    """The maps of one operator at a barrier. ``is_own``: others have theirs beside them."""

    def __init__(self, maps: Sequence[FrozenPart], *, is_own: bool) -> None:
        super().__init__()
        self._maps = list(maps)
        self._is_own = is_own

    def _rows(self) -> Mapping[str, int]:
        return {one.descriptor.name: one.size for one in self._maps}

    def _encode(self) -> Sequence[Buffer]:
        batches = {one.descriptor.name: one.batch() for one in self._maps}
        sections = {name: encode_batches(batch.schema, [batch]) for name, batch in batches.items()}
        meta: dict[str, Sequence[Buffer]] = {_COPIES.name: [_COPIES.encode(own=1)]} if self._is_own else {}
        return encode_sections({**sections, **meta})

    def _forget(self) -> None:
        self._maps = []


class BroadcastSide:
    """All broadcast states of one operator in one subtask, and what may be done with them now."""

    def __init__(self, node: str, parts: Sequence[BroadcastPart] = ()) -> None:
        self._node = node
        self._maps: dict[str, BroadcastMap] = {}
        self._parts: dict[str, BroadcastPart] = {one.descriptor.name: one for one in parts}
        self._is_open = False
        self._is_writing = False

    def declare(self, descriptor: StateDescriptor) -> BroadcastMap:
        """Return the map of one state, which is empty."""
        found = self._maps.setdefault(descriptor.name, BroadcastMap(descriptor))
        self._parts[descriptor.name] = found
        return found

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
        assert not self._is_writing, "one record of the side is processed at a time"
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
        """Refuse a change of state ``name`` that other subtasks would not make.

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
        """Return all maps as they are now; None: another subtask's stand for them, or there is nothing.

        ``is_own``: copies differ, because barriers may overtake records of the side.
        """
        if not self._parts or (context.subtask_index and not is_own):
            return None
        found = [one.frozen() for one in self._parts.values() if is_own or one.has_entries]
        return FrozenBroadcast(found, is_own=is_own) if found else None

    def restore(self, states: Sequence[RestoredState], context: OperatorContext) -> None:
        """Take over what ``FrozenBroadcast`` wrote: of copies that differ, the one with records in flight to here.

        Raises:
            CorruptionError: it is something else.
        """
        path = f"broadcast state of '{self._node}'"
        found = [(state, decode_sections(state.payload, path)) for state in states]
        copies = [one for one in found if _COPIES.found_in(one[1], path) is not None]
        for state, sections in copies or found:
            # at another parallelism no copy is this subtask's: all take the first, and replay what was in flight to it
            mine = context.subtask_index if state.parallelism == context.parallelism else 0
            if copies and state.subtask_index != mine:
                continue
            for one in self._parts.values():
                former = one.descriptor.evolution.renamed_from or ""
                data = sections.get(one.descriptor.name, sections.get(former))
                if data is not None:
                    one.fill(data, path)


def conversions(descriptor: StateDescriptor) -> tuple[Conversion, Conversion]:
    """Return how keys and values of a map are stored."""
    return conversion(descriptor.key_type), conversion(descriptor.type)


def _fill(one: BroadcastMap, data: memoryview, path: str) -> None:
    """Add the entries that are in ``data``, which an older program may have written (EV1)."""
    descriptor = one.descriptor
    found, batches = decode_stream(data, path)
    wanted = section_schema(_NO_KEY, descriptor)
    if found.names != wanted.names or found.field(0).type != descriptor.key_type:
        raise CorruptionError(path, 0, f"columns {wanted}", f"columns {found}")
    of_keys, of_values = conversions(descriptor)
    entries = dict(one.get(None) or {})
    for batch in batches:
        values = evolved_values(batch.column(1), descriptor.type, descriptor.evolution)
        if isinstance(values, Misfit):
            raise CorruptionError(path, 0, f"values of {descriptor.type}", f"{found.field(1).type}: {values.why}")
        keys = batch.column(0).cast(descriptor.key_type)
        pairs = zip(python_values(keys), python_values(values), strict=True)
        entries |= {of_keys.store(key): of_values.store(value) for key, value in pairs}
    one.put(None, entries)


class BroadcastState(MapState):
    """A map that is the same in every subtask. Only ``process_broadcast`` writes it; every method can read it.

    It has the methods of a ``MapState``, but belongs to no key.
    """

    def __init__(self, node: str, descriptor: StateDescriptor, side: BroadcastSide) -> None:
        """For Headgate only; declare it with ``state.broadcast``."""
        super().__init__(node, descriptor, CurrentKey(), side.declare(descriptor))
        self._side = side

    @property
    def exists(self) -> bool:
        """Whether the map has any entries."""
        self._side.check_readable(self._descriptor.name)
        return super().exists

    def get(self, map_key: Any, default: Any = None) -> Any:
        """Return the value of ``map_key``, or ``default``. Changing a returned dict or list changes nothing."""
        self._side.check_readable(self._descriptor.name)
        return super().get(map_key, default)

    def contains(self, map_key: Any) -> bool:
        """Return whether the map has a value for ``map_key``."""
        self._side.check_readable(self._descriptor.name)
        return super().contains(map_key)

    def keys(self) -> list[Any]:
        """Return the keys in a new list, in the order in which they were added. It is the same in every subtask."""
        self._side.check_readable(self._descriptor.name)
        return super().keys()

    def items(self) -> list[tuple[Any, Any]]:
        """Return pairs of key and value in a new list, in the order of ``keys``."""
        self._side.check_readable(self._descriptor.name)
        return super().items()

    def __len__(self) -> int:
        self._side.check_readable(self._descriptor.name)
        return super().__len__()

    def put(self, map_key: Any, value: Any) -> None:
        """Set the value of ``map_key``; None removes it. Only allowed in ``process_broadcast``.

        Raises:
            UsageError: the call is not in ``process_broadcast``, or the key or value does not fit the state's types.
        """
        self._side.check_writable(self._descriptor.name)
        super().put(map_key, value)

    def remove(self, map_key: Any) -> None:
        """Remove ``map_key``, if it is there. Only allowed in ``process_broadcast``."""
        self._side.check_writable(self._descriptor.name)
        super().remove(map_key)

    def clear(self) -> None:
        """Remove all entries. Only allowed in ``process_broadcast``."""
        self._side.check_writable(self._descriptor.name)
        super().clear()


class BatchBroadcastState:
    """A map that is the same in every subtask, read and written as Series and frames; see ``BroadcastState``."""

    def __init__(self, node: str, descriptor: StateDescriptor, side: BroadcastSide) -> None:
        """For Headgate only; declare it with ``state.broadcast``."""
        self._rows = BroadcastState(node, descriptor, side)
        self._map: BroadcastMap = side.declare(descriptor)
        self._side = side
        self._node = node
        self._shown: tuple[int, pl.DataFrame] | None = None

    def frame(self) -> pl.DataFrame:
        """Return all entries in the columns ``key`` and ``value``, in the order in which the keys were added."""
        self._side.check_readable(self._map.descriptor.name)
        version = self._map.version
        if self._shown is None or self._shown[0] != version:
            self._shown = version, frame_of(self._map.batch().rename_columns(["key", "value"]))
        return self._shown[1]

    def get(self, keys: pl.Series) -> pl.Series:
        """Return the value for each of ``keys``; null if there is none."""
        wanted = self._series(keys, self._map.descriptor.key_type, "the keys").alias("key").to_frame()
        return wanted.join(self.frame(), on="key", how="left", maintain_order="left")["value"]

    def contains(self, keys: pl.Series) -> pl.Series:
        """Return, for each of ``keys``, whether the map has a value."""
        there = self.frame()["key"].implode()
        return self._series(keys, self._map.descriptor.key_type, "the keys").is_in(there).fill_null(value=False)

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, keys: pl.Series, values: Any) -> None:
        """Set the value of each key, row after row; a null removes it. Only allowed in ``process_broadcast``.

        Args:
            keys: a Series of map keys.
            values: a Series with one value per key, or one value for all keys.
        """
        self._side.check_writable(self._map.descriptor.name)
        own_keys = self._series(keys, self._map.descriptor.key_type, "the keys")
        found = values if isinstance(values, pl.Series) else self._repeated(values, len(keys))
        if len(found) != len(keys):
            raise self._wrong(
                f"the values must have {len(keys)} rows, as many as there are keys, but have {len(found)}"
            )
        own_values = self._series(found, self._map.descriptor.type, "the values")
        for key, value in zip(own_keys, own_values.to_list(), strict=True):
            self._rows.put(key, value)

    def remove(self, keys: pl.Series) -> None:
        """Remove each key that is there. Only allowed in ``process_broadcast``."""
        self._side.check_writable(self._map.descriptor.name)
        for key in self._series(keys, self._map.descriptor.key_type, "the keys"):
            self._rows.remove(key)

    def clear(self) -> None:
        """Remove all entries. Only allowed in ``process_broadcast``."""
        self._rows.clear()

    def _repeated(self, value: Any, rows: int) -> pl.Series:
        try:
            one = pl.from_arrow(exact_array([value], self._map.descriptor.type))
        except MisfitError as error:
            raise self._wrong(f"the values must be {self._map.descriptor.type}: {error}") from None
        assert isinstance(one, pl.Series)
        return one.new_from_index(0, rows)

    def _series(self, given: Any, dtype: pa.DataType, what: str) -> pl.Series:
        """Return a user's Series in the type of the state."""
        if not isinstance(given, pl.Series):
            raise self._wrong(f"{what} must be a Series, not {type(given).__name__}")
        try:
            found = pl.from_arrow(fitted(given.to_arrow(compat_level=pl.CompatLevel.oldest()), dtype, ""))
        except (MisfitError, pa.ArrowException, pl.exceptions.PolarsError) as error:
            raise self._wrong(f"{what} must be {dtype}: {error}") from None
        assert isinstance(found, pl.Series)
        return found

    def _wrong(self, problem: str) -> UsageError:
        return UsageError(f"broadcast state '{self._map.descriptor.name}' of operator '{self._node}': {problem}")
