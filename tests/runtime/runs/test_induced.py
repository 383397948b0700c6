"""Hooks of the coordinator and sources that set their own barrier, with the real driver and worker processes."""

from __future__ import annotations

import importlib.util
import json
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.savepoints.test_savepoints import ended_with, restoring
from tests.runtime.runs.test_unaligned import overtook

import headgate as hg
from headgate.cli.app import app
from headgate.connectors.base import Committer
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage
from headgate.store.store import Store

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Start = Any
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "shop_audit.py"


@pytest.fixture(scope="module")
def shop() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("example_shop_audit_of_runs", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[spec.name]


@contextmanager
def customers(shop: ModuleType, path: str) -> Iterator[None]:
    """Somebody buys something all the time; then the shop closes."""
    is_over = threading.Event()

    def buy() -> None:
        seed = 1
        while not is_over.wait(0.01):  # the pace: not a wait for anything
            seed += 1
            shop.sell(path, 5, seed)
        shop.close_shop(path)

    shop.sell(path, 5, 1)  # whenever the thread gets its first turn
    thread = threading.Thread(target=buy)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def rows(path: str, query: str) -> list[Any]:
    with closing(sqlite3.connect(path, timeout=60)) as db:
        return db.execute(query).fetchall()


def sold(path: str) -> int:
    return int(rows(path, "select sum(quantity) from sales")[0][0])


def counted(path: str) -> int:
    return int(rows(path, "select coalesce(sum(quantity), 0) from counted")[0][0])


def pipeline_of(shop: ModuleType, path: str, root: Path, mode: str = "exactly_once", **options: Any) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(
        interval="40ms", dir=root / "checkpoints", mode=mode, tolerable_failures=100, timeout="20s"
    )
    pipeline = hg.Pipeline(
        "p", checkpointing=checkpointing, restart=hg.FixedDelay(delay="20ms"), **{"parallelism": 2, **options}
    )
    pipeline.source(shop.Sales(path), name="sales").sink(shop.Counted(path), name="counted")
    return pipeline


def newest_manifest(root: Path) -> Manifest:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    return [entry.content for entry in log.observe().entries if isinstance(entry.content, Manifest)][-1]


# -- sources that set their own barrier -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", few(["at_least_once", "at_most_once"], 1))
def test_other_guarantees_go_with_sources_that_set_their_own_barrier(
    shop: ModuleType, start: Start, tmp_path: Path, mode: str
) -> None:  # EI29
    path = str(tmp_path / "shop.db")
    shop.open_shop(path)
    with customers(shop, path):
        run = start(definition_of(pipeline_of(shop, path, tmp_path, mode)))
        run.wait_checkpoints(3)
        run.driver.stop()
        assert not run.result().is_finished
        run = start(definition_of(pipeline_of(shop, path, tmp_path, mode, parallelism=3)))
        run.wait_checkpoints(2)
        run.driver.stop()
        run.result()
    assert start(definition_of(pipeline_of(shop, path, tmp_path))).result().is_finished
    assert counted(path) == sold(path), "nothing failed, so nothing is lost or repeated"


def test_at_most_once_repeats_nothing_behind_a_kill(shop: ModuleType, start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "shop.db")
    shop.open_shop(path)
    with customers(shop, path):
        run = start(definition_of(pipeline_of(shop, path, tmp_path, "at_most_once")))
        run.wait_checkpoints(2)
        run.kill(0)
        run.wait_restarts(1)
        run.wait_checkpoints(2)
    assert run.result().is_finished
    assert 0 < counted(path) <= sold(path)


def test_a_drained_source_is_cut_where_it_is(shop: ModuleType, start: Start, tmp_path: Path) -> None:  # EI26
    path = str(tmp_path / "shop.db")
    shop.open_shop(path)
    with customers(shop, path):
        run = start(definition_of(pipeline_of(shop, path, tmp_path)))
        run.wait_checkpoints(2)
        run.driver.drain()
        assert run.result().is_drained
        before = counted(path)
        assert before > 0
    assert newest_manifest(tmp_path).is_final
    assert start(definition_of(pipeline_of(shop, path, tmp_path))).result().is_finished
    assert counted(path) == before, "a drained pipeline does not go on"


def test_sources_of_both_kinds_are_in_one_checkpoint(shop: ModuleType, start: Start, tmp_path: Path) -> None:  # EI32
    path = str(tmp_path / "shop.db")
    shop.open_shop(path)
    pipeline = pipeline_at(tmp_path, tolerable_failures=100)
    sales = pipeline.source(shop.Sales(path), name="sales").select("quantity")
    others = pipeline.source(
        hg.Generator({"quantity": hg.RowNumber()}, rows=2_000, rows_per_second=2_000, time="deterministic"),
        name="others",
    )
    sales.union(others.select("quantity")).rebalance().sink(hg.FileSink(tmp_path / "out"), name="out")
    with customers(shop, path):
        run = start(definition_of(pipeline))
        run.wait_checkpoints(2)
        run.kill(1)
        run.wait_restarts(1)
        run.wait_checkpoints(1)
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))["quantity"]
    assert found.sum() == sold(path) + sum(range(2_000))


def test_a_stream_that_is_cut_at_one_moment_is_copied_once(start: Start, tmp_path: Path) -> None:  # SC21
    root = tmp_path / "store"
    schema = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
    with Store.open(root) as store:
        store.create_stream("in", schema, segments=3, routing_key="key")
    is_over = threading.Event()

    def produce() -> None:
        with Store.open(root) as own, own.writer("in") as writer:
            number = 0
            while not is_over.wait(0.005):  # the pace: not a wait for anything
                rows = [{"key": f"k{n % 7}", "value": n} for n in range(number, number + 20)]
                writer.append(pa.RecordBatch.from_pylist(rows, schema=schema))
                number += 20
            writer.flush()
        with Store.open(root) as own:
            own.seal("in")

    def pipeline(parallelism: int) -> hg.Pipeline:
        made = pipeline_at(tmp_path, tolerable_failures=100, parallelism=parallelism)
        source = made.source(hg.StreamSource("in", store=str(root), stream_cuts=True), name="source")
        source.sink(hg.StreamSink("out", store=str(root), routing_key="key", segments=2), name="out")
        return made

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        run = start(definition_of(pipeline(2)))
        run.wait_checkpoints(2)
        run.kill(0)
        run.wait_restarts(1)
        run.wait_checkpoints(1)
        run.driver.stop()
        assert not run.result().is_finished
        cut = json.loads(newest_manifest(tmp_path).hooks[0].data or b"")
        assert cut["stream"] == "in"
        with Store.open(root) as store:
            assert store.describe("out").events_count == sum(cut["cut"].values()), "what was there at that moment"
            assert store.pipelines.frontier("in", owner="p/source", generation=1).markers == {}
        run = start(definition_of(pipeline(3)))
        run.wait_checkpoints(1)
    finally:
        is_over.set()
        producer.join()
    assert run.result().is_finished
    with Store.open(root) as store:
        found = [v for n in range(2) for v in values(store, "out", n)]
        there = store.describe("in").events_count
        assert sorted(found) == list(range(there))


def values(store: Store, stream: str, segment: int) -> list[int]:
    reader, found = store.reader(stream, segment), list[int]()
    while (batch := reader.read()) is not None:
        found += batch.column("value").to_pylist()
    return found


# -- hooks ------------------------------------------------------------------------------------------------------------


class Noting(hg.CoordinatorHook):
    """Notes its calls; may raise, or stand still."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()

    def trigger(self, checkpoint_id: int) -> bytes:
        assert self.gate.wait(120)
        if self.failures:
            raise self.failures.pop()
        self.calls.append(("trigger", checkpoint_id))
        return b"at %d" % checkpoint_id

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self.calls.append(("restore", checkpoint_id, data))

    def reset(self) -> None:
        self.calls.append(("reset",))

    def close(self) -> None:
        self.calls.append(("close",))


def hooked(root: Path, hook: Noting | None, *, timeout: str = "60s", **options: Any) -> hg.Pipeline:
    pipeline = pipeline_at(root, **options)
    numbers = hg.Generator({"id": hg.RowNumber()}, rows=2_000, rows_per_second=1_000, time="deterministic")
    pipeline.source(numbers).sink(hg.FileSink(root / "out"), name="out")
    if hook is not None:
        pipeline.add_hook("noting", hook, timeout=timeout)
    return pipeline


def test_a_hook_goes_back_with_its_pipeline(start: Start, tmp_path: Path) -> None:  # C37
    hook = Noting()
    run = start(definition_of(hooked(tmp_path, hook)))
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait_restarts(1)
    restored = next(call for call in hook.calls if call[0] == "restore")
    assert restored[2] == b"at %d" % restored[1]
    assert restored[1] in run.checkpoints
    assert run.result().is_finished
    assert hook.calls[0] == ("reset",)
    assert hook.calls[-1] == ("close",)
    triggered = [call[1] for call in hook.calls if call[0] == "trigger"]
    assert triggered == sorted(set(triggered))
    assert set(run.checkpoints) <= set(triggered)
    assert newest_manifest(tmp_path).hooks[0].data == b"at %d" % run.checkpoints[-1]


def test_a_hook_is_reset_by_a_restart_before_the_first_checkpoint(start: Start, tmp_path: Path) -> None:  # C37
    hook = Noting()
    run = start(definition_of(hooked(tmp_path, hook, interval=None)))
    run.kill(1)
    run.wait_restarts(1)
    assert hook.calls == [("reset",), ("reset",)]
    assert run.result().is_finished


def patience(run: Run) -> int:
    """Return how often the driver waited for the hook in vain."""
    return sum("hook 'noting' did not answer" in note for note in run.notes)


def test_a_hook_that_fails_or_is_stuck_costs_checkpoints_and_nothing_else(start: Start, tmp_path: Path) -> None:  # EI5
    hook = Noting()
    hook.failures.append(ValueError("not now"))
    run = start(definition_of(hooked(tmp_path, hook, timeout="200ms", tolerable_failures=1_000)))
    failed = re.compile(r"trigger\(\d+\) of hook 'noting' failed: ValueError: not now")  # a slow one is not called
    run.wait(lambda: any(failed.search(note) for note in run.notes), "a failure")
    run.wait_checkpoints(1)
    hook.gate.clear()
    count, given_up = len(run.checkpoints), patience(run)
    run.wait(lambda: patience(run) > given_up, "patience")
    assert len(run.checkpoints) <= count + 1
    hook.gate.set()
    run.wait_checkpoints(1)
    assert not run.restarts
    assert run.result().is_finished
    assert sorted(read_committed(str(tmp_path / "out"))["id"].to_list()) == list(range(2_000))


class HeldUp(hg.Discard, Committer):
    """Its recovery waits until a file is there, and says with another one that it waits."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open_committer(self, pipeline: str, node: str, generation: Any) -> Any:
        return self

    def recover(self, keep: Any) -> None:
        (self.root / "waits").touch()
        deadline = time.monotonic() + 300
        while not (self.root / "gate").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def commit(self, permit: Any, committables: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_run_that_ends_while_it_claims_closes_its_hooks(start: Start, tmp_path: Path) -> None:
    hook = Noting()
    pipeline = pipeline_at(tmp_path)
    pipeline.source(hg.FromRows([{"n": 1}])).sink(HeldUp(tmp_path), name="held-up")
    pipeline.add_hook("noting", hook)
    run = start(definition_of(pipeline))
    deadline = time.monotonic() + 300
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ends = run.driver.supervision.close

    def ending() -> None:
        ends()
        (tmp_path / "gate").touch()

    run.driver.supervision.close = ending  # type: ignore[method-assign]
    run.driver.cancel()
    run.wait(run.driver.result.done, "the end")
    run.driver.join()
    assert hook.calls == [("reset",), ("close",)]
    assert not any(thread.name == "headgate-hook-noting" for thread in threading.enumerate())


def test_more_failures_of_a_hook_than_tolerable_fail_the_pipeline(start: Start, tmp_path: Path) -> None:  # EI5, C22
    hook = Noting()
    hook.failures.append(ValueError("not now"))
    run = start(definition_of(hooked(tmp_path, hook, restart=hg.NoRestart())))
    with pytest.raises(PipelineFailed, match="a hook of the coordinator failed"):
        run.result()


def test_data_of_a_hook_that_is_gone_is_refused_unless_forgotten(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # EI9
    run = start(definition_of(hooked(tmp_path, Noting())))
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    app(["checkpoints", "show", "p", "--dir", str(tmp_path / "checkpoints")], standalone_mode=False)
    data = f"at {run.checkpoints[-1]}"
    assert f"hook noting: {len(data)} bytes" in capsys.readouterr().out
    refused = start(definition_of(hooked(tmp_path, None)))
    with pytest.raises(PipelineFailed, match=r"holds . bytes of hook 'noting', which this pipeline does not have"):
        refused.result()
    pipeline = hooked(tmp_path, None)
    pipeline.forget_hook("noting")
    assert start(definition_of(pipeline)).result().is_finished


def test_hooks_are_checked_when_they_are_added(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    with pytest.raises(hg.UsageError, match=r"must be an instance of a headgate\.CoordinatorHook"):
        pipeline.add_hook("x", object())  # type: ignore[arg-type]
    with pytest.raises(hg.UsageError, match="a hook must be named"):
        pipeline.add_hook("no name", Noting())
    with pytest.raises(hg.UsageError, match="must be positive"):
        pipeline.add_hook("x", Noting(), timeout=0)
    pipeline.add_hook("x", Noting())
    with pytest.raises(hg.UsageError, match="two hooks are named 'x'"):
        pipeline.add_hook("x", Noting())


def test_looking_at_a_stream_calls_no_hook(shop: ModuleType, started: list[Any], tmp_path: Path) -> None:
    path = str(tmp_path / "shop.db")
    shop.open_shop(path)
    shop.sell(path, 30)
    running = shop.Stocktaking(path)  # of a pipeline that runs meanwhile
    running.open(hg.HookContext("p", "sales", 1))
    running.trigger(9)
    shop.sell(path, 30, 1)
    shop.close_shop(path)
    pipeline = pipeline_at(tmp_path)
    hook = Noting()
    pipeline.add_hook("noting", hook)
    found = pipeline.source(shop.Sales(path), name="sales").collect()
    assert found["quantity"].sum() == sold(path)
    assert started[0].hooks == ()
    assert hook.calls == []
    assert rows(path, "select count(distinct checkpoint) from stocktakings") == [(1,)]


__all__ = ["shop"]


def written(root: Path, column: str) -> list[int]:
    """Return what is committed of a column; a savepoint also holds what its sink had not written yet."""
    found = read_committed(str(root / "out"))
    return found[column].to_list() if found.height else []


def bought(root: Path) -> int:
    return sum(written(root, "quantity"))


def sales_to_files(shop: ModuleType, path: str, root: Path, **options: Any) -> hg.Pipeline:
    pipeline = pipeline_at(root, tolerable_failures=100, **options)
    sales = pipeline.source(shop.Sales(path), name="sales").rebalance()
    sales.filter(Slowly(root / "slow"), name="slow").sink(hg.FileSink(root / "out"), name="out")
    return pipeline


class Slowly:
    """A function that takes its time while a file is there."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __call__(self, row: dict[str, Any]) -> bool:
        if row["quantity"] == 3 and self._flag.exists():
            time.sleep(0.01)  # slow work: not a wait for anything
        return True


@pytest.mark.parametrize("ends", [True, False], ids=["stop", "take"])
def test_a_hook_goes_back_with_a_savepoint(start: Start, tmp_path: Path, ends: bool) -> None:
    hook, place = Noting(), tmp_path / "taken"
    run = start(definition_of(hooked(tmp_path / "a", hook)))
    run.wait_checkpoints(1)
    if ends:
        outcome = ended_with(run, place)
    else:
        outcome = run.driver.take_savepoint(str(place)).result(WAIT_S)
        run.wait_checkpoints(1)
        assert run.result().is_finished
    assert (outcome.savepoint, outcome.checkpoint in run.checkpoints) == (str(place), True)
    taken = b"at %d" % outcome.checkpoint
    other = Noting()
    run = start(restoring(definition_of(hooked(tmp_path / "b", other)), place))
    run.wait_checkpoints(1)
    run.kill(0)
    run.wait_restarts(1)
    assert run.result().is_finished
    restored = [call for call in other.calls if call[0] == "restore"]
    assert restored[0] == ("restore", outcome.checkpoint, taken), "what it returned, for which checkpoint"
    assert restored[1][2] == b"at %d" % restored[1][1]
    triggered = [call[1] for call in other.calls if call[0] == "trigger"]
    assert triggered[0] > outcome.checkpoint + 1, "the id under which it was restored is used, too"
    before, behind = written(tmp_path / "a", "id"), written(tmp_path / "b", "id")
    assert {*before, *behind} == set(range(2_000))
    assert len(behind) == len(set(behind))
    assert len(before) + len(behind) == 2_000 or not ends


@pytest.mark.parametrize("mode", few(["exactly_once", "at_least_once", "at_most_once"], 1))
def test_a_source_that_sets_its_own_barrier_goes_on_from_a_savepoint(
    shop: ModuleType, start: Start, tmp_path: Path, mode: str
) -> None:  # SV1
    path, place = str(tmp_path / "shop.db"), tmp_path / "taken"
    shop.open_shop(path)
    with customers(shop, path):
        run = start(definition_of(sales_to_files(shop, path, tmp_path / "a", mode=mode)))
        run.wait_checkpoints(2)
        assert ended_with(run, place).savepoint == str(place)
        again = sales_to_files(shop, path, tmp_path / "b", mode=mode, parallelism=3)
        run = start(restoring(definition_of(again), place))
        run.wait_checkpoints(2)
    assert run.result().is_finished
    assert bought(tmp_path / "a") + bought(tmp_path / "b") == sold(path), "nothing failed: once, in every mode"


def test_a_barrier_that_a_marker_set_overtakes_what_waits(shop: ModuleType, start: Start, tmp_path: Path) -> None:
    """EI32, UA8: downstream nobody knows what induced it."""
    path = str(tmp_path / "shop.db")
    shop.open_shop(path)
    shop.sell(path, 3_000)
    (tmp_path / "slow").touch()
    with customers(shop, path):
        run = start(definition_of(sales_to_files(shop, path, tmp_path, alignment_timeout=0)))
        overtook(run, tmp_path, "slow")
        run.kill(1)
        run.wait_restarts(1)
        run.wait_checkpoints(1)
        (tmp_path / "slow").unlink()
    assert run.result().is_finished
    assert bought(tmp_path) == sold(path)
