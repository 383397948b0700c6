"""The examples that publish on completion, with workers that are killed."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.mutants.harness import assert_caught, patched

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage
from running import pipeline_at

sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))  # the launcher of the runtime's tests


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Example = Callable[[str], ModuleType]
Start = Callable[[hg.Pipeline], Any]


def test_every_record_is_in_one_published_file(example: Example, start: Start, tmp_path: Path) -> None:
    module = example("publish_files")
    directory = tmp_path / "published"
    directory.mkdir()
    for index in (0, 1, 4):  # of workers that were killed long ago; there were more of them
        (directory / f".part-{index}-left").touch()

    def pipeline(parallelism: int, rate: float) -> hg.Pipeline:
        columns = {"id": hg.RowNumber()}
        source = hg.Generator(columns, rows=3_000, rows_per_second=rate, time="deterministic", splits=4, batch_rows=50)
        made = pipeline_at(tmp_path, parallelism=parallelism)
        made.source(source).map(module.JsonFiles(str(directory)), name="files").sink(hg.Discard())
        return made

    run = start(pipeline(3, 3_000))
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    assert start(pipeline(2, 10_000)).result().is_finished
    found = [json.loads(line)["id"] for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert Counter(found) == Counter(range(3_000))
    assert len(list(directory.glob("*.jsonl"))) > 2, "the final checkpoint is not the only one that published"
    assert [path for path in directory.iterdir() if path.suffix != ".jsonl"] == [], "nothing hidden is left"


def late(pause_s: float, frame: pl.DataFrame) -> pl.DataFrame:
    time.sleep(pause_s)  # slow work: not a wait for anything
    return frame


def test_every_message_is_received_once_and_acknowledged_whoever_is_killed(
    example: Example, start: Start, tmp_path: Path
) -> None:
    module = example("acknowledge_messages")
    inbox, received = tmp_path / "inbox", tmp_path / "received"
    inbox.mkdir()
    for number in range(1, 601):
        (inbox / f"{number}.json").write_text(json.dumps({"id": number}))

    def pipeline(parallelism: int, pause_s: float = 0.0) -> hg.Pipeline:
        made = pipeline_at(tmp_path, parallelism=parallelism, interval="20ms")
        messages = made.source(module.Inbox(str(inbox)), name="inbox").map_batches(partial(late, pause_s), name="late")
        messages.sink(hg.FileSink(received, roll_interval=0), name="out")  # what is held back is committed later
        return made

    run = start(pipeline(2, 0.05))  # half a minute for all of them
    for kill in range(2):  # one of them reads the inbox
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    left = {int(path.stem) for path in inbox.iterdir()}
    committed = read_committed(str(received))["number"].to_list()
    assert set(range(1, 601)) - left <= set(committed), "only what was committed is acknowledged"
    run = start(pipeline(1))
    assert run.result().is_finished
    assert left, "the stop came before the end, and left messages"
    assert list(inbox.iterdir()) == []
    assert sorted(read_committed(str(received))["number"].to_list()) == list(range(1, 601))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "owner", "method", "broken", "test"),
    [
        (
            "publish_files",
            "JsonFiles",
            "notify_checkpoint_complete",
            hg.PublishOnCheckpoint.notify_checkpoint_complete,
            test_every_record_is_in_one_published_file,
        ),
        (
            "acknowledge_messages",
            "InboxReader",
            "ready",
            lambda self, number: self.publish([number]),
            test_every_message_is_received_once_and_acknowledged_whoever_is_killed,
        ),
    ],
    ids=["what killed workers left stays", "messages are acknowledged at once"],
)
def test_a_mutant_of_an_example_is_caught(
    example: Example,
    start: Start,
    tmp_path: Path,
    name: str,
    owner: str,
    method: str,
    broken: Any,
    test: Callable[..., None],
) -> None:
    module = example(name)

    @contextmanager
    def mutant() -> Iterator[None]:
        with patched(getattr(module, owner), method, broken):
            yield

    assert_caught(mutant, test, example, start, tmp_path)


sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))  # the launcher of the runtime's tests


class Customers:
    """Buy until they are sent home; then the shop closes."""

    def __init__(self, shop: ModuleType, path: str) -> None:
        self._shop, self._path = shop, path
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._buy)
        self._thread.start()

    def _buy(self) -> None:
        seed = 0
        while not self._is_over.wait(0.01):  # the pace: not a wait for anything
            seed += 1
            self._shop.sell(self._path, 5, seed)
        self._shop.close_shop(self._path)

    def go_home(self) -> None:
        self._is_over.set()
        self._thread.join()


def pipeline_of(shop: ModuleType, path: str, root: Path, **options: Any) -> hg.Pipeline:
    pipeline = pipeline_at(root, **{"tolerable_failures": 100, **options})
    pipeline.source(shop.Sales(path), name="sales").rebalance().sink(shop.Counted(path), name="counted")
    return pipeline


def rows(path: str, query: str) -> list[Any]:
    with closing(sqlite3.connect(path, timeout=60)) as db:
        return db.execute(query).fetchall()


def check_books(shop: ModuleType, path: str) -> None:
    """Everything sold was counted once, and every stocktaking fits what was counted at its checkpoint."""
    assert rows(path, "select sum(quantity) from sales") == rows(path, "select sum(quantity) from counted")
    found = shop.audit(path)
    assert len(found) > 2
    assert set(found.values()) == {0}


def test_stocktakings_fit_their_checkpoints_whoever_is_killed(example: Example, start: Start, tmp_path: Path) -> None:
    shop, path = example("shop_audit"), str(tmp_path / "shop.db")
    shop.open_shop(path)
    customers = Customers(shop, path)
    try:
        run = start(pipeline_of(shop, path, tmp_path))
        for kill in range(2):
            run.wait_checkpoints(2)
            run.kill(kill)
            run.wait_restarts(kill + 1)
        run.wait_checkpoints(1)
    finally:
        customers.go_home()
    assert run.result().is_finished
    check_books(shop, path)
    log = CheckpointLog(open_storage(str(tmp_path / "checkpoints")), "p")
    newest = [entry.content for entry in log.observe().entries if isinstance(entry.content, Manifest)][-1]
    (state,) = newest.hooks
    assert state.hook == "sales"
    assert json.loads(state.data or b"") == {"left": rows(path, "select sum(left) from stock")[0][0]}


def test_a_stop_and_another_parallelism_keep_the_books(example: Example, start: Start, tmp_path: Path) -> None:
    shop, path = example("shop_audit"), str(tmp_path / "shop.db")
    shop.open_shop(path)
    customers = Customers(shop, path)
    try:
        for parallelism in (2, 3, 1):
            run = start(pipeline_of(shop, path, tmp_path, parallelism=parallelism))
            run.wait_checkpoints(2)
            run.driver.stop()
            assert not run.result().is_finished
    finally:
        customers.go_home()
    assert start(pipeline_of(shop, path, tmp_path)).result().is_finished
    check_books(shop, path)
