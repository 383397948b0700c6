"""Checks the store for clients, beside its files, and keeps what was found until they have asked for it.

A check reads every event and takes long, so clients wait for it question by question. Counterpart: ``served.checked``.
Source: SS16 of docs/spec/served-store.md. One check at a time; what is under way is lost with the process, and begun
anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from headgate.errors import HeadgateError, StorageError
from headgate.store.fsck import Problem
from headgate.store.served.checked import Checked
from headgate.threads import SYSTEM_THREADS, Event, Threads

KEPT_MAX = 16
"""Checks whose findings are kept."""


class _Check:
    """One check."""

    def __init__(self, number: int, is_over: Event) -> None:
        self.number = number
        self.is_over = is_over
        self.found: Sequence[Problem] = ()
        self.error: HeadgateError | None = None


class Checking:
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

    def ask(self, number: int, wait_s: float, *, verify_events: bool) -> Checked:
        """Return what the check ``number`` found, or that it goes on; one that is not known is begun.

        Raises:
            HeadgateError: what ended it.
        """
        with self._lock:
            check = self._checks.get(number) or self._begin(verify_events)
        if not check.is_over.wait(wait_s):
            return Checked(check.number, is_over=False)
        if check.error is not None:
            raise check.error
        return Checked(check.number, is_over=True, problems=tuple(check.found))

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
        except BaseException as error:  # a mistake of ours: nobody must take it for a sound store (SS18)
            problem = f"the server made a mistake: {error!r}"
            check.error = StorageError("check", "the store", problem, is_transient=False)
            raise
        finally:
            check.is_over.set()
