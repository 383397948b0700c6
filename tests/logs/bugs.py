"""Bugs that are planted in the processes of clients: each shows in their history, or the checks are worth nothing.

Counterpart: ``clients.run`` plants one, ``test_logs_under_faults`` says which anomaly it is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headgate.errors import StorageError
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.reader import SegmentReader
from headgate.store.reader_groups import GroupReader
from headgate.store.transactions import Transactions
from headgate.store.writer import StreamWriter

_count = itertools.count(1)


def some_are_acknowledged_and_not_recorded() -> None:
    """One flush of five has no events in the catalogue."""
    real = SqlCatalogue.append

    def append(self: Any, stream: Any, chunk: Any, *given: Any) -> Any:
        if next(_count) % 5:
            return real(self, stream, chunk, *given)
        return real(self, stream, replace(chunk, entries=()), *given)

    SqlCatalogue.append = append  # type: ignore[method-assign]


def lost_answers_are_not_looked_up() -> None:
    """An append takes effect, its answer is lost, and it is made again."""
    real = SqlCatalogue.append

    def append(self: Any, *given: Any) -> Any:
        found = real(self, *given)
        if next(_count) % 5 == 0:
            raise StorageError("write", "catalogue", "disk I/O error", True)
        return found

    SqlCatalogue.append = append  # type: ignore[method-assign]
    StreamWriter._found = lambda self, path: None  # type: ignore[method-assign]
    StreamWriter._numbers = lambda self, attempt: None  # type: ignore[method-assign]
    StreamWriter._append = _with_other_names(StreamWriter._append)  # type: ignore[method-assign]


def _with_other_names(real: Callable[..., Any]) -> Callable[..., Any]:
    def append(self: Any, attempt: Any) -> Any:
        if attempt.is_uncertain:
            attempt.path = self._new_path()
        return real(self, attempt)

    return append


def transactions_become_visible_one_by_one() -> None:
    """What is committed in one step is seen in several."""
    real = Transactions.commit

    def commit(self: Any, names: Any, **more: Any) -> None:
        for name in names:
            real(self, [name], **more)
            time.sleep(0.1)  # the time of the fault: not a wait for anything

    Transactions.commit = commit  # type: ignore[method-assign]


def a_reader_passes_over_some() -> None:
    """Of some reads the last event is missing, and the next one goes on behind it."""
    real = SegmentReader.read

    def read(self: Any, *given: Any, **more: Any) -> Any:
        batch = real(self, *given, **more)
        is_struck = batch is not None and batch.num_rows > 1 and next(_count) % 4 == 0
        return batch.slice(0, batch.num_rows - 1) if is_struck else batch

    SegmentReader.read = read  # type: ignore[method-assign]


def members_say_that_they_commit() -> None:
    """Nine of ten commits are not made."""
    real = GroupReader.commit

    def commit(self: Any) -> None:
        if next(_count) % 10 == 9:
            real(self)

    GroupReader.commit = commit  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        some_are_acknowledged_and_not_recorded,
        lost_answers_are_not_looked_up,
        transactions_become_visible_one_by_one,
        a_reader_passes_over_some,
        members_say_that_they_commit,
    )
}
