"""Checkpoints on demand: asked for at an interval, counted, and waited for at the end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from bench.on_demand import Pace

from headgate.model.ids import CheckpointId
from headgate.model.progress import CheckpointOutcome

WAIT_S = 60.0


class Driver:
    """Answers at once, or when it is told to; one checkpoint may be for several who ask."""

    def __init__(self, *, at_once: bool = True, serves: int = 1) -> None:
        self.asked: list[Future[CheckpointOutcome]] = []
        self._at_once, self._serves = at_once, serves
        self._changed = threading.Condition()

    def take_checkpoint(self) -> Future[CheckpointOutcome]:
        with self._changed:
            self.asked.append(Future())
            if self._at_once:
                self.asked[-1].set_result(CheckpointOutcome(CheckpointId((len(self.asked) - 1) // self._serves + 1)))
            self._changed.notify_all()
        return self.asked[-1]

    def until_asked(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= count, WAIT_S)


def test_it_asks_until_the_block_ends() -> None:
    driver = Driver()
    with Pace(driver.take_checkpoint, 1) as pace:
        driver.until_asked(5)
    asked = len(driver.asked)
    wanted, completed = pace.counted()
    assert wanted == asked
    assert completed == set(range(1, asked + 1))


def test_without_an_interval_it_asks_for_nothing() -> None:
    driver = Driver()
    with Pace(driver.take_checkpoint, None) as pace:
        pass
    assert pace.counted() == (0, set())
    assert not driver.asked


def test_one_checkpoint_for_several_requests_counts_once() -> None:
    driver = Driver(serves=3)
    with Pace(driver.take_checkpoint, 1) as pace:
        driver.until_asked(9)
    wanted, completed = pace.counted()
    assert wanted >= 9
    assert len(completed) == -(-wanted // 3)


def test_what_was_asked_before_the_beginning_is_not_counted() -> None:
    driver = Driver()
    with Pace(driver.take_checkpoint, 1) as pace:
        driver.until_asked(5)
        pace.begin()
        before = len(driver.asked)
        driver.until_asked(before + 5)
    wanted, _ = pace.counted()
    assert wanted <= len(driver.asked) - 5


def test_the_end_waits_for_the_answers() -> None:
    driver = Driver(at_once=False)
    pace = Pace(driver.take_checkpoint, 1)
    pace.__enter__()
    driver.until_asked(1)
    ended = threading.Thread(target=pace.__exit__, args=(None, None, None))
    ended.start()
    assert ended.is_alive(), "the checkpoint is under way"
    while ended.is_alive():  # whatever was asked until it stopped
        for asked in driver.asked:
            if not asked.done():
                asked.set_result(CheckpointOutcome(CheckpointId(1)))
        time.sleep(0.001)


def test_a_checkpoint_that_is_given_up_ends_the_measurement() -> None:
    driver = Driver(at_once=False)
    with Pace(driver.take_checkpoint, 60_000) as pace:
        pace._asked.append(driver.take_checkpoint())
        driver.asked[0].set_result(CheckpointOutcome(None, "it took too long"))
        with pytest.raises(RuntimeError, match="it took too long"):
            pace.counted()
