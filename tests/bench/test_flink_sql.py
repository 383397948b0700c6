"""The Flink peer counts every event once; runs only where ``make bench-peers`` has installed it."""

from __future__ import annotations

import pytest
from bench.peers.install import environment_python
from bench.peers.measure import flink_is_installed, run_peer

PYTHON = environment_python()


@pytest.mark.spark
@pytest.mark.skipif(not flink_is_installed(PYTHON), reason="Flink SQL is not installed: run `make bench-peers`")
def test_it_counts_every_event_once() -> None:
    counted = run_peer(PYTHON, "bench.peers.flink_sql", ["--keys", "7", "--check-rows", "100000"])
    assert (counted["events"], counted["keys"]) == (100_000, 7)
    # No group twice: each window has a row for each of the 7 keys at most.
    assert counted["groups"] <= 7 * counted["windows"]
