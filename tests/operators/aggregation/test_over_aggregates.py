"""OVER aggregates against Polars over the rows of each frame: any order, batches, watermarks and parallelisms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import PARALLELISMS, Harness, Subtasks
from tests.state.backends import DATABASES, IN_FILES, choose

import headgate as hg
from headgate.errors import UsageError
from headgate.model.graph import OutputTag
from headgate.operators.aggregation.frame import Frame
from headgate.operators.aggregation.over_aggregates import OverSpec, over_spec
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.timestamps import event_time

Rows = list[dict[str, Any]]

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("k", pa.large_string()),
        ("t", pa.timestamp("us")),
        ("x", pa.int64()),
        ("y", pa.float64()),
        ("s", pa.large_string()),
    ]
)
EPOCH = datetime(1970, 1, 1)
KEYS = "abc"

FOLDED = [
    pl.len().alias("n"),
    pl.col("x").count().alias("c"),
    pl.col("x").sum().alias("sum"),
    pl.col("y").sum().alias("float_sum"),
    pl.col("x").mean().alias("mean"),
    pl.col("x").min().alias("min"),
    pl.col("y").max().alias("max"),
    pl.col("t").min().alias("since"),
    pl.col("x").std().alias("std"),
    pl.col("x").var(ddof=0).alias("var"),
    pl.col("s").first().alias("first"),
    pl.col("s").last().alias("last"),
    pl.col("s").drop_nulls().last().alias("last_text"),
    pl.col("s").sort_by("x", maintain_order=True).last().alias("text_of_most"),
    pl.col("x").filter(pl.col("y") > 0).sum().alias("some"),
    (pl.col("x") * 2 + 1).max().alias("computed"),
]
OTHERS = [
    pl.col("s").n_unique().alias("texts"),
    pl.col("x").median().alias("median"),
    pl.col("x").implode().alias("list"),
    (pl.col("x").max() - pl.col("x").min()).alias("spread"),
]
FRAMES = [
    Frame(True, 0),
    Frame(True, 3),
    Frame(True, 20),
    Frame(True, None),
    Frame(False, 1),
    Frame(False, 5),
    Frame(False, None),
]


def spec(frame: Frame, aggregates: Sequence[pl.Expr], schema: pa.Schema = SCHEMA, **options: Any) -> OverSpec:
    return over_spec("node", ("k",), schema, event_time("node", schema, "t"), frame, aggregates, **options)


def batch(rows: Rows, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def time_us(row: dict[str, Any]) -> int:
    return (row["t"] - EPOCH) // timedelta(microseconds=1)


def row(number: int, t_ms: float, **values: Any) -> dict[str, Any]:
    at = EPOCH + timedelta(milliseconds=t_ms)
    return {"id": number, "k": "a", "t": at, "x": 1, "y": 1.0, "s": "u"} | values


def recounted(rows: Rows, frame: Frame, aggregates: Sequence[pl.Expr]) -> Rows:
    """Each row with what Polars says of its frame."""
    found: Rows = []
    for key in {row["k"] for row in rows}:
        ordered = sorted((row for row in rows if row["k"] == key), key=time_us)
        for i, row in enumerate(ordered):
            if not frame.is_range:
                chosen = ordered[0 if frame.preceding is None else max(i - frame.preceding, 0) : i + 1]
            else:
                first = -math.inf if frame.preceding is None else time_us(row) - frame.preceding * 1_000
                chosen = [one for one in ordered if first <= time_us(one) <= time_us(row)]
            made = pl.DataFrame(batch(chosen)).group_by("k").agg(*aggregates).drop("k")
            found.append(row | made.to_dicts()[0])
    return sorted(found, key=lambda row: row["id"])


def alike(found: Rows, expected: Rows) -> None:
    found = sorted(found, key=lambda row: row["id"])
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            wanted = other[name]
            is_float = isinstance(value, float) and isinstance(wanted, float)
            same = value == pytest.approx(wanted, rel=1e-9, abs=1e-9, nan_ok=True) if is_float else value == wanted
            assert same, (name, one, other)


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Batches of rows, watermarks of all subtasks and of one, and numbers of subtasks to go on with."""
    number = iter(range(10_000))
    row = st.builds(
        lambda k, t, x, y, s: {"k": k, "t": EPOCH + timedelta(microseconds=500 * t), "x": x, "y": y, "s": s},
        st.sampled_from(KEYS),
        st.integers(0, 80),
        st.none() | st.integers(-5, 5),
        st.none() | st.sampled_from([-1.5, 0.0, 2.25, 1e18, math.nan, math.inf]),
        st.none() | st.sampled_from(["u", "v", ""]),
    )
    steps = st.one_of(
        st.lists(row, min_size=1, max_size=12),
        st.integers(0, 45),
        st.tuples(st.integers(0, 4), st.integers(0, 45)),
        st.sampled_from(["1", "2", "3", "5"]),
    )
    found = draw(st.lists(steps, max_size=14))
    return [[{"id": next(number), **one} for one in step] if isinstance(step, list) else step for step in found]


def run(one: OverSpec, history: list[Any]) -> tuple[Rows, Rows, int]:
    """Return the rows that were not late, what was emitted, and how many were late."""
    subtasks = Subtasks(one, ["k"], 1)
    given, found, late = Rows(), Rows(), 0
    passed_ms = dict.fromkeys(KEYS, -1)
    reached_ms = [-1]
    for step in [*history, WATERMARK_MAX_MS]:
        match step:
            case list():
                subtasks.send(batch(step))
                given += [row for row in step if time_us(row) // 1_000 > passed_ms[row["k"]]]
            case int() | tuple():
                ahead, watermark_ms = step if isinstance(step, tuple) else (None, step)
                for i, harness in enumerate(subtasks.harnesses):
                    if watermark_ms > reached_ms[i] and ahead in (None, i):
                        reached_ms[i] = watermark_ms
                        harness.operator.on_watermark(watermark_ms)
                        check_order(harness, watermark_ms)
                for key in KEYS:
                    passed_ms[key] = max(passed_ms[key], reached_ms[subtasks.owner(batch([row(0, 0, k=key)]))])
            case str():
                states = subtasks.snapshot()
                for harness in subtasks.harnesses:
                    late += harness.context.metrics.counters.get("late", 0)
                    harness.operator.close()
                subtasks = Subtasks(one, ["k"], int(step), states)
                reached_ms = [-1] * int(step)
        for harness in subtasks.harnesses:
            found += harness.out.rows()
            harness.out.batches.clear()
    late += sum(harness.context.metrics.counters.get("late", 0) for harness in subtasks.harnesses)
    return given, found, late


def check_order(harness: Harness, watermark_ms: int) -> None:
    """The rows of a key have come out in order, and none that the watermark has not passed."""
    last: dict[str, datetime] = {}
    for row in harness.out.rows():
        assert last.setdefault(row["k"], row["t"]) <= row["t"]
        assert time_us(row) // 1_000 <= watermark_ms
        last[row["k"]] = row["t"]
    assert harness.out.watermarks()[-1] == watermark_ms


def check(frame: Frame, aggregates: Sequence[pl.Expr], history: list[Any]) -> None:
    given, found, late = run(spec(frame, aggregates), history)
    alike(found, recounted(given, frame, aggregates))
    assert late == sum(len(step) for step in history if isinstance(step, list)) - len(given)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.text)
@given(histories())
@settings(max_examples=15)
def test_each_row_has_what_a_recount_of_its_frame_says(frame: Frame, history: list[Any]) -> None:
    check(frame, FOLDED if frame.preceding is None else [*FOLDED, *OTHERS], history)


@pytest.mark.parametrize("backend", DATABASES)
@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.text)
@given(histories())
@settings(max_examples=4)
def test_it_does_so_on_each_backend(backend: str, frame: Frame, history: list[Any]) -> None:
    with choose(backend):
        check(frame, FOLDED, history)


@pytest.mark.parametrize(
    ("backend", "frame"),
    [*(("memory", frame) for frame in FRAMES), *((IN_FILES, frame) for frame in (Frame(True, 20), Frame(False, None)))],
)
def test_it_goes_on_at_any_parallelism(backend: str, frame: Frame) -> None:
    history: list[Any] = []
    for i, parallelism in enumerate(PARALLELISMS):
        ids = range(i * 16 + 15, i * 16 - 1, -1)
        rows = [row(n, n / 2, k=KEYS[n % 3], x=n % 4, y=None, s=str(n)) for n in ids]
        history += [rows, i * 8 + 5, str(parallelism)]
    with choose(backend):
        check(frame, FOLDED, history)


def emitted(harness: Harness, watermark_ms: int) -> Rows:
    harness.operator.on_watermark(watermark_ms)
    found = harness.out.rows()
    harness.out.batches.clear()
    return found


def test_rows_of_one_time_have_one_range_and_each_its_own_rows() -> None:
    rows = [row(0, 5), row(1, 5), row(2, 5), row(3, 6)]
    for frame, expected in [
        (Frame(True, None), [3, 3, 3, 4]),
        (Frame(True, 1), [3, 3, 3, 4]),
        (Frame(False, None), [1, 2, 3, 4]),
        (Frame(False, 1), [1, 2, 2, 2]),
    ]:
        harness = Harness(spec(frame, [pl.len().alias("n")]))
        harness.send(batch(rows))
        assert [one["n"] for one in emitted(harness, 10)] == expected


def test_a_range_has_both_its_ends_to_the_microsecond() -> None:
    harness = Harness(spec(Frame(True, 10), [pl.col("id").min().alias("first")]))
    harness.send(batch([row(0, 1.5), row(1, 1.501), row(2, 11.5), row(3, 11.501)]))
    assert [one["first"] for one in emitted(harness, 100)] == [0, 0, 0, 1]


def test_late_rows_are_counted_and_go_to_their_output() -> None:
    harness = Harness(spec(Frame(True, 10), [pl.len().alias("n")], late=OutputTag("late")))
    harness.send(batch([row(0, 5)]))
    assert emitted(harness, 7)[0]["n"] == 1
    harness.send(batch([row(1, 7.999), row(2, 8), row(3, 2)]))
    assert [one["id"] for one in emitted(harness, 9)] == [2]
    late = [one["id"] for part in harness.out.tagged[OutputTag("late")] for one in part.to_pylist()]
    assert late == [1, 3]
    assert harness.context.metrics.counters["late"] == 2


def state_rows(harness: Harness) -> dict[str, int]:
    frozen = harness.operator.freeze()
    assert frozen is not None
    return {name: count for name, count in frozen.rows().items() if count}


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_keys_whose_rows_have_left_the_range_are_forgotten(backend: str) -> None:
    with choose(backend):
        subtasks = Subtasks(spec(Frame(True, 8_000), [pl.len().alias("n")]), ["k"], 1)
        harness = subtasks.harnesses[0]
        for i in range(50):
            harness.send(batch([row(i, i * 1_000, k=f"key {i}"), row(i, i * 1_000, k="always")]))
            emitted(harness, i * 1_000)
            assert sum(state_rows(harness).values()) < 90
        emitted(harness, 1_000_000)
        assert state_rows(harness) == {}


def test_so_they_are_where_the_input_had_ended() -> None:
    one = spec(Frame(True, 100), [pl.len().alias("n")])
    harness = Harness(one)
    harness.send(batch([row(0, 50), row(1, 60, k="b")]))
    assert len(emitted(harness, WATERMARK_MAX_MS)) == 2
    harness.operator.finish()
    again = Harness(one, [harness.snapshot()])
    again.operator.on_resumed()
    again.send(batch([row(2, 70)]))
    assert [found["n"] for found in emitted(again, 90)] == [2]
    emitted(again, 1_200)
    emitted(again, 5_000)
    assert state_rows(again) == {}


def test_rows_that_no_frame_has_any_more_do_not_add_up() -> None:
    harness = Harness(spec(Frame(False, 3), [pl.col("x").sum().alias("n")]))
    for i in range(100):
        harness.send(batch([row(i, i)]))
        assert emitted(harness, i)[0]["n"] == min(i + 1, 4)
    assert sum(state_rows(harness).values()) < 8


@pytest.mark.parametrize("frame", [Frame(False, 3), Frame(False, None), Frame(True, None)], ids=lambda f: f.text)
def test_a_key_without_rows_for_its_ttl_begins_again(frame: Frame) -> None:
    harness = Harness(spec(frame, [pl.len().alias("n")], ttl=hg.TTL("10s")))
    for i, (wait_ms, expected) in enumerate([(0, 1), (9_000, 2), (9_000, 3), (11_000, 1)]):
        harness.advance(wait_ms)
        harness.send(batch([row(i, i)]))
        assert emitted(harness, i)[0]["n"] == expected


def test_a_large_number_is_forgotten_with_its_row() -> None:
    values = [1e300, 1.0, math.nan, math.inf, 2.0, 3.0, 4.0]
    harness = Harness(spec(Frame(False, 1), [pl.col("y").sum().alias("sum"), pl.col("y").std().alias("std")]))
    harness.send(batch([row(i, i, y=value) for i, value in enumerate(values)]))
    found = emitted(harness, 100)
    assert found[0]["sum"] == 1e300
    assert [one["sum"] for one in found[-2:]] == [5.0, 7.0]
    assert [one["std"] for one in found[-2:]] == pytest.approx([0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize("frame", [Frame(False, 1), Frame(False, None), Frame(True, 20)], ids=lambda frame: frame.text)
@pytest.mark.parametrize("values", [[math.inf, 1.0], [1.0, 2.0, -math.inf, 3.0], [None, math.inf, -math.inf, None]])
def test_aggregates_of_infinite_numbers_are_those_of_polars(values: list[float | None], frame: Frame) -> None:
    y = pl.col("y")
    aggregates = [y.var().alias("var"), y.std(ddof=0).alias("std"), y.mean().alias("mean"), y.sum().alias("sum")]
    rows = [row(i, i, y=value) for i, value in enumerate(values)]
    harness = Harness(spec(frame, aggregates))
    harness.send(batch(rows))
    alike(emitted(harness, 100), recounted(rows, frame, aggregates))


def test_a_sum_that_is_too_large_fails_and_one_beside_it_does_not() -> None:
    most = (1 << 63) - 1
    harness = Harness(spec(Frame(False, 1), [pl.col("x").sum().alias("sum")]))
    numbers = [most, 0, most, -most, most, 0]
    harness.send(batch([row(i, i, x=number) for i, number in enumerate(numbers)]))
    assert [one["sum"] for one in emitted(harness, 100)] == [most, most, most, 0, 0, most]
    harness.send(batch([row(7, 201, x=most), row(8, 202, x=1)]))
    with pytest.raises(UsageError, match="a sum of integers is larger than int64 holds"):
        emitted(harness, 300)


@pytest.mark.parametrize("frame", [Frame(True, 86_400_000), Frame(True, None)], ids=lambda frame: frame.text)
def test_times_may_be_centuries_apart(frame: Frame) -> None:
    century_ms = 36_525 * 86_400_000
    rows = [row(n, n % 3 * century_ms, k=f"key {n // 3}") for n in range(60_000)]
    harness = Harness(spec(frame, [pl.len().alias("n")]))
    harness.send(batch(rows[::-1]))
    found = [one["n"] for one in sorted(emitted(harness, WATERMARK_MAX_MS), key=lambda one: one["id"])]
    assert found == ([1, 1, 1] if frame.preceding else [1, 2, 3]) * 20_000


@pytest.mark.parametrize(
    ("dtype", "times", "step_ms"),
    [
        (pa.int64(), [1, 3, 4], 1),
        (pa.timestamp("ms"), [1, 3, 4], 1),
        (pa.timestamp("ns"), [1_000_000, 3_000_000, 4_000_000], 1),
        (pa.timestamp("us", "UTC"), [1_000, 3_000, 4_000], 1),
        (pa.date32(), [1, 3, 4], 86_400_000),
    ],
)
def test_times_of_any_type_make_ranges(dtype: pa.DataType, times: list[int], step_ms: int) -> None:
    schema = pa.schema([("id", pa.int64()), ("k", pa.large_string()), ("t", dtype)])
    integer = pa.int32() if pa.types.is_date32(dtype) else pa.int64()
    columns = [pa.array([0, 1, 2]), pa.array(["a"] * 3, pa.large_string()), pa.array(times, integer).cast(dtype)]
    harness = Harness(spec(Frame(True, 2 * step_ms), [pl.len().alias("n")], schema))
    harness.send(pa.RecordBatch.from_arrays(columns, schema=schema))
    assert [one["n"] for one in emitted(harness, 10 * step_ms)] == [1, 2, 2]


def test_rows_come_out_with_all_their_columns() -> None:
    schema = pa.schema(
        [
            ("k", pa.large_string()),
            ("t", pa.timestamp("us")),
            ("amount", pa.decimal128(38, 2)),
            ("tags", pa.large_list(pa.large_string())),
            ("at", pa.struct([("x", pa.float64()), ("day", pa.date32())])),
            ("raw bytes", pa.large_binary()),
        ]
    )
    rows = [
        {
            "k": "a",
            "t": EPOCH,
            "amount": Decimal("1.25"),
            "tags": ["u", None],
            "at": {"x": 1.0, "day": date(2020, 1, 1)},
        },
        {"k": "a", "t": EPOCH, "amount": None, "tags": None, "at": None, "raw bytes": b"\0"},
    ]
    aggregates = [pl.col("amount").sum().alias("total"), pl.col("tags").last().alias("last tags")]
    harness = Harness(spec(Frame(False, 1), aggregates, schema))
    given = batch(rows, schema)
    harness.send(given)
    again = Harness(spec(Frame(False, 1), aggregates, schema), [harness.snapshot()])
    found = emitted(again, 10)
    assert [{name: one[name] for name in schema.names} for one in found] == given.to_pylist()
    assert [one["total"] for one in found] == [Decimal("1.25")] * 2
    assert [one["last tags"] for one in found] == [["u", None], None]


def slow_harness() -> Harness:
    """An operator that has emitted something, which took 100 ms, and holds a watermark."""
    harness = Harness(spec(Frame(True, 10), [pl.len().alias("n")]))
    emit = harness.out.emit

    def slowly(found: pa.RecordBatch) -> None:
        harness.now_ms += 100
        emit(found)

    harness.out.emit = slowly  # type: ignore[method-assign]
    harness.send(batch([row(0, 1), row(1, 2), row(2, 3)]))
    for watermark_ms in (1, 2):
        harness.operator.on_watermark(watermark_ms)
    assert harness.out.watermarks() == [1], "the other one waits as long as emitting took"
    assert harness.operator.next_tick_ms() == harness.now_ms + 100
    return harness


def test_where_emitting_takes_long_watermarks_are_put_together() -> None:
    harness = slow_harness()
    harness.operator.on_watermark(3)
    harness.advance(99)
    assert harness.out.watermarks() == [1]
    harness.advance(1)
    assert harness.operator.next_tick_ms() is None
    assert [one["n"] for one in harness.out.rows()] == [1, 2, 3]
    assert harness.out.watermarks() == [1, 3]


def test_a_watermark_that_waits_makes_rows_late() -> None:
    harness = slow_harness()
    harness.send(batch([row(3, 2)]))
    assert harness.context.metrics.counters["late"] == 1


@pytest.mark.parametrize("what", ["a barrier", "idleness", "the end"])
def test_a_watermark_waits_for_nothing_else(what: str) -> None:
    harness = slow_harness()
    match what:
        case "a barrier":
            again = Harness(spec(Frame(True, 10), [pl.len().alias("n")]), [harness.snapshot()])
            assert [one["n"] for one in emitted(again, 5)] == [3]
        case "idleness":
            harness.operator.on_idle(True)
            assert harness.out.log[-2:] == [("watermark", 2), ("idle", True)]
        case _:
            harness.operator.on_watermark(WATERMARK_MAX_MS)
    ids = [one["id"] for one in harness.out.rows()]
    assert ids == ([0, 1, 2] if what == "the end" else [0, 1])


def test_another_frame_is_another_state() -> None:
    texts = {spec(frame, [pl.col("x").sum().alias("n")]).state_text() for frame in FRAMES}
    assert len(texts) == len(FRAMES)
    one, other = (spec(Frame(True, 3), [pl.col("x").sum().alias(name)]) for name in ("n", "m"))
    assert one.state_text() == other.state_text()
