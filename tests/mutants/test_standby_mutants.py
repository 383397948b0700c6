"""Mutants of keepers and standbys: who is started again, when somebody takes over, and what is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli import test_keeping as keeping_tests
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.supervision import test_keeper as keeper_tests
from tests.protocol.supervision import test_standby as standby_tests
from tests.runtime.driver import test_heart as heart_tests
from tests.runtime.driver import test_last_wish as wish_tests
from tests.runtime.driver import test_lookout as lookout_tests
from tests.runtime.driver import test_pipeline_lock as lock_tests
from tests.runtime.driver import test_standby_world as world
from tests.sim.product.patching import around, both, without

from headgate.errors import StorageError
from headgate.model.exits import Exit
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import Generation
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision import standby as standbys
from headgate.protocol.supervision.keeper import Command, Keeper, Tell
from headgate.protocol.supervision.pulse import Pulse
from headgate.protocol.supervision.standby import LookAtAll, Standby
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import heart as hearts
from headgate.runtime.driver import last_wish, lookout, pipeline_lock, stopping
from headgate.runtime.driver.driver import Driver
from headgate.runtime.driver.succession import Succession
from headgate.runtime.driver.supervision import Supervision
from headgate.storage.faulty import FaultyStorage
from headgate.storage.memory import MemoryStorage

# -- keepers ----------------------------------------------------------------------------------------------------------


def a_driver_is_started_again_after_a_stop() -> AbstractContextManager[None]:  # KR6
    def on_stop(call: Any, self: Any, command: Command) -> Any:
        effects = call(self, command)
        self._is_stop_wanted = False
        return effects

    return around(Keeper, "_on_stop", on_stop)


def a_stop_that_only_the_driver_heard_is_forgotten() -> AbstractContextManager[None]:  # KR13
    def on_heard(call: Any, self: Any, event: Any) -> Any:
        return call(self, event) if event.course is Course.DRAINING else [Ignored("the driver knows")]

    return around(Keeper, "_on_heard", on_heard)


def a_drain_that_only_the_driver_heard_is_forgotten() -> AbstractContextManager[None]:  # KR7, KR13
    def on_heard(call: Any, self: Any, event: Any) -> Any:
        return call(self, event) if event.course is Course.STOPPING else [Ignored("the driver knows")]

    return around(Keeper, "_on_heard", on_heard)


def a_driver_keeps_a_wish_to_itself() -> AbstractContextManager[None]:  # KR13
    def init(call: Any, self: Any, *given: Any, succession: Any, **named: Any) -> None:
        call(self, *given, succession=dataclasses.replace(succession, tell_wish=lambda course: None), **named)

    return around(Supervision, "__init__", init)


def only_the_driver_is_signalled() -> AbstractContextManager[None]:  # KR14
    return patched(stopping, "_keeper_of", lambda holder: None)


def any_number_in_a_lock_is_a_keeper() -> AbstractContextManager[None]:  # KR14
    class Number:
        def __init__(self, pid: int) -> None:
            self.pid = pid

    return patched(stopping, "_keeper_of", lambda holder: Number(holder.keeper))


def nobody_insists() -> AbstractContextManager[None]:  # KR15
    return patched(stopping.RunningPipeline, "_tell_keeper", lambda self, number: True)


def wrong_use_is_tried_again() -> AbstractContextManager[None]:  # KR3
    return around(Keeper, "_is_over", lambda call, self, status: status == Exit.DONE)


def two_keepers_replace_each_other() -> AbstractContextManager[None]:  # KR3
    return around(Keeper, "_is_over", lambda call, self, status: call(self, status) and status != Exit.REPLACED)


def a_wish_to_drain_dies_with_its_driver() -> AbstractContextManager[None]:  # KR7
    def start(call: Any, self: Any) -> Any:
        self._is_drain_wanted = False
        return call(self)

    return around(Keeper, "_start", start)


def signals_are_passed_on_at_once() -> AbstractContextManager[None]:  # KR7
    return around(Keeper, "_on_command", lambda call, self, command: [Tell(command)])


def what_was_claimed_is_forgotten() -> AbstractContextManager[None]:  # KR10
    def start(call: Any, self: Any) -> Any:
        self._claimed = None
        return call(self)

    return around(Keeper, "_start", start)


def a_predecessor_does_not_count() -> AbstractContextManager[None]:  # KR10, SB8
    def init(call: Any, self: Any, *given: Any, **named: Any) -> None:
        call(self, *given, **named)
        self.last_generation = None

    return around(Supervision, "__init__", init)


# -- standbys ---------------------------------------------------------------------------------------------------------


def the_silence_goes_on_over_an_outage() -> AbstractContextManager[None]:  # SB7
    def on_failed(call: Any, self: Any, event: Any) -> Any:
        effects = call(self, event)
        self._looked_ms = 10**15  # no pause is longer than meant
        return effects

    return around(Standby, "_on_failed", on_failed)


def a_standby_that_slept_goes_on_counting() -> AbstractContextManager[None]:  # SB7
    return around(Standby, "_has_slept", lambda call, self, event: False)


def silence_is_counted_to_the_end_of_a_look() -> AbstractContextManager[None]:  # SB7
    def is_due(call: Any, self: Any, event: Any, found: Any) -> Any:
        return call(self, dataclasses.replace(event, began_ms=event.ended_ms), found)

    return around(Standby, "_is_due", is_due)


def nothing_is_looked_at_before_a_takeover() -> AbstractContextManager[None]:  # SB8
    def on_looked(call: Any, self: Any, event: Any) -> Any:
        if not event.is_all and self._known is not None:
            found = dataclasses.replace(self._known, mark=event.observed.mark, course=event.observed.course)
            event = dataclasses.replace(event, observed=found, is_all=True)
        return call(self, event)

    return around(Standby, "_on_looked", on_looked)


def what_was_stopped_is_started() -> AbstractContextManager[None]:  # SB6
    return patched(standbys, "_UNTIL_STARTED", {})


def a_driver_that_died_while_it_stopped_is_replaced() -> AbstractContextManager[None]:  # SB6
    def on_looked(call: Any, self: Any, event: Any) -> Any:
        found = event.observed
        if found.course is Course.STOPPING:
            found = dataclasses.replace(found, course=Course.RUNNING)
        return call(self, dataclasses.replace(event, observed=found))

    return around(Standby, "_on_looked", on_looked)


def whoever_loses_the_race_looks_no_more() -> AbstractContextManager[None]:  # SB9
    return without(Standby, "_on_lost", LookAtAll)


def a_first_start_is_not_waited_for() -> AbstractContextManager[None]:  # SB11
    return patched(Standby, "UNKNOWN_MS", Standby.SILENCE_MS)


def silence_may_last_for_ten_seconds() -> AbstractContextManager[None]:  # SB8
    return patched(Standby, "SILENCE_MS", 10_000)


def heirs_claim_without_condition() -> AbstractContextManager[None]:  # SB9
    def claim(call: Any, self: Any, owner: str, wall_ms: int, mine: Any = None, *more: Any) -> Any:
        return call(self, owner, wall_ms, None, *more)

    return around(CheckpointLog, "claim", claim)


def a_drain_that_failed_is_over() -> AbstractContextManager[None]:  # SB14
    def take(call: Any, self: Any, found: Any) -> Any:
        return call(self, dataclasses.replace(found, was_draining=False))

    return around(Standby, "_take", take)


# -- what is recorded -------------------------------------------------------------------------------------------------


def the_end_is_only_a_beat() -> AbstractContextManager[None]:  # SB3
    return patched(lookout, "end_path", lambda pipeline, generation: f"{pipeline}/heartbeats/nowhere")


def a_stop_that_failed_is_a_failure_like_any_other() -> AbstractContextManager[None]:  # SB14
    return around(hearts, "last_word", lambda call, *given: call(*given[:3]))


def whoever_died_unheard_was_not_asked() -> AbstractContextManager[None]:  # SB15
    return patched(stopping, "tell_standbys", lambda *given, **named: None)


def a_wish_hits_whoever_runs_now() -> AbstractContextManager[None]:  # SB15
    return patched(last_wish, "_is_by", lambda dead, owner: True)


def a_name_that_begins_alike_is_the_same() -> AbstractContextManager[None]:  # SB15
    return patched(last_wish, "_is_by", lambda dead, owner: owner.startswith(dead.claimant))


def a_lock_without_a_name_is_of_all() -> AbstractContextManager[None]:  # SB15
    return patched(last_wish, "_is_by", lambda dead, owner: dead.claimant == owner)


def a_lock_does_not_say_who_claims() -> AbstractContextManager[None]:  # SB15
    def acquire(call: Any, *given: Any, claimant: str) -> Any:
        lock = call(*given)
        lock.claimant = claimant
        return lock

    original = pipeline_lock.PipelineLock.acquire
    return patched(pipeline_lock.PipelineLock, "acquire", partial(acquire, original))


def whoever_was_replaced_records_an_end() -> AbstractContextManager[None]:  # SB3
    def word(call: Any, generation: Generation, owner: str, *given: Any) -> Any:
        return call(generation, owner, *given) or Beat(generation, owner, 0, Course.FAILED)

    return around(hearts, "last_word", word)


def storage_that_hangs_holds_the_driver_up() -> AbstractContextManager[None]:  # SB1
    def beat(call: Any, self: Any, generation: Generation, course: Course) -> None:
        self._is_writing = False
        call(self, generation, course)

    return around(hearts.Heart, "beat", beat)


def a_wish_waits_for_the_next_period() -> AbstractContextManager[None]:  # SB1
    def beat(call: Any, self: Any, now_ms: int, generation: Generation, course: Course) -> Any:
        said = self._said
        self._said = None if said is None else (said[0], course)
        return call(self, now_ms, generation, course)

    return around(Pulse, "beat", beat)


def heartbeats_pile_up() -> AbstractContextManager[None]:  # SB4
    return around(hearts.Heart, "_tidy", lambda call, self, generation: None)


def any_lock_is_broken() -> AbstractContextManager[None]:  # SB8
    def acquire(call: Any, root: str, pipeline: str, owner: str, silent: str | None = None, **named: str) -> Any:
        holder = pipeline_lock.read_holder(root, pipeline)
        return call(root, pipeline, owner, silent and holder and holder.nonce, **named)

    original = pipeline_lock.PipelineLock.acquire
    return patched(pipeline_lock.PipelineLock, "acquire", partial(acquire, original))


def histories(*seeds: int) -> None:
    """Live through histories that are known to show a mutant."""
    for seed in seeds:
        world.live(seed)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (
        a_driver_is_started_again_after_a_stop,
        keeper_tests.test_after_a_stop_nothing_is_started_again,
        (Command.STOP, 1, 1),
    ),
    (
        wrong_use_is_tried_again,
        keeper_tests.test_an_end_that_starting_again_does_not_cure_ends_the_keeper,
        (Exit.USAGE,),
    ),
    (
        two_keepers_replace_each_other,
        keeper_tests.test_an_end_that_starting_again_does_not_cure_ends_the_keeper,
        (Exit.REPLACED,),
    ),
    (
        a_wish_to_drain_dies_with_its_driver,
        keeper_tests.test_a_wish_to_drain_waits_until_the_driver_listens_and_outlives_it,
        (),
    ),
    (
        signals_are_passed_on_at_once,
        keeper_tests.test_a_wish_to_drain_waits_until_the_driver_listens_and_outlives_it,
        (),
    ),
    (
        a_stop_that_only_the_driver_heard_is_forgotten,
        keeper_tests.test_a_driver_that_was_asked_to_stop_itself_is_not_started_again,
        (1, 1),
    ),
    (
        a_drain_that_only_the_driver_heard_is_forgotten,
        keeper_tests.test_a_driver_that_was_asked_to_drain_itself_is_started_again_and_drains,
        (),
    ),
    (a_drain_that_failed_is_over, standby_tests.test_a_run_that_failed_while_it_drained_is_drained_on_at_once, ()),
    (
        a_stop_that_failed_is_a_failure_like_any_other,
        heart_tests.test_the_end_of_a_run_that_failed_says_what_its_user_wanted,
        (StorageError("put", "x", "gone"), Course.STOPPING, Course.STOPPED, False),
    ),
    (
        a_wish_hits_whoever_runs_now,
        wish_tests.test_a_wish_for_a_former_run_is_no_wish_for_a_later_one,
        ("another driver",),
    ),
    (
        a_name_that_begins_alike_is_the_same,
        wish_tests.test_a_wish_for_a_former_run_is_no_wish_for_a_later_one,
        ("a driver, driver 2",),
    ),
    (a_lock_without_a_name_is_of_all, wish_tests.test_a_lock_that_does_not_say_who_claims_is_of_nobody, ()),
    (what_was_claimed_is_forgotten, keeper_tests.test_the_next_driver_is_told_what_the_last_one_claimed, ()),
    (the_silence_goes_on_over_an_outage, standby_tests.test_after_an_outage_the_count_starts_again, ()),
    (a_standby_that_slept_goes_on_counting, standby_tests.test_a_standby_that_slept_counts_again, ()),
    (silence_is_counted_to_the_end_of_a_look, standby_tests.test_silence_is_counted_between_looks, ()),
    (
        nothing_is_looked_at_before_a_takeover,
        standby_tests.test_after_the_silence_it_takes_over_behind_the_silent_generation,
        (),
    ),
    (
        what_was_stopped_is_started,
        standby_tests.test_what_its_user_stopped_is_not_started_by_a_standby,
        (Course.STOPPED, standbys.Notice.STOPPED),
    ),
    (
        a_driver_that_died_while_it_stopped_is_replaced,
        standby_tests.test_a_driver_that_died_while_it_stopped_is_not_started_again,
        (),
    ),
    (whoever_loses_the_race_looks_no_more, standby_tests.test_whoever_loses_the_race_goes_on_waiting, ()),
    (
        a_first_start_is_not_waited_for,
        standby_tests.test_without_any_heartbeat_it_waits_longer,
        (Generation(0),),
    ),
    (whoever_was_replaced_records_an_end, heart_tests.test_a_driver_that_was_replaced_records_no_end, ()),
    (storage_that_hangs_holds_the_driver_up, heart_tests.test_one_beat_is_written_at_a_time, ()),
    (a_wish_waits_for_the_next_period, standby_tests.test_a_beat_is_due_at_a_claim_a_wish_and_every_period, ()),
    (heartbeats_pile_up, heart_tests.test_the_first_beat_of_a_generation_removes_older_ones, ()),
    (heartbeats_pile_up, heart_tests.test_runs_that_end_before_their_first_beat_leave_nothing_but_the_last_end, ()),
    (the_end_is_only_a_beat, heart_tests.test_a_late_beat_does_not_undo_the_end, ()),
    (silence_may_last_for_ten_seconds, standby_tests.test_it_takes_over_within_seven_seconds_of_the_last_beat, (0, 0)),
]

CAUGHT_BY_HISTORIES: list[tuple[Mutant, int]] = [
    (what_was_stopped_is_started, 0),
    (the_end_is_only_a_beat, 4),
    (heirs_claim_without_condition, 14),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=[m.__name__ for m, _, _ in CAUGHT])  # type: ignore[attr-defined]
def test_a_mutant_is_caught(mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]) -> None:
    assert_caught(mutant, test, *arguments)


@pytest.mark.parametrize(("mutant", "seed"), CAUGHT_BY_HISTORIES, ids=[m.__name__ for m, _ in CAUGHT_BY_HISTORIES])  # type: ignore[attr-defined]
def test_a_mutant_is_caught_by_a_history(mutant: Mutant, seed: int) -> None:
    histories(seed)
    assert_caught(mutant, histories, seed)


@pytest.mark.parametrize(
    "test",
    [
        heart_tests.test_a_driver_started_again_does_not_claim_behind_another_one,
        heart_tests.test_of_two_heirs_of_one_generation_one_claims,
    ],
)
def test_a_driver_that_forgets_its_predecessor_is_caught(tmp_path: Path, test: Callable[..., object]) -> None:
    assert_caught(a_predecessor_does_not_count, test, tmp_path)


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"),
    [
        (
            only_the_driver_is_signalled,
            keeping_tests.test_a_stop_of_a_driver_that_dies_before_it_hears_it_is_known,
            (False,),
        ),
        (nobody_insists, keeping_tests.test_whoever_asked_insists_when_the_driver_died_over_the_question, (False,)),
        (
            any_number_in_a_lock_is_a_keeper,
            keeping_tests.test_a_process_that_is_not_the_parent_of_the_driver_is_not_taken_for_its_keeper,
            (),
        ),
    ],
)
def test_who_does_not_tell_a_keeper_is_caught(
    tmp_path: Path, mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """With real keepers; what a mutant keeps from them does not come."""
    kept: list[keeping_tests.Kept] = []

    def keep(body: str) -> keeping_tests.Kept:
        kept.append(keeping_tests.Kept(tmp_path, body))
        return kept[-1]

    def impatient() -> AbstractContextManager[None]:
        return both(mutant(), patched(keeping_tests, "WAIT_S", 10.0))

    try:
        assert_caught(impatient, test, keep, tmp_path, *arguments)
    finally:
        for one in kept:
            one.close()


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"),
    [
        (
            a_lock_does_not_say_who_claims,
            wish_tests.test_a_lock_says_under_which_name_its_driver_claims,
            (Succession(),),
        ),
        (whoever_died_unheard_was_not_asked, wish_tests.test_whoever_asked_records_it_and_an_outage_is_no_matter, ()),
        (
            a_driver_keeps_a_wish_to_itself,
            heart_tests.test_a_driver_that_fails_over_a_wish_has_told_it_to_its_keeper_and_to_standbys,
            (Driver.stop, Course.STOPPING, Course.STOPPED, False),
        ),
    ],
)
def test_a_wish_that_is_kept_from_others_is_caught(
    tmp_path: Path, mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    assert_caught(mutant, test, tmp_path, *arguments)


def test_a_lock_that_anybody_breaks_is_caught(tmp_path: Path) -> None:
    assert_caught(any_lock_is_broken, lock_tests.test_only_the_lock_of_the_silent_run_is_broken, tmp_path)


@pytest.mark.parametrize("course", [Course.STOPPED, Course.FINISHED])
def test_an_end_that_is_only_a_beat_is_caught(course: Course) -> None:
    storage = FaultyStorage(MemoryStorage())
    assert_caught(the_end_is_only_a_beat, lookout_tests.test_the_end_counts_more_than_the_beat, storage, course)
