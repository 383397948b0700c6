"""Joins against a nested loop over all rows: any order, batches, watermarks and parallelisms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness
from tests.state.backends import IN_FILES, MEMORY, Chosen, choose

from headgate.model.graph import InputName
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.changes import OP
from headgate.operators.joins.join_plan import (
    HOWS,
    LEFT_INPUT,
    NULL_KEYS,
    RIGHT_INPUT,
    AsOf,
    Bound,
    JoinInputSpec,
    JoinPlan,
    JoinSide,
    SameWindow,
    Unbounded,
    Within,
)
from headgate.operators.joins.stream_joins import StreamJoinSpec
from headgate.operators.keys import partition
from headgate.operators.timestamps import event_time
from headgate.operators.windows.window_assigner import FixedWindows, tumbling
from headgate.state.ttl import TTL

LEFT = pa.schema([("k", pa.int64()), ("name", pa.large_string()), ("t", pa.int64()), ("l", pa.int64())])
RIGHT = pa.schema([("t", pa.timestamp("us")), ("r", pa.int64()), ("name", pa.large_string()), ("id", pa.int64())])
END_MS = 1_000_000
"""Later than all windows and bounds, but not the end of the input."""

NAMES = {LEFT_INPUT: ("k", "name"), RIGHT_INPUT: ("id", "name")}


def plan(how: str, bound: Bound) -> JoinPlan:
    times = not isinstance(bound, Unbounded)
    left = JoinSide(LEFT, NAMES[LEFT_INPUT], event_time("n", LEFT, "t") if times else None)
    right = JoinSide(RIGHT, NAMES[RIGHT_INPUT], event_time("n", RIGHT, "t") if times else None)
    return JoinPlan(left, right, how, bound, "_right")


@dataclass(frozen=True)
class Row:
    key: int | None
    name: str | None
    time_us: int
    number: int
    window: int | None = None
    """Of one of the windows that it lies in, if windows are joined."""

    def in_windows(self, bound: Bound) -> list[Row]:
        if not isinstance(bound, SameWindow):
            return [self]
        windows = bound.windows
        numbers = [i for i in range(-30, 60) if windows.start_ms(i) <= self.time_ms < windows.end_ms(i)]
        return [replace(self, window=i) for i in numbers]

    @property
    def time_ms(self) -> int:
        return self.time_us // 1_000

    def values(self, side: InputName) -> dict[str, Any]:
        if side == LEFT_INPUT:
            return {"k": self.key, "name": self.name, "t": self.time_ms, "l": self.number}
        return {"t": self.time_us, "r": self.number, "name": self.name, "id": self.key}


class Cluster:
    """The operators of a join, at any parallelism."""

    def __init__(self, joined: JoinPlan, parallelism: int = 1) -> None:
        self.plan = joined
        self.spec = StreamJoinSpec(joined)
        self.before = {name: Harness(JoinInputSpec(joined, name)) for name in NAMES}
        self.rows: list[dict[str, Any]] = []
        self.watermark_ms = -(1 << 63)
        self.subtasks = self._started(parallelism)

    def _started(self, parallelism: int, states: Any = ()) -> list[Harness]:
        return [Harness(self.spec, states, subtask=(i, parallelism), worker=Chosen.worker) for i in range(parallelism)]

    def send(self, side: InputName, rows: list[Row]) -> None:
        schema = self.plan.side(side).schema
        values = [row.values(side) | {OP: "delete" if row.name == DELETED else "update_after"} for row in rows]
        columns = [pa.array([row[f.name] for row in values], f.type) for f in schema]
        before = self.before[side]
        before.send(pa.RecordBatch.from_arrays(columns, schema=schema))
        keys = self.spec.edge_keys[side == RIGHT_INPUT]
        for batch in before.out.batches:
            for subtask, part in zip(self.subtasks, partition(batch, keys, 128, len(self.subtasks)), strict=True):
                if part is not None:
                    subtask.operator.process_input(side, part)
        before.out.batches.clear()
        self._collect()

    def advance(self, watermark_ms: int) -> None:
        self.watermark_ms = max(watermark_ms, self.watermark_ms)
        for subtask in self.subtasks:
            subtask.operator.on_watermark(watermark_ms)
        self._collect()

    def advance_one(self, index: int, watermark_ms: int) -> None:
        self.subtasks[index].operator.on_watermark(watermark_ms)
        self._collect()

    def rescale(self, parallelism: int) -> None:
        states = [subtask.snapshot() for subtask in self.subtasks]
        for subtask in self.subtasks:
            subtask.operator.close()
        self.subtasks = self._started(parallelism, states)

    def bounded_by(self, bound: Bound) -> None:
        """Go on from a snapshot of each subtask with another bound."""
        self.plan = replace(self.plan, bound=bound)
        self.spec = StreamJoinSpec(self.plan)
        self.before = {name: Harness(JoinInputSpec(self.plan, name)) for name in NAMES}
        self.rescale(len(self.subtasks))

    def kept(self) -> Counter[str]:
        """Return how many rows there are in each list."""
        found: Counter[str] = Counter()
        for subtask in self.subtasks:
            frozen = subtask.operator.freeze()
            assert frozen is not None
            found.update({name: n for name, n in frozen.rows().items() if name.startswith(("left", "right"))})
            frozen.release()
        return +found

    def late(self) -> int:
        return sum(subtask.context.metrics.counters.get("late", 0) for subtask in self.subtasks)

    def _collect(self) -> None:
        for before in self.before.values():
            for batch in before.out.tagged.pop(NULL_KEYS, []):
                self.rows += batch.to_pylist()
        for subtask in self.subtasks:
            self._check_times(subtask)
            self.rows += subtask.out.rows()
            subtask.out.batches.clear()

    def _check_times(self, subtask: Harness) -> None:
        """No result is earlier than what the watermark before it says."""
        column, sent = self.plan.time_column, subtask.out.watermarks()
        if column is None or not sent or sent[-1] == WATERMARK_MAX_MS or subtask.out.log[-1][0] == "watermark":
            return
        for batch in subtask.out.batches:
            times = batch.column(column).cast(pa.int64()).to_pylist()
            scale = 1_000 if pa.types.is_timestamp(batch.schema.field(column).type) else 1
            assert min(times) // scale > sent[-1] - self.spec.output_delay_ms


def key_of(row: Row) -> tuple[int, str] | None:
    return None if row.key is None or row.name is None else (row.key, row.name)


def matches(bound: Bound, left: Row, right: Row) -> bool:
    if key_of(left) is None or key_of(left) != key_of(right):
        return False
    if isinstance(bound, Within):
        return bound.lower_ms * 1_000 <= right.time_us - left.time_ms * 1_000 <= bound.upper_ms * 1_000
    return left.window == right.window


def is_late(bound: Bound, row: Row, watermark_ms: int) -> bool:
    if key_of(row) is None or isinstance(bound, Unbounded):
        return False
    last_ms = bound.windows.end_ms(row.window or 0) - 1 if isinstance(bound, SameWindow) else row.time_ms
    return last_ms <= watermark_ms


def expected(joined: JoinPlan, lefts: list[Row], rights: list[Row]) -> list[dict[str, Any]]:
    """A nested loop."""
    bound, how, found = joined.bound, joined.how, []

    def add(left: Row | None, right: Row | None) -> None:
        some = left or right
        assert some is not None
        row: dict[str, Any] = {"k": some.key, "name": some.name}
        row |= {"t": left.time_ms if left else None, "l": left.number if left else None}
        if how not in ("semi", "anti"):
            row |= {"t_right": right.time_us if right else None, "r": right.number if right else None}
        if isinstance(bound, SameWindow):
            assert some.window is not None
            times = bound.windows.start_ms(some.window), bound.windows.end_ms(some.window)
            row |= {"window_start": times[0] * 1_000, "window_end": times[1] * 1_000}
        found.append(row)

    for left in lefts:
        partners = [right for right in rights if matches(bound, left, right)]
        if how == "semi" and partners:
            add(left, None)
        if how not in ("semi", "anti"):
            for right in partners:
                add(left, right)
        if how in ("left", "full", "anti") and not partners:
            add(left, None)
    if how in ("right", "full"):
        for right in rights:
            if not any(matches(bound, left, right) for left in lefts):
                add(None, right)
    return found


def plain(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    def value(one: Any) -> Any:
        return (one - datetime(1970, 1, 1)) // timedelta(microseconds=1) if isinstance(one, datetime) else one

    return Counter(tuple((name, value(one)) for name, one in row.items()) for row in rows)


ROW = st.tuples(
    st.sampled_from([1, 1, 1, 2, 3, None]),
    st.sampled_from(["a"] * 6 + ["b", None]),
    st.builds(lambda ms, us: ms * 1_000 + us, st.integers(0, 15), st.sampled_from([0, 0, 0, 500])),
)
STEP = st.one_of(
    st.tuples(st.sampled_from([LEFT_INPUT, RIGHT_INPUT]), st.lists(ROW, min_size=1, max_size=6)),
    st.tuples(st.sampled_from([LEFT_INPUT, RIGHT_INPUT]), st.lists(ROW, min_size=3, max_size=6)),
    st.tuples(st.just("watermark"), st.integers(0, 18) | st.just(END_MS)),
    st.tuples(st.just("rescale"), st.sampled_from([1, 2, 3, 5])),
)
BOUNDS = st.one_of(
    st.tuples(st.integers(-8, 8), st.integers(0, 8)).map(lambda two: Within(two[0], two[0] + two[1])),
    st.sampled_from([(1, 1, 0), (5, 5, 3), (10, 10, 0), (6, 2, 1), (5, 3, 0)]).map(
        lambda three: SameWindow(FixedWindows(*three))
    ),
)


def check(joined: JoinPlan, steps: list[tuple[str, Any]]) -> None:
    cluster, number, late = Cluster(joined), 0, 0
    kept: dict[str, list[Row]] = {LEFT_INPUT: [], RIGHT_INPUT: []}
    for what, value in steps:
        if what == "watermark":
            if value > cluster.watermark_ms:
                cluster.advance(value)
        elif what == "rescale":
            late -= cluster.late()
            cluster.rescale(value)
        else:
            rows = [Row(*one, number + i) for i, one in enumerate(value)]
            number += len(rows)
            cluster.send(InputName(what), rows)
            copies = [copy for row in rows for copy in row.in_windows(joined.bound)]
            fresh = [row for row in copies if not is_late(joined.bound, row, cluster.watermark_ms)]
            late += len(copies) - len(fresh)
            kept[what] += fresh
    assert cluster.late() == late
    cluster.advance(WATERMARK_MAX_MS)
    assert plain(cluster.rows) == plain(expected(joined, kept[LEFT_INPUT], kept[RIGHT_INPUT]))


@pytest.mark.parametrize("backend", MEMORY)
@given(how=st.sampled_from(HOWS), bound=BOUNDS, steps=st.lists(STEP, max_size=16))
@settings(max_examples=400)
def test_a_join_by_time_is_a_nested_loop_over_what_is_not_late(
    backend: str, how: str, bound: Bound, steps: list[tuple[str, Any]]
) -> None:
    with choose(backend):
        check(plan(how, bound), steps)


@given(how=st.sampled_from(HOWS), bound=BOUNDS, steps=st.lists(STEP, max_size=12))
@settings(max_examples=25)
def test_and_from_files_of_a_database(how: str, bound: Bound, steps: list[tuple[str, Any]]) -> None:
    with choose(IN_FILES):
        check(plan(how, bound), steps)


@pytest.mark.parametrize("backend", MEMORY)
@given(
    how=st.sampled_from(["inner", "semi"]), ttl=st.sampled_from([None, TTL("1h")]), steps=st.lists(STEP, max_size=12)
)
@settings(max_examples=40)
def test_a_join_without_a_bound_is_a_nested_loop(
    backend: str, how: str, ttl: TTL | None, steps: list[tuple[str, Any]]
) -> None:
    with choose(backend):
        check(plan(how, Unbounded(ttl)), steps)


MINUTE = 60_000


@pytest.mark.parametrize(("backend", "how"), [*product(["memory"], HOWS), (IN_FILES, "full")])
def test_a_narrower_bound_forgets_what_only_the_wider_one_needed(backend: str, how: str) -> None:  # EV18
    with choose(backend):
        cluster = Cluster(plan(how, Within(-MINUTE, MINUTE)), 2)
        for number, time_ms in enumerate((50_000, 109_000)):
            for side in NAMES:
                at_ms = time_ms + (5_500 if side == RIGHT_INPUT else 0)
                cluster.send(side, [Row(1, f"{side} {number}", at_ms * 1_000, number)])
        cluster.advance(108_000)
        assert not cluster.rows
        cluster.bounded_by(Within(-10_000, 10_000))
        cluster.advance(108_001)
        early = cluster.rows
        assert {row["name"][-1] for row in early} <= {"0"}
        sides = {"left": ["left"], "right": ["right"], "full": ["left", "right"], "anti": ["left"]}.get(how, [])
        assert sorted(row["name"] for row in early) == [f"{side} 0" for side in sides], "before the watermark went on"
        assert all(count == 1 for count in cluster.kept().values()), "rows that it would never need stayed"
        assert len(cluster.kept()) == 2


@pytest.mark.parametrize(("backend", "tolerance_ms"), [("memory", None), ("memory", MINUTE), (IN_FILES, None)])
def test_a_narrower_tolerance_forgets_versions(backend: str, tolerance_ms: int | None) -> None:  # EV18
    with choose(backend):
        cluster = Cluster(as_of_plan("left", tolerance_ms, has_changes=False), 2)
        cluster.send(RIGHT_INPUT, [Row(key, "a", 50_000_000, key) for key in range(20)])
        cluster.send(RIGHT_INPUT, [Row(key, "a", 95_000_000, key) for key in range(20, 30)])
        cluster.advance(100_000)
        assert cluster.kept() == {"right": 30}
        cluster.bounded_by(AsOf(10_000))
        cluster.advance(100_001)
        assert cluster.kept() == {"right": 10}
        cluster.send(LEFT_INPUT, [Row(key, "a", 101_000_000, key) for key in (1, 25)])
        cluster.advance(106_000)
        assert sorted((row["l"], row["r"]) for row in cluster.rows) == [(1, None), (25, 25)]
        assert not cluster.kept()


@pytest.mark.parametrize(
    "bound", [Within(-2, 2), SameWindow(tumbling(4)), AsOf(None)], ids=lambda bound: type(bound).__name__
)
@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_what_was_late_in_one_of_several_subtasks_is_late_in_any(bound: Bound, parallelism: int) -> None:
    is_as_of = isinstance(bound, AsOf)
    cluster = Cluster(as_of_plan("left", None, has_changes=False) if is_as_of else plan("left", bound), 2)
    first, again = ([Row(key, "a", time_us, key) for key in range(40)] for time_us in (1_000, 2_000))
    cluster.send(LEFT_INPUT, first)
    cluster.advance_one(0, 20)
    passed = len(cluster.rows)
    assert 0 < passed < 40
    cluster.rescale(parallelism)
    cluster.send(LEFT_INPUT, again)
    assert cluster.late() == passed
    cluster.advance(30)
    assert len(cluster.rows) == 80 - passed


def test_the_identity_of_a_join_says_by_which_times_rows_are_kept() -> None:  # EV18
    texts = {
        StreamJoinSpec(plan("inner", bound)).state_text()
        for bound in (
            *(Within(-5, 5), Within(-5, 6), Within(5, 6), AsOf(5), AsOf(None), Unbounded(None)),
            *(SameWindow(FixedWindows(10, 10)), SameWindow(FixedWindows(20, 10)), SameWindow(FixedWindows(20, 20))),
        )
    }
    assert len(texts) == 9


def test_semi_and_anti_joins_do_not_take_over_each_others_rows() -> None:
    assert (
        StreamJoinSpec(plan("semi", Within(-5, 5))).state_text()
        != StreamJoinSpec(plan("anti", Within(-5, 5))).state_text()
    )


DELETED = "b"
"""A right row of this name stands for a delete in a stream with changes."""


def as_of_plan(how: str, tolerance_ms: int | None, *, has_changes: bool) -> JoinPlan:
    joined = plan(how, AsOf(tolerance_ms, has_changes))
    schema = RIGHT.append(pa.field(OP, pa.large_string())) if has_changes else RIGHT
    right = JoinSide(schema, ("id",), event_time("n", RIGHT, "t"))
    return replace(joined, left=replace(joined.left, keys=("k",)), right=right)


def test_a_key_that_has_fired_fires_again_for_its_next_row() -> None:
    cluster = Cluster(as_of_plan("left", None, has_changes=False))
    cluster.send(RIGHT_INPUT, [Row(1, "a", 1_000, 0)])
    for number, time_ms in enumerate((5, 9), 1):
        cluster.send(LEFT_INPUT, [Row(1, "a", time_ms * 1_000, number)])
        cluster.advance(time_ms)
        assert [(row["l"], row["r"]) for row in cluster.rows] == [(one, 0) for one in range(1, number + 1)]


class AsOfRecount:
    """What an as-of join emits: each left row when the watermark passes it, with what was there by then."""

    def __init__(self, joined: JoinPlan) -> None:
        assert isinstance(joined.bound, AsOf)
        self.bound, self.how = joined.bound, joined.how
        self.waiting: list[Row] = []
        self.versions: list[Row] = []
        self.rows: list[dict[str, Any]] = []

    def advance(self, watermark_ms: int) -> None:
        for left in [left for left in self.waiting if left.time_ms <= watermark_ms]:
            self.waiting.remove(left)
            found: Row | None = None
            for right in self.versions:
                is_near = right.key == left.key is not None and right.time_us <= left.time_ms * 1_000
                if is_near and (found is None or right.time_us >= found.time_us):
                    found = right
            tolerance_ms = self.bound.tolerance_ms
            if found is not None and tolerance_ms is not None:
                found = found if left.time_ms * 1_000 - found.time_us <= tolerance_ms * 1_000 else None
            if found is not None and self.bound.has_changes and found.name == DELETED:
                found = None
            if found is not None or self.how == "left":
                row = left.values(LEFT_INPUT)
                row |= {"t_right": found.time_us, "r": found.number} if found else {"t_right": None, "r": None}
                self.rows.append(row | {"name_right": found.name if found else None})


as_of_histories = given(
    how=st.sampled_from(["left", "inner"]),
    tolerance_ms=st.sampled_from([None, None, 0, 3]),
    has_changes=st.booleans(),
    steps=st.lists(STEP, max_size=16),
)


@pytest.mark.parametrize("backend", MEMORY)
@as_of_histories
@settings(max_examples=300)
def test_an_as_of_join_has_the_latest_version(backend: str, **drawn: Any) -> None:
    check_as_of(backend, **drawn)


@as_of_histories
@settings(max_examples=25)
def test_so_it_has_from_files_of_a_database(**drawn: Any) -> None:
    check_as_of(IN_FILES, **drawn)


def check_as_of(
    backend: str, how: str, tolerance_ms: int | None, has_changes: bool, steps: list[tuple[str, Any]]
) -> None:
    with choose(backend):
        joined = as_of_plan(how, tolerance_ms, has_changes=has_changes)
        cluster, recount, number = Cluster(joined), AsOfRecount(joined), 0
        for what, value in steps:
            if what == "watermark":
                if value > cluster.watermark_ms:
                    cluster.advance(value)
                    recount.advance(value)
            elif what == "rescale":
                cluster.rescale(value)
            else:
                rows = [Row(*one, number + i) for i, one in enumerate(value)]
                number += len(rows)
                if has_changes:  # what was deleted is not remembered for late rows
                    rows = [row for row in rows if row.time_ms > cluster.watermark_ms]
                if rows:
                    cluster.send(InputName(what), rows)
                if what == RIGHT_INPUT:
                    recount.versions += rows
                else:
                    recount.waiting += [r for r in rows if r.time_ms > cluster.watermark_ms or r.key is None]
        cluster.advance(WATERMARK_MAX_MS)
        recount.advance(WATERMARK_MAX_MS)
        assert plain(cluster.rows) == plain(recount.rows)
