"""``reduce``: a keyed Python function of (accumulator, record), emitting the accumulator after every record.

The accumulator has the columns of the input; the first record of a key is its first accumulator, as in Flink (OP7).
The function gets a copy of it, so that changing it in place harms neither state nor what was emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import pyarrow as pa

from headgate.model.evolution import OperatorRules
from headgate.model.identity_parts import ACCUMULATORS
from headgate.model.state_identity import StateIdentity
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.checkpointed.exploring import own_copy_of
from headgate.operators.key_check import check_keys
from headgate.operators.keyed import KeyedOperator
from headgate.operators.row_functions import divert_refused
from headgate.operators.rows import Refused, Row, RowWriter, own_copy, paused_gc, rows_of
from headgate.operators.types import schema_text
from headgate.operators.unreadable import divert_unreadable
from headgate.operators.user_function import UserFunctionError, shortened, user_error
from headgate.state.backend import Record, RecordBackend
from headgate.state.descriptors import Section
from headgate.state.evolution import NO_EVOLUTION, Evolution


@dataclass(frozen=True)
class ReduceSpec:
    """Combine the records of each key. ``function(accumulator, record)`` returns the new accumulator.

    ``schema`` is the canonical schema of the input, which the accumulator has too; ``evolution`` says what becomes of
    accumulators that an older program wrote.
    """

    keys: tuple[str, ...]
    function: Callable[[Row, Row], Row]
    schema: pa.Schema
    evolution: Evolution = field(default=NO_EVOLUTION, compare=False)

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
        return StateIdentity.of_reduce(self.keys, schema_text(self.schema)).text

    def state_rules(self) -> OperatorRules:
        """See ``catalog.state_rules``."""
        return OperatorRules(((ACCUMULATORS, self.evolution.rules()),))


class ReduceOperator(KeyedOperator):
    """Loads the accumulators of a batch's keys, goes through its records, and stores them again."""

    _backend: RecordBackend

    def __init__(self, spec: ReduceSpec) -> None:
        self._function = spec.function
        self._schema = spec.schema
        self._evolution = spec.evolution
        self._keys = spec.keys
        self._names: list[str] = spec.schema.names
        self._nested: list[str] = [field.name for field in spec.schema if pa.types.is_nested(field.type)]
        self._writer = RowWriter(spec.schema)
        self._key_of_row: Callable[[Row], Any] = itemgetter(*spec.keys)
        self._key_of_values: Callable[[Record], Any] = itemgetter(*(self._names.index(k) for k in spec.keys))

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``."""
        super().open(context, output)
        self.user_object = self._function = own_copy_of(context.node, self._function)
        self._backend = context.states.records(Section(ACCUMULATORS, self._schema, self._keys, self._evolution))

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        batch = divert_unreadable(self, batch)
        refused: list[Refused] = []
        with paused_gc():
            try:
                accumulators, results = self._reduce(batch, refused, is_checked=False)
                reduced = self._writer.batch_of_values(results)
            except (ValueError, TypeError, OverflowError, UserFunctionError):
                # a value of a wrong type, or what the function made of one later: once more, checking each result
                refused = []
                accumulators, results = self._reduce(batch, refused, is_checked=True)
                reduced = self._writer.batch_of_values(results)
        self._backend.store(accumulators)
        if refused:
            divert_refused(self, refused)
        self.output.emit(reduced)

    def _reduce(
        self, batch: pa.RecordBatch, refused: list[Refused], *, is_checked: bool
    ) -> tuple[dict[Any, Record], list[Record]]:
        """Return the accumulators of the batch's keys, and the accumulator after each of its records.

        The loop is inlined: it runs once per record. A result that does not fit goes to ``refused`` and leaves its
        key's accumulator as it was.
        """
        rows = rows_of(batch)
        keys = list(map(self._key_of_row, rows))
        accumulators = self._backend.load(dict.fromkeys(keys))
        function, names, nested, count = self._function, self._names, self._nested, len(self._names)
        values_of, key_of_values = self._writer.values, self._key_of_values
        results: list[Record] = []
        for key, row in zip(keys, rows):  # noqa: B905 (strict costs 10 %)
            before = accumulators.get(key)
            if before is None:
                after = values_of(row)
            else:
                accumulator = dict(zip(names, before))  # noqa: B905 (strict costs 10 %)
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
                    refused.append(self._refusal(result))
                    continue
            accumulators[key] = after
            results.append(after)
        return accumulators, results

    def _refusal(self, result: Row) -> Refused:
        problem = self._writer.problem(result) or f"the function changed the key columns {list(self._keys)}"
        return Refused(problem, shortened(result))
