"""``process`` with a vectorised function: thousands of keys a call (rules ST10 to ST14 of docs/spec/state.md).

Counterpart: ``operators.process.batch_states`` is the state that users see, a
``state.backend.ColumnBackend`` holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.key_check import check_keys
from headgate.operators.keyed import key_columns, owner_of
from headgate.operators.process.batch_reducing import BatchStateHandle
from headgate.operators.process.batch_states import BatchCursor, BatchStates, Keys
from headgate.operators.process.batch_timers import BatchTimers, FiredTimers
from headgate.operators.process.spec import StatefulFunction, StatefulFunctionSpec, opened
from headgate.operators.process.timed import TimedOperator
from headgate.operators.row_functions import divert_misfits
from headgate.operators.schemas import SchemaLike, batch_of, columns_of_frame, frame_of
from headgate.operators.types import schema_text
from headgate.operators.user_function import UserFunctionError, batch_error, copied, user_traceback
from headgate.state.backend import ColumnBackend, Ownership
from headgate.state.descriptors import KeyColumns
from headgate.state.frozen import FrozenState
from headgate.state.memory.factory import MemoryStates
from headgate.state.ownership import owned_rows
from headgate.state.timers import TimeKind

_EMIT_ROWS = 65_536
"""Larger results are sent on in parts of so many rows."""

TIMERS_PER_CALL = 16_384
"""``on_timer`` is called with so many keys at most; a tick calls it once (TM7)."""


class BatchContext:
    """The context of a call of a batch process function: the keys, and their timers."""

    def __init__(
        self, cursor: BatchCursor, backend: ColumnBackend, keys: KeyColumns, node: str, timers: BatchTimers
    ) -> None:
        """For Headgate only."""
        self._cursor = cursor
        self._timers = timers
        self._backend = backend
        self._key_schema = pa.schema(list(zip(keys.names, keys.types, strict=True)))
        self._node = node
        self._owner: Ownership | None = None

    @property
    def keys(self) -> Keys:
        """The keys of the batch's rows, or of the firing timers. In ``on_round``: all keys that have any state."""
        return self._cursor.keys

    @property
    def timers(self) -> BatchTimers:
        """The timers of these keys, and the current times."""
        return self._timers

    def lookup(self, frame: pl.DataFrame) -> Keys:
        """Return the keys of the rows of ``frame``, which has the key columns. Pass them as ``keys=`` to a state.

        The keys must belong to this subtask, like those of the batch after grouping or filtering.

        Raises:
            UsageError: a key column is missing or contains a null, or a key belongs to another subtask.
        """
        names: list[str] = self._key_schema.names
        missing = [name for name in names if name not in frame.columns]
        if missing:
            raise UsageError(f"operator '{self._node}': lookup needs the key column '{missing[0]}' in its frame")
        batch = batch_of(frame, self._key_schema)
        if any(column.null_count for column in batch.columns):
            raise UsageError(f"operator '{self._node}': lookup was given a null key; filter such rows out before")
        assert self._owner is not None
        owner = self._owner
        owned = owned_rows(batch, names, owner.max_parallelism, owner.parallelism, owner.subtask_index)
        if owned.num_rows != batch.num_rows:
            raise UsageError(
                f"operator '{self._node}': lookup was given {batch.num_rows - owned.num_rows} keys of other subtasks, "
                "where their state is; send records to them with key_by"
            )
        return self._keys_of(batch.columns)

    def _keys_of(self, columns: Sequence[pa.Array]) -> Keys:
        return Keys(self._backend.slots(columns), self._backend.key_columns, tuple(self._key_schema.names))


class BatchProcessFunction:
    """Base class of vectorised functions with state per key. Pass an instance to ``KeyedStream.process``.

    Every subtask works on a copy of the instance. Keep everything that must survive a failure in state. Batches may
    begin and end at other records in each run, so the result must not depend on the division into batches.

    Attributes:
        schema: the schema of the frames that it returns. None: the schema of its input.
    """

    schema: SchemaLike | None = None

    def open(self, state: BatchStateHandle) -> None:
        """Declare state: ``self.label = state.value("label", pa.int64())``.

        Called once per subtask, and once when the pipeline is built. State has no keys yet and cannot be used here.
        """

    def process(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame | None:
        """Process one batch. Return the results, or None."""
        raise NotImplementedError

    def on_timer(self, timers: FiredTimers, context: BatchContext) -> pl.DataFrame | None:
        """Called when timers of ``context.keys`` fire; these timers no longer exist. Return the results, or None.

        It may use state, and register and delete timers. ``context.keys.frame()`` returns the key columns.
        """
        return None

    def on_round(self, round: int, context: BatchContext) -> pl.DataFrame | None:
        """Called when a round of the surrounding loop is finished everywhere. ``context.keys``: all keys with state."""
        return None


@dataclass(frozen=True)
class BatchProcessSpec(StatefulFunctionSpec[BatchProcessFunction]):
    """Call a vectorised function with state. Made by ``batch_process_spec``, which learns ``descriptors``."""

    form: ClassVar[type[StatefulFunction]] = BatchProcessFunction

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return BatchProcessOperator(self)


def batch_process_spec(
    node: str, keys: tuple[str, ...], function: BatchProcessFunction, schema: pa.Schema
) -> BatchProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema``, learning its states from a copy.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    check_keys(node, schema, keys)
    columns = key_columns(schema, keys)
    learning = BatchStateHandle(
        node, BatchStates(node, BatchCursor(), lambda d: MemoryStates().by_column(columns, [d]))
    )
    descriptors = opened(node, copied(node, function), learning)
    return BatchProcessSpec(keys, function, schema, descriptors, learning.forgotten)


class BatchProcessOperator(TimedOperator):
    """Calls the function once per batch, with its states at the keys of the batch's rows."""

    _backend: ColumnBackend

    def __init__(self, spec: BatchProcessSpec) -> None:
        self._spec = spec
        self._cursor = BatchCursor()

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's function."""
        super().open(context, output)
        node, spec = context.node, self._spec
        keys = key_columns(spec.schema, spec.keys)
        states = context.states if spec.keys else MemoryStates()  # no key: none of them has anything
        self._backend = states.by_column(keys, spec.descriptors, has_timers=spec.has_timers)
        self._timers = BatchTimers(node, self._cursor, self._time, self._backend.timers)
        self._function: BatchProcessFunction = copied(node, spec.function)
        self.user_object = self._function
        maker = BatchStates(node, self._cursor, lambda _: self._backend)
        found = opened(node, self._function, self._handle(maker))
        assert found == spec.descriptors
        self._user_context = BatchContext(self._cursor, self._backend, keys, node, self._timers)
        self._user_context._owner = owner_of(context)
        self._schema = spec.output_schema(spec.schema, node)

    def _handle(self, maker: BatchStates) -> BatchStateHandle:
        """Return what the function declares its states with."""
        return BatchStateHandle(self.context.node, maker)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        self._begin_call()
        self._backend.prepare()
        if self._spec.keys:
            self._cursor.move(self._user_context._keys_of([batch.column(key) for key in self._spec.keys]))
        try:
            result = self._function.process(frame_of(batch), self._user_context)
        except Exception as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        finally:
            self._cursor.move(None)
        self._emit(result)

    def on_round(self, round_: int) -> None:
        """See ``Operator``. Calls the function once for all keys that have state (ST9)."""
        if type(self._function).on_round is BatchProcessFunction.on_round:
            return
        self._begin_call()
        self._backend.prepare()
        slots = self._backend.all_slots()
        if len(slots) == 0:
            return
        self._cursor.move(Keys(slots, self._backend.key_columns, self._spec.keys))
        try:
            result = self._function.on_round(round_, self._user_context)
        except Exception as error:
            record = f"{len(slots)} keys at the end of round {round_}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._cursor.move(None)
        self._emit(result)

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        """See ``TimedOperator``. Calls the function once."""
        assert self._backend.timers is not None
        self._begin_call()
        if not self._timers.holds_slots:
            self._backend.prepare()
        slots, times_ms = self._backend.timers.of(kind).take(until_ms, TIMERS_PER_CALL)
        if len(slots) == 0:
            return 0
        self._cursor.move(Keys(slots, self._backend.key_columns, self._spec.keys))
        self._timers.begin(kind, slots, times_ms)
        try:
            result = self._function.on_timer(FiredTimers(kind, pl.Series(times_ms)), self._user_context)
        except Exception as error:
            record = f"{len(slots)} timers of {kind.value}, the first one for {times_ms[0]}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._cursor.move(None)
        self._emit(result)
        return len(slots)

    def _end_firing(self) -> None:
        """See ``TimedOperator``."""
        self._timers.end()

    def _emit(self, result: Any) -> None:
        if result is None:
            return
        node, schema = self.context.node, self._schema
        if not isinstance(result, pl.DataFrame):
            raise UserFunctionError(node, f"a result of type {type(result).__name__}", "return a DataFrame or None")
        try:
            whole = divert_misfits(self, columns_of_frame(result, schema), schema)
        except (pa.ArrowException, pl.exceptions.PolarsError, KeyError, ValueError) as error:
            raise UserFunctionError(
                node,
                f"a batch of {result.height} results",
                f"they must have the columns {schema_text(schema)}: {error}",
            ) from None
        for start in range(0, whole.num_rows, _EMIT_ROWS):
            self.output.emit(whole.slice(start, _EMIT_ROWS))

    def freeze(self) -> FrozenState | None:
        """See ``Operator``. None for a function that declared no state and has no timers."""
        return super().freeze() if self._spec.descriptors or self._spec.has_timers else None
