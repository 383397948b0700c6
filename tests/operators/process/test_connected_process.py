"""Functions of two keyed streams, and with a broadcast side, one subtask at a time (docs/spec/broadcast.md)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import product
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.operators.harness import Harness, encoded
from tests.operators.process.broadcast_functions import (
    READING,
    BatchLimits,
    Limits,
    Unkeyed,
    UnkeyedBatches,
    limits,
    readings,
    send,
    spec_of,
    written,
)
from tests.state.backends import IN_FILES, Chosen, choose

import headgate as hg
from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN_INPUT, InputName
from headgate.operators.base import WATERMARK_MAX_MS, OperatorSpec, RestoredState
from headgate.operators.keys import partition
from headgate.operators.process.connected_process import RIGHT_INPUT, BroadcastOrderSpec, co_process_spec, process_spec
from headgate.operators.specs import output_schemas, state_rules, state_text
from headgate.operators.user_functions import UserFunctionError
from headgate.protocol.checkpoints.compatibility import judged

FORMS = [Limits, BatchLimits]
ALL = [(Limits, ("key",)), (BatchLimits, ("key",)), (Unkeyed, ()), (UnkeyedBatches, ())]


def rows_of(harness: Harness) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in harness.out.rows()]


@pytest.mark.parametrize(("function", "keys"), ALL)
def test_both_forms_do_the_same_with_and_without_a_key(function: type, keys: tuple[str, ...]) -> None:
    harness = Harness(spec_of(function(), *keys))
    one, two = (1, 2) if keys else (0, 0)
    send(harness, readings((7, "a", 1)))
    send(harness, limits(("a", 10), ("b", 20)))
    send(harness, readings((7, "a", 2), (8, "b", 3), (7, "c", 4)))
    send(harness, limits(("a", 11), ("b", 0)))
    send(harness, readings((8, "a", 5), (8, "b", 6)))
    send(harness, limits(("", 0)))
    send(harness, readings((9, "a", 7)))
    of_limits = [(-1, count, None, number) for number, count in enumerate([1, 2, 2, 1, 0], 1)]
    assert rows_of(harness) == [
        (7, 1, None, one),
        *of_limits[:2],
        (7, 2, 10, two),
        (8, 3, 20, one),
        (7, 4, None, 3 if keys else 0),
        *of_limits[2:4],
        (8, 5, 11, two),
        (8, 6, None, 3 if keys else 0),
        of_limits[4],
        (9, 7, None, one),
    ]


@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_every_subtask_gets_every_record_of_the_side(function: type, other: type) -> None:
    """The same records in any batches, in any subtask and either form, make the same copies."""
    draw = random.Random(0)
    changes = [(draw.choice("abcde"), draw.randrange(3)) for _ in range(60)]
    harnesses = [Harness(spec_of(f(), "key"), subtask=(i, 3)) for i, f in enumerate((function, other, other))]
    for harness in harnesses:
        at = 0
        while at < len(changes):
            count = draw.randrange(1, 9)
            send(harness, limits(*changes[at : at + count]))
            at += count
    shown = [harness.operator._side._maps for harness in harnesses]  # type: ignore[attr-defined]
    copies = [{name: one.batch().to_pylist() for name, one in sorted(found.items())} for found in shown]
    assert copies[0] == copies[1] == copies[2]
    assert len(copies[0]["limits"]) > 1


def test_the_first_subtask_writes_for_all() -> None:
    first, second = (Harness(spec_of(Limits(), "key"), subtask=(i, 2)) for i in range(2))
    assert written(first) is None
    for harness in (first, second):
        send(harness, limits(("a", 10)))
    assert written(first) is not None
    assert written(second) is None


@pytest.mark.parametrize("after", [1, 2, 3])
def test_where_barriers_overtake_each_subtask_goes_on_with_its_own_copy(after: int) -> None:
    formers = [Harness(spec_of(Limits(), "key"), subtask=(index, 3)) for index in range(3)]
    for index, former in enumerate(formers):
        send(former, limits(*[("a", 10 + number) for number in range(index)]))
    copies = [state for former in formers if (state := written(former, is_own=True)) is not None]
    assert len(copies) == 3, "an empty copy is one, too"
    for index in range(after):
        harness = Harness(spec_of(Limits(), "key"), subtask=(index, after))
        harness.operator.restore_broadcast(copies)
        send(harness, readings((1, "a", 1)))
        expected = [None, 10, 11][index] if after == 3 else None
        assert rows_of(harness)[0][2] == expected, "at another parallelism the first one's copy is everybody's"


@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_a_form_restores_what_the_other_one_wrote_in_its_order(function: type, other: type) -> None:
    former = Harness(spec_of(function(), "key"))
    send(former, limits(("z", 1), ("a", 2), ("m", 3), ("z", 4)))
    send(former, readings((1, "a", 1)))
    keyed, side = encoded(former.operator, former.context), written(former)
    assert side is not None
    for index in range(3):
        harness = Harness(spec_of(other(), "key"), [keyed], subtask=(index, 3))
        harness.operator.restore_broadcast([side])
        maps = harness.operator._side._maps  # type: ignore[attr-defined]
        assert [row["map_key"] for row in maps["limits"].batch().to_pylist()] == ["z", "a", "m"]
        send(harness, readings((1, "z", 1)))
        assert rows_of(harness)[0][2] == 4


@pytest.mark.parametrize("function", FORMS)
def test_what_is_frozen_of_a_broadcast_side_does_not_change(function: type) -> None:
    harness = Harness(spec_of(function(), "key"))
    send(harness, limits(("a", 10), ("b", 20)))
    frozen = harness.operator.freeze_broadcast(is_own=False)
    assert frozen is not None
    expected = [bytes(memoryview(part)) for part in frozen.encode()]
    send(harness, limits(("a", 11), ("b", 0), ("c", 3)))
    send(harness, limits(("", 0)))
    assert [bytes(memoryview(part)) for part in frozen.encode()] == expected
    assert frozen.rows() == {"limits": 2, "changes": 1}
    restored = Harness(spec_of(function(), "key"))
    restored.operator.restore_broadcast([_state(harness, expected)])
    send(restored, readings((1, "a", 0), (1, "b", 0)))
    assert [row[2] for row in rows_of(restored)] == [10, 20]


def _state(harness: Harness, parts: list[bytes]) -> RestoredState:
    return RestoredState(harness.context.subtask_index, harness.context.parallelism, memoryview(b"".join(parts)))


class Wrong(Limits):
    """Writes where it must not."""

    def __init__(self, how: str) -> None:
        self.how = how

    def open(self, state: hg.StateHandle) -> None:
        super().open(state)
        if self.how == "open":
            self.limits.get("a")

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        match self.how:
            case "put":
                self.limits.put("a", 1)
            case "remove":
                self.limits.remove("no such name")
            case "clear":
                self.limits.clear()
        return super().process(row, context)

    def process_broadcast(self, row: dict[str, Any], context: hg.BroadcastContext) -> list[dict[str, Any]]:
        if self.how == "keyed":
            self.count.put(1)
        return super().process_broadcast(row, context)


class WrongBatches(BatchLimits):
    def __init__(self, how: str) -> None:
        self.how = how

    def open(self, state: hg.BatchStateHandle) -> None:
        super().open(state)
        if self.how == "open":
            self.limits.frame()

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        match self.how:
            case "put":
                self.limits.put(batch["name"], batch["value"])
            case "remove":
                self.limits.remove(pl.Series(["no such name"]))
            case "clear":
                self.limits.clear()
        return super().process(batch, context)

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> pl.DataFrame | None:
        if self.how == "keyed":
            self.count.put(1)
        return super().process_broadcast(batch, context)


@pytest.mark.parametrize("function", [Wrong, WrongBatches])
@pytest.mark.parametrize("how", ["put", "remove", "clear"])
def test_broadcast_state_is_written_by_its_side_only(function: type, how: str) -> None:
    with pytest.raises(UsageError, match=r"broadcast state 'limits' of operator 'node' has nothing in open\(\)"):
        spec_of(function("open"), "key")
    harness = Harness(spec_of(function(how), "key"))
    send(harness, limits(("a", 10)))
    with pytest.raises(UserFunctionError, match=r"'limits' of operator 'node' can be changed in process_broadcast\(\)"):
        send(harness, readings((1, "a", 1)))
    side = written(harness)
    assert side is not None
    restored = Harness(spec_of(Limits(), "key"))
    restored.operator.restore_broadcast([side])
    send(restored, readings((1, "a", 1)))
    assert rows_of(restored)[0][2] == 10, "what was refused changed something"


@pytest.mark.parametrize("function", [Wrong, WrongBatches])
def test_there_is_no_key_on_the_broadcast_side(function: type) -> None:
    harness = Harness(spec_of(function("keyed"), "key"))
    send(harness, readings((1, "a", 1)))
    with pytest.raises(
        UserFunctionError, match=r"belongs to a key, and there is none in open\(\), in process_broadcast"
    ):
        send(harness, limits(("a", 10)))


class Lists(hg.BroadcastProcessFunction):
    """Keeps what can be changed in place."""

    schema = {"kept": pa.large_list(pa.int64())}

    def open(self, state: hg.StateHandle) -> None:
        self.lists = state.broadcast("lists", str, pa.large_list(pa.int64()))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        self.lists.get("a", []).append(row["value"])
        return [{"kept": self.lists.get("a", [])}]

    def process_broadcast(self, row: dict[str, Any], context: hg.BroadcastContext) -> None:
        kept = [row["limit"]]
        self.lists.put("a", kept if row["name"] else row["name"])
        kept.append(-1)


def test_broadcast_values_are_checked_and_isolated() -> None:
    harness = Harness(spec_of(Lists()))
    send(harness, limits(("a", 10)))
    send(harness, readings((1, "a", 1), (1, "a", 2)))
    assert harness.out.rows() == [{"kept": [10]}, {"kept": [10]}]
    with pytest.raises(UserFunctionError, match="state 'lists' of operator 'node' holds large_list"):
        send(harness, limits(("", 10)))


@pytest.mark.parametrize(("function", "keys"), ALL)
def test_the_identity_of_broadcast_state_is_names_and_types_in_any_order(function: type, keys: tuple[str, ...]) -> None:
    of_side = "operator state(broadcast map changes: int64 -> int64; broadcast map limits: large_string -> int64)"
    of_keys = "keyed state(keys key: int64; value count: int64); " if keys else ""
    assert state_text(spec_of(function(), *keys), "node") == of_keys + of_side


class Timed(Unkeyed):
    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        return None


class Listed(Unkeyed, hg.CheckpointedFunction):
    pass


class Twice(Limits):
    def open(self, state: hg.StateHandle) -> None:
        super().open(state)
        state.value("limits", str)


class Sideless(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        state.broadcast("limits", str, int)


class SidelessBatches(hg.BatchProcessFunction):
    def open(self, state: hg.BatchStateHandle) -> None:
        state.broadcast("limits", str, int)


def test_what_a_broadcast_function_cannot_be_is_refused() -> None:
    for function, keys, problem in (
        (Limits(), (), r"state 'count' belongs to a key, and the stream has none; call key_by\(...\) before connect"),
        (BatchLimits(), (), "state 'count' belongs to a key, and the stream has none"),
        (Timed(), (), r"Timed\.on_timer would never be called, because timers belong to keys"),
        (Listed(), (), r"Listed is a headgate\.CheckpointedFunction and has a broadcast side; keep the lists"),
        (Twice(), ("key",), "two states are named 'limits'"),
        (Sideless(), ("key",), "an instance of a BroadcastProcessFunction or BatchBroadcastProcessFunction is needed"),
        (Limits, ("key",), "an instance of a BroadcastProcessFunction or BatchBroadcastProcessFunction is needed"),
    ):
        with pytest.raises(UsageError, match=problem):
            spec_of(function, *keys)
    for alone in (Sideless(), SidelessBatches()):
        with pytest.raises(UsageError, match="broadcast state 'limits' needs a broadcast side"):
            process_spec("node", ("key",), alone, READING)
    for function in (Limits(), BatchLimits()):
        with pytest.raises(UsageError, match=r"has a broadcast side; connect the stream with one: stream\.connect"):
            process_spec("node", ("key",), function, READING)


def test_a_bad_record_of_the_side_is_one() -> None:
    schema = pa.schema([("at", pa.timestamp("us")), ("n", pa.int64())])
    far = pa.array([0, 1 << 62], pa.int64()).view(pa.timestamp("us"))
    batch = pa.RecordBatch.from_arrays([far, pa.array([1, 2])], schema=schema)
    for by_row, bad in ((True, 1), (False, 0)):
        ordering = Harness(BroadcastOrderSpec(is_timed=False, by_row=by_row), diverts=True)
        ordering.send(batch)
        assert len(ordering.out.bad) == bad
        assert [row["n"] for row in ordering.out.batches[0].drop_columns(["at"]).to_pylist()] == [1, 2][: 2 - bad]


def test_a_side_without_event_times_holds_nothing_back() -> None:
    ordering = Harness(BroadcastOrderSpec(is_timed=False, by_row=True))
    ordering.operator.on_splits(["channel-0"])
    ordering.operator.on_watermark(5)
    ordering.operator.on_idle(False)
    ordering.operator.on_watermark(WATERMARK_MAX_MS)
    assert ordering.out.log == [("idle", True), ("watermark", WATERMARK_MAX_MS)]
    timed = Harness(BroadcastOrderSpec(is_timed=True, by_row=True))
    timed.operator.on_splits(["channel-0"])
    timed.operator.on_watermark(5)
    timed.operator.on_idle(True)
    assert timed.out.log == [("watermark", 5), ("idle", True)]


class Wider(hg.BroadcastProcessFunction):
    """An older or newer version of a function; values are structs with more fields, and other names."""

    schema = {"found": pa.large_string()}

    def __init__(self, name: str, type_: Any, evolution: hg.Evolution | None = None, forgotten: str = "") -> None:
        self.name, self.type, self.evolution, self.forgotten = name, type_, evolution, forgotten

    def open(self, state: hg.StateHandle) -> None:
        options = {} if self.evolution is None else {"evolution": self.evolution}
        self.rules = state.broadcast(self.name, str, self.type, **options)
        if self.forgotten:
            state.forget(self.forgotten)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        return [{"found": repr(self.rules.items())}]

    def process_broadcast(self, row: dict[str, Any], context: hg.BroadcastContext) -> None:
        self.rules.put(row["name"], {"limit": row["limit"]} if pa.types.is_struct(self.type) else row["limit"])


OLD = pa.struct([("limit", pa.int32())])
NEW = pa.struct([("bound", pa.int64()), ("unit", pa.large_string())])


def test_broadcast_state_evolves() -> None:
    former = Wider("rules", OLD)
    evolution = hg.Evolution(renamed_from="rules", renamed={"limit": "bound"}, defaults={"unit": "m"})
    now = Wider("limits", NEW, evolution)
    old, new = spec_of(former), spec_of(now)
    verdict = judged("node", "it", state_text(old), state_text(new), state_rules(new))
    assert verdict.refusal is None
    assert len(verdict.changes) == 4
    before = Harness(old)
    send(before, limits(("a", 1), ("b", 2)))
    side = written(before)
    assert side is not None
    after = Harness(new)
    after.operator.restore_broadcast([side])
    send(after, readings((1, "a", 1)))
    expected = [("a", {"bound": 1, "unit": "m"}), ("b", {"bound": 2, "unit": "m"})]
    assert after.out.rows() == [{"found": repr(expected)}]
    for other, problem in (
        (Wider("rules", pa.large_string()), "is struct<limit: int32>.*but is declared as large_string now"),
        (Wider("other", OLD), "declared as a broadcast map of .*has no such state"),
        (
            Wider("other", OLD, hg.Evolution(starts_empty=True)),
            "holds state 'rules' of operator 'node', a broadcast map",
        ),
    ):
        spec = spec_of(other)
        refused = judged("node", "it", state_text(old), state_text(spec), state_rules(spec))
        assert refused.refusal is not None
        assert re.search(problem, refused.refusal), refused.refusal
    left = spec_of(Wider("other", OLD, hg.Evolution(starts_empty=True), forgotten="rules"))
    verdict = judged("node", "it", state_text(old), state_text(left), state_rules(left))
    assert verdict.refusal is None
    empty = Harness(left)
    empty.operator.restore_broadcast([side])
    assert written(empty) is None


def test_batches_are_refused_what_does_not_fit() -> None:
    class Odd(UnkeyedBatches):
        def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> None:
            assert list(self.limits.contains(pl.Series(["a", None]))) == [False, False]
            assert len(self.limits) == 0
            self.limits.put(*self.given)

    for given, problem in (
        ((["a"], [1]), "the keys must be a Series, not list"),
        ((pl.Series(["a", "b"]), pl.Series([1])), "the values must have 2 rows, as many as there are keys, but have 1"),
        ((pl.Series(["a"]), pl.Series(["x"])), "the values must be int64: the value is int64, which cannot hold str"),
        ((pl.Series(["a"]), pl.Series([1.5])), "the values must be int64: .* cannot hold float 1.5"),
        ((pl.Series(["a"]), 1.5), "the values must be int64: .* cannot hold float 1.5"),
        ((pl.Series([1]), 1), "the keys must be large_string: .* cannot hold int 1"),
        ((pl.Series([None], dtype=pl.String), 1), "null and NaN cannot be keys"),
    ):
        odd = Odd()
        odd.given = given  # type: ignore[attr-defined]
        with pytest.raises(UserFunctionError, match=problem):
            send(Harness(spec_of(odd)), limits(("a", 1)))


def test_times_and_who_asks_are_known() -> None:
    seen: list[Any] = []

    class Asking(UnkeyedBatches):
        def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> None:
            seen.append((context.subtask_index, context.parallelism, context.event_time_ms, context.is_end))
            assert datetime.fromtimestamp(context.processing_time_ms / 1_000).year > 2000
            raise RuntimeError(str(seen))

    harness = Harness(spec_of(Asking()), subtask=(2, 5))
    harness.operator.on_watermark(77)
    with pytest.raises(UserFunctionError, match=r"\(2, 5, 77, False\)"):
        harness.operator.process_input(BROADCAST_INPUT, limits(("a", 1)))


LEFT = pa.schema([("customer", pa.large_string()), ("amount", pa.int64())])
RIGHT = pa.schema([("n", pa.int64()), ("payer", pa.large_string())])
RESULT = {"key": str, "what": str, "amount": int, "payments": int}
END_MS = 1_000
Row = dict[str, Any]


class Balance(hg.CoProcessFunction):
    """Tells for each record what its key had from both streams, and all of it at the end."""

    schema = RESULT

    def open(self, state: hg.StateHandle) -> None:
        self.amount = state.value("amount", int)
        self.payments = state.value("payments", int)

    def process_left(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        assert context.key == row["customer"]
        context.timers.register_event_time(END_MS)
        self.amount.put(self.amount.get(0) + row["amount"])
        yield self.now("left", context)

    def process_right(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        assert context.key == row["payer"]
        context.timers.register_event_time(END_MS)
        self.payments.put(self.payments.get(0) + 1)
        yield self.now("right", context)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        yield self.now("end", context)

    def now(self, what: str, context: hg.ProcessContext) -> Row:
        return {"key": context.key, "what": what, "amount": self.amount.get(), "payments": self.payments.get()}


class BatchBalance(hg.BatchCoProcessFunction):
    """The same by batch."""

    schema = RESULT

    def open(self, state: hg.BatchStateHandle) -> None:
        self.amount = state.value("amount", int)
        self.payments = state.value("payments", int)

    def process_left(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        context.timers.register_event_time(END_MS)
        sums = batch.select(pl.col("amount").cum_sum().over("customer")).to_series()
        found = self.amount.get().fill_null(0) + sums
        self.amount.put(found)
        return self.now("left", found, self.payments.get(), context)

    def process_right(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        context.timers.register_event_time(END_MS)
        counts = batch.select(pl.int_range(1, pl.len() + 1).over("payer")).to_series()
        found = self.payments.get().fill_null(0) + counts
        self.payments.put(found)
        return self.now("right", self.amount.get(), found, context)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return self.now("end", self.amount.get(), self.payments.get(), context)

    def now(self, what: str, amount: pl.Series, payments: pl.Series, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().select(
            key="customer", what=pl.lit(what), amount=pl.Series(amount), payments=pl.Series(payments)
        )


def spec(function: Any, left: pa.Schema = LEFT, right: pa.Schema = RIGHT) -> OperatorSpec:
    made = co_process_spec("node", ("customer",), ("payer",), function, left)
    output_schemas(made, {MAIN_INPUT: left, RIGHT_INPUT: right}, "node")
    return made


class Group:
    """All subtasks of one operator."""

    def __init__(self, function: Any, parallelism: int, states: Any = ()) -> None:
        made = spec(function)
        places = [(index, parallelism) for index in range(parallelism)]
        self.runs = [Harness(made, states, subtask=at, worker=Chosen.worker) for at in places]

    def send(self, name: InputName, batch: pa.RecordBatch) -> None:
        keys = ("customer",) if name == MAIN_INPUT else ("payer",)
        for run, part in zip(self.runs, partition(batch, keys, 128, len(self.runs)), strict=True):
            if part is not None:
                run.operator.process_input(name, part)

    def rows(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for run in self.runs for row in run.out.rows()]


def model(events: list[tuple[InputName, str, int]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return what is told of each key, in its order."""
    amounts: dict[str, int] = {}
    payments: dict[str, int] = {}
    told: dict[str, list[tuple[Any, ...]]] = {}
    for name, key, n in events:
        if name == MAIN_INPUT:
            amounts[key] = amounts.get(key, 0) + n
        else:
            payments[key] = payments.get(key, 0) + 1
        what = "left" if name == MAIN_INPUT else "right"
        told.setdefault(key, []).append((key, what, amounts.get(key), payments.get(key)))
    for key, rows in told.items():
        rows.append((key, "end", amounts.get(key), payments.get(key)))
    return told


@pytest.mark.parametrize(("backend", "seed"), few(product(("memory", IN_FILES), range(6)), 3))
def test_both_forms_do_what_plain_python_does_at_any_parallelism(backend: str, seed: int) -> None:
    chance = random.Random(seed)
    keys = [f"k{n}" for n in range(chance.choice([2, 12]))]
    events = [(chance.choice([MAIN_INPUT, RIGHT_INPUT]), chance.choice(keys), n) for n in range(150)]
    told: list[tuple[Any, ...]] = []
    with choose(backend):
        group, at = Group(Balance(), chance.choice([1, 2, 3, 5])), 0
        while at < len(events):
            name = events[at][0]
            size = next((n for n in range(1, 9) if at + n == len(events) or events[at + n][0] != name), 9)
            part = events[at : at + chance.randint(1, size)]
            at += len(part)
            texts, numbers = [key for _, key, _ in part], [n for _, _, n in part]
            columns = [texts, numbers] if name == MAIN_INPUT else [numbers, texts]
            group.send(name, pa.record_batch(columns, schema=LEFT if name == MAIN_INPUT else RIGHT))
            if chance.random() < 0.1:
                told += group.rows()
                states = [run.snapshot() for run in group.runs]
                group = Group(chance.choice([Balance, BatchBalance])(), chance.choice([1, 2, 3, 5]), states)
        for run in group.runs:
            run.operator.on_watermark(END_MS)
        told += group.rows()
    expected = model(events)
    assert {key: [row for row in told if row[0] == key] for key in expected} == expected
    assert len(told) == sum(map(len, expected.values()))


def test_a_left_batch_and_a_right_batch_share_keys_and_context() -> None:
    class Looked(BatchBalance):
        def process_right(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
            keys = context.lookup(batch.select(customer="payer"))
            return self.now("right", self.amount.get(keys=keys), pl.Series([0] * batch.height), context)

    group = Group(Looked(), 1)
    group.send(MAIN_INPUT, pa.record_batch([["a", "b"], [3, 4]], schema=LEFT))
    group.send(RIGHT_INPUT, pa.record_batch([[0, 0], ["b", "a"]], schema=RIGHT))
    assert group.rows()[2:] == [("b", "right", 4, 0), ("a", "right", 3, 0)]


class Named(hg.CoProcessFunction):
    def process(self, row: Row, context: hg.ProcessContext) -> None: ...


@pytest.mark.parametrize(
    ("function", "right", "problem"),
    [
        (Balance(), pa.schema([("payer", pa.int64())]), "'customer' is large_string and 'payer' is int64; cast one"),
        (Balance(), pa.schema([("other", pa.int64())]), "'payer'"),
        (Named(), RIGHT, r"Named\.process would never be called; a function of two streams has process_left"),
        (hg.ProcessFunction(), RIGHT, "a CoProcessFunction or BatchCoProcessFunction is needed .* not ProcessFunction"),
        (Balance, RIGHT, "a CoProcessFunction or BatchCoProcessFunction is needed"),
    ],
)
def test_what_cannot_work_is_refused(function: Any, right: pa.Schema, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        spec(function, right=right)


@pytest.mark.parametrize("schema", [None, {"customer": str, "amount": int}])
def test_results_have_the_columns_of_the_left_stream_or_of_the_schema(schema: Any) -> None:
    class Passed(hg.CoProcessFunction):
        def process_left(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [row]

        def process_right(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [{"customer": row["payer"], "amount": -1}]

    Passed.schema = schema
    run = Harness(spec(Passed()))
    run.operator.process_input(MAIN_INPUT, pa.record_batch([["a"], [3]], schema=LEFT))
    run.operator.process_input(RIGHT_INPUT, pa.record_batch([[0], ["b"]], schema=RIGHT))
    assert run.out.rows() == [{"customer": "a", "amount": 3}, {"customer": "b", "amount": -1}]
