"""What a start begins with that names a savepoint or a checkpoint (docs/spec/savepoints.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.protocol.making import cp, gen, inline_part, sub

from headgate.errors import GoBackPast
from headgate.model.manifest import Claim, Left, Manifest, RestoredFrom, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog, Refuse
from headgate.protocol.checkpoints.restore_selection import (
    Adopt,
    Decision,
    GoOn,
    KeptAside,
    Named,
    decide_named,
    left_by_user,
    rolled_back_by,
)

HERE = RestoredFrom("0a1b", cp(7), "/savepoints/here")
THERE = RestoredFrom("2c3d", cp(9), "/savepoints/there")
MINE = "my life"
EMPTY = ObservedLog((), cp(0))


def named(origin: RestoredFrom | None = HERE, past: int | None = None, **options: Any) -> Named:
    url = HERE.url if origin is None else origin.url
    return Named(url, origin, go_back_past=None if past is None else cp(past), **options)


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


def test_a_pipeline_without_checkpoints_restores_what_is_named() -> None:
    assert decide_named(EMPTY, "", named()) == Adopt()
    assert decide_named(log(), MINE, named()) == Adopt(), (
        "a start that died before it completed anything has done nothing"
    )


def test_a_second_start_goes_on() -> None:  # SV24
    assert decide_named(log(8, 9, origin=HERE), MINE, named()) == GoOn(cp(9))


def test_a_second_start_goes_on_when_what_it_names_is_gone() -> None:  # SV24
    assert decide_named(log(8, origin=HERE), MINE, named(None)) == GoOn(cp(8))
    assert "neither a savepoint nor a completed checkpoint" in refused(
        decide_named(log(8, origin=THERE), MINE, named(None))
    )
    assert "neither" in refused(decide_named(EMPTY, MINE, named(None)))


def test_another_savepoint_at_the_same_place_is_another_one() -> None:  # SV24: by identity, not by place
    other = replace(HERE, source="ffff")
    assert "newest checkpoint is 8" in refused(decide_named(log(8, origin=HERE), MINE, named(other)))


def test_going_back_is_refused_unless_the_newest_checkpoint_is_named() -> None:  # SV25
    for observed in (log(8, 9), log(8, 9, origin=THERE)):
        assert "give go_back_past=9" in refused(decide_named(observed, MINE, named()))
        refusal = decide_named(observed, MINE, named(past=8))
        assert isinstance(refusal, Refuse)
        assert refusal.remedy == GoBackPast(9)
        assert decide_named(observed, MINE, named(past=9)) == Adopt(cp(9))


def test_going_back_happens_once() -> None:  # SV25: whoever repeats the command goes on
    again = named(past=9)
    assert decide_named(log(8, 9), MINE, again) == Adopt(cp(9))
    assert decide_named(log(9, 10, origin=HERE), MINE, again) == GoOn(cp(10))
    assert decide_named(log(9, 10, origin=HERE), MINE, named(past=10)) == Adopt(cp(10)), (
        "and once more, by its new name"
    )


def test_at_most_once_never_goes_back() -> None:  # SV25, GM35
    assert "at_most_once" in refused(decide_named(log(9), MINE, named(past=9, may_go_back=False)))
    assert decide_named(EMPTY, MINE, named(may_go_back=False)) == Adopt()


def test_where_a_pipeline_stopped_it_is_restored() -> None:  # SV25: nothing was committed since
    taken = RestoredFrom("0a1b", cp(9), "/savepoints/mine", MINE)
    stopped = log(8, 9)
    assert decide_named(stopped, MINE, named(taken)) == Adopt()
    assert decide_named(stopped, MINE, named(taken, may_go_back=False)) == Adopt(), "at most once, too"
    edited = replace(taken, source="0b2c")
    assert decide_named(stopped, MINE, named(edited)) == Adopt(), "it is of the same checkpoint"
    assert "newest checkpoint is 9" in refused(decide_named(stopped, "another", named(taken)))
    assert "newest checkpoint is 9" in refused(decide_named(stopped, MINE, named(replace(taken, life=""))))


def test_the_command_that_restored_where_a_pipeline_stopped_goes_on_later() -> None:  # SV24
    taken = RestoredFrom("0a1b", cp(9), "/savepoints/mine", MINE)
    restored = replace(taken, adopted=cp(10))
    assert decide_named(log(9, 10, origin=restored), MINE, named(taken)) == GoOn(cp(10)), "it died at once"
    assert decide_named(log(9, 10, 11, origin=restored), MINE, named(taken)) == GoOn(cp(11))


def test_what_was_restored_and_completed_nothing_is_left_for_the_same_checkpoint() -> None:  # SV25
    """A start fails, so the user edits the savepoint and restores that."""
    restored = RestoredFrom("0a1b", cp(9), "/savepoints/mine", MINE, cp(10))
    edited = RestoredFrom("0b2c", cp(9), "/savepoints/edited", MINE)
    assert decide_named(log(9, 10, origin=restored), MINE, named(edited)) == Adopt()
    assert "checkpoints 10 to 11 committed" in refused(
        decide_named(log(9, 10, 11, origin=restored), MINE, named(edited))
    )
    elsewhere = replace(restored, life="another life")
    assert decide_named(log(10, origin=elsewhere), MINE, named(replace(edited, life="another life"))) == Adopt()
    assert isinstance(decide_named(log(10, origin=elsewhere), MINE, named(edited)), Refuse)


def test_one_id_in_two_copies_of_a_log_is_not_one_checkpoint() -> None:  # SV25
    taken = RestoredFrom("0a1b", cp(9), "/savepoints/mine", MINE)
    assert isinstance(decide_named(log(8, 9), MINE, named(taken, trigger_wall_ms=17)), Refuse)


def test_a_savepoint_with_positions_of_its_own_goes_back() -> None:  # SV9, SV25
    """Taken at most once while the pipeline went on: what it held was processed since."""
    taken = RestoredFrom("0a1b", cp(9), "/savepoints/mine", MINE)
    assert "at_most_once" in refused(
        decide_named(log(9), MINE, named(taken, past=9, is_same_cut=False, may_go_back=False))
    )
    assert "processed a second time" in refused(decide_named(log(9), MINE, named(taken, is_same_cut=False)))
    assert decide_named(log(9), MINE, named(taken, past=9, is_same_cut=False)) == Adopt(cp(9), cp(9))


def test_a_refusal_and_a_start_that_goes_back_say_whose_output_comes_again() -> None:  # SV25, K18
    taken = RestoredFrom("0a1b", cp(7), "/savepoints/mine", MINE)
    assert "what checkpoints 8 to 9 committed would be produced again" in refused(
        decide_named(log(8, 9), MINE, named(taken))
    )
    assert "what checkpoint 8 committed would" in refused(decide_named(log(7, 8), MINE, named(taken)))
    assert decide_named(log(8, 9), MINE, named(taken, past=9)) == Adopt(cp(9), after=cp(7))
    foreign = replace(HERE, adopted=cp(8))
    assert decide_named(log(8, 9, 10, origin=foreign), MINE, named(past=10)) == Adopt(cp(10), after=cp(8))
    for unknown in (THERE, replace(taken, checkpoint=cp(12))):
        assert "not known to descend" in refused(decide_named(log(8, 9), MINE, named(unknown)))
        assert decide_named(log(8, 9), MINE, named(unknown, past=9)) == Adopt(cp(9))


def test_the_newest_of_ones_own_checkpoints_needs_no_name() -> None:
    own = RestoredFrom(MINE, cp(9), "/checkpoints/p", MINE)
    assert decide_named(log(8, 9), MINE, named(own, is_newest=True)) == GoOn(cp(9))
    assert decide_named(log(8, 9, 10), MINE, named(own, is_newest=True)) == GoOn(cp(10))


def test_the_newest_of_ones_own_is_restored_by_its_id_and_then_gone_on_from() -> None:  # SV24
    own = RestoredFrom(MINE, cp(9), "/checkpoints/p/chk-9", MINE)
    assert decide_named(log(8, 9), MINE, named(own)) == Adopt()
    assert decide_named(log(9, 10, 11, origin=replace(own, adopted=cp(10))), MINE, named(own)) == GoOn(cp(11))


def test_an_older_one_of_ones_own_is_gone_back_to_once() -> None:  # SV25
    own = RestoredFrom(MINE, cp(8), "/checkpoints/p/chk-8", MINE)
    assert isinstance(decide_named(log(8, 9), MINE, named(own)), Refuse)
    assert decide_named(log(8, 9), MINE, named(own, past=9)) == Adopt(cp(9), after=cp(8))
    assert decide_named(log(9, 10, origin=own), MINE, named(own, past=9)) == GoOn(cp(10))


def test_the_newest_checkpoint_of_another_pipeline_is_restored_once() -> None:  # SV24: it goes on meanwhile
    first = replace(THERE, checkpoint=cp(9))
    later = replace(THERE, checkpoint=cp(12))
    assert decide_named(log(10, origin=first), MINE, named(later, is_newest=True)) == GoOn(cp(10))
    assert isinstance(decide_named(log(10, origin=first), MINE, named(later)), Refuse)


@pytest.mark.parametrize("past", [None, 8])
def test_a_damaged_log_is_not_left_for_anything(
    past: int | None,
) -> None:  # SV25: nobody knows what that would repeat
    found = log(8)
    torn = ObservedEntry(3, "log/0000000003", Damage("log/0000000003", "torn"))
    damaged = ObservedLog((*found.entries, torn), cp(0))
    assert "its own log cannot be read" in refused(decide_named(damaged, MINE, named(past=past)))
    assert "its own log cannot be read" in refused(decide_named(ObservedLog((), cp(0), hint_sequence=4), MINE, named()))


def test_damage_after_a_restored_checkpoint_is_for_recovery_to_judge() -> None:  # R14
    found = log(8, origin=HERE)
    torn = ObservedEntry(3, "log/0000000003", Damage("log/0000000003", "torn"))
    assert decide_named(ObservedLog((*found.entries, torn), cp(0)), MINE, named()) == GoOn(cp(8))


def test_a_checkpoint_that_its_user_left_is_not_restored_unasked() -> None:  # SV26
    entries = (SubtaskEntry(sub("a"), inline_part()),)
    older = Manifest(cp(3), gen(1), 2, 128, entries)
    assert left_by_user(older, replace(older, checkpoint=cp(5))) == []
    gone_back = replace(older, checkpoint=cp(5), left=(Left(cp(2), cp(5)),))
    assert left_by_user(older, gone_back) == [Damage("checkpoint 3", "the pipeline left it")]


@pytest.mark.parametrize(("checkpoint", "is_told"), [(2, False), (3, True), (4, True), (5, False)])
def test_what_a_start_went_back_past_says_so(checkpoint: int, is_told: bool) -> None:  # R51
    found = Manifest(cp(checkpoint), gen(1), 2, 128, (SubtaskEntry(sub("a"), inline_part()),))
    asides = [KeptAside(cp(2), cp(5), "torn"), KeptAside(cp(2), cp(5), "torn again")]
    told = [Damage(f"checkpoint {checkpoint}", "a former start went back past it: torn")]
    assert rolled_back_by(found, asides) == (told if is_told else [])
