"""Whether a Polars expression gives each record's result from that record alone (OP1).

Polars itself knows: its streaming engine computes such expressions as they are, and gives everything else, such as an
aggregate, a rank or a shift, a node of its own in its plan. What a plan does not show, such as what ``list.eval`` does
with the elements of a list, is found in the expression. Nothing is computed. Counterparts: ``operators.expressions``
and ``operators.windows.plan``, which refuse the others.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

_ALIGNED = ("select", "with-columns", "simple-projection")
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


def not_of_one_record(expression: pl.Expr, query: pl.LazyFrame) -> str:
    """Return what is wrong with ``expression``, which ``query`` computes for records, or "".

    Raises:
        polars.exceptions.PolarsError: it does not work on the columns of these records.
    """
    try:
        tree = _tree(expression)
    except pl.exceptions.ComputeError:
        return _PYTHON
    return next(_problems(tree, _RECORD), "") or _problem_of_plan(query, _has_column(tree))


def not_of_groups(expression: pl.Expr) -> str:
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
        return found if found or self.kind not in _ALIGNED else _ROWS

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
