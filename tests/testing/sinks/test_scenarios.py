"""Each scenario of the kit for sinks finds a sink that is broken in just that way (docs/spec/kits.md)."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.testing.staged import ForgettingSink, Place, StagedLedger, StagedSink, at, number_of

import headgate as hg
from headgate.connectors.fenced_sink import OutputName
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.file_writer import FileWriter
from headgate.connectors.ledger_sink import LedgerOutput
from headgate.storage.memory import MemoryStorage, memory_storage
from headgate.storage.urls import OPENERS
from headgate.testing import Target
from headgate.testing.sinks.failures import check_interruptions
from headgate.testing.sinks.fake_pipeline import HasFailed
from headgate.testing.sinks.scenarios import (
    KillPoint,
    check_closed,
    check_commit_in_flight,
    check_end_of_input,
    check_first_epoch,
    check_forgetting,
    check_kill,
    check_late_commits,
    check_many_pending,
    check_neighbours,
    check_rescaling,
    check_rewound,
    check_stale_generation,
)


class ComparesWithTheNewest(StagedSink):
    """K7: takes everything below the newest that it has committed for committed."""

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        newest = max((number_of(name) for name in self.place.ledger), default=0)
        super().commit([name for name in names if number_of(name) > newest], fence)


class LedgerOfTheNewest(StagedLedger):
    """K7: the same with ids of checkpoints."""

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        newest = max((number_of(name) for name in self.place.ledger), default=0)
        super().publish([output for output in outputs if output.checkpoint > newest], fence)


class ShowsTheNewestFirst(StagedSink):
    """K2."""

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        super().commit(list(reversed(names)), fence)


class HasAPoolOfTen(StagedSink):
    def prepare(self, transaction: str, name: str, fence: hg.Fence) -> None:
        if len(self.place.prepared) >= 10:
            raise hg.UsageError("no connection is left")
        super().prepare(transaction, name, fence)


class ListsItsSubtasksOnly(StagedSink):
    """Knows nothing of subtasks that are gone."""

    def prepared(self, owner: str) -> list[str]:
        found = [OutputName.parse(name) for name in super().prepared(owner)]
        return [str(name) for name in found if name is not None and name.subtask == 0]


class TakesEveryName(StagedSink):
    """K8: names without pipeline and sink."""

    def _plain(self, name: str) -> str:
        return name.partition("-")[2]

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        done = {self._plain(name) for name in self.place.ledger}
        super().commit([name for name in names if self._plain(name) not in done], fence)


class LooksIntoNoLedger(StagedLedger):
    """K7: writes whatever it is given, and does not ask who it is."""

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        self.place.shown += [row for output in outputs for batch in output for row in batch.to_pylist()]


class ForgetsTooMuch(StagedLedger):
    def forget(self, owner: str, before: int) -> None:
        super().forget(owner, before + 1)


class ForgetsAll(ForgettingSink):
    """Forgets what retained checkpoints promise, too."""

    def forget(self, names: Sequence[str]) -> None:
        mine = names[0].partition("-")[0]
        self.place.ledger = {name for name in self.place.ledger if not name.startswith(f"{mine}-")}


class ForgetsForOthers(ForgettingSink):
    """Forgets what another sink of the target promises."""

    def forget(self, names: Sequence[str]) -> None:
        numbers = {name.partition("-")[2] for name in names}
        self.place.ledger = {name for name in self.place.ledger if name.partition("-")[2] not in numbers}


class ForgetsNothing(ForgettingSink):
    """Says that it forgot."""

    def forget(self, names: Sequence[str]) -> None:
        pass


class ForgetsOnce(ForgettingSink):
    """Is lost when what it is to forget is forgotten."""

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.place.ledger.remove(name)


class OneForAll(StagedSink):
    """A number is committed as soon as one subtask's output of it is."""

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        done = {number_of(name) for name in self.place.ledger}
        super().commit([name for name in names if number_of(name) not in done], fence)


class NotFenced(StagedLedger):
    """K14."""

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        super().publish(outputs, hg.Fence(fence.owner, 1 << 40))


class CommitsWhatever(StagedSink):
    """Commits all that is prepared, whoever prepared it."""

    def prepare(self, transaction: str, name: str, fence: hg.Fence) -> None:
        super().prepare(transaction, name, hg.Fence(fence.owner, 1 << 40))

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        super().commit([*names, *(name for name in sorted(self.place.prepared) if name not in names)], fence)


class ShowsAtOnce(StagedSink):
    def prepare(self, transaction: str, name: str, fence: hg.Fence) -> None:
        super().prepare(transaction, name, fence)
        self.show(name)


class WritesPieceByPiece(StagedLedger):
    """Each piece is shown by itself, and the name comes last."""

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        for output in outputs:
            if output.name not in self.place.ledger:
                for batch in output:
                    self.place.shown += batch.to_pylist()
                self.place.ledger.add(output.name)


class HasNoLedger(StagedSink):
    """A commit that is repeated finds nothing, and takes that for a loss."""

    def show(self, name: str) -> None:
        super().show(name)
        self.place.ledger.discard(name)


def first_epoch(target: Target) -> None:
    check_first_epoch(target, KillPoint.PREPARED_ALL)


def killed_between_commits(target: Target) -> None:
    check_kill(target, KillPoint.COMMITTED_SOME, 2, 2, 1, 6)


def killed(target: Target) -> None:
    check_kill(target, KillPoint.COMPLETED, 2, 1, 3, 6)


def in_flight(target: Target) -> None:
    check_commit_in_flight(target, is_late=True)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (ComparesWithTheNewest, check_late_commits),
        (LedgerOfTheNewest, check_rewound),
        (ShowsTheNewestFirst, killed),
        (HasAPoolOfTen, check_many_pending),
        (ListsItsSubtasksOnly, first_epoch),
        (ListsItsSubtasksOnly, check_rescaling),
        (TakesEveryName, check_neighbours),
        (LooksIntoNoLedger, in_flight),
        (ForgetsTooMuch, check_forgetting),
        (ForgetsAll, check_forgetting),
        (ForgetsForOthers, check_forgetting),
        (ForgetsNothing, check_forgetting),
        (OneForAll, killed_between_commits),
        (NotFenced, check_stale_generation),
        (CommitsWhatever, check_stale_generation),
        (ShowsAtOnce, killed),
    ],
)
def test_each_scenario_finds_its_sink(kind: Any, check: Callable[[Target], None]) -> None:
    check(at(kind.__mro__[1], limit_ms=None))
    with pytest.raises((AssertionError, hg.HeadgateError)):
        check(at(kind, limit_ms=None))


def test_a_sink_that_cannot_be_told_twice_to_forget_is_caught() -> None:
    with pytest.raises(KeyError):
        check_forgetting(at(ForgetsOnce, limit_ms=None))
    check_interruptions(lambda: at(ForgettingSink, limit_ms=None))


@pytest.mark.parametrize(
    ("kind", "message"), [(WritesPieceByPiece, "visible twice"), (HasNoLedger, "is not there any more")]
)
def test_a_failure_in_the_middle_finds_its_sink(kind: Any, message: str) -> None:
    check_interruptions(lambda: at(kind.__mro__[1], limit_ms=None))
    with pytest.raises((AssertionError, hg.HeadgateError), match=message):
        check_interruptions(lambda: at(kind, limit_ms=None))


class HasConnections(StagedSink):
    """One for each transaction, until its writer is closed."""

    pool: ClassVar[list[socket.socket]] = []

    def begin(self, name: str, schema: pa.Schema) -> str:
        self.pool.append(socket.socket())
        return super().begin(name, schema)

    def close(self, transaction: str) -> None:
        while self.pool:
            self.pool.pop().close()


class KeepsItsConnections(HasConnections):
    """Nobody closes them."""

    def close(self, transaction: str) -> None:
        pass


def test_a_sink_that_keeps_its_connections_is_caught() -> None:
    assert check_closed(at(HasConnections, limit_ms=None)) is None
    with pytest.raises(AssertionError, match=r"each time .* more files or connections stay open"):
        check_closed(at(KeepsItsConnections, limit_ms=None))
    HasConnections(Place()).close("")


class MadeFirst(StagedSink):
    """Makes its target itself."""

    is_made = False

    def make_target(self, schema: Any) -> None:
        self.is_made = True

    def begin(self, name: str, schema: Any) -> str:
        assert self.is_made
        return super().begin(name, schema)


def test_a_sink_that_makes_its_target_is_failed_as_any_other() -> None:
    check_interruptions(lambda: at(MadeFirst, limit_ms=None))


def shown_in(storage: MemoryStorage) -> list[dict[str, Any]]:
    """Return the records of the files that a reader of the directory sees."""
    files = [path for path in storage.list("") if not path.startswith("_")]
    return [json.loads(line) for path in files for line in storage.get(path).splitlines()]


def crashing(kind: Any, loses: Callable[[Place], None]) -> tuple[Target, list[str]]:
    """A target with a server that loses something when it ends, and how often it has ended."""
    made, crashes = at(kind), list[str]()
    place = made.sink.place  # type: ignore[attr-defined]

    def crash() -> None:
        crashes.append("")
        for name in [name for name in place.opened if name not in place.prepared]:
            place.drop(name)
        loses(place)

    return replace(made, crash=crash), crashes


@pytest.mark.parametrize("kind", [StagedSink, StagedLedger])
def test_a_server_that_ends_at_each_point_is_no_harm_to_a_sink_that_is_right(kind: Any) -> None:
    for point in KillPoint:
        target, crashes = crashing(kind, lambda place: None)
        check_kill(target, point, 2, 1, 1, 4)
        assert len(crashes) == 1
    ended: list[str] = []

    def fresh() -> Target:
        nonlocal ended
        target, ended = crashing(kind, lambda place: None)
        return target

    assert check_interruptions(fresh) is None
    assert not ended, "the last one had no call left that could fail"


@pytest.mark.parametrize("kind", [StagedSink, StagedLedger])
def test_a_server_that_loses_what_was_committed_is_caught(kind: Any) -> None:
    target, _ = crashing(kind, lambda place: place.shown.clear())
    with pytest.raises(AssertionError, match="after the restart"):
        check_kill(target, KillPoint.COMMITTED, 2, 1, 1, 4)
    with pytest.raises(AssertionError):
        check_interruptions(lambda: crashing(kind, lambda place: place.shown.clear())[0])


def test_a_sink_that_keeps_the_end_of_the_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWriter, "finish", lambda self: None)
    sink = FileSink("memory://kit-that-keeps-the-end", roll_interval="1h")
    target = Target(sink, lambda: shown_in(memory_storage("kit-that-keeps-the-end")))
    with pytest.raises(AssertionError, match="held back after all input has ended"):
        check_end_of_input(target)


@pytest.mark.long
@pytest.mark.usefixtures("some_interruptions")
def test_the_file_sink_survives_a_failure_of_any_operation_on_its_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    storages: dict[str, FaultyStorage] = {}
    monkeypatch.setitem(OPENERS, "faulty", storages.__getitem__)
    names = itertools.count()

    def fresh() -> Target:
        name = f"kit-{next(names)}"
        storage = FaultyStorage(memory_storage(name))
        storages[name] = storage
        readable = memory_storage(name)  # the reader's calls do not fail

        @contextmanager
        def failing(number: int, is_after: bool) -> Iterator[HasFailed]:
            fault = Fault(FaultKind.TIMEOUT_AFTER_EFFECT if is_after else FaultKind.TIMEOUT, first=number)
            storage.inject(fault)
            yield lambda: fault.seen >= number
            storage.heal()

        def leftovers() -> list[str]:
            return readable.list("_staging") + readable.list("_publishing")

        return Target(
            FileSink(f"faulty://{name}", roll_interval=0), lambda: shown_in(readable), leftovers, failing=failing
        )

    check_interruptions(fresh)
