"""The text of a state's identity: as it always was, and what can be told from it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.model.state_schema import (
    NESTED_MAX,
    DeclaredState,
    Form,
    FunctionParts,
    ListOf,
    Plain,
    RecordParts,
    StateIdentity,
    StructOf,
    ValueType,
    columns_text,
    declared,
    inner_paths,
    parts_of,
    read_columns,
    read_type,
)

KEYS = [("user", "large_string"), ("part", "int64")]
COUNT = declared("value", "count", "int64")
LISTS = StateIdentity.of_lists([declared("list", "seen", "int64"), declared("union", "all", "int64")])
COUNTED = StateIdentity.of_keyed(KEYS, [COUNT], has_timers=True)
TIMED = StateIdentity.of_keyed(KEYS, [], has_timers=True)
MERGED = StateIdentity.of_windows(Form.WINDOW_RESULTS, "tumbling 20 ms", "ts", KEYS, ["sum int64 n"])
KEPT = StateIdentity.of_windows(Form.WINDOW_RECORDS, "tumbling 20 ms", "ts", KEYS, ["n: int64"])


@pytest.mark.parametrize(
    ("identity", "form", "text"),
    [
        (COUNTED, Form.KEYED, "keyed state(keys user: large_string, part: int64; value count: int64)"),
        (TIMED, Form.KEYED, "keyed state(keys user: large_string, part: int64; timers)"),
        (StateIdentity.of_keyed(KEYS, [], has_timers=False), Form.OTHER, ""),
        (LISTS, Form.OTHER, "operator state(list seen: int64; union all: int64)"),
        (
            MERGED,
            Form.WINDOW_RESULTS,
            "window-merge(tumbling 20 ms on ts; keys user: large_string, part: int64; sum int64 n)",
        ),
        (
            KEPT,
            Form.WINDOW_RECORDS,
            "window-buffer(tumbling 20 ms on ts; keys user: large_string, part: int64; n: int64)",
        ),
    ],
)
def test_a_text_is_the_same_in_every_version(identity: StateIdentity, form: Form, text: str) -> None:
    assert (identity.text, identity.form, bool(identity)) == (text, form, text != "")


def test_what_a_text_says_is_read_from_it() -> None:
    assert COUNTED.beside(LISTS).key_names(["large_string", "int64"]) == ("user", "part")
    assert COUNTED.key_names(["int64", "int64"]) == ()
    assert KEPT.keys_among({"part": "int64", "user": "large_string"}) == ("user", "part")
    assert (MERGED.window_ms, KEPT.window_ms) == (20, 0)
    assert not COUNTED.beside(LISTS).declares("list", "seen"), "a list of the operator has no key"


def test_timers_are_all_that_may_be_added() -> None:  # TM6
    nothing = StateIdentity("")
    assert TIMED.adds_timers_to(nothing)
    assert TIMED.beside(LISTS).adds_timers_to(LISTS)
    assert not TIMED.beside(LISTS).adds_timers_to(nothing)
    assert not COUNTED.adds_timers_to(nothing)


WORDS = (
    *(form.value for form in Form),
    *("operator state(", "timers", "value ", "list ", "map ", "union ", "columns ", "keys ", "tumbling 5 ms on t"),
    *(
        "; ",
        ", ",
        ": ",
        " -> ",
        ")",
        "(",
        "<",
        ">",
        "large_list<item: ",
        "struct<",
        "int64",
        "timestamp[us]",
        "a",
        "ä\n",
    ),
)
"""What texts are made of: so most of them nearly read as something."""

TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=2), max_size=16).map("".join)
NAMES = st.text("abcä_ .()0", min_size=1, max_size=4)
PLAIN = st.sampled_from(["int64", "timestamp[us]", "large_string", "bool"]).map(Plain)


def of_others(inner: st.SearchStrategy[ValueType]) -> st.SearchStrategy[ValueType]:
    fields = st.lists(st.tuples(NAMES, inner), max_size=3).map(tuple)
    return inner.map(ListOf) | fields.map(StructOf)


TYPES: st.SearchStrategy[ValueType] = st.recursive(PLAIN, of_others, max_leaves=8)


def lists_in_each_other(depth: int) -> str:
    return "large_list<item: " * depth + "int64" + ">" * depth


def structs_in_each_other(depth: int) -> str:
    return "struct<a: " * depth + "int64" + ">" * depth


@given(TYPES)
def test_a_type_reads_as_what_was_written(dtype: ValueType) -> None:
    assert read_type(str(dtype)) == dtype


@given(TEXTS)
@example(lists_in_each_other(20_000))
@example(structs_in_each_other(20_000))
@example("large_list<item: " * 20_000)
def test_any_text_is_a_type_or_none(text: str) -> None:  # EV1
    found, columns = read_type(text), read_columns(text)
    if found is not None:
        assert read_type(str(found)) == found
        assert all(path for path, _ in inner_paths(found))
    if columns is not None:
        assert read_columns(columns_text(columns)) == columns


def test_types_are_nested_as_deeply_as_anybody_needs() -> None:
    for written in (lists_in_each_other, structs_in_each_other):
        found = read_type(written(NESTED_MAX))
        assert str(found) == written(NESTED_MAX)
        assert read_type(written(NESTED_MAX + 1)) is None


@given(TEXTS)
@example(f"{Form.KEYED.value}k: int64; value v: {lists_in_each_other(20_000)})")
@example(f"{Form.KEYED.value}k: int64; value v: {structs_in_each_other(20_000)})")
def test_any_text_of_a_state_has_parts_or_none(text: str) -> None:  # EV1
    found = parts_of(StateIdentity(text))
    assert found is None or isinstance(found, FunctionParts | RecordParts)
    if isinstance(found, FunctionParts):
        assert all(isinstance(state, DeclaredState) for state in (*found.states, *found.lists))


@given(st.sampled_from([Form.KEYED, Form.WINDOW_RECORDS, Form.OTHER]), st.lists(TEXTS, max_size=3), st.data())
def test_a_text_that_begins_as_a_form_has_parts_or_none(form: Form, rest: list[str], data: st.DataObject) -> None:
    body = "; ".join(rest)
    text = form.value + body[: data.draw(st.integers(0, len(body)))] + data.draw(st.sampled_from(["", ")", ")\n"]))
    found = parts_of(StateIdentity(text))
    assert found is None or isinstance(found, FunctionParts | RecordParts)
