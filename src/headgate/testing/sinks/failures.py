"""Failures at a sink's target: every call fails once, and output is lost.

A call fails before or after its effect; a retry or the next generation makes it good. A server that can be ended is
ended then. Sinks of the two classes that
users derive from are wrapped and failed at the methods that the user wrote; others say how they fail
(``Target.failing``). Output is lost when the target loses it, a consumer takes it, or an outage outlasts the target's
transaction timeout.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import pyarrow as pa

from headgate.connectors.base import transaction_timeout_ms
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.ledger_sink import LedgerOutput, LedgerSink
from headgate.connectors.two_phase_sink import TwoPhaseSink, can_forget
from headgate.dataclass import dataclass
from headgate.errors import FencedError, StorageError
from headgate.testing.sinks.fake_pipeline import (
    SCHEMA,
    Checkpoint,
    FakePipeline,
    HasFailed,
    SinkGeneration,
    Target,
    again,
    denial_of,
    missing_option,
)

_T = TypeVar("_T")


@dataclass(slots=True)
class Failure:
    """Fails call number ``at`` once; 0: none. ``crash``: see ``Target``."""

    at: int = 0
    is_after: bool = False
    seen: int = 0
    crash: Callable[[], None] | None = None

    def during(self, call: Callable[[], _T], *, crashes: bool = True) -> _T:
        """Return what ``call`` returns, unless it is the one.

        ``crashes``: the target's server may end before the call, which then fails or not, as the sink has it.
        """
        self.seen += 1
        number, is_it = self.seen, self.seen == self.at
        crash = self.crash if crashes else None
        if is_it and not self.is_after:
            if crash is None:
                raise _lost(number)
            crash()
        found = call()
        if is_it and self.is_after:
            if crash is not None:
                crash()
            raise _lost(number)
        return found

    @contextlib.contextmanager
    def armed(self, at: int, is_after: bool) -> Iterator[HasFailed]:
        """See ``Target.failing``."""
        self.at, self.is_after, self.seen = at, is_after, 0
        try:
            yield lambda: self.seen >= at
        finally:
            self.at = 0


def failing_target(target: Target) -> Target:
    """Return ``target`` with a way to fail, if its sink is derived from one of the classes for users."""
    failure = Failure(crash=target.crash)
    if target.failing is not None:
        return target
    target.sink.make_target(SCHEMA)  # the sink that wraps it makes none
    if isinstance(target.sink, TwoPhaseSink):
        kind = _FailingForgettingSink if can_forget(target.sink) else _FailingTwoPhaseSink
        return replace(target, sink=kind(target.sink, failure), failing=failure.armed)
    if isinstance(target.sink, LedgerSink):
        return replace(target, sink=_FailingLedgerSink(target.sink, failure), failing=failure.armed)
    return target


class _FailingSink:
    """What fails of both kinds of sinks."""

    _inner: TwoPhaseSink[Any] | LedgerSink
    _failure: Failure

    def claim(self, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.claim(fence))

    def claimed(self, owner: str) -> Fence | None:
        return self._failure.during(lambda: self._inner.claimed(owner))

    def all_claimed(self) -> Iterable[Fence]:
        return self._failure.during(lambda: list(self._inner.all_claimed()))

    def remove_output(self, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.remove_output(fence))


class _FailingTwoPhaseSink(_FailingSink, TwoPhaseSink[Any]):
    """A two-phase sink that fails in calls that are retried: not in ``begin`` and ``write``."""

    _inner: TwoPhaseSink[Any]

    def __init__(self, inner: TwoPhaseSink[Any], failure: Failure) -> None:
        self._inner, self._failure = inner, failure
        self.transient_errors = inner.transient_errors

    def begin(self, name: str, schema: pa.Schema) -> Any:
        return self._inner.begin(name, schema)

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        self._inner.write(transaction, batch)

    def prepare(self, transaction: Any, name: str, fence: Fence) -> None:
        # an open transaction ends with its server, and no retry brings it back: a restart does
        self._failure.during(lambda: self._inner.prepare(transaction, name, fence), crashes=False)

    def prepared(self, owner: str) -> Iterable[str]:
        return self._failure.during(lambda: list(self._inner.prepared(owner)))

    def commit(self, names: Sequence[str], fence: Fence) -> None:
        self._failure.during(lambda: self._inner.commit(names, fence))

    def abort(self, name: str, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.abort(name, fence))

    def close(self, transaction: Any) -> None:
        self._inner.close(transaction)


class _FailingForgettingSink(_FailingTwoPhaseSink):
    """Fails in ``committed`` and ``forget``, too."""

    def committed(self, owner: str) -> Iterable[str]:
        return self._failure.during(lambda: list(self._inner.committed(owner)))

    def forget(self, names: Sequence[str]) -> None:
        self._failure.during(lambda: self._inner.forget(names))


class _FailingLedgerSink(_FailingSink, LedgerSink):
    """A ledger sink that writes each batch as a piece of its own, and fails between them, too."""

    piece_bytes = 1
    _inner: LedgerSink

    def __init__(self, inner: LedgerSink, failure: Failure) -> None:
        self._inner, self._failure = inner, failure
        self.transient_errors = inner.transient_errors

    def publish(self, outputs: Sequence[LedgerOutput], fence: Fence) -> None:
        wrapped = [_FailingOutput(output, self._failure) for output in outputs]
        self._failure.during(lambda: self._inner.publish(wrapped, fence))

    def may_have_forgotten(self, name: str) -> bool:
        return self._failure.during(lambda: self._inner.may_have_forgotten(name))

    def forget(self, owner: str, before: int) -> None:
        self._failure.during(lambda: self._inner.forget(owner, before))


class _FailingOutput(LedgerOutput):
    """Output that may fail before each batch."""

    def __init__(self, inner: LedgerOutput, failure: Failure) -> None:
        self._inner, self._failure = inner, failure
        self.name = inner.name

    @property
    def checkpoint(self) -> int:
        return self._inner.checkpoint

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._inner:
            yield self._failure.during(lambda one=batch: one)  # type: ignore[misc]


def _lost(number: int) -> StorageError:
    return StorageError("reach", "the target", f"the connection was lost in call {number}", is_transient=True)


CALLS_MAX = 1_000
"""A scenario that has not come to its end after so many calls at the target never will."""


def check_interruptions(fresh: Callable[[], Target]) -> str | None:
    """Fail each call in turn; return why not, at a target that does not say how it fails."""
    for is_killed, is_after in itertools.product((False, True), repeat=2):
        for number in range(1, CALLS_MAX):
            target = failing_target(fresh())
            if target.failing is None:
                return missing_option("failing")
            if not check_interruption(target, number, is_after=is_after, is_killed=is_killed):
                break
        else:
            raise AssertionError(f"the scenario had not ended after {CALLS_MAX} calls at the target")
    return None


def check_interruption(target: Target, number: int, *, is_after: bool, is_killed: bool) -> bool:
    """Prepare, commit and recover with one failure on the way; return whether it came to that.

    ``is_killed``: another generation recovers, not the one with the failed call.
    """
    assert target.failing is not None
    when = "after" if is_after else "before"
    story = f"call {number} at the target failed {when} its effect" + (", and the driver died" if is_killed else "")
    pipeline = FakePipeline(target, 8, story)
    run = pipeline.start(2)
    run.finish()
    pipeline.advance(run)
    with target.failing(number, is_after) as has_failed:
        done = pipeline.prepare(run)
        pipeline.complete(done)
        run.commit(done)
        pipeline.check_visible(done.shown, "after the commit")
        again(lambda: run.forget([done]))
        pipeline.complete(pipeline.prepare(run))
        pipeline.prepare(run)  # leftovers
        _recover(pipeline, is_killed)
        is_reached = has_failed()
    pipeline.check_visible(pipeline.completed.shown, "after the restart")
    pipeline.advance(pipeline.start(2))
    pipeline.check_end(1)
    return is_reached


def _recover(pipeline: FakePipeline, is_killed: bool) -> None:
    """Begin a generation; when that fails, go on with it, or begin another one."""
    run = pipeline.next_generation(3)
    try:
        run.recover()
        run.recommit()
    except StorageError as error:
        if not error.is_transient:
            raise
        if is_killed:
            pipeline.start(3)
        else:
            run.recover()
            run.recommit()


def check_lost_prepared(target: Target) -> str | None:
    """K5: the target lost what a completed checkpoint counts on: the commit raises instead of going on."""
    if target.lose_prepared is None:
        return missing_option("lose_prepared")
    pipeline, run, done = _lose_output(target, "the target lost what was prepared")
    assert denial_of(lambda: run.commit(done), pipeline.story), f"{pipeline.story}: the commit reported success"
    return None


def check_lost_prepared_in_recovery(target: Target) -> str | None:
    """K5: the same, found by the next generations, each of which gets the error."""
    if target.lose_prepared is None:
        return missing_option("lose_prepared")
    pipeline, _, _ = _lose_output(target, "the target lost what was prepared, and the pipeline was started again")
    for _ in range(2):
        assert denial_of(lambda: pipeline.start(1), pipeline.story), f"{pipeline.story}: the recovery reported success"
    return None


def _lose_output(target: Target, story: str) -> tuple[FakePipeline, SinkGeneration, Checkpoint]:
    assert target.lose_prepared is not None
    pipeline = FakePipeline(target, 4, story)
    run = pipeline.start(1)
    run.finish()  # hold nothing back, so that there is something to lose
    done = pipeline.prepare(run)
    pipeline.complete(done)
    target.lose_prepared()
    return pipeline, run, done


def check_taken_away(target: Target) -> str | None:
    """A consumer takes committed output away; commits that are repeated then neither fail nor bring it back."""
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
    """Every moment, away for a little less than the target waits, and for longer; why not if it has no clock."""
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
