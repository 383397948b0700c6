"""``headgate run``: run the pipeline of a program and show its progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import typer
from rich.console import Console

from headgate.api.fresh import start_over
from headgate.api.pipeline import METRICS_HOST, Pipeline
from headgate.api.preparing import make_checkpoint_directory
from headgate.api.running import NumbersPort, run_to_end, start_with_metrics
from headgate.cli import keeping
from headgate.cli.keeping import Orders
from headgate.cli.kept import Kept
from headgate.cli.load import importable_from, load_pipeline, make_importable, program_place
from headgate.cli.page import HOST, PagePlace, ShownByPage
from headgate.cli.progress import JsonLinesProgress, LiveProgress, PlainProgress, Quiet, ShownObserver
from headgate.cli.run_options import (
    Beginning,
    CheckpointDirOption,
    ConfOption,
    DescribeOption,
    FreshOption,
    FromOption,
    GoBackOption,
    JsonOption,
    LeaveOption,
    LogDirOption,
    MasterOption,
    MetricsHostOption,
    MetricsPortOption,
    MetricsPushOption,
    ParallelismOption,
    ProgramArgument,
    ProgramArguments,
    PyFilesOption,
    QuietOption,
    RestartOption,
    RunOptions,
    SilenceOption,
    StandbyOption,
    SupervisedOption,
    UiHostOption,
    UiOption,
    UnclaimedOption,
    keep_logs_in,
)
from headgate.cli.standby import StandingBy, jvm_check
from headgate.cli.text import result_text
from headgate.errors import HeadgateError, UsageError
from headgate.model.progress import PipelineHandle, RunResult
from headgate.runtime.driver.succession import Succession, succeeding
from headgate.spark.session import WarmSession, check_cluster, quick_jvm

_R = TypeVar("_R")

COMMAND = [sys.executable, "-P", "-m", "headgate.cli.main"]
"""``headgate``, whatever is in the working directory."""


def run(
    program: ProgramArgument,
    arguments: ProgramArguments = None,
    master: MasterOption = None,
    parallelism: ParallelismOption = None,
    checkpoint_dir: CheckpointDirOption = None,
    restore: FromOption = None,
    go_back_behind: GoBackOption = None,
    allow_unclaimed_state: UnclaimedOption = None,
    describe: DescribeOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    supervised: SupervisedOption = False,
    standby: StandbyOption = False,
    silence: SilenceOption = None,
    restart: RestartOption = None,
    fresh: FreshOption = False,
    leave: LeaveOption = None,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = None,
    ui: UiOption = None,
    ui_host: UiHostOption = None,
    py_files: PyFilesOption = None,
    conf: ConfOption = None,
    log_dir: LogDirOption = None,
    metrics_push: MetricsPushOption = None,
) -> None:
    """Run a pipeline until its input ends.

    The program is loaded, not executed as a script. Its pipeline is the variable 'pipeline' or 'p', or the result of
    its function pipeline(). Ctrl-C or SIGTERM stops the pipeline after a last checkpoint; the same command continues
    from there. SIGUSR1 drains it: reading stops, everything in flight is processed, timers of processing time do not
    fire, and the pipeline has finished. From another terminal, use 'headgate stop' or 'headgate stop --drain'.

    --fresh starts over: it first deletes the checkpoints and all output of the pipeline, as 'headgate reset' does. If a
    target no longer exists, nothing is deleted unless --leave names its sink.

    On a cluster, modules and packages next to the program are sent to the workers if the program has imported them.
    --py-files names others.

    --supervised starts the driver again if it died or failed in a way that may pass. Signals to the supervisor are
    passed on to the driver. --restart is none, fixed-delay:attempts=3,delay=5s,
    failure-rate:failures=3,interval=1m,delay=1s, or exponential-delay:initial=100ms,maximum=1m, which also takes
    multiplier=2, reset_after=1m, jitter=0.1 and attempts=9.

    --standby waits, on another machine with the same checkpoint directory or object store, until the running driver
    has given no sign of life for 5 s, and then takes over. If machines or storage sometimes pause for longer, raise
    the limit with --silence. A standby does not start a pipeline that its user has stopped, and ends when the pipeline
    has finished. Ctrl-C or SIGTERM ends it. With --supervised, a standby is started again as a standby.

    --ui shows the pipeline live on a web page, http://127.0.0.1:PORT/. The page is read-only unless HEADGATE_UI_TOKEN
    is set: opened with #token=TOKEN at the end of its address, it takes checkpoints and savepoints, stops and drains.

    Exit codes: 0 finished or stopped, 1 failed, and starting again may help, 2 wrong use, 3 failed for good: something
    has to be changed first, 4 the pipeline is running elsewhere.
    """
    kept = Kept.by_environment()
    begins = Beginning(restore, go_back_behind, tuple(allow_unclaimed_state or ()))
    options = RunOptions(
        master,
        parallelism,
        checkpoint_dir,
        begins,
        quiet,
        as_json,
        supervised,
        standby,
        restart,
        fresh,
        tuple(leave or ()),
        silence,
        metrics_port,
        metrics_host,
        tuple(py_files or ()),
        tuple(conf or ()),
        page=None if ui is None else PagePlace(ui, ui_host or HOST),
        metrics_push=metrics_push,
    )
    if ui is None and ui_host is not None:
        raise UsageError("--ui-host is about --ui, which is not given")
    options.check()
    keep_logs_in(log_dir)
    given = arguments or ()
    if describe:
        typer.echo(_loaded(options, program, given).describe())
    elif supervised:
        _keep(options, program, given)
    else:
        _run(_loaded(options, program, given), options, kept)


def _loaded(options: RunOptions, program: str, arguments: Sequence[str]) -> Pipeline:
    """Return the pipeline of the program, with what the command says instead of it."""
    submission = options.submission
    for file in submission.py_files:
        make_importable(importable_from(file))
    pipeline = load_pipeline(program, arguments)
    pipeline.submit_with(replace(submission, directory=program_place(program)))
    pipeline.override(parallelism=options.parallelism, checkpoint_dir=options.checkpoint_dir)
    begins = options.begins
    pipeline.begin_with(begins.restored, begins.go_back_behind, begins.allow_unclaimed_state, options.leave)
    return pipeline


def _keep(options: RunOptions, program: str, arguments: Sequence[str]) -> NoReturn:
    """Have drivers do it, from a keeper."""
    if options.fresh:
        _start_over(options, program, arguments)
    become_keeper(_orders(options, program, arguments))


def _run(pipeline: Pipeline, options: RunOptions, kept: Kept) -> None:
    """Run in this process, at once or when its turn has come, and say how it ended."""
    result = _standing_by(pipeline, options, kept) if options.standby else _running(pipeline, options, kept)
    if result is not None and not options.quiet and not options.as_json:
        typer.echo(f"{pipeline.name}: {result_text(result)}", err=True)


def _orders(options: RunOptions, program: str, arguments: Sequence[str]) -> Orders:
    """Return what a keeper is to do: run the same command, without what is its own."""
    command = [*COMMAND, "run", *options.of_a_driver(), "--", program, *arguments]
    name, strategy = Path(program).stem, options.strategy
    return Orders(command, strategy, name, is_standby=options.standby, as_json=options.as_json)


def _running(pipeline: Pipeline, options: RunOptions, kept: Kept) -> RunResult:
    port = _metrics_port(options, kept.keeper != 0)
    with _observer(pipeline, options, kept.keeper != 0) as observer:
        return _told([observer], lambda: run_to_end(lambda: _started(pipeline, options, observer, kept, port)))


def _told(observers: Sequence[ShownObserver], run: Callable[[], _R]) -> _R:
    """Have whoever shows progress say how it ended; of a standby there is one for each turn, or none."""
    try:
        result = run()
    except HeadgateError as error:
        for observer in observers[-1:]:
            observer.on_failure(error)
        raise
    if isinstance(result, RunResult):
        for observer in observers[-1:]:
            observer.on_result(result)
    return result


def _start_over(options: RunOptions, program: str, arguments: Sequence[str]) -> None:
    """Start over here and now, once: a keeper starts many drivers."""
    pipeline = _loaded(options, program, arguments)
    definition = pipeline.definition_on(options.master)
    make_checkpoint_directory(definition.config)
    with quick_jvm():
        parallelism, conf = definition.plan.parallelism, options.submission.conf
        check_cluster(pipeline.name, parallelism, None, options.master, conf)
    with _shown(pipeline, options) as observer:
        start_over(definition, observer, options.leave)


def _started(
    pipeline: Pipeline, options: RunOptions, observer: ShownObserver, kept: Kept, port: NumbersPort | None
) -> PipelineHandle:
    kept.listens()
    place = Succession(kept.claimant, kept.after, kept.claimed, tell_wish=kept.wished, keeper=kept.keeper)

    def start() -> PipelineHandle:
        push = options.metrics_push
        return pipeline.start(options.master, observer=observer, fresh=options.fresh, metrics_push=push)

    with succeeding(place), quick_jvm():  # this process does nothing else with Spark
        return _begun(port, pipeline, observer, start)


def _begun(
    port: NumbersPort | None, pipeline: Pipeline, observer: ShownObserver, start: Callable[[], PipelineHandle]
) -> PipelineHandle:
    handle = start() if port is None else start_with_metrics(port, pipeline.name, observer, start)
    observer.on_start(handle)
    return handle


def _metrics_port(options: RunOptions, must_run: bool) -> NumbersPort | None:
    """Return the port that was asked for.

    Raises:
        UsageError: it is taken. One that ``must_run``, because it goes on in another's place, runs without.
    """
    if options.metrics_port is None:
        return None
    from headgate.api.prometheus import MetricsPort

    try:
        return MetricsPort(options.metrics_port, options.metrics_host or METRICS_HOST)
    except UsageError as error:
        if not must_run:
            raise
        typer.echo(f"running without metrics: {error}", err=True)
        return None


def _standing_by(pipeline: Pipeline, options: RunOptions, kept: Kept) -> RunResult | None:
    """Wait for a turn and run; None when it never came."""
    definition = pipeline.definition_on(options.master)
    config = definition.config
    observers: list[ShownObserver] = []
    make_checkpoint_directory(config)  # as the start of a pipeline does it: whoever looks there first makes it

    def say(notice: str, text: str) -> None:
        shown.close()  # the progress of a takeover that came too late
        if options.as_json:
            typer.echo(json.dumps({"event": "standby", "notice": notice, "text": text}))
        elif not options.quiet:
            typer.echo(f"{config.name}: {text}", err=True)

    with quick_jvm(), ExitStack() as opened, ExitStack() as shown:  # this process does nothing else with Spark
        conf = options.submission.conf
        session = WarmSession(config.name, definition.plan.parallelism, options.master, conf)
        opened.callback(session.close)

        def start() -> PipelineHandle:
            observer = shown.enter_context(_observer(pipeline, options, must_run=True))
            observers.append(observer)
            port = _metrics_port(options, must_run=True)

            def takes_over() -> PipelineHandle:
                push = options.metrics_push
                return pipeline.start(options.master, spark=session.spark, observer=observer, metrics_push=push)

            return _begun(port, pipeline, observer, takes_over)

        check = jvm_check(lambda: session.is_alive)
        place = config.checkpoint_root, config.name
        standing = StandingBy(*place, kept, start, say, check, options.silence_ms)
        return _told(observers, standing.run)


def become_keeper(orders: Orders) -> NoReturn:
    """Replace this process by a keeper: one that has imported nothing of Spark or Arrow (docs/spec/keeper.md)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", keeping.__name__, orders.encoded()])


def _observer(pipeline: Pipeline, options: RunOptions, must_run: bool) -> ShownObserver:
    """Return who shows progress; ``must_run`` as for ``_metrics_port``."""
    shown = _shown(pipeline, options)
    if options.page is None:
        return shown
    return ShownByPage(shown, pipeline.definition_on(options.master), options.page, must_run=must_run)


def _shown(pipeline: Pipeline, options: RunOptions) -> ShownObserver:
    if options.quiet:
        return Quiet()
    if options.as_json:
        return JsonLinesProgress(pipeline.name)
    console = Console(stderr=True)
    return LiveProgress(pipeline.name, console) if console.is_terminal else PlainProgress(pipeline.name)
