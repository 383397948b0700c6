"""What a state backend is: it holds all keyed state of one operator in one subtask, and its timers.

There are three views on state, and a backend serves one of them. Process functions see keys one at a time (by row) or
thousands at once (by column), and windows have rows per window and key. Users see none of them: their handles
(``operators.process.row_state``, ``operators.process.batch_state``) call these methods, so that another backend
changes no user code. Not thread-safe; only what ``freeze`` returned is used beside processing.

Timers are keys with times for each kind of time, each pair once (TM6); times are milliseconds since 1970.
Counterpart: ``operators.process.timers``, through which users' functions register and delete them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import MetaSection
from headgate.dataclass import dataclass
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor, row_conversion, section_data
from headgate.state.heap import HeapRows
from headgate.state.key_hash import Hashes, Words, owned_rows
from headgate.state.key_index import Slots
from headgate.state.snapshot import FrozenState, StoredFiles, decode_stream
from headgate.state.ttl import StateTime, as_declared, has_expiry, other_form
from headgate.state.values import Mask
from headgate.state.window_aggregates import Accumulator, MergedRows

RESERVED_PREFIX = "headgate."
"""No state of a user's has such a name."""

TIMERS = "headgate.timers"
"""The section about a subtask's timers that belongs to no key (``TimersMeta``). Without it a snapshot has no timers."""

TIME_COLUMN = "time_ms"

DATES_MS = range(-62_135_596_800_000, 253_402_300_800_000)
"""Times that a ``datetime`` can be: the years 1 to 9999."""

_META = MetaSection(TIMERS, "timers")


class TimeKind(Enum):
    """What a timer waits for."""

    EVENT_TIME = "event_time"
    PROCESSING_TIME = "processing_time"


class RowTimers(Protocol):
    """The timers of one kind by row: keys are Python values, as in ``RowBackend``."""

    def __len__(self) -> int:
        """Return how many there are."""

    def register(self, key: Any, time_ms: int) -> None:
        """Add a timer; nothing happens if the key has one for this time."""

    def delete(self, key: Any, time_ms: int) -> None:
        """Remove a timer; nothing happens if there is none."""

    def next_ms(self) -> int | None:
        """Return the earliest time, or None. Cheap; polled often."""

    def take(self, until_ms: int, keys_max: int) -> tuple[int, list[Any]] | None:
        """Remove timers of the earliest time, if that is not after ``until_ms``: some or all of its keys.

        Returns:
            The time, and the keys in the order of their hashes; None if no timer is due.
        """

    def all(self) -> Iterator[tuple[int, Any]]:
        """Yield the time and key of every timer, in no particular order; change none meanwhile."""


class ColumnTimers(Protocol):
    """The timers of one kind by column: keys are slots of the backend's index."""

    def __len__(self) -> int:
        """Return how many there are, or somewhat more: what was deleted may still count."""

    def register(self, slots: Slots, times_ms: Words) -> None:
        """Add a timer per row; nothing happens where the key has one for this time. The arrays become the backend's."""

    def delete(self, slots: Slots, times_ms: Words) -> None:
        """Remove a timer per row; nothing happens where there is none. The arrays become the backend's."""

    def next_ms(self) -> int | None:
        """Return the earliest time, or None; it may be that of a timer that was deleted. Cheap; polled often."""

    def take(self, until_ms: int, rows_max: int) -> tuple[Slots, Words]:
        """Remove the first timers, none after ``until_ms``, in the order of time and hash of the key.

        Returns:
            Slots and times, no slot twice. Nothing if no timer is due.
        """


View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class TimersMeta:
    """What a snapshot says of a subtask's timers beside their keys.

    Attributes:
        processing_time_ms: processing time at the barrier; it never goes back, not over a restore either.
        has_ended: all input had ended, and the last watermark has fired what it fires.
        watermark_ms: the last watermark before the end, of operators that drop late records.
        fired: up to which watermark each key group has fired, of windows with triggers of the user.
        rule: by which timers were set (``state_schema.Rule``), of joins.
    """

    processing_time_ms: int
    has_ended: bool
    watermark_ms: int = -(1 << 63)
    fired: str = ""
    rule: str = ""

    def encode(self) -> bytes:
        """Return it as a section."""
        now_ms, watermark_ms = self.processing_time_ms, self.watermark_ms
        rule = {"rule": self.rule} if self.rule else {}
        return _META.encode(ms=now_ms, has_ended=self.has_ended, watermark_ms=watermark_ms, fired=self.fired, **rule)

    @staticmethod
    def found_in(sections: Mapping[str, memoryview], path: str) -> TimersMeta | None:
        """Return what one part of a former snapshot says; None: it knows of no timers.

        Raises:
            CorruptionError: it is of a version that is not known here.
        """
        found = _META.found_in(sections, path)
        if found is None:
            return None
        return TimersMeta(found["ms"], found["has_ended"], found["watermark_ms"], found["fired"], found.get("rule", ""))


@dataclass
class TimersByKind(Generic[View]):
    """All timers of one operator in one subtask. ``meta`` is what the next snapshots say of them."""

    event_time: View
    processing_time: View
    meta: TimersMeta

    def of(self, kind: TimeKind) -> View:
        """Return those of one kind."""
        return self.event_time if kind is TimeKind.EVENT_TIME else self.processing_time


def timers_of_each_kind(make: Callable[[TimeKind], View]) -> dict[TimeKind, View]:
    """Return what ``make`` makes for the timers of each kind."""
    return {kind: make(kind) for kind in TimeKind}


def timers_by_kind(held: Mapping[TimeKind, View]) -> TimersByKind[View] | None:
    """Return the timers that a new backend holds, as it shows them; None: its operator has none."""
    if not held:
        return None
    return TimersByKind(held[TimeKind.EVENT_TIME], held[TimeKind.PROCESSING_TIME], TimersMeta(0, False))


def first_timers(times_ms: Words, hashes: Hashes, count: int) -> Mask:
    """Return which timers come first in the order of firing, about ``count`` of them.

    Timers of one time with keys of one hash stay together, and the first ones are always among them: their order is
    not defined.
    """
    found = np.ones(len(times_ms), np.bool_)
    if len(times_ms) <= count:
        return found
    order = np.lexsort((hashes, times_ms))
    at = order[count]
    is_alike = (times_ms[order] == times_ms[at]) & (hashes[order] == hashes[at])
    # before those that are alike; after them if they are the first ones: else none would be left
    cut = int(np.argmax(is_alike)) or int(np.count_nonzero(is_alike))
    found[order[cut:]] = False
    return found


def timer_section(keys: KeyColumns, kind: TimeKind) -> Section:
    """Return the section of the timers of one kind: the key, then the time."""
    fields = [pa.field(name, dtype) for name, dtype in zip(keys.section_names, keys.types, strict=True)]
    schema = pa.schema([*fields, pa.field(TIME_COLUMN, pa.int64())])
    return Section(f"{TIMERS}.{kind.value}", schema, tuple(keys.section_names))


Taken = TypeVar("Taken", covariant=True)
Held = TypeVar("Held")


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which keys this subtask owns (KG8)."""

    max_parallelism: int
    parallelism: int
    subtask_index: int


class StateBackend(Protocol):
    """What all views have."""

    def freeze(self) -> FrozenState:
        """Return the states as they are now, in microseconds. The snapshot has a section per state."""

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """Add the state of the keys that ``owner`` owns from one former subtask's snapshot."""


@runtime_checkable
class ContinuingBackend(StateBackend, Protocol):
    """A backend that can go on with the files of a former database."""

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        """Have what ``stored`` holds, if it is of the same states and of the keys that ``owner`` owns.

        Returns:
            Whether that is so; if not, nothing was done, and its rows are restored.

        Raises:
            CorruptionError, StorageError
        """


class TimedBackend(StateBackend, Protocol):
    """What the backends of process functions have: their states may have a TTL (docs/spec/ttl.md).

    Of a state with a TTL nothing that has expired is shown, counted or written; what has is dropped, a bounded amount
    at a time, and at the latest when it would be in a snapshot.

    Attributes:
        time: says what has expired; the operator sets it before each call, before ``freeze`` and ``end_restore``.
    """

    time: StateTime

    def end_restore(self) -> None:
        """All parts were restored: what has expired is dropped, nothing lives longer than its TTL from now on."""


class RowCells(Protocol):
    """One state by row: an object per key. The object is immutable, or a list or dict that the backend owns.

    Of a state with a TTL a value, and each element and entry, is a pair with its expiry (``ttl.Timed``), and what
    has expired may still be there.
    """

    def get(self, key: Any) -> Any:
        """Return the object of ``key``, or None. Do not change it."""

    def writable(self, key: Any) -> Any:
        """Return the list or dict of ``key`` in order to change it, or None if it has none."""

    def put(self, key: Any, value: Any) -> None:
        """Set the object of ``key``; it belongs to the backend afterwards."""

    def remove(self, key: Any) -> None:
        """Forget ``key``; nothing happens if it has nothing."""

    def keys(self) -> Iterable[Any]:
        """Return the keys that have something."""


class RowBackend(TimedBackend, Protocol):
    """State by row: keys are Python values (tuples of them if the key has several columns).

    Attributes:
        timers: of the operator, if it asked for them.
    """

    timers: TimersByKind[RowTimers] | None

    def cells(self, descriptor: StateDescriptor) -> RowCells:
        """Return the cells of one declared state."""

    def all_keys(self) -> list[Any]:
        """Return all keys that have any state, not counting what has expired."""

    def absorb(self) -> None:
        """Do what has to be done now and then between keys: give up what expired, or released snapshots needed."""

    def expect(self, columns: Sequence[pa.Array]) -> None:
        """Rows with these key columns come next: what their keys have may be fetched together. After ``absorb``."""


class ValueColumns(Protocol):
    """A value state by column. Rows have a slot each; values have no nulls. Masks are over the rows.

    Of lists of structs, ``rows``, ``added`` and ``put_rows`` keep a struct that stays from being copied.
    """

    def get(self, slots: Slots) -> pa.Array:
        """Return the value of each slot, or null."""

    def contains(self, slots: Slots) -> Mask:
        """Return which slots have a value."""

    def put(self, slots: Slots, values: pa.Array) -> None:
        """Set values; the last row of a slot wins."""

    def rows(self, slots: Slots) -> tuple[Slots, HeapRows]:
        """Return the structs of the lists of ``slots``, which have some: the number of the slot of each, and it."""

    def added(self, structs: pa.StructArray) -> HeapRows:
        """Take structs over, of which ``put_rows`` makes lists."""

    def put_rows(self, slots: Slots, counts: Slots, rows: HeapRows) -> None:
        """Set lists of ``counts`` structs, which are those of ``rows`` or were ``added``; the slots are different."""

    def clear(self, slots: Slots) -> None:
        """Forget the values of ``slots``."""

    def replace(self, slots: Slots, values: pa.Array) -> Mask:
        """Set values as ``put`` does; return the last row of each slot with a changed value."""

    def extreme(self, slots: Slots, values: pa.Array, *, is_min: bool) -> Mask:
        """Keep the smaller (or larger) of each slot's value and the rows'; NaN never counts.

        Returns:
            One row, with the new value, of each slot with a changed value.
        """

    def add(self, slots: Slots, values: pa.Array) -> Mask:
        """Add to the slots' values, an absent one being 0; return the last row of each slot with a changed value."""


class ListColumns(Protocol):
    """A list state by column."""

    def counts(self, slots: Slots) -> Slots:
        """Return the length of each slot's list."""

    def append(self, slots: Slots, values: pa.Array) -> None:
        """Append one element per row, in the order of the rows."""

    def explode(self, slots: Slots) -> tuple[Slots, pa.Array]:
        """Return all elements of the rows' lists: the row of each, ascending, and the element."""

    def rows(self, slots: Slots) -> tuple[Slots, HeapRows]:
        """Do what ``explode`` does for structs, of which nothing is copied before it is asked for."""

    def clear(self, slots: Slots) -> None:
        """Forget the lists of ``slots``."""


class MapColumns(Protocol):
    """A map state by column. Map keys have neither null nor NaN."""

    def get(self, slots: Slots, map_keys: pa.Array) -> pa.Array:
        """Return the value of each row's key and map key, or null."""

    def contains(self, slots: Slots, map_keys: pa.Array) -> Mask:
        """Return which rows' map keys have a value."""

    def put(self, slots: Slots, map_keys: pa.Array, values: pa.Array) -> None:
        """Set values; the last row of an entry wins."""

    def remove(self, slots: Slots, map_keys: pa.Array) -> None:
        """Remove the rows' map keys."""

    def items(self, slots: Slots) -> tuple[Slots, pa.Array, pa.Array]:
        """Return all entries of the rows' maps: the row of each, ascending, the map key and the value."""

    def clear(self, slots: Slots) -> None:
        """Forget the maps of ``slots``."""


class ColumnBackend(TimedBackend, Protocol):
    """State by column: keys are slots of the backend's own index, and states are read and written by slots.

    Views of a state with a TTL take care of it themselves: they set, renew and obey expiries.

    Attributes:
        timers: of the operator, if it asked for them.
        meta: what belongs to the subtask and to no key (see ``WindowBackend``); empty: nothing.
    """

    timers: TimersByKind[ColumnTimers] | None
    meta: bytes

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        """Return the slot of each row's key; they hold until ``prepare``."""

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        """Return the key columns of ``slots``."""

    def all_slots(self) -> Slots:
        """Return the slots of all keys that have any state."""

    def prepare(self) -> None:
        """Called between batches, when no slots are in use: they may be renumbered."""

    def values(self, descriptor: StateDescriptor) -> ValueColumns:
        """Return a declared value state."""

    def lists(self, descriptor: StateDescriptor) -> ListColumns:
        """Return a declared list state."""

    def maps(self, descriptor: StateDescriptor) -> MapColumns:
        """Return a declared map state."""


@dataclass(frozen=True)
class WindowRows:
    """The rows that a window operator holds.

    Attributes:
        section: their columns; the key's are among them.
        window_of: returns the number of the window that each row of a batch lies in.
    """

    section: Section
    window_of: Callable[[pa.RecordBatch], Words]


class WindowBackend(StateBackend, Protocol[Taken]):
    """Rows by window and key, thousands at a time (``WindowRows``).

    Attributes:
        meta: what belongs to the subtask and to no key. It is the section ``META`` of the next snapshots, which a
            restore hands to every subtask.
    """

    meta: bytes

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        """Add rows, each to the window of which ``windows`` has the number."""

    def windows(self) -> list[int]:
        """Return the numbers of the windows that have rows, ascending."""

    def take(self, window: int) -> Taken:
        """Return what ``window`` holds, in the form in which it is kept, and forget it. Do not change it."""

    def read(self, windows: Sequence[int]) -> Iterator[Taken]:
        """Yield what these windows hold together, in parts, of which each has all that its keys have.

        Rows that are not merged come window by window, those of each as they came. Nothing is forgotten. Use each part
        before the next one, and before rows are added.

        Raises:
            LocalDamage: rows are missing; it may be raised with the last part.
        """

    def drop(self, window: int) -> None:
        """Forget what ``window`` holds; it must have rows."""


@runtime_checkable
class PartedWindows(WindowBackend[Taken], Protocol[Taken]):
    """A backend that need not have a window in memory whole when it fires."""

    def parts(self, window: int) -> Iterator[Taken]:
        """As ``take``, in parts, of which each has all that its keys have. All of them are taken, or the state is none.

        Raises:
            LocalDamage: rows are missing; it may be raised with the last part.
        """


META = "meta"


class StateFactory(Protocol):
    """Where an operator gets its state: it asks its context, and constructs no backend itself.

    Another backend is another factory. Each call makes new, empty state.
    """

    def by_row(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> RowBackend:
        """Return state for a function that looks at one key at a time."""

    def by_column(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> ColumnBackend:
        """Return state for a function that looks at thousands of keys at once."""

    def by_window(self, keys: KeyColumns, rows: WindowRows) -> WindowBackend[list[pa.RecordBatch]]:
        """Return state of a window operator that keeps every row as it came."""

    def merged_by_window(
        self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]
    ) -> WindowBackend[MergedRows]:
        """Return state of a window operator with rows of partial results (``window_aggregates.partial_batch``).

        Those of one key and window are merged with ``accumulators``.
        """


def restored_batches(
    sections: Mapping[str, memoryview], section: Section, path: str, owner: Ownership
) -> Iterator[pa.RecordBatch]:
    """Read one section of a former subtask's snapshot; return the rows that ``owner`` owns.

    Those of an older program are what this one declares.

    Raises:
        CorruptionError: it is not such a section.
        UsageError: its rows cannot become what is declared.
    """
    yield from _restored(sections, section, path, owner)


def restored_timers(
    sections: Mapping[str, memoryview], keys: KeyColumns, held: Mapping[TimeKind, Held], path: str, owner: Ownership
) -> Iterator[tuple[Held, pa.RecordBatch]]:
    """Yield, of a former subtask's snapshot that has any, the timers that ``owner`` owns, and what is to hold them."""
    if TimersMeta.found_in(sections, path) is not None:
        for kind, timers in held.items():
            for batch in restored_batches(sections, timer_section(keys, kind), path, owner):
                yield timers, batch


def restored_states(
    sections: Mapping[str, memoryview], section: Section, path: str, owner: Ownership
) -> Iterator[pa.RecordBatch]:
    """As ``restored_batches``, of a declared state, which may have been given a TTL since, or have lost it."""
    yield from _restored(sections, section, path, owner, of_any_form=True)


def _restored(
    sections: Mapping[str, memoryview], section: Section, path: str, owner: Ownership, *, of_any_form: bool = False
) -> Iterator[pa.RecordBatch]:
    data = section_data(sections, section, path)
    if data is None:
        return
    where = f"{path}, state '{section.name}'"
    found, batches = decode_stream(data, where)
    form = other_form(found) if of_any_form and has_expiry(found) != has_expiry(section.schema) else found
    evolve = row_conversion(form, section, where)
    for batch in batches:
        owned = owned_rows(batch, section.key_names, owner.max_parallelism, owner.parallelism, owner.subtask_index)
        if owned.num_rows:
            yield evolve(as_declared(owned, form))
