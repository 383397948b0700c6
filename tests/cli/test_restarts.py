"""The option ``--restart``, and what ``--supervised`` becomes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import run, supervisor
from headgate.cli.app import app
from headgate.cli.options import restart_strategy
from headgate.cli.supervisor import Orders
from headgate.errors import UsageError
from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("none", NoRestart()),
        ("fixed-delay", FixedDelay()),
        ("fixed_delay:attempts=3, delay=5s", FixedDelay(3, 5_000)),
        ("failure-rate:failures=4,interval=2m,delay=10ms", FailureRate(4, 120_000, 10)),
        ("exponential-delay", ExponentialDelay()),
        (
            "exponential-delay:initial=1s,maximum=2m,multiplier=3,reset-after=1h,jitter=0.5,attempts=9",
            ExponentialDelay(1_000, 120_000, 3.0, 3_600_000, 0.5, 9),
        ),
    ],
)
def test_a_strategy_is_written_as_in_a_program(text: str, strategy: RestartStrategy) -> None:  # KR2
    assert restart_strategy(text) == strategy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("always", "--restart must begin with one of none, fixed-delay, failure-rate, exponential-delay, not 'always'"),
        ("none:attempts=3", "--restart none takes no values; 'attempts=3' is none of them"),
        ("fixed-delay:times=3", "--restart fixed-delay takes attempts=…, delay=…; 'times=3' is none of them"),
        ("fixed-delay:attempts", "'attempts' is none of them"),
        ("fixed-delay:attempts=many", "attempts must be a whole number, not 'many'"),
        ("fixed-delay:delay=5", "restart delay must look like"),
        ("fixed-delay:attempts=-1", "restart attempts must be an integer of at least 0"),
        ("exponential-delay:jitter=x", "jitter must be a number, not 'x'"),
    ],
)
def test_a_strategy_that_is_none_is_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        restart_strategy(text)
    assert problem in str(caught.value)


def became(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[str], Orders]:
    """Return what the process of this command line would become."""
    found: list[list[str]] = []

    class Gone(Exception):  # noqa: N818
        """A process that has become another one does not come back."""

    def execv(path: str, command: list[str]) -> None:
        assert path == sys.executable
        found.append(command)
        raise Gone

    monkeypatch.setattr(run.os, "execv", execv)
    result = CliRunner().invoke(app, ["run", *arguments])
    assert isinstance(result.exception, Gone), result.output
    return found[0][:-1], Orders.decoded(found[0][-1])


def test_supervised_becomes_a_keeper_of_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command, orders = became(monkeypatch, "--supervised", "some/program.py", "--", "--its", "own option")
    assert command == [sys.executable, "-P", "-m", supervisor.__name__]
    assert orders == Orders(
        [*run.COMMAND, "run", "--", "some/program.py", "--its", "own option"], ExponentialDelay(), "program"
    )


def test_a_kept_driver_has_all_options_of_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--supervised", "--standby", "--master", "local[3]", "-p", "3", "--dir", "s3://b/c", "--json"]
    _, orders = became(monkeypatch, *given, "--silence", "20s", "--restart", "fixed-delay:attempts=2", "program")
    assert orders.command == [
        *run.COMMAND,
        "run",
        "--master=local[3]",
        "--parallelism=3",
        "--dir=s3://b/c",
        "--silence=20s",
        "--json",
        "--standby",
        "--",
        "program",
    ]
    assert (orders.strategy, orders.is_standby, orders.as_json) == (FixedDelay(2), True, True)


def test_a_keeper_does_not_load_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise AssertionError('it was loaded')")
    became(monkeypatch, "--supervised", "--quiet", str(program))


def test_a_strategy_without_a_keeper_is_refused() -> None:
    result = CliRunner().invoke(app, ["run", "--restart", "none", "program.py"])
    assert isinstance(result.exception, UsageError)
    assert "--restart is about --supervised" in str(result.exception)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--silence", "20s"], "--silence is about --standby, which is not given"),
        (["--standby", "--silence", "4s"], "--silence is 4s, but must be 5s at least: a driver gives a sign of life"),
        (["--standby", "--silence", "long"], "--silence must look like '500ms', '1s', '5 minutes' or '1h', not 'long'"),
    ],
)
def test_a_silence_that_a_standby_cannot_wait_for_is_refused(given: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["run", *given, "program.py"])
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


def test_the_help_tells_of_both() -> None:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for words in (
        "--supervised",
        "--standby",
        "--silence",
        "--restart",
        "fixed-delay",
        "3 failed for good",
        "4 the pipeline is running elsewhere",
    ):
        assert words in result.output
