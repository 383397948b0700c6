"""How long a checkpoint waits for sources that read towards its marker (EI34–EI37).

The pipeline: two sources that set their own barriers, an ordinary one, and an operator behind all of them.
"""

from __future__ import annotations

from typing import Any

from tests.protocol.checkpoints.coordinating import GENERATION, STARTED, ack, after, begin, expiry, reserved, written
from tests.protocol.making import cp, gen, sub

from headgate.model.config import CheckpointConfig
from headgate.model.ids import SubtaskId
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    AnswerRequest,
    ArmTimer,
    CheckpointRequested,
    Effect,
    Event,
    ExpiryTimer,
    FailGeneration,
    HookAnswered,
    NotifyAbort,
    PauseTimer,
    ReserveId,
    SavepointOrder,
    SavepointRequested,
    SourceReadsOn,
    StopRequested,
    TimerFired,
    WriteManifest,
)
from headgate.protocol.checkpoints.pending import TIMEOUTS_MAX
from headgate.protocol.machine import Ignored

TAPE, OTHER_TAPE, ORDINARY, JOINED = sub("tape"), sub("other-tape"), sub("ordinary"), sub("joined")
BEHIND = {source.vertex: frozenset({JOINED.vertex}) for source in (TAPE, OTHER_TAPE, ORDINARY)}
AHEAD = AbortReason.MARKER_AHEAD


def coordinator(*events: Event, hooks: dict[str, int] | None = None, **config: Any) -> Coordinator:
    """Return a started coordinator of the pipeline above, first checkpoint 10, that has handled ``events``."""
    settings = CheckpointConfig(**{"interval_ms": 1_000, "timeout_ms": 60_000, **config})
    participants = (TAPE, OTHER_TAPE, ORDINARY, JOINED)
    return after(Coordinator(GENERATION, participants, settings, cp(10), (), hooks, BEHIND), STARTED, *events)


def reads(*uncut: int, source: SubtaskId = TAPE, generation: int = 3) -> SourceReadsOn:
    return SourceReadsOn(gen(generation), source, tuple(cp(checkpoint) for checkpoint in uncut))


def waits_on(checkpoint: int) -> list[Effect]:
    return [ArmTimer(ExpiryTimer(cp(checkpoint)), 60_000)]


def aborted(effects: list[Effect]) -> list[AbortReason]:
    return [effect.reason for effect in effects if isinstance(effect, NotifyAbort)]


def fails(effects: list[Effect]) -> bool:
    return any(isinstance(effect, FailGeneration) for effect in effects)


def all_but_one(checkpoint: int) -> tuple[Event, ...]:
    """The first tape's cut is missing, and what is behind it."""
    return (*begin(checkpoint), ack(ORDINARY, checkpoint), ack(OTHER_TAPE, checkpoint))


def expired(machine: Coordinator, checkpoint: int, *, reports: int = TIMEOUTS_MAX) -> tuple[list[AbortReason], int]:
    """Let timeouts of ``checkpoint`` pass while its source reads on; return how it ended, and behind how many."""
    for timeouts in range(1, reports + 1):
        machine.handle(reads(checkpoint))
        effects = machine.handle(expiry(checkpoint))
        if effects != waits_on(checkpoint):
            assert fails(effects) == (AbortReason.MARKER_NOT_MET in aborted(effects))
            return aborted(effects), timeouts
    return [], reports


# -- before the cut ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_whose_sources_read_towards_its_marker_is_no_failure() -> None:  # EI36
    machine = coordinator(*all_but_one(10), reads(10))
    effects = machine.handle(expiry(10))
    assert aborted(effects) == [AHEAD]
    assert not fails(effects), "none is tolerable, and this is none"
    for checkpoint in range(11, 15):
        after(machine, *all_but_one(checkpoint))
        assert expired(machine, checkpoint)[0] == [AHEAD]


def test_each_checkpoint_that_did_not_wait_long_enough_gives_the_next_one_twice_the_time() -> None:  # EI37
    machine = coordinator()
    waited = []
    for checkpoint in range(10, 16):
        after(machine, *all_but_one(checkpoint))
        waited.append(expired(machine, checkpoint))
    assert waited == [([AHEAD], timeouts) for timeouts in (1, 2, 4, 8, 16, 32)]
    after(machine, *all_but_one(16))
    assert expired(machine, 16) == ([AbortReason.MARKER_NOT_MET], TIMEOUTS_MAX)
    assert AbortReason.MARKER_NOT_MET.counts_as_failure
    assert not AHEAD.counts_as_failure


def test_a_marker_that_is_never_met_counts_again_and_again() -> None:  # EI37
    machine = coordinator(tolerable_failures=1)
    for checkpoint in range(10, 16):
        after(machine, *all_but_one(checkpoint))
        expired(machine, checkpoint)
    for checkpoint, failed in ((16, False), (17, True)):
        after(machine, *all_but_one(checkpoint))
        for _ in range(TIMEOUTS_MAX):
            machine.handle(reads(checkpoint))
            effects = machine.handle(expiry(checkpoint))
        assert (aborted(effects), fails(effects)) == ([AbortReason.MARKER_NOT_MET], failed)


def test_a_completion_leaves_the_next_checkpoint_the_time_that_it_took() -> None:  # EI37
    machine = coordinator()
    for checkpoint in (10, 11):
        after(machine, *all_but_one(checkpoint))
        expired(machine, checkpoint)
    after(machine, *all_but_one(12))
    assert expired(machine, 12, reports=2) == ([], 2), "it has four"
    after(machine, reads(), ack(TAPE, 12), ack(JOINED, 12), written(12))
    after(machine, *all_but_one(13))
    assert expired(machine, 13) == ([AHEAD], 3), "the first of them it was given, two it was left"
    after(machine, *begin(14), *(ack(s, 14) for s in (TAPE, OTHER_TAPE, ORDINARY, JOINED)), written(14))
    after(machine, *all_but_one(15))
    assert expired(machine, 15) == ([AHEAD], 1), "a marker that is lost later costs one timeout"


def test_a_source_that_stands_still_counts() -> None:  # EI27, EI36
    machine = coordinator(*all_but_one(10))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "it never came forward"
    machine = coordinator(*all_but_one(10), reads(10), expiry(10), tolerable_failures=1)
    after(machine, *all_but_one(11), reads(11))
    assert machine.handle(expiry(11)) == waits_on(11)
    assert aborted(machine.handle(expiry(11))) == [AbortReason.EXPIRED], "it has come forward, but not since"


def test_every_source_that_is_not_cut_must_come_forward() -> None:  # EI36
    first = (*begin(10), ack(ORDINARY, 10))
    both = coordinator(*first, reads(10), reads(10, source=OTHER_TAPE))
    assert aborted(both.handle(expiry(10))) == [AHEAD]
    one = coordinator(*first, reads(10))
    assert aborted(one.handle(expiry(10))) == [AbortReason.EXPIRED], "the other never said that it reads"
    machine = coordinator(*all_but_one(10), reads(10), expiry(10), tolerable_failures=1)
    after(machine, *begin(11), ack(ORDINARY, 11), reads(11), reads(11, source=OTHER_TAPE), expiry(11))
    assert machine.pending == (11,)
    after(machine, reads(11))
    assert aborted(machine.handle(expiry(11))) == [AbortReason.EXPIRED], "one of them stands still"


def test_whoever_is_not_behind_such_a_source_counts() -> None:  # EI36
    machine = coordinator(*begin(10), ack(OTHER_TAPE, 10), reads(10))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "an ordinary source is stuck"


def test_a_hook_that_is_awaited_counts() -> None:  # EI5, EI36
    machine = coordinator(*all_but_one(10), reads(10), hooks={"x": 99_000, "y": 99_000}, tolerable_failures=1)
    after(machine, HookAnswered(cp(10), "x", None))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED]
    after(machine, *all_but_one(11), reads(11), HookAnswered(cp(11), "x", None), HookAnswered(cp(11), "y", None))
    assert aborted(machine.handle(expiry(11))) == [AHEAD]


def test_a_checkpoint_waits_for_a_hook_with_a_timeout_of_a_year() -> None:  # EI8
    year = 365 * 86_400_000
    machine = coordinator(*begin(10), hooks={"x": year})
    assert machine.handle(expiry(10)) == waits_on(10)
    found = machine.handle(HookAnswered(cp(10), "x", None))
    assert waits_on(10)[0] in found, "its timeout begins with the answer"
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED]


# -- behind the cut ---------------------------------------------------------------------------------------------------


def test_the_timeout_begins_when_the_last_source_has_been_cut() -> None:  # EI35
    machine = coordinator(*begin(10), reads(10), reads(10, source=OTHER_TAPE))
    assert machine.handle(reads()) == [Ignored("noted")], "the other one reads"
    assert machine.handle(reads(source=OTHER_TAPE)) == waits_on(10)
    assert machine.handle(reads(source=OTHER_TAPE)) == [Ignored("noted")], "once"
    after(machine, ack(TAPE, 10), ack(OTHER_TAPE, 10), ack(ORDINARY, 10))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "all are cut, so it is no marker that is late"


def test_a_source_that_is_cut_and_does_not_write_its_snapshot_counts() -> None:  # EI35, EI36
    machine = coordinator(*all_but_one(10), reads(10), reads(), reads(11))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "however much it reads"


def test_markers_that_nobody_waits_for_change_nothing() -> None:  # EI34
    machine = coordinator(*all_but_one(10), reads(10, generation=2), reads(10, source=sub("stranger")))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED]
    machine = coordinator(*all_but_one(10), reads(10), ack(TAPE, 10))
    assert [type(e) for e in machine.handle(ack(JOINED, 10))] == [WriteManifest]
    assert machine.handle(expiry(10)) == [Ignored("the checkpoint has ended, or its manifest is being written")]
    after(machine, written(10))
    assert machine.handle(reads(10)) == [Ignored("noted")]
    assert machine.pending == ()


# -- meanwhile --------------------------------------------------------------------------------------------------------


def test_checkpoints_that_overlap_wait_for_themselves() -> None:  # EI28, EI37
    machine = coordinator(*all_but_one(10), *all_but_one(11), max_concurrent=2)
    machine.handle(reads(10, 11))
    assert aborted(machine.handle(expiry(10))) == [AHEAD]
    machine.handle(reads(11))
    assert aborted(machine.handle(expiry(11))) == [AHEAD]
    after(machine, *all_but_one(12))
    assert expired(machine, 12) == ([AHEAD], 2), "both had one timeout, so it has two"


def test_a_newer_checkpoint_whose_marker_is_met_ends_the_wait() -> None:  # EI24, C15
    machine = coordinator(*all_but_one(10), *all_but_one(11), reads(10, 11), max_concurrent=2)
    assert machine.handle(reads(10)) == waits_on(11)
    after(machine, ack(TAPE, 11), ack(JOINED, 11))
    assert aborted(machine.handle(written(11))) == [AbortReason.SUBSUMED]


def test_a_stop_waits_for_its_marker_as_any_checkpoint_does() -> None:  # EI26, EI36, EI37
    machine = coordinator(*all_but_one(10), reads(10))
    assert ReserveId(cp(11)) in machine.handle(StopRequested())
    after(machine, reserved(11), ack(ORDINARY, 11), ack(OTHER_TAPE, 11), reads(10, 11))
    effects = machine.handle(expiry(11))
    assert aborted(effects) == [AHEAD]
    assert ArmTimer(PauseTimer(), 200) in effects, "the last one is wanted until it is there"
    after(machine, TimerFired(PauseTimer()), reserved(12), ack(ORDINARY, 12), ack(OTHER_TAPE, 12), reads(10, 12))
    assert machine.handle(expiry(12)) == waits_on(12)


def test_the_savepoint_of_a_stop_goes_with_the_next_last_checkpoint() -> None:  # SV10, EI36
    machine = coordinator(StopRequested(SavepointOrder(1, "there")), reserved(10), ack(ORDINARY, 10))
    after(machine, ack(OTHER_TAPE, 10), reads(10))
    effects = machine.handle(expiry(10))
    assert aborted(effects) == [AHEAD]
    assert not any(isinstance(effect, AnswerRequest) for effect in effects), "it is not the savepoint that is slow"
    after(machine, TimerFired(PauseTimer()))
    assert machine.handle(reserved(11))[-1].options.target == "there"  # type: ignore[union-attr]


def test_whoever_asked_hears_that_a_source_still_reads() -> None:  # C61, SV7, EI36
    machine = coordinator(CheckpointRequested(1), reserved(10), ack(ORDINARY, 10), ack(OTHER_TAPE, 10), reads(10))
    assert AnswerRequest(1, None, AHEAD.text) in machine.handle(expiry(10))
    after(machine, SavepointRequested(SavepointOrder(2, "there")), reserved(11), ack(ORDINARY, 11))
    after(machine, ack(OTHER_TAPE, 11), reads(11))
    assert machine.handle(expiry(11)) == waits_on(11)
    after(machine, reads(11))
    assert AnswerRequest(2, None, AHEAD.text) in machine.handle(expiry(11))


def test_a_new_generation_begins_with_one_timeout() -> None:  # EI37
    """Whether or not the driver is the same: what sources had read is read again."""
    machine = coordinator()
    for checkpoint in (10, 11):
        after(machine, *all_but_one(checkpoint))
        expired(machine, checkpoint)
    again = coordinator(*all_but_one(10))
    assert expired(again, 10) == ([AHEAD], 1)
