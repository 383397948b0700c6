"""PySpark's stateful processors on Headgate's state: calls, values, timers, time, the end, and what keys begin with.

No JVM: the processors are PySpark's own classes, which need none.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester
from tests.operators.harness import BORN_MS, Harness
from tests.spark.stateful_processor.stateful_processors import GAP_MS, OUTPUT, Sessions, SessionsInPandas
from tests.state.backends import EACH, NAMES, Chosen, choose
from tests.state.backends import states as states_on

import headgate as hg
from headgate.errors import BadRecord, UsageError
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.process.key_process import KeyFunctionSpec
from headgate.operators.specs import state_rules, state_text
from headgate.operators.user_functions import UserFunctionError
from headgate.protocol.checkpoints.compatibility import judged
from headgate.spark.stateful_processor import processor_spec

VISITS = pa.schema(
    [
        ("user", pa.large_string()),
        ("page", pa.large_string()),
        ("ms", pa.int64()),
        ("amount", pa.float64()),
    ]
)
FORMS = {"rows": Sessions, "pandas": SessionsInPandas}
each = pytest.mark.parametrize("form", sorted(FORMS))


def spec_of(processor: Any, output: Any = "said STRING", mode: str = "none", **more: Any) -> KeyFunctionSpec:
    given = {"schema": VISITS, "time_column": "ms", "initial_state": None, "is_pandas": False, **more}
    return processor_spec("node", ("user",), processor, output_schema=output, time_mode=mode, **given)


def sessions(form: str, **more: Any) -> KeyFunctionSpec:
    return spec_of(FORMS[form](), OUTPUT, "eventTime", is_pandas=form == "pandas", **more)


def visits(*rows: tuple[str, str, int], amount: float = 1.0) -> pa.RecordBatch:
    found = [{"user": user, "page": page, "ms": ms, "amount": amount} for user, page, ms in rows]
    return pa.RecordBatch.from_pylist(found, VISITS)


class Saying(StatefulProcessor):
    """Says what its calls do; tests give it the calls. Results are said as text."""

    is_raw = False

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self.calls = calls

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.said: list[Any] = []
        self.calls.get("init", lambda self: None)(self)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for found in self.calls.get("rows", lambda *_: [])(self, key, rows, timerValues):
            yield found if self.is_raw or isinstance(found, pd.DataFrame) else Row(said=str(found))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        for found in self.calls.get("timer", lambda *_: [])(self, key, timerValues, expiredTimerInfo):
            yield Row(said=str(found))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.calls.get("initial", lambda *_: None)(self, key, initialState, timerValues)

    def close(self) -> None:
        self.calls.get("close", lambda _: None)(self)


class Giving(Saying):
    """Gives results as they are."""

    is_raw = True


def said(run: Harness) -> list[str]:
    found = [row["said"] for row in run.out.rows()]
    run.out.batches.clear()
    return found


def running(mode: str = "none", *, states: Any = (), harness: dict[str, Any] | None = None, **calls: Any) -> Harness:
    return Harness(spec_of(Saying(**calls), mode=mode), states, **(harness or {}))


ONE = visits(("a", "p", 1))

# -- what is taken ----------------------------------------------------------------------------------------------------


def with_state(declare: Callable[[Any], Any], mode: str = "none") -> Any:
    return spec_of(Saying(init=lambda self: declare(self.handle)), mode=mode)


class Listening(Saying, hg.CheckpointListener):
    """Would never hear of a checkpoint."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: spec_of(Sessions), r"an instance is needed, such as Sessions\(\), not the class"),
    "no processor": (lambda: spec_of(5), "StatefulProcessor is needed, but 5 has no method init"),
    "a listener": (lambda: spec_of(Listening()), "Listening listens to checkpoints or keeps operator state"),
    "a time mode": (
        lambda: spec_of(Saying(), mode="both"),
        'time_mode must be "none", "processingTime" or "eventTime"',
    ),
    "no event time": (
        lambda: spec_of(Saying(), mode="eventTime", time_column=None),
        r"needs event times; call .with_timestamps\(column\) before key_by",
    ),
    "output that is no DDL": (lambda: spec_of(Saying(), "a STRING b"), "the output schema 'a STRING b' cannot be read"),
    "output of an unknown type": (lambda: spec_of(Saying(), "a VARIANT"), "there is no type 'variant'"),
    "output that is not carried": (
        lambda: spec_of(Saying(), "a ARRAY<MAP<STRING, INT>>"),
        "the output schema: column 'a' has type list<.*map.*; keep maps in map state instead",
    ),
    "state that is not carried": (
        lambda: with_state(lambda handle: handle.getValueState("v", "a MAP<STRING, INT>")),
        "the schema of state 'v': column 'a' has type map",
    ),
    "two states of a name": (
        lambda: with_state(lambda h: (h.getValueState("v", "a INT"), h.getListState("v", "a INT"))),
        "two states are named 'v'",
    ),
    "a TTL without processing time": (
        lambda: with_state(lambda handle: handle.getValueState("v", "a INT", 1_000), "eventTime"),
        "state 'v' has a ttlDurationMs, which needs time_mode=\"processingTime\"",
    ),
    "a TTL that is none": (
        lambda: with_state(lambda handle: handle.getValueState("v", "a INT", 0), "processingTime"),
        "the ttlDurationMs of state 'v' must be a whole number of milliseconds, at least 1, not 0",
    ),
    "map keys that cannot be packed": (
        lambda: with_state(lambda handle: handle.getMapState("m", "a DATE, b INT", "v INT")),
        "have several fields, so field 'a' must be an integer, a boolean, text or binary, but is date32",
    ),
    "map keys that are lists": (
        lambda: with_state(lambda handle: handle.getMapState("m", "a ARRAY<INT>", "v INT")),
        "the keys of map state 'm' cannot be",
    ),
    "a state that is declared and deleted": (
        lambda: with_state(lambda handle: (handle.getValueState("old", "n INT"), handle.deleteIfExists("old"))),
        r"'old' is declared, and forget\('old'\) leaves it behind",
    ),
    "a timer in init": (
        lambda: with_state(lambda handle: handle.registerTimer(5), "eventTime"),
        r"timers belong to a key, and there is none in init\(\)",
    ),
    "initial state of another kind": (
        lambda: spec_of(Saying(), initial_state=[1]),
        "initial_state takes a DataFrame of Spark that is no stream",
    ),
    "initial state without its key": (
        lambda: spec_of(Saying(), initial_state=pl.DataFrame({"who": ["a"]})),
        "initial_state has no column 'user', which is part of the key",
    ),
    "initial state with a null key": (
        lambda: spec_of(Saying(), initial_state=pl.DataFrame({"user": ["a", None]})),
        "initial_state has a null key",
    ),
    "initial state of another key": (
        lambda: processor_spec(
            "node", ("ms",), Saying(), VISITS, output_schema="a INT", time_mode="none", time_column=None,
            initial_state=pl.DataFrame({"ms": ["a"]}), is_pandas=False,
        ),
        "initial_state does not fit the key of the stream",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_is_not_supported_is_refused_when_the_pipeline_is_defined(what: str) -> None:
    define, message = REFUSED[what]
    with pytest.raises(UsageError, match=message) as told:
        define()
    assert str(told.value).startswith("operator 'node'")
    assert "\n" not in str(told.value)


def test_init_is_called_on_copies_and_closed_when_the_pipeline_is_defined() -> None:
    calls: list[str] = []
    processor = Saying(init=lambda self: calls.append("init"), close=lambda self: calls.append("close"))
    spec = spec_of(processor)
    assert calls == ["init", "close"]
    assert not hasattr(processor, "handle")
    run = Harness(spec)
    assert calls == ["init", "close", "init"]
    run.operator.close()
    assert calls[3:] == ["close"]


def test_states_are_known_by_name_kind_and_type() -> None:
    assert sessions("rows").state_text() == sessions("pandas").state_text()
    assert "value last: struct<ms: int64>" in sessions("rows").state_text()
    assert sessions("rows").state_text() != spec_of(Saying(), mode="eventTime").state_text()


# -- calls and values -------------------------------------------------------------------------------------------------


def test_a_key_is_called_once_a_batch_with_its_rows_in_their_order() -> None:
    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        yield key, [(type(row).__name__, row.user, row["page"], row[2]) for row in rows]

    run = running(rows=told)
    run.send(visits(("b", "1", 1), ("a", "2", 2), ("b", "3", 3)))
    first = [("Row", "b", "1", 1), ("Row", "b", "3", 3)]
    assert said(run) == [str((("b",), first)), str((("a",), [("Row", "a", "2", 2)]))]


def test_frames_have_the_rows_of_the_key_numbered_from_zero() -> None:
    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        for frame in rows:
            yield pd.DataFrame({"said": [f"{key} {list(frame.index)} {frame['ms'].tolist()} {list(frame.columns)}"]})

    run = Harness(spec_of(Saying(rows=told), is_pandas=True))
    run.send(visits(("a", "1", 1), ("b", "2", 2), ("a", "3", 3)))
    columns = ["user", "page", "ms", "amount"]
    assert said(run) == [f"('a',) [0, 1] [1, 3] {columns}", f"('b',) [0] [2] {columns}"]


STATES = (
    "i INT, d DOUBLE, s STRING, b BINARY, t TIMESTAMP, y DATE, l ARRAY<BIGINT>, r STRUCT<x: INT, z: STRING>, "
    "m DECIMAL(8, 2)"
)
VALUE = (1, 2.5, "ü", b"\0", datetime(2024, 5, 1, 12), date(2024, 5, 1), [1, 2], Row(x=1, z=None), Decimal("1.50"))


@pytest.mark.parametrize("backend", NAMES)
def test_what_was_put_is_got_in_sparks_types_before_and_after_a_restore(backend: str) -> None:
    def declare(self: Any) -> None:
        self.value = self.handle.getValueState("value", STATES)
        self.list = self.handle.getListState("list", STATES)
        self.map = self.handle.getMapState("map", "k STRING", STATES)

    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        if next(rows).page == "put":
            self.value.update(VALUE)
            self.list.appendList([VALUE, tuple([None] * 9)])
            self.map.updateValue(("k",), VALUE)
        yield [self.value.get(), list(self.list.get()), list(self.map.iterator()), self.map.getValue(("k",))]
        yield [self.value.exists(), self.list.exists(), self.map.exists(), self.map.containsKey(("k",))]

    with states_on(backend) as worker:
        run = running(rows=told, init=declare, harness={"worker": worker})
        run.send(visits(("a", "put", 1)))
        first = said(run)
        expected = [VALUE, [VALUE, tuple([None] * 9)], [(("k",), VALUE)], Row(*"idsbtylrm")(*VALUE)]
        assert first == [str(expected), "[True, True, True, True]"]
        again = running(rows=told, init=declare, states=[run.snapshot()])
        again.send(visits(("a", "get", 1), ("b", "get", 1)))
        assert said(again) == [*first, "[None, [], [], None]", "[False, False, False, False]"]


@pytest.mark.parametrize("is_pandas", [False, True])
def test_moments_are_naive_times_in_utc_to_a_processor(is_pandas: bool) -> None:
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("l", pa.large_list(pa.timestamp("us", "UTC")))])
    moment = datetime(2026, 7, 1, 16)

    class Told(Giving):
        def init(self, handle: Any) -> None:
            self.map = handle.getMapState("map", "at TIMESTAMP", "at TIMESTAMP, l ARRAY<TIMESTAMP>")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            (row,) = rows
            at = row["at"][0].to_pydatetime() if is_pandas else row["at"]
            self.map.updateValue((at,), (at, [at]))
            assert (key, at) == ((moment,), moment)
            assert list(self.map.iterator()) == [((moment,), (moment, [moment]))]
            assert list(row["l"][0] if is_pandas else row["l"]) == [np.datetime64(moment) if is_pandas else moment]
            yield pd.DataFrame({"at": [at]}) if is_pandas else (at,)

    spec = processor_spec(
        "node",
        ("at",),
        Told(),
        schema,
        output_schema="at TIMESTAMP",
        time_mode="none",
        time_column=None,
        initial_state=None,
        is_pandas=is_pandas,
    )
    run = Harness(spec)
    run.send(pa.RecordBatch.from_pylist([{"at": moment, "l": [moment]}], schema))
    assert run.out.rows() == [{"at": moment.replace(tzinfo=UTC)}]


def test_a_changed_state_is_what_it_says() -> None:
    def declare(self: Any) -> None:
        self.list = self.handle.getListState("list", "n INT")
        self.map = self.handle.getMapState("map", "k INT", "n INT")

    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        self.list.put([(1,), (2,)])
        self.list.appendValue((np.int32(3),))
        for one in range(3):
            self.map.updateValue((one,), {"n": np.int64(one)})
        self.map.removeKey((1,))
        yield list(self.list.get()), list(self.map.keys()), list(self.map.values())
        self.list.clear()
        self.map.clear()
        yield list(self.list.get()), list(self.map.keys()), self.list.exists()

    run = running(rows=told, init=declare)
    run.send(ONE)
    assert said(run) == ["([(1,), (2,), (3,)], [(0,), (2,)], [(0,), (2,)])", "([], [], False)"]


@pytest.mark.parametrize("value", [5, (1, 2), ("text",), None, {"m": 1}, (1.5,), (1 << 40,)])
def test_a_value_that_does_not_fit_its_schema_fails_by_name(value: Any) -> None:
    def declare(self: Any) -> None:
        self.value = self.handle.getValueState("value", "n INT")

    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        self.value.update(value)
        return []

    run = running(rows=told, init=declare)
    with pytest.raises(UserFunctionError, match="1 records of key 'a'"):
        run.send(ONE)


def test_a_map_may_have_keys_of_several_fields() -> None:
    def declare(self: Any) -> None:
        self.map = self.handle.getMapState("map", "a STRING, b INT, c BINARY, d BOOLEAN", "n INT")

    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        self.map.updateValue(("x", 1, b"\xff", True), (1,))
        self.map.updateValue(("x", 2, b"", False), (2,))
        self.map.updateValue(("x", np.int64(1), b"\xff", True), (3,))
        yield list(self.map.keys()), self.map.getValue(("x", 1, b"\xff", True)).n

    run = running(rows=told, init=declare)
    run.send(ONE)
    assert said(run) == ["([('x', 1, b'\\xff', True), ('x', 2, b'', False)], 3)"]


def test_results_are_taken_by_name_or_by_position() -> None:
    results = [Row(b=1, a="x"), ("y", 2), {"a": "z"}, Row("w", np.int64(4))]
    run = Harness(spec_of(Giving(rows=lambda *_: results), "a STRING, b INT"))
    run.send(ONE)
    expected = [("x", 1), ("y", 2), ("z", None), ("w", 4)]
    assert [(row["a"], row["b"]) for row in run.out.rows()] == expected


def changing_rows(*_: Any) -> Iterator[Any]:
    tags, place = ["a"], {"x": 1}
    by_position, by_name = [1, tags, place], {"n": 2, "tags": tags, "place": place}
    for result in (Row(n=0, tags=tags, place=place), by_position, by_name, by_name):
        yield result
        tags.append("b")
        place["x"] += 1
        by_name["n"] += 1


class Changing(Giving):
    """Changes what its timers have given."""

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from changing_rows()


def test_a_result_is_taken_as_it_was_when_it_was_given() -> None:
    schema = "n INT, tags ARRAY<STRING>, place STRUCT<x: INT>"
    of_rows = spec_of(Giving(rows=changing_rows), schema)
    of_timers = spec_of(Changing(rows=lambda self, *_: self.handle.registerTimer(5) or ()), schema, "eventTime")
    for spec in (of_rows, of_timers):
        run = Harness(spec)
        run.send(ONE)
        run.operator.on_watermark(10)
        assert [(row["n"], len(row["tags"]), row["place"]["x"]) for row in run.out.rows()] == [
            (0, 1, 1),
            (1, 2, 2),
            (4, 3, 3),
            (5, 4, 4),
        ]


def test_a_frame_is_taken_as_it_was_when_it_was_given() -> None:
    def frames(*_: Any) -> Iterator[pd.DataFrame]:
        frame = pd.DataFrame({"n": np.array([1], "int32"), "said": ["a"]})
        for said in ("b", "c"):
            yield frame
            frame["n"] += 1
            frame.loc[0, "said"] = said

    run = Harness(spec_of(Giving(rows=frames), "n INT, said STRING", is_pandas=True))
    run.send(ONE)
    assert [(row["n"], row["said"]) for row in run.out.rows()] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("backend", EACH)
def test_a_change_of_a_value_changes_no_state_until_it_is_given_back(backend: str) -> None:
    value = {"tags": ["a"], "place": {"x": [1]}}

    def declare(self: Saying) -> None:
        schema = "tags ARRAY<STRING>, place STRUCT<x: ARRAY<INT>>"
        self.value = self.handle.getValueState("v", schema)
        self.list = self.handle.getListState("l", schema)
        self.map = self.handle.getMapState("m", "k STRING", schema)

    def everything(self: Saying) -> list[Any]:
        return [self.value.get(), *self.list.get(), tuple(self.map.getValue(("k",)))]

    def use(self: Saying, *_: Any) -> list[Any]:
        if not self.value.exists():
            own = copy.deepcopy(value)
            self.value.update(own)
            self.list.put([own])
            self.map.updateValue(("k",), own)
            own["tags"].append("b")
            own["place"]["x"].append(2)
        before = str(everything(self))
        for found in everything(self):
            found[0].append("c")
            found[1][0].append(3)
        return [before, str(everything(self))]

    with choose(backend):
        spec = spec_of(Saying(init=declare, rows=use))
        run = Harness(spec, worker=Chosen.worker)
        run.send(ONE)
        first = said(run)
        frozen = run.snapshot()
        run.send(ONE)
        again = Harness(spec, [frozen], worker=Chosen.worker)
        again.send(ONE)
        assert {*first, *said(run), *said(again)} == {str([(["a"], Row(x=[1]))] * 3)}


@pytest.mark.parametrize("result", [Row(c=1), ("x",), ("x", "y"), ("x", 1 << 40), ("x", 1.5)])
def test_a_row_that_does_not_fit_is_a_bad_record(result: Any) -> None:
    spec = spec_of(Giving(rows=lambda *_: [result, ("x", 1)]), "a STRING, b INT")
    run = Harness(spec, diverts=True)
    run.send(ONE)
    assert len(run.out.bad) == 1
    assert run.out.rows() == [{"a": "x", "b": 1}]
    with pytest.raises(BadRecord):
        Harness(spec).send(ONE)


def test_frames_are_taken_by_name_or_by_position() -> None:
    results = [pd.DataFrame({"b": [1], "a": ["x"], "more": [0]}), pd.DataFrame([["y", 2]])]
    run = Harness(spec_of(Giving(rows=lambda *_: results), "a STRING, b INT", is_pandas=True))
    run.send(ONE)
    assert [(row["a"], row["b"]) for row in run.out.rows()] == [("x", 1), ("y", 2)]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (pd.DataFrame({"a": ["x"]}), "a frame without the column 'b'"),
        (pd.DataFrame([["x"]]), "a frame of 1 columns instead of"),
        (pd.DataFrame({"a": ["x"], "b": ["y"]}), "y"),
        (Row(a="x", b=1), "must yield pandas frames, but yielded Row"),
    ],
)
def test_a_frame_that_does_not_fit_fails(result: Any, message: str) -> None:
    run = Harness(spec_of(Giving(rows=lambda *_: [result]), "a STRING, b INT", is_pandas=True), diverts=True)
    with pytest.raises(UserFunctionError, match=message):
        run.send(ONE)


# -- time -------------------------------------------------------------------------------------------------------------


def times_of(self: Any, key: Any, rows: Any, times: Any) -> Any:
    yield times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()


def test_timer_values_are_minus_one_without_a_notion_of_time() -> None:
    run = running(rows=times_of)
    run.send(ONE)
    assert said(run) == ["(-1, -1)"]


def test_timer_values_say_what_time_it_is() -> None:
    run = running("processingTime", rows=times_of)
    run.send(ONE)
    assert said(run) == [f"({BORN_MS + 1_000}, -1)"]
    run = running("EVENTTIME", rows=times_of)
    run.send(ONE)
    run.operator.on_watermark(0)
    run.operator.on_watermark(5)
    run.send(visits(("a", "p", 6)))
    assert said(run) == [f"({BORN_MS + 1_000}, 0)", f"({BORN_MS + 1_000}, 5)"]


def test_records_that_event_time_has_passed_are_dropped_and_counted() -> None:
    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        yield [row.ms for row in rows]

    for mode, expected, late in (("eventTime", "[6]", 2), ("none", "[4, 5, 6]", 0)):
        run = running(mode, rows=told)
        run.operator.on_watermark(5)
        run.send(visits(("a", "p", 4), ("a", "p", 5), ("a", "p", 6)))
        assert said(run) == [expected]
        assert run.context.metrics.counters.get("late", 0) == late


def registering(*times: int) -> Callable[..., Any]:
    def rows(self: Any, key: Any, rows: Any, values: Any) -> Any:
        for time in times:
            self.handle.registerTimer(time)
        return []

    return rows


def fired(self: Any, key: Any, times: Any, info: Any) -> Any:
    yield f"{key[0]}@{info.getExpiryTimeInMs()} at {times.getCurrentWatermarkInMs()}"


def test_timers_fire_when_event_time_has_reached_them() -> None:
    run = running("eventTime", rows=registering(10, 20, 10), timer=fired)
    run.send(visits(("a", "p", 1), ("b", "p", 1)))
    run.operator.on_watermark(9)
    assert said(run) == []
    run.operator.on_watermark(10)
    assert sorted(said(run)) == ["a@10 at 10", "b@10 at 10"]
    run.operator.on_watermark(30)
    assert sorted(said(run)) == ["a@20 at 30", "b@20 at 30"]


def test_a_timer_for_what_has_passed_fires_behind_its_batch() -> None:
    run = running("eventTime", rows=registering(5), timer=fired)
    run.operator.on_watermark(7)
    run.send(visits(("a", "p", 8)))
    assert said(run) == ["a@5 at 7"]


def test_timers_of_processing_time_fire_at_ticks() -> None:
    due = BORN_MS + 1_500

    def timer(self: Any, key: Any, times: Any, info: Any) -> Any:
        yield info.getExpiryTimeInMs() - due, times.getCurrentProcessingTimeInMs() - due

    run = running("processingTime", rows=registering(due), timer=timer)
    run.send(ONE)
    run.operator.on_watermark(due + 10)
    run.advance(499)
    assert said(run) == []
    run.advance(1)
    assert said(run) == ["(0, 0)"]


def test_timers_are_listed_and_deleted_by_key() -> None:
    def rows(self: Any, key: Any, rows: Any, values: Any) -> Any:
        for row in rows:
            if row.page == "delete":
                self.handle.deleteTimer(row.ms)
            else:
                self.handle.registerTimer(row.ms)
        yield list(self.handle.listTimers())

    def timer(self: Any, key: Any, times: Any, info: Any) -> Any:
        yield f"{info.getExpiryTimeInMs()} of {list(self.handle.listTimers())}"

    run = running("eventTime", rows=rows, timer=timer)
    run.send(visits(("a", "", 30), ("a", "", 10), ("b", "", 10), ("a", "", 20)))
    assert said(run) == ["[10, 20, 30]", "[10]"]
    run.send(visits(("a", "delete", 20), ("a", "", 40)))
    assert said(run) == ["[10, 30, 40]"]
    again = running("eventTime", rows=rows, timer=timer, states=[run.snapshot()])
    again.send(visits(("b", "delete", 99)))
    assert said(again) == ["[10]"]
    for one in (run, again):
        one.operator.on_watermark(35)
        assert sorted(said(one)) == ["10 of [10, 30, 40]", "10 of [10]", "30 of [30, 40]"]


def test_without_a_notion_of_time_there_are_no_timers() -> None:
    run = running(rows=registering(5))
    with pytest.raises(UserFunctionError, match='there are no timers with time_mode="none"'):
        run.send(ONE)


def again_in(by_ms: int) -> Callable[..., Any]:
    def timer(self: Any, key: Any, times: Any, info: Any) -> Any:
        self.handle.registerTimer(info.getExpiryTimeInMs() + by_ms)
        yield f"{info.getExpiryTimeInMs()} of {list(self.handle.listTimers())}"

    return timer


def test_the_timer_that_fires_is_gone_when_its_call_is_over() -> None:
    run = running("eventTime", rows=registering(10), timer=again_in(0))
    run.send(ONE)
    run.operator.on_watermark(15)
    run.operator.on_watermark(30)
    assert said(run) == ["10 of [10]"]


def test_what_a_timer_registers_fires_in_its_turn() -> None:
    run = running("eventTime", rows=registering(10), timer=again_in(10))
    run.send(ONE)
    run.operator.on_watermark(25)
    assert said(run) == ["10 of [10, 20]", "20 of [20, 30]"]
    run = running("eventTime", rows=registering(10), timer=again_in(-1))
    run.send(ONE)
    run.operator.on_watermark(25)
    run.operator.on_watermark(26)
    assert said(run) == ["10 of [9, 10]", "9 of [8, 9]"]


def test_the_end_of_input_fires_what_there_is_and_nothing_that_is_new() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        self.handle.registerTimer(100)
        yield list(self.handle.listTimers())

    def timer(self: Any, key: Any, times: Any, info: Any) -> Any:
        self.handle.registerTimer(times.getCurrentWatermarkInMs() + 10)
        yield info.getExpiryTimeInMs(), times.getCurrentWatermarkInMs()

    run = running("eventTime", rows=rows, timer=timer)
    run.send(ONE)
    run.operator.on_watermark(50)
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert said(run) == ["[100]", "(100, 100)"]
    ended = run.snapshot()  # also before finish()
    again = running("eventTime", rows=rows, timer=timer, states=[ended])
    again.operator.on_watermark(WATERMARK_MAX_MS)
    assert said(again) == []
    more = running("eventTime", rows=rows, timer=timer, states=[ended])
    more.operator.on_resumed()
    more.send(visits(("a", "p", 105)))
    more.operator.on_watermark(110)
    assert said(more) == ["[100, 110]", "(100, 110)", "(110, 110)"]


def test_state_with_a_ttl_is_gone_after_its_duration_of_processing_time() -> None:
    def declare(self: Any) -> None:
        self.value = self.handle.getValueState("value", "n INT", 10)
        self.list = self.handle.getListState("list", "n INT", 10)
        self.map = self.handle.getMapState("map", "k INT", "n INT", ttlDurationMs=10)

    def told(self: Any, key: Any, rows: Any, times: Any) -> Any:
        yield self.value.get(), list(self.list.get()), list(self.map.iterator())
        for row in rows:
            if row.page == "put":
                self.value.update((1,))
                self.list.appendValue((row.ms,))
                self.map.updateValue((row.ms,), (1,))

    run = running("processingTime", rows=told, init=declare)
    run.send(visits(("a", "put", 1)))
    run.advance(5)
    run.send(visits(("a", "put", 2)))
    run.advance(5)
    again = running("processingTime", rows=told, init=declare, states=[run.snapshot()], harness={"begun_ms": 1_010})
    for one in (run, again):
        said(one)
        one.send(ONE)
        assert said(one) == ["((1,), [(2,)], [((2,), (1,))])"]


# -- what keys begin with ---------------------------------------------------------------------------------------------

TOTALS = {"user": ["a", "c", "a"], "amount": [100.0, 300.0, 5.0]}
GIVEN = {
    "polars": pl.DataFrame,
    "pandas": pd.DataFrame,
    "arrow": pa.table,
    "batch": lambda rows: pa.table(rows).to_batches()[0],
}


@pytest.mark.parametrize("given", sorted(GIVEN))
def test_keys_begin_with_the_initial_state_also_those_without_records(given: str) -> None:
    def initial(self: Any, key: Any, row: Any, times: Any) -> None:
        self.handle.registerTimer(int(row.amount))

    spec = spec_of(Saying(initial=initial, timer=fired), mode="eventTime", initial_state=GIVEN[given](TOTALS))
    run = Harness(spec)
    run.operator.on_watermark(400)
    assert said(run) == ["a@5 at 400", "a@100 at 400", "c@300 at 400"]


def test_each_key_begins_in_one_subtask() -> None:
    def initial(self: Any, key: Any, row: Any, times: Any) -> None:
        self.handle.registerTimer(int(row.amount))

    begin = pl.DataFrame({"user": [str(n) for n in range(20)], "amount": range(1, 21)})
    spec, found = spec_of(Saying(initial=initial, timer=fired), mode="eventTime", initial_state=begin), []
    for index in range(2):
        run = Harness(spec, subtask=(index, 2))
        run.operator.on_watermark(400)
        found += said(run)
    assert sorted(found) == sorted(f"{n}@{n + 1} at 400" for n in range(20))


@each
def test_the_initial_state_is_taken_over_once_by_the_subtask_that_has_the_key(form: str) -> None:
    spec = sessions(form, initial_state=pl.DataFrame(TOTALS))
    first = [Harness(spec, subtask=(index, 2)) for index in range(2)]
    taken = [run.snapshot() for run in first]
    run = Harness(spec, taken)
    run.send(visits(("a", "p", 1), ("b", "p", 1), ("c", "p", 1)))
    assert [(row["user"], row["total"]) for row in run.out.rows()] == [
        ("a", 106.0),
        ("b", 1.0),
        ("c", 301.0),
    ]


# -- changed processors -----------------------------------------------------------------------------------------------


def older(self: Any) -> None:
    self.n = self.handle.getValueState("n", "n INT, gone STRING")
    self.log = self.handle.getListState("log", "at STRUCT<n: INT>")
    self.seen = self.handle.getMapState("seen", "page STRING", "n INT")
    self.old = self.handle.getValueState("old", "n INT")


def write(self: Any, key: Any, rows: Any, times: Any) -> list[Any]:
    self.n.update((1, "x"))
    self.log.put([((1,),), ((2,),)])
    self.seen.updateValue(("/",), (3,))
    self.old.update((4,))
    return []


def newer(self: Any) -> None:
    self.handle.deleteIfExists("old")
    self.handle.deleteIfExists("never")
    self.n = self.handle.getValueState("n", "more STRING, n BIGINT")
    self.log = self.handle.getListState("log", "at STRUCT<n: BIGINT, ms: BIGINT>")
    self.seen = self.handle.getMapState("seen", "page STRING", "n INT, first TIMESTAMP")
    self.new = self.handle.getValueState("new", "n INT")


def look(self: Any, key: Any, rows: Any, times: Any) -> list[Any]:
    return [self.n.get(), list(self.log.get()), list(self.seen.iterator()), self.new.get()]


@pytest.mark.parametrize("backend", NAMES)
def test_a_processor_that_was_changed_goes_on_as_in_spark(backend: str) -> None:
    before, after = spec_of(Saying(init=older, rows=write)), spec_of(Saying(init=newer, rows=look))
    found = judged("node", "checkpoint 1", state_text(before), state_text(after), state_rules(after))
    assert found.refusal is None
    assert found.changes == (
        "operator 'node': in state 'log', int32 becomes int64 in 'at.n'",
        "operator 'node': in state 'log', 'at.ms' is added",
        "operator 'node': in state 'n', 'more' is added",
        "operator 'node': in state 'n', int32 becomes int64 in 'n'",
        "operator 'node': in state 'n', 'gone' is removed",
        "state 'new' of operator 'node' is new: it starts empty",
        "operator 'node': in state 'seen', 'first' is added",
        "state 'old' of operator 'node' is left behind",
    )
    with states_on(backend) as worker:
        first = Harness(before, worker=worker)
        first.send(visits(("a", "/", 1)))
        run = Harness(after, [first.snapshot()], worker=worker)
        run.send(visits(("a", "/", 1)))
    assert said(run) == [
        "(None, 1)",
        "[(Row(n=1, ms=None),), (Row(n=2, ms=None),)]",
        "[(('/',), (3, None))]",
        "None",
    ]


def test_a_state_of_a_processor_is_left_behind_only_by_a_word() -> None:
    before, after = spec_of(Saying(init=older)), spec_of(Saying(init=lambda self: None))
    found = judged("node", "checkpoint 1", state_text(before), state_text(after), state_rules(after))
    assert "in a StatefulProcessor is deleteIfExists('" in str(found.refusal)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("a STRING, b INT", "(a: large_string, b: int32)"),
        ("a INT, b INT, c INT", "(a: int32, b: int32, c: int32)"),
        ("a INT, b BOOLEAN", "(a: int32, b: bool)"),
        ("a INT, b TINYINT", "(a: int32, b: int8)"),
        ("a INT, b BINARY", "(a: int32, b: large_binary)"),
        ("a BIGINT, b SMALLINT", None),
    ],
)
@pytest.mark.parametrize("call", ["containsKey", "keys", "updateValue"])
def test_keys_of_several_fields_that_changed_are_told(keys: str, said: str | None, call: str) -> None:
    def declare(keys: str) -> Callable[[Any], None]:
        return lambda self: setattr(self, "m", self.handle.getMapState("m", keys, "n INT"))

    def put(self: Any, key: Any, rows: Any, times: Any) -> list[Any]:
        self.m.updateValue((1, 300), (5,))
        return []

    def use(self: Any, key: Any, rows: Any, times: Any) -> list[Any]:
        given = {"a STRING, b INT": ("1", 300), "a INT, b INT, c INT": (1, 2, 3), "a INT, b BOOLEAN": (1, True)}
        one = {**given, "a INT, b TINYINT": (1, 2), "a INT, b BINARY": (1, b"x")}.get(keys, (1, 300))
        arguments = {"containsKey": (one,), "keys": (), "updateValue": (one, (6,))}[call]
        getattr(self.m, call)(*arguments)
        return [dict(self.m.iterator())]

    first = Harness(spec_of(Saying(init=declare("a INT, b INT"), rows=put)))
    first.send(visits(("a", "/", 1)))
    run = Harness(spec_of(Saying(init=declare(keys), rows=use)), [first.snapshot()])
    if said is None:
        run.send(visits(("a", "/", 1)))
        (found,) = (row["said"] for row in run.out.rows())
        assert found == str({(1, 300): (6 if call == "updateValue" else 5,)})
        return
    with pytest.raises(UserFunctionError) as caught:
        run.send(visits(("a", "/", 1)))
    assert "map state 'm' of operator 'node' has the key (1, 300), which an older version" in str(caught.value)
    assert f"declared as {said} now; give the state another name" in str(caught.value)


def test_a_state_is_deleted_in_init_only() -> None:
    run = Harness(spec_of(Saying(rows=lambda self, *_: self.handle.deleteIfExists("old"))))
    with pytest.raises(UserFunctionError, match=r"deleteIfExists\('old'\) can only be called in init\(\)"):
        run.send(visits(("a", "/", 1)))


# -- the same as in PySpark -------------------------------------------------------------------------------------------


def history(seed: int) -> list[Any]:
    """Batches and watermarks; nothing late."""
    dice, now, found = random.Random(seed), 0, []
    for _ in range(30):
        rows = []
        for _ in range(dice.randrange(1, 6)):
            now += dice.choice((0, 100, 3_000, GAP_MS + 1))
            rows.append((dice.choice("abc"), dice.choice("xyz"), now + 1))
        found += [rows, now - dice.randrange(GAP_MS)]
    return found


@each
@pytest.mark.parametrize("seed", range(5))
def test_a_history_is_that_of_pysparks_own_tester(form: str, seed: int) -> None:
    tester = TwsTester(FORMS[form](), timeMode="eventTime", eventTimeExtractor=lambda row: row.ms)
    run, watermark = Harness(sessions(form)), -1
    for step in history(seed):
        expected: list[Any] = []
        if isinstance(step, int):
            if step <= max(watermark, 0):
                continue
            watermark = step
            expected = as_rows(tester.setWatermark(step))
            run.operator.on_watermark(step)
        else:
            batch = visits(*(row for row in step if row[2] > watermark))
            if batch.num_rows == 0:
                continue
            run.send(batch)
            frame = batch.to_pandas()
            for user in dict.fromkeys(frame["user"]):
                part = frame[frame["user"] == user].reset_index(drop=True)
                if form == "pandas":
                    expected += as_rows(tester.testInPandas(user, part))
                else:
                    expected += as_rows(tester.test(user, [Row(**row) for row in part.to_dict("records")]))
        found = run.out.rows()
        run.out.batches.clear()
        assert sorted(map(str, found)) == sorted(map(str, expected))


def as_rows(found: Any) -> list[dict[str, Any]]:
    return found.to_dict("records") if isinstance(found, pd.DataFrame) else [row.asDict() for row in found]


# -- in a pipeline ----------------------------------------------------------------------------------------------------


def made() -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("test")
    rows = [{"user": "a", "page": "p", "ms": 1, "amount": 1.0}]
    return pipeline, pipeline.source(hg.FromRows(rows)).with_timestamps("ms")


def test_both_verbs_have_the_schema_of_their_output_and_derived_names() -> None:
    pipeline, rows = made()
    by_row = rows.key_by("user").transform_with_state(Sessions(), OUTPUT, time_mode="eventTime")
    frames = by_row.key_by("user").transform_with_state_in_pandas(Saying(), {"said": pa.string()}, name="more")
    frames.sink(hg.Discard())
    assert by_row.columns == ["user", "what", "n", "pages", "total"]
    assert frames.columns == ["said"]
    assert [str(node.name) for node in pipeline.definition().graph.nodes if "state" in str(node.name)] == [
        "transform-with-state"
    ]


def test_event_time_goes_on_in_a_column_of_the_results() -> None:
    _, rows = made()
    keyed = rows.key_by("user")
    out = "user STRING, at TIMESTAMP, ms BIGINT"
    assert keyed.transform_with_state(Saying(), out)._time_column == "ms"
    assert keyed.transform_with_state(Saying(), "user STRING")._time_column is None
    chained = keyed.transform_with_state(Saying(), out, event_time_column="at")
    assert chained._time_column == "at"
    chained.key_by("user").window(hg.Tumbling("1m")).agg(pl.len())
    chained.key_by("user").transform_with_state(Saying(), out, time_mode="eventTime")
    for column, message in (("user", "must be a timestamp"), ("when", "there is no column 'when'")):
        with pytest.raises(UsageError, match=message):
            keyed.transform_with_state(Saying(), out, event_time_column=column)
    unkeyed = hg.Pipeline("other").source(hg.FromRows([{"user": "a"}])).key_by("user")
    with pytest.raises(UsageError, match="event_time_column needs event times"):
        unkeyed.transform_with_state(Saying(), out, event_time_column="at")


def test_where_a_processor_cannot_be_is_told() -> None:
    _, rows = made()
    with pytest.raises(UsageError, match="transform_with_state needs a key"):
        rows.transform_with_state(Sessions(), OUTPUT)
    with pytest.raises(
        UsageError,
        match="handleInputRows would never be called: a stateful processor of PySpark's is for transform_with_state",
    ):
        rows.key_by("user").process(Sessions())  # type: ignore[arg-type]

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        step = loop.transform_with_state(Saying(), "user STRING", time_mode="processingTime", name="step")
        return step, step

    with pytest.raises(UsageError, match="operator 'step' has a time mode, so it has timers, but is in loop 'trips'"):
        rows.key_by("user").iterate(body, name="trips")
