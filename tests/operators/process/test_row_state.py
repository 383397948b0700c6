"""Reducing and aggregating state: what is added is combined, and checkpoints hold values, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.harness import Harness
from tests.state.backends import EACH, Chosen, choose, rows_in

import headgate as hg
from headgate.codec.snapshot import decode_sections
from headgate.errors import UsageError
from headgate.operators.base import RestoredState
from headgate.operators.process.connected_process import process_spec
from headgate.operators.specs import state_text

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64())])
MEAN = pa.struct([("sum", pa.int64()), ("n", pa.int64())])


class Mean(hg.AggregateFunction[int, dict[str, int], float]):
    def initial(self) -> dict[str, int]:
        return {"sum": 0, "n": 0}

    def add(self, accumulator: dict[str, int], value: int) -> dict[str, int]:
        accumulator["sum"] += value  # changed in place: the state must not notice
        accumulator["n"] += 1
        return accumulator

    def result(self, accumulator: dict[str, int]) -> float:
        return accumulator["sum"] / accumulator["n"]


class Both(hg.ProcessFunction):
    """Adds to both kinds of state, and returns what they show. 0 clears."""

    schema = {"key": pa.int64(), "total": pa.int64(), "mean": pa.float64()}

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.reducing("total", pa.int64(), lambda so_far, value: so_far + value)
        self.mean = state.aggregating("mean", MEAN, Mean())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        if row["n"] == 0:
            self.total.clear()
            self.mean.clear()
        else:
            self.total.add(row["n"])
            self.mean.add(row["n"])
        assert self.total.exists == self.mean.exists == (row["n"] != 0)
        yield {"key": context.key, "total": self.total.get(), "mean": self.mean.get(-1.0)}


class Total(hg.ProcessFunction):
    """One state, reducing."""

    ttl: hg.TTL | None = None

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.reducing("total", pa.int64(), lambda so_far, value: so_far + value, ttl=self.ttl)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.total.add(row["n"])
        yield {"key": context.key, "n": self.total.get()}


class TotalAsValue(hg.ProcessFunction):
    """The same, as a value."""

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.value("total", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.total.put(self.total.get(0) + row["n"])
        yield {"key": context.key, "n": self.total.get()}


class TotalByBatch(hg.BatchProcessFunction):
    """The same, by batch."""

    def open(self, state: hg.BatchStateHandle) -> None:
        self.total = state.reducing("total", pa.int64(), "add")

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        changed = self.total.add(batch["n"])
        assert self.total.exists().all()
        return batch.with_columns(n=self.total.get()).filter(changed)


FORMS: dict[str, Callable[[], Any]] = {"reducing": Total, "value": TotalAsValue, "by batch": TotalByBatch}


def harness(function: Any, states: Any = ()) -> Harness:
    return Harness(process_spec("node", ("key",), function, SCHEMA), states, worker=Chosen.worker)


def sent(run: Harness, *rows: tuple[int, int]) -> list[dict[str, Any]]:
    run.send(pa.RecordBatch.from_pylist([{"key": key, "n": n} for key, n in rows], SCHEMA))
    found = run.out.rows()
    run.out.batches.clear()
    return found


def stored(state: RestoredState) -> dict[str, list[dict[str, Any]]]:
    return rows_in(dict(decode_sections(state.payload, "test")))


@pytest.mark.parametrize("backend", EACH)
@given(batches=st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=6), max_size=4))
def test_what_was_added_is_combined_as_plain_python_does_it(backend: str, batches: list[list[tuple[int, int]]]) -> None:
    with choose(backend):
        run, added = harness(Both()), dict[int, list[int]]()
        for batch in batches:
            wanted = []
            for key, n in batch:
                mine = added.setdefault(key, [])
                mine[:] = [*mine, n] if n else []
                mean = sum(mine) / len(mine) if mine else -1.0
                wanted.append({"key": key, "total": sum(mine) if mine else None, "mean": mean})
            assert sent(run, *batch) == wanted
            run = harness(Both(), [run.snapshot()])


@pytest.mark.parametrize("backend", EACH)
def test_a_checkpoint_has_values_whatever_combined_them(backend: str) -> None:
    with choose(backend):
        run = harness(Both())
        sent(run, (1, 5), (2, 7), (1, 6))
        found = stored(run.snapshot())
    assert found["total"] == [{"key0": 1, "value": 11}, {"key0": 2, "value": 7}]
    assert found["mean"] == [{"key0": 1, "value": {"sum": 11, "n": 2}}, {"key0": 2, "value": {"sum": 7, "n": 1}}]
    texts = {state_text(process_spec("node", ("key",), make(), SCHEMA)) for make in FORMS.values()}
    assert len(texts) == 1


@pytest.mark.parametrize("later", FORMS)
@pytest.mark.parametrize("former", FORMS)
def test_a_function_may_change_its_form_and_its_kind(former: str, later: str) -> None:
    run = harness(FORMS[former]())
    sent(run, (1, 5), (2, 7))
    run = harness(FORMS[later](), [run.snapshot()])
    assert sent(run, (1, 1)) == [{"key": 1, "n": 6}]


class Forgetful(Total):
    def open(self, state: hg.StateHandle) -> None:
        self.total = state.reducing("total", pa.int64(), lambda so_far, value: None)


def test_nothing_becomes_none() -> None:
    run = harness(Forgetful())
    sent(run, (1, 5))
    with pytest.raises(Exception, match="state 'total' of operator 'node': its function returned None") as caught:
        sent(run, (1, 6))
    assert "clear()" in str(caught.value)
    assert stored(run.snapshot())["total"] == [{"key0": 1, "value": 5}]
    with pytest.raises(Exception, match="None cannot be added"):
        run.send(pa.RecordBatch.from_pylist([{"key": 2, "n": None}], SCHEMA))


def declaring(declare: Callable[[Any], object], base: Any = hg.ProcessFunction) -> Any:
    class Wrong(base):  # type: ignore[misc]
        def open(self, state: Any) -> None:
            declare(state)

    return Wrong()


WRONG = {
    "reducing state 'x' needs a function of two values": lambda s: s.reducing("x", pa.int64(), "add"),
    "aggregating state 'x' needs a headgate.AggregateFunction": lambda s: s.aggregating("x", pa.int64(), max),
    "two states are named 'x'": lambda s: (s.value("x", pa.int64()), s.reducing("x", pa.int64(), max)),
}
WRONG_BY_BATCH = {
    'knows "min", "max", "add" and "last", not': lambda s: s.reducing("x", pa.int64(), max),
    'by "add" needs numbers': lambda s: s.reducing("x", pa.string(), "add"),
}


@pytest.mark.parametrize("said", [*WRONG, *WRONG_BY_BATCH])
def test_what_cannot_combine_is_told_when_the_pipeline_is_built(said: str) -> None:
    function = declaring(WRONG[said]) if said in WRONG else declaring(WRONG_BY_BATCH[said], hg.BatchProcessFunction)
    with pytest.raises(UsageError, match=said):
        process_spec("node", ("key",), function, SCHEMA)


class Expiring(Total):
    ttl = hg.TTL("10ms")


@pytest.mark.parametrize("backend", EACH)
def test_what_expired_is_not_combined_with(backend: str) -> None:
    with choose(backend):
        run = harness(Expiring())
        assert sent(run, (1, 5), (1, 6))[-1]["n"] == 11
        run.now_ms += 9
        assert sent(run, (1, 1)) == [{"key": 1, "n": 12}]
        run.now_ms += 10
        assert sent(run, (1, 2)) == [{"key": 1, "n": 2}]
