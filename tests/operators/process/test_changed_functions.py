"""A function by row or by batch whose states were changed reads what the one before had put."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness

import headgate as hg
from headgate.errors import UsageError
from headgate.model.schema_evolution import StateRules
from headgate.operators.process.connected_process import process_spec
from headgate.operators.specs import state_rules, state_text

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64())])
Opening = Callable[[Any], Any]


class ByRow(hg.ProcessFunction):
    """Puts every record, or, if it is asked to, says what its key has."""

    schema = {"found": pa.large_string()}

    def __init__(self, opening: Opening, *, is_reading: bool = False) -> None:
        self._opening, self._is_reading = opening, is_reading

    def open(self, state: hg.StateHandle) -> None:
        self.kept = self._opening(state)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        if self._is_reading:
            return [{"found": str(self.kept.get())}]
        self.kept.put({"a": row["n"], "b": "old"})
        return []


class ByBatch(hg.BatchProcessFunction):
    schema = ByRow.schema

    def __init__(self, opening: Opening, *, is_reading: bool = False) -> None:
        self._opening, self._is_reading = opening, is_reading

    def open(self, state: hg.BatchStateHandle) -> None:
        self.kept = self._opening(state)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame | None:
        if self._is_reading:
            return pl.DataFrame({"found": [str(value) for value in self.kept.get().to_list()]})
        self.kept.put(batch.select(pl.struct(a=pl.col("n"), b=pl.lit("old"))).to_series())
        return None


FORMS = [ByRow, ByBatch]
OLD = pa.struct([("a", pa.int64()), ("b", pa.large_string())])
NEW = pa.struct([("c", pa.large_list(pa.int64())), ("x", pa.int64())])


def spec_of(function: Any) -> Any:
    return process_spec("node", ("key",), function, SCHEMA)


def changed(state: Any) -> Any:
    evolution = hg.Evolution(defaults={"c": [1, 2]}, renamed={"a": "x"}, renamed_from="kept")
    return state.value("now", NEW, evolution=evolution)


@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", FORMS)
def test_a_changed_function_reads_what_the_one_before_had_put(before: Any, after: Any) -> None:
    run = Harness(spec_of(before(lambda state: state.value("kept", OLD))))
    run.send(pa.RecordBatch.from_pylist([{"key": key, "n": key * 10} for key in range(3)], schema=SCHEMA))
    later = Harness(spec_of(after(changed, is_reading=True)), [run.snapshot()])
    later.send(pa.RecordBatch.from_pylist([{"key": key, "n": 0} for key in range(4)], schema=SCHEMA))
    assert later.out.rows() == [*({"found": str({"c": [1, 2], "x": key * 10})} for key in range(3)), {"found": "None"}]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_is_in_the_spec_and_not_in_the_identity(form: Any) -> None:  # EV1
    def open_now(state: Any) -> Any:
        state.forget("gone")
        return changed(state)

    spec, plain = spec_of(form(open_now)), spec_of(form(lambda state: state.value("now", NEW)))
    rules = state_rules(spec, "node")
    assert dict(rules.states) == {"now": StateRules("kept", (("a", "x"),), frozenset({"c"}))}
    assert rules.forgotten == {"gone"}
    assert state_text(spec, "node") == state_text(plain, "node")


@pytest.mark.parametrize(
    ("opening", "problem"),
    [
        (lambda s: s.value("now", NEW, evolution={"c": 1}), "its evolution is an Evolution"),
        (
            lambda s: s.value("now", NEW, evolution=hg.Evolution({"d": 1})),
            "names the field 'd', but the fields are c, x",
        ),
        (lambda s: s.list("now", pa.int64(), evolution=hg.Evolution({"d": 1})), "but it has no fields"),
        (lambda s: s.value("now", NEW, evolution=hg.Evolution(renamed_from="now")), "which is declared as well"),
        (lambda s: (s.value("now", NEW), s.forget("now")), r"forget\('now'\) leaves it behind"),
        (lambda s: s.forget(""), "forget takes the name of a state"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_evolution_is_an_error_when_the_pipeline_is_built(form: Any, opening: Opening, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        spec_of(form(opening))


def test_a_wrong_evolution_of_a_reduction_is_an_error_when_the_pipeline_is_built(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    keyed = pipeline.source(hg.FromRows([{"key": 1}])).key_by("key")
    with pytest.raises(
        UsageError, match="operator 'reduce': its Evolution names the field 'd', but the fields are key"
    ):
        keyed.reduce(lambda total, row: row, evolution=hg.Evolution({"d": 1}))
