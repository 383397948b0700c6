"""Hooks and markers beside other guarantees, barriers that overtake, and savepoints, in the machine room."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

import pytest
from tests.mutants.harness import Mutant, patched
from tests.mutants.test_guarantee_mutants import (
    positions_are_in_front_of_what_is_held,
    what_is_read_is_processed_at_once,
)
from tests.mutants.test_overtaking_mutants import what_waits_is_not_recorded
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants_of_induced import the_first_marker_cuts_all_splits

from headgate.model.manifest import Manifest
from headgate.model.options import Guarantee
from headgate.sim.kinds.mixed import ModeRun, TapesOvertakenRun, TapesSavedRun, drawn, run_seed

SMOKE = (0, 1, 16, 18)


def test_hooks_and_markers_go_with_everything_else() -> None:  # SM42
    kinds: Counter[type] = Counter()
    lost = moves = faults = 0
    for seed in SMOKE:
        run = drawn(seed)
        assert (seed, run.run()) == (seed, None)
        assert len(run.history.completed) > 2
        kinds[type(run)] += 1
        faults += run.tapes.faults_count
        lost += run.judge.lost if isinstance(run, ModeRun) and run.judge.mode is Guarantee.AT_MOST_ONCE else 0
        moves += run.moves_count if isinstance(run, TapesSavedRun) else 0
    assert kinds == {ModeRun: 2, TapesOvertakenRun: 1, TapesSavedRun: 1}
    assert lost > 0, "at most once something was under way when something failed"
    assert moves > 0, "a pipeline went on from a savepoint"
    assert faults > 8, "markers and hooks met faults"


def test_a_source_has_the_credit_to_read_to_its_marker() -> None:  # UA20, SM42
    """A seed in which none of its checkpoints was ever completed."""
    assert run_seed(36).violation is None


def a_hook_goes_back_to_an_id_of_which_it_never_heard() -> AbstractContextManager[None]:  # EI38
    return patched(Manifest, "hooks_as_called", lambda self: self.hooks)


MUTANTS: dict[Mutant, tuple[int, ...]] = {
    a_hook_goes_back_to_an_id_of_which_it_never_heard: (1,),
    the_first_marker_cuts_all_splits: (4,),
    what_is_read_is_processed_at_once: (0,),
    positions_are_in_front_of_what_is_held: (0,),
    what_waits_is_not_recorded: (6,),
}


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_such_a_mixture_is_found(mutant: Mutant, seeds: tuple[int, ...]) -> None:  # SM42
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, seeds, range(60))
