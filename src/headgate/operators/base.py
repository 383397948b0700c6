"""The contract between an operator and the runtime.

An ``OperatorSpec`` is plain configuration inside the graph; ``build`` makes one live ``Operator`` per subtask.
Operators run in the mailbox thread of their worker, one call at a time. They never block, and have no threads and
read no clock other than those of their ``OperatorContext``.

Batches are ``pyarrow.RecordBatch`` in canonical types (``operators.schemas``), with exactly the schema of their edge.
An operator must not change a batch it was given, and may keep references to it.

Joins, expressions and sources of encoded text emit ``LazyRows``, of which the columns are made when they are asked
for: what is filtered out, or never read, is not copied. An operator that takes them says so
(``Operator.takes_lazy_rows``); others get a batch. A text column may be *encoded*: a dictionary of its values, and for
each row the place of its value there. Operators that do not ask for that see ``large_string``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Protocol

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.codec.snapshot import decode_sections
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_CLOCK, SYSTEM_THREADS, Threads
from headgate.model.graph import InputName, OutputTag
from headgate.operators.schemas import fitted
from headgate.protocol.watermarks import Origin
from headgate.state.backend import ContinuingBackend, Ownership, StateBackend, StateFactory
from headgate.state.descriptors import KeyColumns
from headgate.state.key_index import Slots
from headgate.state.snapshot import FrozenState, StoredFiles
from headgate.state.values import Mask
from headgate.state.worker_backends import MemoryStates

WATERMARK_MAX_MS = (1 << 63) - 1
"""The last watermark: no record can follow. Emitted at the end of bounded input."""

WATERMARK_MIN_MS = -(1 << 63)


class Output(Protocol):
    """Where an operator sends what it produces. Calls take effect in order."""

    def emit(self, batch: pa.RecordBatch | LazyRows) -> None:
        """Send records downstream. Empty batches are dropped."""

    def emit_to(self, tag: OutputTag, batch: pa.RecordBatch) -> None:
        """Send records to the output ``tag``, in the schema that it was declared with. Empty batches are dropped."""

    def emit_watermark(self, watermark_ms: int) -> None:
        """Announce that no record with an event time ≤ ``watermark_ms`` will follow."""

    def emit_idle(self, is_idle: bool) -> None:
        """Announce that this subtask's event time is idle (ignored downstream), or active again."""

    def divert(self, bad: pa.RecordBatch) -> None:
        """Hand over bad records (``operators.user_functions.BAD_RECORD_SCHEMA``).

        Raises:
            BadRecord: the pipeline's policy is to fail (the default).
        """


@dataclass(slots=True)
class OperatorMetrics:
    """Counters of one operator by name, such as ``late``; the runtime reports them."""

    counters: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int) -> None:
        """Increase counter ``name`` (created at 0)."""
        self.counters[name] = self.counters.get(name, 0) + amount


@dataclass(slots=True)
class OperatorContext:
    """What an operator may know.

    Attributes:
        clock_ms: processing time: milliseconds of a clock that only goes forward (``Clock.monotonic_ms``). No date; it
            starts again with each machine and is never part of a state.
        wall_ms: the date (``Clock.wall_ms``), for timers, which look at it once.
        origin: the split that the batch being processed came from, or the input channel after a shuffle. Event-time
            trackers keep one watermark per origin. Written by the runtime.
        is_busy: True while the worker had no idle time lately (then buffering for throughput costs no latency
            that the queue would not cost anyway). Written by the runtime.
        is_stopping: the last barrier before a stop has passed: what is sent from now on is not committed (GM3). Written
            by the runtime.
        states: makes the state that the operator asks for when it is opened.
        threads: those that an operator has besides the mailbox's come from here.
        wake: has the mailbox ask ``next_tick_ms`` soon. From any thread.
        diverts: the policy for bad records is to divert them (else ``Output.divert`` raises).
        event_delay_ms: by how much records that windows emitted may be earlier than the watermark, for operators whose
            spec ``holds_back`` the watermark by that.
    """

    pipeline: str
    node: str
    subtask_index: int
    parallelism: int
    max_parallelism: int
    clock_ms: Callable[[], int]
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)
    origin: Origin = ""
    is_busy: bool = False
    diverts: bool = False
    flush_ms: int = 5
    wall_ms: Callable[[], int] = SYSTEM_CLOCK.wall_ms
    is_stopping: bool = False
    states: StateFactory = field(default_factory=MemoryStates)
    threads: Threads = SYSTEM_THREADS
    wake: Callable[[], None] = lambda: None
    event_delay_ms: int = 0

    def held_back(self, watermark_ms: int) -> int:
        """Return a watermark, which is not of the end of input, less ``event_delay_ms``."""
        return watermark_ms if watermark_ms == WATERMARK_MAX_MS else watermark_ms - self.event_delay_ms


@dataclass(frozen=True, slots=True)
class RestoredState:
    """A part of a snapshot of this node from the restored checkpoint; a former subtask may have left several."""

    subtask_index: int
    parallelism: int
    source: memoryview | Callable[[], memoryview]
    is_exact: bool = True
    """False: it may hold records from after the barrier, which some channels will bring again."""
    files: StoredFiles | None = None
    """The files of a database that contains these rows. A backend that goes on with them needs no rows."""

    @property
    def payload(self) -> memoryview:
        """Its bytes, verified. They are read each time: do not keep them longer than needed.

        Raises:
            CorruptionError: they are not what was written.
            StorageError
        """
        return self.source() if callable(self.source) else self.source


class Operator:
    """One live operator in one subtask. The defaults make a stateless operator that does nothing.

    Attributes:
        user_object: what a user gave: a function, reader or writer, which may listen to checkpoints or keep state
            of its own (``operators.checkpoint_listeners``). The runtime calls it then.
        opened_by: the source or sink that made ``user_object``, which may do the same.
        takes_lazy_rows: ``process`` is given lazy rows as they are, where the operator before emits such.
    """

    user_object: object = None
    opened_by: object = None
    takes_lazy_rows: bool = False

    def open(self, context: OperatorContext, output: Output) -> None:
        """Prepare. Called once, before ``restore``. Keep ``context`` and ``output``."""
        self.context = context
        self.output = output

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over, one at a time, the parts that ``freeze`` wrote. Not called when there is none."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Process one non-empty batch; send results through ``self.output``."""
        raise NotImplementedError

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        """Process one non-empty batch that came on input ``name``. An operator with several inputs overrides this."""
        self.process(batch)

    def on_watermark(self, watermark_ms: int) -> None:
        """Event time advanced (strictly). Must end with forwarding: ``self.output.emit_watermark``."""
        self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """All inputs became idle, or one became active again. Must forward."""
        self.output.emit_idle(is_idle)

    def on_splits(self, origins: Sequence[Origin]) -> None:
        """These origins are read: splits of the source in this chain, or input channels. Called before any batch."""

    def on_split_finished(self, origin: Origin) -> None:
        """``origin`` will never deliver anything again."""

    def next_tick_ms(self) -> int | None:
        """Return the processing time at which ``on_tick`` wants to be called, or None. Cheap; polled often."""
        return None

    def on_tick(self, now_ms: int) -> None:
        """Processing time reached ``next_tick_ms()``."""

    @property
    def is_full(self) -> bool:
        """Whether it takes no more records for now, but in front of a barrier. Asked of the head of a vertex."""
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for answers: input ends when it has them. Asked of the head of a vertex."""
        return False

    def on_round(self, round_: int) -> None:
        """Round ``round_`` of the loop that this operator is in is globally finished."""

    def before_barrier(self) -> None:
        """Emit what belongs in front of the barrier (buffers, local pre-aggregates)."""

    def freeze(self) -> FrozenState | None:
        """Return the state as it is now, in microseconds, or None for a stateless operator.

        Called directly after ``before_barrier``, with no record in between.
        """
        return None

    def freeze_broadcast(self, *, is_own: bool) -> FrozenState | None:
        """Return broadcast state as it is now, None where the copy of another subtask stands for it.

        ``is_own``: subtasks freeze with differently many records of the side processed, so none does.
        """
        return None

    def restore_broadcast(self, states: Sequence[RestoredState]) -> None:
        """Take over what ``freeze_broadcast`` returned in any subtask. Called in all, directly after ``restore``."""

    def finish(self) -> None:
        """All input has ended and the last watermark was processed: emit the rest, and forget it.

        Called again after a restore where only some of the former subtasks had finished or where more input has
        come (T10), so what was emitted must not be in state any more.
        """

    def on_resumed(self) -> None:
        """More input comes after ``finish`` and a restore (T10). Called before its first batch."""

    def close(self) -> None:
        """Release resources. Also called after a failure."""


class OperatorSpec(Protocol):
    """Configuration of an operator inside the graph."""

    def build(self) -> Operator:
        """Return a new operator, not yet opened."""


class KeyedOperator(Operator):
    """Asks for its backend in ``open``."""

    _backend: StateBackend

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the state of the keys that this subtask owns."""
        for _ in self._restore_backend(states):
            pass

    def _restore_backend(
        self, states: Sequence[RestoredState]
    ) -> Iterator[tuple[RestoredState, Mapping[str, memoryview]]]:
        """Restore the backend part by part; yield each with its sections, which are not kept.

        Files come first: a backend goes on with a database only while it has no rows.
        """
        owner = owner_of(self.context)
        continued: set[int] = set()
        for state in sorted(states, key=lambda state: state.files is None):
            if state.files is not None and id(state.files) not in continued and self._goes_on_with(state.files, owner):
                continued.add(id(state.files))
            if id(state.files) in continued:
                continue
            path = f"state of '{self.context.node}', subtask {state.subtask_index}"
            sections = decode_sections(state.payload, path)
            self._backend.restore(sections, path, owner)
            yield state, sections

    def _goes_on_with(self, files: StoredFiles, owner: Ownership) -> bool:
        return isinstance(self._backend, ContinuingBackend) and self._backend.continue_from(files, owner)

    def freeze(self) -> FrozenState | None:
        return self._backend.freeze()


def owner_of(context: OperatorContext) -> Ownership:
    """Return which keys the subtask of this operator owns."""
    return Ownership(context.max_parallelism, context.parallelism, context.subtask_index)


def key_columns(schema: pa.Schema, keys: tuple[str, ...]) -> KeyColumns:
    """Return the columns ``keys`` of ``schema``, with their types; without any one that no record ever has.

    Only a function with a broadcast side may have no key: nothing of it is in the backend.
    """
    if not keys:
        return KeyColumns(("",), (pa.bool_(),))
    return KeyColumns(keys, tuple(schema.field(key).type for key in keys))


class RowSource(Protocol):
    """Rows that have columns (``state.heap.HeapRows``)."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Slots | Mask) -> RowSource: ...

    def column(self, name: str) -> pa.Array: ...


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some rows of whole columns, of which there is at least one; ``rows`` None: all of them."""

    columns: Mapping[str, pa.Array]
    rows: Slots | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.rows is None else len(self.rows)

    def __getitem__(self, rows: Slots | Mask) -> ChosenRows:
        return ChosenRows(self.columns, _chosen(self.rows, rows))

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return decoded(self._taken(name))

    def encoded(self, name: str) -> pa.DictionaryArray | None:
        """Return one column as it is encoded; None: it is not."""
        return self._taken(name) if pa.types.is_dictionary(self.columns[name].type) else None

    def _taken(self, name: str) -> pa.Array:
        column = self.columns[name]
        return column if self.rows is None else column.take(pa.array(self.rows))


@dataclass(frozen=True, slots=True)
class SeriesRows:
    """Some rows of columns that Polars made; ``rows`` None: all of them."""

    frame: pl.DataFrame
    rows: Slots | None = None

    def __len__(self) -> int:
        return self.frame.height if self.rows is None else len(self.rows)

    def __getitem__(self, rows: Slots | Mask) -> SeriesRows:
        return SeriesRows(self.frame, _chosen(self.rows, rows))

    def series(self, name: str) -> pl.Series:
        """Return one column as Polars has it."""
        series = self.frame.get_column(name)
        return series if self.rows is None else series.gather(self.rows)

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return self.series(name).to_arrow(compat_level=pl.CompatLevel.oldest())


def _chosen(before: Slots | None, rows: Slots | Mask) -> Slots:
    """Return which rows are left of those in ``before``, None for all, of which ``rows`` are chosen."""
    places: Slots = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
    return places if before is None else before[places]


@dataclass(frozen=True, slots=True)
class Part:
    """Columns of lazy rows: by their names, what they are called in ``source``."""

    names: Mapping[str, str]
    source: RowSource


class LazyRows:
    """Rows that look like a record batch, as far as operators need it. ``parts`` have the same number of rows."""

    def __init__(self, schema: pa.Schema, parts: Sequence[Part]) -> None:
        self.schema = schema
        self._parts = parts
        self._made: dict[str, pa.Array] = {}

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self._parts[0].source)

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        if name not in self._made:
            source, inner = self._place(name)
            self._made[name] = source.column(inner)
        return self._made[name]

    def encoded(self, name: str) -> pa.DictionaryArray | None:
        """Return one column as it is encoded; None: it is not."""
        source, inner = self._place(name)
        return source.encoded(inner) if isinstance(source, ChosenRows) else None

    def series(self, name: str) -> pl.Series | None:
        """Return one column that Polars made; None: it did not."""
        source, inner = self._place(name)
        return source.series(inner) if isinstance(source, SeriesRows) else None

    def _place(self, name: str) -> tuple[RowSource, str]:
        part = next(part for part in self._parts if name in part.names)
        return part.source, part.names[name]

    def parts(self, names: Mapping[str, str]) -> list[Part]:
        """Return parts with some columns of these rows: by their new names, what they are called here."""
        found: list[Part] = []
        for part in self._parts:
            own = {new: part.names[name] for new, name in names.items() if name in part.names}
            if own:
                found.append(Part(own, part.source))
        return found

    def without_series(self) -> LazyRows:
        """Return these rows with what Polars made in the types of the schema.

        Raises:
            MisfitError: a value does not fit.
        """
        parts: list[Part] = []
        for part in self._parts:
            if isinstance(part.source, SeriesRows):
                made = {
                    name: fitted(part.source.column(inner), self.schema.field(name).type, name)
                    for name, inner in part.names.items()
                }
                part = Part({name: name for name in made}, ChosenRows(made))
            parts.append(part)
        return LazyRows(self.schema, parts)

    def select(self, names: Sequence[str]) -> pa.RecordBatch:
        """Return some columns as a batch."""
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatch.from_arrays([self.column(name) for name in names], schema=schema)

    def batch(self) -> pa.RecordBatch:
        """Return all columns as a batch."""
        return self.select(self.schema.names)

    def take(self, rows: pa.Array) -> LazyRows:
        """Return some rows."""
        return self._chosen(rows.to_numpy())

    def filter(self, mask: pa.Array) -> LazyRows:
        """Return the rows where ``mask`` is true; null counts as false."""
        return self._chosen(np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False)))

    def slice(self, start: int, length: int) -> LazyRows:
        """Return up to ``length`` rows from ``start`` on."""
        return self._chosen(np.arange(start, min(start + length, self.num_rows)))

    def _chosen(self, rows: Slots) -> LazyRows:
        return LazyRows(self.schema, [Part(part.names, part.source[rows]) for part in self._parts])


def as_batch(rows: pa.RecordBatch | LazyRows) -> pa.RecordBatch:
    """Return ``rows`` as a record batch."""
    return rows.batch() if isinstance(rows, LazyRows) else rows


def decoded(column: pa.Array) -> pa.Array:
    """Return a column that may be encoded as it is without."""
    return column.dictionary.take(column.indices) if pa.types.is_dictionary(column.type) else column


def as_lazy(rows: pa.RecordBatch | LazyRows) -> LazyRows:
    """Return ``rows``, which have at least one column, as lazy rows."""
    if isinstance(rows, LazyRows):
        return rows
    schema = rows.schema
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    columns = dict(zip(schema.names, rows.columns, strict=True))
    return LazyRows(pa.schema(fields), [Part({name: name for name in columns}, ChosenRows(columns))])


def with_encoded_text(batch: pa.RecordBatch) -> pa.RecordBatch | LazyRows:
    """Return what a source has read; as lazy rows if any of its columns is encoded."""
    return as_lazy(batch) if any(pa.types.is_dictionary(dtype) for dtype in batch.schema.types) else batch
