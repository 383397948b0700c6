"""The kit starts a pipeline over: a sink that keeps output, or removes that of others, is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.conftest import few
from tests.testing.staged import ForgettingSink, StagedLedger, StagedSink, at

import headgate as hg
from headgate.connectors.ledger_sink import LedgerOutput
from headgate.testing import check_sink
from headgate.testing.sinks.scenarios import check_remove_output


class RemovingLedger(StagedLedger):
    """Done right: every record and every name says whose it is."""

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        before = len(self.place.shown)
        super().publish(outputs, fence)
        for row in self.place.shown[before:]:
            row["owner"] = fence.owner

    def remove_output(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.shown[:] = [row for row in self.place.shown if row["owner"] != fence.owner]
        self.place.ledger -= {name for name in self.place.ledger if name.startswith(f"{fence.owner}-")}


class RemovingSink(ForgettingSink):
    """Done right, with two phases."""

    def show(self, name: str) -> None:
        before = len(self.place.shown)
        super().show(name)
        for row in self.place.shown[before:]:
            row["owner"] = name.partition("-")[0]

    def remove_output(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.shown[:] = [row for row in self.place.shown if row["owner"] != fence.owner]
        self.place.ledger -= {name for name in self.place.ledger if name.startswith(f"{fence.owner}-")}


class KeepsAll(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)


class KeepsTheNames(RemovingSink):
    """Its ledger would grow with every start."""

    def remove_output(self, fence: hg.Fence) -> None:
        names = set(self.place.ledger)
        super().remove_output(fence)
        self.place.ledger |= names


class RemovesAll(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.shown.clear()


class RemovesWhatBeginsAlike(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.shown[:] = [row for row in self.place.shown if not row["owner"].startswith(fence.owner)]


class RemovesNamesOfOthers(RemovingLedger):
    """What others promise is committed twice then."""

    def remove_output(self, fence: hg.Fence) -> None:
        super().remove_output(fence)
        self.place.ledger.clear()


class RemovesOwners(RemovingLedger):
    """Another pipeline of a neighbour's name would be let in."""

    def remove_output(self, fence: hg.Fence) -> None:
        super().remove_output(fence)
        self.place.owners = {fence.owner: fence}


class IsNotFenced(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        super().remove_output(self.place.owners[fence.owner])


class RemovesBeforeItLooks(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        super().remove_output(self.place.owners[fence.owner])
        self.place.refuse_if_replaced(fence)


class Raises(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        raise KeyError("no such table")


class Refuses(RemovingLedger):
    def remove_output(self, fence: hg.Fence) -> None:
        raise hg.UsageError("this target cannot be emptied")


class RemovesOnce(RemovingLedger):
    """Nothing is there any more when the call is repeated."""

    def remove_output(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        if all(row["owner"] != fence.owner for row in self.place.shown):
            raise KeyError("no table to drop")
        super().remove_output(fence)


class RemembersCheckpoints(RemovingLedger):
    """The first checkpoint of the new life has a number that it has seen."""

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        done = {name.rpartition("-")[0] for name in self.place.ledger}
        super().publish([output for output in outputs if output.name.rpartition("-")[0] not in done], fence)

    def remove_output(self, fence: hg.Fence) -> None:
        names = set(self.place.ledger)
        super().remove_output(fence)
        self.place.ledger |= names


@pytest.mark.parametrize("kind", [RemovingLedger, RemovingSink])
def test_a_sink_that_removes_all_of_its_own_and_nothing_else_passes(kind: Any) -> None:
    assert check_remove_output(lambda: at(kind)) is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (KeepsAll, "did not remove all it wrote: still visible: \\[0, 1"),
        (KeepsTheNames, "still lists as committed"),
        (RemovesAll, "kit/sink2 shares the target: after the removal: lost"),
        (RemovesWhatBeginsAlike, "kit/sink2 shares the target: after the removal: lost"),
        (RemovesNamesOfOthers, "kit/sink2 .* visible twice"),
        (RemovesOwners, "others' targets belong to"),
        (IsNotFenced, "a stale generation removed output without a FencedError"),
        (RemovesBeforeItLooks, "after a stale generation wanted to remove it: lost"),
        (Raises, "no such table"),
        (Refuses, "cannot be emptied"),
        (RemovesOnce, "no table to drop"),
        (RemembersCheckpoints, "after its first commit: lost"),
    ],
)
def test_a_sink_that_does_not_start_over_is_caught(kind: Any, message: str) -> None:
    with pytest.raises((AssertionError, hg.HeadgateError, KeyError), match=message):
        check_remove_output(lambda: at(kind))


@pytest.mark.parametrize("kind", few([KeepsAll, Refuses], 1))
def test_the_kit_fails_with_a_sink_that_does_not_start_over(kind: Any) -> None:
    with pytest.raises(AssertionError, match="remove"):
        check_sink(lambda: at(kind), rescales=[(1, 1)], overlaps=[1], rows=[2])


def test_that_a_sink_cannot_start_over_is_said() -> None:
    why = "the sink has no method remove_output, so a pipeline with it cannot start over"
    assert check_remove_output(lambda: at(StagedSink)) == why
