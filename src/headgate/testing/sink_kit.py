"""Conformance kit for sinks: whatever happens to pipeline and target, the output is that of completed checkpoints.

The room ``sinks`` has the scenarios; docs/spec/kits.md lists them. A fake coordinator plays the runtime in this
process. Source: K1–K5, K7–K18, K20 of docs/spec/two-phase-commit.md.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from headgate.errors import HeadgateError
from headgate.testing.sinks.failures import (
    check_interruptions,
    check_lost_prepared,
    check_lost_prepared_in_recovery,
    check_outages,
    check_taken_away,
)
from headgate.testing.sinks.fake_pipeline import Target, missing_option
from headgate.testing.sinks.scenarios import (
    KillPoint,
    check_closed,
    check_commit_in_flight,
    check_end_of_input,
    check_first_epoch,
    check_forgetting,
    check_kill,
    check_late_commits,
    check_lost_answers,
    check_many_pending,
    check_neighbours,
    check_older_checkpoint,
    check_owner,
    check_remove_output,
    check_rescaling,
    check_restarts_in_a_row,
    check_rewound,
    check_stale_generation,
    check_start_over,
)

Check = Callable[[Target], str | None]
"""Returns why it, or the rest of it, was left out."""

ONCE: tuple[Check, ...] = (
    check_end_of_input,
    check_lost_answers,
    check_restarts_in_a_row,
    check_rescaling,
    check_many_pending,
    check_late_commits,
    check_older_checkpoint,
    check_rewound,
    check_forgetting,
    check_stale_generation,
    check_neighbours,
    check_lost_prepared,
    check_lost_prepared_in_recovery,
    check_taken_away,
    check_owner,
    check_start_over,
    check_closed,
)
"""Each on a target of its own."""


def check_sink(
    fresh: Callable[[], Target],
    *,
    rescales: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (1, 2), (5, 2), (2, 5)),
    overlaps: Sequence[int] = (1, 3),
    rows: Sequence[int] = (0, 1, 40),
) -> list[str]:
    """Check a sink in every scenario: kills, lost answers, other parallelism. Each scenario gets its own target.

    Returns:
        the checks that were left out, and why, in one sentence each. The function also prints them; pytest shows
        them with ``-rP``.

    Args:
        fresh: makes a new, empty target.
        rescales: pairs of parallelism, before and after the kill.
        overlaps: numbers of checkpoints that are prepared and not completed at the kill.
        rows: numbers of records in each checkpoint, in all subtasks together.

    Raises:
        AssertionError: the sink lost, duplicated or leaked something. The message says what happened.
    """
    for point, (before, after), overlap, count in itertools.product(KillPoint, rescales, overlaps, rows):
        story = f"killed {point.value}, parallelism {before} to {after}, {overlap} pending, {count} rows"
        with _scenario(story):
            check_kill(fresh(), point, before, after, overlap, count, story)
    for point in KillPoint:
        with _scenario(f"killed in its first epoch, {point.value}"):
            check_first_epoch(fresh(), point)
    left_out = list(_not_seen(fresh()))
    for check in ONCE:
        with _scenario(_title(check)):
            left_out += _left_out(check, check(fresh()))
    for is_late in (False, True):
        with _scenario(_title(check_commit_in_flight)):
            check_commit_in_flight(fresh(), is_late=is_late)
    for check_all in (check_remove_output, check_interruptions, check_outages):
        with _scenario(_title(check_all)):
            left_out += _left_out(check_all, check_all(fresh))
    for one in left_out:
        print(f"left out: {one}")
    return left_out


def _not_seen(target: Target) -> Iterator[str]:
    """Yield what no scenario compares."""
    if not target.is_ordered:
        yield f"the order of the output: {missing_option('is_ordered')}"
    if target.leftovers is tuple:
        yield f"what is left behind: {missing_option('leftovers')}"


def _left_out(check: Callable[..., object], why: str | None) -> list[str]:
    return [] if why is None else [f"{_title(check)}: {why}"]


@contextlib.contextmanager
def _scenario(story: str) -> Iterator[None]:
    """Name the scenario if the sink raises."""
    try:
        yield
    except HeadgateError as error:
        raise AssertionError(f"{story}: the sink gave up: {error}") from error


def _title(check: Callable[..., object]) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")
