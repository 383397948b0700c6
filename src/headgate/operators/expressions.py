"""``filter``, ``select``, ``with_columns`` with Polars expressions; adjacent ones run as one pass. And ``explode``.

An expression must give each record's result from that record alone: batches have no meaning, so an aggregate or a
shift over one would depend on how records happened to be batched. Such expressions are refused.

Polars itself knows them: its streaming engine computes elementwise expressions as they are, and gives everything
else, such as an aggregate, a rank or a shift, a node of its own in its plan. What a plan does not show, such as what
``list.eval`` does with the elements of a list, is found in the expression. Nothing is computed.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import MAIN, Node
from headgate.model.ids import NodeName
from headgate.model.plan import Plan, Vertex
from headgate.operators.base import LazyRows, Operator, as_lazy
from headgate.operators.record_query import Query, Step, Verb, mask_of
from headgate.operators.schemas import columns_of, describe, empty_frame, require_columns, schema_of_frame
from headgate.operators.user_functions import batch_error

_COPIED = "multiplexer"
"""Hands the rows of its input, such as what is used twice, to several nodes."""

_ALIGNED = ("select", "with-columns", "simple-projection", _COPIED)
"""Nodes with a row for each row of their input."""

_ZIP = "zip-broadcast"
"""Puts the columns of its inputs side by side. An expression about one record needs none, but for a lookup."""

_SOURCE = "in-memory-source"

_CONSTANT = "input-independent-select"

_LOOKUPS = ("replace", "replace_strict")
"""Functions that look each value up in a table, which is constant."""

_CHANGE_ROWS = ("Explode", "DropNulls", "DropNans")

_RECORD, _ELEMENTS, _GROUP = "record", "elements", "group"
"""What an expression is about: of elements there may be more or fewer afterwards, of a group a sample, too."""

_NODE = re.compile(r'^(\d+) \[label="((?:[^"\\]|\\.)*)"', re.MULTILINE)
_EDGE = re.compile(r"^(\d+) -> (\d+);", re.MULTILINE)

_OTHER_RECORDS = (
    "uses {0}, whose result depends on other records; use key_by(...).window(...).agg(...) or map_batches instead"
)
_ROWS = "changes the number of records; use flat_map or map_batches instead"
_RANDOM = "uses a random sample or order, which is another one in each run; use map_batches instead"
_FORMAT = (
    "uses str.to_date, to_datetime, to_time or strptime without a format, which is then inferred from the first "
    "records of a batch, so the result would depend on how records are batched; give format="
)
_CATEGORICAL = (
    "uses pl.Categorical, whose numbers depend on the texts that came before; keep the text, or use pl.Enum with its "
    "categories"
)
_PYTHON = (
    "has a Python function in it, as map_elements, map_batches, fold and reduce have, which does not travel to the "
    "workers; use .map(function) for one record at a time or .map_batches(function) for whole batches"
)


def elementwise_problem(expression: pl.Expr, query: pl.LazyFrame) -> str:
    """Return what is wrong with ``expression``, which ``query`` computes for records, or "".

    Raises:
        polars.exceptions.PolarsError: it does not work on the columns of these records.
    """
    try:
        tree = _tree(expression)
    except pl.exceptions.ComputeError:
        return _PYTHON
    return next(_problems(tree, _RECORD), "") or _problem_of_plan(query, _has_column(tree))


def group_problem(expression: pl.Expr) -> str:
    """Return why an aggregate gives a group's result not from the records of the group alone, or ""."""
    try:
        return next(_problems(_tree(expression), _GROUP), "")
    except pl.exceptions.ComputeError:
        return _PYTHON


def _tree(expression: pl.Expr) -> Any:
    """Return the structure of an expression.

    Raises:
        polars.exceptions.ComputeError: it has a function that cannot be written down, nor sent to workers.
    """
    with io.StringIO() as file:
        expression.meta.serialize(file, format="json")
        return json.loads(file.getvalue())


def expression_text(expression: pl.Expr) -> str:
    """Return an expression for the identity of state: no two that differ have one text.

    It is what Polars writes. That leaves out options of functions, such as the digits of ``round``, types of numbers
    and what is long: unless all is in the text, a digest follows.
    """
    text, tree = str(expression), _tree(expression)
    if _is_written_out(tree):
        return text
    return f"{text} #{hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]}"


_UNCLEAR = re.compile(r'["\\;\x00-\x1f\x7f]')
_PARTS = {
    "BinaryExpr": ("left", "right"),
    "Ternary": ("predicate", "truthy", "falsy"),
    "Filter": ("input", "by"),
    "Cast": ("expr",),
}
_SCALARS = ("String", "Boolean", "Date", "Datetime", "Duration")


def _is_written_out(tree: Any) -> bool:
    """Whether Polars' text of an expression says all that its structure does."""
    if not isinstance(tree, Mapping) or len(tree) != 1:
        return False
    name, inner = next(iter(tree.items()))
    match name:
        case "Column":
            return _is_clear(inner)
        case "Alias":
            return _is_written_out(inner[0]) and _is_clear(inner[1])
        case "Literal":
            kind, value = next(iter(inner.items()))
            return kind == "Dyn" or value == {"Null": "Null"} or (next(iter(value)) in _SCALARS and _is_clear(value))
        case "Function":
            group, function = "", inner["function"]
            if isinstance(function, Mapping):
                group, function = next(iter(function.items()))
            is_whole = isinstance(function, str) and (group in ("", "Boolean") or group.endswith("Expr"))
            return is_whole and all(map(_is_written_out, inner["input"]))
        case _:
            return name in _PARTS and all(_is_written_out(inner[part]) for part in _PARTS[name])


def _is_clear(name: Any) -> bool:
    """Whether a name, or a literal, has nothing in it that ends one in a text."""
    if isinstance(name, Mapping):
        return all(map(_is_clear, name.values()))
    return not isinstance(name, str) or _UNCLEAR.search(name) is None


def _problems(tree: Any, about: str) -> Iterator[str]:
    """Yield what is wrong with the parts of an expression, which is about a record, the elements of one, or a group."""
    if isinstance(tree, str):
        tree = {tree: None}
    if isinstance(tree, list):
        for item in tree:
            yield from _problems(item, about)
    if not isinstance(tree, Mapping):
        return
    for name, inner in tree.items():
        if name in ("Literal", "Column", "Selector", "format"):
            continue
        if name == "Alias":  # [expression, name]
            inner = inner[:1]
        if name in ("AnonymousFunction", "callback"):
            yield _PYTHON
        elif name == "Strptime" and inner[1]["format"] is None:
            yield _FORMAT
        elif name == "Cast" and "Categorical" in json.dumps(inner["dtype"]):
            yield _CATEGORICAL
        elif name in ("Random", "Sample") and about != _GROUP:
            yield _RANDOM
        elif name == "SetSortedFlag" and about == _RECORD:
            yield _OTHER_RECORDS.format("set_sorted")
        elif name in _CHANGE_ROWS and about == _RECORD:
            yield _ROWS
        elif name == "Eval":
            yield from _problems(inner["expr"], about)
            yield from _problems(inner["evaluation"], _GROUP if about == _GROUP else _ELEMENTS)
            continue
        is_of_elements = name in ("ListExpr", "ArrayExpr") and about == _RECORD
        yield from _problems(inner, _ELEMENTS if is_of_elements else about)


def _has_column(tree: Any) -> bool:
    """Whether an expression has a column of values that is none of the records; a list of holidays is none."""
    if isinstance(tree, list):
        return any(map(_has_column, tree))
    if not isinstance(tree, Mapping):
        return False
    if isinstance(tree.get("Literal"), Mapping) and "Series" in tree["Literal"]:
        return True
    if "function" in tree and "Business" in json.dumps(tree["function"]):
        return _has_column(tree["input"][:-1])
    return any(map(_has_column, tree.values()))


@dataclass
class _Node:
    label: str
    inputs: list[_Node] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return re.split(r"\\n|\[", self.label, maxsplit=1)[0]

    @property
    def function(self) -> str:
        """What it computes, for a message."""
        called = re.search(r"= (\w+)\(\.\.\.\)", self.label)
        return called.group(1) if called else self.kind

    def is_constant(self) -> bool:
        return self.kind == _CONSTANT or (bool(self.inputs) and all(node.is_constant() for node in self.inputs))

    def problem(self, has_column: bool) -> str:
        """Return why its rows are not those of the source, one by one."""
        if self.kind == _SOURCE:
            return ""
        if self.kind == "columnar-function" and self.function in _LOOKUPS:
            looked_up, *table = self.inputs
            if all(node.is_constant() for node in table):
                return looked_up.problem(has_column)
        if self.kind == _ZIP:
            return next((found for node in self.inputs if (found := node._problem_in_zip(has_column))), "")
        if self.kind not in _ALIGNED or not self.inputs:
            return _OTHER_RECORDS.format(self._named())
        return next((found for node in self.inputs if (found := node.problem(has_column))), "")

    def _problem_in_zip(self, has_column: bool) -> str:
        if self.kind == _CONSTANT:
            return _OTHER_RECORDS.format("a column of values that is none of the records") if has_column else ""
        found = self.problem(has_column)
        return found if found or self.kind == _COPIED or self.kind not in _ALIGNED else _ROWS

    def _named(self) -> str:
        return "an aggregate" if self.kind in ("reduce", "in-memory-map", "group-by") else self.function


def _problem_of_plan(query: pl.LazyFrame, has_column: bool) -> str:
    text = query.show_graph(raw_output=True, show=False, engine="streaming", plan_stage="physical")
    assert text is not None
    nodes = {name: _Node(label) for name, label in _NODE.findall(text)}
    tops = dict(nodes)
    for given, taker in _EDGE.findall(text):
        nodes[taker].inputs.append(nodes[given])
        tops.pop(given, None)
    return next((found for top in tops.values() if (found := top.problem(has_column))), "")


@dataclass(frozen=True)
class ExpressionsSpec:
    """One or more steps that run as one pass."""

    steps: tuple[Step, ...]

    def build(self) -> Operator:
        return ExpressionsOperator(self.steps)

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        for step in reversed(self.steps):
            roots = columns_of(step.expressions)
            if roots is None:
                return None
            if step.verb is Verb.SELECT:
                wanted = roots
            elif wanted is not None:
                made = {e.meta.output_name(raise_if_undetermined=False) for e in step.expressions}
                if step.verb is Verb.FILTER:
                    made = set()
                wanted = (wanted - made) | roots
        return wanted

    def keys_after(self, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for step in self.steps:
            if keys is None or step.verb is Verb.FILTER:
                continue
            made = {e.meta.output_name(raise_if_undetermined=False): e.meta.undo_aliases() for e in step.expressions}
            same = {e.meta.root_names()[0]: name for name, e in made.items() if name and e.meta.is_column()}
            if step.verb is Verb.WITH_COLUMNS:
                keys = None if None in made or not made.keys().isdisjoint(keys) else keys
            else:
                keys = tuple(same[key] for key in keys) if same.keys() >= set(keys) else None
        return keys

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results, found by running the steps on an empty frame.

        Raises:
            UsageError: unknown column, wrong type, or an expression that needs other records.
        """
        frame = empty_frame(schema)
        try:
            for step in self.steps:
                for expression in step.expressions:
                    problem = elementwise_problem(expression, frame.lazy().with_columns(expression))
                    if problem:
                        raise UsageError(f"operator '{node}': the expression {expression} {problem}")
                frame = step.apply(frame.lazy()).collect().clear()
            return schema_of_frame(frame)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"operator '{node}': {_first_line(error)}; the columns are {describe(schema)}") from error


def filter_spec(*predicates: pl.Expr) -> ExpressionsSpec:
    """Keep the records for which every predicate is true (null counts as false)."""
    return ExpressionsSpec((Step(Verb.FILTER, predicates),))


def select_spec(*expressions: pl.Expr) -> ExpressionsSpec:
    """Make records of exactly these expressions."""
    return ExpressionsSpec((Step(Verb.SELECT, expressions),))


def with_columns_spec(*expressions: pl.Expr) -> ExpressionsSpec:
    """Add or replace columns."""
    return ExpressionsSpec((Step(Verb.WITH_COLUMNS, expressions),))


def fuse(specs: Sequence[ExpressionsSpec]) -> ExpressionsSpec:
    """Return one spec that does what adjacent specs do one after another."""
    return ExpressionsSpec(tuple(step for spec in specs for step in spec.steps))


@dataclass(slots=True)
class Tally:
    """How many records one step was given, and how many it passed on."""

    records_in: int = 0
    records_out: int = 0


class ExpressionsOperator(Operator):
    """Runs the steps on each batch: filters as a mask, what stands between them as one Polars query.

    A filter within a query would hand even a batch of a few rows to Polars' pool, at several times its cost.
    ``tallies``: of each step, from the heights of the batches.
    """

    takes_lazy_rows = True

    def __init__(self, steps: Sequence[Step]) -> None:
        self.tallies = [Tally() for _ in steps]
        parts = [tuple(part) for _, part in itertools.groupby(steps, _part_of)]
        self._parts = [(part, mask_of(part[0].expressions) if _is_filter(part) else Query(part)) for part in parts]
        self._is_filter = len(parts) == 1 and _is_filter(parts[0])

    def process(self, batch: pa.RecordBatch | LazyRows) -> None:
        try:
            results = self._kept(batch) if self._is_filter else self._results(as_lazy(batch))
        except pl.exceptions.PolarsError as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        if results is not None and results.num_rows:
            self.output.emit(results)

    def _kept(self, batch: pa.RecordBatch | LazyRows) -> pa.RecordBatch | LazyRows:
        """Return the rows that a filter keeps, as batch or lazy rows as they came."""
        mask = _mask(as_lazy(batch), self._parts[0][1])
        return batch if mask is None else batch.filter(mask)

    def _results(self, rows: LazyRows) -> LazyRows | None:
        first = 0
        for part, query in self._parts:
            height = rows.num_rows
            if not _is_filter(part):
                rows = query.run(rows)
            elif (mask := _mask(rows, query)) is not None:
                rows = rows.filter(mask)
            for tally in self.tallies[first : first + len(part)]:
                tally.records_in += height
                tally.records_out += (height := rows.num_rows)  # only filters change it, and each is a part of its own
            first += len(part)
            if rows.num_rows == 0:
                return None
        return rows.without_series()


def _is_filter(part: Sequence[Step]) -> bool:
    return part[0].verb is Verb.FILTER


def _part_of(step: Step) -> int:
    """Return what steps of one part have in common: each filter is one, and so is what stands between two of them."""
    return id(step) if step.verb is Verb.FILTER else 0


def _mask(rows: LazyRows, query: Query) -> pa.Array | None:
    """Return which rows are kept; None: all."""
    found = query.run(rows)
    mask = found.column(found.schema.names[0])
    return None if mask.true_count == len(mask) else mask


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def fused_groups(vertex: Vertex, plan: Plan) -> list[list[Node]]:
    """Group neighbouring expression nodes of a chain that can run in one pass (each has one consumer only)."""
    consumers: dict[str, int] = {}
    for node in vertex.nodes[1:]:
        consumers[str(node.inputs[0].upstream)] = consumers.get(str(node.inputs[0].upstream), 0) + 1
    for edge in plan.outputs(vertex.id):
        consumers[str(edge.from_node)] = consumers.get(str(edge.from_node), 0) + 1
    groups: list[list[Node]] = []
    group_of: dict[str, list[Node]] = {}
    for node in vertex.nodes:
        upstream = str(node.inputs[0].upstream) if node is not vertex.head else ""
        group = group_of.get(upstream)
        fits = (
            group is not None
            and consumers.get(upstream) == 1
            and node.inputs[0].tag == MAIN
            and isinstance(node.spec, ExpressionsSpec)
            and isinstance(group[-1].spec, ExpressionsSpec)
        )
        if fits and group is not None:
            group.append(node)
        else:
            group = [node]
            groups.append(group)
        group_of[str(node.name)] = group
    return groups


def runs_with(plan: Plan) -> dict[NodeName, NodeName]:
    """Return, for each operator that runs in one pass with others, the last of them, which has their time."""
    groups = (group for vertex in plan.vertices for group in fused_groups(vertex, plan))
    return {node.name: group[-1].name for group in groups for node in group[:-1]}


_OUTPUT_ROWS = 65_536
"""Results are sent on in parts of about so many rows, however long the lists are together."""


@dataclass(frozen=True)
class ExplodeSpec:
    """Put each element of the list in ``column`` in its place, in a row of its own.

    Attributes:
        keep_empty: a row with no element, or null instead of a list, stays, with null.
        position: a column for the place of the element, from 0 on, that is added; "": none.
    """

    column: str
    keep_empty: bool = False
    position: str = ""

    def build(self) -> Operator:
        return ExplodeOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema`` with the elements, and with the position as last column.

        Raises:
            UsageError: the column is no list, or there is one called as the position.
        """
        require_columns(node, schema, [self.column])
        at = schema.get_field_index(self.column)
        if not pa.types.is_large_list(schema.field(at).type):
            raise UsageError(
                f"operator '{node}': explode needs a column of lists or maps, and '{self.column}' is none; the columns "
                f"are {describe(schema)}"
            )
        schema = schema.set(at, pa.field(self.column, schema.field(at).type.value_type))
        if not self.position:
            return schema
        if self.position in schema.names:
            raise UsageError(f"operator '{node}': there is a column '{self.position}' already; name another position=")
        return schema.append(pa.field(self.position, pa.int64()))


class ExplodeOperator(Operator):
    """Takes the rows of a batch as often as their lists have elements."""

    def __init__(self, spec: ExplodeSpec) -> None:
        self._spec = spec
        self._schema: pa.Schema | None = None

    def process(self, batch: pa.RecordBatch) -> None:
        if self._schema is None:
            self._schema = self._spec.output_schema(batch.schema, self.context.node)
        lengths = batch.column(self._spec.column).value_lengths().fill_null(0).to_numpy()
        ends = np.cumsum(np.maximum(lengths, 1) if self._spec.keep_empty else lengths)
        start = 0
        while start < batch.num_rows:
            sent = ends[start - 1] if start else 0
            end = max(start + 1, int(np.searchsorted(ends, sent + _OUTPUT_ROWS, side="right")))
            self._emit(batch.slice(start, end - start), self._schema)
            start = end

    def _emit(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        lists = batch.column(self._spec.column)
        lengths = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        counts = np.maximum(lengths, 1) if self._spec.keep_empty else lengths
        rows = np.repeat(np.arange(batch.num_rows), counts)
        if len(rows) == 0:
            return
        position = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(np.cumsum(lengths) - lengths, counts) + position
        is_empty = np.repeat(lengths == 0, counts)
        taken = pa.array(rows)
        columns = [
            lists.flatten().take(pa.array(at, mask=is_empty)) if name == self._spec.column else column.take(taken)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        if self._spec.position:
            columns.append(pa.array(position, mask=is_empty))
        self.output.emit(pa.RecordBatch.from_arrays(columns, schema=schema))
