"""Mutants of forgetting outcomes at a start: never, too much, or at the price of the start. Each is caught."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_forgetting as forgetting

from headgate.errors import StorageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.commit import promised_by, promised_from
from headgate.protocol.checkpoints.recovery import ObservedLog
from headgate.runtime.driver import claims


def only_long_runs_forget() -> AbstractContextManager[None]:
    return patched(claims, "_forget", lambda commits, observed, around, note: None)


def damage_asks_for_nothing() -> AbstractContextManager[None]:
    def forgettable(log: ObservedLog) -> CheckpointId | None:
        contents = (entry.content for entry in log.entries)
        return promised_from(content for content in contents if isinstance(content, Manifest))

    return patched(claims, "forgettable", forgettable)


def a_target_that_cannot_forget_ends_the_start() -> AbstractContextManager[None]:
    def forget(commits: Any, observed: ObservedLog, around: Any, note: Any) -> None:
        before = claims.forgettable(observed)
        if before is not None:
            commits.forget(before, promised_by(observed))

    return patched(claims, "_forget", forget)


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"),
    [
        (only_long_runs_forget, forgetting.test_runs_of_one_checkpoint_each_leave_few_outcomes, (3,)),
        (
            damage_asks_for_nothing,
            forgetting.test_nothing_is_forgotten_that_a_damaged_checkpoint_may_ask_for,
            (),
        ),
        (
            a_target_that_cannot_forget_ends_the_start,
            forgetting.test_a_target_that_cannot_forget_does_not_end_a_start,
            (StorageError("forget", "db", "busy"),),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_caught_while_outcomes_are_forgotten(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[Any, ...], tmp_path: Path
) -> None:  # K25
    assert_caught(mutant, test, tmp_path, *arguments)
