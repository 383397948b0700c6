"""What a start begins with that names a savepoint or a checkpoint (docs/spec/savepoints.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.protocol.making import cp, gen, inline_part, sub

from headgate.model.manifest import Claim, Manifest, SubtaskEntry
from headgate.model.places import RestoredFrom
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog, Refuse
from headgate.protocol.checkpoints.restoring_by_name import Adopt, Decision, GoOn, Named, decide
from headgate.remedies import GoBackBehind

HERE = RestoredFrom("0a1b", cp(7), "/savepoints/here")
THERE = RestoredFrom("2c3d", cp(9), "/savepoints/there")
MINE = "my life"
EMPTY = ObservedLog((), cp(0))


def named(origin: RestoredFrom | None = HERE, behind: int | None = None, **options: bool) -> Named:
    url = HERE.url if origin is None else origin.url
    return Named(url, origin, go_back_behind=None if behind is None else cp(behind), **options)


def log(*checkpoints: int, origin: RestoredFrom | None = None) -> ObservedLog:
    """A log of completed checkpoints of one generation."""
    claim = ObservedEntry(1, "log/0000000001", Claim(gen(1), "host:1", 0))
    parts = (SubtaskEntry(sub("a"), inline_part()),)
    manifests = [Manifest(cp(c), gen(1), 2, 128, parts, origin=origin) for c in checkpoints]
    completed = [ObservedEntry(i, f"log/{i:010d}", manifest) for i, manifest in enumerate(manifests, 2)]
    return ObservedLog((claim, *completed), cp(0))


def refused(decision: Decision) -> str:
    assert isinstance(decision, Refuse)
    return decision.reason


def test_a_pipeline_without_checkpoints_restores_what_is_named() -> None:  # SV21
    assert decide(EMPTY, "", named()) == Adopt()
    assert decide(log(), MINE, named()) == Adopt(), "a start that died before it completed anything has done nothing"


def test_a_second_start_goes_on() -> None:  # SV24
    assert decide(log(8, 9, origin=HERE), MINE, named()) == GoOn(cp(9))


def test_a_second_start_goes_on_when_what_it_names_is_gone() -> None:  # SV24
    assert decide(log(8, origin=HERE), MINE, named(None)) == GoOn(cp(8))
    assert "neither a savepoint nor a completed checkpoint" in refused(decide(log(8, origin=THERE), MINE, named(None)))
    assert "neither" in refused(decide(EMPTY, MINE, named(None)))


def test_another_savepoint_at_the_same_place_is_another_one() -> None:  # SV24: by identity, not by place
    other = replace(HERE, source="ffff")
    assert "newest checkpoint is 8" in refused(decide(log(8, origin=HERE), MINE, named(other)))


def test_going_back_is_refused_unless_the_newest_checkpoint_is_named() -> None:  # SV25
    for observed in (log(8, 9), log(8, 9, origin=THERE)):
        assert "give go_back_behind=9" in refused(decide(observed, MINE, named()))
        refusal = decide(observed, MINE, named(behind=8))
        assert isinstance(refusal, Refuse)
        assert refusal.remedy == GoBackBehind(9)
        assert decide(observed, MINE, named(behind=9)) == Adopt(cp(9))


def test_going_back_happens_once() -> None:  # SV25: whoever repeats the command goes on
    again = named(behind=9)
    assert decide(log(8, 9), MINE, again) == Adopt(cp(9))
    assert decide(log(9, 10, origin=HERE), MINE, again) == GoOn(cp(10))
    assert decide(log(9, 10, origin=HERE), MINE, named(behind=10)) == Adopt(cp(10)), "and once more, by its new name"


def test_at_most_once_never_goes_back() -> None:  # SV25, GM35
    assert "at_most_once" in refused(decide(log(9), MINE, named(behind=9, may_go_back=False)))
    assert decide(EMPTY, MINE, named(may_go_back=False)) == Adopt()


def test_the_newest_of_ones_own_checkpoints_needs_no_name() -> None:
    own = RestoredFrom(MINE, cp(9), "/checkpoints/p")
    assert decide(log(8, 9), MINE, named(own)) == GoOn(cp(9))
    assert decide(log(8, 9, 10), MINE, named(own, is_newest=True)) == GoOn(cp(10))


def test_an_older_one_of_ones_own_is_gone_back_to_once() -> None:  # SV25
    own = RestoredFrom(MINE, cp(8), "/checkpoints/p/chk-8")
    assert isinstance(decide(log(8, 9), MINE, named(own)), Refuse)
    assert decide(log(8, 9), MINE, named(own, behind=9)) == Adopt(cp(9))
    assert decide(log(9, 10, origin=own), MINE, named(own, behind=9)) == GoOn(cp(10))


def test_the_newest_checkpoint_of_another_pipeline_is_restored_once() -> None:  # SV24: it goes on meanwhile
    first = replace(THERE, checkpoint=cp(9))
    later = replace(THERE, checkpoint=cp(12))
    assert decide(log(10, origin=first), MINE, named(later, is_newest=True)) == GoOn(cp(10))
    assert isinstance(decide(log(10, origin=first), MINE, named(later)), Refuse)


@pytest.mark.parametrize("behind", [None, 8])
def test_a_damaged_log_is_not_left_for_anything(
    behind: int | None,
) -> None:  # SV25: nobody knows what that would repeat
    found = log(8)
    torn = ObservedEntry(3, "log/0000000003", Damage("log/0000000003", "torn"))
    damaged = ObservedLog((*found.entries, torn), cp(0))
    assert "its own log cannot be read" in refused(decide(damaged, MINE, named(behind=behind)))
    assert "its own log cannot be read" in refused(decide(ObservedLog((), cp(0), hint_sequence=4), MINE, named()))


def test_damage_behind_a_restored_checkpoint_is_for_recovery_to_judge() -> None:  # R14
    found = log(8, origin=HERE)
    torn = ObservedEntry(3, "log/0000000003", Damage("log/0000000003", "torn"))
    assert decide(ObservedLog((*found.entries, torn), cp(0)), MINE, named()) == GoOn(cp(8))
