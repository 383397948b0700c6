"""Side outputs of process functions: ``side_outputs`` of the class, ``emit_to`` of every context.

What a call emits is sent on after it, so that nothing downstream runs in the middle of a user's function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.graph import BAD_RECORDS, MAIN, OutputTag
from headgate.operators.base import Operator
from headgate.operators.functions import Refused, RowWriter, divert_refused, fitting_and_refused
from headgate.operators.schemas import SchemaLike, as_schema, columns_of_frame, schema_text
from headgate.operators.user_functions import shortened

SideOutputsLike: TypeAlias = Mapping[str, SchemaLike | None]
"""What a function declares: names and schemas; None: the schema of its input."""

EMIT_ROWS = 65_536
"""Larger results are sent on in parts of so many rows."""


def side_schemas(node: str, function: object, schema: pa.Schema) -> dict[OutputTag, pa.Schema]:
    """Return the side outputs that ``function`` declares, canonical; ``schema``: of its input.

    Raises:
        UsageError: a wrong declaration.
    """
    declared: Any = getattr(function, "side_outputs", None) or {}
    kind = type(function).__name__
    if not isinstance(declared, Mapping) or isinstance(declared, pl.Schema):
        raise UsageError(
            f"operator '{node}': {kind}.side_outputs must be a dict from names to schemas, such as "
            f"{{'late': {{'id': int}}}}, not {shortened(declared)}"
        )
    found: dict[OutputTag, pa.Schema] = {}
    for name, given in declared.items():
        if name in (MAIN, BAD_RECORDS):
            raise UsageError(f"operator '{node}': no side output of {kind} can be named '{name}', which is reserved")
        try:
            found[OutputTag(name)] = schema if given is None else as_schema(node, given)
        except UsageError as error:
            raise UsageError(f"{error.message} (side output '{name}' of {kind})") from None
    return found


class SideOutputs(ABC):
    """What calls of one function in one subtask have emitted to its side outputs and was not sent on yet."""

    def __init__(self, node: str, schemas: Mapping[OutputTag, pa.Schema]) -> None:
        self._node = node
        self._schemas = schemas

    def add(self, name: str, records: Any) -> None:
        """Take records for the side output ``name``.

        Raises:
            UsageError: it is not declared, or these are no records.
        """
        schema = self._schemas.get(OutputTag(name)) if isinstance(name, str) else None
        if schema is None:
            names = ", ".join(f"'{name}'" for name in self._schemas) or "none"
            raise UsageError(
                f"operator '{self._node}' has no side output {name!r}; its class declares in side_outputs: {names}"
            )
        self._take(OutputTag(name), schema, records)

    @abstractmethod
    def _take(self, tag: OutputTag, schema: pa.Schema, records: Any) -> None:
        """Keep the records."""

    @abstractmethod
    def send(self, operator: Operator) -> None:
        """Send all that was taken."""


class RowSideOutputs(SideOutputs):
    """Of a function by row."""

    def __init__(self, node: str, schemas: Mapping[OutputTag, pa.Schema]) -> None:
        super().__init__(node, schemas)
        self._rows: dict[OutputTag, list[Any]] = {}
        self._writers = {tag: RowWriter(schema, "side_outputs") for tag, schema in schemas.items()}

    def _take(self, tag: OutputTag, schema: pa.Schema, records: Any) -> None:
        if not isinstance(records, dict):
            raise UsageError(f"emit_to takes one record, a dict, not {type(records).__name__}; call it for each record")
        self._rows.setdefault(tag, []).append(self._writers[tag].taken(records))

    def send(self, operator: Operator) -> None:
        if not self._rows:
            return
        taken, self._rows = self._rows, {}
        for tag, rows in taken.items():
            batch, refused = self._writers[tag].batch(rows)
            divert_refused(operator, _of(tag, refused))
            operator.output.emit_to(tag, batch)


class BatchSideOutputs(SideOutputs):
    """Of a function by batch."""

    def __init__(self, node: str, schemas: Mapping[OutputTag, pa.Schema]) -> None:
        super().__init__(node, schemas)
        self._batches: list[tuple[OutputTag, pa.RecordBatch, list[Refused]]] = []

    def _take(self, tag: OutputTag, schema: pa.Schema, records: Any) -> None:
        if not isinstance(records, pl.DataFrame):
            raise UsageError(f"emit_to takes a DataFrame here, not {type(records).__name__}")
        try:
            self._batches.append((tag, *fitting_and_refused(columns_of_frame(records, schema), schema)))
        except (pa.ArrowException, pl.exceptions.PolarsError, KeyError, ValueError) as error:
            raise UsageError(
                f"records for side output '{tag}' must have the columns {schema_text(schema)}: {error}"
            ) from None

    def send(self, operator: Operator) -> None:
        taken, self._batches = self._batches, []
        for tag, batch, refused in taken:
            divert_refused(operator, _of(tag, refused))
            emit_in_parts(operator, tag, batch)


def _of(tag: OutputTag, refused: list[Refused]) -> list[Refused]:
    return [Refused(f"side output '{tag}': {one.problem}", one.record) for one in refused]


def emit_in_parts(operator: Operator, tag: OutputTag, batch: pa.RecordBatch) -> None:
    """Send a batch of any size to one output of ``operator``."""
    for start in range(0, batch.num_rows, EMIT_ROWS):
        part = batch.slice(start, EMIT_ROWS)
        if tag == MAIN:
            operator.output.emit(part)
        else:
            operator.output.emit_to(tag, part)
