"""``headgate run``: what it is told, and who does it: this process (``cli.running``), or drivers of a keeper."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from headgate.api.fresh import start_over
from headgate.api.pipeline import Pipeline
from headgate.api.preparing import make_checkpoint_directory
from headgate.cli import keeping
from headgate.cli.keeping import Orders
from headgate.cli.kept import Kept
from headgate.cli.load import importable_from, load_pipeline, make_importable
from headgate.cli.page import HOST, PagePlace
from headgate.cli.program_path import program_place
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
    MovedOption,
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
from headgate.cli.running import run_here, shown_by
from headgate.cli.text import say
from headgate.errors import UsageError
from headgate.spark.jvm_settings import quick_jvm
from headgate.spark.session import check_cluster

COMMAND = [sys.executable, "-P", "-m", "headgate.cli.entry"]
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
    moved: MovedOption = None,
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
    begins = Beginning(restore, go_back_behind, tuple(allow_unclaimed_state or ()), tuple(moved or ()))
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
        say(_loaded(options, program, given).describe())
    elif supervised:
        _keep(options, program, given)
    else:
        run_here(_loaded(options, program, given), options, kept)


def _loaded(options: RunOptions, program: str, arguments: Sequence[str]) -> Pipeline:
    """Return the pipeline of the program, with what the command says instead of it."""
    submission = options.submission
    for file in submission.py_files:
        make_importable(importable_from(file))
    pipeline = load_pipeline(program, arguments)
    pipeline.submit_with(replace(submission, directory=program_place(program)))
    pipeline.override(parallelism=options.parallelism, checkpoint_dir=options.checkpoint_dir)
    begins = options.begins
    pipeline.begin_with(
        begins.restored, begins.go_back_behind, begins.allow_unclaimed_state, begins.moved, options.leave
    )
    return pipeline


def _keep(options: RunOptions, program: str, arguments: Sequence[str]) -> NoReturn:
    """Have drivers do it, from a keeper."""
    if options.fresh:
        _start_over(options, program, arguments)
    become_keeper(_orders(options, program, arguments))


def _orders(options: RunOptions, program: str, arguments: Sequence[str]) -> Orders:
    """Return what a keeper is to do: run the same command, without what is its own."""
    command = [*COMMAND, "run", *options.of_a_driver(), "--", program, *arguments]
    name, strategy = Path(program).stem, options.strategy
    return Orders(command, strategy, name, is_standby=options.standby, as_json=options.as_json)


def _start_over(options: RunOptions, program: str, arguments: Sequence[str]) -> None:
    """Start over here and now, once: a keeper starts many drivers."""
    pipeline = _loaded(options, program, arguments)
    definition = pipeline.definition_on(options.master)
    make_checkpoint_directory(definition.config)
    with quick_jvm():
        parallelism, conf = definition.plan.parallelism, options.submission.conf
        check_cluster(pipeline.name, parallelism, None, options.master, conf)
    with shown_by(pipeline, options) as observer:
        start_over(definition, observer, options.leave)


def become_keeper(orders: Orders) -> NoReturn:
    """Replace this process by a keeper: one that has imported nothing of Spark or Arrow (docs/spec/keeper.md)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", keeping.__name__, orders.encoded()])
