"""``reduce``: a total for each key, which a function combines with each record.

A total is a record like those that come in. What it has beside its key is a value state, so that it expires, is shown
and is written from outside as those of process functions are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.model.schema_evolution import OperatorRules
from headgate.operators.base import Operator, OperatorContext, Output, key_columns
from headgate.operators.checkpoint_listeners import own_function_of
from headgate.operators.functions import Refused, Row, RowWriter, divert_refused, own_copy, paused_gc, rows_of
from headgate.operators.keys import check_keys
from headgate.operators.process.timers import TimedOperator
from headgate.operators.user_functions import (
    FunctionOperator,
    UserFunctionError,
    described_rows,
    divert_unreadable,
    shortened,
    user_error,
)
from headgate.state.backend import RowBackend, TimeKind
from headgate.state.descriptors import NO_EVOLUTION, Evolution, StateDescriptor, StateKind, state_identity
from headgate.state.ttl import TTL, live_value
from headgate.state.values import Conversion, RecordConversion, conversion

ACCUMULATORS = "accumulators"
"""The state of ``reduce``."""

Record: TypeAlias = tuple[Any, ...]
"""The values of one record in the order of the columns. Never changed."""


@dataclass(frozen=True)
class ReduceSpec:
    """Combine the records of each key. ``function(accumulator, record)`` returns the new accumulator.

    Attributes:
        schema: the canonical schema of the input, which the accumulator has too.
        evolution: what becomes of accumulators that an older program wrote.
        ttl: keys without a record for so long begin again.
    """

    keys: tuple[str, ...]
    function: Callable[[Row, Row], Row]
    schema: pa.Schema
    evolution: Evolution = field(default=NO_EVOLUTION, compare=False)
    ttl: TTL | None = None

    def build(self) -> Operator:
        return ReduceOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``.

        Raises:
            UsageError: the key is not in it.
        """
        check_keys(node, schema, self.keys)
        return schema

    @property
    def kept(self) -> list[str]:
        """The columns that are kept: those beside the key, or all if there are no others."""
        return [name for name in self.schema.names if name not in self.keys] or self.schema.names

    @property
    def descriptor(self) -> StateDescriptor:
        """The state."""
        dtype = pa.struct([self.schema.field(name) for name in self.kept])
        return StateDescriptor(ACCUMULATORS, StateKind.VALUE, dtype, ttl=self.ttl, evolution=self.evolution)

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), [self.descriptor])

    def state_rules(self) -> OperatorRules:
        return OperatorRules(((ACCUMULATORS, self.evolution.rules()),))


class ReduceOperator(FunctionOperator, TimedOperator):
    """Loads the accumulators of a batch's keys, goes through its records, and stores them again.

    What fails in between leaves all of them as they were.
    """

    _backend: RowBackend

    def __init__(self, spec: ReduceSpec) -> None:
        self._spec = spec
        self._function = spec.function
        self._keys = spec.keys
        self._names: list[str] = spec.schema.names
        self._nested: list[str] = [field.name for field in spec.schema if pa.types.is_nested(field.type)]
        self._writer = RowWriter(spec.schema)
        self._kept = RecordConversion(spec.schema.types)
        self._key_of_row: Callable[[Row], Any] = itemgetter(*spec.keys)
        self._key_of_values: Callable[[Record], Any] = itemgetter(*(self._names.index(k) for k in spec.keys))
        self._layout = _Layout(spec)

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._function = own_function_of(context.node, self._function)
        self._open_function(self._function)
        descriptor = self._spec.descriptor
        self._backend = context.states.by_row(key_columns(self._spec.schema, self._keys), [descriptor])
        self._cells = self._backend.cells(descriptor)

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.absorb()
        batch = divert_unreadable(self, batch)
        self._backend.expect([batch.column(key) for key in self._keys])
        refused: list[Refused] = []
        counters = self.context.metrics.counters
        counted = counters.copy()
        with paused_gc():
            rows = rows_of(batch)
            keys = list(map(self._key_of_row, rows))
            before = self._load(dict.fromkeys(keys))
            try:
                accumulators, results = self._reduce(batch, keys, rows, before, refused, is_checked=False)
                reduced = self._writer.batch_of_values(results)
            except (ValueError, TypeError, OverflowError, UserFunctionError):
                # a value of a wrong type, or what the function made of one later: once more, checking each result
                refused = []
                counters.clear()
                counters.update(counted)
                accumulators, results = self._reduce(batch, keys, rows_of(batch), before, refused, is_checked=True)
                reduced = self._writer.batch_of_values(results)
        self._store(accumulators, before)
        if refused:
            divert_refused(self, refused)
        self.output.emit(reduced)

    def _load(self, keys: Iterable[Any]) -> dict[Any, Record]:
        """Return the accumulators of those of ``keys`` that have one."""
        cells, now_ms, record = self._cells, self._backend.time.now_ms, self._layout.record
        if self._spec.ttl is None:
            get = cells.get
            return {key: record(key, stored) for key in keys if (stored := get(key)) is not None}
        return {key: record(key, timed[0]) for key in keys if (timed := live_value(cells, key, now_ms)) is not None}

    def _store(self, accumulators: Mapping[Any, Record], before: Mapping[Any, Record]) -> None:
        """Set accumulators; one that is as it was had no record, or only such as were refused."""
        put, stored, ttl = self._cells.put, self._layout.stored, self._spec.ttl
        if ttl is None:
            for key, record in accumulators.items():
                if record is not before.get(key):
                    put(key, stored(record))
            return
        expires_ms = self._backend.time.now_ms + ttl.duration_ms
        for key, record in accumulators.items():
            if ttl.is_renewed_by_reads or record is not before.get(key):
                put(key, (stored(record), expires_ms))

    def _reduce(
        self,
        batch: pa.RecordBatch,
        keys: list[Any],
        rows: list[Row],
        before: Mapping[Any, Record],
        refused: list[Refused],
        *,
        is_checked: bool,
    ) -> tuple[dict[Any, Record], list[Record]]:
        """Return the accumulators of the batch's keys, and the accumulator after each of its records.

        The loop is inlined: it runs once per record. A record whose result does not fit goes to ``refused`` and leaves
        its key's accumulator as it was.
        """
        accumulators = dict(before)
        function, names, nested, count = self._function, self._names, self._nested, len(self._names)
        values_of, key_of_values, kept = self._writer.values, self._key_of_values, self._kept
        results: list[Record] = []
        for key, row in zip(keys, rows):  # noqa: B905 (strict costs 10 %)
            so_far = accumulators.get(key)
            if so_far is None:
                after = values_of(row)
            else:
                accumulator = dict(zip(names, so_far))  # noqa: B905 (strict costs 10 %)
                for name in nested:  # what was emitted, or is frozen, must not change with it
                    accumulator[name] = own_copy(accumulator[name])
                try:
                    result = function(accumulator, row)
                except Exception as error:
                    raise user_error(self.context.node, row, error) from None
                try:
                    after = values_of(result) if len(result) == count else ()
                except (KeyError, TypeError):
                    after = ()
                if not after or key_of_values(after) != key or (is_checked and self._writer.problem(result)):
                    refused.append(self._refusal(result, batch.slice(len(results) + len(refused), 1)))
                    continue
                after = kept(after, so_far)
            accumulators[key] = after
            results.append(after)
        return accumulators, results

    def _refusal(self, result: Row, record: pa.RecordBatch) -> Refused:
        problem = self._writer.problem(result) or f"the function changed the key columns {list(self._keys)}"
        return Refused(problem, shortened(described_rows(record)[0]))

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        return 0

    def _end_firing(self) -> None:
        """No timer fires."""


class _Layout:
    """What is stored of a record: the columns beside its key, in the form of state (``values``)."""

    def __init__(self, spec: ReduceSpec) -> None:
        kept, names = spec.kept, spec.schema.names
        parts = [*spec.keys, *kept]
        self._is_one_key = len(spec.keys) == 1
        self._in_order = _tuple_of([parts.index(name) for name in names])
        self._beside = _tuple_of([names.index(name) for name in kept])
        self._nested: list[tuple[int, Conversion]] = [
            (at, conversion(spec.schema.field(name).type))
            for at, name in enumerate(kept)
            if pa.types.is_nested(spec.schema.field(name).type)
        ]

    def record(self, key: Any, stored: Record) -> Record:
        """Return the record of ``key`` of which this was stored."""
        if self._nested:
            values = list(stored)
            for at, one in self._nested:
                values[at] = one.loaded(values[at])
            stored = tuple(values)
        return self._in_order((key, *stored) if self._is_one_key else (*key, *stored))

    def stored(self, record: Record) -> Record:
        """Return what is stored of a record."""
        found = self._beside(record)
        if not self._nested:
            return found
        values = list(found)
        for at, one in self._nested:
            values[at] = None if values[at] is None else one.store(values[at])
        return tuple(values)


def _tuple_of(places: list[int]) -> Callable[[Record], Record]:
    """Return what takes these places of a tuple."""
    if len(places) == 1:
        (at,) = places
        return lambda values: (values[at],)
    return itemgetter(*places)
