"""The kit stays away for longer than a target waits: no sink may lose anything silently (CS9)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tests.connectors.files.test_file_sink as files
import tests.connectors.streams.test_stream_kit as streams
from tests.conftest import few
from tests.testing.staged import LIMIT_MS, StagedLedger, StagedSink, at, number_of

import headgate as hg
from headgate import environment
from headgate.connectors.base import Sink, transaction_timeout_ms
from headgate.errors import StorageError
from headgate.testing import Target, check_sink
from headgate.testing.sinks.failures import Moment, check_outage, check_outages


class GoesOn(StagedSink):
    """Logs that output is gone, and goes on."""

    def is_gone(self, name: str) -> None:
        return


class BeginsAnew(StagedSink):
    """Writes on in a transaction that ended, as if it were open."""

    def write(self, transaction: str, batch: Any) -> None:
        if transaction not in self.place.opened:
            self.begin(transaction, batch.schema)
        super().write(transaction, batch)


class RefusesOnce(StagedSink):
    """Takes for committed what it has refused."""

    def is_gone(self, name: str) -> None:
        self.place.ledger.add(name)
        super().is_gone(name)


class SaysReplaced(StagedSink):
    def is_gone(self, name: str) -> None:
        raise hg.FencedError(name, 1, 2)  # type: ignore[arg-type]


class SaysTryAgain(StagedSink):
    def is_gone(self, name: str) -> None:
        raise StorageError("commit", name, "not there")


class SaysPages(StagedSink):
    def is_gone(self, name: str) -> None:
        raise hg.UsageError(f"{name} is gone\n  at line 1\n  at line 2")


class DeclaresNothing(StagedSink):
    transaction_timeout = None


class DeclaresTooMuch(StagedSink):
    transaction_timeout = "2m"


class ForgetsOutcomes(StagedSink):
    """Its ledger gets old, too."""

    def claim(self, fence: hg.Fence) -> None:
        super().claim(fence)
        if self.place.now_ms > LIMIT_MS:
            self.place.ledger.clear()


def test_a_sink_whose_target_ends_transactions_passes_if_it_says_so() -> None:  # CS9
    check_sink(lambda: at(StagedSink), rescales=[(2, 1)], overlaps=[2], rows=[6])


def test_a_sink_that_writes_again_from_the_checkpoint_outlasts_any_outage() -> None:  # CS9
    check_outages(lambda: at(StagedLedger))


@pytest.mark.parametrize("moment", Moment)
def test_a_target_that_keeps_everything_is_away_from_for_a_year(moment: Moment) -> None:  # CS9
    check_outage(at(DeclaresNothing, limit_ms=None), moment, 365 * 24 * 3600 * 1000, may_deny=False)


class LosesWhatIsCarried(StagedSink):
    """Commits the newest checkpoint, and asks for nothing that an earlier one left."""

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        newest = max(number_of(name) for name in names)
        gone = self.place.prepared | self.place.ledger
        super().commit([name for name in names if number_of(name) == newest or name in gone], fence)


def test_output_that_a_later_checkpoint_carries_is_missed_when_it_is_gone() -> None:  # CS9, C17
    check_outage(at(StagedSink), Moment.CARRIED, 2 * LIMIT_MS + 1, may_deny=True)
    with pytest.raises(AssertionError, match="lost"):
        check_outage(at(LosesWhatIsCarried), Moment.CARRIED, 2 * LIMIT_MS + 1, may_deny=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GoesOn, "lost"),
        (BeginsAnew, "lost"),
        (RefusesOnce, "what was refused went through later"),
        (SaysReplaced, "looks like a newer generation"),
        (SaysTryAgain, "looks like a fault that passes"),
        (SaysPages, "is no sentence"),
        (DeclaresNothing, "it was refused|ended too early"),
        (DeclaresTooMuch, "it was refused|ended too early"),
        (ForgetsOutcomes, "it was refused"),
    ],
)
def test_sinks_that_lose_in_an_outage_are_caught(kind: type[StagedSink], message: str) -> None:  # CS9
    with pytest.raises(AssertionError, match=message):
        check_outages(lambda: at(kind))


class Shifted:
    """The time of this machine, moved on."""

    def __init__(self) -> None:
        self.by_ns = 0

    def advance(self, by_ms: int) -> None:
        self.by_ns += by_ms * 1_000_000

    def time_ns(self) -> int:
        return 1_700_000_000_000_000_000 + self.monotonic_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.by_ns


@pytest.mark.long
@pytest.mark.parametrize("system", few(["stream", "files", "files that wait"], 2))
def test_our_own_sinks_lose_nothing_in_a_year(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CS9, S12
    numbers = itertools.count()
    shifted = Shifted()
    monkeypatch.setattr(environment, "time", shifted)

    def fresh() -> Target:
        place = tmp_path / str(next(numbers))
        made = streams.fresh(place) if system == "stream" else files.target(str(place), "jsonl", WAITING[system])
        return replace(made, advance_clock=shifted.advance)

    check_outages(fresh)


WAITING = {"files": 0, "files that wait": "1h"}


def test_a_timeout_is_a_positive_duration_or_none() -> None:  # CS9
    class Wrong(StagedSink):
        transaction_timeout = 0  # type: ignore[assignment]

    assert transaction_timeout_ms(at(StagedSink).sink) == LIMIT_MS
    assert transaction_timeout_ms(Sink()) is None
    with pytest.raises(hg.UsageError, match="transaction_timeout must be positive"):
        transaction_timeout_ms(at(Wrong).sink)
