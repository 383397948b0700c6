"""The example in which a shop takes stock with every checkpoint, with workers that are killed (EI1, EI4, EI20)."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import headgate as hg
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))  # the launcher of the runtime's tests

from running import pipeline_at

Example = Callable[[str], ModuleType]
Start = Callable[[hg.Pipeline], Any]


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
