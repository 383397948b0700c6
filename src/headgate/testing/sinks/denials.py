"""Output is gone: the target lost what was promised (a denial, K5), or a consumer took what was committed (none)."""

from __future__ import annotations

from headgate.testing.sinks.target import Target, not_said
from headgate.testing.sinks.world import Checkpoint, SinkLife, World, denial_of


def check_lost_prepared(target: Target) -> str | None:
    """B13, K5: the target lost what a completed checkpoint counts on: the commit raises instead of going on."""
    if target.lose_prepared is None:
        return not_said("lose_prepared")
    world, life, done = _lost(target, "the target lost what was prepared")
    assert denial_of(lambda: life.commit(done), world.story), f"{world.story}: the commit reported success"
    return None


def check_lost_prepared_in_recovery(target: Target) -> str | None:
    """B13, K5: the same, found by the next generations, each of which is told so."""
    if target.lose_prepared is None:
        return not_said("lose_prepared")
    world, _, _ = _lost(target, "the target lost what was prepared, and the pipeline was started again")
    for _ in range(2):
        assert denial_of(lambda: world.start(1), world.story), f"{world.story}: the recovery reported success"
    return None


def _lost(target: Target, story: str) -> tuple[World, SinkLife, Checkpoint]:
    assert target.lose_prepared is not None
    world = World(target, 4, story)
    life = world.start(1)
    life.finish()  # hold nothing back, so that there is something to lose
    done = world.prepare(life)
    world.complete(done)
    target.lose_prepared()
    return world, life, done


def check_taken_away(target: Target) -> str | None:
    """D5: a consumer takes committed output away; commits that are repeated then neither fail nor bring it back."""
    if target.take is None:
        return not_said("take")
    world = World(target, 4, "a consumer took committed output away")
    life = world.start(2)
    life.finish()
    done = world.prepare(life)
    world.complete(done)
    life.commit(done)
    world.check_visible(done.position, "before")
    target.take()
    for _ in range(2):
        life.commit(done)
        assert not target.read(), f"{world.story}: it came back after a repeated commit"
        life = world.start(2)
        assert not target.read(), f"{world.story}: it came back after a restart"
    life.finish()
    after = world.prepare(life)
    world.complete(after)
    life.commit(after)
    found = sorted(int(row["number"]) for row in target.read())
    assert found == list(range(done.position, after.position)), f"{world.story}: later output is {found}"
    return None
