"""All processes die at one point of the protocol; then a restart, at another parallelism, and a healthy checkpoint."""

from __future__ import annotations

from enum import Enum

from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.testing.sinks.target import Target
from headgate.testing.sinks.world import SinkLife, World


class KillPoint(Enum):
    """Where all processes die."""

    WRITING = "during write"
    PREPARED_SOME = "after some subtasks prepared"
    PREPARED_ALL = "after all prepared, before the checkpoint completed"
    COMPLETED = "after the checkpoint completed, before its commit"
    COMMITTED_SOME = "between two commits"
    COMMITTED = "after the commit, before anybody knows"
    RECOVERED = "during restore, before the commits are repeated"
    RECOMMITTED = "during restore, after the commits were repeated"


def check_kill(
    target: Target, point: KillPoint, before: int, after: int, overlap: int, rows: int, story: str = ""
) -> None:
    """One kill, then a restart, a healthy checkpoint and another restart."""
    world = World(target, rows, story or point.value)
    life = world.start(before)
    world.advance(life)
    for _ in range(overlap - 1):
        world.prepare(life)
    _die(world, life, point, after)
    life = world.start(after)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(before)


def check_first_epoch(target: Target, point: KillPoint) -> None:
    """B14: killed before the first checkpoint completed, then started with fewer subtasks: nobody is in the way."""
    world = World(target, 7, f"killed in its first epoch, {point.value}")
    _die(world, world.start(5), point, 1)
    life = world.start(1)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(1)


def _die(world: World, life: SinkLife, point: KillPoint, after: int) -> None:
    """Go to ``point``; what is alive there is abandoned."""
    if point is KillPoint.WRITING:
        life.write(world.rows)
        return
    subtasks = len(life.writers) // 2 if point is KillPoint.PREPARED_SOME else None
    done = world.prepare(life, subtasks)
    if point in (KillPoint.PREPARED_SOME, KillPoint.PREPARED_ALL):
        return
    world.complete(done)
    if point is KillPoint.COMMITTED_SOME:
        half = done.committables[: len(done.committables) // 2]
        life.committer.commit(CommitPermit(done.checkpoint, life.generation), half)
    if point is KillPoint.COMMITTED:
        life.commit(done)
    if point in (KillPoint.RECOVERED, KillPoint.RECOMMITTED):
        second = world.next_life(after)
        second.recover()
        if point is KillPoint.RECOMMITTED:
            second.recommit()
