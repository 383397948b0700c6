"""Mutants of tidying up at sinks: it ends a start, nobody hears of it, or too much is forgiven. Each is caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_tidying as tidying

from headgate.connectors.files import commit as file_commit
from headgate.connectors.files.commit import FileCommitter
from headgate.errors import StorageError
from headgate.runtime.driver import claims
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.store import transactions

CLAIM = tidying.Fault(tidying.FaultKind.IO_ERROR, "delete", "_claims/p.out/0", times=99)
ABORT = tidying.Fault(tidying.FaultKind.IO_ERROR, "delete", "_staging/p.out/part", times=99)


class NeverRaised(Exception):  # noqa: N818 - it is not
    """So that nothing is caught."""


def a_file_sink_that_cannot_tidy_up_ends_the_start() -> AbstractContextManager[None]:
    return patched(file_commit, "StorageError", NeverRaised)


def a_stream_sink_that_cannot_sweep_ends_the_start() -> AbstractContextManager[None]:
    return patched(transactions, "StorageError", NeverRaised)


def nobody_hears_what_was_left() -> AbstractContextManager[None]:
    return patched(SinkCommits, "left_behind", lambda self: [])


@contextmanager
def whatever_fails_is_forgiven() -> Iterator[None]:
    real = FileCommitter.recover

    def recover(self: FileCommitter, keep: Any) -> None:
        with contextlib.suppress(StorageError):
            real(self, keep)

    with patched(FileCommitter, "recover", recover):
        yield


@pytest.mark.parametrize(
    ("mutant", "test", "argument"),
    [
        (
            a_file_sink_that_cannot_tidy_up_ends_the_start,
            tidying.test_a_file_sink_that_cannot_tidy_up_is_recovered_and_says_so,
            CLAIM,
        ),
        (
            nobody_hears_what_was_left,
            tidying.test_a_file_sink_that_cannot_tidy_up_is_recovered_and_says_so,
            CLAIM,
        ),
        (
            a_stream_sink_that_cannot_sweep_ends_the_start,
            tidying.test_a_stream_sink_that_cannot_sweep_is_recovered_and_says_so,
            "list",
        ),
        (
            nobody_hears_what_was_left,
            tidying.test_a_stream_sink_that_cannot_sweep_is_recovered_and_says_so,
            "list",
        ),
        (
            whatever_fails_is_forgiven,
            tidying.test_a_file_sink_that_cannot_fence_or_abort_is_not_recovered,
            ABORT,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_caught_while_tidying_up(
    mutant: Mutant, test: Callable[..., object], argument: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # K24
    monkeypatch.setattr(claims, "RETRY_PAUSES_S", (0.0, 0.0))
    assert_caught(mutant, test, tmp_path, monkeypatch, argument)
