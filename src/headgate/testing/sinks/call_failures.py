"""Every call at the target fails once, before or after its effect; a retry or the next generation makes it good.

Sinks of the two classes that users derive from are wrapped and failed at the methods that the user wrote; others say
how they fail (``Target.failing``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa

from headgate.connectors.fenced_sink import Fence
from headgate.connectors.ledger_sink import LedgerOutput, LedgerSink
from headgate.connectors.two_phase_sink import TwoPhaseSink, can_forget
from headgate.errors import StorageError
from headgate.testing.sinks.fake_pipeline import SCHEMA, FakePipeline, HasFailed, Target, again, missing_option

_T = TypeVar("_T")


@dataclass(slots=True)
class Failure:
    """Fails call number ``at`` once; 0: none."""

    at: int = 0
    is_after: bool = False
    seen: int = 0

    def during(self, call: Callable[[], _T]) -> _T:
        """Return what ``call`` returns, unless it is the one."""
        self.seen += 1
        number, is_it = self.seen, self.seen == self.at
        if is_it and not self.is_after:
            raise _lost(number)
        found = call()
        if is_it:
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
    failure = Failure()
    if target.failing is not None:
        return target
    target.sink.make_target(SCHEMA)  # the sink that wraps it makes none
    if isinstance(target.sink, TwoPhaseSink):
        kind = _FailingForgettingSink if can_forget(target.sink) else _FailingTwoPhaseSink
        return replace(target, sink=kind(target.sink, failure), failing=failure.armed)
    if isinstance(target.sink, LedgerSink):
        return replace(target, sink=_FailingLedgerSink(target.sink, failure), failing=failure.armed)
    return target


class _FailingTwoPhaseSink(TwoPhaseSink[Any]):
    """A two-phase sink that fails in calls that are retried: not in ``begin`` and ``write``."""

    def __init__(self, inner: TwoPhaseSink[Any], failure: Failure) -> None:
        self._inner, self._failure = inner, failure
        self.transient_errors = inner.transient_errors

    def begin(self, name: str, schema: pa.Schema) -> Any:
        return self._inner.begin(name, schema)

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        self._inner.write(transaction, batch)

    def prepare(self, transaction: Any, name: str, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.prepare(transaction, name, fence))

    def claim(self, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.claim(fence))

    def claimed(self, owner: str) -> Fence | None:
        return self._failure.during(lambda: self._inner.claimed(owner))

    def all_claimed(self) -> Iterable[Fence]:
        return self._failure.during(lambda: list(self._inner.all_claimed()))

    def remove_output(self, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.remove_output(fence))

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


class _FailingLedgerSink(LedgerSink):
    """A ledger sink that writes each batch as a piece of its own, and fails between them, too."""

    piece_bytes = 1

    def __init__(self, inner: LedgerSink, failure: Failure) -> None:
        self._inner, self._failure = inner, failure
        self.transient_errors = inner.transient_errors

    def claim(self, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.claim(fence))

    def claimed(self, owner: str) -> Fence | None:
        return self._failure.during(lambda: self._inner.claimed(owner))

    def all_claimed(self) -> Iterable[Fence]:
        return self._failure.during(lambda: list(self._inner.all_claimed()))

    def remove_output(self, fence: Fence) -> None:
        self._failure.during(lambda: self._inner.remove_output(fence))

    def publish(self, outputs: Sequence[LedgerOutput], fence: Fence) -> None:
        wrapped = [_FailingOutput(output, self._failure) for output in outputs]
        self._failure.during(lambda: self._inner.publish(wrapped, fence))

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
    """Fail each call in turn; return why not, at a target that does not say how it fails (KT3)."""
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
