"""Scenarios for every sink: kills, lost answers, other parallelism, concurrent writers, closing, ownership, reset."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from enum import Enum

import psutil

from headgate.codec.json_files import encode_life
from headgate.connectors.base import Sink
from headgate.connectors.fenced_sink import Fence, FencedSink, OutputName, can_remove_output, owner_of
from headgate.connectors.two_phase_sink import TwoPhaseSink
from headgate.errors import FencedError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.pipeline_identity import Mine, OtherSink, Owner, PipelineIdentity
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.supervision import ownership
from headgate.testing.sinks.failures import CALLS_MAX, failing_target
from headgate.testing.sinks.fake_pipeline import (
    NODE,
    NUMBERS_MAX,
    PIPELINE,
    Checkpoint,
    FakePipeline,
    Name,
    SinkGeneration,
    Target,
    again,
    missing_option,
)

NEIGHBOURS = (Name(PIPELINE, f"{NODE}2", NUMBERS_MAX), Name(f"{PIPELINE}2", NODE, 2 * NUMBERS_MAX))
"""Their names begin as ours do."""


def check_stale_generation(target: Target) -> None:
    """Two generations at once: the older one changes nothing; its commit and recovery are fenced."""
    pipeline = FakePipeline(target, 6, "a stale generation goes on")
    old = pipeline.start(2)
    pipeline.advance(old)
    old.write(6)
    new = pipeline.start(2)
    try:
        stale = old.prepare(CheckpointId(1_000))
    except FencedError:
        stale = Checkpoint(CheckpointId(1_000), old.position, ())
    pipeline.check_visible(pipeline.completed.shown, "after the stale prepare")
    if stale.committables:
        expect_fenced(lambda: old.commit(stale), "committed")
        pipeline.check_visible(pipeline.completed.shown, "after the stale commit")
    expect_fenced(old.recover, "recovered")
    pipeline.check_visible(pipeline.completed.shown, "after the stale recovery")
    pipeline.advance(new)
    pipeline.check_end(2)


def check_commit_in_flight(target: Target, *, is_late: bool) -> None:
    """The commit of a dead driver arrives while the next generation recovers, or after that."""
    pipeline = FakePipeline(
        target, 6, "the commit of a dead driver arrives " + ("late" if is_late else "in the recovery")
    )
    old = pipeline.start(2)
    old.finish()
    done = pipeline.prepare(old)
    pipeline.complete(done)
    heir = pipeline.next_generation(2)
    heir.recover()
    if is_late:
        heir.recommit()
    with contextlib.suppress(FencedError):  # it may be fenced
        old.commit(done)
    heir.recommit()
    pipeline.check_visible(done.shown, "after both")
    pipeline.advance(heir)
    pipeline.check_end(2)


def expect_fenced(attempt: Callable[[], None], what: str) -> None:
    """Check that ``attempt`` raises FencedError; ``what`` describes it."""
    try:
        attempt()
    except FencedError:
        return
    raise AssertionError(f"a stale generation {what} without a FencedError")


def check_neighbours(target: Target) -> None:
    """Another sink and another pipeline, with names that begin as ours, prepare at the same target."""
    others = [
        FakePipeline(target, 4, f"{name.pipeline}/{name.node} shares the target", name=name) for name in NEIGHBOURS
    ]
    for pipeline in others:
        run = pipeline.start(2)
        run.finish()
        pipeline.complete(pipeline.prepare(run))  # promised, not committed
        pipeline.prepare(run)  # and this one is given up
    ours = FakePipeline(target, 4, "others share the target")
    for pipeline in (ours, *others):
        pipeline.is_held_back = target.holds_back
    ours.advance(ours.start(2))
    ours.advance(ours.start(1))
    ours.check_visible(ours.completed.shown, "beside others")
    for pipeline in others:
        pipeline.start(1)
    ours.is_held_back = False
    for pipeline in others:
        pipeline.is_held_back = False
        pipeline.check_visible(pipeline.completed.shown, "after the others went on")
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
    """One kill, of the target's server too if it can be, then a restart, a healthy checkpoint and another restart."""
    pipeline = FakePipeline(target, rows, story or point.value)
    run = pipeline.start(before)
    pipeline.advance(run)
    for _ in range(overlap - 1):
        pipeline.prepare(run)
    _die(pipeline, run, point, after)
    run = pipeline.start(after)
    pipeline.check_visible(pipeline.completed.shown, "after the restart")
    pipeline.advance(run)
    pipeline.check_end(before)


def check_first_epoch(target: Target, point: KillPoint) -> None:
    """Killed before the first checkpoint completed, then started with fewer subtasks: nothing blocks."""
    pipeline = FakePipeline(target, 7, f"killed in its first epoch, {point.value}")
    _die(pipeline, pipeline.start(5), point, 1)
    run = pipeline.start(1)
    pipeline.check_visible(pipeline.completed.shown, "after the restart")
    pipeline.advance(run)
    pipeline.check_end(1)


def _die(pipeline: FakePipeline, run: SinkGeneration, point: KillPoint, after: int) -> None:
    """Run up to ``point``, where all processes die."""
    _run_up_to(pipeline, run, point, after)
    if pipeline.target.crash is not None:
        pipeline.target.crash()


def _run_up_to(pipeline: FakePipeline, run: SinkGeneration, point: KillPoint, after: int) -> None:
    if point is KillPoint.WRITING:
        run.write(pipeline.rows)
        return
    subtasks = len(run.writers) // 2 if point is KillPoint.PREPARED_SOME else None
    done = pipeline.prepare(run, subtasks)
    if point in (KillPoint.PREPARED_SOME, KillPoint.PREPARED_ALL):
        return
    pipeline.complete(done)
    if point is KillPoint.COMMITTED_SOME:
        half = done.committables[: len(done.committables) // 2]
        run.committer.commit(CommitPermit(done.checkpoint, run.generation), half)
    if point is KillPoint.COMMITTED:
        run.commit(done)
    if point in (KillPoint.RECOVERED, KillPoint.RECOMMITTED):
        second = pipeline.next_generation(after)
        second.recover()
        if point is KillPoint.RECOMMITTED:
            second.recommit()


PARALLELISMS = (1, 2, 3, 2, 5, 3, 5, 6, 5, 2, 1)
"""Flink's sinks are rescaled so; each step has prepared output outstanding."""

PENDING_MANY = 20
"""Checkpoints prepared and not completed, more than any pool of connections should care about."""


def check_lost_answers(target: Target) -> None:
    """The answer to every call is lost once: the repeated call changes nothing and gets the same answer."""
    pipeline = FakePipeline(target, 6, "every answer was lost once", calls=2)
    run = pipeline.start(2)
    pipeline.advance(run)
    pipeline.complete(pipeline.prepare(run))
    run = pipeline.start(3)
    pipeline.check_visible(pipeline.completed.shown, "after the restart")
    pipeline.advance(run)
    pipeline.check_end(2)


def check_end_of_input(target: Target) -> None:
    """All input ends in a run that has gone on for some time: everything is shown, without a restart."""
    pipeline = FakePipeline(target, 5, "all input ended")
    run = pipeline.start(2)
    pipeline.advance(run)
    pipeline.advance(run)
    run.write(pipeline.rows)
    pipeline.finish(run)
    pipeline.check_visible(pipeline.completed.position, "at the end")
    pipeline.check_end(2)


def check_restarts_in_a_row(target: Target) -> None:
    """Several generations begin, at any parallelism, and die before they write anything."""
    pipeline = FakePipeline(target, 5, "restarted again and again")
    run = pipeline.start(3)
    pipeline.advance(run)
    pipeline.complete(pipeline.prepare(run))
    for parallelism in (1, 4, 2):
        pipeline.start(parallelism)
        pipeline.check_visible(pipeline.completed.shown, f"after a restart at parallelism {parallelism}")
    pipeline.advance(pipeline.start(2))
    pipeline.check_end(1)


def check_rescaling(target: Target) -> None:
    """One parallelism after the other, each time with output that is promised, and output that is not."""
    pipeline = FakePipeline(target, 12, "started at one parallelism after the other")
    for number, parallelism in enumerate(PARALLELISMS):
        run = pipeline.start(parallelism)
        pipeline.check_visible(pipeline.completed.shown, f"after a start at parallelism {parallelism}")
        done = pipeline.prepare(run)
        if number % 3:
            pipeline.complete(done)
        if number % 3 == 1:
            pipeline.prepare(run)
    pipeline.check_end(2)


def check_many_pending(target: Target) -> None:
    """Many checkpoints in a row are prepared and given up; the one that completes commits all of them."""
    pipeline = FakePipeline(target, 2, f"{PENDING_MANY} checkpoints were given up in a row")
    run = pipeline.start(2)
    for _ in range(PENDING_MANY):
        done = pipeline.prepare(run)
    pipeline.complete(done)
    run.commit(done)
    pipeline.check_visible(done.shown, "after the commit")
    pipeline.check_end(2)


def check_late_commits(target: Target) -> None:
    """K7: output of an earlier checkpoint is committed after that of a later one."""
    pipeline = FakePipeline(target, 4, "earlier output was committed after later output")
    run = pipeline.start(2)
    run.finish()
    first = pipeline.prepare(run)
    second = pipeline.prepare(run)
    pipeline.complete(second)
    permit = CommitPermit(second.checkpoint, run.generation)
    late = set(first.committables)
    run.committer.commit(permit, [c for c in second.committables if c not in late])
    run.committer.commit(permit, first.committables)
    found = sorted(int(row["number"]) for row in target.read())
    assert found == list(range(second.position)), f"{pipeline.story}: visible are {found}"
    run.committer.commit(CommitPermit(first.checkpoint, run.generation), first.committables)
    assert sorted(int(row["number"]) for row in target.read()) == found, f"{pipeline.story}: a repetition changed it"


def check_older_checkpoint(target: Target) -> None:
    """Newer checkpoints were completed, nothing of them was committed, and an older one is restored."""
    pipeline = FakePipeline(target, 5, "restored from an older checkpoint")
    run = pipeline.start(2)
    pipeline.advance(run)
    older = pipeline.completed
    pipeline.prepare(run)
    pipeline.prepare(run)  # completed, but its manifest is damaged before anything is committed
    pipeline.go_back_to(older)
    run = pipeline.start(2)
    pipeline.check_visible(older.shown, "after going back")
    pipeline.advance(run)
    pipeline.advance(run)
    pipeline.check_end(2)


def check_rewound(target: Target) -> None:
    """K7: an older checkpoint is restored after newer commits: later ones have ids that the target has seen."""
    pipeline = FakePipeline(target, 5, "restored from a checkpoint older than the newest commit")
    run = pipeline.start(2)
    run.finish()
    pipeline.advance(run)
    older = pipeline.completed
    for _ in range(3):
        pipeline.advance(run)
    newest = pipeline.completed.position
    pipeline.go_back_to(older)
    run = pipeline.start(2)
    run.finish()
    run.position = newest  # new output is distinguished from what is there (K18)
    for _ in range(2):
        run.write(pipeline.rows)
        done = run.prepare(pipeline.next_id())
        pipeline.complete(done)
        run.commit(done)
        pipeline.check_visible(done.position, "after going back")
    pipeline.check_end(2)


def check_forgetting(target: Target) -> str | None:
    """K20: the target forgets what no retained checkpoint promises; what one promises is known for ever."""
    pipeline = FakePipeline(target, 5, "the target removed outcomes that no checkpoint promises")
    neighbour = FakePipeline(target, 5, "another sink removed outcomes that no checkpoint promises", name=NEIGHBOURS[0])
    run, beside = pipeline.start(2), neighbour.start(2)
    if not run.can_forget:
        return "the sink has nothing that forgets"
    beside.finish()
    neighbour.advance(beside)
    run.finish()
    for _ in range(3):
        pipeline.advance(run)
        retained = [pipeline.completed]
        pipeline.advance(run)
        retained.append(pipeline.completed)
        known = remembered(target)
        for _ in range(2):
            run.forget(retained)
        _check_forgotten(pipeline, known, sum(len(one.committables) for one in retained))
        for one in retained:
            run.commit(one)
        pipeline.check_visible(retained[-1].shown, "after repeated commits of the retained checkpoints")
        beside.commit(neighbour.completed)
        neighbour.check_visible(neighbour.completed.shown, "after a repeated commit of another sink")
        run = pipeline.start(2)
        pipeline.check_visible(pipeline.completed.shown, "after a restart")
        run.finish()
    pipeline.check_end(1)
    return None


def remembered(target: Target) -> set[str]:
    """Return the committed names of ours that the sink lists."""
    if not isinstance(target.sink, TwoPhaseSink):
        return set()
    owner = owner_of(PIPELINE, NODE)
    parsed = {name: OutputName.parse(name) for name in target.sink.committed(owner)}
    return {name for name, parts in parsed.items() if parts is not None and parts.owner == owner}


def _check_forgotten(pipeline: FakePipeline, known: set[str], promised: int) -> None:
    """Of what was ``known`` no more is left than is ``promised``; forgetting again changes nothing."""
    sink, left = pipeline.target.sink, remembered(pipeline.target)
    assert len(left) <= promised, f"{pipeline.story}: it still has outcomes that it was to remove: {sorted(left)[:3]}"
    if isinstance(sink, TwoPhaseSink) and known > left:
        sink.forget(sorted(known - left))
        assert remembered(pipeline.target) == left, f"{pipeline.story}: a repeated call removed other outcomes"


LIVES = 4
"""So many are closed one after the other. What the first opens for the whole process may stay."""


def check_closed(target: Target) -> str | None:
    """Generations open, write, commit and are closed: the process has no more open files than after the first one."""
    me = psutil.Process()
    if not hasattr(me, "num_fds"):
        return "open files and connections: this system does not count them"
    pipeline = FakePipeline(target, 3, "a sink was closed")
    counts: list[int] = []
    for _ in range(LIVES):
        run = pipeline.start(2)
        pipeline.advance(run)
        run.close()
        del run
        gc.collect()  # what only lost objects hold is closed with them
        counts.append(me.num_fds())
    grown = [after - before for before, after in itertools.pairwise(counts)]
    assert min(grown) <= 0, f"{pipeline.story}: each time {min(grown)} more files or connections stay open"
    return None


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
    restarted = FakePipeline(target, 5, pipeline.story)
    while (over := restarted.next_generation(1)).generation <= found.generation:
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
