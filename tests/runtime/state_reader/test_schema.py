"""What the columns of stored states are called, and which are the key: told by the texts that operators write."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.snapshot import IN_FLIGHT_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX
from headgate.model.state_schema import StateIdentity
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
    for i, (shown, name) in enumerate(zip(shape.shown_keys, names, strict=True)):
        assert shown in (name, f"key{i}")
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
