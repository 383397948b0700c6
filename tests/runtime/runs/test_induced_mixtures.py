"""Hooks and sources that set their own barrier beside savepoints and barriers that overtake, with real workers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, definition_of, pipeline_at
from tests.runtime.runs.test_induced import Noting, customers, hooked, shop, sold
from tests.runtime.runs.test_savepoints import ended_with, restoring
from tests.runtime.runs.test_unaligned import overtook

import headgate as hg
from headgate.connectors.files.file_committer import read_committed

cloudpickle.register_pickle_by_value(sys.modules[__name__])

__all__ = ["shop"]

Start = Any


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
