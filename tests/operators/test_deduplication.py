from __future__ import annotations

import random
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from tests.operators.harness import Harness, Subtasks, applied
from tests.state.backends import IN_FILES, Chosen, choose

import headgate as hg
from headgate.operators.deduplication import DeduplicateSpec

SCHEMA = pa.schema([("k", pa.int64()), ("g", pa.large_string()), ("t", pa.int64()), ("id", pa.int64())])
KEYS = ("k", "g")
Rows = list[dict[str, Any]]


def spec_of(keep: str, by: str | None = None, **options: Any) -> DeduplicateSpec:
    given = {"retractions": False, "ttl": None}
    return DeduplicateSpec(KEYS, SCHEMA, keep == "last", by, **{**given, **options})


def kept(rows: Rows, keep: str, by: str | None) -> Rows:
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        key = (row["k"], row["g"])
        if key not in found:
            found[key] = row
            continue
        old, new = (found[key][by], row[by]) if by else (0, 0)
        if keep == "last" and (old is None or (new is not None and new >= old)):
            found[key] = row
        if keep == "first" and by and new is not None and (old is None or new < old):
            found[key] = row
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize(("keep", "by"), [("first", None), ("last", None), ("first", "there"), ("last", "there")])
def test_any_column_may_be_called_as_one_of_the_state(keep: str, by: str | None) -> None:
    schema = pa.schema([("k", pa.int64()), ("there", pa.large_string())])
    harness = Harness(DeduplicateSpec(("k",), schema, keep == "last", by, False, None))
    for there in ("a", "b"):
        harness.send(pa.RecordBatch.from_pylist([{"k": 1, "there": there}], schema))
    assert harness.out.rows()[-1]["there"] == ("a" if keep == "first" else "b")


RULES = [("first", None), ("last", None), ("first", "t"), ("last", "t")]


@pytest.mark.parametrize(
    ("backend", "rule", "retractions"),
    [*product(["memory"], RULES, (False, True)), *product([IN_FILES], RULES[2:], (True,))],
)
def test_one_record_of_each_key_is_kept(backend: str, rule: tuple[str, str | None], retractions: bool) -> None:
    keep, by = rule
    spec = spec_of(keep, by, retractions=retractions)
    rng, rows, found, ids = random.Random(3), Rows(), Rows(), iter(range(10_000))
    with choose(backend):
        subtasks = Subtasks(spec, KEYS, 2)
        for parallelism in rng.sample([1, 2, 3, 5], 4):
            for _ in range(rng.randrange(1, 5)):
                more = [
                    {"k": rng.randrange(3), "g": rng.choice("ab"), "t": rng.choice([None, 1, 2, 3]), "id": next(ids)}
                    for _ in range(rng.choice([1, 3, 12]))
                ]
                rows += more
                subtasks.send(pa.RecordBatch.from_pylist(more, SCHEMA))
            found += subtasks.rows()
            expected = kept(rows, keep, by)
            if spec.is_append_only:
                assert sorted(found, key=lambda row: (row["k"], row["g"])) == expected
            else:
                assert applied(found, KEYS, retractions=retractions, strict=True) == expected
            subtasks = Subtasks(spec, KEYS, parallelism, subtasks.snapshot())


@pytest.mark.parametrize("backend", ["memory", "rocksdb-without-cache"])
def test_a_key_is_remembered_from_its_first_record_on(backend: str) -> None:
    with choose(backend):
        harness = Harness(spec_of("first", ttl=hg.TTL("1m")), worker=Chosen.worker)
        for number, wait_ms in enumerate((0, 59_000, 1_000, 10_000)):
            harness.advance(wait_ms)
            harness.send(pa.RecordBatch.from_pylist([{"k": 1, "g": "a", "t": 0, "id": number}], SCHEMA))
        assert [row["id"] for row in harness.out.rows()] == [0, 2]


def test_records_of_keys_alone_have_retractions_too() -> None:
    schema = pa.schema([("k", pa.int64())])
    harness = Harness(DeduplicateSpec(("k",), schema, True, None, True, None))
    for _ in range(2):
        harness.send(pa.RecordBatch.from_pylist([{"k": 1}, {"k": 1}], schema))
    assert [row["op"] for row in harness.out.rows()] == ["insert", "update_before", "update_after"]


def test_a_wrong_column_is_refused() -> None:
    with pytest.raises(hg.UsageError, match="there is no column 'x'"):
        spec_of("last", "x").output_schema(SCHEMA, "node")
    with pytest.raises(hg.UsageError, match="have a column 'op' already"):
        spec_of("last").output_schema(SCHEMA.append(pa.field("op", pa.large_string())), "node")
    nested = SCHEMA.append(pa.field("s", pa.struct([("a", pa.int64())])))
    with pytest.raises(hg.UsageError, match="has no order"):
        spec_of("last", "s").output_schema(nested, "node")


def test_records_that_were_kept_by_another_rule_are_not_taken_for_the_first_or_last() -> None:
    rules = [(keep, by) for keep in ("first", "last") for by in (None, "t", "id")]
    for options in ({}, {"retractions": True}):
        assert len({spec_of(keep, by, **options).state_text() for keep, by in rules}) == len(rules)
