"""State of an older program in every backend: what was restored is what plain Python makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.state.backends import NAMES, rows_in, sections_of, states
from tests.state.evolutions import Change, changes

from headgate.codec.snapshot import decode_sections, encode_sections
from headgate.errors import CorruptionError, UsageError
from headgate.model.schema_evolution import Misfit
from headgate.model.state_schema import read_type
from headgate.state.backend import Ownership, WindowBackend, WindowRows
from headgate.state.descriptors import (
    Evolution,
    KeyColumns,
    Section,
    StateDescriptor,
    StateKind,
    check_names,
    evolved_values,
    section_of,
    section_schema,
    state_identity,
    value_type,
)
from headgate.state.snapshot import encode_batches
from headgate.state.ttl import NEVER_MS, TTL

KEYS = KeyColumns(("user",), (pa.int64(),))
VALUE, LIST, MAP = StateKind.VALUE, StateKind.LIST, StateKind.MAP
PATH = "snapshot"


def descriptor(kind: StateKind, dtype: pa.DataType, **given: Any) -> StateDescriptor:
    key_type = pa.int64() if kind is MAP else None
    return StateDescriptor(given.pop("name", kind.value), kind, dtype, key_type, **given)


def payload(*found: tuple[Section, list[dict[str, Any]]]) -> dict[str, memoryview]:
    """Return sections with these rows, as an older program wrote them."""
    parts = {
        section.name: encode_batches(section.schema, [pa.RecordBatch.from_pylist(rows, schema=section.schema)])
        for section, rows in found
    }
    return decode_sections(b"".join(bytes(memoryview(part)) for part in encode_sections(parts)), PATH)


def restored(
    backend: str, form: str, descriptors: list[StateDescriptor], former: dict[str, memoryview], parallelism: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all states after a restore at ``parallelism``."""
    found: dict[str, list[dict[str, Any]]] = {}
    with states(backend) as worker:
        for subtask in range(parallelism):
            factory = worker.of("node", subtask, 128)
            made: Any = (factory.by_row if form == "row" else factory.by_column)(KEYS, descriptors)
            made.restore(former, PATH, Ownership(128, parallelism, subtask))
            made.end_restore()
            frozen = made.freeze()
            for name, rows in rows_in(sections_of(frozen)).items():
                found.setdefault(name, []).extend(rows)
            frozen.release()
    return {name: sorted(rows, key=lambda row: (row["key0"], row.get("map_key", 0))) for name, rows in found.items()}


@settings(max_examples=150)
@given(changes(), st.data())
def test_any_values_become_what_python_makes_of_them(found: tuple[Change, Evolution], data: st.DataObject) -> None:
    change, evolution = found
    evolution.check("state", change.new)
    values = data.draw(st.lists(st.none() | change.values, max_size=6))
    array = pa.array(values, change.old)
    for start in range(2):
        made = evolved_values(array[start:], change.new, evolution)
        assert not isinstance(made, Misfit), made
        made.validate(full=True)
        assert made.type == change.new
        assert made.to_pylist() == [change.then(value) for value in values[start:]]  # EV2
    again = evolved_values(pa.array([change.then(value) for value in values], change.new), change.new, evolution)
    assert not isinstance(again, Misfit), "what is as declared stays as it is"
    assert again.to_pylist() == [change.then(value) for value in values]


def test_nulls_stay_where_they_are_at_every_level() -> None:
    old = pa.struct([("gone", pa.int32()), ("in", pa.large_list(pa.struct([("a", pa.int32()), ("b", pa.int32())])))])
    new = pa.struct([("in", pa.large_list(pa.struct([("b", pa.int64()), ("c", pa.int64())])))])
    values = [None, {"gone": 1, "in": None}, {"gone": 1, "in": [None, {"a": 1, "b": 2}]}, {"gone": 1, "in": []}]
    wanted = [None, {"in": None}, {"in": [None, {"b": 2, "c": 7}]}, {"in": []}]
    for start in range(len(values)):
        found = evolved_values(pa.array(values, old)[start:], new, Evolution({"in.c": 7}))
        assert not isinstance(found, Misfit)
        assert found.to_pylist() == wanted[start:]


@given(changes())
def test_a_type_is_read_as_arrow_writes_it(found: tuple[Change, Evolution]) -> None:  # EV1
    for dtype in (found[0].old, found[0].new):
        assert read_type(str(dtype)) == value_type(dtype)
        assert str(value_type(dtype)) == str(dtype)


@pytest.mark.parametrize("form", ["row", "column"])
@pytest.mark.parametrize("backend", NAMES[:2])
def test_every_kind_of_state_in_every_backend_at_another_parallelism(backend: str, form: str) -> None:
    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    @given(changes(), st.data(), st.integers(1, 3))
    def run(found: tuple[Change, Evolution], data: st.DataObject, parallelism: int) -> None:
        change, evolution = found
        keys = data.draw(st.lists(st.integers(0, 99), max_size=5, unique=True))
        rows: dict[StateKind, list[dict[str, Any]]] = {
            VALUE: [{"key0": key, "value": data.draw(change.values)} for key in keys],
            LIST: [{"key0": key, "value": data.draw(change.values)} for key in keys for _ in range(key % 3)],
            MAP: [{"key0": key, "map_key": at, "value": data.draw(change.values)} for key in keys for at in range(2)],
        }
        old = [section_of(KEYS, descriptor(kind, change.old)) for kind in rows]
        new = [descriptor(kind, change.new, evolution=evolution) for kind in rows]
        made = restored(backend, form, new, payload(*zip(old, rows.values(), strict=True)), parallelism)
        for kind, found_rows in rows.items():
            expected = [{**row, "value": change.then(row["value"])} for row in found_rows]
            assert made.get(kind.value, []) == sorted(expected, key=lambda row: (row["key0"], row.get("map_key", 0)))

    run()


@pytest.mark.parametrize("form", ["row", "column"])
@pytest.mark.parametrize("backend", NAMES[:2])
def test_a_state_is_found_under_the_name_that_it_had(backend: str, form: str) -> None:  # EV7
    old = section_of(KEYS, descriptor(VALUE, pa.int32(), name="count"))
    former = payload((old, [{"key0": 1, "value": 7}]))
    total = descriptor(VALUE, pa.int64(), name="total", evolution=Evolution(renamed_from="count"))
    seen = descriptor(LIST, pa.int64(), name="seen", evolution=Evolution(starts_empty=True))
    found = restored(backend, form, [total, seen], former)
    assert found == {"total": [{"key0": 1, "value": 7}], "seen": []}
    later = payload((section_of(KEYS, total), [{"key0": 1, "value": 8}]))
    assert restored(backend, form, [total, seen], later)["total"] == [{"key0": 1, "value": 8}]
    with pytest.raises(CorruptionError, match="expected state 'lost', found states"):
        restored(backend, form, [descriptor(VALUE, pa.int32(), name="lost")], former)


@pytest.mark.parametrize("form", ["row", "column"])
def test_a_type_that_the_manifest_did_not_tell_is_refused_by_the_bytes(form: str) -> None:
    strange = [("a: int64, b", pa.int64())]
    former = payload((section_of(KEYS, descriptor(VALUE, pa.struct(strange))), []))
    new = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    assert read_type(str(pa.struct(strange))) == value_type(new), "it reads as something that it is not"
    with pytest.raises(CorruptionError, match="'a' was added and has no default"):
        restored("memory", form, [descriptor(VALUE, new)], former)


@pytest.mark.parametrize("form", ["row", "column"])
def test_keys_of_a_map_and_of_the_stream_never_change(form: str) -> None:  # EV6
    section = section_of(KEYS, descriptor(MAP, pa.int32()))
    for name in ("key0", "map_key"):
        schema = section.schema.set(section.schema.get_field_index(name), pa.field(name, pa.int32()))
        former = payload((Section(section.name, schema, section.key_names), []))
        with pytest.raises(CorruptionError, match=f"'{name}' never changes its type"):
            restored("memory", form, [descriptor(MAP, pa.int32())], former)


@pytest.mark.parametrize("form", ["row", "column"])
@pytest.mark.parametrize("had_ttl", [False, True])
def test_a_state_may_get_or_lose_a_ttl_at_the_same_time(form: str, had_ttl: bool) -> None:
    ttl = TTL("1h")
    old = section_of(KEYS, descriptor(VALUE, pa.int32(), ttl=ttl if had_ttl else None))
    row = {"key0": 1, "value": 7}
    former = payload((old, [{**row, "expires_ms": NEVER_MS} if had_ttl else row]))
    new = descriptor(VALUE, pa.int64(), ttl=None if had_ttl else ttl)
    found = restored("memory", form, [new], former)["value"]
    assert found == [row if had_ttl else {**row, "expires_ms": ttl.duration_ms}]


@pytest.mark.parametrize("backend", NAMES[:2])
def test_records_of_windows_are_converted_as_a_whole(backend: str) -> None:  # EV9
    schema = pa.schema([("n", pa.int32()), ("k", pa.int64()), ("gone", pa.int64())])
    old = Section("records", schema, ("k",))
    former = payload((old, [{"n": 1, "k": 5, "gone": 0}, {"n": None, "k": 6, "gone": 0}]))
    wide = pa.schema([("k", pa.int64()), ("m", pa.int64()), ("name", pa.large_string())])
    new = Section("records", wide, ("k",), Evolution({"name": "?"}, {"n": "m"}))

    def windows(section: Section) -> WindowBackend[list[pa.RecordBatch]]:
        keys = KeyColumns(("k",), (section.schema.field("k").type,))
        rows = WindowRows(section, lambda batch: np.zeros(batch.num_rows, np.int64))
        return worker.of("node", 0, 128).by_window(keys, rows)

    with states(backend) as worker:
        found = windows(new)
        found.restore(former, PATH, Ownership(128, 1, 0))
        rows = [tuple(row.values()) for batch in found.take(0) for row in batch.to_pylist()]
        assert sorted(rows) == [(5, 1, "?"), (6, None, "?")]
        for key in (pa.int32(), pa.float64()):
            other = Section("records", wide.set(0, pa.field("k", key)), ("k",), new.evolution)
            with pytest.raises(CorruptionError, match="the key column 'k' cannot change its type"):
                windows(other).restore(former, PATH, Ownership(128, 1, 0))


STRUCT = pa.struct([("a", pa.int64()), ("in", pa.large_list(pa.struct([("b", pa.int32())])))])


@pytest.mark.parametrize(
    ("evolution", "problem"),
    [
        (Evolution(defaults={"zip": 1}), "names the field 'zip', but the fields are a, in, in.b"),
        (Evolution(renamed={"a": "zip"}), "names the field 'zip', but"),
        (Evolution(renamed={"a": "in.b"}), "renamed from 'a', which is still a field of it"),
        (Evolution(renamed={"x": "a", "y": "a"}), "must name one old field for 'a'"),
        (Evolution(renamed={"in.x": "a"}), "'a' renamed from 'in.x', a field of another struct"),
        (Evolution(renamed={"x": "in.b"}), "'in.b' renamed from 'x', a field of another struct"),
        (Evolution(renamed={"was": "in", "in.x": "in.b"}), "'in.b' renamed from 'in.x', a field of another struct"),
        (Evolution(defaults={"in.b": 1 << 40}), "the default 1099511627776 of field 'in.b' does not fit int32"),
        (Evolution(defaults={"a": "text"}), "the default 'text' of field 'a' does not fit int64"),
    ],
)
def test_an_evolution_that_does_not_fit_the_type_is_refused(evolution: Evolution, problem: str) -> None:
    with pytest.raises(UsageError, match=r"^state 'x'") as told:
        evolution.check("state 'x'", STRUCT)
    assert problem in str(told.value)
    Evolution({"in.b": None, "a": 1}, {"in.old": "in.b"}).check("state 'x'", STRUCT)
    Evolution(renamed={"was": "in", "was.x": "in.b"}).check("state 'x'", STRUCT)


def test_what_is_no_evolution_is_refused() -> None:
    for wrong in ({"defaults": ["a"]}, {"renamed": {"a": 1}}, {"renamed": {1: "a"}}, {"renamed_from": ""}):
        with pytest.raises(UsageError, match="of an Evolution is"):
            Evolution(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "forgotten", "problem"),
    [
        ({"a": "b", "b": None}, set(), "'a' is said to be renamed from 'b', which is declared as well"),
        ({"a": "c", "b": "c"}, set(), "two are said to be renamed from 'c'"),
        ({"a": None}, {"a"}, "'a' is declared, and forget"),
        ({"a": "c"}, {"c"}, r"forget\('c'\) leaves that behind"),
    ],
)
def test_names_that_contradict_each_other_are_refused(
    declared: dict[str, str | None], forgotten: set[str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        check_names("operator 'x'", {name: Evolution(renamed_from=old) for name, old in declared.items()}, forgotten)
    check_names("operator 'x'", {"a": Evolution(renamed_from="c"), "b": Evolution()}, {"d"})


ID_AND_VALUE = KeyColumns(("id", "value"), (pa.int64(), pa.large_string()))
COUNT = StateDescriptor("count", StateKind.VALUE, pa.int64())
SEEN = StateDescriptor("seen", StateKind.LIST, pa.float64())
BY_NAME = StateDescriptor("by name", StateKind.MAP, pa.int64(), pa.large_string())


def test_the_identity_is_frozen_and_no_order_of_declaration_belongs_to_it() -> None:
    expected = (
        "keyed state(keys id: int64, value: large_string; map by name: large_string -> int64; value count: int64; "
        "list seen: double)"
    )
    assert (
        state_identity(ID_AND_VALUE, [COUNT, SEEN, BY_NAME])
        == state_identity(ID_AND_VALUE, [BY_NAME, COUNT, SEEN])
        == expected
    )
    assert state_identity(ID_AND_VALUE, []) == ""


def test_whatever_is_declared_otherwise_has_another_identity() -> None:
    others = [
        state_identity(ID_AND_VALUE, [COUNT]),
        state_identity(KeyColumns(("id",), (pa.int64(),)), [COUNT]),
        state_identity(KeyColumns(("id", "value"), (pa.int32(), pa.large_string())), [COUNT]),
        state_identity(ID_AND_VALUE, [StateDescriptor("count", StateKind.LIST, pa.int64())]),
        state_identity(ID_AND_VALUE, [StateDescriptor("count", StateKind.VALUE, pa.int32())]),
        state_identity(ID_AND_VALUE, [StateDescriptor("counts", StateKind.VALUE, pa.int64())]),
        state_identity(ID_AND_VALUE, [StateDescriptor("count", StateKind.MAP, pa.int64(), pa.int64())]),
        state_identity(ID_AND_VALUE, [StateDescriptor("count", StateKind.MAP, pa.int64(), pa.int32())]),
        state_identity(ID_AND_VALUE, [COUNT, SEEN]),
    ]
    assert len(set(others)) == len(others)


def test_columns_of_a_section_never_have_the_name_of_a_key_s_column() -> None:
    assert section_schema(ID_AND_VALUE, COUNT).names == ["key0", "key1", "value"]
    assert section_schema(ID_AND_VALUE, BY_NAME) == pa.schema(
        [("key0", pa.int64()), ("key1", pa.large_string()), ("map_key", pa.large_string()), ("value", pa.int64())]
    )
