"""Crashes and other parallelism for ``check_source``: what follows a checkpoint that completed comes once, or again.

All subtasks are polled in turn. What was polled behind the last completed checkpoint, or belongs to one that never
completed, is lost with its generation: the next one reads it again. So a source that gives up records outside before
it is told that their checkpoint completed has lost them (KT1). Counterpart: ``source_lives``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from headgate.testing.source_lives import (
    AnySource,
    Row,
    SourceCheckpoint,
    SourceLife,
    check_same,
    is_time_for_checkpoint,
)

CRASHES_MAX = 4
"""Moments of a crash tried in each scenario at each pair of parallelisms, evenly spread, beside the beginning."""

FURTHER_POLLS = 2
"""Polls of each subtask that come behind a checkpoint, before the next thing happens."""


class SourceRun:
    """A source across generations."""

    def __init__(self, source: AnySource, parallelism: int, polls_max: int, story: str) -> None:
        """Begin.

        Args:
            source: what is checked.
            parallelism: of the first generation.
            polls_max: a source that has not ended after so many polls of one generation never will.
            story: begins what is said when something is wrong.
        """
        self._source, self._polls_max, self.story = source, polls_max, story
        self._completed = SourceCheckpoint()
        self._generations = itertools.count(1)
        self._numbers = itertools.count(1)
        self.start(parallelism)

    def start(self, parallelism: int) -> None:
        """Whatever ran is dead; another generation begins with the last completed checkpoint."""
        self._turns = 0
        self.life = SourceLife(self._source, next(self._generations), parallelism, self._completed)

    def poll(self, polls: int) -> None:
        """Poll so often, one subtask after the other."""
        for _ in range(polls):
            self.life.poll(self._turns % self.life.parallelism)
            self._turns += 1

    def poll_on(self) -> None:
        """Have every subtask read a little more."""
        self.poll(FURTHER_POLLS * self.life.parallelism)

    def checkpoint(self) -> SourceCheckpoint:
        """Take one, which may never complete."""
        return self.life.checkpoint(next(self._numbers), is_polled=True)

    def complete(self, done: SourceCheckpoint, *, is_lost: bool = False) -> None:
        """It is durable; ``is_lost``: nobody hears of it (HL3)."""
        self._completed = done
        if not is_lost:
            self.life.tell_completed(done.number)

    def abort(self, given_up: SourceCheckpoint) -> None:
        """It never completed."""
        self.life.tell_aborted(given_up.number)

    def finish(self, expected: Sequence[Row]) -> None:
        """Read to the end, once more after the last checkpoint, and compare (HL8)."""
        while not self.life.is_finished:
            assert self._turns <= self._polls_max, f"{self.story}: the source had not ended after {self._turns} polls"
            self.poll(1)
            if is_time_for_checkpoint(self._turns):
                self.complete(self.checkpoint())
        self.complete(self.checkpoint())
        check_same(self._completed.rows, expected, self.story)
        self.life.close()
        self.start(self.life.parallelism)
        self.poll_on()
        check_same(self.life.rows, expected, f"{self.story}, and from the last checkpoint once more")
        self.life.close()


def check_first_epoch(run: SourceRun, polls: int, after: int) -> None:
    """Crashed before its first checkpoint completed."""
    run.poll(polls)
    run.checkpoint()
    run.poll_on()
    run.start(after)


def check_going_back(run: SourceRun, polls: int, after: int) -> None:
    """Crashed behind a completed checkpoint, and behind one that was given up."""
    run.poll(polls)
    done = run.checkpoint()
    run.poll_on()  # completions come late: what was polled meanwhile is in no checkpoint
    run.complete(done)
    run.poll_on()
    given_up = run.checkpoint()
    run.poll_on()
    run.abort(given_up)
    run.poll_on()
    run.start(after)


def check_lost_word(run: SourceRun, polls: int, after: int) -> None:
    """Crashed behind a checkpoint whose completion nobody heard of."""
    run.poll(polls)
    run.complete(run.checkpoint(), is_lost=True)
    run.poll_on()
    run.start(after)
    run.poll_on()
    run.complete(run.checkpoint())
    run.poll_on()
    run.start(after)


def check_rescaling(run: SourceRun, polls: int, after: int) -> None:
    """Stopped with checkpoints, and started at one parallelism after the other."""
    before = run.life.parallelism
    run.poll(polls)
    for parallelism in (after, 1, before):  # KT2
        run.complete(run.checkpoint())
        run.start(parallelism)
        run.poll_on()


SCENARIOS: tuple[Callable[[SourceRun, int, int], None], ...] = (
    check_first_epoch,
    check_going_back,
    check_lost_word,
    check_rescaling,
)


def check_crashes(
    fresh: Callable[[], AnySource],
    parallelisms: Sequence[int],
    polls: int,
    polls_max: Callable[[int], int],
    expected: Sequence[Row],
) -> None:
    """Run every scenario at every pair of parallelisms.

    Args:
        fresh: makes the source; another one each time if reading changes something outside.
        parallelisms: numbers of subtasks to begin with, and to go on with.
        polls: how many read everything at parallelism 1.
        polls_max: for a parallelism, how many polls are too many.
        expected: all records.

    Raises:
        AssertionError: records were lost or came twice; the message tells the story.
    """
    moments = range(0, polls + 1, max(1, polls // CRASHES_MAX))
    for before, after in itertools.product(parallelisms, repeat=2):
        for scenario, moment in itertools.product(SCENARIOS, moments):
            story = f"{_title(scenario)}, after poll {moment}, parallelism {before} to {after}"
            run = SourceRun(fresh(), before, polls_max(max(before, after)), story)
            scenario(run, moment, after)
            run.finish(expected)


def _title(scenario: Callable[..., None]) -> str:
    return (scenario.__doc__ or "").partition("\n")[0].rstrip(".")
