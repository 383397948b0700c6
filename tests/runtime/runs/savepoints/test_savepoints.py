"""Savepoints of running pipelines, with real workers and files: whole, moved, restored elsewhere, in every mode."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, recounted, same

import headgate as hg
from headgate.api.streams.stream import Stream
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed, StorageError, UsageError
from headgate.model.config import StartConfig
from headgate.model.graph import Edge, InputName, OutputTag, Partitioner, Role
from headgate.model.ids import CheckpointId, NodeName
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import CheckpointOutcome, SilentObserver
from headgate.operators.base import Operator
from headgate.operators.specs import output_schemas
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver import pipeline_lock
from headgate.runtime.driver.pipeline_lock import RequestFile
from headgate.storage.local import LocalStorage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
SOURCE = generator(2_000, 1_000, batch=20)
SLOW = 50
"""Records each second of a run whose successor is to see every key again, however late the savepoint is taken."""


def windowed(root: Path, *, interval: str | None = "40ms", name: str = "p", parallelism: int = 2) -> PipelineDefinition:
    """Count and sum of each window, and every record beside them."""
    pipeline = pipeline_at(root, parallelism=parallelism, interval=interval, name=name)
    stream = pipeline.source(SOURCE).with_timestamps("ts", out_of_orderness="1d")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len(), total=pl.col("value").sum())
    counts.sink(hg.FileSink(root / "out", "parquet"), name="out")
    stream.select("id", "key", "value").sink(hg.FileSink(root / "all", "parquet"), name="all")
    return definition_of(pipeline, inline_bytes_max=0)


def restoring(definition: PipelineDefinition, place: Path) -> PipelineDefinition:
    return replace(definition, config=replace(definition.config, start=StartConfig(str(place))))


def ended_with(run: Run, place: Path, *, drain: bool = False) -> CheckpointOutcome:
    """End with a savepoint; return what came of it."""
    run.driver.is_asked_to_end = True
    asked = run.driver.end_with_savepoint(str(place), drain=drain)
    outcome = asked.result(WAIT_S)
    assert run.result().savepoint == outcome, "whoever waits for the end is told, too"
    return outcome


def log_of(root: Path) -> CheckpointLog:
    return CheckpointLog(LocalStorage(root / "checkpoints"), "p")


def newest(root: Path) -> Manifest:
    return candidates(log_of(root).observe())[0]


def bytes_of(place: Path) -> Mapping[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def rows_of(*roots: Path, sink: str = "all") -> pl.DataFrame:
    found = [read_committed(str(root / sink)) for root in roots]
    return pl.concat([frame for frame in found if frame.height])


def test_a_savepoint_that_was_moved_is_restored(start: Start, tmp_path: Path) -> None:  # SV3, SV5, SV10
    first = start(windowed(tmp_path / "a"))
    first.wait_checkpoints(1)
    outcome = ended_with(first, tmp_path / "taken" / "here")
    assert outcome == CheckpointOutcome(newest(tmp_path / "a").checkpoint, savepoint=str(tmp_path / "taken" / "here"))
    moved = Path(shutil.move(tmp_path / "taken" / "here", tmp_path / "moved"))
    before = bytes_of(moved)
    second = start(restoring(windowed(tmp_path / "b", name="q", parallelism=3), moved))
    assert second.result().is_finished
    assert bytes_of(moved) == before
    same(rows_of(tmp_path / "a", tmp_path / "b", sink="out"), recounted(SOURCE))
    same(rows_of(tmp_path / "a", tmp_path / "b"), events(SOURCE).select("id", "key", "value"))


def test_a_savepoint_has_the_state_of_the_checkpoint_at_its_barrier(start: Start, tmp_path: Path) -> None:  # SV1, SV2
    run = start(windowed(tmp_path, interval=None))
    run.pids()
    outcome = run.driver.take_savepoint(str(tmp_path / "taken")).result(WAIT_S)
    manifest, savepoint = newest(tmp_path), SavepointDirectory(str(tmp_path / "taken")).read()
    assert (outcome.checkpoint, outcome.savepoint) == (manifest.checkpoint, str(tmp_path / "taken"))
    whole = savepoint.manifest
    assert (savepoint.pipeline, whole.checkpoint, whole.state_texts) == ("p", manifest.checkpoint, manifest.state_texts)
    assert whole.committables == (), "it promises nothing"
    life = log_of(tmp_path).known_identity(log_of(tmp_path).observe())
    assert life is not None
    assert savepoint.life == life.id
    mine = LocalStorage(tmp_path / "taken")
    there = CheckpointLog(mine, savepoint.files).files
    sections = {entry.subtask: log_of(tmp_path).files.sections(entry) for entry in manifest.entries}
    assert {entry.subtask: there.sections(entry) for entry in whole.entries} == sections
    assert (
        not {part.path for part in whole.parts} - {p.removeprefix(f"{savepoint.files}/") for p in mine.list("")} - {""}
    )
    for taken in (tmp_path / "taken", tmp_path / "checkpoints"):
        with pytest.raises(UsageError, match=r"already|not empty"):
            run.driver.take_savepoint(str(taken))
        with pytest.raises(UsageError, match=r"already|not empty"):
            run.driver.end_with_savepoint(str(taken), drain=False)
    assert not run.driver.result.done(), "a mistyped path stops nothing"
    assert run.result().is_finished


def nothing_can_be_written_elsewhere() -> None:
    from headgate.runtime.checkpoints import snapshot_writer

    def refuse(url: str) -> Any:
        raise StorageError("write", url, "no space left", is_transient=False)

    snapshot_writer.open_storage = refuse


def test_what_a_failed_try_left_is_no_savepoint_and_in_nobodys_way(start: Start, tmp_path: Path) -> None:  # SV4, SV7
    run = start(windowed(tmp_path, interval=None), prepare=nothing_can_be_written_elsewhere)
    run.pids()
    place = tmp_path / "taken"
    outcome = run.driver.take_savepoint(str(place)).result(WAIT_S)
    assert outcome.savepoint is None
    assert "no space left" in outcome.reason
    assert run.checkpoints == [newest(tmp_path).checkpoint], "the checkpoint is completed all the same"
    left = place / "files-0123456789abcdef" / "chk-0000000001" / "x-0.g1"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    outcome = ended_with(run, place)
    assert outcome.savepoint is None
    assert not (place / "savepoint").exists()
    second = start(windowed(tmp_path, interval=None))
    second.pids()
    assert ended_with(second, place).savepoint == str(place)
    assert left.read_bytes() == b"half", "of another try, perhaps under way"


class Counting(hg.ProcessFunction):
    """Numbers the records of each key."""

    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        number = self.count.get(0) + 1
        self.count.put(number)
        yield {"key": row["key"], "n": number}


@pytest.mark.parametrize("mode", few(["at_least_once", "exactly_once", "at_most_once"], 1))
def test_a_savepoint_in_each_mode_is_a_cut(start: Start, tmp_path: Path, mode: str) -> None:  # SV9
    def counting(root: Path, mode: str, rate: float | None = None) -> PipelineDefinition:
        pipeline = hg.Pipeline(
            "p", parallelism=2, checkpointing=hg.Checkpointing(interval="40ms", dir=root / "checkpoints", mode=mode)
        )
        counts = pipeline.source(replace(SOURCE, rows_per_second=rate)).key_by("key")
        counts.process(Counting(), name="counting").sink(hg.FileSink(root / "out", "parquet"), name="out")
        return definition_of(pipeline)

    first = start(counting(tmp_path / "a", mode, SLOW))
    first.wait_checkpoints(2)
    outcome = first.driver.take_savepoint(str(tmp_path / "taken")).result(WAIT_S)
    assert outcome.savepoint is not None, outcome
    first.driver.cancel()
    second = start(restoring(counting(tmp_path / "b", "exactly_once"), tmp_path / "taken"))
    assert second.result().is_finished
    found = rows_of(tmp_path / "b", sink="out").group_by("key").agg(pl.col("n").max()).sort("key")
    wanted = events(SOURCE).group_by("key").agg(n=pl.len().cast(pl.Int64)).sort("key")
    found = wanted.select("key").join(found, on="key", how="left").fill_null(0)
    if mode == "at_least_once":
        assert (found["n"] >= wanted["n"]).all()
    else:
        assert found.rows() == wanted.rows()


def test_a_stop_with_a_savepoint_survives_a_failure(start: Start, tmp_path: Path) -> None:  # SV10
    run = start(windowed(tmp_path))
    run.wait_checkpoints(1)
    run.kill(0)
    outcome = ended_with(run, tmp_path / "taken")
    assert outcome.savepoint is not None
    assert (
        outcome.checkpoint
        == newest(tmp_path).checkpoint
        == SavepointDirectory(outcome.savepoint).read().manifest.checkpoint
    )


def test_a_drain_with_a_savepoint_ends_with_the_final_checkpoint(start: Start, tmp_path: Path) -> None:  # SV10
    run = start(windowed(tmp_path))
    run.wait_checkpoints(1)
    outcome = ended_with(run, tmp_path / "taken", drain=True)
    assert outcome.savepoint is not None
    assert SavepointDirectory(outcome.savepoint).read().manifest.is_final


def test_savepoints_by_the_public_api(started: list[PipelineDefinition], tmp_path: Path) -> None:
    def pipeline(name: str, rate: float | None) -> hg.Pipeline:
        made = hg.Pipeline(
            name, parallelism=2, checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path / "checkpoints")
        )
        source = replace(SOURCE, rows_per_second=rate)
        counts = made.source(source, name="in").key_by("key").process(Counting(), name="counting")
        counts.sink(hg.FileSink(tmp_path / name, "parquet"), name="out")
        return made

    class Watching(SilentObserver):
        def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
            is_running.set()

    is_running = threading.Event()
    handle = pipeline("a", 1).start(observer=Watching())
    assert is_running.wait(WAIT_S)
    outcome = handle.take_savepoint(tmp_path / "one")
    assert outcome is not None
    assert outcome.savepoint == str(tmp_path / "one")
    with pytest.raises(UsageError, match="there is a savepoint at"):
        handle.stop(savepoint=tmp_path / "one")
    result = handle.stop(savepoint=tmp_path / "two")
    assert result is not None
    assert result.savepoint is not None
    assert (result.is_finished, result.savepoint.savepoint) == (False, str(tmp_path / "two"))
    assert pipeline("b", None).run(restore=tmp_path / "two").is_finished
    assert started[-1].config.start == StartConfig(str(tmp_path / "two"))
    found = [read_committed(str(tmp_path / name)).height for name in ("a", "b")]
    assert sum(found) == events(SOURCE).height


def test_a_changed_program_goes_on_from_a_savepoint(start: Start, tmp_path: Path) -> None:  # SV30, SV31, R15
    def edited(
        root: Path, *branches: str, step: str, parallelism: int, rate: float | None = None
    ) -> PipelineDefinition:
        pipeline = pipeline_at(root, parallelism=parallelism, name=root.name)
        rows = pipeline.source(replace(SOURCE, rows_per_second=rate), name="in").filter(pl.col("value") >= 0, name=step)
        for branch in branches:
            counts = rows.key_by("key").process(Counting(), name=branch)
            counts.sink(hg.FileSink(root / branch, "parquet"), name=f"{branch}-out")
        return definition_of(pipeline)

    first = start(edited(tmp_path / "a", "kept", "gone", step="all", parallelism=2, rate=SLOW))
    first.wait_checkpoints(2)
    outcome = ended_with(first, tmp_path / "taken")
    assert outcome.savepoint is not None
    changed = edited(tmp_path / "b", "kept", "fresh", step="everything", parallelism=3)
    refused = start(restoring(changed, tmp_path / "taken"))
    with pytest.raises(PipelineFailed, match="state of operator 'gone', which this pipeline does not have"):
        refused.result()
    allowed = StartConfig(str(tmp_path / "taken"), None, frozenset({"gone", "gone-out"}))
    second = start(replace(changed, config=replace(changed.config, start=allowed)))
    assert second.result().is_finished
    assert "operator 'fresh' is new: it starts empty" in second.notes
    wanted = events(SOURCE).group_by("key").agg(n=pl.len().cast(pl.Int64))
    kept, fresh = (rows_of(tmp_path / "b", sink=sink) for sink in ("kept", "fresh"))
    same(kept.group_by("key").agg(pl.col("n").max()), wanted)
    per_key = fresh.group_by("key").agg(most=pl.col("n").max(), count=pl.len().cast(pl.Int64))
    assert per_key["most"].equals(per_key["count"], null_equal=True), "it began with nothing"


def begun(start: Start, root: Path) -> Run:
    """A pipeline that takes no checkpoint by itself."""
    pipeline = pipeline_at(root, interval=None)
    pipeline.source(generator(2_000, 1_000, batch=20)).sink(hg.FileSink(root / "out"), name="out")
    run: Run = start(definition_of(pipeline))
    run.pids()
    return run


def test_a_checkpoint_is_taken_on_request(start: Start, tmp_path: Path) -> None:  # C60
    run = begun(start, tmp_path)
    first = run.driver.take_checkpoint().result(WAIT_S)
    second = run.driver.take_checkpoint().result(WAIT_S)
    assert [first.checkpoint, second.checkpoint] == run.checkpoints[:2]
    assert run.result().is_finished
    assert run.driver.take_checkpoint().result(WAIT_S) == CheckpointOutcome(None, "the pipeline ended")


def test_a_request_that_a_failure_meets_is_answered(start: Start, tmp_path: Path) -> None:  # C62
    run = begun(start, tmp_path)
    frozen = run.suspend(0)  # it acknowledges nothing
    asked = run.driver.take_checkpoint()
    run.wait(lambda: run.driver.supervision.live is not None and bool(run.driver.supervision._asked), "it was asked")
    os.kill(frozen, 9)
    assert asked.result(WAIT_S) == CheckpointOutcome(None, "the pipeline restarted")
    run.wait_restarts(1)
    assert run.driver.take_checkpoint().result(WAIT_S).checkpoint is not None, "who asks again gets one"


def test_whoever_asks_from_another_process_is_answered(start: Start, tmp_path: Path) -> None:
    run = begun(start, tmp_path)
    root = str(tmp_path / "checkpoints")
    asks = [RequestFile.leave(root, "p") for _ in range(2)]
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / "checkpoints" / "p" / f"checkpoint-{int(dead.stdout)}-aa.answered").touch()
    run.driver.answer_asks()
    answers = [ask.answered() for ask in asks]
    assert answers == [CheckpointOutcome(run.checkpoints[0])] * 2, "one checkpoint is for all who wait"
    assert pipeline_lock.waiting_requests(root, "p") == []
    for ask in asks:
        ask.remove()
    assert list((tmp_path / "checkpoints" / "p").glob("checkpoint-*")) == [], "the dead one's is gone, too"


ORDERS, PAYMENTS = InputName("orders"), InputName("payments")
PAID, UNPAID = OutputTag("main"), OutputTag("unpaid")
ORDER = pa.schema([("order", pa.int64()), ("amount", pa.int64())])
PAYMENT = pa.schema([("payer", pa.large_string()), ("order", pa.int64())])


@dataclass(frozen=True)
class MatchSpec:
    """Orders with their payments; what is never paid goes to a side output when the input ends."""

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        if set(inputs) != {ORDERS, PAYMENTS}:
            raise UsageError(f"operator '{node}' needs orders and payments, not {sorted(inputs)}")
        return {PAID: pa.schema([*inputs[ORDERS], inputs[PAYMENTS].field("payer")]), UNPAID: inputs[ORDERS]}

    def build(self) -> Operator:
        return MatchOperator()


class MatchOperator(Operator):
    def __init__(self) -> None:
        self._orders: list[pa.RecordBatch] = []
        self._payments: list[pa.RecordBatch] = []

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        assert batch.schema.equals(ORDER if name == ORDERS else PAYMENT)
        (self._orders if name == ORDERS else self._payments).append(batch)

    def finish(self) -> None:
        orders = pl.from_arrow(pa.Table.from_batches(self._orders, ORDER))
        payments = pl.from_arrow(pa.Table.from_batches(self._payments, PAYMENT))
        assert isinstance(orders, pl.DataFrame)
        assert isinstance(payments, pl.DataFrame)
        self._emit(PAID, orders.join(payments, on="order"), [*ORDER, PAYMENT.field("payer")])
        self._emit(UNPAID, orders.join(payments, on="order", how="anti"), list(ORDER))

    def _emit(self, tag: OutputTag, frame: pl.DataFrame, fields: list[pa.Field]) -> None:
        for batch in frame.to_arrow().cast(pa.schema(fields)).to_batches():
            if tag == PAID:
                self.output.emit(batch)
            else:
                self.output.emit_to(tag, batch)


def matched(pipeline: hg.Pipeline, orders: Stream, payments: Stream) -> tuple[Stream, Stream]:
    """Return what is paid and what is not, as an API of joins will."""
    edges = tuple(
        Edge(edge.upstream, Partitioner.HASH, ("order",), edge.tag, name)
        for stream, name in ((orders, ORDERS), (payments, PAYMENTS))
        for edge in stream._all_edges
    )
    spec, node = MatchSpec(), NodeName("match")
    schemas = dict(output_schemas(spec, {ORDERS: orders._schema, PAYMENTS: payments._schema}, str(node)))
    main = schemas.pop(PAID)
    pipeline._builder.add(node, Role.OPERATOR, edges, spec, main, side_outputs=schemas)
    return Stream(pipeline, (Edge(node),), main), Stream(pipeline, (Edge(node, tag=UNPAID),), schemas[UNPAID])


@pytest.mark.parametrize("parallelism", few([3, 1], 1))
def test_an_operator_knows_its_inputs_apart_and_has_outputs_of_their_own(
    start: Any, tmp_path: Path, parallelism: int
) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=parallelism)
    numbers = range(3_000)
    orders = pipeline.source(hg.FromRows([{"order": n, "amount": n * 10} for n in numbers]))
    payments = pipeline.source(hg.FromRows([{"payer": f"p{n}", "order": n} for n in numbers if n % 3]))
    paid, unpaid = matched(pipeline, orders, payments)
    paid.sink(hg.FileSink(tmp_path / "paid", "parquet"), name="paid")
    unpaid.filter(pl.col("amount") > 0).sink(hg.FileSink(tmp_path / "unpaid", "parquet"), name="unpaid")  # chained
    assert start(definition_of(pipeline)).result().is_finished
    found = read_committed(str(tmp_path / "paid")).sort("order").to_dicts()
    assert found == [{"order": n, "amount": n * 10, "payer": f"p{n}"} for n in numbers if n % 3]
    left = read_committed(str(tmp_path / "unpaid")).sort("order").to_dicts()
    assert left == [{"order": n, "amount": n * 10} for n in numbers if n and n % 3 == 0]


def test_an_operator_says_which_inputs_it_needs() -> None:
    with pytest.raises(UsageError, match=r"operator 'match' needs orders and payments, not \['orders'\]"):
        output_schemas(MatchSpec(), {ORDERS: ORDER}, "match")
