"""One subtask's part in a nest of loops, and the log of a loop head (docs/spec/loops.md)."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp
from tests.protocol.subtasks.loop_world import SHAPES, Record, World, plan_of

from headgate.errors import ProtocolViolation
from headgate.model.ids import SubtaskId
from headgate.model.plan import Plan
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.loop_prober import CloseRound, PassProbe, Probe, ProbeReceived
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.alignment import BlockChannel, Decline, UnblockChannels
from headgate.protocol.subtasks.loops import (
    AdvanceToEnd,
    DropLog,
    FeedbackForwarded,
    FeedbackReceived,
    ForwardFeedback,
    GivenUp,
    HeadEvent,
    LogFeedback,
    LoopHead,
    LoopParticipant,
    LoopPlace,
    OpenLog,
    OutsideEnded,
    ParticipantEvent,
    ProbeOrdered,
    Released,
    ReportEntranceEnded,
    ReportProbe,
    RoundProgress,
    SealLog,
    SentinelReceived,
    SnapshotTaken,
)

REGULAR, BACK, OTHER_BACK = ch(0), ch(1), ch(2)
OUTER = LoopPlace(outside=frozenset({REGULAR}), feedback=frozenset({BACK, OTHER_BACK}))
INNER = LoopPlace(inside=frozenset({REGULAR}), feedback=frozenset({BACK}))
COUNTED = [Ignored("counted")]
NOT_YET = [Ignored("other feedback channels have not brought the probe back")]
EARLY = [Ignored("the probe came back before it passed this head")]


def ordered(
    number: int, round_: int = -1, *, is_closing: bool = False, is_last_watermark: bool = False
) -> ParticipantEvent:
    return ProbeOrdered(Probe(number, round_, is_closing, is_last_watermark))


def back(number: int, channel: int = BACK) -> ParticipantEvent:
    return ProbeReceived(ch(channel), Probe(number))


def part(place: LoopPlace, *events: ParticipantEvent, restored: RoundProgress | None = None) -> LoopParticipant:
    made = LoopParticipant(place) if restored is None else LoopParticipant(place, restored)
    for event in events:
        made.handle(event)
    return made


def test_a_head_counts_from_passing_a_probe_to_having_it_back_everywhere() -> None:  # L34
    outer = part(OUTER, FeedbackForwarded())
    assert outer.handle(ordered(1)) == [PassProbe(Probe(1))]
    assert outer.handle(FeedbackForwarded()) == COUNTED
    assert outer.handle(back(1, BACK)) == NOT_YET
    assert outer.handle(FeedbackForwarded()) == COUNTED
    assert outer.handle(back(1, OTHER_BACK)) == [ReportProbe(1, 2, -1)]


def test_every_probe_is_counted_anew() -> None:  # L34
    outer = part(OUTER, ordered(1), FeedbackForwarded(), back(1, 1), back(1, 2), FeedbackForwarded(), ordered(2))
    assert outer.handle(back(2, 1)) == NOT_YET
    assert outer.handle(back(2, 2)) == [ReportProbe(2, 0, -1)]


def test_a_probe_may_come_back_before_it_passes_the_head() -> None:  # L33, L34
    outer = part(OUTER)
    assert outer.handle(back(1, BACK)) == EARLY
    outer.handle(FeedbackForwarded())
    assert outer.handle(ordered(1)) == [PassProbe(Probe(1))]
    assert outer.handle(back(1, OTHER_BACK)) == [ReportProbe(1, 0, -1)]
    assert outer.handle(back(2, OTHER_BACK)) == EARLY


@pytest.mark.parametrize(
    "unasked",
    [
        pytest.param((back(2),), id="two ahead"),
        pytest.param((back(1), back(2)), id="two ahead, one after another"),
        pytest.param((ordered(1), back(1), back(1)), id="twice on one channel"),
        pytest.param((ordered(1), ordered(3)), id="ordered out of turn"),
        pytest.param((ProbeReceived(ch(7), Probe(1)),), id="on a channel that carries none"),
    ],
)
def test_a_probe_that_nobody_can_have_sent_is_refused(unasked: tuple[ParticipantEvent, ...]) -> None:  # L33
    with pytest.raises(ProtocolViolation):
        part(OUTER, *unasked)


def test_an_inner_head_passes_a_probe_that_came_on_its_regular_inputs() -> None:  # L33
    inner = part(INNER)
    assert inner.handle(ProbeReceived(REGULAR, Probe(1))) == [PassProbe(Probe(1))]
    inner.handle(FeedbackForwarded())
    assert inner.handle(back(1)) == [ReportProbe(1, 1, -1)]


def test_a_subtask_of_the_body_passes_probes_on_and_reports_nothing() -> None:  # L33
    inside = part(LoopPlace(inside=frozenset({ch(0), ch(1)})))
    assert inside.handle(ProbeReceived(ch(1), Probe(1))) == [Ignored("the probe is missing on other channels")]
    assert inside.handle(ProbeReceived(ch(0), Probe(1))) == [PassProbe(Probe(1))]


def test_a_probe_ends_at_a_leaf() -> None:  # L33, L35
    leaf = part(LoopPlace(inside=frozenset({REGULAR}), is_leaf=True))
    closing = Probe(1, 0, is_closing=True)
    assert leaf.handle(ProbeReceived(REGULAR, closing)) == [CloseRound(0), PassProbe(closing), ReportProbe(1, 0, -1)]


def test_the_last_watermark_goes_in_front_of_its_probe() -> None:  # L37
    flush = Probe(1, is_last_watermark=True)
    assert part(OUTER).handle(ProbeOrdered(flush)) == [AdvanceToEnd(), PassProbe(flush)]
    assert part(INNER).handle(ProbeReceived(REGULAR, flush)) == [AdvanceToEnd(), PassProbe(flush)]
    inside = part(LoopPlace(inside=frozenset({REGULAR})))
    assert inside.handle(ProbeReceived(REGULAR, flush)) == [PassProbe(flush)]  # it gets the watermark itself


def test_an_entrance_has_ended_when_all_channels_from_outside_have() -> None:  # L34
    entrance = part(LoopPlace(inside=frozenset({ch(2)}), outside=frozenset({ch(0), ch(1)})))
    assert entrance.handle(OutsideEnded(ch(1))) == [Ignored("records may still enter on other channels")]
    assert entrance.handle(OutsideEnded(ch(0))) == [ReportEntranceEnded(-1, -1)]


# -- rounds ---------------------------------------------------------------------------------------------------------


def test_operators_see_the_end_of_a_round_before_the_probe_passes() -> None:  # L35
    outer = part(OUTER)
    closing = Probe(1, 0, is_closing=True)
    assert outer.handle(ProbeOrdered(closing)) == [CloseRound(0), PassProbe(closing)]
    assert outer.progress == RoundProgress(closed=0, started=0, highest=-1)


def test_progress_is_what_was_closed_started_and_forwarded() -> None:  # L36
    outer = part(OUTER, ordered(1, 0, is_closing=True), FeedbackForwarded(1), FeedbackForwarded(4), back(1, 1))
    assert outer.handle(back(1, 2)) == [ReportProbe(1, 2, 4)]
    outer.handle(ordered(2, 1))
    assert outer.progress == RoundProgress(closed=0, started=1, highest=4)


def test_a_restored_entrance_reports_what_its_snapshot_held_and_what_was_replayed() -> None:  # L36
    restored = RoundProgress(closed=2, started=3, highest=3)
    assert part(OUTER, restored=restored).handle(OutsideEnded(REGULAR)) == [ReportEntranceEnded(3, 3)]
    replayed = part(OUTER, FeedbackForwarded(5), restored=restored)
    assert replayed.handle(OutsideEnded(REGULAR)) == [ReportEntranceEnded(3, 5)]


def test_restored_operators_do_not_see_the_end_of_a_round_again() -> None:  # L36
    restored = part(OUTER, restored=RoundProgress(closed=2, started=2, highest=3))
    again, next_ = Probe(1, 2, is_closing=True), Probe(2, 3, is_closing=True)
    assert restored.handle(ProbeOrdered(again)) == [PassProbe(again)]
    restored.handle(back(1, 1))
    restored.handle(back(1, 2))
    assert restored.handle(ProbeOrdered(next_)) == [CloseRound(3), PassProbe(next_)]
    assert restored.progress == RoundProgress(closed=3, started=3, highest=3)


NOT_WAITED_FOR = [Ignored("a sentinel that no log waits for")]
NOTHING_HERE = [Ignored("no log of it is open here")]


def taken(checkpoint: int) -> SnapshotTaken:
    return SnapshotTaken(cp(checkpoint))


def sentinel(channel: int, checkpoint: int) -> SentinelReceived:
    return SentinelReceived(ch(channel), cp(checkpoint))


def feedback(channel: int) -> FeedbackReceived:
    return FeedbackReceived(ch(channel))


def released(checkpoint: int) -> Released:
    return Released(cp(checkpoint))


def head(*events: HeadEvent, channels: int = 1) -> LoopHead:
    made = LoopHead(ch(i) for i in range(channels))
    for event in events:
        made.handle(event)
    return made


def logged(*checkpoints: int) -> list[object]:
    return [LogFeedback(tuple(map(cp, checkpoints))), ForwardFeedback()]


# -- the log --------------------------------------------------------------------------------------------------------


def test_the_log_begins_with_the_barrier() -> None:  # L1
    fresh = head()
    assert fresh.handle(feedback(0)) == [ForwardFeedback()]
    assert fresh.handle(taken(1)) == [OpenLog(cp(1))]
    assert fresh.pending == (cp(1),)


def test_records_are_logged_before_they_are_processed() -> None:  # L2
    assert head(taken(1)).handle(feedback(0)) == logged(1)


def test_a_sentinel_ends_the_log() -> None:  # L3, L4
    open_log = head(taken(1), feedback(0))
    assert open_log.handle(sentinel(0, 1)) == [SealLog(cp(1))]
    assert open_log.handle(feedback(0)) == [ForwardFeedback()]
    assert open_log.pending == ()


def test_a_log_that_a_newer_sentinel_passes_is_dropped_and_declined() -> None:  # L3
    two = head(taken(1), taken(2), taken(3))
    assert two.handle(sentinel(0, 2)) == [
        DropLog(cp(1)),
        Decline(cp(1), AbortReason.OVERTAKEN),
        SealLog(cp(2)),
    ]
    assert two.pending == (cp(3),)


def test_a_log_is_complete_with_the_last_sentinel() -> None:  # L4
    waiting = head(taken(1), channels=3)
    assert waiting.handle(sentinel(1, 1)) == NOT_WAITED_FOR
    assert waiting.handle(sentinel(0, 1)) == NOT_WAITED_FOR
    assert waiting.handle(sentinel(2, 1)) == [SealLog(cp(1))]


def test_each_channel_is_cut_at_its_own_sentinel() -> None:  # L11
    cut = head(taken(1), sentinel(0, 1), channels=2)
    assert cut.handle(feedback(0)) == [ForwardFeedback()]
    assert cut.handle(feedback(1)) == logged(1)


def test_records_go_into_every_log_that_is_open_on_their_channel() -> None:
    overlapping = head(taken(1), sentinel(0, 1), taken(2), channels=2)
    assert overlapping.handle(feedback(0)) == logged(2)
    assert overlapping.handle(feedback(1)) == logged(1, 2)


def test_a_newer_log_may_be_complete_on_one_channel_before_an_older_one_on_another() -> None:  # L11
    overlapping = head(taken(1), taken(2), sentinel(0, 1), sentinel(0, 2), channels=2)
    assert overlapping.handle(feedback(0)) == [ForwardFeedback()]
    assert overlapping.handle(sentinel(1, 1)) == [SealLog(cp(1))]
    assert overlapping.handle(feedback(1)) == logged(2)
    assert overlapping.handle(sentinel(1, 2)) == [SealLog(cp(2))]


# -- given up -------------------------------------------------------------------------------------------------------


def test_an_abort_drops_its_log_and_no_other() -> None:  # L5
    two = head(taken(1), taken(2))
    assert two.handle(released(1)) == [DropLog(cp(1))]
    assert two.handle(feedback(0)) == logged(2)
    assert two.handle(sentinel(0, 1)) == NOT_WAITED_FOR
    assert two.handle(sentinel(0, 2)) == [SealLog(cp(2))]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param((), id="for a checkpoint that never came here"),
        pytest.param((taken(1), released(1)), id="twice"),
        pytest.param((taken(1), sentinel(0, 1)), id="when its log is sealed"),
        pytest.param((taken(1), taken(2), sentinel(0, 2)), id="when its log is dropped"),
        pytest.param((GivenUp(cp(1)),), id="when it was given up here"),
    ],
)
def test_an_abort_may_come_late_and_twice(before: tuple[HeadEvent, ...]) -> None:  # L5
    assert head(*before).handle(released(1)) == NOTHING_HERE


# -- early sentinels ------------------------------------------------------------------------------------------------


def test_a_channel_is_held_while_its_sentinel_is_early() -> None:  # L6
    early = head(channels=2)
    assert early.handle(sentinel(0, 1)) == [BlockChannel(ch(0))]
    assert early.held == {ch(0)}
    assert early.handle(feedback(1)) == [ForwardFeedback()]
    assert early.handle(taken(1)) == [OpenLog(cp(1)), UnblockChannels((ch(0),))]
    assert early.handle(feedback(0)) == [ForwardFeedback()]  # behind its sentinel
    assert early.handle(feedback(1)) == logged(1)
    assert early.handle(sentinel(1, 1)) == [SealLog(cp(1))]


def test_a_log_whose_sentinels_were_all_early_is_empty() -> None:  # L1, L6
    early = head(sentinel(1, 1), sentinel(0, 1), channels=2)
    assert early.handle(taken(1)) == [OpenLog(cp(1)), SealLog(cp(1)), UnblockChannels((ch(0), ch(1)))]


def test_a_held_channel_is_not_read() -> None:  # L6
    with pytest.raises(ProtocolViolation, match="channel 0, which is held"):
        head(sentinel(0, 1)).handle(feedback(0))
    with pytest.raises(ProtocolViolation, match="sentinel of 2 on channel 0 after 1"):
        head(sentinel(0, 1)).handle(sentinel(0, 2))


@pytest.mark.parametrize("given_up", [released(1), GivenUp(cp(1)), GivenUp(cp(2)), taken(2)])
def test_a_held_channel_is_read_again_when_its_checkpoint_is_given_up(given_up: HeadEvent) -> None:  # L6
    early = head(sentinel(0, 1))
    assert early.handle(given_up)[-1] == UnblockChannels((ch(0),))
    assert early.held == frozenset()


def test_a_channel_is_not_held_for_a_checkpoint_that_was_aborted_before() -> None:  # L5, L6
    early = head(released(1))
    assert early.handle(sentinel(0, 1)) == NOT_WAITED_FOR
    assert early.handle(sentinel(0, 2)) == [BlockChannel(ch(0))]


def test_aborts_of_checkpoints_that_never_come_are_forgotten() -> None:  # L5
    early = head(*(released(i) for i in range(1, LoopHead.RELEASED_MAX + 2)))
    assert early.handle(sentinel(0, 1)) == [BlockChannel(ch(0))]
    early = head(*(released(i) for i in range(1, LoopHead.RELEASED_MAX + 1)))
    assert early.handle(sentinel(0, 1)) == NOT_WAITED_FOR, "as many are remembered"


def test_a_channel_is_held_for_a_newer_checkpoint_only() -> None:  # L6
    early = head(taken(1), sentinel(0, 1), sentinel(0, 3), sentinel(1, 1), channels=2)
    skipped = [OpenLog(cp(2)), DropLog(cp(2)), Decline(cp(2), AbortReason.OVERTAKEN)]  # by whoever feeds back on 0 (L3)
    assert early.handle(taken(2)) == skipped
    assert early.held == {ch(0)}
    assert early.handle(feedback(1)) == [ForwardFeedback()]
    assert early.handle(taken(3)) == [OpenLog(cp(3)), UnblockChannels((ch(0),))]


def test_an_abort_of_a_newer_checkpoint_holds_nothing_older_back() -> None:  # L5, L6
    early = head(sentinel(0, 1))
    assert early.handle(released(2)) == NOTHING_HERE
    assert early.held == {ch(0)}


@pytest.mark.parametrize("checkpoint", [1, 2])
def test_sentinels_of_one_channel_rise(checkpoint: int) -> None:  # L3
    with pytest.raises(ProtocolViolation, match=f"sentinel of {checkpoint} on channel 0 after 2"):
        head(taken(2), sentinel(0, 2)).handle(sentinel(0, checkpoint))


STEPS_MAX = 60_000
"""Far above what the longest history takes: who is not done by then never will be."""
CHECKPOINTS_UNTIL_STEP = 3_000


def records_of(plan: Plan, random: Random, count: int) -> dict[SubtaskId, list[Record]]:
    """Return what every source subtask reads."""
    sources = [s for s in plan.subtasks() if plan.vertex(s.vertex).is_source]
    return {s: [Record(f"{s}.{i}", random.randrange(5)) for i in range(random.randrange(count + 1))] for s in sources}


def run(world: World, *, steps: int = STEPS_MAX, has_checkpoints: bool = True) -> World:
    for at in range(steps):
        if world.is_finished or not world.step(may_checkpoint=has_checkpoints and at < CHECKPOINTS_UNTIL_STEP):
            break
    return world


def assert_everything_happened_once(world: World) -> None:
    states = [subtask.state for subtask in world.subtasks.values()]
    born = Counter(name for state in states for name in state.born)
    died = Counter(record.name for state in states for record in state.died)
    assert set(born.values()) <= {1}
    assert born == died
    made = {record.name: record.made for state in states for record in state.died if record.made}
    assert Counter(name for state in states for name in state.trips) == made


def assert_rounds_were_closed_in_order_and_once(world: World) -> None:
    for name, subtask in world.subtasks.items():
        if subtask.is_in_nest:
            assert subtask.state.closed == list(range(world.finished_rounds[-1] + 1)), name


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    parallelism=st.integers(1, 3),
    has_rounds=st.booleans(),
    kills=st.lists(st.integers(1, 600), max_size=3),
)
def test_any_history_with_checkpoints_and_failures_processes_every_record_once(  # L1–L6, L10, L11, L29, L33–L37
    shape: str, seed: int, parallelism: int, has_rounds: bool, kills: list[int]
) -> None:  # L34
    plan, random = plan_of(shape, parallelism), Random(seed)
    records = records_of(plan, random, 4)
    world = World(plan, records, random, has_rounds=has_rounds)
    for steps in kills:
        run(world, steps=steps)
        restored = world.completed[max(world.completed)] if world.completed else world.restored
        world = World(plan, records, random, has_rounds=has_rounds, restored=restored)
    run(world)
    assert world.is_finished
    assert world.has_ended
    assert_everything_happened_once(world)
    assert not any(subtask.live.open_logs for subtask in world.subtasks.values()) or world.pending
    if has_rounds:
        assert_rounds_were_closed_in_order_and_once(world)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_the_final_checkpoint_has_empty_logs(shape: str) -> None:  # L28, L29
    plan = plan_of(shape, 2)
    random = Random(7)
    world = run(World(plan, records_of(plan, random, 3), random, has_rounds=False), has_checkpoints=False)
    assert world.is_finished
    while world.step(may_checkpoint=False):
        pass
    final = world.trigger()
    while world.step(may_checkpoint=False):
        pass
    if final not in world.completed:  # a write that failed
        final = world.trigger()
        while world.step(may_checkpoint=False):
            pass
    assert all(state.is_finished and not state.log for state in world.completed[final].values())


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), parallelism=st.integers(1, 3))
def test_a_loop_ends_after_few_probes_when_it_is_empty(shape: str, seed: int, parallelism: int) -> None:  # L34, L37
    plan, random = plan_of(shape, parallelism), Random(seed)
    world = run(World(plan, records_of(plan, random, 4), random, has_rounds=False), has_checkpoints=False)
    assert world.has_ended
    assert world.started_after_empty <= 5  # the first; it is empty; last watermark; it is empty again; last watermark


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), parallelism=st.integers(1, 3))
def test_rounds_are_finished_one_after_another_up_to_the_last(shape: str, seed: int, parallelism: int) -> None:
    plan, random = plan_of(shape, parallelism), Random(seed)  # L35
    world = run(World(plan, records_of(plan, random, 4), random, has_rounds=True), has_checkpoints=False)
    assert world.finished_rounds == list(range(len(world.finished_rounds)))
    assert_rounds_were_closed_in_order_and_once(world)
