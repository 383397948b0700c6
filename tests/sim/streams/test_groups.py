"""Reader groups in the machine room: what holds and what seeds reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP

from headgate.protocol.store.reader_group import (
    Checkpoint,
    CheckpointAsked,
    Committed,
    Group,
    Joined,
    Member,
    Passed,
    Silent,
)
from headgate.protocol.store.reading_order import Progress
from headgate.sim.streams.groups import Cuts, GroupJudge, GroupRun
from headgate.store import location
from headgate.store.reader_groups import GroupEvents

SMOKE = range(20) if IS_DEEP else range(8)


@pytest.mark.deep
@pytest.mark.early
def test_reader_groups_pass_every_smoke_seed() -> None:
    """The seeds reach what they are for, too."""
    runs = [GroupRun(seed, is_traced=True) for seed in SMOKE]
    found = [(seed, str(violation)) for seed, run in zip(SMOKE, runs, strict=True) if (violation := run.run())]
    assert found == []
    assert "sim" not in location.OPENERS
    told = ["\n".join(run.world.story) for run in runs]
    assert sum(run.judge.in_vain_count for run in runs) > len(runs)
    assert sum(run.judge.resets_count for run in runs) > len(runs) // 4
    assert sum(len(run.judge.completed) for run in runs) > 2 * len(runs)
    assert any(run.truncated_count for run in runs)
    assert any(run.scaler.scaled_count > 5 for run in runs)
    assert any(len(run.streams) > 1 for run in runs)
    for words in (
        "injected after its effect",
        "the power is cut",
        "considered dead",
        "is in the group already",
        "joins",
    ):
        assert any(words in story for story in told), words


# -- the judge itself ------------------------------------------------------------------------------------------------

SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
PROGRESS = {"s": Progress({0: 0})}
EMPTY = Group({"s": 1}, PROGRESS)
ONE = replace(EMPTY, readers={"a": Member("a1", 10)})
TWO = replace(EMPTY, readers={"a": Member("a1", 10), "b": Member("b1", 10)})
OWED = replace(TWO, checkpoints=(Checkpoint("c", ("a", "b"), PROGRESS),))


class Story:
    """A judge that two readers have been made known to."""

    def __init__(self) -> None:
        self.cut: Cuts = {"s": {0: 0}}
        self.judge = GroupJudge(lambda _: self.cut)
        self.judge.on_made()
        self.judge.on_changed(Joined("a", "a1", 10), EMPTY, ONE, "A")
        self.judge.on_changed(Joined("b", "b1", 10), ONE, TWO, "B")

    def returned(self, who: str, position: int, *rows: tuple[int, int]) -> None:
        batch = pa.record_batch([[k for k, _ in rows], [n for _, n in rows]], schema=SCHEMA)
        self.judge.on_returned(who, GroupEvents("s", 0, position, batch))

    def commit(self, who: str, group: Group = TWO) -> None:
        self.judge.on_changed(Committed(who, f"{who}1", {}), group, group, who.upper())

    def asked(self) -> None:
        self.judge.on_changed(CheckpointAsked("c"), TWO, OWED, "user")

    def passed(self, who: str, *owed_by: str) -> None:
        after = replace(TWO, checkpoints=(Checkpoint("c", owed_by, PROGRESS),))
        self.judge.on_changed(Passed(who, f"{who}1", "c", {}), OWED, after, who.upper())


def good(story: Story) -> None:
    story.returned("A", 0, (1, 1), (2, 1))
    story.asked()
    story.commit("a", OWED)
    story.judge.on_told("A", "c")
    story.passed("a", "b")
    story.returned("A", 2, (1, 2))
    story.cut = {"s": {0: 2}}
    story.judge.on_told("B", "c")
    story.passed("b")
    story.commit("a")
    story.judge.on_changed(Silent("b", "b1", 0), TWO, ONE, "A")
    story.judge.on_changed(Silent("a", "a1", 0), ONE, EMPTY, "user")
    story.judge.check({"s": [3]})


def returned_again(story: Story) -> None:
    story.returned("A", 0, (1, 1))
    story.commit("a")
    story.returned("B", 0, (1, 1))


def returned_to_two(story: Story) -> None:
    story.returned("A", 0, (1, 1))
    story.returned("B", 0, (1, 1))


def out_of_order(story: Story) -> None:
    story.returned("A", 1, (1, 2))
    story.commit("a")
    story.returned("B", 0, (1, 1))
    story.commit("b")


def a_marker_that_is_not_owed(story: Story) -> None:
    story.judge.on_told("A", "c")


def complete_too_early(story: Story) -> None:
    story.asked()
    story.passed("a")


def never_complete(story: Story) -> None:
    story.asked()
    story.passed("a", "b")
    story.passed("b", "b")


def not_in_front_of_its_marker(story: Story) -> None:
    story.asked()
    story.passed("a", "b")
    story.returned("A", 0, (1, 1))
    story.cut = {"s": {0: 1}}
    story.passed("b")


def behind_its_marker(story: Story) -> None:
    story.returned("A", 0, (1, 1))
    story.asked()
    story.passed("a", "b")
    story.passed("b")


def lost(story: Story) -> None:
    story.judge.on_changed(Silent("b", "b1", 0), TWO, ONE, "A")
    story.judge.on_changed(Silent("a", "a1", 0), ONE, EMPTY, "user")
    story.judge.check({"s": [1]})


def a_reader_that_never_joined(story: Story) -> None:
    story.judge.on_changed(Silent("b", "b1", 0), ONE, TWO, "A")
    story.commit("c", replace(TWO, readers={"c": Member("c1", 10)}))


def a_reset_to_elsewhere(story: Story) -> None:
    story.asked()
    story.passed("a", "b")
    story.passed("b")
    story.cut = {"s": {0: 4}}
    story.judge.on_reset("c", TWO, replace(EMPTY, epoch=2))


@pytest.mark.parametrize(
    ("tell", "rule"),
    [
        (good, None),
        (returned_again, "RG2"),
        (returned_to_two, "RG1"),
        (out_of_order, "RG4"),
        (a_marker_that_is_not_owed, "RG8"),
        (complete_too_early, "RG8"),
        (never_complete, "RG8"),
        (not_in_front_of_its_marker, "RG9"),
        (behind_its_marker, "RG9"),
        (lost, "RG20"),
        (a_reader_that_never_joined, "RG12"),
        (a_reset_to_elsewhere, "RG15"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_judge_of_groups_rejects_what_must_not_be(tell: Callable[[Story], None], rule: str | None) -> None:
    story = Story()
    tell(story)
    assert (story.judge.finding and story.judge.finding.invariant) == rule
