"""``reduce``: a keyed Python function of (accumulator, record), emitting the accumulator after every record.

The accumulator has the columns of the input; the first record of a key is its first accumulator, as in Flink (OP7).
State holds immutable tuples per key, so that a function that changes its accumulator in place harms nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.operators.base import Operator, RestoredState
from headgate.operators.key_check import check_keys
from headgate.operators.row_functions import divert_refused
from headgate.operators.rows import Refused, Row, RowWriter, paused_gc, rows_of
from headgate.operators.schemas import frame_of
from headgate.operators.types import schema_text
from headgate.operators.unreadable import divert_unreadable
from headgate.operators.user_function import UserFunctionError, shortened, user_error
from headgate.state.frozen import FrozenState
from headgate.state.ipc import decode_batches, encode_batches
from headgate.state.ownership import owned_rows

_ENCODE_ROWS = 16_384

Values: TypeAlias = tuple[Any, ...]
State: TypeAlias = dict[Any, Values]


@dataclass(frozen=True)
class ReduceSpec:
    """Combine the records of each key. ``function(accumulator, record)`` returns the new accumulator.

    ``schema`` is the canonical schema of the input, which the accumulator has too.
    """

    keys: tuple[str, ...]
    function: Callable[[Row, Row], Row]
    schema: pa.Schema

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return ReduceOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``.

        Raises:
            UsageError: the key is not in it.
        """
        check_keys(node, schema, self.keys)
        return schema

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        return f"reduce(keys {', '.join(self.keys)}; columns {schema_text(self.schema)})"


class _Frozen(FrozenState):
    """The accumulators at a barrier. ``state`` is not changed by the operator until ``is_released``."""

    def __init__(self, state: State, schema: pa.Schema) -> None:
        super().__init__()
        self._state = state
        self._schema = schema

    def _rows(self) -> Mapping[str, int]:
        return {"accumulators": len(self._state)}

    def _encode(self) -> Sequence[Buffer]:
        writer, values = RowWriter(self._schema), list(self._state.values())
        batches = [
            writer.batch_of_values(values[start : start + _ENCODE_ROWS])
            for start in range(0, len(values), _ENCODE_ROWS)
        ]
        return encode_sections({"accumulators": encode_batches(self._schema, batches)})

    def _forget(self) -> None:
        self._state = {}


class ReduceOperator(Operator):
    """A dict of accumulators, and an overlay for what changes until a snapshot is released."""

    def __init__(self, spec: ReduceSpec) -> None:
        self._function = spec.function
        self._schema = spec.schema
        self._keys = spec.keys
        self._names: list[str] = spec.schema.names
        self._writer = RowWriter(spec.schema)
        self._key_of_row: Callable[[Row], Any] = itemgetter(*spec.keys)
        self._key_of_values: Callable[[Values], Any] = itemgetter(*(self._names.index(k) for k in spec.keys))
        self._state: State = {}
        self._overlay: State | None = None
        self._frozen: weakref.ref[_Frozen] | None = None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the accumulators of the keys that this subtask owns."""
        context = self.context
        for state in states:
            path = f"state of '{context.node}', subtask {state.subtask_index}"
            sections = decode_sections(state.payload, path)
            for batch in decode_batches(sections["accumulators"], self._schema, path):
                owned = owned_rows(
                    batch, self._keys, context.max_parallelism, context.parallelism, context.subtask_index
                )
                for values in frame_of(owned).rows():
                    self._state[self._key_of_values(values)] = values

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        self._absorb_overlay()
        batch = divert_unreadable(self, batch)
        refused: list[Refused] = []
        with paused_gc():
            undo: list[tuple[Any, Values | None]] = []
            try:
                results = self._reduce(rows_of(batch), refused, undo, is_checked=False)
                reduced = self._writer.batch_of_values(results)
            except (ValueError, TypeError, OverflowError, UserFunctionError):
                # a value of a wrong type, or what the function made of one later: once more, checking each result
                self._roll_back(undo)
                refused = []
                reduced = self._writer.batch_of_values(self._reduce(rows_of(batch), refused, [], is_checked=True))
        if refused:
            divert_refused(self, refused)
        self.output.emit(reduced)

    def _reduce(
        self,
        rows: list[Row],
        refused: list[Refused],
        undo: list[tuple[Any, Values | None]],
        *,
        is_checked: bool,
    ) -> list[Values]:
        """Return the accumulator after each of ``rows``. The loop is inlined: it runs once per record.

        A result that does not fit goes to ``refused`` and leaves its key's accumulator as it was.
        """
        state, overlay = self._state, self._overlay
        target = state if overlay is None else overlay
        function, names, count = self._function, self._names, len(self._names)
        key_of, values_of, key_of_values = self._key_of_row, self._writer.values, self._key_of_values
        results: list[Values] = []
        for row in rows:
            key = key_of(row)
            before = target.get(key)
            if before is None and overlay is not None:
                before = state.get(key)
            if before is None:
                after = values_of(row)
            else:
                try:
                    result = function(dict(zip(names, before)), row)  # noqa: B905 (strict costs 10 %)
                except Exception as error:
                    raise user_error(self.context.node, row, error) from None
                try:
                    after = values_of(result) if len(result) == count else ()
                except (KeyError, TypeError):
                    after = ()
                if not after or key_of_values(after) != key or (is_checked and self._writer.problem(result)):
                    refused.append(self._refusal(result))
                    continue
            undo.append((key, before))
            target[key] = after
            results.append(after)
        return results

    def _refusal(self, result: Row) -> Refused:
        problem = self._writer.problem(result) or f"the function changed the key columns {list(self._keys)}"
        return Refused(problem, shortened(result))

    def _roll_back(self, undo: Sequence[tuple[Any, Values | None]]) -> None:
        target = self._state if self._overlay is None else self._overlay
        for key, before in reversed(undo):
            if before is None:
                del target[key]
            else:
                target[key] = before

    def _absorb_overlay(self) -> None:
        """Once the snapshot is released (or was dropped), put the overlay back into the state."""
        if self._overlay is None or self._frozen is None:
            return
        frozen = self._frozen()
        if frozen is None or frozen.is_released:
            self._state.update(self._overlay)
            self._overlay, self._frozen = None, None

    def freeze(self) -> FrozenState:
        """See ``Operator``. Copies only when the snapshot before is still being written (OP8)."""
        self._absorb_overlay()
        if self._overlay is not None:
            self._state = {**self._state, **self._overlay}
        frozen = _Frozen(self._state, self._schema)
        self._overlay, self._frozen = {}, weakref.ref(frozen)
        return frozen
