from __future__ import annotations

import random
from datetime import datetime
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.operators.harness import Harness, Subtasks, applied
from tests.state.backends import IN_FILES, Chosen, choose

import headgate as hg
from headgate.operators.row_order import Order, WindowCandidatesSpec, order_of
from headgate.operators.timestamps import event_time
from headgate.operators.top_rows import ChangingTopOperator, ChangingTopSpec, TopSpec, WindowTopSpec
from headgate.operators.windows.window_assigner import FixedWindows, tumbling

SCHEMA = pa.schema([("k", pa.large_string()), ("n", pa.int64()), ("t", pa.large_string()), ("id", pa.int64())])
BACKENDS = ["memory", IN_FILES]
Rows = list[dict[str, Any]]


def top(count: int = 3, **options: Any) -> TopSpec:
    given = {"order": order_of("node", ["n", "t"], [True, False]), "rank": "rank", "retractions": False, "ttl": None}
    return TopSpec(("k",), SCHEMA, count, **{**given, **options})


def drawn(rng: random.Random, count: int, ids: Any) -> Rows:
    return [
        {
            "k": rng.choice("abcd"),
            "n": rng.choice([None, *range(5)]),
            "t": rng.choice([None, "u", "v"]),
            "id": next(ids),
        }
        for _ in range(count)
    ]


def in_order(rows: Rows) -> Rows:
    """Return rows by n, the largest first, then by t, the smallest first, then as they came; nulls last."""
    return sorted(rows, key=lambda row: (row["n"] is None, -(row["n"] or 0), row["t"] is None, row["t"] or ""))


def recounted(rows: Rows, count: int, rank: str | None) -> Rows:
    found: Rows = []
    for key in sorted({row["k"] for row in rows}):
        best = in_order([row for row in rows if row["k"] == key])[:count]
        found += [row if rank is None else {**row, rank: i} for i, row in enumerate(best, 1)]
    return found


TOPS = [(3, "rank", False), (3, "rank", True), (3, None, True), (1, None, False), (1, None, True), (1, "rank", False)]


@pytest.mark.parametrize(
    ("backend", "count", "rank", "retractions"), [*(("memory", *one) for one in TOPS), (IN_FILES, *TOPS[1])]
)
def test_the_changes_make_the_top_of_all_rows(backend: str, count: int, rank: str | None, retractions: bool) -> None:
    spec = top(count, rank=rank, retractions=retractions)
    rng, rows, found, ids = random.Random(count), Rows(), Rows(), iter(range(10_000))
    with choose(backend):
        subtasks = Subtasks(spec, ("k",), 2)
        for parallelism in rng.sample([1, 2, 3, 5], 4):
            for _ in range(rng.randrange(1, 5)):
                more = drawn(rng, rng.choice([1, 3, 12]), ids)
                rows += more
                subtasks.send(pa.RecordBatch.from_pylist(more, SCHEMA))
            found += subtasks.rows()
            keys = spec.change_keys or ("k", "id")
            table = applied(found, keys, retractions=retractions, strict=True)
            expected = recounted(rows, count, rank)
            assert sorted(table, key=repr) == sorted(expected, key=repr)
            subtasks = Subtasks(spec, ("k",), parallelism, subtasks.snapshot())


def test_only_what_moves_is_sent() -> None:
    harness = Harness(top(2))
    for n in (5, 1, 3, 2):
        harness.send(pa.RecordBatch.from_pylist([{"k": "a", "n": n, "t": "", "id": n}], SCHEMA))
    assert [(row["op"], row["rank"], row["n"]) for row in harness.out.rows()] == [
        ("insert", 1, 5),
        ("insert", 2, 1),
        ("update_after", 2, 3),
    ]


def test_without_ranks_a_row_leaves_when_one_comes() -> None:
    harness = Harness(top(2, rank=None, retractions=True))
    for n in (5, 1, 3):
        harness.send(pa.RecordBatch.from_pylist([{"k": "a", "n": n, "t": "", "id": n}], SCHEMA))
    assert [(row["op"], row["n"]) for row in harness.out.rows()] == [
        ("insert", 5),
        ("insert", 1),
        ("delete", 1),
        ("insert", 3),
    ]


@pytest.mark.parametrize("backend", ["memory", "rocksdb-without-cache"])
def test_a_key_without_records_for_its_ttl_begins_again(backend: str) -> None:
    with choose(backend):
        harness = Harness(top(2, ttl=hg.TTL("1m")), worker=Chosen.worker)
        for n, wait_ms in ((5, 0), (1, 59_000), (0, 59_000), (4, 59_000), (2, 60_000)):
            harness.advance(wait_ms)
            harness.send(pa.RecordBatch.from_pylist([{"k": "a", "n": n, "t": "", "id": n}], SCHEMA))
        found = [(row["op"], row["rank"], row["n"]) for row in harness.out.rows()]
        assert found == [("insert", 1, 5), ("insert", 2, 1), ("update_after", 2, 4), ("insert", 1, 2)]


WINDOWED = pa.schema(
    [
        ("k", pa.large_string()),
        ("window_start", pa.timestamp("us")),
        ("window_end", pa.timestamp("us")),
        ("n", pa.int64()),
        ("id", pa.int64()),
    ]
)
WINDOW_KEYS = ("window_start", "window_end")
S = 1_000_000


def per_window(count: int, **options: Any) -> WindowTopSpec:
    given = {"order": order_of("node", "n", True), "rank": "rank", "ties": False}
    return WindowTopSpec(WINDOW_KEYS, WINDOWED, count, **{**given, **options})


def windowed(rows: list[tuple[str, int, int, int]]) -> pa.RecordBatch:
    """Return rows (key, second of the window's start, n, id) of windows of two seconds."""
    k, start, n, ids = (list(column) for column in zip(*rows, strict=True))
    times = [pa.array([s * S + d for s in start], pa.int64()).cast(pa.timestamp("us")) for d in (0, 2 * S)]
    return pa.RecordBatch.from_arrays(
        [pa.array(k, pa.large_string()), *times, pa.array(n, pa.int64()), pa.array(ids, pa.int64())], schema=WINDOWED
    )


@pytest.mark.parametrize(("backend", "ties"), few(product(BACKENDS, (False, True)), 3))
def test_each_window_has_its_top_once_when_it_has_ended(backend: str, ties: bool) -> None:
    spec = per_window(2, ties=ties)
    rng, rows, found, ids = random.Random(7), [], Rows(), iter(range(1_000))
    with choose(backend):
        subtasks = Subtasks(spec, WINDOW_KEYS, 2)
        for second, parallelism in enumerate([1, 3, 5, 2, 1, 2]):
            more = [("x", second + rng.randrange(2), rng.randrange(4), next(ids)) for _ in range(rng.choice([2, 9]))]
            rows += more
            for start in range(0, len(more), 3):
                subtasks.send(windowed(more[start : start + 3]))
            subtasks.watermark((second + 1) * 1_000 - 1)
            found += subtasks.rows()
            subtasks = Subtasks(spec, WINDOW_KEYS, parallelism, subtasks.snapshot())
        subtasks.watermark(100_000)
        found += subtasks.rows()
    expected = set()
    for start in {row[1] for row in rows}:
        ordered = sorted((row for row in rows if row[1] == start), key=lambda row: -row[2])
        for i, row in enumerate(ordered):
            rank = 1 + (sum(other[2] > row[2] for other in ordered) if ties else i)
            if rank <= 2:
                expected.add((row[3], rank))
    assert len(found) == len(expected)
    assert {(row["id"], row["rank"]) for row in found} == expected


def test_a_result_of_a_window_that_ended_is_late() -> None:
    harness = Harness(per_window(1))
    harness.send(windowed([("x", 0, 1, 1)]))
    harness.operator.on_watermark(1_999)
    harness.send(windowed([("x", 0, 2, 2), ("x", 1, 3, 3)]))
    harness.operator.on_watermark(5_000)
    assert [row["id"] for row in harness.out.rows()] == [1, 3]
    assert harness.context.metrics.counters["late"] == 1


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_a_window_that_one_of_several_subtasks_has_ended_ends_once(parallelism: int) -> None:
    rows = [("x", start, 1, start) for start in range(40)]
    subtasks = Subtasks(per_window(1), WINDOW_KEYS, 2)
    subtasks.send(windowed(rows))
    subtasks.harnesses[0].operator.on_watermark(50_000)
    ended = subtasks.rows()
    assert 0 < len(ended) < 40
    subtasks = Subtasks(per_window(1), WINDOW_KEYS, parallelism, subtasks.snapshot())
    subtasks.send(windowed([("x", start, 2, 100 + start) for start in range(40)]))
    subtasks.watermark(60_000)
    found = subtasks.rows()
    assert {row["id"] for row in ended + found} == {
        *(row["id"] for row in ended),
        *(100 + start for start in range(40) if start not in [row["id"] for row in ended]),
    }
    late = [harness.context.metrics.counters.get("late", 0) for harness in subtasks.harnesses]
    assert sum(late) == len(ended)


def test_an_earlier_watermark_after_a_restore_makes_no_window_open_again() -> None:
    harness = Harness(per_window(1))
    harness.send(windowed([("x", 0, 1, 1)]))
    harness.operator.on_watermark(1_999)
    harness = Harness(per_window(1), [harness.snapshot()])
    harness.operator.on_watermark(500)
    harness.send(windowed([("x", 0, 2, 2)]))
    assert harness.context.metrics.counters["late"] == 1


@pytest.mark.parametrize("windows", [tumbling(2_000), FixedWindows(4_000, 2_000)], ids=["tumbling", "sliding"])
def test_records_that_are_found_to_be_late_after_the_shuffle_are_all_counted(windows: FixedWindows) -> None:
    """The subtask before it was idle, and does not know how far event time is."""
    schema = pa.schema([("k", pa.large_string()), ("t", pa.timestamp("us")), ("n", pa.int64())])
    order = order_of("node", "n", True)
    before = Harness(WindowCandidatesSpec(("k",), windows, event_time("node", schema, "t"), 1, order, ties=False))
    rows = [{"k": "ab"[i % 2], "t": datetime(1970, 1, 1, 0, 0, i // 4), "n": i} for i in range(16)]
    before.send(pa.RecordBatch.from_pylist(rows, schema))
    records = pa.schema(list(before.out.batches[0].schema)[:-1])
    after = Harness(WindowTopSpec(("k", *WINDOW_KEYS), records, 1, order, None, ties=False, windows=windows))
    after.operator.on_watermark(1_999)
    after.send(before.out.batches[0])
    assert after.context.metrics.counters["late"] == 8
    after.operator.on_watermark(10_000)
    assert {row["n"] for row in after.out.rows() if row["window_end"].second == 4} == {14, 15}


@pytest.mark.parametrize(
    ("by", "descending", "message"),
    [
        ([], True, "by= is the column"),
        (3, True, "by= is the column"),
        (["n", "n"], True, "names a column twice"),
        ("n", [True, False], "descending= is True, False"),
        ("n", "yes", "descending= is True, False"),
        ("x", True, "there is no column 'x'"),
        ("k", True, "all rows of a key have the same 'k'"),
    ],
)
def test_a_wrong_order_is_refused(by: Any, descending: Any, message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        top(order=order_of("node", by, descending)).output_schema(SCHEMA, "node")


def test_a_column_in_the_way_is_refused() -> None:
    with pytest.raises(hg.UsageError, match="there is a column 'id' already"):
        top(rank="id").output_schema(SCHEMA, "node")
    with pytest.raises(hg.UsageError, match="there is a column 'id' already"):
        per_window(1, rank="id").output_schema(WINDOWED, "node")
    with pytest.raises(hg.UsageError, match="have a column 'op' already"):
        top().output_schema(SCHEMA.append(pa.field("op", pa.large_string())), "node")


@pytest.mark.parametrize("dtype", [pa.int64(), pa.uint64(), pa.int16(), pa.timestamp("us"), pa.date32(), pa.float64()])
@pytest.mark.parametrize("descending", [(False, True), (True, False), (True, True)])
def test_rows_are_ordered_as_python_orders_tuples(dtype: pa.DataType, descending: tuple[bool, bool]) -> None:
    rng = random.Random(str(dtype))
    extremes = {pa.int64(): [-(2**63), 2**63 - 1], pa.uint64(): [0, 2**64 - 1]}
    for values in ([0, 1, 2, 3, 4, 5], [*extremes.get(dtype, []), 1, 2]):
        groups = np.array([rng.randrange(4) for _ in range(60)])
        drawn = [(rng.choice(values), rng.choice(values)) for _ in groups]
        numbers = [
            pa.array([row[i] for row in drawn], pa.uint64() if dtype == pa.uint64() else pa.int64()) for i in (0, 1)
        ]
        columns = [
            column.cast(pa.int32()).cast(dtype) if pa.types.is_date32(dtype) else column.cast(dtype)
            for column in numbers
        ]
        signs = [-1 if one else 1 for one in descending]
        expected = sorted(
            range(len(drawn)), key=lambda row: (groups[row], *(s * v for s, v in zip(signs, drawn[row], strict=True)))
        )
        assert Order(("a", "b"), descending).rows(groups, columns).tolist() == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"count": 4},
        {"order": order_of("node", ["n", "t"], [True, True])},
        {"order": order_of("node", ["n", "id"], [True, False])},
        {"rank": None},
    ],
)
def test_rows_that_were_kept_by_another_rule_are_not_taken_for_the_top(changed: dict[str, Any]) -> None:
    assert top(**changed).state_text() != top().state_text()
    assert top(rank="place", retractions=True).state_text() == top().state_text()


CHANGING_SCHEMA = pa.schema(
    [("k", pa.large_string()), ("id", pa.int64()), ("n", pa.float64()), ("t", pa.large_string())]
)
CHANGES = CHANGING_SCHEMA.append(pa.field("op", pa.large_string()))
KINDS = [(True, False), (False, False), (False, True)]
"""Whether changes are upserts, and whether there are equal rows."""
FORMS = [
    (3, "rank", False, None),
    (3, "rank", False, hg.TTL("1h")),
    (2, "rank", True, None),
    (3, None, True, None),
    (1, None, False, None),
    (1, None, True, None),
]
"""Of how many rows the changing_top is, how its ranks are called, whether it has retractions, and the time to live."""


def changing_top(count: int = 3, **options: Any) -> ChangingTopSpec:
    given: dict[str, Any] = {
        "order": order_of("node", ["n", "t"], [True, False]),
        "rank": "rank",
        "retractions": False,
        "ttl": None,
        "identity": ("id", "n", "t"),
        "is_upsert": False,
    }
    return ChangingTopSpec(("k",), CHANGING_SCHEMA, count, **{**given, **options})


class Table:
    """A table that changes at random; ``rows`` are in the order in which they came."""

    def __init__(self, seed: int, *, is_upsert: bool, has_duplicates: bool) -> None:
        self._rng, self._is_upsert, self._has_duplicates = random.Random(seed), is_upsert, has_duplicates
        self.rows: Rows = []
        self._ids = 0

    def changes(self, count: int) -> Rows:
        """Change it ``count`` times."""
        return [change for _ in range(count) for change in self._change()]

    def _change(self) -> Rows:
        if not self.rows or self._rng.random() < 0.5:
            new = self._drawn("abc"[self._ids % 3 if self._rng.random() < 0.3 else 0], self._ids)
            self._ids += 1
            new = self._rng.choice(self.rows) if self.rows and self._has_duplicates and self._ids % 4 == 0 else new
            self.rows.append(new)
            return [{**new, "op": "insert"}]
        old = self.rows.pop(self._rng.randrange(len(self.rows)))
        if self._rng.random() < 0.5:
            return [{**old, "op": "delete"}] if not self._is_upsert else [{**old, "n": None, "t": None, "op": "delete"}]
        new = self._drawn(old["k"], old["id"])
        self.rows.append(new)
        before = [] if self._is_upsert else [{**old, "op": "update_before"}]
        return [*before, {**new, "op": "update_after"}]

    def _drawn(self, key: str, number: int) -> dict[str, Any]:
        n = self._rng.choice([None, *map(float, range(6)), float("inf")])
        return {"k": key, "id": number, "n": n, "t": self._rng.choice([None, "u", "v", str(number)])}

    def top(self, count: int, rank: str | None) -> Rows:
        found: Rows = []
        for key in sorted({row["k"] for row in self.rows}):
            rows = [row for row in self.rows if row["k"] == key]
            rows.sort(key=lambda row: (row["n"] is None, -(row["n"] or 0), row["t"] is None, row["t"] or ""))
            found += [row if rank is None else {**row, rank: i} for i, row in enumerate(rows[:count], 1)]
        return found


@pytest.fixture
def few_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so few rows be among the first ones that they are divided again and again."""
    made = ChangingTopOperator.__init__

    def init(self: ChangingTopOperator, spec: ChangingTopSpec) -> None:
        made(self, spec)
        self._first, self._first_max = spec.count, spec.count + 2

    monkeypatch.setattr(ChangingTopOperator, "__init__", init)


@pytest.mark.usefixtures("few_first")
@pytest.mark.parametrize(
    ("backend", "kind", "form"), [*product(BACKENDS[:1], KINDS, FORMS), *product(BACKENDS[1:], KINDS, FORMS[2:3])]
)
def test_the_changes_make_the_top_of_the_table(
    backend: str, kind: tuple[bool, bool], form: tuple[int, str | None, bool, hg.TTL | None]
) -> None:
    (is_upsert, has_duplicates), (count, rank, retractions, ttl) = kind, form
    identity = ("id",) if is_upsert else ("id", "n", "t")
    spec = changing_top(count, rank=rank, retractions=retractions, ttl=ttl, identity=identity, is_upsert=is_upsert)
    table, found = Table(count, is_upsert=is_upsert, has_duplicates=has_duplicates), Rows()
    rng = random.Random(count)
    with choose(backend):
        subtasks = Subtasks(spec, ("k",), 2)
        for parallelism in (1, 3, 5, 2):
            for _ in range(rng.randrange(1, 6)):
                subtasks.send(pa.RecordBatch.from_pylist(table.changes(rng.choice([1, 3, 20])), CHANGES))
            found += subtasks.rows()
            keys = spec.change_keys or ("k", "id")
            if has_duplicates and not spec.change_keys:
                shown = sorted(repr(row) for row in remaining(found))
                assert shown == sorted(repr(row) for row in table.top(count, rank))
            else:
                shown_rows = applied(found, keys, retractions=retractions, strict=True)
                assert sorted(shown_rows, key=repr) == sorted(table.top(count, rank), key=repr)
            subtasks = Subtasks(spec, ("k",), parallelism, subtasks.snapshot())


def remaining(changes: Rows) -> Rows:
    """Return the rows that came and did not go, of changes of whole rows."""
    rows: Rows = []
    for change in changes:
        row = {name: value for name, value in change.items() if name != "op"}
        if change["op"] in ("insert", "update_after"):
            rows.append(row)
        else:
            rows.remove(row)
    return rows


def sent(harness: Harness, *changes: tuple[str, int, float]) -> list[tuple[Any, ...]]:
    """Send changes (op, id, n) of key a; return what came out: op, rank, id and n."""
    rows = [{"k": "a", "id": i, "n": n, "t": "", "op": op} for op, i, n in changes]
    seen = len(harness.out.rows())
    harness.send(pa.RecordBatch.from_pylist(rows, CHANGES))
    return [(row["op"], row["rank"], row["id"], row["n"]) for row in harness.out.rows()[seen:]]


def size(harness: Harness) -> int:
    """Return how many bytes the state has."""
    frozen = harness.operator.freeze()
    assert frozen is not None
    return sum(memoryview(part).nbytes for part in frozen.encode())


def test_a_row_comes_up_when_another_one_goes() -> None:
    harness = Harness(changing_top(2))
    sent(harness, *(("insert", i, i) for i in range(400)))
    assert sent(harness, ("delete", 399, 399)) == [("update_after", 1, 398, 398), ("update_after", 2, 397, 397)]
    assert sent(harness, *(("delete", i, i) for i in range(3, 399))) == [
        ("update_after", 1, 2, 2),
        ("update_after", 2, 1, 1),
    ]
    assert sent(harness, *(("delete", i, i) for i in (0, 1, 2))) == [("delete", 1, 2, 2), ("delete", 2, 1, 1)]
    assert sent(harness, ("insert", 7, 7)) == [("insert", 1, 7, 7)]


def test_what_is_not_among_the_top_sends_nothing() -> None:
    harness = Harness(changing_top(2))
    sent(harness, ("insert", 1, 1), ("insert", 2, 2), ("insert", 3, 3))
    assert sent(harness, ("update_before", 1, 1), ("update_after", 1, 1.5)) == []
    assert sent(harness, ("delete", 1, 1.5)) == []
    assert sent(harness, ("delete", 9, 9)) == []
    assert sent(harness, ("delete", 3, 3)) == [("update_after", 1, 2, 2), ("delete", 2, 2, 2)]


def test_the_state_of_a_table_does_not_grow_with_its_changes() -> None:
    harness = Harness(changing_top(2))
    sent(harness, *(("insert", i, i) for i in range(300)))
    before = size(harness)
    for _ in range(10):
        for step in (0.5, -0.5):
            old, new = (0.0, 0.5) if step > 0 else (0.5, 0.0)
            changes = [(op, i, i + n) for i in range(100) for op, n in (("update_before", old), ("update_after", new))]
            assert sent(harness, *changes) == []
    assert size(harness) < 4 * before


@pytest.mark.parametrize("backend", ["memory", "rocksdb-without-cache"])
def test_a_key_without_changes_for_its_ttl_begins_again(backend: str) -> None:
    with choose(backend):
        harness = Harness(changing_top(2, ttl=hg.TTL("1m")), worker=Chosen.worker)
        sent(harness, ("insert", 1, 5), ("insert", 2, 1))
        harness.advance(59_000)
        assert sent(harness, ("insert", 3, 0)) == []
        harness.advance(59_000)
        assert sent(harness, ("delete", 1, 5)) == [("update_after", 1, 2, 1), ("update_after", 2, 3, 0)]
        harness.advance(60_000)
        assert sent(harness, ("delete", 2, 1), ("insert", 4, 0)) == [("insert", 1, 4, 0)]


def test_a_top_of_records_is_no_state_of_a_top_of_changes() -> None:
    changing = changing_top(ttl=hg.TTL("1h"))
    given = {
        name: getattr(changing, name) for name in ("keys", "schema", "count", "order", "rank", "retractions", "ttl")
    }
    assert changing.state_text() != TopSpec(**given).state_text()


def test_a_column_in_the_way_of_changes_is_refused() -> None:
    with pytest.raises(hg.UsageError, match="there is a column 'id' already"):
        changing_top(rank="id").output_schema(CHANGES, "node")
    with pytest.raises(hg.UsageError, match="column 'op' says what changes; give another rank="):
        changing_top(rank="op").output_schema(CHANGES, "node")
    with pytest.raises(hg.UsageError, match="there is no column 'op'"):
        changing_top(order=order_of("node", "op", True)).output_schema(CHANGES, "node")
