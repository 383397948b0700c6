"""Scenarios for every sink: kills, lost answers, other parallelism, concurrent writers, closing."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from enum import Enum

import psutil

from headgate.connectors.fenced_sink import OutputName, owner_of
from headgate.connectors.two_phase_sink import TwoPhaseSink
from headgate.errors import FencedError
from headgate.model.ids import CheckpointId
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.testing.sinks.fake_pipeline import (
    NODE,
    NUMBERS_MAX,
    PIPELINE,
    Checkpoint,
    FakePipeline,
    Name,
    SinkGeneration,
    Target,
)

NEIGHBOURS = (Name(PIPELINE, f"{NODE}2", NUMBERS_MAX), Name(f"{PIPELINE}2", NODE, 2 * NUMBERS_MAX))
"""Their names begin as ours do."""


def check_stale_generation(target: Target) -> None:
    """B18, B19: two generations at once: the older one changes nothing; its commit and recovery are fenced."""
    world = FakePipeline(target, 6, "a stale generation goes on")
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
    """B5: the commit of a dead driver arrives while the next generation recovers, or after that."""
    world = FakePipeline(target, 6, "the commit of a dead driver arrives " + ("late" if is_late else "in the recovery"))
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
    """Check that ``attempt`` raises FencedError; ``what`` describes it."""
    try:
        attempt()
    except FencedError:
        return
    raise AssertionError(f"a stale generation {what} without a FencedError")


def check_neighbours(target: Target) -> None:
    """B3: another sink and another pipeline, with names that begin as ours, prepare at the same target."""
    others = [
        FakePipeline(target, 4, f"{name.pipeline}/{name.node} shares the target", name=name) for name in NEIGHBOURS
    ]
    for world in others:
        life = world.start(2)
        life.finish()
        world.complete(world.prepare(life))  # promised, not committed
        world.prepare(life)  # and this one is given up
    ours = FakePipeline(target, 4, "others share the target")
    ours.advance(ours.start(2))
    ours.advance(ours.start(1))
    ours.check_visible(ours.completed.shown, "beside others")
    for world in others:
        world.start(1)
        world.check_visible(world.completed.shown, "after the others went on")
    ours.check_end(2)


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
    world = FakePipeline(target, rows, story or point.value)
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
    """B14: killed before the first checkpoint completed, then started with fewer subtasks: nothing blocks."""
    world = FakePipeline(target, 7, f"killed in its first epoch, {point.value}")
    _die(world, world.start(5), point, 1)
    life = world.start(1)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(1)


def _die(world: FakePipeline, life: SinkGeneration, point: KillPoint, after: int) -> None:
    """Run up to ``point``, where all processes die."""
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


PARALLELISMS = (1, 2, 3, 2, 5, 3, 5, 6, 5, 2, 1)
"""Flink's sinks are rescaled so; each step has prepared output outstanding."""

PENDING_MANY = 20
"""Checkpoints prepared and not completed, more than any pool of connections should care about."""


def check_lost_answers(target: Target) -> None:
    """B6, B11: the answer to every call is lost once: the repeated call changes nothing and gets the same answer."""
    world = FakePipeline(target, 6, "every answer was lost once", calls=2)
    life = world.start(2)
    world.advance(life)
    world.complete(world.prepare(life))
    life = world.start(3)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(2)


def check_end_of_input(target: Target) -> None:
    """B8: all input ends in a life that has gone on for some time: everything is shown, without a restart."""
    world = FakePipeline(target, 5, "all input ended")
    life = world.start(2)
    world.advance(life)
    world.advance(life)
    life.write(world.rows)
    world.finish(life)
    world.check_visible(world.completed.position, "at the end")
    world.check_end(2)


def check_restarts_in_a_row(target: Target) -> None:
    """B22: several generations begin, at any parallelism, and die before they write anything."""
    world = FakePipeline(target, 5, "restarted again and again")
    life = world.start(3)
    world.advance(life)
    world.complete(world.prepare(life))
    for parallelism in (1, 4, 2):
        world.start(parallelism)
        world.check_visible(world.completed.shown, f"after a restart at parallelism {parallelism}")
    world.advance(world.start(2))
    world.check_end(1)


def check_rescaling(target: Target) -> None:
    """B25: one parallelism after the other, each time with output that is promised, and output that is not."""
    world = FakePipeline(target, 12, "started at one parallelism after the other")
    for number, parallelism in enumerate(PARALLELISMS):
        life = world.start(parallelism)
        world.check_visible(world.completed.shown, f"after a start at parallelism {parallelism}")
        done = world.prepare(life)
        if number % 3:
            world.complete(done)
        if number % 3 == 1:
            world.prepare(life)
    world.check_end(2)


def check_many_pending(target: Target) -> None:
    """B17: many checkpoints in a row are prepared and given up; the one that completes commits all of them."""
    world = FakePipeline(target, 2, f"{PENDING_MANY} checkpoints were given up in a row")
    life = world.start(2)
    for _ in range(PENDING_MANY):
        done = world.prepare(life)
    world.complete(done)
    life.commit(done)
    world.check_visible(done.shown, "after the commit")
    world.check_end(2)


def check_late_commits(target: Target) -> None:
    """B9, K7: output of an earlier checkpoint is committed after that of a later one."""
    world = FakePipeline(target, 4, "earlier output was committed after later output")
    life = world.start(2)
    life.finish()
    first = world.prepare(life)
    second = world.prepare(life)
    world.complete(second)
    permit = CommitPermit(second.checkpoint, life.generation)
    late = set(first.committables)
    life.committer.commit(permit, [c for c in second.committables if c not in late])
    life.committer.commit(permit, first.committables)
    found = sorted(int(row["number"]) for row in target.read())
    assert found == list(range(second.position)), f"{world.story}: visible are {found}"
    life.committer.commit(CommitPermit(first.checkpoint, life.generation), first.committables)
    assert sorted(int(row["number"]) for row in target.read()) == found, f"{world.story}: a repetition changed it"


def check_older_checkpoint(target: Target) -> None:
    """K6: newer checkpoints were completed, nothing of them was committed, and an older one is restored."""
    world = FakePipeline(target, 5, "restored from an older checkpoint")
    life = world.start(2)
    world.advance(life)
    older = world.completed
    world.prepare(life)
    world.prepare(life)  # completed, but its manifest is damaged before anything is committed
    world.go_back_to(older)
    life = world.start(2)
    world.check_visible(older.shown, "after going back")
    world.advance(life)
    world.advance(life)
    world.check_end(2)


def check_rewound(target: Target) -> None:
    """B1, K7: an older checkpoint is restored after newer commits: later ones have ids that the target has seen."""
    world = FakePipeline(target, 5, "restored from a checkpoint older than the newest commit")
    life = world.start(2)
    life.finish()
    world.advance(life)
    older = world.completed
    for _ in range(3):
        world.advance(life)
    newest = world.completed.position
    world.go_back_to(older)
    life = world.start(2)
    life.finish()
    life.position = newest  # what is written now is told apart from what is there (K18)
    for _ in range(2):
        life.write(world.rows)
        done = life.prepare(world.next_id())
        world.complete(done)
        life.commit(done)
        world.check_visible(done.position, "after going back")
    world.check_end(2)


def check_forgetting(target: Target) -> str | None:
    """K20, CS24: the target forgets what no retained checkpoint promises; what one promises is known for ever."""
    world = FakePipeline(target, 5, "the target forgot what nobody promises")
    neighbour = FakePipeline(target, 5, "another sink forgot what nobody promises", name=NEIGHBOURS[0])
    life, beside = world.start(2), neighbour.start(2)
    if not life.can_forget:
        return "the sink has nothing that forgets"
    beside.finish()
    neighbour.advance(beside)
    life.finish()
    for _ in range(3):
        world.advance(life)
        retained = [world.completed]
        world.advance(life)
        retained.append(world.completed)
        known = remembered(target)
        for _ in range(2):
            life.forget(retained)
        _check_forgotten(world, known, sum(len(one.committables) for one in retained))
        for one in retained:
            life.commit(one)
        world.check_visible(retained[-1].shown, "after repeated commits of the retained checkpoints")
        beside.commit(neighbour.completed)
        neighbour.check_visible(neighbour.completed.shown, "after a repeated commit of another sink")
        life = world.start(2)
        world.check_visible(world.completed.shown, "after a restart")
        life.finish()
    world.check_end(1)
    return None


def remembered(target: Target) -> set[str]:
    """Return the committed names of ours that the sink lists."""
    if not isinstance(target.sink, TwoPhaseSink):
        return set()
    owner = owner_of(PIPELINE, NODE)
    parsed = {name: OutputName.parse(name) for name in target.sink.committed(owner)}
    return {name for name, parts in parsed.items() if parts is not None and parts.owner == owner}


def _check_forgotten(world: FakePipeline, known: set[str], promised: int) -> None:
    """CS24: of what was ``known`` no more is left than is ``promised``; forgetting again changes nothing."""
    sink, left = world.target.sink, remembered(world.target)
    assert len(left) <= promised, f"{world.story}: it was told to forget, and remembers {sorted(left)[:3]}"
    if isinstance(sink, TwoPhaseSink) and known > left:
        sink.forget(sorted(known - left))
        assert remembered(world.target) == left, f"{world.story}: told again, it forgot something else"


LIVES = 4
"""So many are closed one after the other. What the first opens for the whole process may stay."""


def check_closed(target: Target) -> str | None:
    """Generations open, write, commit and are closed: the process has no more open files than after the first one."""
    me = psutil.Process()
    if not hasattr(me, "num_fds"):
        return "open files and connections: this system does not count them"
    world = FakePipeline(target, 3, "a sink was closed")
    counts: list[int] = []
    for _ in range(LIVES):
        life = world.start(2)
        world.advance(life)
        life.close()
        del life
        gc.collect()  # what only lost objects hold is closed with them
        counts.append(me.num_fds())
    grown = [after - before for before, after in itertools.pairwise(counts)]
    assert min(grown) <= 0, f"{world.story}: each time {min(grown)} more files or connections stay open"
    return None
