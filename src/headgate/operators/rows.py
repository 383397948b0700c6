"""Between batches and Python rows (``dict`` per record), as fast as plain Python allows.

Reading costs about 1 µs and writing about 0.5 µs per record of four columns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from headgate.codec.exact_values import MisfitError, described, exact_array, exact_value
from headgate.operators.schemas import frame_of
from headgate.operators.user_function import shortened

Row: TypeAlias = dict[str, Any]


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the cyclic garbage collector for one batch of rows.

    The rows are thousands of live objects without cycles: the collector would walk them again and again, for half
    of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return one new dict per record. Moments are ``datetime`` in UTC, local times have no zone."""
    names = batch.schema.names
    return [dict(zip(names, values)) for values in frame_of(batch).rows()]  # noqa: B905 (strict costs 10 %)


def own_copy(value: Any) -> Any:
    """Return a struct or list with all that is within, to be changed freely."""
    if isinstance(value, dict):
        return {name: own_copy(inner) for name, inner in value.items()}
    return [own_copy(inner) for inner in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that does not fit the schema, and why."""

    problem: str
    record: str


class RowWriter:
    """Makes batches of ``schema`` from dicts that have exactly its columns."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._names: list[str] = schema.names
        getter = itemgetter(*self._names)
        self._values: Callable[[Row], tuple[Any, ...]] = getter if len(self._names) > 1 else lambda row: (getter(row),)

    def values(self, row: Row) -> tuple[Any, ...]:
        """Return the columns of ``row`` as a tuple.

        Raises:
            KeyError, TypeError: a column is missing or ``row`` is no mapping; see ``problem``.
        """
        if len(row) != len(self._names):
            raise KeyError
        return self._values(row)

    def batch(self, rows: Sequence[Row]) -> tuple[pa.RecordBatch, list[Refused]]:
        """Return the rows that fit as a batch, and those that do not."""
        try:
            return self.batch_of_values([self.values(row) for row in rows]), []
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            return self._slowly(rows)

    def batch_of_values(self, values: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Return a batch of tuples in the order of the schema's columns.

        Raises:
            MisfitError: a value does not fit its column's type.
        """
        columns = zip(*values, strict=True) if values else [()] * len(self._names)
        arrays = [exact_array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _slowly(self, rows: Sequence[Row]) -> tuple[pa.RecordBatch, list[Refused]]:
        good: list[tuple[Any, ...]] = []
        refused: list[Refused] = []
        for row in rows:
            problem = self.problem(row)
            if problem:
                refused.append(Refused(problem, shortened(row)))
            else:
                good.append(self.values(row))
        return self.batch_of_values(good), refused

    def problem(self, row: object) -> str:
        """Return why ``row`` does not fit the schema, or ""."""
        if not isinstance(row, dict):
            return f"the function returned {type(row).__name__} instead of a dict"
        missing = [name for name in self._names if name not in row]
        if missing:
            return f"the function returned no field '{missing[0]}'"
        unknown = [name for name in row if name not in self._names]
        if unknown:
            return f"the function returned the unknown field {unknown[0]!r}; declare it with schema="
        for field in self._schema:
            try:
                exact_value(row[field.name], field.type)
            except MisfitError as error:
                misfit = error.within(field.name)
                return (
                    f"the function returned {described(misfit.value)} for field '{misfit.path}', which is {misfit.type}"
                )
        return ""
