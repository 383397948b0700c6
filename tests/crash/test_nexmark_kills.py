"""All queries of NEXMark in one pipeline on Spark, of which workers and drivers are killed at random."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.nexmark.oracles import database, expected_rows, found_rows

from crash.support.pipelines import make, nexmark_events
from crash.support.processes import STARTED_S, Life, kill
from crash.support.results import assert_clean, read_stream
from crash.support.standing import MINUTES, TIMES
from headgate.nexmark.queries import QUERIES, Tables

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800 + 240 * MINUTES)]

RATE = 500


@pytest.mark.deep  # each of its operators is killed in a quicker test, too
def test_killed_workers_and_drivers_change_no_result(
    spec: Callable[..., dict[str, Any]], launch: Callable[..., Life], tmp_path: Path, dice: random.Random
) -> None:
    what = spec("nexmark", rows=int(max(30_000, RATE * 60 * MINUTES)), rate=RATE)
    for round_ in range(max(TIMES, int(4 * MINUTES))):
        life = launch({**what, "parallelism": dice.choice((1, 2, 3))})
        running = life.running(workers=1)
        for _ in range(round_ % 3):
            life.checkpoint()
            threading.Event().wait(dice.uniform(0.0, 2.0))  # the fault's time, not a wait for anything
            kill(dice.choice(list(running["workers"].values())))
            life.restart()
            running = life.running(after=running["generation"], workers=1)
        life.checkpoint()
        threading.Event().wait(dice.uniform(0.0, 2.0))  # the fault's time, not a wait for anything
        life.child.kill()
        life.child.assert_gone()
    life = launch(what)
    life.running()
    assert life.result(STARTED_S + 240 * MINUTES)["is_finished"]
    assert life.child.exit_code() == 0
    tables, events = Tables(make(what), nexmark_events(what)), database(nexmark_events(what))
    for name, query in QUERIES.items():
        changes = read_stream(tmp_path / "store", name).to_dicts()
        assert found_rows(name, changes, query.build(tables)._change_keys) == expected_rows(name, events), name
    assert_clean(tmp_path)
