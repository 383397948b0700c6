from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness, encoded

from headgate.errors import BadRecord, CorruptionError, UsageError
from headgate.operators.keys import partition
from headgate.operators.process.row_process import (
    ProcessContext,
    ProcessFunction,
    ProcessSpec,
    StateHandle,
    row_process_spec,
)
from headgate.operators.user_functions import UserFunctionError

SCHEMA = pa.schema([("key", pa.large_string()), ("n", pa.int64())])
SEEN = pa.schema([("key", pa.large_string()), ("state", pa.large_string())])
POINT = pa.struct([("x", pa.int64()), ("tags", pa.large_list(pa.large_string()))])


class Mutator(ProcessFunction):
    """Does what ``n`` says to its states and tells all that the key has."""

    schema = SEEN

    def open(self, state: StateHandle) -> None:
        self.value = state.value("value", POINT)
        self.list = state.list("list", POINT)
        self.map = state.map("map", pa.string(), POINT)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Iterable[dict[str, Any]]:
        n = row["n"]
        match n % 10:
            case 0:
                self.value.put(point(n))
            case 1:
                self.value.clear()
            case 2:
                self.list.append(point(n))
            case 3:
                self.list.extend([point(n), point(n + 1)])
            case 4:
                self.list.put([point(n)] * (n % 3))
            case 5:
                self.list.clear()
            case 6:
                self.map.put(f"m{n % 7}", point(n))
            case 7:
                self.map.remove(f"m{n % 7}")
            case 8:
                self.map.clear()
            case 9:
                for found in (self.value.get(), *self.list.get(), *(v for _, v in self.map.items())):
                    if found:
                        found["tags"].append("changed outside")
        yield {"key": context.key, "state": self.all()}

    def all(self) -> str:
        return repr((self.value.get(), self.list.get(), sorted(self.map.items())))

    def on_round(self, round: int, context: ProcessContext) -> Iterable[dict[str, Any]]:
        yield {"key": context.key, "state": f"{round}: {self.all()}"}


def point(n: int) -> dict[str, Any]:
    return {"x": n, "tags": [str(n)]}


class Model:
    """The same with plain dicts."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {}

    def process(self, key: str, n: int) -> str:
        value, elements, entries = self.keys.setdefault(key, ([None], [], {}))
        match n % 10:
            case 0 | 1:
                value[0] = point(n) if n % 10 == 0 else None
            case 2:
                elements.append(point(n))
            case 3:
                elements += [point(n), point(n + 1)]
            case 4 | 5:
                elements[:] = [point(n)] * (n % 3) if n % 10 == 4 else []
            case 6:
                entries[f"m{n % 7}"] = point(n)
            case 7:
                entries.pop(f"m{n % 7}", None)
            case 8:
                entries.clear()
        return self.all(key)

    def all(self, key: str) -> str:
        value, elements, entries = self.keys[key]
        return repr((value[0], elements, sorted(entries.items())))

    def living(self) -> list[str]:
        return sorted(key for key, (value, elements, entries) in self.keys.items() if value[0] or elements or entries)


def spec_of(function: ProcessFunction, keys: tuple[str, ...] = ("key",), schema: pa.Schema = SCHEMA) -> ProcessSpec:
    return row_process_spec("node", keys, function, schema)


MUTATOR = spec_of(Mutator())


def batch(*rows: tuple[str, int]) -> pa.RecordBatch:
    return pa.record_batch([[r[0] for r in rows], [r[1] for r in rows]], schema=SCHEMA)


def told(run: Harness) -> list[tuple[str, str]]:
    return [(row["key"], row["state"]) for row in run.out.rows()]


def payload(frozen: Any) -> bytes:
    return b"".join(bytes(memoryview(b)) for b in frozen.encode())


@settings(max_examples=80)
@given(rows=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 69)), min_size=1, max_size=60), data=st.data())
def test_every_kind_of_state_does_what_plain_dicts_do_with_snapshots_anywhere(
    rows: list[tuple[str, int]], data: st.DataObject
) -> None:
    run, model, at = Harness(MUTATOR), Model(), 0
    held: list[tuple[Any, Model]] = []
    while at < len(rows):
        part = rows[at : at + data.draw(st.integers(1, 8))]
        at += len(part)
        run.out.batches.clear()
        run.send(batch(*part))
        assert told(run) == [(key, model.process(key, n)) for key, n in part]
        match data.draw(st.sampled_from(["go on", "freeze", "freeze", "write", "forget", "restore"])):
            case "freeze":
                held.append((run.operator.freeze(), copy.deepcopy(model)))
            case "write" if held:
                check_restored(*held.pop(data.draw(st.integers(0, len(held) - 1))))
            case "forget":
                held.clear()
            case "restore":
                run = Harness(MUTATOR, [encoded(run.operator, run.context)])
    for frozen, then in held:
        check_restored(frozen, then)


def check_restored(frozen: Any, model: Model) -> None:
    state = type(Harness(MUTATOR).snapshot())(0, 1, memoryview(payload(frozen)))
    run = Harness(MUTATOR, [state])
    run.operator.on_round(3)
    assert sorted(told(run)) == [(key, f"3: {model.all(key)}") for key in model.living()]


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.text("abcdefgh", max_size=2), st.integers(0, 69)), min_size=1, max_size=60),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
)
def test_state_of_p_subtasks_restores_into_q(rows: list[tuple[str, int]], before: int, after: int) -> None:
    model = Model()
    old = [Harness(MUTATOR, subtask=(i, before)) for i in range(before)]
    for run, part in zip(old, partition(batch(*rows), ["key"], 128, before), strict=True):
        if part is not None:
            run.send(part)
    for key, n in rows:
        model.process(key, n)
    states = [run.snapshot() for run in old]
    new = [Harness(MUTATOR, states, subtask=(i, after)) for i in range(after)]
    for run in new:
        run.operator.on_round(0)
    assert sorted(pair for run in new for pair in told(run)) == [(k, f"0: {model.all(k)}") for k in model.living()]
    living = batch(*((key, 9) for key in model.living())) if model.living() else None
    for run, part in zip(new, partition(living, ["key"], 128, after) if living else [None] * after, strict=True):
        assert len(told(run)) == (0 if part is None else part.num_rows)


def test_a_cleared_key_leaves_nothing_in_the_snapshot() -> None:
    empty = payload(Harness(MUTATOR).operator.freeze())
    run = Harness(MUTATOR)
    run.send(batch(*((key, n) for key in "abc" for n in (0, 2, 6))))
    full = run.operator.freeze()
    run.send(batch(*((key, n) for key in "abc" for n in (1, 5, 27))))
    assert payload(run.operator.freeze()) == empty
    assert len(payload(full)) > len(empty)
    run.operator.on_round(1)
    assert len(told(run)) == 18


def test_a_list_changed_after_two_barriers_does_not_change_the_older_snapshot() -> None:
    run = Harness(MUTATOR)
    run.send(batch(("a", 2)))
    first = run.operator.freeze()
    second = run.operator.freeze()
    written = payload(second)
    run.send(batch(("a", 12)))
    assert payload(first) == written


def test_two_subtasks_share_neither_function_nor_state() -> None:
    left, right = Harness(MUTATOR, subtask=(0, 2)), Harness(MUTATOR, subtask=(1, 2))
    left.send(batch(("a", 0)))
    right.send(batch(("a", 9)))
    assert told(right) == [("a", "(None, [], [])")]
    assert not hasattr(MUTATOR.function, "value")


def test_keys_of_several_columns_are_tuples_and_results_may_be_none() -> None:
    class Last(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            self.last = state.value("last", int)

        def process(self, row: dict[str, Any], context: ProcessContext) -> list[dict[str, Any]] | None:
            assert context.key == (row["key"], row["n"])
            times = self.last.get(0) + 1
            self.last.put(times)
            return [row] if times == 2 else None

    spec = spec_of(Last(), ("key", "n"))
    run = Harness(spec)
    run.send(batch(("a", 1), ("a", 2), ("b", 1)))
    run = Harness(spec, [run.snapshot()])
    run.send(batch(("a", 2)))
    assert run.out.rows() == [{"key": "a", "n": 2}]


def test_changing_what_was_got_or_put_does_not_change_state() -> None:
    class Changing(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            self.numbers = state.list("numbers", pa.int64())
            self.point = state.value("point", POINT)

        def process(self, row: dict[str, Any], context: ProcessContext) -> None:
            given_numbers, given_point = [1, 2], point(1)
            self.numbers.put(given_numbers)
            self.point.put(given_point)
            given_numbers.append(3)
            given_point["tags"].append("x")
            self.numbers.get().append(4)
            self.point.get()["tags"].append("y")
            assert (self.numbers.get(), self.point.get(), len(self.numbers)) == ([1, 2], point(1), 2)

    Harness(spec_of(Changing())).send(batch(("a", 1)))


class Putting(ProcessFunction):
    """Puts what its test wants into one of its states."""

    def __init__(self, what: str, value: Any) -> None:
        self.what = what
        self.given = value

    def open(self, state: StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.point = state.value("point", POINT)
        self.edges = state.list("edges", pa.int32())
        self.seen = state.map("seen", pa.float64(), pa.bool_())

    def process(self, row: dict[str, Any], context: ProcessContext) -> None:
        match self.what:
            case "count":
                self.count.put(self.given)
            case "point":
                self.point.put(self.given)
            case "edges":
                self.edges.append(self.given)
            case "seen key":
                self.seen.put(self.given, True)
            case "seen":
                self.seen.put(1.0, self.given)


@pytest.mark.parametrize(
    ("what", "value", "problem"),
    [
        ("count", "x", "state 'count' of operator 'node' holds int64, but was given str 'x'"),
        ("count", 1 << 63, "state 'count' of operator 'node' holds int64, but was given int 9223372036854775808"),
        ("point", {"x": 1}, "state 'point' .* but was given dict .*a dict with the fields"),
        ("point", {"x": 1, "tags": "abc"}, "but was given dict .*a list is needed"),
        ("edges", None, "state 'edges' of operator 'node' holds int32, but was given NoneType None"),
        ("edges", 1 << 31, "state 'edges' of operator 'node' holds int32"),
        ("seen key", float("nan"), "has keys of type double, but was given the key float nan"),
        ("seen key", None, "has keys of type double, but was given the key NoneType"),
        ("seen", 3.5, "state 'seen' of operator 'node' holds bool, but was given float 3.5"),
    ],
)
def test_a_value_that_does_not_fit_names_operator_state_and_row(what: str, value: Any, problem: str) -> None:
    run = Harness(spec_of(Putting(what, value)))
    with pytest.raises(UserFunctionError, match=problem) as caught:
        run.send(batch(("a", 7)))
    assert "operator 'node'" in str(caught.value)
    assert "'n': 7" in caught.value.record


def test_a_result_that_does_not_fit_is_a_bad_record() -> None:
    class Wrong(ProcessFunction):
        def process(self, row: dict[str, Any], context: ProcessContext) -> Iterator[dict[str, Any]]:
            yield row
            yield {"key": "b", "n": "x"}

    run = Harness(spec_of(Wrong()), diverts=True)
    run.send(batch(("a", 1)))
    assert run.out.rows() == [{"key": "a", "n": 1}]
    assert [bad["problem"] for bad in run.out.bad] == ["the function returned str 'x' for field 'n', which is int64"]
    with pytest.raises(BadRecord, match="refused a record"):
        Harness(spec_of(Wrong())).send(batch(("a", 1)))


def test_a_function_that_raises_names_operator_and_record_or_key_and_round() -> None:
    class Failing(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            self.last = state.value("last", pa.int64())

        def process(self, row: dict[str, Any], context: ProcessContext) -> Any:
            self.last.put(row["n"])
            return {"key": "a", "n": 1} if row["n"] == 2 else [] if row["n"] else 1 // 0

        def on_round(self, round: int, context: ProcessContext) -> None:
            raise KeyError("oh")

    run = Harness(spec_of(Failing()))
    run.send(batch(("a", 1)))
    with pytest.raises(UserFunctionError, match="ZeroDivisionError") as caught:
        run.send(batch(("a", 1), ("a", 0)))
    assert "'n': 0" in caught.value.record
    with pytest.raises(UserFunctionError, match=r"return \[row\]"):
        run.send(batch(("a", 2)))
    with pytest.raises(UserFunctionError, match="failed on key 'a' at the end of round 4"):
        run.operator.on_round(4)


class Declaring(ProcessFunction):
    """Declares what its test wants."""

    def __init__(self, *states: tuple[str, ...]) -> None:
        self.states = states

    def open(self, state: StateHandle) -> None:
        for kind, *args in self.states:
            getattr(state, kind)(*args)


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        ([("value", "a", int), ("list", "a", int)], "operator 'node': two states are named 'a'"),
        ([("value", "", int)], "a state's name must be text"),
        ([("map", "m", pa.list_(pa.int64()), int)], "the keys of map state 'm' cannot be large_list"),
        ([("value", "v", object())], "operator 'node': state 'v': .*no Python, Polars or pyarrow type"),
        ([("value", "v", pa.month_day_nano_interval())], "state 'v'.*interval"),
    ],
)
def test_a_wrong_declaration_is_an_error_when_the_pipeline_is_built(states: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        spec_of(Declaring(*states))


def test_the_identity_of_state_is_keys_names_kinds_and_types_in_any_order() -> None:
    a, b = ("value", "a", pa.int64()), ("map", "b", pa.string(), pa.list_(pa.int8()))
    text = spec_of(Declaring(a, b)).state_text()
    assert text == (
        "keyed state(keys key: large_string; value a: int64; map b: large_string -> large_list<item: int8>)"
    )
    assert spec_of(Declaring(b, a)).state_text() == text
    assert spec_of(Declaring(a)).state_text() != text
    assert spec_of(Declaring(a, b), ("n",)).state_text() != text
    assert spec_of(Declaring()).state_text() == ""


def test_state_without_a_key_and_late_declarations_say_what_to_do() -> None:
    class Early(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            self.count = state.value("count", int)
            self.count.get()

    class Late(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            self.state = state

        def process(self, row: dict[str, Any], context: ProcessContext) -> None:
            self.state.value("late", int)

    with pytest.raises(UsageError, match=r"there is none in open\(\)"):
        spec_of(Early())
    with pytest.raises(UserFunctionError, match=r"state 'late' must be declared in open\(\)"):
        Harness(spec_of(Late())).send(batch(("a", 1)))


def test_a_function_that_cannot_travel_and_one_whose_open_fails_are_told_when_built() -> None:
    class Locked(ProcessFunction):
        def __init__(self) -> None:
            self.rows = (row for row in [])

    class Failing(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            raise OSError("no such model")

    with pytest.raises(UsageError, match="cannot be sent to the workers: Locked, attribute rows: a generator"):
        spec_of(Locked())
    with pytest.raises(UserFunctionError, match="no such model"):
        spec_of(Failing())


def test_a_function_that_declares_other_states_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Depending(ProcessFunction):
        def open(self, state: StateHandle) -> None:
            state.value(os.environ.get("NAME_OF_STATE", "count"), int)

    spec = spec_of(Depending())
    monkeypatch.setenv("NAME_OF_STATE", "other")
    with pytest.raises(UsageError, match=r"declared the states 'other' in a worker, and 'count' where the pipeline"):
        Harness(spec)


def test_a_damaged_snapshot_is_refused() -> None:
    run = Harness(MUTATOR)
    run.send(batch(("a", 0)))
    data = bytearray(payload(run.operator.freeze()))
    data[-9] ^= 1
    with pytest.raises(CorruptionError, match="state of 'node', subtask 0"):
        Harness(MUTATOR, [type(run.snapshot())(0, 1, memoryview(bytes(data)))])


class Twice(ProcessFunction):
    """Changes what it has yielded."""

    def process(self, row: dict[str, Any], context: ProcessContext) -> Iterable[dict[str, Any]]:
        yield row
        row["n"] += 1
        yield row
        row["n"] += 100


def test_a_row_is_emitted_as_it_was_when_it_was_yielded() -> None:
    run = Harness(row_process_spec("node", ("key",), Twice(), SCHEMA))
    run.send(pa.RecordBatch.from_pylist([{"key": "a", "n": 1}, {"key": "b", "n": 10}], SCHEMA))
    assert [row["n"] for row in run.out.rows()] == [1, 2, 10, 11]
