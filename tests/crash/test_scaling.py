"""Two pipelines in a row, between streams that are scaled all the time, whose workers are killed (S72, S75)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key

from crash.processes import Life, kill, until
from headgate.store.store import Store

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

MINUTES = float(os.environ.get("HEADGATE_TEST_MINUTES", "0"))
KILLS = 3
"""At least so many, and more as long as ``MINUTES`` are not over."""


@pytest.mark.xdist_group("wide")
def test_a_chain_of_pipelines_keeps_each_event_and_its_order_while_its_streams_are_scaled(
    spec: Callable[..., dict[str, Any]], run_wide: Callable[[dict[str, Any]], Life], tmp_path: Path
) -> None:
    is_over, dice = threading.Event(), random.Random(11)
    with Store.open(tmp_path / "store") as store:
        for name in ("in", "middle"):
            store.create_stream(name, SCHEMA, segments=2, routing_key="key")
        with flowing(store, is_over, "in", "middle", "out", rounds=40) as traffic:
            lives = [run_wide(spec("hop", **{"from": a, "to": b})) for a, b in (("in", "middle"), ("middle", "out"))]
            generations = [0, 0]
            deadline, kills_count = time.monotonic() + 60 * MINUTES, 0
            while kills_count < KILLS or time.monotonic() < deadline:
                which = dice.randrange(2)
                running = lives[which].running(after=generations[which])
                generations[which] = running["generation"]
                before = traffic.scaled_count
                lives[which].checkpoint()
                until(lambda: traffic.scaled_count > before, "a stream to be scaled")  # noqa: B023
                kill(dice.choice(list(running["workers"].values())))
                lives[which].restart()
                kills_count += 1
            is_over.set()
            lives[0].result()
            store.seal("middle")
            lives[1].result()
        assert per_key(store, "middle") == all_rounds(traffic)
        assert per_key(store, "out") == all_rounds(traffic)
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
