"""Functions of two keyed streams, by row and by batch: ``left.key_by("a").connect(right.key_by("b")).process(f)``.

Both inputs are partitioned by their keys, which have equal types, so a subtask receives all records of a key from both.
The key, its state and its timers have the names of the left key columns. Modelled on Flink's
``KeyedCoProcessFunction``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.operators.base import Operator, key_columns
from headgate.operators.functions import Row
from headgate.operators.keys import check_keys
from headgate.operators.process.batch_process import (
    BatchContext,
    BatchProcessFunction,
    BatchProcessOperator,
    BatchProcessSpec,
    batch_process_spec,
)
from headgate.operators.process.row_process import (
    ProcessContext,
    ProcessFunction,
    ProcessOperator,
    ProcessSpec,
    row_process_spec,
)
from headgate.operators.process.side_outputs import side_schemas
from headgate.operators.process.state_declaration import StatefulFunctionSpec

RIGHT_INPUT = InputName("right")
"""The input of the stream that is given to ``connect``."""


class CoProcessFunction(ProcessFunction):
    """Base class of functions of two keyed streams that process one record at a time.

    Pass an instance to ``left.key_by("a").connect(right.key_by("b")).process``. Records of equal keys share state and
    timers, whichever stream they are of. Without ``schema``, results have the columns of the left stream.
    """

    def process_left(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record of the left stream, of which ``connect`` is called. Return or yield results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_left; define it")

    def process_right(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record of the right stream, which is given to ``connect``. Return or yield results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_right; define it")


class BatchCoProcessFunction(BatchProcessFunction):
    """Base class of functions of two keyed streams that process batches. See ``CoProcessFunction``.

    ``context.keys`` are those of the batch, of either stream, by the names of the left key columns.
    """

    def process_left(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame | None:
        """Process one batch of the left stream. Return the results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_left; define it")

    def process_right(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame | None:
        """Process one batch of the right stream. Return the results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_right; define it")


@dataclass(frozen=True)
class CoProcessSpec(ProcessSpec):
    """Call a function for the records of two streams. Made by ``co_process_spec``."""

    right_keys: tuple[str, ...] = ()

    def build(self) -> Operator:
        return CoProcessOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        return _output_schemas(self, self.right_keys, inputs, node)


@dataclass(frozen=True)
class BatchCoProcessSpec(BatchProcessSpec):
    """Call a function for the batches of two streams. Made by ``co_process_spec``."""

    right_keys: tuple[str, ...] = ()

    def build(self) -> Operator:
        return BatchCoProcessOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        return _output_schemas(self, self.right_keys, inputs, node)


def _output_schemas(
    spec: StatefulFunctionSpec[Any],
    right_keys: tuple[str, ...],
    inputs: Mapping[InputName, pa.Schema],
    node: str,
) -> Mapping[OutputTag, pa.Schema]:
    if set(inputs) != {MAIN_INPUT, RIGHT_INPUT}:
        raise UsageError(f"operator '{node}' needs two keyed streams: left.key_by(...).connect(right.key_by(...))")
    left, right = inputs[MAIN_INPUT], inputs[RIGHT_INPUT]
    found = {MAIN: spec.output_schema(left, node), **side_schemas(node, spec.function, left)}
    check_keys(node, right, right_keys)
    if len(spec.keys) != len(right_keys):
        raise UsageError(
            f"operator '{node}': both streams need equally many key columns, but their keys are "
            f"({', '.join(spec.keys)}) and ({', '.join(right_keys)})"
        )
    kinds = key_columns(left, spec.keys).types, key_columns(right, right_keys).types
    for name, other, kind, other_kind in zip(spec.keys, right_keys, *kinds, strict=True):
        if not kind.equals(other_kind):
            raise UsageError(
                f"operator '{node}': keys of two streams must have equal types, but '{name}' is {kind} and '{other}' "
                f"is {other_kind}; cast one of them with with_columns(...) before key_by"
            )
    return found


def co_process_spec(
    node: str, keys: tuple[str, ...], right_keys: tuple[str, ...], function: object, schema: pa.Schema
) -> CoProcessSpec | BatchCoProcessSpec:
    """Return the spec of a function of two keyed streams; ``schema``: of the left one.

    Raises:
        UsageError: it is no such function, or a wrong declaration of state.
        UserFunctionError: its ``open`` raised.
    """
    kind = type(function)
    if not isinstance(function, CoProcessFunction | BatchCoProcessFunction):
        raise UsageError(
            f"operator '{node}': an instance of a CoProcessFunction or BatchCoProcessFunction is needed for two keyed "
            f"streams, such as Match(), not {kind.__name__}"
        )
    if type(function).process not in (ProcessFunction.process, BatchProcessFunction.process):
        raise UsageError(
            f"operator '{node}': {kind.__name__}.process would never be called; a function of two streams has "
            "process_left and process_right"
        )
    if isinstance(function, CoProcessFunction):
        of_row = row_process_spec(node, keys, function, schema)
        return CoProcessSpec(keys, function, schema, of_row.descriptors, of_row.forgotten, right_keys=right_keys)
    by_batch = batch_process_spec(node, keys, function, schema)
    return BatchCoProcessSpec(keys, function, schema, by_batch.descriptors, by_batch.forgotten, right_keys=right_keys)


class CoProcessOperator(ProcessOperator):
    """Calls the method of the stream for each record, with the states of its key."""

    _function: CoProcessFunction

    def __init__(self, spec: CoProcessSpec) -> None:
        super().__init__(spec)
        self._right_keys = spec.right_keys
        self._key_of_right = itemgetter(*spec.right_keys)

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        if name == RIGHT_INPUT:
            self._process(batch, self._function.process_right, self._right_keys, self._key_of_right)
        else:
            self._process(batch, self._function.process_left, self._spec.keys, self._key_of_row)


class BatchCoProcessOperator(BatchProcessOperator):
    """Calls the method of the stream for each batch, with the states of its keys."""

    _function: BatchCoProcessFunction

    def __init__(self, spec: BatchCoProcessSpec) -> None:
        super().__init__(spec)
        self._right_keys = spec.right_keys

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        if name == RIGHT_INPUT:
            self._process(batch, self._function.process_right, self._right_keys)
        else:
            self._process(batch, self._function.process_left, self._spec.keys)
