"""The supervisor's process and real children: what dies with whom, who is told what
(docs/spec/driver-supervisor.md)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headgate.cli import supervisor
from headgate.cli.supervisor import SUPERVISED, Orders, Terms, restart_text
from headgate.errors import (
    BadRecord,
    CorruptionError,
    FencedError,
    HeadgateError,
    OutputDenied,
    PipelineFailed,
    StorageError,
    UsageError,
)
from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from headgate.model.failure import ExitCode, Failure, FailureKind, exit_code_of
from headgate.model.progress import ControlRequest
from headgate.protocol.supervision.driver_supervisor import ChildEnded, ReportRestart
from headgate.runtime.driver.driver import error_of
from headgate.runtime.driver.pipeline_lock import RunningPipeline

WAIT_S = 300.0

CHILD = """
import json, os, signal, subprocess, sys, time
from headgate.cli.supervisor import SupervisorClient
kept = SupervisorClient.from_environment()
told = open(sys.argv[1], "a", buffering=1)
def tell(*words): told.write(json.dumps([os.getpid(), *words]) + "\\n")
def hold(): time.sleep(3600)
signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Kept:
    """A supervisor, and what its children told."""

    def __init__(self, directory: Path, body: str, strategy: RestartStrategy | None = None, **orders: Any) -> None:
        self._told = directory / "told"
        program = directory / "child.py"
        program.write_text(CHILD + body)
        command = [sys.executable, "-P", str(program), str(self._told)]
        given = Orders(command, strategy or FixedDelay(attempts=5, delay_ms=1), "p", **orders)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", supervisor.__name__, given.encoded()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def told(self) -> list[list[Any]]:
        """What all children told so far: their process id and words."""
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        return [json.loads(line) for line in lines]

    def wait_told(self, count: int) -> list[list[Any]]:
        until(lambda: len(self.told()) >= count, f"{count} words of children")
        return self.told()

    def end(self) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self.pid:
                    process.kill()
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    kept: list[Kept] = []

    def begin(body: str, *given: Any, **orders: Any) -> Kept:
        kept.append(Kept(tmp_path, body, *given, **orders))
        return kept[-1]

    yield begin
    for one in kept:
        one.close()


def test_a_killed_driver_is_started_again_and_its_end_is_the_supervisors(keep: Callable[..., Kept]) -> None:  # KR2, KR3
    kept = keep("tell('alive')\nhold() if len(open(sys.argv[1]).readlines()) < 3 else sys.exit(3)")
    for count in (1, 2):
        os.kill(kept.wait_told(count)[-1][0], signal.SIGKILL)
    code, out, err = kept.end()
    lines = err.splitlines()
    assert (code, out, len(kept.told())) == (3, "", 3)
    assert [line.split(" after ")[0] for line in lines] == ["p: the driver was killed by SIGKILL"] * 2
    assert [line.split("; ")[1] for line in lines] == [
        f"starting it again in 1 ms (restart {count} of at most 5)" for count in (1, 2)
    ]


def test_restarts_are_told_as_json_where_progress_is(keep: Callable[..., Kept]) -> None:
    code, out, err = keep("sys.exit(1)", FixedDelay(attempts=1, delay_ms=3), as_json=True).end()
    assert code == 1
    (event,) = [json.loads(line) for line in out.splitlines()]
    assert (event["event"], event["status"], event["delay_ms"], event["restarts"]) == ("driver-restart", 1, 3, 1)
    assert err == "p: it failed 2 times, and 1 restarts were allowed\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_driver_and_it_is_not_started_again(
    keep: Callable[..., Kept], number: signal.Signals
) -> None:  # KR6
    kept = keep("signal.pthread_sigmask(signal.SIG_BLOCK, signals)\ntell('up')\ntell(signal.sigwait(signals))")
    kept.wait_told(1)
    os.kill(kept.pid, number)
    assert kept.end() == (0, "", "")
    assert [words[1] for words in kept.told()] == ["up", number]


@pytest.mark.parametrize("ends", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_driver_that_was_asked_to_stop_and_died_is_not_started_again(keep: Callable[..., Kept], ends: str) -> None:
    """KR13: it alone was asked."""
    kept = keep(
        f"from headgate.model.pipeline_identity import Course\ntell('up')\nkept.report_course(Course.STOPPING)\n{ends}"
    )
    code, _, err = kept.end()
    assert (code, len(kept.told())) == (137 if "kill" in ends else 1, 1)
    assert err.startswith("p: the driver was asked to stop and ended before it had said that it was done")
    assert err.endswith("the same command continues from the newest checkpoint there is\n")


def test_a_driver_that_was_asked_to_drain_and_died_drains_when_it_is_started_again(keep: Callable[..., Kept]) -> None:
    """KR7, KR13: it alone was asked."""
    kept = keep(
        "signal.pthread_sigmask(signal.SIG_BLOCK, signals)\n"  # in threads that imports start, too
        "from headgate.model.pipeline_identity import Course\nkept.report_listening()\ntell('up')\n"
        "if len(open(sys.argv[1]).readlines()) < 2:\n"
        "    kept.report_course(Course.DRAINING)\n"
        "    sys.exit(1)\n"
        "tell(signal.sigwait(signals))"
    )
    assert kept.end()[0] == 0
    assert [words[1] for words in kept.told()] == ["up", "up", signal.SIGUSR1]


HOLDS = """
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in threads that imports start, too
from pathlib import Path
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
from headgate.runtime.driver.takeover import Takeover, taking_over
with taking_signals(), taking_over(Takeover(supervisor_pid=kept.supervisor_pid)):
    lock = PipelineLock.acquire(str(Path(sys.argv[1]).parent), "p", "a child")
kept.report_listening()
tell('up')
hold()
"""
"""Never notices a signal."""


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_of_a_driver_that_dies_before_it_hears_it_is_known(
    keep: Callable[..., Kept], tmp_path: Path, drain: bool
) -> None:
    kept = keep(HOLDS)
    ((pid, _),) = kept.wait_told(1)
    running = RunningPipeline.find(str(tmp_path), "p")
    assert (running.holder.pid, running.holder.supervisor_pid) == (pid, kept.pid)
    running.ask(drain=drain)
    os.kill(pid, signal.SIGKILL)
    if drain:
        assert len(kept.wait_told(2)) == 2
        os.kill(kept.pid, signal.SIGTERM)
        os.kill(kept.told()[1][0], signal.SIGKILL)
    code, _, err = kept.end()
    assert (code, len(kept.told())) == (137, 1 + drain), err
    assert "it is not started again" in err


@pytest.mark.parametrize("drain", [False, True])
def test_whoever_asked_insists_when_the_driver_died_over_the_question(
    keep: Callable[..., Kept], tmp_path: Path, drain: bool
) -> None:  # KR15: 'headgate cancel', or a stop with a savepoint
    kept = keep(HOLDS)
    ((pid, _),) = kept.wait_told(1)
    running = RunningPipeline.find(str(tmp_path), "p")
    ask = running.ask_for(ControlRequest(cancels=not drain, ends=drain, drains=drain))
    os.kill(pid, signal.SIGKILL)
    kept.wait_told(2)
    ended = until(running.ended, "the end of the first run")
    running.insist(ended, drain=drain)
    ask.remove()
    if not drain:
        until(lambda: signal_waits(kept.told()[1][0], signal.SIGTERM), "the stop of the second run")
    else:
        until(lambda: signal_waits(kept.told()[1][0], signal.SIGUSR1), "the drain of the second run")
        os.kill(kept.pid, signal.SIGTERM)
    os.kill(kept.told()[1][0], signal.SIGKILL)
    code, _, err = kept.end()
    assert code == 137, err
    running.insist(ended, drain=drain)  # nobody is there any more


def test_a_signal_for_a_driver_that_has_just_died_does_not_end_the_supervisor(keep: Callable[..., Kept]) -> None:  # KR1
    """The supervisor finds both when it wakes."""
    kept = keep("tell('up')\nhold() if len(open(sys.argv[1]).readlines()) < 2 else sys.exit(0)")
    ((pid, _),) = kept.wait_told(1)
    os.kill(kept.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid), "the end of the driver")
    os.kill(kept.pid, signal.SIGTERM)
    os.kill(kept.pid, signal.SIGCONT)
    code, _, err = kept.end()
    assert (code, len(kept.told())) == (137, 1), err
    assert "it is not started again" in err


def signal_waits(pid: int, number: signal.Signals) -> bool:
    """Whether a process was sent a signal that it does not take."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd")]
    return bool(pending >> (number - 1) & 1)


def test_a_process_that_is_not_the_parent_of_the_driver_is_not_taken_for_its_supervisor(
    keep: Callable[..., Kept], tmp_path: Path
) -> None:  # numbers become somebody else's
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"]) as stranger:
        kept = keep(HOLDS.replace("kept.supervisor_pid", str(stranger.pid)))
        ((pid, _),) = kept.wait_told(1)
        running = RunningPipeline.find(str(tmp_path), "p")
        running.ask(drain=False)
        assert signal_waits(pid, signal.SIGTERM)
        stranger.kill()
        assert stranger.wait(WAIT_S) == -signal.SIGKILL


def test_ctrl_c_reaches_the_driver_once(keep: Callable[..., Kept]) -> None:  # KR6
    kept = keep(
        "signal.pthread_sigmask(signal.SIG_BLOCK, signals)\ntell('up')\ntell(signal.sigwait(signals))\n"
        "tell(signal.sigtimedwait(signals, 0.5) is not None)"
    )
    kept.wait_told(1)
    os.killpg(kept.pid, signal.SIGINT)  # as a terminal does, to everybody in the foreground
    assert kept.end()[0] == 0
    assert [words[1] for words in kept.told()] == ["up", signal.SIGINT, False]


def test_other_signals_wait_until_the_driver_listens(keep: Callable[..., Kept], tmp_path: Path) -> None:  # KR7
    kept = keep(
        "tell('up')\n"
        "while not os.path.exists(sys.argv[1] + '-go'): time.sleep(0.01)\n"  # SIGUSR1 would kill it here
        "signal.pthread_sigmask(signal.SIG_BLOCK, signals)\nkept.report_listening()\n"
        "tell(signal.sigwait({signal.SIGUSR1}), signal.sigwait({signal.SIGUSR2}))"
    )
    kept.wait_told(1)
    os.kill(kept.pid, signal.SIGUSR1)
    os.kill(kept.pid, signal.SIGUSR2)
    (tmp_path / "told-go").touch()
    assert kept.end() == (0, "", "")
    assert [words[1:] for words in kept.told()] == [["up"], [signal.SIGUSR1, signal.SIGUSR2]]


def test_a_stop_between_two_drivers_ends_the_supervisor(keep: Callable[..., Kept]) -> None:  # KR8
    kept = keep("tell('dies')\nsys.exit(1)", FixedDelay(delay_ms=3_600_000))
    kept.wait_told(1)
    assert kept.process.stderr is not None
    assert "starting it again in 1 h 00 min" in kept.process.stderr.readline()
    os.kill(kept.pid, signal.SIGTERM)
    code, _, err = kept.end()
    assert code == 0
    assert "the same command continues" in err


def test_no_driver_outlives_its_supervisor(keep: Callable[..., Kept]) -> None:
    kept = keep("tell('up')\nhold()")
    ((pid, _),) = kept.wait_told(1)
    os.kill(pid, signal.SIGSTOP)  # not even one that is stopped
    os.kill(kept.pid, signal.SIGKILL)
    until(lambda: not is_running(pid), "the end of the driver")


def test_a_driver_whose_supervisor_died_before_it_could_say_so_ends_by_itself(tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(CHILD + "tell('alive')")
    reader, writer = os.pipe()
    terms = {"supervisor_pid": os.getpid() + 1, "pipe": writer, "claimant": "", "after": None}
    child = subprocess.run(
        [sys.executable, "-P", str(program), str(tmp_path / "told")],
        env={**os.environ, SUPERVISED: json.dumps(terms)},
        pass_fds=[writer],
        timeout=WAIT_S,
    )
    os.close(reader)
    os.close(writer)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "told").exists()


def test_what_a_dead_driver_leaves_running_is_ended_before_the_next_one_starts(
    keep: Callable[..., Kept],
) -> None:  # KR1
    kept = keep(
        "left = [words[1] for words in map(json.loads, open(sys.argv[1]))]\n"
        "if left:\n"
        "    stat = f'/proc/{left[0]}/stat'\n"
        "    tell(open(stat).read().split()[2] if os.path.exists(stat) else 'gone')\n"
        "    sys.exit(0)\n"
        "tell(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)']).pid)\n"
        "hold()"
    )
    ((pid, left),) = kept.wait_told(1)
    os.kill(pid, signal.SIGKILL)
    assert kept.end()[0] == 0
    assert kept.told()[1][1] in ("gone", "Z"), "the child of the first driver was still running"
    assert not is_running(left)


def test_the_next_driver_has_the_name_and_the_generation_of_the_last_one(keep: Callable[..., Kept]) -> None:  # KR10
    kept = keep(
        "tell(kept.claimant, kept.after)\nkept.report_claim(7)\n"
        "sys.exit(1 if len(open(sys.argv[1]).readlines()) < 2 else 0)"
    )
    assert kept.end()[0] == 0
    (_, first_name, first), (_, second_name, second) = kept.told()
    assert first_name == second_name
    assert f"supervisor {kept.pid} on " in first_name
    assert (first, second) == (None, 7)


def test_a_command_that_is_not_there_is_tried_again(tmp_path: Path) -> None:  # KR11
    orders = Orders([str(tmp_path / "nothing")], FixedDelay(attempts=1, delay_ms=1), "p")
    command = [sys.executable, "-P", "-m", supervisor.__name__, orders.encoded()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 1
    assert "p: the driver could not be started ([Errno 2] No such file or directory" in ended.stderr


def test_a_supervisor_imports_neither_spark_nor_arrow() -> None:
    code = f"import sys, {supervisor.__name__}, headgate.cli.supervisor\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"pyspark", "pyarrow", "polars", "numpy", "msgspec", "typer", "sqlalchemy", "obstore", "headgate.api"}
    assert not heavy & set(loaded)


@pytest.mark.parametrize(
    "strategy",
    [NoRestart(), FixedDelay(3, 5), ExponentialDelay(attempts=4), FailureRate(7, 8, 9)],
)
def test_orders_survive_the_way_to_the_supervisor(strategy: RestartStrategy) -> None:
    orders = Orders(["a", "--b=c d"], strategy, "p", is_standby=True, as_json=True)
    assert Orders.decoded(orders.encoded()) == orders


def test_terms_are_plain() -> None:
    text = '{"supervisor_pid": 1, "pipe": 3, "claimant": "x", "after": null}'
    assert Terms(**json.loads(text)) == Terms(1, 3, "x", None)


@pytest.mark.parametrize(
    ("ended", "strategy", "sentence"),
    [
        (
            ChildEnded(-9, 0, 0.5),
            ExponentialDelay(),
            "the driver was killed by SIGKILL after 3 min 02 s; starting it again in 200 ms (restart 2)",
        ),
        (
            ChildEnded(1, 0, 0.5),
            FixedDelay(attempts=4),
            "the driver ended with exit code 1 after 3 min 02 s; starting it again in 200 ms (restart 2 of at most 4)",
        ),
        (
            ChildEnded(-99, 0, 0.5),
            FailureRate(),
            "the driver was killed by signal 99 after 3 min 02 s; starting it again in 200 ms (restart 2)",
        ),
    ],
)
def test_each_restart_is_one_line(ended: ChildEnded, strategy: RestartStrategy, sentence: str) -> None:
    assert restart_text(ReportRestart(ended, 200, 2), strategy, 182_000) == sentence


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("do that"), ExitCode.USAGE),
        (FencedError("pipeline p", 1, 2), ExitCode.REPLACED),
        (OutputDenied("out", 7, "gone"), ExitCode.FOR_GOOD),
        (BadRecord("parse", "not JSON", "", "{"), ExitCode.FOR_GOOD),
        (PipelineFailed("it failed", is_for_good=True), ExitCode.FOR_GOOD),
        (PipelineFailed("it failed"), ExitCode.FAILED),
        (StorageError("put", "x", "full"), ExitCode.FAILED),
        (CorruptionError("x", 0, "a", "b"), ExitCode.FAILED),
    ],
)
def test_each_error_has_the_exit_code_of_what_can_be_done_about_it(error: HeadgateError, code: ExitCode) -> None:
    assert exit_code_of(error) is code


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FailureKind.LOST, ExitCode.FAILED),
        (FailureKind.USER_CODE, ExitCode.FOR_GOOD),
        (FailureKind.DETERMINISTIC, ExitCode.FOR_GOOD),
        (FailureKind.REPLACED, ExitCode.REPLACED),
    ],
)
def test_a_failure_that_ended_a_run_says_whether_starting_again_may_help(kind: FailureKind, code: ExitCode) -> None:
    assert exit_code_of(error_of(Failure(kind, "it failed"))) is code
