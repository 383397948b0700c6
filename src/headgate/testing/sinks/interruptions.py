"""Every call at the target fails once, before its effect or behind it; who repeats it, or comes after, makes it good.

So recovery is cut short between any two aborts, a commit between any two steps, a publication between any two pieces.
Sinks of the two classes that users derive from are failed at the methods that the user wrote; others say how they fail
(``Target.failing``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from headgate.errors import StorageError
from headgate.testing.sinks.failing import failing_target
from headgate.testing.sinks.target import Target, not_said
from headgate.testing.sinks.world import World, again

CALLS_MAX = 1_000
"""A scenario that has not come to its end after so many calls at the target never will."""


def check_interruptions(fresh: Callable[[], Target]) -> str | None:
    """Fail each call in turn; return why not, at a target that does not say how it fails (KT3)."""
    for is_killed, is_after in itertools.product((False, True), repeat=2):
        for number in range(1, CALLS_MAX):
            target = failing_target(fresh())
            if target.failing is None:
                return not_said("failing")
            if not check_interruption(target, number, is_after=is_after, is_killed=is_killed):
                break
        else:
            raise AssertionError(f"the scenario had not ended after {CALLS_MAX} calls at the target")
    return None


def check_interruption(target: Target, number: int, *, is_after: bool, is_killed: bool) -> bool:
    """Prepare, commit and recover with one failure on the way; return whether it came to that.

    ``is_killed``: recovery is begun by another generation, not repeated by the one whose call failed.
    """
    assert target.failing is not None
    when = "after" if is_after else "before"
    story = f"call {number} at the target failed {when} its effect" + (", and the driver died" if is_killed else "")
    world = World(target, 8, story)
    life = world.start(2)
    life.finish()
    world.advance(life)
    with target.failing(number, is_after) as has_failed:
        done = world.prepare(life)
        world.complete(done)
        life.commit(done)
        world.check_visible(done.shown, "after the commit")
        again(lambda: life.forget([done]))
        world.complete(world.prepare(life))
        world.prepare(life)  # leftovers
        _recover(world, is_killed)
        is_reached = has_failed()
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(world.start(2))
    world.check_end(1)
    return is_reached


def _recover(world: World, is_killed: bool) -> None:
    """Begin a generation; when that fails, go on with it, or begin another one."""
    life = world.next_life(3)
    try:
        life.recover()
        life.recommit()
    except StorageError as error:
        if not error.is_transient:
            raise
        if is_killed:
            world.start(3)
        else:
            life.recover()
            life.recommit()
