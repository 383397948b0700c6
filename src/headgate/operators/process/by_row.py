"""``process`` with a row function: rules ST1 to ST9 of docs/spec/state.md.

Counterpart: ``operators.process.functions`` is what users see, a ``state.backend.RowBackend`` holds the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.key_check import check_keys
from headgate.operators.keyed import KeyedOperator, key_columns
from headgate.operators.process.declaring import Declarations
from headgate.operators.process.functions import Cursor, NoKey, ProcessContext, ProcessFunction, RowStates
from headgate.operators.row_functions import divert_refused
from headgate.operators.rows import Row, RowWriter, paused_gc, rows_of
from headgate.operators.schemas import as_schema
from headgate.operators.unreadable import divert_unreadable
from headgate.operators.user_function import UserFunctionError, copied, shortened, user_error, user_traceback
from headgate.state.backend import RowBackend
from headgate.state.descriptors import StateDescriptor, state_identity
from headgate.state.frozen import FrozenState
from headgate.state.memory.factory import MemoryStates

_ROUND_KEYS = 8_192
"""``on_round`` sends its results on after so many keys."""


@dataclass(frozen=True)
class ProcessSpec:
    """Call a function with state for each key. Made by ``row_process_spec``, which learns ``descriptors``."""

    keys: tuple[str, ...]
    function: ProcessFunction
    schema: pa.Schema
    descriptors: tuple[StateDescriptor, ...]

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return ProcessOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results.

        Raises:
            UsageError: the key is not in the input, or the function's ``schema`` has an unknown type.
        """
        check_keys(node, schema, self.keys)
        return schema if self.function.schema is None else as_schema(node, self.function.schema)

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        return state_identity(key_columns(self.schema, self.keys), self.descriptors)


def opened(node: str, function: Any, states: Declarations[Any, Any, Any]) -> tuple[StateDescriptor, ...]:
    """Call the function's ``open``; return what it declared."""
    try:
        function.open(states)
    except UsageError:
        raise
    except Exception as error:
        raise UserFunctionError(node, "open()", user_traceback(error)) from None
    return states.close()


def row_process_spec(node: str, keys: tuple[str, ...], function: ProcessFunction, schema: pa.Schema) -> ProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema``, learning its states from a copy.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    check_keys(node, schema, keys)
    columns, states = key_columns(schema, keys), MemoryStates()  # nobody ever puts anything into these
    learning = Declarations(node, RowStates(node, Cursor(), lambda d: states.by_row(columns, [d]).cells(d)))
    descriptors = opened(node, copied(node, function), learning)
    return ProcessSpec(keys, function, schema, descriptors)


class ProcessOperator(KeyedOperator):
    """Calls the function once per record, with its states at the record's key."""

    _backend: RowBackend

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._cursor = Cursor()
        self._user_context = ProcessContext(self._cursor)
        self._key_of_row: Callable[[Row], Any] = itemgetter(*spec.keys)

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's function."""
        super().open(context, output)
        node = context.node
        self._backend = context.states.by_row(key_columns(self._spec.schema, self._spec.keys), self._spec.descriptors)
        self._function: ProcessFunction = copied(node, self._spec.function)
        self.user_object = self._function
        states = Declarations(node, RowStates(node, self._cursor, self._backend.cells))
        found = opened(node, self._function, states)
        assert found == self._spec.descriptors
        self._writer = RowWriter(self._spec.output_schema(self._spec.schema, node))

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        self._backend.absorb()
        batch = divert_unreadable(self, batch)
        results: list[Any] = []
        with paused_gc():
            self._call(rows_of(batch), results)
            self._emit(results)

    def _call(self, rows: list[Row], results: list[Any]) -> None:
        function, context, cursor = self._function.process, self._user_context, self._cursor
        key_of = self._key_of_row
        row: Row = {}
        try:
            for row in rows:
                cursor.key = key_of(row)
                found = function(row, context)
                if found is not None:
                    results.extend(_each(found))
        except Exception as error:
            raise user_error(self.context.node, row, error) from None
        finally:
            cursor.key = NoKey()

    def on_round(self, round_: int) -> None:
        """See ``Operator``. Calls the function for every key that has state now (ST9)."""
        if type(self._function).on_round is ProcessFunction.on_round:
            return
        self._backend.absorb()
        keys = self._backend.all_keys()
        for start in range(0, len(keys), _ROUND_KEYS):
            results: list[Any] = []
            with paused_gc():
                self._call_round(round_, keys[start : start + _ROUND_KEYS], results)
                self._emit(results)

    def _call_round(self, round_: int, keys: list[Any], results: list[Any]) -> None:
        function, context, cursor = self._function.on_round, self._user_context, self._cursor
        try:
            for cursor.key in keys:
                found = function(round_, context)
                if found is not None:
                    results.extend(_each(found))
        except Exception as error:
            record = f"key {shortened(cursor.key)} at the end of round {round_}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            cursor.key = NoKey()

    def _emit(self, results: list[Any]) -> None:
        batch, refused = self._writer.batch(results)
        if refused:
            divert_refused(self, refused)
        self.output.emit(batch)

    def freeze(self) -> FrozenState | None:
        """See ``Operator``. None for a function that declared no state."""
        return super().freeze() if self._spec.descriptors else None


def _each(found: Any) -> Iterable[Any]:
    """Return the rows of a function's result (ST8)."""
    if isinstance(found, dict):
        raise TypeError("a process function must return an iterable of dicts, but returned one dict; return [row]")
    return found  # type: ignore[no-any-return]
