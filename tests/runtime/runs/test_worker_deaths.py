"""Workers that die where recovery has the least to hold on to, made on purpose: the first epoch, restores in a row."""

# Rules: F1

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from tests.runtime.held_writes import DyingInARow, HeldWrites, awaited, under_way, until
from tests.runtime.runs.test_checkpoint_options import check, counting

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def test_a_worker_dies_in_its_first_epoch_when_the_others_have_acknowledged(
    start: Start, tmp_path: Path
) -> None:  # F22
    """Its output is prepared, that of the others is acknowledged: nobody is to see either (C8, C37)."""
    run = start(counting(tmp_path), prepare=HeldWrites(tmp_path / "never", index=1))
    until(run, lambda: under_way(run) == (1,) and awaited(run, 1) == {1}, "all but one worker have acknowledged")
    assert list(tmp_path.glob("*/_staging/*/*")), "there is prepared output"
    run.kill(1)
    run.wait_restarts(1)
    assert 1 not in run.checkpoints
    run.wait_checkpoints(1)
    assert run.checkpoints[0] > 1
    assert run.result().restarts == 1
    assert list(tmp_path.glob("*/_staging/*/*")) == [], "what they had prepared is gone"
    check(tmp_path)


def test_workers_die_in_two_restores_in_a_row(start: Start, tmp_path: Path) -> None:  # F22, KP5
    dying = DyingInARow(tmp_path, "in-restore", 2)
    run = start(counting(tmp_path), prepare=dying)
    run.wait_checkpoints(2)
    assert dying.deaths() == [], "a first start restores nothing"
    run.kill(0)
    run.wait_restarts(3)
    assert len(dying.deaths()) == 2
    run.wait_checkpoints(1)
    assert run.result().restarts == 3
    assert run.checkpoints == sorted(set(run.checkpoints))
    check(tmp_path)
