from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import pairs
from tests.operators.changes_model import applied
from tests.operators.harness import Harness
from tests.operators.subtasks import Subtasks
from tests.state.backends import Chosen, choose

import headgate as hg
from headgate.operators.changing_top import ChangingTopOperator, ChangingTopSpec
from headgate.operators.row_order import order_of
from headgate.operators.top_rows import TopSpec

SCHEMA = pa.schema([("k", pa.large_string()), ("id", pa.int64()), ("n", pa.float64()), ("t", pa.large_string())])
CHANGES = SCHEMA.append(pa.field("op", pa.large_string()))
BACKENDS = ["memory", "rocksdb-in-files"]
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
"""Of how many rows the top is, how its ranks are called, whether it has retractions, and the time to live."""
Rows = list[dict[str, Any]]


def top(count: int = 3, **options: Any) -> ChangingTopSpec:
    given: dict[str, Any] = {
        "order": order_of("node", ["n", "t"], [True, False]),
        "rank": "rank",
        "retractions": False,
        "ttl": None,
        "identity": ("id", "n", "t"),
        "is_upsert": False,
    }
    return ChangingTopSpec(("k",), SCHEMA, count, **{**given, **options})


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
@pytest.mark.parametrize(("backend", "kind", "form"), pairs(BACKENDS, KINDS, FORMS))
def test_the_changes_make_the_top_of_the_table(
    backend: str, kind: tuple[bool, bool], form: tuple[int, str | None, bool, hg.TTL | None]
) -> None:
    (is_upsert, has_duplicates), (count, rank, retractions, ttl) = kind, form
    identity = ("id",) if is_upsert else ("id", "n", "t")
    spec = top(count, rank=rank, retractions=retractions, ttl=ttl, identity=identity, is_upsert=is_upsert)
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
    harness = Harness(top(2))
    sent(harness, *(("insert", i, i) for i in range(400)))
    assert sent(harness, ("delete", 399, 399)) == [("update_after", 1, 398, 398), ("update_after", 2, 397, 397)]
    assert sent(harness, *(("delete", i, i) for i in range(3, 399))) == [
        ("update_after", 1, 2, 2),
        ("update_after", 2, 1, 1),
    ]
    assert sent(harness, *(("delete", i, i) for i in (0, 1, 2))) == [("delete", 1, 2, 2), ("delete", 2, 1, 1)]
    assert sent(harness, ("insert", 7, 7)) == [("insert", 1, 7, 7)]


def test_what_is_not_among_the_top_sends_nothing() -> None:
    harness = Harness(top(2))
    sent(harness, ("insert", 1, 1), ("insert", 2, 2), ("insert", 3, 3))
    assert sent(harness, ("update_before", 1, 1), ("update_after", 1, 1.5)) == []
    assert sent(harness, ("delete", 1, 1.5)) == []
    assert sent(harness, ("delete", 9, 9)) == []
    assert sent(harness, ("delete", 3, 3)) == [("update_after", 1, 2, 2), ("delete", 2, 2, 2)]


def test_the_state_of_a_table_does_not_grow_with_its_changes() -> None:
    harness = Harness(top(2))
    sent(harness, *(("insert", i, i) for i in range(300)))
    before = size(harness)
    for _ in range(30):
        for step in (0.5, -0.5):
            old, new = (0.0, 0.5) if step > 0 else (0.5, 0.0)
            changes = [(op, i, i + n) for i in range(100) for op, n in (("update_before", old), ("update_after", new))]
            assert sent(harness, *changes) == []
    assert size(harness) < 4 * before


@pytest.mark.parametrize("backend", ["memory", "rocksdb-without-cache"])
def test_a_key_without_changes_for_its_ttl_begins_again(backend: str) -> None:
    with choose(backend):
        harness = Harness(top(2, ttl=hg.TTL("1m")), worker=Chosen.worker)
        sent(harness, ("insert", 1, 5), ("insert", 2, 1))
        harness.advance(59_000)
        assert sent(harness, ("insert", 3, 0)) == []
        harness.advance(59_000)
        assert sent(harness, ("delete", 1, 5)) == [("update_after", 1, 2, 1), ("update_after", 2, 3, 0)]
        harness.advance(60_000)
        assert sent(harness, ("delete", 2, 1), ("insert", 4, 0)) == [("insert", 1, 4, 0)]


def test_a_top_of_records_is_no_state_of_a_top_of_changes() -> None:
    changing = top(ttl=hg.TTL("1h"))
    given = {
        name: getattr(changing, name) for name in ("keys", "schema", "count", "order", "rank", "retractions", "ttl")
    }
    assert changing.state_text() != TopSpec(**given).state_text()


def test_a_column_in_the_way_is_refused() -> None:
    with pytest.raises(hg.UsageError, match="there is a column 'id' already"):
        top(rank="id").output_schema(CHANGES, "node")
    with pytest.raises(hg.UsageError, match="column 'op' says what changes; give another rank="):
        top(rank="op").output_schema(CHANGES, "node")
    with pytest.raises(hg.UsageError, match="there is no column 'op'"):
        top(order=order_of("node", "op", True)).output_schema(CHANGES, "node")
