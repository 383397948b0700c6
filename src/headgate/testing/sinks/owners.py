"""Whose a target is: one life of the pipeline, across restarts, until it is made to forget (docs/spec/lives.md)."""

from __future__ import annotations

from collections import Counter

from headgate.codec.life import encode_life
from headgate.connectors.custom.fence import Fence, owner_of
from headgate.connectors.custom.owned import RememberingSink
from headgate.connectors.owned_sinks import OwnedSink
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Life, OtherSink, Owner
from headgate.protocol.supervision import lives
from headgate.testing.sinks.rivals import expect_fenced
from headgate.testing.sinks.target import NODE, PIPELINE, Target
from headgate.testing.sinks.world import World

NOT_OWNED = "the sink is no OwnedSink"


def check_owner(target: Target) -> str | None:
    """LV2, LV3: a target that remembers lives knows nobody at first, then the first one that comes, across restarts."""
    sink = target.sink
    if not isinstance(sink, OwnedSink):
        return NOT_OWNED
    first, second = Life("first", "/first", "kit", 1), Life("second", "/second", "kit", 2)
    assert sink.owner(PIPELINE, NODE) == Owner(), "a fresh target knows an owner"
    assert sink.own(PIPELINE, NODE, first) == Owner(first), "a fresh target does not take the life that comes"
    World(target, 3, "the owner asks again").start(1)
    assert sink.own(PIPELINE, NODE, first).life == first, "a target does not know its owner again"
    assert sink.own(PIPELINE, NODE, second).life == first, "a target takes a second life"
    known = sink.owner(PIPELINE, NODE)
    assert (known.life, known.generation) == (first, 1), f"a target remembers {known}"
    another = sink.owner(PIPELINE, "another")
    assert another.is_nobody, "another sink has the same owner"
    return _others_are_known(sink, another, first)


def _others_are_known(sink: OwnedSink, another: Owner, first: Life) -> str | None:
    """LV9: what a former name of a sink left is known, and so is whose it is."""
    if not another.others:
        return "that a sink with a former name is known: the target lists none"
    assert another.others == (OtherSink(NODE, Owner(first, Generation(1))),), f"a target remembers {another.others}"
    assert sink.owner(PIPELINE, NODE).others == (), "a sink is another one than itself"
    assert sink.owner("another", NODE).others == (), "sinks of another pipeline are the same pipeline's"
    return None


def check_start_over(target: Target) -> str | None:
    """LV2 to LV4: the checkpoints were removed, or others of that name are elsewhere: all numbers begin anew."""
    sink = target.sink
    if not isinstance(sink, OwnedSink):
        return NOT_OWNED
    first, second = Life("first", "/first", "kit", 1), Life("second", "/second", "kit", 2)
    sink.own(PIPELINE, NODE, first)
    world = World(target, 5, "the pipeline was started over")
    world.advance(world.start(2))
    last = world.start(1)
    world.finish(last)
    found = sink.owner(PIPELINE, NODE)
    assert lives.objection(second, found, Generation(1)) is lives.Objection.OTHER_LIFE, f"a target remembers {found}"
    if not isinstance(sink, RememberingSink):
        return "how it goes on: the sink is no TwoPhaseSink or LedgerSink"
    mine = Fence(owner_of(PIPELINE, NODE), int(found.generation), encode_life(second).decode())
    expect_fenced(lambda: sink.claim(mine), "of another life claimed the target, in the step that looks whose it is,")
    assert sink.owner(PIPELINE, NODE) == found, "a target remembers a claim that it refused"
    sink.forget_owner(PIPELINE, NODE)
    assert sink.owner(PIPELINE, NODE) == Owner(None, found.generation, is_forgotten=True), "a target forgot its fence"
    assert sink.own(PIPELINE, NODE, second).life == second, "a target that was made to forget stays with its life"
    anew = World(target, 5, world.story)
    while (over := anew.next_life(1)).generation <= found.generation:
        continue  # LV4: the next one that is claimed exceeds what the target has seen
    over.recover()
    over.recommit()
    expect_fenced(last.recover, "of the former life recovered")
    over.write(5)
    over.finish()
    over.commit(over.prepare(CheckpointId(1)))
    counts = sorted(Counter(int(row["number"]) for row in target.read()).items())
    assert counts == [(n, 2) for n in range(5)], f"{world.story}: records and how often each is visible: {counts}"
    return None
