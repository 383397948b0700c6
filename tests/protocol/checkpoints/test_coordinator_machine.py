"""Random lives of a coordinator against a naive model: sets of what is durable, promised and visible."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.protocol.checkpoints.coordinating import (
    GENERATION,
    INTERVAL,
    PAUSE,
    STARTED,
    A,
    B,
    ack,
    coordinator,
    decline,
    expiry,
    finish,
    handle_of,
    reserved,
    written,
)
from tests.protocol.making import committable, cp

from headgate.model.ids import SubtaskId
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import Commit
from headgate.protocol.checkpoints.coordinator_events import (
    AnnounceCheckpoint,
    AnswerRequest,
    ArmTimer,
    CallHook,
    CheckpointRequested,
    CommitFailed,
    CommitRetryTimer,
    CommitSucceeded,
    ConcludeGeneration,
    DeleteParts,
    DrainRequested,
    DrainSources,
    DropCheckpoint,
    Effect,
    Event,
    FailGeneration,
    HookAnswered,
    HookFailed,
    HookTimer,
    ManifestFailed,
    NotifyAbort,
    NotifyComplete,
    PauseTimer,
    ReserveFailed,
    ReserveId,
    SourceReadsOn,
    TimerFired,
    TriggerSources,
    WriteManifest,
)
from headgate.protocol.machine import Ignored

SUBTASKS = (A, B)


class CoordinatorMachine(RuleBasedStateMachine):
    """The coordinator's surroundings: they answer late, twice, or with a failure."""

    @initialize(
        max_concurrent=st.integers(1, 3),
        min_pause_ms=st.sampled_from([0, 50]),
        hooks_count=st.sampled_from([0, 0, 1, 2]),
    )
    def start(self, max_concurrent: int, min_pause_ms: int, hooks_count: int) -> None:
        self.max_concurrent = max_concurrent
        self.machine = coordinator(
            max_concurrent=max_concurrent,
            min_pause_ms=min_pause_ms,
            tolerable_failures=1_000_000,
            retained_count=2,
            hooks={f"h{n}": 100 for n in range(hooks_count)},
        )
        self.hooks = {f"h{n}" for n in range(hooks_count)}
        self.calls: list[tuple[int, str]] = []
        self.answers: dict[int, dict[str, bytes]] = {}
        self.sources_triggered: set[int] = set()
        self.reserving: int | None = None
        self.ids: list[int] = []
        self.triggered: set[int] = set()
        self.acked: dict[int, set[object]] = {}
        self.aborted: set[int] = set()
        self.completed: list[int] = []
        self.retained: list[int] = []
        self.manifest: WriteManifest | None = None
        self.held: tuple[Committable, ...] = ()
        self.promised: list[Committable] = []
        self.visible: list[Committable] = []
        self.commit: Commit | None = None
        self.is_retry_armed = self.is_pause_armed = False
        self.finals: set[int] = set()
        self.is_drained = False
        self.drained: set[int] = set()
        self.finished: set[object] = set()
        self.done: ConcludeGeneration | None = None
        self.asked: dict[int, int] = {}
        self.requests_count = 0
        self.feed(STARTED)

    # -- follow the effects -----------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        for effect in self.machine.handle(event):
            self.follow(effect)

    def follow(self, effect: Effect) -> None:
        assert self.done is None or isinstance(effect, Ignored), "nothing follows the end"
        match effect:
            case ReserveId():
                assert self.reserving is None
                assert not self.ids or effect.checkpoint > self.ids[-1], "an id is never used twice"
                self.ids.append(effect.checkpoint)
                self.reserving = effect.checkpoint
            case AnnounceCheckpoint():
                assert self.hooks
                self.begins(effect.checkpoint)
            case CallHook():
                self.calls.append((effect.checkpoint, effect.hook))
            case TriggerSources():
                assert effect.checkpoint not in self.sources_triggered, "once"
                self.sources_triggered.add(effect.checkpoint)
                if self.hooks:
                    assert self.answers[effect.checkpoint].keys() == self.hooks, "behind every hook (EI1)"
                else:
                    self.begins(effect.checkpoint)
            case DrainSources():
                assert not self.is_drained, "once"
                self.is_drained = True
            case WriteManifest():
                assert self.manifest is None
                assert effect.is_draining == (effect.checkpoint in self.drained), "marked: drained at the trigger (E9)"
                assert self.acked[effect.checkpoint] == set(SUBTASKS)
                assert {h.hook: h.data for h in effect.hooks} == self.answers.get(effect.checkpoint, {})
                assert {h.hook for h in effect.hooks} == self.hooks, "what every hook returned is in it (EI4)"
                assert effect.checkpoint not in self.aborted
                assert effect.is_final == (effect.checkpoint in self.finals), "final: all had finished at the trigger"
                inside = {*effect.carried, *(c for e in effect.entries for c in e.committables)}
                assert set(self.promised) - set(self.visible) <= inside, "what is promised and unconfirmed is carried"
                self.manifest = effect
            case NotifyAbort():
                assert effect.checkpoint not in self.completed
                self.aborted.add(effect.checkpoint)
            case NotifyComplete():
                assert effect.checkpoint == self.completed[-1]
            case DeleteParts():
                owned = {part for c in self.retained for s in SUBTASKS for part in handle_of(s, c)}
                assert not owned & set(effect.parts), "a file of a retained checkpoint is never deleted"
            case DropCheckpoint():
                assert self.retained.pop(0) == effect.checkpoint
                assert self.retained, "one is always left"
            case Commit():
                assert self.commit is None, "one commit at a time"
                assert effect.permit.checkpoint in self.completed
                assert set(effect.committables) <= set(self.promised)
                self.commit = effect
            case ArmTimer():
                self.is_retry_armed = self.is_retry_armed or effect.timer == CommitRetryTimer()
                self.is_pause_armed = self.is_pause_armed or effect.timer == PauseTimer()
            case AnswerRequest():  # C60, C61
                newest_before = self.asked.pop(effect.request)
                assert (effect.checkpoint is None) == bool(effect.reason)
                if effect.checkpoint is not None:
                    assert effect.checkpoint == self.completed[-1]
                    assert effect.checkpoint > newest_before, "it began after it was asked for"
            case ConcludeGeneration():
                assert not self.asked, "everybody who asked was answered"
                assert effect.is_final
                assert effect.checkpoint in self.finals
                assert set(self.promised) == set(self.visible), "all is committed"
                self.done = effect
            case FailGeneration():
                raise AssertionError(effect.reason)

    def begins(self, checkpoint: int) -> None:
        """From here on a source may be cut."""
        self.triggered.add(checkpoint)
        self.acked[checkpoint] = set()
        if self.is_drained:
            self.drained.add(checkpoint)
        if len(self.finished) == len(SUBTASKS):
            self.finals.add(checkpoint)

    # -- what may happen --------------------------------------------------------------------------------------------

    @rule(event=st.sampled_from([INTERVAL, CheckpointRequested()]))
    def wants(self, event: Event) -> None:
        self.feed(event)

    @precondition(lambda self: self.done is None)
    @rule()
    def somebody_asks(self) -> None:
        self.requests_count += 1
        self.asked[self.requests_count] = max(self.triggered, default=0)
        self.feed(CheckpointRequested(self.requests_count))

    @precondition(lambda self: self.is_pause_armed)
    @rule()
    def pause_ends(self) -> None:
        self.is_pause_armed = False
        self.feed(PAUSE)

    @precondition(lambda self: self.reserving is not None)
    @rule(succeeds=st.sampled_from([True, True, True, False]))
    def reserve(self, succeeds: bool) -> None:
        checkpoint, self.reserving = self.reserving, None
        assert checkpoint is not None
        self.feed(reserved(checkpoint) if succeeds else ReserveFailed(cp(checkpoint)))

    @precondition(lambda self: self.triggered)
    @rule(data=st.data(), subtask=st.sampled_from(SUBTASKS))
    def acknowledge(self, data: st.DataObject, subtask: object) -> None:
        checkpoint = data.draw(st.sampled_from(sorted(self.triggered)))
        if subtask is A and A not in self.acked[checkpoint]:
            covered = self.completed[-1] if self.completed else 0
            mine = tuple(c for c in self.held if c.checkpoint > covered)
            self.held = tuple(sorted({*mine, committable(checkpoint)}, key=lambda c: c.checkpoint))
        carried = tuple(c for c in self.held if c.checkpoint <= checkpoint) if subtask is A else ()
        self.acked[checkpoint].add(subtask)
        self.feed(ack(subtask, checkpoint, *carried))  # type: ignore[arg-type]

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), outcome=st.sampled_from(["answers", "answers", "answers twice", "fails", "is late"]))
    def hook_speaks(self, data: st.DataObject, outcome: str) -> None:
        checkpoint, hook = data.draw(st.sampled_from(self.calls))
        match outcome:
            case "fails":
                self.calls.remove((checkpoint, hook))
                self.feed(HookFailed(cp(checkpoint), hook))
            case "is late":
                self.feed(TimerFired(HookTimer(cp(checkpoint), hook)))
            case _:
                self.answers_hook(checkpoint, hook, stays=outcome == "answers twice")

    def answers_hook(self, checkpoint: int, hook: str, *, stays: bool = False) -> None:
        if not stays:
            self.calls.remove((checkpoint, hook))
        data = b"%d" % len(self.calls)
        self.answers.setdefault(checkpoint, {}).setdefault(hook, data)
        self.feed(HookAnswered(cp(checkpoint), hook, data))

    @precondition(lambda self: self.triggered)
    @rule(data=st.data(), make=st.sampled_from([decline, expiry]))
    def ends_early(self, data: st.DataObject, make: object) -> None:
        checkpoint = data.draw(st.sampled_from(sorted(self.triggered)))
        self.feed(make(checkpoint))  # type: ignore[operator]

    @rule(data=st.data(), source=st.sampled_from(SUBTASKS))
    def a_source_reads_on(self, data: st.DataObject, source: SubtaskId) -> None:
        uncut = [c for c in sorted(self.triggered) if source not in self.acked[c]]
        named = data.draw(st.lists(st.sampled_from(uncut), unique=True)) if uncut else []
        self.feed(SourceReadsOn(GENERATION, source, tuple(cp(checkpoint) for checkpoint in named)))

    @precondition(lambda self: self.manifest is not None)
    @rule(succeeds=st.sampled_from([True, True, True, False]))
    def write(self, succeeds: bool) -> None:
        manifest, self.manifest = self.manifest, None
        assert manifest is not None
        if not succeeds:
            return self.feed(ManifestFailed(manifest.checkpoint))
        assert not self.completed or manifest.checkpoint > self.completed[-1], "completions ascend"
        self.completed.append(manifest.checkpoint)
        self.retained.append(manifest.checkpoint)
        fresh = {c for e in manifest.entries for c in e.committables} - set(self.promised)
        self.promised += sorted(fresh, key=lambda c: c.checkpoint)
        return self.feed(written(manifest.checkpoint))

    @precondition(lambda self: self.commit is not None and not self.is_retry_armed)
    @rule(succeeds=st.sampled_from([True, True, False]))
    def commits(self, succeeds: bool) -> None:
        order, self.commit = self.commit, None
        assert order is not None
        if succeeds:
            self.visible += [c for c in order.committables if c not in self.visible]
            assert [c for c in self.promised if c in self.visible] == self.promised[: len(self.visible)], "in order"
            return self.feed(CommitSucceeded(order.permit.checkpoint))
        return self.feed(CommitFailed(order.permit.checkpoint, "no answer", is_transient=True))

    @precondition(lambda self: self.is_retry_armed)
    @rule()
    def commit_again(self) -> None:
        self.is_retry_armed = False
        self.feed(TimerFired(CommitRetryTimer()))

    @rule(subtask=st.sampled_from(SUBTASKS), chance=st.integers(0, 9))
    def finishes(self, subtask: object, chance: int) -> None:
        if chance:
            return
        self.finished.add(subtask)
        self.feed(finish(subtask))  # type: ignore[arg-type]

    @rule(chance=st.integers(0, 4))
    def drains(self, chance: int) -> None:
        if chance == 0:
            self.feed(DrainRequested())

    @invariant()
    def pending_is_what_was_triggered_and_has_not_ended(self) -> None:
        gone = self.aborted | set(self.completed)
        assert set(self.machine.pending) == self.triggered - gone
        assert len(self.machine.pending) <= self.max_concurrent + 1
        assert self.machine.last_completed == (self.completed[-1] if self.completed else 0)

    def teardown(self) -> None:
        """Heal: every answer is prompt and good from now on. Then the run must end, with all committed."""
        if not hasattr(self, "machine"):
            return
        for subtask in SUBTASKS:
            self.finished.add(subtask)
            self.feed(finish(subtask))
        for _ in range(40):
            if self.done is not None:
                return
            if self.is_pause_armed:
                self.pause_ends()
            if self.reserving is not None:
                checkpoint, self.reserving = self.reserving, None
                self.feed(reserved(checkpoint))
            for checkpoint, hook in list(self.calls):
                self.answers_hook(checkpoint, hook)
            for checkpoint in self.machine.pending:
                for subtask in self.machine.missing(checkpoint) if checkpoint in self.machine.pending else ():
                    self.acked[checkpoint].add(subtask)
                    self.feed(ack(subtask, checkpoint))
            if self.manifest is not None:
                manifest, self.manifest = self.manifest, None
                self.completed.append(manifest.checkpoint)
                self.retained.append(manifest.checkpoint)
                fresh = {c for e in manifest.entries for c in e.committables} - set(self.promised)
                self.promised += sorted(fresh, key=lambda c: c.checkpoint)
                self.feed(written(manifest.checkpoint))
            if self.is_retry_armed:
                self.commit_again()
            if self.commit is not None:
                order, self.commit = self.commit, None
                self.visible += [c for c in order.committables if c not in self.visible]
                self.feed(CommitSucceeded(order.permit.checkpoint))
        raise AssertionError(f"the run does not end: {self.machine.story}")


TestCoordinatorMachine = CoordinatorMachine.TestCase
pytest.mark.long(TestCoordinatorMachine)
TestCoordinatorMachine.settings = settings(max_examples=60, stateful_step_count=40)
