"""Rate limits of sources: a bucket on a clock of the test, and pipelines with limits that are far too low or high."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate import testing
from headgate.runtime.worker.subtask_parts import RateLimit
from headgate.testing import Collect


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms * 1_000_000


def read(limit: RateLimit, clock: Clock, batch: int, until_ms: int) -> int:
    """Read batches as early as possible; return how many records."""
    found = 0
    while clock.ms < until_ms:
        wait_ms = limit.wait_ms()
        if wait_ms == 0:
            limit.take(batch)
            found += batch
        clock.ms += wait_ms
    return found


@pytest.mark.parametrize("batch", [1, 10, 2_500])
def test_the_rate_holds_whatever_the_size_of_batches(batch: int) -> None:
    clock = Clock()
    found = read(RateLimit(1_000, 1, clock), clock, batch, 100_000)
    assert abs(found - 100_000) <= max(batch, 3_000)


def test_a_large_batch_is_read_whole_and_paid_for_afterwards() -> None:
    clock = Clock()
    limit = RateLimit(1_000, 1, clock)
    assert limit.wait_ms() == 0
    limit.take(5_000)
    assert 5_000 <= limit.wait_ms() <= 5_001
    clock.ms = 4_000
    assert 1_000 <= limit.wait_ms() <= 1_001
    clock.ms = 5_001
    assert limit.wait_ms() == 0


def test_a_pause_is_hardly_made_up_for() -> None:
    clock = Clock()
    limit = RateLimit(1_000, 1, clock)
    clock.ms = 3_600_000
    assert read(limit, clock, 1, 3_601_000) <= 1_102


def test_each_split_gets_the_same_part_of_the_rate() -> None:
    clock = Clock()
    limits = [RateLimit(1_000, 2, clock) for _ in range(2)]
    for limit in limits:
        limit.take(500)
        assert 1_000 <= limit.wait_ms() <= 1_001, "at first half of the rate each"
    limits[0].divide(3, 4)
    limits[1].divide(1, 4)
    assert 666 <= limits[0].wait_ms() <= 668
    assert 2_000 <= limits[1].wait_ms() <= 2_001
    limits[1].divide(0, 3)
    assert limits[1].wait_ms() > 0, "a subtask without splits can wait, too"


ROWS = [{"x": x} for x in range(20)]


def pipeline_of(out: Any, rate: float, **options: Any) -> hg.Pipeline:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="10ms"), **options)
    pipeline.source(hg.FromRows(ROWS, splits=2, batch_rows=3), rate_limit=rate).sink(out)
    return pipeline


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_low_rate_lets_one_batch_through_and_may_change_at_the_next_start(tmp_path: Path, parallelism: int) -> None:
    out = Collect(tmp_path / "out")
    slow = pipeline_of(out, 1e-6, parallelism=parallelism)
    with testing.running(slow, checkpoint_dir=tmp_path / "state") as handle:
        for _ in range(4):
            handle.take_checkpoint()
        handle.stop()
        handle.wait(60)
    assert len(out.rows()) <= 3 * min(parallelism, 2)
    testing.run(pipeline_of(out, 1e9, parallelism=2), checkpoint_dir=tmp_path / "state", timeout_s=300)
    assert sorted(row["x"] for row in out.rows()) == list(range(20))


def test_a_drain_ends_a_source_that_waits_for_its_rate(tmp_path: Path) -> None:
    out = Collect(tmp_path / "out")
    with testing.running(pipeline_of(out, 1e-6, parallelism=1), checkpoint_dir=tmp_path / "state") as handle:
        handle.take_checkpoint()
        handle.stop(drain=True)
        assert handle.wait(60) is not None
    assert len(out.rows()) <= 3


@pytest.mark.parametrize("rate", [0, -1, True, "1000", float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(hg.UsageError, match="operator 'source': rate_limit must be a positive number of records"):
        hg.Pipeline("p").source(hg.FromRows(ROWS), rate_limit=rate)
