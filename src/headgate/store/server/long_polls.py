"""What clients wait for by long polling: the outcome of a request, changes of the store, the findings of a check.

Counterparts: ``client.requests`` and ``client.remote_store``. Source: SS9, SS12 and SS16 of docs/spec/served-
store.md. All of this may be lost with the process: then the outcome is unknown, and a check begins again.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from headgate.environment import SYSTEM_THREADS, Event, Threads
from headgate.errors import HeadgateError, StorageError
from headgate.store.client.remote_store import CheckResult
from headgate.store.client.requests import RequestOutcome
from headgate.store.fsck import Problem

_T = TypeVar("_T")

ANSWERS_MAX = 1_024
ANSWER_BYTES_MAX = 1 << 16
"""So many answers are kept, and none that is larger: then its caller hears that the outcome is unknown (CT7)."""

VOID_MAX = 1 << 16
"""Questions that were asked for and had not come; a connection that was cut delivers nothing for longer."""


class VoidError(Exception):
    """The question came when its client had given it up, or came twice. Expected: not a HeadgateError."""


class Outcome:
    """Where the answer to one question is put."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""


class Deduplication:
    """The questions of one process of the server."""

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._changed = threads.condition()
        self._under_way: set[str] = set()
        self._answered: OrderedDict[str, Outcome] = OrderedDict()
        self._void: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def under_way(self, name: str) -> Iterator[Outcome]:
        """Carry out the question ``name`` within the block, which says what was answered.

        Raises:
            VoidError: it is not to be carried out.
        """
        outcome = Outcome()
        with self._changed:
            if name in self._void or name in self._under_way or name in self._answered:
                raise VoidError
            self._under_way.add(name)
        try:
            yield outcome
        finally:
            with self._changed:
                self._under_way.discard(name)
                if len(outcome.data) > ANSWER_BYTES_MAX:
                    outcome.status, outcome.data = 0, b""
                _keep(self._answered, name, outcome, ANSWERS_MAX)
                self._changed.notify_all()

    def settle(self, name: str, wait_s: float) -> RequestOutcome:
        """Return what became of a question; one that has not come is never carried out from now on."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._under_way, wait_s)
            if name in self._under_way:
                return RequestOutcome(is_over=False)
            outcome = self._answered.get(name)
            if outcome is not None:
                return RequestOutcome(is_over=True, status=outcome.status, data=outcome.data)
            _keep(self._void, name, None, VOID_MAX)
            return RequestOutcome(is_over=True, is_void=True)


def _keep(among: OrderedDict[str, _T], name: str, value: _T, most: int) -> None:
    among[name] = value
    while len(among) > most:
        among.popitem(last=False)


LOOK_S = 0.01
"""Between two looks while a client waits. One costs microseconds."""


class ChangeFeed:
    """The number of the store's changes, and those who wait for another one."""

    def __init__(self, look: Callable[[], int], threads: Threads = SYSTEM_THREADS) -> None:
        """``look`` returns a number that is another one after every change."""
        self._look = look
        self._changed = threads.condition()
        self._seen: int | None = None
        self._number = 0
        self._waiting_count = 0
        self._is_closed = False
        self._thread = threads.thread(self._watch, "headgate-store-news")
        self._thread.start()

    def wait(self, number: int, wait_s: float) -> int:
        """Return a number that is not ``number`` when there is news, at the latest after ``wait_s`` seconds."""
        with self._changed:
            self._waiting_count += 1
            self._changed.notify_all()
            try:
                self._look_again()  # there are no looks while no client waits
                self._changed.wait_for(lambda: self._is_closed or self._number != number, wait_s)
                return self._number
            finally:
                self._waiting_count -= 1

    def changed(self) -> None:
        """Something was changed, or may have been."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all that wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting_count)
                self._look_again()
                self._changed.wait_for(lambda: self._is_closed, LOOK_S)

    def _look_again(self) -> None:
        try:
            seen = self._look()
        except HeadgateError:
            return  # the next verb says what is wrong
        if seen != self._seen:
            self._seen = seen
            self._number += 1
            self._changed.notify_all()


KEPT_MAX = 16
"""Checks whose findings are kept."""


class _Check:
    """One check."""

    def __init__(self, number: int, is_over: Event) -> None:
        self.number = number
        self.is_over = is_over
        self.found: Sequence[Problem] = ()
        self.error: HeadgateError | None = None


class CheckJobs:
    """The checks of one process of the server."""

    def __init__(
        self, check: Callable[[bool], Sequence[Problem]], first: int = 1, threads: Threads = SYSTEM_THREADS
    ) -> None:
        """Begin.

        Args:
            check: returns the problems; its argument: whether every event is read, too.
            first: number of the first check; far from those of other processes of the server, whose clients may ask on.
            threads: what checks run in.
        """
        self._check = check
        self._threads = threads
        self._lock = threads.lock()
        self._alone = threads.lock()
        self._checks: dict[int, _Check] = {}
        self._numbers = itertools.count(first)

    def ask(self, number: int, wait_s: float, *, verify_events: bool) -> CheckResult:
        """Return what the check ``number`` found, or that it goes on; one that is not known is begun.

        Raises:
            HeadgateError: what ended it.
        """
        with self._lock:
            check = self._checks.get(number) or self._begin(verify_events)
        if not check.is_over.wait(wait_s):
            return CheckResult(check.number, is_over=False)
        if check.error is not None:
            raise check.error
        return CheckResult(check.number, is_over=True, problems=tuple(check.found))

    def _begin(self, verify_events: bool) -> _Check:
        check = _Check(next(self._numbers), self._threads.event())
        self._checks[check.number] = check
        for number in [x for x, old in self._checks.items() if old.is_over.is_set()][:-KEPT_MAX]:
            del self._checks[number]
        self._threads.thread(self._run, "headgate-store-check", check, verify_events).start()
        return check

    def _run(self, check: _Check, verify_events: bool) -> None:
        try:
            with self._alone:
                check.found = self._check(verify_events)
        except HeadgateError as error:
            check.error = error
        except BaseException as error:  # a mistake of ours: it must not pass for a sound store (SS18)
            problem = f"the server made a mistake: {error!r}"
            check.error = StorageError("check", "the store", problem, is_transient=False)
            raise
        finally:
            check.is_over.set()
