"""Random histories of whole loops: cuts, failures, the end and the rounds (docs/spec/loops.md)."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.subtasks.loop_parts import Record
from tests.protocol.subtasks.loop_shapes import SHAPES, plan_of
from tests.protocol.subtasks.loop_world import World

from headgate.model.ids import SubtaskId
from headgate.model.plan import Plan

STEPS_MAX = 60_000
"""Far above what the longest history takes: who is not done by then never will be."""
CHECKPOINTS_UNTIL_STEP = 3_000


def records_of(plan: Plan, random: Random, count: int) -> dict[SubtaskId, list[Record]]:
    """Return what every source subtask reads."""
    sources = [s for s in plan.subtasks() if plan.vertex(s.vertex).is_source]
    return {s: [Record(f"{s}.{i}", random.randrange(5)) for i in range(random.randrange(count + 1))] for s in sources}


def run(world: World, *, steps: int = STEPS_MAX, has_checkpoints: bool = True) -> World:
    for at in range(steps):
        if world.is_finished or not world.step(may_checkpoint=has_checkpoints and at < CHECKPOINTS_UNTIL_STEP):
            break
    return world


def assert_everything_happened_once(world: World) -> None:
    states = [subtask.state for subtask in world.subtasks.values()]
    born = Counter(name for state in states for name in state.born)
    died = Counter(record.name for state in states for record in state.died)
    assert set(born.values()) <= {1}
    assert born == died
    made = {record.name: record.made for state in states for record in state.died if record.made}
    assert Counter(name for state in states for name in state.trips) == made


def assert_rounds_were_closed_in_order_and_once(world: World) -> None:
    for name, subtask in world.subtasks.items():
        if subtask.is_in_nest:
            assert subtask.state.closed == list(range(world.finished_rounds[-1] + 1)), name


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    parallelism=st.integers(1, 3),
    has_rounds=st.booleans(),
    kills=st.lists(st.integers(1, 600), max_size=3),
)
def test_any_history_with_checkpoints_and_failures_processes_every_record_once(  # L1–L6, L10, L11, L29, L33–L37
    shape: str, seed: int, parallelism: int, has_rounds: bool, kills: list[int]
) -> None:  # L34
    plan, random = plan_of(shape, parallelism), Random(seed)
    records = records_of(plan, random, 4)
    world = World(plan, records, random, has_rounds=has_rounds)
    for steps in kills:
        run(world, steps=steps)
        restored = world.completed[max(world.completed)] if world.completed else world.restored
        world = World(plan, records, random, has_rounds=has_rounds, restored=restored)
    run(world)
    assert world.is_finished
    assert world.has_ended
    assert_everything_happened_once(world)
    assert not any(subtask.live.open_logs for subtask in world.subtasks.values()) or world.pending
    if has_rounds:
        assert_rounds_were_closed_in_order_and_once(world)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_final_checkpoint_has_empty_logs(shape: str) -> None:  # L28, L29
    plan = plan_of(shape, 2)
    random = Random(7)
    world = run(World(plan, records_of(plan, random, 3), random, has_rounds=False), has_checkpoints=False)
    assert world.is_finished
    while world.step(may_checkpoint=False):
        pass
    final = world.trigger()
    while world.step(may_checkpoint=False):
        pass
    if final not in world.completed:  # a write that failed
        final = world.trigger()
        while world.step(may_checkpoint=False):
            pass
    assert all(state.is_finished and not state.log for state in world.completed[final].values())


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), parallelism=st.integers(1, 3))
def test_a_loop_ends_after_few_probes_when_it_is_empty(shape: str, seed: int, parallelism: int) -> None:  # L34, L37
    plan, random = plan_of(shape, parallelism), Random(seed)
    world = run(World(plan, records_of(plan, random, 4), random, has_rounds=False), has_checkpoints=False)
    assert world.has_ended
    assert world.started_after_empty <= 5  # the first; it is empty; last watermark; it is empty again; last watermark


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), parallelism=st.integers(1, 3))
def test_rounds_are_finished_one_after_another_up_to_the_last(shape: str, seed: int, parallelism: int) -> None:
    plan, random = plan_of(shape, parallelism), Random(seed)  # L35
    world = run(World(plan, records_of(plan, random, 4), random, has_rounds=True), has_checkpoints=False)
    assert world.finished_rounds == list(range(len(world.finished_rounds)))
    assert_rounds_were_closed_in_order_and_once(world)
