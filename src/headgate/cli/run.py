"""``headgate run``: run the pipeline of a program and show its progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from headgate.api.pipeline import Pipeline, make_checkpoint_directory
from headgate.api.running import run_to_end
from headgate.cli import keeping
from headgate.cli.keeping import Orders
from headgate.cli.kept import Kept
from headgate.cli.load import load_pipeline
from headgate.cli.progress import JsonLinesProgress, LiveProgress, PlainProgress, Quiet, ShownObserver
from headgate.cli.restarts import RESTART_DEFAULT, restart_strategy
from headgate.cli.standby import StandingBy, jvm_check
from headgate.cli.text import count_text, duration_text
from headgate.errors import UsageError
from headgate.model.progress import PipelineHandle, RunResult
from headgate.runtime.driver.succession import Succession, succeeding
from headgate.spark.session import WarmSession, quick_jvm

COMMAND = [sys.executable, "-P", "-m", "headgate.cli.main"]
"""``headgate``, whatever is in the working directory."""


def run(
    program: Annotated[str, typer.Argument(help="A Python file, or a module, that makes a pipeline.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the program itself, after '--'.", show_default=False)
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="URL of the Spark master, such as local[4] or spark://host:7077.")
    ] = None,
    parallelism: Annotated[int | None, typer.Option("--parallelism", "-p", help="Subtasks of each operator.")] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Directory or URL of the checkpoints, instead of the program's.")
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Begin at this savepoint, at DIR/NAME (the newest checkpoint of a pipeline), at DIR/NAME/chk-ID, or "
            "at the pipeline's own checkpoint ID. Given again, it goes on from its own newest checkpoint.",
        ),
    ] = None,
    go_back_behind: Annotated[
        int | None,
        typer.Option(help="The newest checkpoint, if it may be left for --from and its output be produced again."),
    ] = None,
    allow_unclaimed_state: Annotated[
        list[str] | None,
        typer.Option(help="An operator that is gone, and whose state is left behind. May be repeated."),
    ] = None,
    describe: Annotated[bool, typer.Option("--describe", help="Print the plan and exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write progress as JSON lines.")] = False,
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Start the driver again when it died, from a small process of its own.")
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait beside a pipeline that runs elsewhere, and take over when its driver is gone."
        ),
    ] = False,
    restart: Annotated[
        str | None,
        typer.Option(
            help="When --supervised starts a driver again: none, fixed-delay:attempts=3,delay=5s, "
            "failure-rate:failures=3,interval=1m,delay=1s, or "
            "exponential-delay:initial=100ms,maximum=1m,multiplier=2,reset_after=1m,jitter=0.1,attempts=9.",
            show_default=RESTART_DEFAULT,
        ),
    ] = None,
) -> None:
    """Run a pipeline until its input ends.

    The program is loaded, not executed as a script: the pipeline is what it calls 'pipeline' or 'p', or what its
    function pipeline() returns. Ctrl-C or SIGTERM stops after a last checkpoint; the same command continues from
    there. SIGUSR1 drains: reading stops, everything in flight is processed, and the pipeline has finished. 'headgate
    stop' sends either from another terminal.

    With --supervised a driver that died, or failed in a way that may pass, is started again. Signals to the supervisor
    are for the driver.

    With --standby the same command on another machine, with the same checkpoint directory or object store, waits until
    the driver that runs gives no sign of life for 5 s, and goes on in its place. It does not start what its user
    stopped, and ends when the pipeline has finished. Ctrl-C or SIGTERM ends it. With --supervised too, a standby is
    started again as a standby.

    Exit codes: 0 done or stopped, 1 failed and starting again may help, 2 wrong use, 3 failed for good: something has
    to be changed first, 4 somebody else runs the pipeline now.
    """
    kept = Kept.by_environment()
    if quiet and as_json:
        raise UsageError("give --quiet or --json, not both")
    if restart is not None and not supervised:
        raise UsageError("--restart is about --supervised, which is not given; restarts of workers are in the program")
    strategy = restart_strategy(restart or RESTART_DEFAULT)
    if supervised and not describe:
        options = _options(master, parallelism, checkpoint_dir, quiet, as_json, standby)
        options += _start_options(restore, go_back_behind, allow_unclaimed_state or ())
        command = [*COMMAND, "run", *options, "--", program, *(arguments or ())]
        become_keeper(Orders(command, strategy, Path(program).stem, is_standby=standby, as_json=as_json))
    pipeline = load_pipeline(program, arguments or ())
    pipeline.override(parallelism=parallelism, checkpoint_dir=checkpoint_dir)
    where = int(restore) if restore is not None and restore.isdecimal() else restore
    pipeline.begin_with(where, go_back_behind, tuple(allow_unclaimed_state or ()))
    if describe:
        typer.echo(pipeline.describe())
        return
    result: RunResult | None
    if standby:
        result = _standing_by(pipeline, master, quiet, as_json, kept)
    else:
        with _observer(pipeline, quiet, as_json) as observer:
            result = run_to_end(lambda: _started(pipeline, master, observer, kept))
    if result is not None and not quiet and not as_json:
        typer.echo(f"{pipeline.name}: {result_text(result)}", err=True)


def _started(pipeline: Pipeline, master: str | None, observer: ShownObserver, kept: Kept) -> PipelineHandle:
    kept.listens()
    place = Succession(kept.claimant, kept.after, kept.claimed)
    with succeeding(place), quick_jvm():  # this process does nothing else with Spark
        return pipeline.start(master, observer=observer)


def _standing_by(pipeline: Pipeline, master: str | None, quiet: bool, as_json: bool, kept: Kept) -> RunResult | None:
    """Wait for a turn and run; None when it never came."""
    definition = pipeline.definition_on(master)
    config = definition.config
    make_checkpoint_directory(config)  # as the start of a pipeline does it: whoever looks there first makes it

    def say(notice: str, text: str) -> None:
        shown.close()  # the progress of a takeover that came too late
        if as_json:
            typer.echo(json.dumps({"event": "standby", "notice": notice, "text": text}))
        elif not quiet:
            typer.echo(f"{config.name}: {text}", err=True)

    with quick_jvm(), ExitStack() as opened, ExitStack() as shown:  # this process does nothing else with Spark
        session = WarmSession(config.name, definition.plan.parallelism, master)
        opened.callback(session.close)

        def start() -> PipelineHandle:
            observer = shown.enter_context(_observer(pipeline, quiet, as_json))
            return pipeline.start(master, spark=session.spark, observer=observer)

        check = jvm_check(lambda: session.is_alive)
        return StandingBy(config.checkpoint_root, config.name, kept, start, say, check).run()


def _options(
    master: str | None, parallelism: int | None, checkpoint_dir: str | None, quiet: bool, as_json: bool, standby: bool
) -> list[str]:
    """Return what a kept driver is told of the options of its keeper."""
    values = {"--master": master, "--parallelism": parallelism, "--checkpoint-dir": checkpoint_dir}
    flags = {"--quiet": quiet, "--json": as_json, "--standby": standby}
    given = [f"{name}={value}" for name, value in values.items() if value is not None]
    return given + [name for name, is_on in flags.items() if is_on]


def _start_options(restore: str | None, go_back_behind: int | None, allowed: Sequence[str]) -> list[str]:
    """Return what every start of a kept driver names: it goes back once (SV24)."""
    values = {"--from": restore, "--go-back-behind": go_back_behind}
    given = [f"{name}={value}" for name, value in values.items() if value is not None]
    return given + [f"--allow-unclaimed-state={name}" for name in allowed]


def become_keeper(orders: Orders) -> NoReturn:
    """Replace this process by a keeper: one that has imported nothing of Spark or Arrow (docs/spec/keeper.md)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", keeping.__name__, orders.encoded()])


def result_text(result: RunResult) -> str:
    """Return how a run ended, in one sentence."""
    ended = "drained" if result.is_drained else "finished"
    how = ended if result.is_finished else "stopped; the same command continues"
    if result.has_removed_checkpoints:
        how = "cancelled, and its checkpoints are removed,"
    where = "" if result.is_finished or result.last_checkpoint is None else f" from checkpoint {result.last_checkpoint}"
    return (
        f"{how}{where} after {duration_text(result.duration_ms)}: {count_text(result.records_in)} records in, "
        f"{count_text(result.records_out)} out, {result.restarts} restarts"
    )


def _observer(pipeline: Pipeline, quiet: bool, as_json: bool) -> ShownObserver:
    if quiet:
        return Quiet()
    if as_json:
        return JsonLinesProgress()
    console = Console(stderr=True)
    return LiveProgress(pipeline.name, console) if console.is_terminal else PlainProgress(pipeline.name)
