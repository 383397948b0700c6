"""Which batches may be processed when nothing may be processed twice (rules GM30 and GM32)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.making import cp

from headgate.protocol.subtasks.weaker_guarantees import ReadAhead


# GM30
def test_a_batch_is_handed_over_when_a_completed_checkpoint_covers_it() -> None:
    gate = ReadAhead()
    gate.read()
    assert not gate.may_take, "no checkpoint at all"
    gate.cut(cp(1), is_last=False)
    gate.read()
    assert not gate.may_take, "not yet completed"
    gate.completed(cp(1))
    assert gate.may_take
    gate.take()
    assert not gate.may_take, "the second one was read behind the snapshot"
    gate.cut(cp(2), is_last=False)
    gate.read()
    gate.cut(cp(3), is_last=False)
    gate.completed(cp(3))
    gate.take()
    gate.take()
    assert gate.held == 0, "a completion covers older checkpoints"
    gate.completed(cp(2))
    assert not gate.may_take, "a late word changes nothing"


# GM32
def test_nothing_is_taken_behind_the_last_checkpoint_before_a_stop() -> None:
    gate = ReadAhead()
    gate.read()
    assert gate.cut(cp(1), is_last=False), "positions are after what is held"
    assert not gate.cut(cp(2), is_last=True), "positions go in front of it"
    gate.completed(cp(1))
    gate.completed(cp(2))
    assert not gate.may_take


STEPS = st.lists(st.sampled_from(["read", "read", "take", "cut", "complete", "last"]), max_size=60)


@given(STEPS, st.data())
def test_nothing_is_ever_taken_that_no_completed_checkpoint_covers(steps: list[str], data: st.DataObject) -> None:
    # GM30
    gate, read, taken, newest = ReadAhead(), 0, 0, 0
    positions: dict[int, int] = {0: 0}
    restored = 0
    for step in steps:
        match step:
            case "read":
                gate.read()
                read += 1
            case "take" if gate.may_take:
                gate.take()
                taken += 1
            case "cut" | "last":
                newest += 1
                positions[newest] = read if gate.cut(cp(newest), is_last=step == "last") else taken
            case "complete" if newest:
                done = data.draw(st.integers(1, newest))
                gate.completed(cp(done))
                restored = max(restored, done)
        assert taken <= positions[restored], "a restore begins behind everything that was processed"
