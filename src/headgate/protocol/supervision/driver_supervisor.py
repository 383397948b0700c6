"""Keeps a driver running: starts it as a child, and again when it died.

One ``DriverSupervisor`` per ``headgate run --supervised``. Counterpart: ``cli.supervisor``, the process that
interprets, and the child's end. Source: KR1–KR15 of docs/spec/driver-supervisor.md. Never looks at checkpoints: what a
driver goes on from, and whether it may, the driver finds out.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.config import RestartStrategy
from headgate.model.failure import ExitCode
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Course
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.supervision.restart_policy import RestartPolicy, StayDown
from headgate.protocol.supervision.supervisor_events import Begin


class Command(Enum):
    """What a signal asks for."""

    STOP = "stop"
    INTERRUPT = "interrupt"
    DRAIN = "drain"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class ChildListens:
    """EVENT: the child takes every signal from now on."""


@dataclass(frozen=True, slots=True)
class ChildClaimed:
    """EVENT: the child has claimed ``generation``."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class ChildHeard:
    """EVENT: the child's user has asked it, past its supervisor, to stop (also to cancel) or to drain.

    ``course``: ``STOPPING`` or ``DRAINING``.
    """

    course: Course


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """EVENT: the child is gone, and so is what it left running.

    ``status``: its exit code; negative: killed by that signal. None: it could not be started, ``problem`` says why.
    """

    status: int | None
    at_ms: int
    jitter: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CommandReceived:
    """EVENT: a signal came."""

    command: Command


@dataclass(frozen=True, slots=True)
class DelayOver:
    """EVENT: the delay before a restart has passed."""


Event: TypeAlias = Begin | ChildListens | ChildClaimed | ChildHeard | ChildEnded | CommandReceived | DelayOver


@dataclass(frozen=True, slots=True)
class StartChild:
    """EFFECT: start a driver. ``after``: the newest generation that one of its predecessors claimed (KR10)."""

    after: Generation | None


@dataclass(frozen=True, slots=True)
class Tell:
    """EFFECT: send the child the signal of ``command``."""

    command: Command


@dataclass(frozen=True, slots=True)
class ArmDelay:
    """EFFECT: ``DelayOver`` after this time."""

    after_ms: int


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """EFFECT: say that, why and when the driver is started again, for the ``count``-th time."""

    ended: ChildEnded
    delay_ms: int
    count: int


@dataclass(frozen=True, slots=True)
class ExitWith:
    """EFFECT: end the supervisor with this exit code. ``why``: what the child has not said itself, or ""."""

    code: int
    why: str = ""


Effect: TypeAlias = StartChild | Tell | ArmDelay | ReportRestart | ExitWith | Ignored


class Phase(Enum):
    """What the supervisor waits for."""

    CREATED = "Begin"
    RUNNING = "the end of the child"
    PAUSING = "the delay of the restart"
    ENDED = "nothing"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.PAUSING, Phase.ENDED}),
    Phase.PAUSING: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}

SIGNAL_BASE = 128
"""A shell's exit code for a process that a signal killed is this and the number of the signal."""

NOT_DONE = (
    "the driver was asked to stop and ended before it had said that it was done, so its last checkpoint may be "
    "missing; it is not started again, and the same command continues from the newest checkpoint there is"
)


class DriverSupervisor(Machine):
    """Decides whether and when a driver is started again."""

    def __init__(self, strategy: RestartStrategy, *, is_standby: bool = False) -> None:
        """``is_standby``: the child waits for its turn, so it is not over when another driver replaced it (KR3)."""
        super().__init__()
        self._policy = RestartPolicy(strategy)
        self._is_standby = is_standby
        self._phase = Phase.CREATED
        self._is_listening = False
        self._claimed: Generation | None = None
        self._is_stop_wanted = False
        self._is_drain_wanted = False
        self._is_checkpoint_wanted = False
        self._restarts_count = 0

    @property
    def phase(self) -> Phase:
        """What the supervisor waits for."""
        return self._phase

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        match event:
            case Begin():
                if self._phase is not Phase.CREATED:
                    raise self._violation("begun twice")
                effects = self._start()
            case ChildListens():
                effects = self._on_listens()
            case ChildClaimed():
                effects = self._on_claimed(event)
            case ChildHeard():
                effects = self._on_heard(event)
            case ChildEnded():
                effects = self._on_ended(event)
            case CommandReceived():
                effects = self._on_command(event.command)
            case DelayOver():
                effects = self._start() if self._phase is Phase.PAUSING else [Ignored("no restart is due")]
            case _:
                assert_never(event)
        self._check()
        return effects

    def _start(self) -> list[Effect]:
        self._enter(Phase.RUNNING)
        return [StartChild(self._claimed)]

    # -- the child --------------------------------------------------------------------------------------------------

    def _on_listens(self) -> list[Effect]:
        if self._phase is not Phase.RUNNING:
            return [Ignored("the child is gone")]
        self._is_listening = True
        # a drain is passed on to every child (KR7), a checkpoint to one
        waiting = [(self._is_drain_wanted, Command.DRAIN), (self._is_checkpoint_wanted, Command.CHECKPOINT)]
        self._is_checkpoint_wanted = False
        effects: list[Effect] = [Tell(command) for is_wanted, command in waiting if is_wanted]
        return effects or [Ignored("nothing was requested")]

    def _on_claimed(self, event: ChildClaimed) -> list[Effect]:
        self._claimed = max(event.generation, self._claimed or event.generation)  # KR10
        return [Ignored("kept for the next child")]

    def _on_heard(self, event: ChildHeard) -> list[Effect]:
        """Keep what the user wants in case the child dies before it is done (KR13)."""
        if event.course is Course.DRAINING:
            self._is_drain_wanted = True  # KR7
        else:
            self._is_stop_wanted = True  # KR6
        return [Ignored("kept in case the child dies")]

    def _on_ended(self, event: ChildEnded) -> list[Effect]:
        if self._phase is not Phase.RUNNING:
            raise self._violation("a child ended that was not started")
        self._is_listening = False
        if self._is_over(event.status):  # KR3
            return self._end(event, "")
        if self._is_stop_wanted:  # KR6; a standby that was replaced has said so itself
            return self._end(event, "" if event.status == ExitCode.REPLACED else NOT_DONE)
        decision = self._policy.on_failure(event.at_ms, event.jitter)  # KR2, KR11
        if isinstance(decision, StayDown):
            return self._end(event, decision.reason)  # KR5
        self._restarts_count += 1
        self._enter(Phase.PAUSING)
        return [ReportRestart(event, decision.delay_ms, self._restarts_count), ArmDelay(decision.delay_ms)]

    def _is_over(self, status: int | None) -> bool:
        if status == ExitCode.REPLACED:
            return not self._is_standby
        return status in (ExitCode.DONE, ExitCode.USAGE, ExitCode.FOR_GOOD)

    def _end(self, event: ChildEnded, why: str) -> list[Effect]:
        self._enter(Phase.ENDED)
        # as a shell says it: callers see no difference to a driver without a supervisor
        status = ExitCode.FAILED if event.status is None else event.status
        return [ExitWith(status if status >= 0 else SIGNAL_BASE - status, why)]

    # -- signals ----------------------------------------------------------------------------------------------------

    def _on_command(self, command: Command) -> list[Effect]:
        if self._phase in (Phase.CREATED, Phase.ENDED):
            return [Ignored("there is no child")]
        if command in (Command.STOP, Command.INTERRUPT):
            return self._on_stop(command)
        if command is Command.DRAIN:
            self._is_drain_wanted = True  # KR7
        if self._phase is Phase.RUNNING and self._is_listening:
            return [Tell(command)]
        self._is_checkpoint_wanted |= command is Command.CHECKPOINT
        return [Ignored("sent when the child listens")]

    def _on_stop(self, command: Command) -> list[Effect]:
        self._is_stop_wanted = True
        if self._phase is Phase.RUNNING:
            return [Tell(command)]  # at once: a child that does not listen yet dies of it, and has done nothing
        self._enter(Phase.ENDED)
        why = "stopped between two drivers; the same command continues from the last completed checkpoint"
        return [ExitWith(ExitCode.DONE, why)]  # KR8

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} does not lead to {phase}"
        self._phase = phase

    def _check(self) -> None:
        if self._phase is not Phase.RUNNING:
            assert not self._is_listening, "only a child that runs listens"
        if self._phase is Phase.PAUSING:
            assert not self._is_stop_wanted, "a child that was asked to stop is not started again (KR6)"
