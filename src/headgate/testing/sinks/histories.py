"""What happens to a sink over many checkpoints and starts: lost answers, other parallelism, older checkpoints."""

from __future__ import annotations

from headgate.connectors.custom.fence import OutputName, owner_of
from headgate.connectors.custom.two_phase import TwoPhaseSink
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.testing.sinks.rivals import NEIGHBOURS
from headgate.testing.sinks.target import NODE, PIPELINE, Target
from headgate.testing.sinks.world import World

PARALLELISMS = (1, 2, 3, 2, 5, 3, 5, 6, 5, 2, 1)
"""Flink's sinks are rescaled so; each step has prepared output outstanding."""

PENDING_MANY = 20
"""Checkpoints prepared and not completed, more than any pool of connections should care about."""


def check_lost_answers(target: Target) -> None:
    """B6, B11: the answer to every call is lost once: whoever repeats it changes nothing, and hears the same."""
    world = World(target, 6, "every answer was lost once", calls=2)
    life = world.start(2)
    world.advance(life)
    world.complete(world.prepare(life))
    life = world.start(3)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(2)


def check_end_of_input(target: Target) -> None:
    """B8: all input ends in a life that has gone on for some time: everything is shown, without a restart."""
    world = World(target, 5, "all input ended")
    life = world.start(2)
    world.advance(life)
    world.advance(life)
    life.write(world.rows)
    world.finish(life)
    world.check_visible(world.completed.position, "at the end")
    world.check_end(2)


def check_restarts_in_a_row(target: Target) -> None:
    """B22: several generations begin, at any parallelism, and die before they write anything."""
    world = World(target, 5, "restarted again and again")
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
    world = World(target, 12, "started at one parallelism after the other")
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
    world = World(target, 2, f"{PENDING_MANY} checkpoints were given up in a row")
    life = world.start(2)
    for _ in range(PENDING_MANY):
        done = world.prepare(life)
    world.complete(done)
    life.commit(done)
    world.check_visible(done.shown, "after the commit")
    world.check_end(2)


def check_late_commits(target: Target) -> None:
    """B9, K7: output of an earlier checkpoint is committed behind that of a later one."""
    world = World(target, 4, "earlier output was committed after later output")
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
    world = World(target, 5, "restored from an older checkpoint")
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
    """B1, K7: an older checkpoint is restored behind newer commits: later ones have ids that the target has seen."""
    world = World(target, 5, "restored from a checkpoint older than the newest commit")
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
    world = World(target, 5, "the target forgot what nobody promises")
    neighbour = World(target, 5, "another sink forgot what nobody promises", name=NEIGHBOURS[0])
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


def _check_forgotten(world: World, known: set[str], promised: int) -> None:
    """CS24: of what was ``known`` no more is left than is ``promised``; to be told again changes nothing."""
    sink, left = world.target.sink, remembered(world.target)
    assert len(left) <= promised, f"{world.story}: it was told to forget, and remembers {sorted(left)[:3]}"
    if isinstance(sink, TwoPhaseSink) and known > left:
        sink.forget(sorted(known - left))
        assert remembered(world.target) == left, f"{world.story}: told again, it forgot something else"
