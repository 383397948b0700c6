"""Specs of operators survive the trip to a worker, and no two that keep different state have one identity of it."""

from __future__ import annotations

import pickle  # noqa: TID251 (specs of our own making; Spark ships them so)
from collections.abc import Iterable
from itertools import combinations, permutations, product
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Recorder

from headgate.model.state_schema import FunctionParts, StateIdentity, parts_of, read_type
from headgate.operators.base import OperatorContext, OperatorSpec
from headgate.operators.checkpoint_listeners import ListDescriptor
from headgate.operators.deduplication import DeduplicateSpec
from headgate.operators.expressions import filter_spec
from headgate.operators.functions import MapBatchesSpec, RowFunctionSpec, RowVerb
from headgate.operators.keys import KeyCheckSpec
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_process import BatchProcessFunction
from headgate.operators.process.connected_process import process_spec
from headgate.operators.process.row_process import ProcessFunction, StateHandle
from headgate.operators.reduction import ReduceSpec
from headgate.operators.specs import output_schema, state_text
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.operators.top_rows import Order, TopSpec
from headgate.operators.windows.aligned_windows import window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, state_identity, value_type

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def first(left: dict[str, object], right: dict[str, object]) -> dict[str, object]:
    return left


class Counting(ProcessFunction):
    def open(self, state: StateHandle) -> None:
        self.count = state.value("count", pa.int64())


class CountingBatches(BatchProcessFunction):
    def open(self, state: BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())


class Stateless(ProcessFunction):
    pass


def window(*aggregates: pl.Expr) -> OperatorSpec:
    return window_operators(WindowedAggregate(("key",), "ts", tumbling(1_000), aggregates), SCHEMA, "w").window


SPECS: list[tuple[OperatorSpec, bool]] = [
    (filter_spec(pl.col("key") > 0), False),
    (KeyCheckSpec(("key",)), False),
    (MapBatchesSpec(same), False),
    (RowFunctionSpec(RowVerb.FILTER, bool), False),
    (ReduceSpec(("key",), first, SCHEMA), True),
    (process_spec("node", ("key",), Counting(), SCHEMA), True),
    (process_spec("node", ("key",), Stateless(), SCHEMA), False),
    (process_spec("node", ("key",), CountingBatches(), SCHEMA), True),
    (WithTimestampsSpec("ts", 5), True),
    (window(pl.len(), (pl.col("key") * 2).max().alias("m")), True),
    (window(pl.col("key").median().alias("m")), True),
]


@pytest.mark.parametrize(("spec", "is_stateful"), SPECS)
def test_every_spec_survives_the_trip_to_a_worker_and_says_whether_it_has_state(
    spec: OperatorSpec, is_stateful: bool
) -> None:
    there = pickle.loads(pickle.dumps(spec))
    assert output_schema(there, SCHEMA, "node") == output_schema(spec, SCHEMA, "node")
    assert state_text(there) == state_text(spec)
    assert bool(state_text(spec)) == is_stateful
    operator = there.build()
    operator.open(OperatorContext("p", "node", 0, 1, 128, lambda: 0), Recorder())
    assert (operator.freeze() is not None) == is_stateful


NAMES = (
    *("a", "b", "a, b", "a: int64", "a: int64, b", "a; value b", "a -> b", "a>", "struct<a", "large_list<item"),
    *("a descending", "b, a descending", 'a" descending', '"a"', '"a, b"', '"', "", "\\", "a\\u002c b", '"a\\u002c b"'),
    *("a\n", "a\\n", "ä", " a", "a ", "timers", "a)", "(a", "a; operator state(list b: int64", "a: int64; value b"),
)
"""What stands between names in a text, in names; and names that look like what such a name becomes."""


def differ(texts: Iterable[str]) -> None:
    found = list(texts)
    assert len(set(found)) == len(found), sorted(text for text in set(found) if found.count(text) > 1)


def schema_of(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.int64()) for name in names])


def some(names: Iterable[str] = NAMES) -> list[tuple[str, ...]]:
    """Return one or two of ``names``, in each order."""
    found = list(names)
    return [(name,) for name in found] + list(permutations(found, 2))


def test_the_order_of_a_top() -> None:
    schema = schema_of("key", *NAMES)
    orders = [Order(by, down) for by in some() for down in product((False, True), repeat=len(by))]
    differ(TopSpec(("key",), schema, 3, order, "rank", False, None).state_text() for order in orders)


def test_what_a_deduplication_is_by() -> None:
    schema = schema_of("key", *NAMES)
    differ(
        DeduplicateSpec(("key",), schema, is_last, by, False, None).state_text()
        for is_last in (False, True)
        for by in (None, *NAMES)
    )


@pytest.mark.parametrize("others", [("x",), ("x", "y")])
def test_keys_and_columns_of_a_record(others: tuple[str, ...]) -> None:
    differ(ReduceSpec(keys, lambda a, b: a, schema_of(*keys, *others)).state_text() for keys in some())
    differ(LoopHeadSpec(keys, schema_of(*keys, *others)).state_text() for keys in some())
    differ(LoopHeadSpec((), schema_of(*others, name), name).state_text() for name in NAMES)


def test_keys_and_declared_states() -> None:
    def keyed(keys: tuple[str, ...], states: tuple[StateDescriptor, ...]) -> str:
        return state_identity(KeyColumns(keys, (pa.int64(),) * len(keys)), states)

    differ(keyed(keys, (value("v", pa.int64()),)) for keys in some())
    differ(keyed(("k",), tuple(value(name, pa.int64()) for name in names)) for names in _pairs())
    types = [pa.struct([(name, pa.int64()) for name in names]) for names in some()]
    differ(keyed(("k",), (value("v", dtype),)) for dtype in types)
    differ(ListDescriptor(name, pa.int64()).text() for name in NAMES)


def value(name: str, dtype: pa.DataType) -> StateDescriptor:
    return StateDescriptor(name, StateKind.VALUE, dtype)


def _pairs() -> list[tuple[str, ...]]:
    """Return one or two of the names that a state may have; their order makes no difference."""
    names = [name for name in NAMES if name]
    return [(name,) for name in names] + list(combinations(names, 2))


@pytest.mark.parametrize("name", [name for name in NAMES if name])
def test_what_is_named_so_is_read_from_a_text(name: str) -> None:
    dtype = pa.large_list(pa.struct([(name, pa.int64()), (f"{name}.", pa.struct([("x", pa.date32())]))]))
    assert read_type(value("v", dtype).text().removeprefix("value v: ")) == value_type(dtype)
    keys = KeyColumns((name, "other"), (pa.int64(), pa.large_string()))
    text = StateIdentity(state_identity(keys, [value(name, dtype)], has_timers=True))
    found: Any = parts_of(text)
    assert isinstance(found, FunctionParts)
    assert [(state.name, state.type) for state in found.states] == [(name, value_type(dtype))]
    assert text.key_names(["int64", "large_string"]) == (name, "other")
    assert text.declares("value", name)
    assert not text.declares("list", name)


def test_usual_names_stand_in_a_text_as_they_are() -> None:
    schema = schema_of("order id", "preis (€)", "time.at")
    spec = TopSpec(("order id",), schema, 3, Order(("preis (€)", "time.at"), (True, False)), None, False, None)
    assert spec.state_text() == (
        "keyed state(keys order id: int64; value top 3 by preis (€) descending, time.at: "
        "large_list<item: struct<preis (€): int64, time.at: int64>>)"
    )
