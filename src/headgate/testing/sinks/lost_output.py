"""Output that is gone.

The target lost it, a consumer took it, or an outage outlasted the target's transaction timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from headgate.connectors.base import transaction_timeout_ms
from headgate.errors import FencedError
from headgate.testing.sinks.fake_pipeline import (
    Checkpoint,
    FakePipeline,
    SinkGeneration,
    Target,
    denial_of,
    missing_option,
)


def check_lost_prepared(target: Target) -> str | None:
    """B13, K5: the target lost what a completed checkpoint counts on: the commit raises instead of going on."""
    if target.lose_prepared is None:
        return missing_option("lose_prepared")
    pipeline, run, done = _lost(target, "the target lost what was prepared")
    assert denial_of(lambda: run.commit(done), pipeline.story), f"{pipeline.story}: the commit reported success"
    return None


def check_lost_prepared_in_recovery(target: Target) -> str | None:
    """B13, K5: the same, found by the next generations, each of which gets the error."""
    if target.lose_prepared is None:
        return missing_option("lose_prepared")
    pipeline, _, _ = _lost(target, "the target lost what was prepared, and the pipeline was started again")
    for _ in range(2):
        assert denial_of(lambda: pipeline.start(1), pipeline.story), f"{pipeline.story}: the recovery reported success"
    return None


def _lost(target: Target, story: str) -> tuple[FakePipeline, SinkGeneration, Checkpoint]:
    assert target.lose_prepared is not None
    pipeline = FakePipeline(target, 4, story)
    run = pipeline.start(1)
    run.finish()  # hold nothing back, so that there is something to lose
    done = pipeline.prepare(run)
    pipeline.complete(done)
    target.lose_prepared()
    return pipeline, run, done


def check_taken_away(target: Target) -> str | None:
    """D5: a consumer takes committed output away; commits that are repeated then neither fail nor bring it back."""
    if target.take is None:
        return missing_option("take")
    pipeline = FakePipeline(target, 4, "a consumer took committed output away")
    run = pipeline.start(2)
    run.finish()
    done = pipeline.prepare(run)
    pipeline.complete(done)
    run.commit(done)
    pipeline.check_visible(done.position, "before")
    target.take()
    for _ in range(2):
        run.commit(done)
        assert not target.read(), f"{pipeline.story}: it came back after a repeated commit"
        run = pipeline.start(2)
        assert not target.read(), f"{pipeline.story}: it came back after a restart"
    run.finish()
    after = pipeline.prepare(run)
    pipeline.complete(after)
    run.commit(after)
    found = sorted(int(row["number"]) for row in target.read())
    assert found == list(range(done.position, after.position)), f"{pipeline.story}: later output is {found}"
    return None


FOR_EVER_MS = 400 * 24 * 3600 * 1000
"""How long the kit stays away from a target that is said to keep everything for ever."""


class Moment(Enum):
    """What there is at the target when the outage begins."""

    OPEN = "with open transactions, and went on"
    OPEN_AND_KILLED = "with open transactions, and was started again"
    PREPARED_AND_KILLED = "with prepared output that no checkpoint promises, and was started again"
    CARRIED = "with prepared output of a checkpoint that was given up, and went on"
    PROMISED = "before it committed what was promised, and went on"
    PROMISED_AND_KILLED = "before it committed what was promised, and was started again"
    COMMITTED_AND_KILLED = "after everything was committed, and was started again"


MAY_BE_DENIED = (Moment.OPEN, Moment.CARRIED, Moment.PROMISED, Moment.PROMISED_AND_KILLED)
"""Where something that a completed checkpoint counts on can be gone."""


def check_outages(fresh: Callable[[], Target]) -> str | None:
    """Every moment, away for a little less than the target waits, and for longer; why not if it has no clock (KT3)."""
    for moment in Moment:
        target = fresh()
        if target.advance_clock is None:
            return missing_option("advance_clock")
        limit_ms = transaction_timeout_ms(target.sink)
        if limit_ms is None:
            check_outage(target, moment, FOR_EVER_MS, may_deny=False)
        else:
            check_outage(target, moment, limit_ms - 1, may_deny=False)
            check_outage(fresh(), moment, 2 * limit_ms + 1, may_deny=moment in MAY_BE_DENIED)
    return None


def check_outage(target: Target, moment: Moment, away_ms: int, *, may_deny: bool) -> None:
    """Stay away for ``away_ms``; ``may_deny``: the sink may refuse then, else it has to show everything once.

    Raises:
        AssertionError: output was lost or shown twice, or the refusal looks like something else or is not kept up.
    """
    assert target.advance_clock is not None
    pipeline = FakePipeline(target, 6, f"the pipeline was away for {away_ms} ms {moment.value}")
    run = pipeline.start(2)
    run.finish()
    pipeline.advance(run)
    if moment is Moment.OPEN:
        run.write(3)
    elif moment is Moment.OPEN_AND_KILLED:
        run.write(pipeline.rows)
    elif moment is Moment.COMMITTED_AND_KILLED:
        pipeline.advance(run)
    else:
        done = pipeline.prepare(run)
        if moment in (Moment.PROMISED, Moment.PROMISED_AND_KILLED):
            pipeline.complete(done)
    target.advance_clock(away_ms)
    if not _goes_on(pipeline, run, moment, may_deny):
        return
    pipeline.check_visible(pipeline.completed.shown, "after the outage")
    run = pipeline.start(3)
    pipeline.advance(run)
    pipeline.check_end(2)


def _goes_on(pipeline: FakePipeline, run: SinkGeneration, moment: Moment, may_deny: bool) -> bool:
    """Go on, or start again; return whether the sink succeeded."""
    if moment is Moment.OPEN:
        prepared = _finish_open(pipeline, run, may_deny)
        if prepared is None:
            return _is_done(pipeline, lambda: pipeline.start(2), may_deny=False)
        pipeline.complete(prepared)
    if moment is Moment.CARRIED:  # the next checkpoint promises it, too (C17)
        pipeline.complete(pipeline.prepare(run))
    if moment in (Moment.OPEN, Moment.CARRIED, Moment.PROMISED):
        return _is_done(pipeline, lambda: run.commit(pipeline.completed), may_deny)
    return _is_done(pipeline, lambda: pipeline.start(2), may_deny)


def _finish_open(pipeline: FakePipeline, run: SinkGeneration, may_fail: bool) -> Checkpoint | None:
    """Go on writing in transactions that may have ended, and prepare them; None if that failed."""
    try:
        run.write(pipeline.rows - 3)
        return run.prepare(pipeline.next_id())
    except FencedError as error:
        raise AssertionError(f"{pipeline.story}: its own writers were taken for those of a newer generation") from error
    except Exception as error:
        if may_fail:
            return None
        raise AssertionError(f"{pipeline.story}: an open transaction ended too early: {error}") from error


def _is_done(pipeline: FakePipeline, call: Callable[[], object], may_deny: bool) -> bool:
    denial = denial_of(call, pipeline.story)
    if denial is None:
        return True
    assert may_deny, f"{pipeline.story}: it was refused: {denial}"
    for _ in range(2):  # a second start gets the same error: the target still has its record
        assert denial_of(lambda: pipeline.start(2), pipeline.story), (
            f"{pipeline.story}: what was refused went through later"
        )
    pipeline.check_visible(0, "after the refusal")
    return False
