"""What every kind of stream is: records of one schema, on edges of the graph of one pipeline.

Counterparts: ``headgate.api.stream`` (what users call), ``headgate.api.loops`` and ``headgate.api.results``, which work
with any kind. Knows the pipeline only as a ``PipelineLike``, so that no module here needs one that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import polars as pl
import pyarrow as pa

from headgate.api.builder import GraphBuilder
from headgate.api.not_yet import refuse_life_cycle, refuse_unheard
from headgate.connectors.memory import FromRows
from headgate.display.streams import StreamPicture, stream_html
from headgate.errors import UsageError
from headgate.model.config import Duration
from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Edge, Role
from headgate.model.ids import NodeName
from headgate.model.progress import PipelineHandle
from headgate.operators import catalog
from headgate.operators.base import OperatorSpec

Row = dict[str, Any]

ROWS_AT_HAND = 5


class PipelineLike(Protocol):
    """What a stream needs of its pipeline."""

    name: str
    _builder: GraphBuilder

    def definition(self) -> PipelineDefinition:
        """See ``Pipeline``."""
        ...

    def start(self, *, spark: Any = None) -> PipelineHandle:
        """See ``Pipeline``."""
        ...

    def _checkpoint_root(self) -> str:
        """See ``Pipeline``."""
        ...

    def _explored(self, edges: tuple[Edge, ...], root: str, interval: Duration | None) -> PipelineLike:
        """See ``Pipeline``."""
        ...


class Records:
    """Records of one schema on their way through a pipeline: where they come from, their keys and event times."""

    def __init__(
        self,
        pipeline: PipelineLike,
        edges: tuple[Edge, ...],
        schema: pa.Schema,
        time_column: str | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        """For the pipeline only; users get streams from ``Pipeline.source`` and from other streams."""
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema
        self._time_column = time_column
        self._keys = keys

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the records."""
        return self._schema

    def _repr_html_(self) -> str:
        """Return columns, and rows only if they are in memory already: looking at a stream runs nothing (ND1)."""
        names = " and ".join(sorted({f"'{edge.upstream}'" for edge in self._edges}))
        title = (
            f"{type(self).__name__} of {names} in pipeline '{self._pipeline.name}'; show() runs it for a look at rows"
        )
        columns = [(field.name, str(field.type)) for field in self._schema]
        return stream_html(StreamPicture(title, columns, self._keys, self._time_column, self._rows_at_hand()))

    def _rows_at_hand(self) -> list[Row]:
        """Return the first records if the program itself gave them and nothing happens to them."""
        node = self._pipeline._builder.node(self._edges[0].upstream)
        if len(self._edges) == 1 and isinstance(node.spec, FromRows):
            return node.spec.first(ROWS_AT_HAND)
        return []

    def _like(self, edges: tuple[Edge, ...], schema: pa.Schema, time_column: str | None = None) -> Self:
        """Return a stream of this kind, with the same keys."""
        return type(self)(self._pipeline, edges, schema, time_column, self._keys)

    def _add(self, node: NodeName, spec: OperatorSpec, *, refuses: bool = False) -> pa.Schema:
        """Add an operator behind these records and return the schema of its output."""
        schema = catalog.output_schema(spec, self._schema, str(node))
        text, rules = catalog.state_text(spec, str(node)), catalog.state_rules(spec, str(node))
        self._pipeline._builder.add(
            node, Role.OPERATOR, self._edges, spec, schema, state_text=text, state_rules=rules, refuses=refuses
        )
        return schema

    def _time_column_in(self, schema: pa.Schema) -> str | None:
        """The time column survives as long as a column of its name and type does."""
        name = self._time_column
        if name is None or schema.get_field_index(name) < 0:
            return None
        return name if schema.field(name).type.equals(self._schema.field(name).type) else None


def function_of(verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` if it is one.

    Raises:
        UsageError
    """
    if not callable(function):
        raise UsageError(f"{verb} needs a function, not {function!r}")
    refuse_unheard(verb, function)
    refuse_life_cycle(verb, function)
    return function


def expressions_of(
    verb: str, name: object, expressions: tuple[pl.Expr | str, ...], named: dict[str, Any]
) -> list[pl.Expr]:
    """Return the expressions as Polars would read them: text names a column.

    Raises:
        UsageError: there is none, or something that is none.
    """
    if isinstance(name, pl.Expr):
        raise UsageError(f"{verb}: name= names the operator; for a column 'name' write expression.alias('name')")
    found: list[pl.Expr] = []
    for expression in expressions:
        if not isinstance(expression, str | pl.Expr):
            raise UsageError(f"{verb} takes column names and Polars expressions, not {expression!r}")
        found.append(pl.col(expression) if isinstance(expression, str) else expression)
    for column, value in named.items():
        given = pl.col(value) if isinstance(value, str) else value
        found.append((given if isinstance(given, pl.Expr) else pl.lit(given)).alias(column))
    if not found:
        raise UsageError(f"{verb} needs at least one column or expression")
    return found
