"""Any history of operations, of time and of restores shows what a few lines of plain Python with a clock show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.conftest import few
from tests.operators.harness import BORN_MS, Harness
from tests.operators.process.expiring_functions import FORMS, OPERATIONS, SCHEMA, Model
from tests.operators.process.test_ttl import PUT, unswept
from tests.runtime.checkpoints.frozen_cases import small
from tests.state.backends import DATABASES, EACH, Chosen, choose

import headgate as hg
from headgate.operators.keys import partition
from headgate.operators.process.connected_process import process_spec

TTLS = ((5, "write"), (9, "write"), (5, "read_and_write"), (12, "read_and_write"), (None, "write"))
ttls = st.sampled_from(TTLS)
forms = st.sampled_from(sorted(FORMS))
records = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(OPERATIONS), st.integers(0, 2), st.integers(-9, 9)),
    min_size=1,
    max_size=12,
)
steps = st.one_of(
    st.tuples(st.just("records"), records),
    st.tuples(st.just("records"), records),
    st.tuples(st.just("wait"), st.integers(1, 8)),
    st.tuples(st.just("round"), st.none()),
    st.tuples(st.just("restore"), st.tuples(forms, st.integers(1, 3), st.integers(-4, 6), st.none() | ttls)),
)


@pytest.fixture(autouse=True, params=EACH)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param):
        yield


TTL_THAT_GOES = [("records", [(0, "value put", 0, 0)]), ("restore", ("batch", 1, 5, (None, "write")))]


def runs_of(form: str, ttl: Any, states: Any = (), count: int = 1, begun_ms: int = 0) -> list[Harness]:
    duration, update = ttl
    declared = None if duration is None else hg.TTL(f"{duration}ms", update)
    spec = process_spec("node", ("key",), FORMS[form](declared), SCHEMA)
    return [Harness(spec, states, subtask=(i, count), begun_ms=begun_ms, worker=Chosen.worker) for i in range(count)]


def seen_by(runs: list[Harness]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for run in runs:
        for row in run.out.rows():
            found[row["key"]].append(row["seen"])
        run.out.batches.clear()
    return dict(found)


@pytest.mark.parametrize("_on_each_backend", DATABASES, indirect=True)
@given(history=st.lists(steps, max_size=16), form=forms, ttl=ttls)
@settings(max_examples=10)
def test_any_history_with_a_ttl_on_rocksdb_is_that_of_plain_python_with_a_clock(
    history: list[tuple[str, Any]], form: str, ttl: tuple[int | None, str]
) -> None:
    with small():
        check(history, form, ttl)


@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@given(history=st.lists(steps, max_size=16), form=forms, ttl=ttls)
@example(history=TTL_THAT_GOES, form="batch", ttl=(5, "write"))
@settings(max_examples=100)
def test_any_history_with_a_ttl_is_that_of_plain_python_with_a_clock(
    history: list[tuple[str, Any]], form: str, ttl: tuple[int | None, str]
) -> None:
    with small():
        check(history, form, ttl)


def check(history: list[tuple[str, Any]], form: str, ttl: tuple[int | None, str]) -> None:
    runs, clock_ms = runs_of(form, ttl), 0
    model = Model(ttl[0], ttl[1] == "read_and_write", BORN_MS)
    for what, given_ in history:
        match what:
            case "records":
                batch = pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, r, strict=True)) for r in given_], SCHEMA)
                for run, part in zip(runs, partition(batch, ["key"], 128, len(runs)), strict=True):
                    if part is not None and part.num_rows:
                        run.send(part)
                wanted: dict[int, list[str]] = defaultdict(list)
                for record in given_:
                    wanted[record[0]].append(model.do(*record))
                assert seen_by(runs) == dict(wanted)
            case "wait":
                clock_ms += given_
                model.now_ms += given_
                for run in runs:
                    run.now_ms = clock_ms
            case "round":
                for run in runs:
                    run.operator.on_round(1)
                assert seen_by(runs) == {key: ["round"] for key in model.keys()}  # noqa: SIM118
            case _:
                form, count, shift_ms, other = given_
                kept_ms = 0 if ttl[0] is None else model.now_ms  # without a TTL nobody needs to know what time it was
                ttl = other or ttl
                frozen = [run.snapshot() for run in runs]
                model.drop()  # what lived at the barrier stays if there is no TTL any more
                clock_ms += shift_ms
                runs = runs_of(form, ttl, frozen, count, clock_ms)
                model.now_ms = max(kept_ms, BORN_MS + clock_ms)
                model.restore(ttl[0], ttl[1] == "read_and_write")
        counted = [sum(frozen.rows().values()) for run in runs if (frozen := run.operator.freeze()) is not None]
        assert sum(counted) == model.rows()


@pytest.mark.parametrize(("form", "ttl"), few(list(product(sorted(FORMS), TTLS)), 4))
def test_a_history_of_everything_is_that_of_plain_python(form: str, ttl: tuple[int | None, str]) -> None:
    """One long history for whoever plants a bug: every operation on three keys again and again, and a restore."""
    many = [(key, do, number % 3, number) for number, do in enumerate((*OPERATIONS * 2, *PUT)) for key in range(3)]
    reads = [record for record in many if record[1].endswith(("get", "items", "exists", "count", "contains"))]
    waits = [("wait", ms) for ms in (1, 3, 4, 5)]
    some = [step for wait in waits for step in (("records", many), wait, ("records", reads), wait, ("round", None))]
    restore = ("restore", ("batch" if form == "row" else "row", 2, -3, None))
    with small(), unswept():
        check([*some, restore, *some], form, ttl)
