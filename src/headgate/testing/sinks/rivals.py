"""Others at the same target: an older generation that goes on, other sinks and pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from headgate.errors import FencedError
from headgate.model.ids import CheckpointId
from headgate.testing.sinks.target import NODE, PIPELINE, Target
from headgate.testing.sinks.world import NUMBERS_MAX, Checkpoint, Name, World

NEIGHBOURS = (Name(PIPELINE, f"{NODE}2", NUMBERS_MAX), Name(f"{PIPELINE}2", NODE, 2 * NUMBERS_MAX))
"""Their names begin as ours do."""


def check_stale_generation(target: Target) -> None:
    """B18, B19: two generations at once: the older one changes nothing, and is told so when it commits or recovers."""
    world = World(target, 6, "a stale generation goes on")
    old = world.start(2)
    world.advance(old)
    old.write(6)
    new = world.start(2)
    try:
        stale = old.prepare(CheckpointId(1_000))
    except FencedError:
        stale = Checkpoint(CheckpointId(1_000), old.position, ())
    world.check_visible(world.completed.shown, "after the stale prepare")
    if stale.committables:
        expect_fenced(lambda: old.commit(stale), "committed")
        world.check_visible(world.completed.shown, "after the stale commit")
    expect_fenced(old.recover, "recovered")
    world.check_visible(world.completed.shown, "after the stale recovery")
    world.advance(new)
    world.check_end(2)


def check_commit_in_flight(target: Target, *, is_late: bool) -> None:
    """B5: the commit of a driver that died is under way, and arrives while its heir recovers, or behind that."""
    world = World(target, 6, "the commit of a dead driver arrives " + ("late" if is_late else "in the recovery"))
    old = world.start(2)
    old.finish()
    done = world.prepare(old)
    world.complete(done)
    heir = world.next_life(2)
    heir.recover()
    if is_late:
        heir.recommit()
    with contextlib.suppress(FencedError):  # it may be told that it is late
        old.commit(done)
    heir.recommit()
    world.check_visible(done.shown, "after both")
    world.advance(heir)
    world.check_end(2)


def expect_fenced(attempt: Callable[[], None], what: str) -> None:
    """``attempt`` is told that it was replaced; ``what`` says who did it, and what."""
    try:
        attempt()
    except FencedError:
        return
    raise AssertionError(f"a stale generation {what} without a FencedError")


def check_neighbours(target: Target) -> None:
    """B3: another sink and another pipeline, whose names begin as ours do, prepare at the same target."""
    others = [World(target, 4, f"{name.pipeline}/{name.node} shares the target", name=name) for name in NEIGHBOURS]
    for world in others:
        life = world.start(2)
        life.finish()
        world.complete(world.prepare(life))  # promised, not committed
        world.prepare(life)  # and this one is given up
    ours = World(target, 4, "others share the target")
    ours.advance(ours.start(2))
    ours.advance(ours.start(1))
    ours.check_visible(ours.completed.shown, "beside others")
    for world in others:
        world.start(1)
        world.check_visible(world.completed.shown, "after the others went on")
    ours.check_end(2)
