"""Random lives of a coordinator that is asked for savepoints, against a naive model of what is visible (SV2, SV8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.protocol.checkpoints.test_coordinator_machine import CoordinatorMachine
from tests.protocol.making import cp

from headgate.model.manifest import Copied
from headgate.protocol.checkpoints.coordinator_events import (
    Acknowledged,
    AnnounceCheckpoint,
    AnswerRequest,
    ConcludeGeneration,
    DrainRequested,
    DropSavepoint,
    Effect,
    Event,
    SavepointFailed,
    SavepointOrder,
    SavepointRequested,
    SavepointWritten,
    TriggerSources,
    WriteSavepoint,
)


class SavepointMachine(CoordinatorMachine):
    """The same surroundings, and a user who wants savepoints, some of them of the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: dict[int, int] = {}
        """Savepoints that are not answered, and the newest checkpoint that had begun when they were asked for."""
        self.orders_count = 1_000
        self.carried: dict[int, str] = {}
        self.saving: list[WriteSavepoint] = []
        self.saved: set[str] = set()
        self.dropped: set[str] = set()
        self.is_healing = False

    def feed(self, event: Event) -> None:
        if isinstance(event, Acknowledged):
            event = replace(event, copied=Copied(problem="no space" if event.checkpoint % 7 == 0 else ""))
        super().feed(event)
        while self.is_healing and self.saving:
            self.saves(is_written=True)

    def follow(self, effect: Effect) -> None:
        match effect:
            case AnswerRequest() if effect.request > 1_000:
                newest_before = self.ordered.pop(effect.request)
                target = f"files-{effect.request}@/here"
                assert (effect.checkpoint is not None) == (target in self.saved)
                assert effect.checkpoint is None or effect.checkpoint > newest_before, "it began after it was asked for"
                return
            case TriggerSources() | AnnounceCheckpoint() if effect.options.target is not None:
                self.carried[effect.checkpoint] = effect.options.target
            case WriteSavepoint():
                assert self.carried[effect.checkpoint] == effect.target
                assert effect.checkpoint in self.completed
                assert effect.checkpoint % 7 != 0, "who could not write it has said so"
                covered = {c for c in self.promised if c.checkpoint <= effect.checkpoint}
                assert covered <= set(self.visible), "all output in front of it is visible (SV2)"
                assert effect.target not in self.dropped
                self.saving.append(effect)
                assert len(self.saving) <= 2, "one at a time, and that of the end"
                return
            case DropSavepoint():
                assert effect.target not in self.saved, "what is one is never removed (SV5)"
                self.dropped.add(effect.target)
                return
            case ConcludeGeneration():
                assert not self.ordered, "everybody who asked was answered"
                assert not self.saving
        super().follow(effect)

    @precondition(lambda self: self.done is None)
    @rule(ends=st.sampled_from([False, False, True]))
    def somebody_wants_a_savepoint(self, ends: bool) -> None:
        self.orders_count += 1
        order = SavepointOrder(self.orders_count, f"files-{self.orders_count}@/here")
        self.ordered[order.request] = max(self.triggered, default=0)
        self.feed(DrainRequested(order) if ends else SavepointRequested(order))

    @precondition(lambda self: self.saving)
    @rule(is_written=st.sampled_from([True, True, False]))
    def saves(self, is_written: bool) -> None:
        saving = self.saving.pop(0)
        if is_written:
            self.saved.add(saving.target)
            self.feed(SavepointWritten(saving.checkpoint))
        else:
            self.feed(SavepointFailed(saving.checkpoint, "no space"))

    @rule()
    def somebody_says_what_nobody_asked(self) -> None:
        self.feed(SavepointWritten(cp(9_999)))

    @invariant()
    def pending_is_what_was_triggered_and_has_not_ended(self) -> None:
        gone = self.aborted | set(self.completed)
        assert set(self.machine.pending) == self.triggered - gone
        forced = {c for c in self.machine.pending if c in self.carried}
        assert len(self.machine.pending) <= self.max_concurrent + 2
        assert len(forced) <= 2, "one at a time, and that of the end"

    def teardown(self) -> None:
        self.is_healing = True
        while self.saving:
            self.saves(is_written=True)
        super().teardown()


TestSavepointMachine = SavepointMachine.TestCase
pytest.mark.long(TestSavepointMachine)
TestSavepointMachine.settings = settings(max_examples=60, stateful_step_count=40)
