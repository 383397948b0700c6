"""What a stream sink's target remembers, for how long, and what happens when it knows something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.streams import checkpoint_of, transaction_name
from headgate.errors import PipelineFailed
from headgate.model.ids import CheckpointId, Generation
from headgate.model.plan import PipelineDefinition
from headgate.runtime.driver import coordinator_host
from headgate.store.catalogue import transaction_rows
from headgate.store.store import Store

STREAM = "app/out"
SCHEMA = pa.schema([("n", pa.int64())])


def piped(root: Path, rows: int, stream: str = STREAM, **options: object) -> PipelineDefinition:
    pipeline = pipeline_at(root, **options)  # type: ignore[arg-type]
    source = hg.Generator(columns={"n": hg.RowNumber()}, rows=rows, rows_per_second=300, batch_rows=20)
    pipeline.source(source).select("n").sink(hg.StreamSink(stream, store=str(root / "store")), name="out")
    return definition_of(pipeline)


def count(store: Store, stream: str = STREAM) -> int:
    return store.describe(stream).events_count


def commit_one(store: Store, name: str, owner: str) -> None:
    transaction = store.transactions.begin(STREAM, owner=owner, epoch=0, name=name)
    transaction.write(pa.record_batch([[0]], schema=SCHEMA))
    transaction.prepare()
    store.commit_transactions([(STREAM, name)], owner=owner, epoch=0)


def test_a_busy_owner_does_not_keep_a_quiet_pipeline_from_starting(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_rows, "OUTCOMES_RETAINED", 3)
    monkeypatch.setattr(transaction_rows, "OUTCOME_CLEANUP_INTERVAL", 1)
    assert start(piped(tmp_path, 60)).result().is_finished
    with Store.open(tmp_path / "store") as store:
        for n in range(9):
            commit_one(store, f"busy-{n}", "busy")
        assert start(piped(tmp_path, 60)).result().is_finished  # commits again what its checkpoint promised
        assert count(store) == 60 + 9


def test_a_long_run_leaves_outcomes_that_its_checkpoints_may_ask_for_and_few_others(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # K20
    monkeypatch.setattr(coordinator_host, "DROPS_BETWEEN_FORGETTING", 1)
    run = start(piped(tmp_path, 600, retained=2))
    run.wait_checkpoints(9)
    assert run.result().is_finished
    assert len(run.checkpoints) > 8
    with Store.open(tmp_path / "store") as store:
        left = {checkpoint_of(info.name) for info in store.list_transactions(owner="p/out")}
        assert None not in left
        assert len(left) < len(run.checkpoints) - 2
        assert run.checkpoints[-1] >= max(c for c in left if c is not None)
        assert run.checkpoints[0] not in left
        assert start(piped(tmp_path, 600, retained=2)).result().is_finished
        assert count(store) == 600


def test_a_target_that_knows_other_output_under_a_name_stops_the_pipeline_for_good(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, SCHEMA, segments=1)
        for subtask in (0, 1):
            for checkpoint in (1, 2, 3):
                commit_one(store, transaction_name("p/out", CheckpointId(checkpoint), subtask, Generation(1)), "p/out")
        run = start(piped(tmp_path, 600))
        with pytest.raises(PipelineFailed, match=r"sink 'out' cannot prepare .* cannot be prepared with other content"):
            run.result()
        assert run.restarts == []
        assert count(store) == 6


def test_a_sink_that_is_moved_to_another_stream_leaves_nothing_prepared_in_the_former_one(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        first = start(piped(tmp_path, 6_000))
        first.wait_checkpoints(2)
        first.driver.cancel()  # what is prepared for the next checkpoint stays prepared
        first.driver.join()
        transaction = store.transactions.begin(
            STREAM, owner="p/out", epoch=1, name="p/out/checkpoint-999/subtask-0/generation-1"
        )
        transaction.write(pa.record_batch([[1]], schema=SCHEMA))
        transaction.prepare()
        second = start(piped(tmp_path, 6_000, stream="app/elsewhere"))
        second.wait_checkpoints(1)
        store.seal(STREAM)
        assert store.describe(STREAM).prepared_count == 0
        second.driver.cancel()
        second.driver.join()
