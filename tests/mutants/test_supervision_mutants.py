"""Mutants of supervision and recovery: who is deployed, when it is given up, and what is restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_recovery as recovery_tests
from tests.protocol.supervision import test_lives as lives_tests
from tests.protocol.supervision import test_restart as restart_tests
from tests.protocol.supervision import test_supervisor as supervisor_tests
from tests.runtime.worker import test_worker_turns as worker_tests
from tests.sim.product.patching import around, skipped

from headgate.codec import messages
from headgate.model.failure import FailureKind
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Owner
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import ObservedLog
from headgate.protocol.supervision import lives
from headgate.protocol.supervision.blame import Blames, loss_of
from headgate.protocol.supervision.events import CancelJob
from headgate.protocol.supervision.lives import Objection
from headgate.protocol.supervision.restart import RestartAfter, RestartPolicy
from headgate.protocol.supervision.roster import Roster
from headgate.protocol.supervision.supervisor import Supervisor

# -- supervision ----------------------------------------------------------------------------------------------------


def a_denial_in_recovery_is_asked_again() -> AbstractContextManager[None]:  # K5
    def on_claim_failed(call: Any, self: Any, event: Any) -> Any:
        self._has_run = True
        return call(self, dataclasses.replace(event, failure=dataclasses.replace(event.failure, kind=FailureKind.LOST)))

    return around(Supervisor, "_on_claim_failed", on_claim_failed)


def workers_of_a_failed_generation_serve_the_next() -> AbstractContextManager[None]:  # G4
    return skipped(Roster, "retire_deployed")


def a_retry_that_registers_hides_the_loss_of_a_deployed_worker() -> AbstractContextManager[None]:  # G4
    def is_current(call: Any, self: Any, attempt: Any) -> bool:
        return bool(attempt == self.newest and attempt > self._fenced)

    return around(Roster, "is_current", is_current)


def a_generation_is_deployed_with_a_worker_missing() -> AbstractContextManager[None]:  # G3
    return patched(Roster, "is_complete", property(lambda self: self.count >= max(self.workers_count - 1, 1)))


def the_limit_of_restarts_is_ignored() -> AbstractContextManager[None]:  # C40
    return around(RestartPolicy, "_limited", lambda call, self, attempts, delay_ms: RestartAfter(delay_ms))


def a_peer_that_is_heard_first_is_believed() -> AbstractContextManager[None]:  # G15
    return skipped(Supervisor, "_blames_peer", False)


def a_worker_that_said_why_it_leaves_is_the_cause() -> AbstractContextManager[None]:  # G15
    return around(Blames, "lost", lambda call, self, event: loss_of(event))


def nobody_is_asked_who_left_first() -> AbstractContextManager[None]:  # G15
    return around(Blames, "_cause", lambda call, self: self.first)


def who_left_without_a_word_is_waited_for() -> AbstractContextManager[None]:  # G15
    return skipped(Blames, "_cause")


def a_blame_outlives_its_generation() -> AbstractContextManager[None]:  # G15
    return skipped(Blames, "clear")


def a_worker_names_no_peer() -> AbstractContextManager[None]:  # G15
    return around(messages, "failed", lambda call, generation, failure, peer=None: call(generation, failure))


def workers_that_do_not_come_back_end_the_run() -> AbstractContextManager[None]:  # G12, as it was
    def on_register_timer(call: Any, self: Any, event: Any, timer: Any) -> Any:
        had, self._had_workers = self._had_workers, False
        try:
            return call(self, event, timer)
        finally:
            self._had_workers = had

    return around(Supervisor, "_on_register_timer", on_register_timer)


def what_ran_in_another_driver_does_not_count() -> AbstractContextManager[None]:  # G12, as it was
    def on_generation_ready(call: Any, self: Any, event: Any) -> Any:
        return call(self, dataclasses.replace(event, workers_before=0))

    return around(Supervisor, "_on_generation_ready", on_generation_ready)


def whoever_ran_before_is_waited_for() -> AbstractContextManager[None]:  # G12
    def on_generation_ready(call: Any, self: Any, event: Any) -> Any:
        count = self._roster.workers_count if event.workers_before else 0
        return call(self, dataclasses.replace(event, workers_before=count))

    return around(Supervisor, "_on_generation_ready", on_generation_ready)


def a_job_with_too_few_workers_goes_on() -> AbstractContextManager[None]:  # G12
    def on_register_timer(call: Any, self: Any, event: Any, timer: Any) -> Any:
        return [effect for effect in call(self, event, timer) if not isinstance(effect, CancelJob)]

    return around(Supervisor, "_on_register_timer", on_register_timer)


# -- recovery -------------------------------------------------------------------------------------------------------


def a_new_driver_takes_the_generation_of_the_last() -> AbstractContextManager[None]:  # R7
    def next_claim(call: Any, *arguments: Any) -> Any:
        claim = call(*arguments)
        return dataclasses.replace(claim, generation=Generation(max(claim.generation - 1, 1)))

    return around(recovery_tests, "next_claim", next_claim)


def an_id_that_was_reserved_is_used_again() -> AbstractContextManager[None]:  # R7
    def first(call: Any, log: Any, reserved: Any) -> Any:
        return call(dataclasses.replace(log, reserved=CheckpointId(0)), CheckpointId(0))

    return around(recovery_tests, "first_checkpoint", first)


def the_oldest_checkpoint_comes_first() -> AbstractContextManager[None]:  # R8
    return around(recovery, "candidates", lambda call, log: tuple(reversed(call(log))))


def damage_does_not_count() -> AbstractContextManager[None]:  # R10
    return around(
        recovery_tests, "choose", lambda call, log, damage, policy: call(log, dict.fromkeys(damage, ()), policy)
    )


def damage_of_the_only_checkpoint_starts_afresh() -> AbstractContextManager[None]:  # R11
    def choose(call: Any, *arguments: Any) -> Any:
        choice = call(*arguments)
        return recovery.StartFresh() if isinstance(choice, recovery.Refuse) else choice

    return around(recovery_tests, "choose", choose)


def an_entry_that_is_missing_is_not_missed() -> AbstractContextManager[None]:  # R9
    return skipped(ObservedLog, "lost", ())


# -- lives ----------------------------------------------------------------------------------------------------------


def nothing_stands_against_a_stranger() -> AbstractContextManager[None]:  # LV2
    return skipped(lives_tests, "objection")


def everybody_may_own_a_target() -> AbstractContextManager[None]:  # LV2
    return skipped(lives, "may_own", True)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (a_denial_in_recovery_is_asked_again, supervisor_tests.test_a_claim_that_failed_ends_the_run, ()),
    (workers_of_a_failed_generation_serve_the_next, supervisor_tests.test_workers_of_a_used_up_attempt_are_refused, ()),
    (
        a_retry_that_registers_hides_the_loss_of_a_deployed_worker,
        supervisor_tests.test_a_retry_that_registers_does_not_hide_the_loss_of_a_deployed_worker,
        (),
    ),
    (a_generation_is_deployed_with_a_worker_missing, supervisor_tests.test_the_claim_may_come_before_the_workers, ()),
    (
        a_peer_that_is_heard_first_is_believed,
        supervisor_tests.test_who_is_blamed_is_heard_before_its_peer_is_believed,
        (),
    ),
    (
        a_worker_that_said_why_it_leaves_is_the_cause,
        supervisor_tests.test_who_is_blamed_is_heard_before_its_peer_is_believed,
        (),
    ),
    (nobody_is_asked_who_left_first, supervisor_tests.test_a_blame_is_followed_to_the_one_who_left_first, ()),
    (
        who_left_without_a_word_is_waited_for,
        supervisor_tests.test_who_is_blamed_and_gone_without_a_word_is_the_cause,
        (),
    ),
    (a_blame_outlives_its_generation, supervisor_tests.test_nobody_waits_for_ever_for_who_is_blamed, ()),
    (
        workers_that_do_not_come_back_end_the_run,
        supervisor_tests.test_workers_that_do_not_come_back_are_a_failure_that_the_restart_strategy_decides_about,
        (),
    ),
    (
        a_job_with_too_few_workers_goes_on,
        supervisor_tests.test_workers_that_do_not_come_back_are_a_failure_that_the_restart_strategy_decides_about,
        (),
    ),
    (
        what_ran_in_another_driver_does_not_count,
        supervisor_tests.test_an_heir_waits_for_workers_as_often_as_the_restart_strategy_says,
        (),
    ),
    (
        whoever_ran_before_is_waited_for,
        supervisor_tests.test_an_heir_waits_for_workers_as_often_as_the_restart_strategy_says,
        (),
    ),
    (a_worker_names_no_peer, worker_tests.test_a_worker_says_which_peer_it_cannot_go_on_without, ()),
    (the_limit_of_restarts_is_ignored, restart_tests.test_fixed_delay_restarts_as_often_as_allowed, ()),
    (a_new_driver_takes_the_generation_of_the_last, recovery_tests.test_a_claim_follows_the_newest_entry, ()),
    (
        an_id_that_was_reserved_is_used_again,
        recovery_tests.test_ids_continue_above_every_completed_one_even_if_none_is_reserved,
        (),
    ),
    (the_oldest_checkpoint_comes_first, recovery_tests.test_the_newest_completed_checkpoint_is_restored, ()),
    (damage_does_not_count, recovery_tests.test_a_damaged_checkpoint_is_named_and_the_one_before_it_used, ()),
    (damage_of_the_only_checkpoint_starts_afresh, recovery_tests.test_a_pipeline_never_starts_fresh_over_damage, ()),
    (an_entry_that_is_missing_is_not_missed, recovery_tests.test_a_damaged_or_lost_entry_is_named_or_refused, ()),
    (
        nothing_stands_against_a_stranger,
        lives_tests.test_what_stands_against_a_start,
        (Owner(lives_tests.life("other")), 1, Objection.OTHER_LIFE),
    ),
    (
        everybody_may_own_a_target,
        lives_tests.test_what_stands_against_a_start,
        (Owner(lives_tests.life("other")), 1, Objection.OTHER_LIFE),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_machine_finds_it(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    test(*arguments)
    assert_caught(mutant, test, *arguments)
