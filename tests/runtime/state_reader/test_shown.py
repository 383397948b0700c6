"""Stored states as they are shown: names of columns and keys, timers with their times, what lived at the barrier."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.test_state import shown
from tests.operators.harness import Harness
from tests.operators.process.expiring_functions import FORMS, SCHEMA
from tests.operators.process.test_ttl import PUT, do
from tests.runtime.state_reader.written import Written, state

import headgate as hg
from headgate.codec.snapshot import IN_FLIGHT_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX
from headgate.errors import UsageError
from headgate.model.state_schema import StateIdentity
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS
from headgate.operators.process.connected_process import process_spec
from headgate.operators.reduction import ReduceSpec
from headgate.operators.windows.aligned_windows import window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate
from headgate.runtime.state_reader.schema import Kind, Shape, shape_of
from headgate.state.backend import TimeKind, timer_section
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, section_of, state_identity

NUMBER, TEXT = pa.int64(), pa.large_string()


def shape_named(text: str, prefix: str, name: str, schema: pa.Schema) -> Shape:
    return shape_of(StateIdentity(text), prefix, name, schema)


def declared(names: list[str], types: list[pa.DataType], kind: StateKind = StateKind.VALUE, more: str = "") -> Shape:
    keys = KeyColumns(tuple(names), tuple(types))
    state = StateDescriptor("s", kind, NUMBER, TEXT if kind is StateKind.MAP else None)
    other = StateDescriptor("before", StateKind.LIST, NUMBER)
    text = state_identity(keys, [state, other]) + more
    return shape_named(text, STATE_PREFIX, "s", section_of(keys, state).schema)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        (StateKind.VALUE, ["user", "part", "value"]),
        (StateKind.LIST, ["user", "part", "value"]),
        (StateKind.MAP, ["user", "part", "map_key", "value"]),
    ],
)
def test_keys_have_their_own_names(kind: StateKind, columns: list[str]) -> None:
    shape = declared(["user", "part"], [TEXT, pa.timestamp("us")], kind)
    assert (shape.kind.value, list(shape.names)) == (kind.value, columns)
    assert (shape.keys, shape.shown_keys) == (("key0", "key1"), ("user", "part"))
    assert shape.shown.names == columns
    assert shape.all.names == [*columns, "_subtask", "_key_group"]


def test_a_list_of_the_operator_is_no_list_of_its_keys() -> None:
    assert declared(["k"], [NUMBER], more="; operator state(list a: int64; list s: int64)").kind is Kind.VALUE


@pytest.mark.parametrize("name", ["value", "map_key", "_subtask", "_key_group"])
def test_a_key_that_is_called_as_another_column_keeps_its_position(name: str) -> None:
    shape = declared([name, "other"], [NUMBER, NUMBER], StateKind.MAP)
    assert list(shape.names) == ["key0", "other", "map_key", "value"]


def test_what_a_text_does_not_tell_is_shown_as_it_is_stored() -> None:
    schema = pa.schema([("key0", NUMBER), ("value", NUMBER)])
    shape = shape_named("keyed state(keys something newer)", STATE_PREFIX, "s", schema)
    assert (shape.names, shape.keys) == (("key0", "value"), ("key0",))
    assert shape_named("", STATE_PREFIX, "s", schema) == Shape(Kind.RECORDS, schema, (), ("key0", "value"))


@given(st.lists(st.tuples(st.text(min_size=1), st.sampled_from([NUMBER, TEXT, pa.bool_()])), min_size=1, max_size=4))
def test_names_are_told_apart_or_not_at_all(keys: list[tuple[str, pa.DataType]]) -> None:
    names = [name for name, _ in keys]
    shape = declared(names, [dtype for _, dtype in keys])
    for i, (found, name) in enumerate(zip(shape.shown_keys, names, strict=True)):
        assert found in (name, f"key{i}")
    if not {"value", "_subtask", "_key_group"} & {*names}:
        assert list(shape.shown_keys) == names


NAMES = ["k", "k, n", "n"]


@pytest.mark.parametrize("keys", [("k",), ("n", "k"), ("k, n", "n"), ("k, n",), ("k", "n", "k, n")])
def test_keys_of_records_are_found_whatever_they_are_called(keys: tuple[str, ...]) -> None:
    schema = pa.schema([*((name, NUMBER) for name in NAMES), ("ts", NUMBER)])
    kept = window_operators(
        WindowedAggregate(keys, "ts", tumbling(20), (pl.col("ts").n_unique(),)), schema, "node"
    ).window
    shape = shape_named(kept.state_text(), STATE_PREFIX, "records", kept.kept)
    assert (shape.kind, shape.keys) == (Kind.WINDOW_RECORDS, keys)


def merged(key: str) -> Shape:
    schema = pa.schema([(key, NUMBER), ("n", NUMBER), ("ts", NUMBER)])
    window = window_operators(
        WindowedAggregate((key,), "ts", tumbling(20), (pl.col("n").sum(),)), schema, "node"
    ).window
    return shape_named(window.state_text(), STATE_PREFIX, "windows", window.plan.partial_schema())


def test_windows_are_shown_by_their_times() -> None:
    shape = merged("key")
    assert (shape.kind, shape.keys, shape.window_ms) == (Kind.WINDOW_RESULTS, ("key",), 20)
    assert shape.shown.names == ["key", "window_start", "window_end", "rows", "partial_0"]


@pytest.mark.parametrize("key", ["rows", "partial_0"])
def test_windows_whose_key_has_such_a_name_are_shown_as_they_are_stored(key: str) -> None:
    shape = merged(key)
    assert (shape.keys, shape.window_ms) == ((key,), 0)
    assert shape.shown.names == [key, "__window", "__rows", "__partial_0"]


def test_state_without_a_key_says_which_subtask_had_it() -> None:
    schema = pa.schema([("value", NUMBER)])
    for prefix, kind in (
        (LISTS_PREFIX, Kind.OPERATOR_LIST),
        (UNION_PREFIX, Kind.OPERATOR_UNION),
        (IN_FLIGHT_PREFIX, Kind.IN_FLIGHT),
    ):
        shape = shape_named("whatever", prefix, "s", schema)
        assert (shape.kind, shape.keys) == (kind, ())
        assert shape.shown.names == shape.all.names == ["value", "_subtask"]


@pytest.mark.parametrize("kind", list(TimeKind))
@pytest.mark.parametrize("states", [[], [StateDescriptor("s", StateKind.VALUE, NUMBER)]])
def test_timers_are_shown_by_their_keys_and_times(kind: TimeKind, states: list[StateDescriptor]) -> None:
    keys = KeyColumns(("user", "part"), (TEXT, pa.timestamp("us")))
    section = timer_section(keys, kind)
    shape = shape_named(state_identity(keys, states, has_timers=True), STATE_PREFIX, section.name, section.schema)
    assert shape.kind.value == kind.value.replace("_", "-") + " timers"
    assert (shape.keys, shape.shown_keys) == (("key0", "key1"), ("user", "part"))
    assert shape.shown.names == ["user", "part", "time_ms", "time"]
    assert shape.shown.field("time").type == pa.timestamp("us")


@pytest.mark.parametrize("name", ["time", "time_ms", "_subtask"])
def test_a_key_of_timers_that_is_called_as_another_column_keeps_its_position(name: str) -> None:
    keys = KeyColumns((name, "other"), (NUMBER, NUMBER))
    section = timer_section(keys, TimeKind.EVENT_TIME)
    shape = shape_named(state_identity(keys, [], has_timers=True), STATE_PREFIX, section.name, section.schema)
    assert shape.shown.names == ["key0", "other", "time_ms", "time"]


def with_timers(root: Path, form: str, *, has_state: bool = True) -> Written:
    """Return a checkpoint of a function that has registered some timers, also for times that are no dates."""
    rows = [(1, 1_700_000_000_123, 0), (2, WATERMARK_MAX_MS, 0), (2, 0, -1), (3, WATERMARK_MIN_MS, 5)]
    timers = pa.RecordBatch.from_pylist([dict(zip(TIMED, row, strict=True)) for row in rows], TIMED_SCHEMA)
    spec = process_spec("node", ("key",), {"row": TimedByRow, "batch": TimedByBatch}[form](has_state), TIMED_SCHEMA)
    run = Harness(spec)
    run.send(timers)
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(root)
    written.complete(1, {"node": spec.state_text()}, [state(frozen)])  # type: ignore[attr-defined]
    return written


TIMED = ("key", "event", "processing")
TIMED_SCHEMA = pa.schema([(name, pa.int64()) for name in TIMED])


class TimedByRow(hg.ProcessFunction):
    def __init__(self, has_state: bool) -> None:
        self.has_state = has_state

    def open(self, state: hg.StateHandle) -> None:
        self.last = state.value("last", pa.int64()) if self.has_state else None

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        if self.last is not None:
            self.last.put(row["event"])
        context.timers.register_event_time(row["event"])
        context.timers.register_processing_time(row["processing"])

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        raise AssertionError


class TimedByBatch(hg.BatchProcessFunction):
    def __init__(self, has_state: bool) -> None:
        self.has_state = has_state

    def open(self, state: hg.BatchStateHandle) -> None:
        self.last = state.value("last", pa.int64()) if self.has_state else None

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        if self.last is not None:
            self.last.put(batch["event"])
        context.timers.register_event_time(batch["event"])
        context.timers.register_processing_time(batch["processing"])

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> None:
        raise AssertionError


@pytest.mark.parametrize("form", ["row", "batch"])
def test_timers_can_be_looked_at(form: str, tmp_path: Path) -> None:
    path = with_timers(tmp_path, form).path
    catalog = hg.state_catalog(path).filter(pl.col("state").str.starts_with("headgate.timers."))
    assert catalog.select("state", "kind", "rows").rows() == [
        ("headgate.timers.event_time", "event-time timers", 4),
        ("headgate.timers.processing_time", "processing-time timers", 4),
    ]
    assert catalog["keys"].to_list() == [["key"], ["key"]]
    found = hg.read_state(path, "node", "headgate.timers.event_time")
    assert found.columns == ["key", "time_ms", "time"]
    assert sorted(found.rows()) == [
        (1, 1_700_000_000_123, datetime(2023, 11, 14, 22, 13, 20, 123_000)),
        (2, 0, datetime(1970, 1, 1)),
        (2, WATERMARK_MAX_MS, None),
        (3, WATERMARK_MIN_MS, None),
    ]
    some = hg.read_state(path, "node", "headgate.timers.processing_time", keys=[3], columns=["time", "key"])
    assert some.rows() == [(datetime(1970, 1, 1, 0, 0, 0, 5_000), 3)]


def test_timers_do_not_hide_which_state_is_meant(tmp_path: Path) -> None:
    path = with_timers(tmp_path / "state", "row").path
    assert hg.read_state(path, "node").columns == ["key", "value"]
    path = with_timers(tmp_path / "timers", "row", has_state=False).path
    with pytest.raises(UsageError, match=r"several states: .*headgate\.timers\.event_time, .*; name one"):
        hg.read_state(path, "node")


def test_the_command_line_shows_timers(tmp_path: Path) -> None:
    path = with_timers(tmp_path / "state", "batch").path
    text = shown(path, "node", "headgate.timers.event_time", "--key", 1)
    assert "1700000000123" in text
    assert "2023-11-14 22:13:20.123" in text
    assert shown(path, "node").splitlines()[0].split()[:3] != ["operator", "state", "kind"], "the state is shown"
    both = shown(with_timers(tmp_path / "timers", "row", has_state=False).path, "node", "--json")
    kinds = [one["kind"] for one in json.loads(both)["states"]]
    assert kinds == ["event-time timers", "processing-time timers"]


TTL = hg.TTL("10ms")
NOW = datetime(2023, 11, 14, 22, 13, 20) + timedelta(seconds=1)  # what a harness says when it begins


def with_ttl(root: Path, form: str, *, ttl: hg.TTL | None = TTL, key: str = "key") -> Written:
    """Return a checkpoint in which the state of key 1 has expired, and that of key 2 lives for 4 ms."""
    schema = SCHEMA.set(0, SCHEMA.field(0).with_name(key))
    spec = process_spec("node", (key,), FORMS[form](ttl), schema)
    run = Harness(spec)
    if key == "key":
        do(run, *PUT, key=1)
        run.now_ms += 6
        do(run, *PUT, key=2)
        run.now_ms += 4
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(root)
    written.complete(1, {"node": spec.state_text()}, [state(frozen)])  # type: ignore[attr-defined]
    return written


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_had_expired_is_not_shown_and_until_when_the_rest_lives_is_if_asked(tmp_path: Path, form: str) -> None:
    path = with_ttl(tmp_path, form).path
    rows = hg.state_catalog(path).filter(state="map").rows(named=True)
    assert [(row["kind"], row["rows"], row["columns"]) for row in rows] == [
        ("map", 1, "key: int64, map_key: int64, value: int64")
    ]
    assert hg.read_state(path, "node", "value").rows() == [(2, 7)]
    assert hg.read_state(path, "node", "list", columns=["value", "_expires"]).rows() == [
        (7, NOW + timedelta(milliseconds=16))
    ]
    assert hg.read_state(path, "node", "map", keys=[1]).rows() == []


def test_without_a_ttl_there_is_no_such_column(tmp_path: Path) -> None:
    path = with_ttl(tmp_path, "row", ttl=None).path
    assert hg.read_state(path, "node", "value").rows() == [(1, 7), (2, 7)]
    with pytest.raises(UsageError, match="has no column '_expires'; it has key, value, _subtask, _key_group"):
        hg.read_state(path, "node", "value", columns=["_expires"])


def test_a_key_that_is_called_as_the_expiry_keeps_its_position(tmp_path: Path) -> None:
    for ttl, name in ((hg.TTL("10ms"), "key0"), (None, "_expires")):
        path = with_ttl(tmp_path / name, "row", ttl=ttl, key="_expires").path
        assert hg.read_state(path, "node", "value").columns == [name, "value"]


def test_the_command_line_chooses_rows_by_their_expiry(tmp_path: Path) -> None:
    path = str(with_ttl(tmp_path, "batch").path)
    asked = ("node", "value", "--columns", "key,_expires", "--json")
    found = [json.loads(line) for line in shown(path, *asked).splitlines()]
    assert [row["key"] for row in found] == [2]
    assert "22:13:21.016" in found[0]["_expires"]
    early = "_expires < TIMESTAMP '2023-11-14 22:13:21.016'"
    assert shown(path, *asked, "--where", early) == ""


def test_a_column_of_records_that_is_called_as_the_expiry_is_a_column(tmp_path: Path) -> None:
    schema = pa.schema([("key", pa.int64()), ("expires_ms", pa.int64())])
    spec = ReduceSpec(("key",), lambda total, row: row, schema)
    run = Harness(spec)
    run.send(pa.record_batch([[1], [5]], schema))
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(tmp_path)
    written.complete(1, {"node": spec.state_text()}, [state(frozen)])
    assert hg.read_state(written.path, "node").to_dicts() == [{"key": 1, "value": {"expires_ms": 5}}]
