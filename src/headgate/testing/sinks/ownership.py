"""The ownership of a target, and a reset: a sink removes everything that it wrote, and nothing that others wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headgate.codec.json_files import encode_life
from headgate.connectors.base import Sink
from headgate.connectors.fenced_sink import Fence, FencedSink, can_remove_output, owner_of
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.pipeline_identity import Mine, OtherSink, Owner, PipelineIdentity
from headgate.protocol.supervision import ownership
from headgate.testing.sinks.failures import CALLS_MAX, failing_target
from headgate.testing.sinks.fake_pipeline import (
    NODE,
    PIPELINE,
    Checkpoint,
    FakePipeline,
    SinkGeneration,
    Target,
    again,
    missing_option,
)
from headgate.testing.sinks.scenarios import NEIGHBOURS, expect_fenced, remembered

NOT_OWNED = "the target of the sink remembers no owner"


def check_owner(target: Target) -> str | None:
    """LV2, LV3: a target has no owner at first, then the first pipeline that claims it, across restarts."""
    sink = target.sink
    if not sink.has_owner:
        return NOT_OWNED
    first, second = PipelineIdentity("first", "/first", "kit", 1), PipelineIdentity("second", "/second", "kit", 2)
    assert sink.owner(PIPELINE, NODE) == Owner(), "a fresh target knows an owner"
    assert sink.own(PIPELINE, NODE, first) == Owner(first), "a fresh target does not take the life that comes"
    FakePipeline(target, 3, "the owner asks again").start(1)
    assert sink.own(PIPELINE, NODE, first).life == first, "a target does not know its owner again"
    assert sink.own(PIPELINE, NODE, second).life == first, "a target takes a second life"
    known = sink.owner(PIPELINE, NODE)
    assert (known.life, known.generation) == (first, 1), f"a target remembers {known}"
    another = sink.owner(PIPELINE, "another")
    assert another.is_unknown, "another sink has the same owner"
    return _others_are_known(sink, another, first)


def _others_are_known(sink: Sink, another: Owner, first: PipelineIdentity) -> str | None:
    """The target knows the output of a sink's former name, and its owner."""
    if not another.others:
        return "that a sink with a former name is known: the target lists none"
    assert another.others == (OtherSink(NODE, Owner(first, Generation(1))),), f"a target remembers {another.others}"
    assert sink.owner(PIPELINE, NODE).others == (), "a sink is another one than itself"
    assert sink.owner("another", NODE).others == (), "sinks of another pipeline are the same pipeline's"
    return None


def check_start_over(target: Target) -> str | None:
    """LV2 to LV4: the checkpoints were removed, or others of that name are elsewhere: all numbers start at 1 again."""
    sink = target.sink
    if not sink.has_owner:
        return NOT_OWNED
    first, second = PipelineIdentity("first", "/first", "kit", 1), PipelineIdentity("second", "/second", "kit", 2)
    sink.own(PIPELINE, NODE, first)
    pipeline = FakePipeline(target, 5, "the pipeline was started over")
    pipeline.advance(pipeline.start(2))
    last = pipeline.start(1)
    pipeline.finish(last)
    found = sink.owner(PIPELINE, NODE)
    assert ownership.objection(second, found, Generation(1)) is ownership.Objection.OTHER_LIFE, (
        f"a target remembers {found}"
    )
    if not isinstance(sink, FencedSink):
        return "how it goes on: the sink is no TwoPhaseSink or LedgerSink"
    mine = Fence(owner_of(PIPELINE, NODE), int(found.generation), encode_life(second).decode())
    expect_fenced(lambda: sink.claim(mine), "of another life claimed the target, in the step that checks its owner,")
    assert sink.owner(PIPELINE, NODE) == found, "a target remembers a claim that it refused"
    sink.forget_owner(PIPELINE, NODE)
    assert sink.owner(PIPELINE, NODE) == Owner(None, found.generation, is_forgotten=True), "a target forgot its fence"
    assert sink.own(PIPELINE, NODE, second).life == second, "a target that was made to forget stays with its life"
    anew = FakePipeline(target, 5, pipeline.story)
    while (over := anew.next_generation(1)).generation <= found.generation:
        continue  # LV4: the next one that is claimed exceeds what the target has seen
    over.recover()
    over.recommit()
    expect_fenced(last.recover, "of the former life recovered")
    over.write(5)
    over.finish()
    over.commit(over.prepare(CheckpointId(1)))
    counts = sorted(Counter(int(row["number"]) for row in target.read()).items())
    assert counts == [(n, 2) for n in range(5)], f"{pipeline.story}: records and how often each is visible: {counts}"
    return None


FIRST, SECOND, OTHER = (PipelineIdentity(name, f"/{name}", "kit", 1) for name in ("first", "second", "other"))

IS_MINE: Mine = lambda owner: owner.life is not None and owner.life.id == FIRST.id  # noqa: E731

STORY = "the pipeline starts over"


def check_remove_output(fresh: Callable[[], Target]) -> str | None:
    """Remove the output of a sink: alone, beside others, and with each call failing once."""
    sink = fresh().sink
    if not sink.can_be_reset:
        return "the sink cannot start over"
    if isinstance(sink, FencedSink) and not can_remove_output(sink):
        return "the sink has no method remove_output, so a pipeline with it cannot start over"
    check_removal(fresh())
    check_removal_beside_others(fresh())
    return check_removal_interrupted(fresh)


def check_removal(target: Target) -> None:
    """Nothing of the former owner stays, in whatever state it was; a removal may be repeated; then a new run works."""
    pipeline, life = _written(target)
    _refuses_older(target, pipeline)
    for _ in range(2):  # the answer was lost
        _start_over(target)
    _repeat_removal(target)
    _check_removed(target)
    left = list(target.leftovers())
    assert not left, f"{STORY}: left behind: {left[:5]}"
    expect_fenced(life.recover, "of the life before recovered")
    _begin_anew(target).check_end(2)


def check_removal_beside_others(target: Target) -> None:
    """What other sinks and pipelines have at the target stays: committed and promised output, and its owners."""
    sink = target.sink
    assert sink.can_be_reset
    others: list[tuple[FakePipeline, SinkGeneration, Checkpoint]] = []
    for name in NEIGHBOURS:
        other = FakePipeline(target, 4, f"{STORY}, and {name.pipeline}/{name.node} shares the target", name=name)
        sink.own(name.pipeline, name.node, OTHER)
        beside = other.start(2)
        beside.finish()
        other.advance(beside)
        committed = other.completed
        other.complete(other.prepare(beside))  # promised, not committed
        others.append((other, beside, committed))
    owners = [sink.owner(name.pipeline, name.node).life for name in NEIGHBOURS]
    pipeline, _ = _written(target)
    if sink.holding(PIPELINE, NODE, IS_MINE).problem:
        _refuses_to_part(target)
        pipeline.check_visible(pipeline.completed.position - pipeline.rows, "after it was refused")
    else:
        _start_over(target)
        _repeat_removal(target)
        _check_removed(target)
        _begin_anew(target)
    found = [sink.owner(name.pipeline, name.node).life for name in NEIGHBOURS]
    assert found == owners, f"{STORY}: others' targets belong to {found}, no longer to {owners}"
    for other, beside, committed in others:
        other.check_visible(committed.shown, "after the removal")
        beside.commit(committed)
        other.check_visible(committed.shown, "after a commit repeated after the removal")
        beside.commit(other.completed)
        other.check_visible(other.completed.shown, "after a commit that followed the removal")
        beside.commit(other.completed)
        other.check_end(1, is_alone=False)


def check_removal_interrupted(fresh: Callable[[], Target]) -> str | None:
    """Each call at the target fails once while it is emptied, before or after its effect; then it is repeated."""
    for is_after in (False, True):
        for number in range(1, CALLS_MAX):
            target = failing_target(fresh())
            if target.failing is None:
                return f"a failure on the way: {missing_option('failing')}"
            _written(target)
            with target.failing(number, is_after) as has_failed:
                again(lambda target=target: _start_over(target))  # type: ignore[misc]
                is_reached = has_failed()
            _check_removed(target)
            if not is_reached:
                break
            _begin_anew(target)
        else:
            raise AssertionError(f"{STORY}: it had not ended after {CALLS_MAX} calls at the target")
    return None


def _written(target: Target) -> tuple[FakePipeline, SinkGeneration]:
    """Have two generations of the first life write: output is committed, promised, and prepared for nothing."""
    sink = target.sink
    assert sink.can_be_reset
    sink.own(PIPELINE, NODE, FIRST)
    pipeline = FakePipeline(target, 5, STORY)
    pipeline.advance(pipeline.start(2))
    life = pipeline.start(3)
    life.finish()
    pipeline.advance(life)
    pipeline.complete(pipeline.prepare(life))
    life.prepare(pipeline.next_id())
    return pipeline, life


def _start_over(target: Target) -> None:
    """Do what ``--fresh`` does, once its order is decided."""
    sink = target.sink
    assert sink.can_be_reset
    holding = sink.holding(PIPELINE, NODE, IS_MINE)
    assert not holding.problem, f"{STORY}: it is refused: {holding.problem}"
    sink.start_over(PIPELINE, NODE, Generation(3), SECOND, IS_MINE)
    known = sink.owner(PIPELINE, NODE).life
    assert known == SECOND, f"{STORY}: the target belongs to {known} afterwards"


def _repeat_removal(target: Target) -> None:
    if isinstance(target.sink, FencedSink):
        target.sink.remove_output(Fence(owner_of(PIPELINE, NODE), 3, encode_life(SECOND).decode()))


def _refuses_older(target: Target, pipeline: FakePipeline) -> None:
    """A generation that was replaced removes nothing and gets a FencedError."""
    sink = target.sink
    if isinstance(sink, FencedSink):
        older = Fence(owner_of(PIPELINE, NODE), 1, encode_life(FIRST).decode())
        expect_fenced(lambda: sink.remove_output(older), "removed output")
        pipeline.check_visible(
            pipeline.completed.position - pipeline.rows, "after a stale generation wanted to remove it"
        )


def _refuses_to_part(target: Target) -> None:
    """The target is one for all, and cannot be emptied of one sink's output: then nothing goes."""
    assert target.sink.can_be_reset
    try:
        target.sink.start_over(PIPELINE, NODE, Generation(3), SECOND, IS_MINE)
    except UsageError:
        return
    raise AssertionError(f"{STORY}: it was said that the target cannot be emptied, and it was")


def _check_removed(target: Target) -> None:
    ours = FakePipeline(target, 0, STORY)
    stays = ours.numbers()
    assert not stays, f"{STORY}: the sink did not remove all it wrote: still visible: {sorted(stays)[:5]}"
    names = sorted(remembered(target))
    assert not names, f"{STORY}: the sink still lists as committed: {names[:3]}"


def _begin_anew(target: Target) -> FakePipeline:
    """Begin the next run with the first checkpoint and the first record."""
    pipeline = FakePipeline(target, 5, f"{STORY}, and writes again")
    while (life := pipeline.next_generation(2)).generation <= 3:
        continue  # LV4: the next one that is claimed exceeds what the target has seen
    life.recover()
    life.recommit()
    life.finish()
    assert pipeline.next_id() == CheckpointId(1)
    life.write(pipeline.rows)
    done = life.prepare(CheckpointId(1))
    pipeline.complete(done)
    life.commit(done)
    pipeline.check_visible(done.position, "after its first commit")
    return pipeline
