"""``headgate run --standby``: wait until the running driver is gone, and take over (docs/spec/standby.md).

Carries out what ``protocol.supervision.standby`` decides, in the main thread; signals end it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, assert_never

from headgate.api.foreground import run_to_end
from headgate.cli.supervisor_client import SupervisorClient
from headgate.errors import FencedError, PipelineFailed, StorageError
from headgate.model.heartbeat import Course, owner_of
from headgate.model.ids import Generation
from headgate.model.progress import PipelineHandle, RunResult
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision.standby import (
    Effect,
    Event,
    LookAtAll,
    LookAtBeat,
    Looked,
    LookFailed,
    Notice,
    Observed,
    Pause,
    PauseOver,
    Say,
    Standby,
    StandDown,
    TakeOver,
    TakeoverLost,
)
from headgate.protocol.supervision.supervisor_events import Begin
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, read_holder
from headgate.runtime.driver.remote_control import DRAIN, STOP
from headgate.runtime.driver.takeover import HeartbeatReader, Takeover, taking_over
from headgate.storage.urls import open_storage

TEXTS = {
    Notice.WATCHING: "standing by: {detail} runs it",
    Notice.NOT_STARTED: "standing by: the pipeline does not run yet; taking over if its log does not change for a "
    "minute",
    Notice.STOPPED: "standing by: the pipeline was stopped by its user; waiting until it is started again",
    Notice.FAILED_FOR_GOOD: "standing by: it failed, and starting it again would not help; waiting until the "
    "cause is fixed and it is started again: {detail}",
    Notice.UNREACHABLE: "standing by, without seeing anything: {detail}",
    Notice.OUTRUN: "another process was quicker; standing by again",
    Notice.TAKING_OVER: "taking over: {detail} is gone",
}
ENDS = {
    Course.FINISHED: "has processed all its input: there is nothing to stand by for",
    Course.DRAINED: "was drained and does not continue: there is nothing to stand by for",
}


@dataclass(slots=True)
class StandbyRunner:
    """One standby.

    Attributes:
        root, pipeline: what it watches.
        client: connection to its supervisor, if it has one.
        start: starts the pipeline; called for a takeover.
        say: tells the user a notice and its sentence.
        check: called before every look; raises when this process could not take over any more.
        silence_ms: how long the driver that runs may say nothing; None: as long as ``Standby`` lets it.
    """

    root: str
    pipeline: str
    client: SupervisorClient
    start: Callable[[], PipelineHandle]
    say: Callable[[str, str], None]
    check: Callable[[], None] = lambda: None
    silence_ms: int | None = None
    _machine: Standby = field(init=False)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock_of: tuple[Generation | None, str | None] = (None, None)

    def __post_init__(self) -> None:
        self._machine = Standby(self.silence_ms)

    def run(self) -> RunResult | None:
        """Wait, and run the pipeline when it is our turn; None: it ended or we were stopped before.

        Raises:
            FencedError: another driver took over from this one (SB12).
            PipelineFailed, UsageError: see ``Pipeline.run``.
        """
        lookout = HeartbeatReader(open_storage(self.root), self.pipeline, self.client.claimant)
        event: Event | None = Begin()
        with self._ending_on_signals():
            while event is not None and not self._ended.is_set():
                effects = self._machine.handle(event)
                event = None
                for effect in effects:
                    if isinstance(effect, TakeOver):
                        result = self._take_over(effect)
                        if result is not None:
                            return result
                        event = TakeoverLost()
                    else:
                        event = self._run(effect, lookout) or event
        return None

    @contextmanager
    def _ending_on_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before: dict[int, Any] = {n: signal.signal(n, lambda number, frame: self._ended.set()) for n in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _run(self, effect: Effect, lookout: HeartbeatReader) -> Event | None:
        """Carry out ``effect``; return what came of it, if anything."""
        match effect:
            case LookAtAll():
                return self._look(lookout.all, is_all=True)
            case LookAtBeat():
                generation = effect.generation
                return self._look(lambda: lookout.beat(generation), is_all=False)
            case Pause():
                return None if self._ended.wait(effect.after_ms / 1000) else PauseOver()
            case Say():
                names_an_owner = effect.notice in (Notice.WATCHING, Notice.TAKING_OVER)
                owner = owner_of(effect.detail) or "its process"
                text = TEXTS[effect.notice].format(detail=owner if names_an_owner else effect.detail)
                self.say(effect.notice.name.lower().replace("_", "-"), text)
            case StandDown():
                self.say("ended", f"{self.pipeline} {ENDS[effect.course]}")
            case TakeOver() | Ignored():
                return None
            case _:
                assert_never(effect)
        return None

    def _look(self, look: Callable[[], Observed], *, is_all: bool) -> Event:
        self.check()
        began_ms = _now_ms()
        try:
            observed = look()
        except StorageError as error:
            return LookFailed(str(error))
        if is_all and observed.generation != self._lock_of[0]:  # at the first sight: later it may be an heir's (SB8)
            holder = read_holder(self.root, self.pipeline)
            self._lock_of = observed.generation, None if holder is None else holder.nonce
        return Looked(began_ms, _now_ms(), observed, is_all)

    def _take_over(self, effect: TakeOver) -> RunResult | None:
        """Run the pipeline; None when another process was quicker (SB9)."""
        claimed: list[Generation] = []

        def tell(generation: Generation) -> None:
            claimed.append(generation)
            self.client.report_claim(generation)

        def start() -> PipelineHandle:
            self.client.report_listening()
            handle = self.start()
            if effect.drain:  # SB10: as its user would
                os.kill(os.getpid(), DRAIN)
            if self._ended.is_set():  # Ctrl-C, while it started
                os.kill(os.getpid(), STOP)
            return handle

        try:
            client = self.client
            place = Takeover(
                client.claimant,
                effect.after,
                tell,
                self._lock_of[1],
                client.report_course,
                client.supervisor_pid,
                client.restarts,
            )
            with taking_over(place):
                return run_to_end(start)
        except AlreadyRunning:
            return None
        except FencedError:
            if claimed:
                raise
            return None


def jvm_check(is_alive: Callable[[], bool]) -> Callable[[], None]:
    """Return a check of the JVM that a standby keeps ready."""

    def check() -> None:
        if not is_alive():
            raise PipelineFailed("the JVM that this standby kept ready has ended; start the standby again")

    return check


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
