"""Mutants of the base classes of sinks that users write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tests.connectors.custom.test_own_sinks as sinks
from examples.sqlite_sink import SqliteLedgerSink, SqliteSink
from tests.mutants.harness import Mutant, assert_caught, patched

from headgate.connectors.custom import ledger, two_phase
from headgate.testing.sink_kit import KillPoint, check_kill, check_stale_generation


@contextmanager
def recovery_aborts_nothing() -> Iterator[None]:
    """CS3, K6."""
    with patched(two_phase._Committer, "recover", lambda self, keep: self._sink.claim(self._fence)):
        yield


@contextmanager
def recovery_aborts_what_is_kept() -> Iterator[None]:
    """CS3: a completed checkpoint promised it."""
    recover = two_phase._Committer.recover
    with patched(two_phase._Committer, "recover", lambda self, keep: recover(self, [])):
        yield


@contextmanager
def recovery_aborts_what_an_heir_prepared() -> Iterator[None]:
    """CS3."""
    with patched(two_phase._Committer, "_is_mine", lambda self, name: True):
        yield


@contextmanager
def a_ledger_is_not_claimed() -> Iterator[None]:
    """K14: an older generation goes on."""
    with patched(SqliteLedgerSink, "claim", lambda self, fence: None):
        yield


@contextmanager
def permits_are_not_looked_at() -> Iterator[None]:
    """K1."""

    def beyond(self: Any, permit: Any, committables: Any) -> None:
        names = [two_phase._name_of(committable) for committable in committables]
        self._sink.commit(names, self._fence)

    with patched(two_phase._Committer, "commit", beyond):
        yield


@contextmanager
def a_ledger_publishes_nothing_that_comes_late() -> Iterator[None]:
    """K7: what an earlier checkpoint left is older than the permit, and not published for that."""

    def newest_only(self: Any, permit: Any, committables: Any) -> None:
        commit(self, permit, [c for c in committables if c.checkpoint == permit.checkpoint])

    commit = ledger._Committer.commit
    with patched(ledger._Committer, "commit", newest_only):
        yield


def killed(kind: Any) -> Any:
    def test(path: Path) -> None:
        for point in KillPoint:
            for overlap in (1, 3):
                file = path / f"{point.name}-{overlap}.db"
                check_kill(sinks.target_at(file, kind), point, 2, 1, overlap, 4)

    return test


def stale(path: Path) -> None:
    check_stale_generation(sinks.target_at(path / "t.db", SqliteLedgerSink))


CASES = [
    (recovery_aborts_nothing, killed(SqliteSink)),
    (recovery_aborts_what_is_kept, killed(SqliteSink)),
    (recovery_aborts_what_an_heir_prepared, sinks.test_what_an_heir_prepared_is_not_aborted),
    (a_ledger_is_not_claimed, stale),
    (a_ledger_publishes_nothing_that_comes_late, killed(SqliteLedgerSink)),
    (permits_are_not_looked_at, lambda path: sinks.test_output_beyond_the_permit_is_refused(path, SqliteSink)),
]


@pytest.mark.parametrize(("mutant", "test"), CASES, ids=[mutant.__name__ for mutant, _ in CASES])
def test_a_mutant_is_caught(tmp_path: Path, mutant: Mutant, test: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinks.sqlite_sink, "TABLES", f"pragma synchronous = off; {sinks.sqlite_sink.TABLES}")
        assert_caught(mutant, test, tmp_path)
