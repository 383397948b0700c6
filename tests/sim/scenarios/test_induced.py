"""Hooks and markers in the machine room: sound code passes, and what is wrong is seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import IS_DEEP

from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import HookState, Manifest
from headgate.sim.scenarios.induced import (
    HOOK,
    AtLeastOnceRun,
    AtMostOnceRun,
    InducedRun,
    Tape,
    TapeHook,
    TapesOvertakenRun,
    TapesSavedRun,
    draw_induced_mode,
)

SMOKE = (1, 5, 6) if IS_DEEP else (1, 6)
MENDED = {211: "a claim that stayed (R43)", 3017: "a marker that was never reached (EI36)"}


def test_seeds_with_hooks_and_markers_pass() -> None:
    faults = 0
    for seed in SMOKE:
        run = InducedRun(seed)
        assert (seed, run.run()) == (seed, None)
        assert len(run.history.completed) > 2
        faults += run.tapes.faults_count
    assert faults > 8, "markers and hooks met faults"


@pytest.mark.parametrize("seed", MENDED)
def test_seeds_that_found_something_pass(seed: int) -> None:
    assert InducedRun(seed).run() is None, MENDED[seed]


@pytest.fixture
def run() -> InducedRun:
    made = InducedRun(1)
    made.tapes.tapes = {"a": Tape([{}, {}, {}], [0, 1, -7, 2], 3)}  # type: ignore[dict-item]
    made.tapes.after_marker = {7: {"a": {3}}}
    made.tapes.returned = {7: b"data"}
    made.tapes.cuts = {7: {"a": 3}}
    return made


def manifest(**changes: Any) -> Manifest:
    hooks = (HookState(HOOK, b"data"),)
    return replace(Manifest(CheckpointId(7), Generation(2), 1, 8, (), hooks=hooks), **changes)


def test_a_checkpoint_behind_its_marker_passes(run: InducedRun) -> None:
    run.tapes.on_manifest(manifest())
    assert run.history.finding is None
    run.tapes.cuts = {7: {"a": 4}}
    run.tapes.on_manifest(manifest())
    assert run.history.finding is None, "at the end of the tape"


@pytest.mark.parametrize(
    ("cuts", "changes", "said"),
    [
        ({7: {"a": 2}}, {}, "cut at 2 of a, which is not behind its marker"),
        ({}, {}, "cut at None of a"),
        ({7: {"a": 3}}, {"hooks": ()}, "holds {} of hooks"),
        ({7: {"a": 3}}, {"hooks": (HookState(HOOK, b"other"),)}, "b'other'"),
    ],
)
def test_a_checkpoint_that_is_cut_elsewhere_or_lacks_its_hook_is_told(
    run: InducedRun, cuts: Any, changes: Any, said: str
) -> None:
    run.tapes.cuts = cuts
    run.tapes.on_manifest(manifest(**changes))
    assert said in str(run.history.finding)


def test_a_hook_that_is_called_out_of_order_is_told(run: InducedRun) -> None:
    run.tapes.act = lambda effect: None  # type: ignore[method-assign]
    TapeHook(run.tapes).trigger(8)
    assert "triggered for 8 behind 0, ready: False" in str(run.history.finding)


INDUCED_MODES_SMOKE = (0, 1, 16, 18)


def test_hooks_and_markers_go_with_everything_else() -> None:
    kinds: Counter[type] = Counter()
    lost = moves = faults = 0
    for seed in INDUCED_MODES_SMOKE:
        run = draw_induced_mode(seed)
        assert (seed, run.run()) == (seed, None)
        assert len(run.history.completed) > 2
        kinds[type(run)] += 1
        faults += run.tapes.faults_count
        lost += run.judge.lost if isinstance(run, AtMostOnceRun) else 0
        moves += run.moves_count if isinstance(run, TapesSavedRun) else 0
    assert kinds == {AtLeastOnceRun: 1, AtMostOnceRun: 1, TapesOvertakenRun: 1, TapesSavedRun: 1}
    assert lost > 0, "at most once something was under way when something failed"
    assert moves > 0, "a pipeline went on from a savepoint"
    assert faults > 8, "markers and hooks met faults"


def test_a_source_has_the_credit_to_read_to_its_marker() -> None:  # UA20
    """A seed in which none of its checkpoints was ever completed."""
    assert draw_induced_mode(36).run() is None
