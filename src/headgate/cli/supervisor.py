"""Supervisor process of ``headgate run --supervised``, and the driver's connection to it
(docs/spec/driver-supervisor.md).

The supervisor starts the driver again when it ends, as ``protocol.supervision.driver_supervisor`` decides. It stays
small on purpose: no Spark, no Arrow, no user code. The driver dies with it and reports to it (KR7, KR10, KR11, KR13).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import Any, assert_never

from headgate.dataclass import dataclass
from headgate.display.progress import duration_text
from headgate.errors import UsageError
from headgate.model import config
from headgate.model.config import RestartStrategy
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Course, driver_id, supervisor_id
from headgate.plain_text import printable
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision.driver_supervisor import (
    ArmDelay,
    ChildClaimed,
    ChildEnded,
    ChildHeard,
    ChildListens,
    Command,
    CommandReceived,
    DelayOver,
    DriverSupervisor,
    Effect,
    Event,
    ExitWith,
    ReportRestart,
    StartChild,
    Tell,
)
from headgate.protocol.supervision.supervisor_events import Begin

SUPERVISED = "HEADGATE_SUPERVISED"
"""Environment variable of a child: JSON of ``Terms``."""

LISTENING = "listening"
"""Report of a child that handles every signal from now on."""

SIGNALS = {
    signal.SIGTERM: Command.STOP,
    signal.SIGINT: Command.INTERRUPT,
    signal.SIGUSR1: Command.DRAIN,
    signal.SIGUSR2: Command.CHECKPOINT,
}
_NUMBERS = {command: number for number, command in SIGNALS.items()}
_STRATEGIES: dict[str, Callable[..., RestartStrategy]] = {
    "NoRestart": config.NoRestart,
    "FixedDelay": config.FixedDelay,
    "ExponentialDelay": config.ExponentialDelay,
    "FailureRate": config.FailureRate,
}

SHOW_CURSOR = "\x1b[?25h\n"
"""Undoes what a killed progress table has left on a terminal."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a child gets from its supervisor.

    Attributes:
        supervisor_pid: the process id of its supervisor; the child dies with it.
        pipe: the file descriptor for its reports: ``listening``, what its user requested, the generation it claimed.
        claimant: the name that it claims under (KR10).
        after: the newest generation that one of its predecessors claimed, or None.
        restarts: how often a driver was started again; its progress counts them, too.
    """

    supervisor_pid: int
    pipe: int
    claimant: str
    after: int | None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders to a supervisor: run ``command``, restart it by ``strategy``, report as text or JSON."""

    command: list[str]
    strategy: RestartStrategy
    name: str
    is_standby: bool = False
    as_json: bool = False

    def encoded(self) -> str:
        """Return it as JSON."""
        strategy = {"kind": type(self.strategy).__name__, **asdict(self.strategy)}
        return json.dumps({**asdict(self), "strategy": strategy})

    @classmethod
    def decoded(cls, text: str) -> Orders:
        """Return what ``encoded`` made."""
        fields = json.loads(text)
        strategy = fields.pop("strategy")
        return cls(strategy=_STRATEGIES[strategy.pop("kind")](**strategy), **fields)


class Supervisor:
    """Runs one driver as a child process, and starts it again."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._machine = DriverSupervisor(orders.strategy, is_standby=orders.is_standby)
        owner = supervisor_id(os.getpid(), socket.gethostname())
        self._claimant = driver_id(owner, secrets.token_hex(4))
        self._child: subprocess.Popen[bytes] | None = None
        self._begun_s = 0.0
        self._restarts_count = 0
        self._pipe = -1
        self._unread = b""
        self._due_s: float | None = None
        self._commands: list[Command] = []
        self._code: int | None = None
        self._woken, self._waker = os.pipe()

    def run(self) -> int:
        """Keep the driver running; return the exit code."""
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        # a handler alone does not end select(): Python repeats the call
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._remember)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only wakes
        self._handle(Begin())
        while self._code is None:
            self._wait()
        for number in SIGNALS:  # it has ended: Python would give handlers up first, and a late command would kill it
            signal.signal(number, signal.SIG_IGN)
        return self._code

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._commands.append(SIGNALS[signal.Signals(number)])

    # -- events -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until something happened, and handle it."""
        timeout_s = None if self._due_s is None else max(self._due_s - time.monotonic(), 0.0)
        watched = [self._woken] if self._pipe < 0 else [self._woken, self._pipe]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self._woken in ready:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._pipe in ready:
            self._read_reports()
        while self._commands and self._code is None:
            self._handle(CommandReceived(self._commands.pop(0)))
        if self._child is not None and self._is_child_dead():
            self._reap()
        if self._due_s is not None and time.monotonic() >= self._due_s:
            self._due_s = None
            self._handle(DelayOver())

    def _read_reports(self) -> None:
        data = os.read(self._pipe, 4096)
        if not data:
            self._close_pipe()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._handle(_parse_report(line.decode()))

    def _is_child_dead(self) -> bool:
        """Whether it has died; it is not reaped yet, so its process id is not used again."""
        assert self._child is not None
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self) -> None:
        """Kill what a dead child has left running, read its last reports, and reap it (KR1)."""
        child = self._child
        assert child is not None
        with suppress(ProcessLookupError, PermissionError):
            # not reaped yet, so that the number of its group is still its own
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        while self._pipe >= 0 and select.select([self._pipe], [], [], 0)[0]:
            self._read_reports()
        self._close_pipe()
        self._child = None
        self._handle(ChildEnded(status, self._now_ms(), random.random()))

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe, self._unread = -1, b""

    # -- effects ----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._run(effect)

    def _run(self, effect: Effect) -> None:
        match effect:
            case StartChild():
                self._start(effect.after)
            case Tell():
                if self._child is not None:
                    # Not send_signal: that waits for one that is dead.
                    os.kill(self._child.pid, _NUMBERS[effect.command])
            case ArmDelay():
                self._due_s = time.monotonic() + effect.after_ms / 1000
            case ReportRestart():
                self._report(effect)
            case ExitWith():
                self._code = effect.code
                self._end(effect)
            case Ignored():
                return
            case _:
                assert_never(effect)

    def _start(self, after: Generation | None) -> None:
        assert self._child is None, "there is one child at a time (KR1)"
        assert self._pipe < 0, "the reports of the last child have been read to their end"
        self._begun_s = time.monotonic()
        self._pipe, theirs = os.pipe()
        terms = Terms(os.getpid(), theirs, self._claimant, after, self._restarts_count)
        environment = {**os.environ, SUPERVISED: json.dumps(asdict(terms))}
        try:
            self._child = subprocess.Popen(
                self._orders.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs],
                process_group=0,  # Ctrl-C is for the supervisor, which passes it on (KR6)
            )
        except OSError as error:
            # StartChild is the last effect of its event, so the machine may go on from here
            self._close_pipe()
            self._handle(ChildEnded(None, self._now_ms(), random.random(), str(error)))
        finally:
            os.close(theirs)  # only the child has this end now: the pipe ends with it

    def _now_ms(self) -> int:
        return int(time.monotonic() * 1000)

    # -- what people see --------------------------------------------------------------------------------------------

    def _report(self, effect: ReportRestart) -> None:
        self._restarts_count = effect.count
        lasted_ms = round((time.monotonic() - self._begun_s) * 1000)
        text = restart_text(effect, self._orders.strategy, lasted_ms)
        if self._orders.as_json:
            fields = {"status": effect.ended.status, "lasted_ms": lasted_ms, "delay_ms": effect.delay_ms}
            event = {"event": "driver-restart", **fields, "restarts": effect.count, "text": text}
            print(json.dumps(event), flush=True)
        else:
            self._say(text)

    def _end(self, effect: ExitWith) -> None:
        if effect.why:
            self._say(effect.why)

    def _say(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        print(printable(f"{self._orders.name}: {text}"), file=sys.stderr, flush=True)


def _parse_report(word: str) -> Event:
    if word == LISTENING:
        return ChildListens()
    return ChildClaimed(Generation(int(word))) if word.isdecimal() else ChildHeard(Course(word))


def restart_text(effect: ReportRestart, strategy: RestartStrategy, lasted_ms: int) -> str:
    """Return one line: why the driver is started again, when, and how often that was."""
    status = effect.ended.status
    if status is None:
        how = f"could not be started ({effect.ended.problem})"
    elif status < 0:
        how = f"was killed by {signal_name(-status)} after {duration_text(lasted_ms)}"
    else:
        how = f"ended with exit code {status} after {duration_text(lasted_ms)}"
    most: Any = getattr(strategy, "attempts", None)
    of = "" if most is None else f" of at most {most}"
    return f"the driver {how}; starting it again in {duration_text(effect.delay_ms)} (restart {effect.count}{of})"


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main() -> int:
    """Run the supervisor with the orders of the only argument."""
    return Supervisor(Orders.decoded(sys.argv[1])).run()


_PR_SET_PDEATHSIG = 1


class SupervisorClient:
    """The driver's end of the pipe to its supervisor. Without a supervisor, reports go nowhere."""

    def __init__(self, terms: Terms | None) -> None:
        self._terms = terms

    @classmethod
    def from_environment(cls) -> SupervisorClient:
        """Return the client that the environment describes, and remove that from it: it is for this process alone.

        From now on this process dies when its supervisor does.
        """
        text = os.environ.pop(SUPERVISED, None)
        if text is None:
            return cls(None)
        terms = Terms(**json.loads(text))
        os.set_inheritable(terms.pipe, False)
        die_with_parent(terms.supervisor_pid)
        return cls(terms)

    @property
    def claimant(self) -> str:
        """The name to claim under; "" for one of its own."""
        return "" if self._terms is None else self._terms.claimant

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor; 0: there is none."""
        return 0 if self._terms is None else self._terms.supervisor_pid

    @property
    def after(self) -> Generation | None:
        """The newest generation that a driver of the same supervisor claimed, if any."""
        after = None if self._terms is None else self._terms.after
        return None if after is None else Generation(after)

    @property
    def restarts(self) -> int:
        """How often the supervisor has started its driver again."""
        return 0 if self._terms is None else self._terms.restarts

    def report_listening(self) -> None:
        """Report that this process handles every signal from now on."""
        self._report(LISTENING)

    def report_claim(self, generation: Generation) -> None:
        """Report that ``generation`` was claimed."""
        self._report(str(int(generation)))

    def report_course(self, course: Course) -> None:
        """Report what the user requested of this driver: ``STOPPING`` or ``DRAINING`` (KR13)."""
        self._report(course.value)

    def _report(self, word: str) -> None:
        if self._terms is not None:
            with suppress(BrokenPipeError):  # without a supervisor this process is about to die
                # one short write, which the system does not split: reports come from several threads
                os.write(self._terms.pipe, f"{word}\n".encode())


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies; end at once if ``parent`` is not the parent any more.

    Raises:
        UsageError: this system cannot do that.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except AttributeError:
        failed = -1
    if failed:
        raise UsageError("--supervised needs Linux: elsewhere a driver would outlive its supervisor")
    if os.getppid() != parent:  # it died before the system knew
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
