"""Mutants of checkpoints on request: whom a checkpoint serves, and who is answered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught
from tests.protocol.checkpoints import test_requests as request_tests
from tests.protocol.checkpoints.coordinating import expiry
from tests.sim.product.patching import around, skipped

from headgate.protocol.checkpoints import coordinator as machine
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.checkpoints.requests import Requests


def any_completion_answers_everybody() -> AbstractContextManager[None]:  # C60
    def completed(call: Any, self: Any, checkpoint: Any) -> Any:
        self._served.setdefault(checkpoint, []).extend(self._waiting)
        self._waiting = []
        return call(self, checkpoint)

    return around(Requests, "completed", completed)


def a_newer_completion_answers_nobody() -> AbstractContextManager[None]:  # C61
    def completed(call: Any, self: Any, checkpoint: Any) -> Any:
        return [machine.AnswerRequest(r, checkpoint) for r in self._served.pop(checkpoint, [])]

    return around(Requests, "completed", completed)


def nobody_hears_of_a_failure() -> AbstractContextManager[None]:  # C61
    return skipped(Requests, "failed", [])


def requests_wait_for_a_run_that_ends() -> AbstractContextManager[None]:  # C62
    def on_requested(call: Any, self: Any, request: Any) -> Any:
        return call(self, None if self.phase is not machine.Phase.RUNNING else request)

    return around(machine.Coordinator, "_on_requested", on_requested)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (any_completion_answers_everybody, request_tests.test_a_checkpoint_that_had_begun_before_serves_no_request, ()),
    (a_newer_completion_answers_nobody, request_tests.test_a_newer_completion_answers_too, ()),
    (
        nobody_hears_of_a_failure,
        request_tests.test_a_request_is_answered_with_the_reason_of_a_failure,
        (expiry(10), AbortReason.EXPIRED),
    ),
    (requests_wait_for_a_run_that_ends, request_tests.test_requests_are_refused_outside_the_run, ()),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT)
def test_a_broken_answer_is_caught(mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]) -> None:
    assert_caught(mutant, test, *arguments)
