"""A value fits its declared type exactly or is a bad record, wherever Python values and columns come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from math import inf
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.connectors.files.line_decoders import JsonDecoder
from headgate.connectors.files.lines import Lines
from headgate.connectors.memory import FromRows
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.functions import MapBatchesSpec, RowFunctionSpec, RowVerb
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_process import BatchContext, BatchProcessFunction, batch_process_spec
from headgate.operators.process.row_process import ProcessContext, ProcessFunction, StateHandle, row_process_spec
from headgate.operators.process.timers import Timer
from headgate.operators.reduction import ReduceSpec
from headgate.operators.schemas import canonical_type
from headgate.operators.user_functions import UserFunctionError
from headgate.runtime.savepoint_writer.rows import stored_columns
from headgate.runtime.state_reader.schema import Kind, Shape


class Size(IntEnum):
    SMALL = 1


class Refused:
    """Stands for: a bad record."""

    def __repr__(self) -> str:
        return "refused"


NO = Refused()
NOON = datetime(2026, 1, 2, 12)
HERE = timezone(timedelta(hours=5))
LOCAL, MOMENT = pa.timestamp("us"), pa.timestamp("us", "UTC")
INTS, TEXTS = pa.large_list(pa.int64()), pa.large_list(pa.large_string())
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.large_string())])
ENTRIES = pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.int64())]))

FITTING: list[tuple[pa.DataType, list[tuple[Any, Any]]]] = [
    (pa.bool_(), [(True, True), (np.bool_(False), False), (None, None)]),
    (pa.int64(), [(7, 7), (np.int8(7), 7), (np.uint64(7), 7), (2**63 - 1, 2**63 - 1), (1.0, 1)]),
    (pa.int64(), [(np.float32(2.0), 2), (Decimal(2), 2), (Fraction(4, 2), 2), (Size.SMALL, 1)]),
    (pa.int8(), [(127, 127), (1.0, 1)]),
    (pa.uint64(), [(2**64 - 1, 2**64 - 1)]),
    (pa.float64(), [(1.5, 1.5), (0.1, 0.1), (7, 7.0), (2**53, 2.0**53), (2**54, 2.0**54), (inf, inf)]),
    (pa.float64(), [(np.float32(0.5), 0.5), (np.int64(3), 3.0), (1e39, 1e39)]),
    (pa.float32(), [(1.5, 1.5), (0.1, float(np.float32(0.1))), (inf, inf), (2**24, 2.0**24), (2**25, 2.0**25)]),
    (pa.float32(), [(3.4028235e38, float(np.finfo(np.float32).max))]),
    (pa.large_string(), [("a", "a"), (np.str_("a"), "a"), ("", "")]),
    (pa.large_binary(), [(b"a", b"a"), (bytearray(b"a"), b"a"), (memoryview(b"a"), b"a")]),
    (pa.date32(), [(date(2026, 1, 2), date(2026, 1, 2)), (np.datetime64("2026-01-02"), date(2026, 1, 2))]),
    (pa.date32(), [(pd.NaT, None), (np.datetime64("NaT"), None)]),
    (LOCAL, [(NOON, NOON), (NOON.replace(tzinfo=HERE), datetime(2026, 1, 2, 7)), (pd.Timestamp(NOON), NOON)]),
    (LOCAL, [(pd.NaT, None)]),
    (LOCAL, [(np.datetime64(NOON).astype(f"datetime64[{unit}]"), NOON) for unit in ("h", "m", "s", "ms", "us", "ns")]),
    (LOCAL, [(np.datetime64("2026-01-02"), datetime(2026, 1, 2))]),
    (LOCAL, [(np.datetime64("2026-01", "M"), datetime(2026, 1, 1))]),
    (LOCAL, [(np.datetime64("2026", "Y"), datetime(2026, 1, 1)), (np.datetime64("NaT"), None)]),
    (MOMENT, [(NOON, NOON.replace(tzinfo=UTC)), (NOON.replace(tzinfo=HERE), datetime(2026, 1, 2, 7, tzinfo=UTC))]),
    (MOMENT, [(pd.Timestamp(NOON, tz="Asia/Tokyo"), datetime(2026, 1, 2, 3, tzinfo=UTC))]),
    (MOMENT, [(np.datetime64(NOON, "ms"), NOON.replace(tzinfo=UTC))]),
    (pa.duration("us"), [(timedelta(1), timedelta(1)), (pd.Timedelta(1, "s"), timedelta(seconds=1))]),
    (
        pa.duration("us"),
        [
            *(
                (np.timedelta64(1, u), timedelta(seconds=s))
                for u, s in (("D", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
            )
        ],
    ),
    (pa.duration("us"), [(np.timedelta64(1, "ms"), timedelta(milliseconds=1))]),
    (pa.duration("us"), [(np.timedelta64(1_000, "ns"), timedelta(microseconds=1)), (np.timedelta64("NaT"), None)]),
    (pa.duration("ms"), [(timedelta(seconds=2), timedelta(seconds=2))]),
    (pa.time64("ns"), [(time(1, 2, 3, 4), time(1, 2, 3, 4))]),
    (pa.decimal128(6, 2), [(Decimal("1.5"), Decimal("1.50")), (Decimal("1.500"), Decimal("1.50"))]),
    (pa.decimal128(6, 2), [(3, Decimal("3.00")), (np.int64(3), Decimal("3.00"))]),
    (INTS, [([1, None], [1, None]), ((1, 2), [1, 2]), (np.array([1, 2]), [1, 2]), (range(2), [0, 1])]),
    (INTS, [(pl.Series([1]), [1]), ([], [])]),
    (TEXTS, [(["a"], ["a"])]),
    (STRUCT, [({"a": 1, "b": "x"}, {"a": 1, "b": "x"}), ({"a": 1}, {"a": 1, "b": None})]),
    (STRUCT, [({}, {"a": None, "b": None})]),
    (pa.large_list(STRUCT), [([{"a": 1}], [{"a": 1, "b": None}])]),
    (pa.struct([("f", pa.large_list(pa.float32()))]), [({"f": [0.5]}, {"f": [0.5]})]),
]
"""Of each type, values and what becomes of them."""

REFUSED: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [1, 0, 2, 1.0, "true", b""]),
    (pa.int64(), [2**63, np.uint64(2**63), 1.5, Decimal("1.5"), Fraction(1, 2), float("nan"), inf, 1e300, True]),
    (pa.int64(), [np.bool_(True), "1", b"1", NOON, np.datetime64(1, "ns"), np.timedelta64(1, "ns"), timedelta(1)]),
    (pa.int64(), [[1], {}]),
    (pa.int8(), [128, -129, 300.0]),
    (pa.uint64(), [-1, 2**64, np.int64(-1)]),
    (pa.float64(), [2**53 + 1, 10**400, True, "1.5", Decimal("1.5"), NOON, np.timedelta64(1, "ns")]),
    (pa.float32(), [1e39, -1e39, np.float64(1e39), 2**24 + 1, 10**39, True, "1"]),
    (pa.large_string(), [b"a", 1, True, NOON, ["a"], "\ud83d"]),
    (pa.large_binary(), ["a", 1, [1]]),
    (pa.date32(), [NOON, datetime(2026, 1, 2), pd.Timestamp("2026-01-02"), 0, 1.0, "2026-01-02"]),
    (pa.date32(), [np.datetime64("2026-01-02T00:00"), np.datetime64(10**12, "D")]),
    (LOCAL, [pd.Timestamp("2026-01-02T12:00:00.000000001"), np.datetime64("2026-01-02T12:00:00.000000001")]),
    (LOCAL, [np.datetime64(10**15, "D"), 1_700_000_000_000, 1.5, "2026-01-02", date(2026, 1, 2), True, np.int64(1)]),
    (LOCAL, [timedelta(1)]),
    (MOMENT, [pd.Timestamp("2026-01-02T12:00:00.000000001", tz="UTC"), 1_700_000_000_000, "2026-01-02T00:00:00Z"]),
    (pa.duration("us"), [pd.Timedelta(1, "ns"), np.timedelta64(1, "ns"), np.timedelta64(1, "M"), 1, 1.5, "1s", NOON]),
    (pa.duration("ms"), [timedelta(microseconds=1500), np.timedelta64(1500, "us")]),
    (pa.time64("ns"), [time(1, tzinfo=UTC), 1, "01:00", NOON]),
    (pa.decimal128(6, 2), [Decimal("1.005"), Decimal(10**4), 10**4, Decimal("NaN"), 1.5, True, "1.5"]),
    (INTS, [[1, 1.5], np.array([0.5]), [True], ["1"], "12", b"12", {1: 2}, {1}, 1, np.array([[1]])]),
    (TEXTS, ["abc", np.str_("abc"), {"a": 1}, [1], [b"a"]]),
    (STRUCT, [{"a": 1.5, "b": "x"}, {"a": 1, "c": 2}, (1, "x"), [("a", 1)], "a"]),
    (pa.large_list(STRUCT), [[None, {"a": 1.5}], {"a": 1}, [[1]]]),
    (pa.struct([("f", pa.large_list(pa.float32()))]), [{"f": [0.5, 1e39]}]),
]
"""Of each type, values that are bad records."""

CASES = [
    *((dtype, value, wanted) for dtype, cases in FITTING for value, wanted in cases),
    *((dtype, value, NO) for dtype, values in REFUSED for value in values),
]


def differences(found_of: Callable[[pa.DataType, Any], Any], cases: list[tuple[Any, Any, Any]] = CASES) -> list[str]:
    """Return the cases in which the value becomes something else than the table says."""
    wrong = []
    for dtype, value, wanted in cases:
        found = found_of(dtype, value)
        if found is not wanted and (type(found) is not type(wanted) or found != wanted):
            wrong.append(f"{dtype} {value!r}: {found!r} instead of {wanted!r}")
    return wrong


ONE = pa.record_batch({"key": ["k"], "n": [1]}, schema=pa.schema([("key", pa.large_string()), ("n", pa.int64())]))


def only(run: Harness, column: str = "x") -> Any:
    """Return the value in the only record that came out, or that it was a bad one."""
    if run.out.bad:
        assert not run.out.rows()
        (bad,) = run.out.bad
        assert f"'{column}" in bad["problem"], bad["problem"]
        return NO
    (row,) = run.out.rows()
    return row[column]


@pytest.mark.parametrize("verb", [RowVerb.MAP, RowVerb.FLAT_MAP])
def test_what_a_function_on_rows_returns(verb: RowVerb) -> None:
    def found(dtype: pa.DataType, value: Any) -> Any:
        row = {"x": value}
        run = Harness(
            RowFunctionSpec(verb, lambda _: row if verb is RowVerb.MAP else [row], {"x": dtype}), diverts=True
        )
        run.send(ONE)
        return only(run)

    assert differences(found) == []


def test_a_value_that_does_not_fit_takes_none_of_its_neighbours_along() -> None:
    for dtype in dict(FITTING):
        fitting = [(value, wanted) for other, value, wanted in CASES if other == dtype and wanted is not NO]
        refused = [(value, NO) for other, values in REFUSED if other == dtype for value in values]
        cases = [*fitting, *refused, *fitting]
        values = [value for value, _ in cases]
        wanted = [wanted for _, wanted in cases if wanted is not NO]
        run = Harness(
            RowFunctionSpec(RowVerb.FLAT_MAP, lambda _, v=values: [{"x": x} for x in v], {"x": dtype}), diverts=True
        )
        run.send(ONE)
        assert [row["x"] for row in run.out.rows()] == wanted
        assert len(run.out.bad) == len(values) - len(wanted)


def test_what_a_process_function_returns_for_a_record_and_for_a_timer() -> None:
    class Answering(ProcessFunction):
        def __init__(self, dtype: pa.DataType, value: Any, at_timer: bool) -> None:
            self.schema, self.value, self.at_timer = {"x": dtype}, value, at_timer

        def process(self, row: dict[str, Any], context: ProcessContext) -> Any:
            context.timers.register_event_time(1)
            return [] if self.at_timer else [{"x": self.value}]

        def on_timer(self, timer: Timer, context: ProcessContext) -> Any:
            return [{"x": self.value}] if self.at_timer else []

    for at_timer in (False, True):

        def found(dtype: pa.DataType, value: Any, at_timer: bool = at_timer) -> Any:
            run = Harness(
                row_process_spec("node", ("key",), Answering(dtype, value, at_timer), ONE.schema), diverts=True
            )
            run.send(ONE)
            run.operator.on_watermark(WATERMARK_MAX_MS)
            return only(run)

        copyable = [case for case in CASES if not isinstance(case[1], memoryview)]
        assert differences(found, copyable) == []


@pytest.mark.parametrize(
    ("time", "fires_ms"),
    [
        (np.datetime64(5, "s"), 5_000),
        (np.datetime64(5, "ms"), 5),
        (np.datetime64(5_001, "us"), 6),
        (np.datetime64(5_000_001, "ns"), 6),
        (np.datetime64("1970-01-02", "D"), 86_400_000),
        (pd.Timestamp(5_000_001, unit="ns"), 6),
        (np.datetime64("NaT"), NO),
        (np.timedelta64(5, "ms"), NO),
        (5.0, NO),
        (True, NO),
    ],
    ids=str,
)
def test_times_of_timers(time: Any, fires_ms: Any) -> None:
    class Waiting(ProcessFunction):
        schema = {"x": int}

        def process(self, row: dict[str, Any], context: ProcessContext) -> None:
            context.timers.register_event_time(time)

        def on_timer(self, timer: Timer, context: ProcessContext) -> Any:
            return [{"x": timer.time_ms}]

    run = Harness(row_process_spec("node", ("key",), Waiting(), ONE.schema))
    if fires_ms is NO:
        with pytest.raises(UserFunctionError, match="a timer's time is a datetime or whole milliseconds"):
            run.send(ONE)
        return
    run.send(ONE)
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert run.out.rows() == [{"x": fires_ms}]


def test_what_reduce_returns() -> None:
    def found(dtype: pa.DataType, value: Any) -> Any:
        schema = pa.schema([("key", pa.large_string()), ("x", dtype)])
        run = Harness(ReduceSpec(("key",), lambda so_far, row: {"key": "k", "x": value}, schema), diverts=True)
        run.send(pa.record_batch([["k", "k"], pa.nulls(2, dtype)], schema=schema))
        if run.out.bad:
            return NO
        return run.out.rows()[1]["x"]

    assert differences(found) == []


class Holding(ProcessFunction):
    """Puts a value into every kind of state, and returns what is there."""

    def __init__(self, dtype: pa.DataType, value: Any) -> None:
        self.schema, self.type, self.given = {"x": pa.large_list(dtype)}, dtype, value

    def open(self, state: StateHandle) -> None:
        self.value, self.list = state.value("value", self.type), state.list("list", self.type)
        self.map = state.map("map", pa.int64(), self.type)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Any:
        self.value.put(self.given)
        if self.given is None or self.value.get() is None:
            return [{"x": [None]}]
        self.list.append(self.given)
        self.map.put(1, self.given)
        return [{"x": [self.value.get(), *self.list.get(), self.map.get(1)]}]


def test_what_is_put_into_state_by_row() -> None:
    def found(dtype: pa.DataType, value: Any) -> Any:
        run = Harness(row_process_spec("node", ("key",), Holding(dtype, value), ONE.schema))
        try:
            run.send(ONE)
        except UserFunctionError as error:
            return None if "it is null" in str(error) else NO
        first, *others = only(run)
        assert others in ([first, first], [])
        return first

    stored = [
        case
        for case in CASES
        # of state a struct has all of its fields, and lists are lists or tuples
        if not isinstance(case[1], memoryview | range | np.ndarray | pl.Series)
        and case[1] not in ({}, {"a": 1}, [{"a": 1}])
    ]
    assert differences(found, stored) == []


class HoldingBatches(BatchProcessFunction):
    def __init__(self, dtype: pa.DataType, value: Any) -> None:
        self.schema, self.type, self.given = {"x": dtype}, dtype, value

    def open(self, state: BatchStateHandle) -> None:
        self.value = state.value("value", self.type)

    def process(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame:
        self.value.put(self.given)
        return pl.DataFrame({"x": self.value.get()})


def test_what_is_put_into_state_by_batch() -> None:
    def found(dtype: pa.DataType, value: Any) -> Any:
        run = Harness(batch_process_spec("node", ("key",), HoldingBatches(dtype, value), ONE.schema))
        try:
            run.send(ONE)
        except UserFunctionError:
            return NO
        return only(run)

    single = [
        case for case in CASES if not isinstance(case[1], memoryview | pl.Series)
    ]  # a Series is one value for each key
    assert differences(found, single) == []


def test_rows_of_a_program() -> None:
    def found(dtype: pa.DataType, value: Any) -> Any:
        try:
            source = FromRows([{"x": value}], schema={"x": dtype})
        except UsageError as error:
            return NO if "row 0 (counted from 0) does not fit: column 'x" in str(error) else error
        return source.first(1)[0]["x"]

    assert differences(found) == []


@pytest.mark.parametrize("value", [pd.Timestamp("2026-01-02T00:00:00.000000001"), pd.Timedelta(1, "ns")])
def test_rows_of_a_program_without_a_schema_lose_nothing(value: Any) -> None:
    with pytest.raises(UsageError, match="does not fit: column 'x'"):
        FromRows([{"x": value}])


def test_rows_of_a_program_with_a_map() -> None:
    schema = pa.schema([("x", pa.map_(pa.string(), pa.int64()))])
    for given in ({"a": 1}, [("a", 1)], [{"key": "a", "value": 1}]):
        assert FromRows([{"x": given}], schema=schema).first(1) == [{"x": [{"key": "a", "value": 1}]}]
    for wrong in ({"a": 1.5}, "ab", [1], [("a",)], {None: 1}):
        with pytest.raises(UsageError, match="column 'x"):
            FromRows([{"x": wrong}], schema=schema)


# -- columns -----------------------------------------------------------------------------------------------------------


def columns() -> Iterator[tuple[pa.Array, pa.DataType, Any]]:
    """Yield columns of one value in other types than declared, from the table where Arrow or Polars can have them."""
    for dtype, value, wanted in CASES:
        try:
            column = pa.array([value])
            if exact_array([value], column.type).equals(column) and not isinstance(value, memoryview):
                yield column, dtype, wanted
        except (MisfitError, pa.ArrowException, ValueError, TypeError, OverflowError, NotImplementedError):
            continue  # has no type of its own, or not this value
    more: list[tuple[pa.Array, pa.DataType, Any]] = [
        (pa.array([2]), pa.bool_(), NO),
        (pa.array([1], pa.timestamp("ns")), LOCAL, NO),
        (pa.array([1_000], pa.timestamp("ns", "UTC")), MOMENT, datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)),
        (pa.array([1], pa.timestamp("s")), LOCAL, datetime(1970, 1, 1, 0, 0, 1)),
        (pa.array([2**62], pa.timestamp("s")), LOCAL, NO),
        (pa.array([1], pa.int32()), pa.date32(), NO),
        (pa.array([1], pa.int32()), pa.time64("ns"), NO),
        (pa.array([1], pa.duration("us")), pa.duration("ms"), NO),
        (pa.array(["a"]).dictionary_encode(), pa.large_string(), "a"),
        (pa.array([1]).dictionary_encode(), pa.bool_(), NO),
        (pa.array([Decimal("1.25")]), pa.decimal128(6, 1), NO),
        (pa.array([{"b": "x", "a": 1}]), STRUCT, {"a": 1, "b": "x"}),
        (pa.array([{"a": 1, "b": "x", "c": 1}]), STRUCT, NO),
        (pa.array([[[1e39]]]), pa.large_list(pa.large_list(pa.float32())), NO),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())), ENTRIES, [{"key": "a", "value": 1}]),
        (pa.array([[("a", 1.5)]], pa.map_(pa.string(), pa.float64())), ENTRIES, NO),
        (pa.array([None]), STRUCT, None),
        (pa.array([None], pa.string()), pa.int64(), None),
    ]
    yield from more


COLUMNS = [(column, dtype, wanted) for column, dtype, wanted in columns()]


def test_there_are_columns_of_every_type() -> None:
    assert {dtype for dtype, _, _ in CASES} <= {dtype for _, dtype, _ in COLUMNS}


@pytest.mark.parametrize("form", ["arrow", "table", "polars"])
def test_what_map_batches_returns(form: str) -> None:
    def found(dtype: pa.DataType, column: pa.Array) -> Any:
        table = pa.table({"x": column})
        if form == "polars":
            frame = pl.DataFrame({"x": pl.from_arrow(column)})
        else:
            frame = table if form == "table" else table.to_batches()[0]
        run = Harness(MapBatchesSpec(lambda _: frame, {"x": dtype}), diverts=True)
        run.send(ONE)
        return only(run)

    cases = [(d, c, w) for c, d, w in COLUMNS if form != "polars" or c.type != pa.timestamp("s")]
    assert differences(found, cases) == []


def test_what_a_function_on_batches_returns() -> None:
    def found(dtype: pa.DataType, column: pa.Array) -> Any:
        function = Returning({"x": dtype}, pl.DataFrame({"x": pl.from_arrow(column)}))
        run = Harness(batch_process_spec("node", ("key",), function, ONE.schema), diverts=True)
        run.send(ONE)
        return only(run)

    assert differences(found, [(d, c, w) for c, d, w in COLUMNS if c.type != pa.timestamp("s")]) == []


class Returning(BatchProcessFunction):
    def __init__(self, schema: dict[str, pa.DataType], frame: pl.DataFrame) -> None:
        self.schema, self.frame = schema, frame

    def process(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame:
        return self.frame


def test_a_batch_loses_only_the_records_that_do_not_fit() -> None:
    frame = pl.DataFrame({"x": [0.5, 1e39, None, -1e39], "n": [1.0, 2.0, 3.0, 4.5]})
    run = Harness(MapBatchesSpec(lambda _: frame, {"x": pa.float32(), "n": int}), diverts=True)
    run.send(ONE)
    assert run.out.rows() == [{"x": 0.5, "n": 1}, {"x": None, "n": 3}]
    assert [(bad["problem"], bad["record"]) for bad in run.out.bad] == [
        ("column 'x' is float, which cannot hold float 1e+39", "{'x': 1e+39, 'n': 2.0}"),
        ("column 'x' is float, which cannot hold float -1e+39", "{'x': -1e+39, 'n': 4.5}"),
    ]


def test_rows_of_a_program_as_tables_and_rows_of_a_savepoint() -> None:
    def of_source(dtype: pa.DataType, column: pa.Array) -> Any:
        try:
            return FromRows(pa.table({"x": column}), schema={"x": dtype}).first(1)[0]["x"]
        except UsageError as error:
            return NO if "column 'x" in str(error) else error

    def of_savepoint(dtype: pa.DataType, column: pa.Array) -> Any:
        shape = Shape(Kind.WINDOW_RECORDS, pa.schema([("k", pa.int64()), ("x", dtype)]), ("k",), ("k", "x"))
        try:
            return stored_columns(pa.table({"k": [1], "x": column}), shape, "state").column("x")[0].as_py()
        except UsageError as error:
            return NO if "column 'x" in str(error) else error

    cases = [(dtype, column, wanted) for column, dtype, wanted in COLUMNS]
    assert differences(of_source, cases) == []
    typed = [case for case in cases if case[1].type != pa.list_(pa.null())]
    assert differences(of_savepoint, typed) == []


def test_a_series_that_is_put_into_state() -> None:
    def found(dtype: pa.DataType, column: pa.Array) -> Any:
        series = pl.Series(pl.from_arrow(column))
        run = Harness(batch_process_spec("node", ("key",), HoldingBatches(dtype, series), ONE.schema))
        try:
            run.send(ONE)
        except UserFunctionError:
            return NO
        return only(run)

    assert differences(found, [(d, c, w) for c, d, w in COLUMNS if c.type != pa.timestamp("s")]) == []


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "text", "wanted"),
    [
        (pa.float32(), "1e+39", NO),
        (pa.float32(), "0.1", float(np.float32(0.1))),
        (pa.large_list(pa.float32()), "[0.5, -1e+39]", NO),
        (pa.struct([("f", pa.float32())]), '{"f": 1e+39}', NO),
        (pa.int64(), "1.5", NO),
        (pa.int64(), "1.0", NO),
        (pa.int64(), "true", NO),
        (pa.bool_(), "1", NO),
        (pa.large_string(), "1", NO),
        (TEXTS, '"abc"', NO),
        (LOCAL, "1700000000000", NO),
        (LOCAL, '"2026-01-02T12:00:00.000000001"', NO),
        (LOCAL, '"2026-01-02T12:00:00"', NOON),
        (pa.date32(), '"2026-01-02T12:00:00"', NO),
    ],
    ids=str,
)
def test_a_json_line_names_field_type_and_value(dtype: pa.DataType, text: str, wanted: Any) -> None:
    line = f'{{"n": 1, "x": {text}}}'
    lines = Lines(pa.array([line.encode(), b'{"n": 2}'], pa.large_binary()), np.array([0, 50]))
    decoded = JsonDecoder(pa.schema([("n", pa.int64()), ("x", dtype)])).decode(lines)
    if wanted is NO:
        assert decoded.refused.problems == [f"field 'x' is {canonical_type(dtype)}, which cannot hold {text}"]
        assert decoded.batch.to_pylist() == [{"n": 2, "x": None}]
    else:
        assert decoded.batch.to_pylist() == [{"n": 1, "x": wanted}, {"n": 2, "x": None}]
