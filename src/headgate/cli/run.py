"""``headgate run``: run a pipeline here, below a supervisor, or as a standby (docs/spec/standby.md).

A standby carries out what ``protocol.supervision.standby`` decides, in the main thread; signals end it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never

import typer

from headgate.api.foreground import MetricsEndpoint, run_to_end, start_with_endpoint
from headgate.api.launch import make_checkpoint_directory, start_over
from headgate.api.pipeline import METRICS_HOST, Pipeline
from headgate.cli import supervisor
from headgate.cli.doctor import prepare_tip
from headgate.cli.options import (
    CheckpointDirOption,
    ConfOption,
    DescribeOption,
    FreshOption,
    FromOption,
    GoBackOption,
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
    ProgressJsonOption,
    PyFilesOption,
    QuietOption,
    RestartOption,
    RunOptions,
    SilenceOption,
    StandbyOption,
    StartPoint,
    SupervisedOption,
    UiHostOption,
    UiOption,
    UnclaimedOption,
    importable_from,
    load_pipeline,
    make_importable,
    set_log_directory,
)
from headgate.cli.output import (
    HOST,
    JsonLinesProgress,
    LiveProgress,
    PageAddress,
    PageObserver,
    PlainProgress,
    QuietObserver,
    RunObserver,
    Terminal,
    result_text,
    say,
)
from headgate.cli.supervisor import Orders, SupervisorClient
from headgate.dataclass import dataclass
from headgate.errors import FencedError, HeadgateError, PipelineFailed, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Course, owner_of
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
from headgate.runtime.driver.pipeline_lock import DRAIN, STOP, AlreadyRunning, read_holder
from headgate.runtime.driver.takeover import HeartbeatReader, Takeover, taking_over
from headgate.spark.jvm import quick_jvm
from headgate.spark.py_files import program_place
from headgate.spark.session import WarmContext, check_cluster
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
            FencedError: another driver took over from this one.
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
        """Run the pipeline; None when another process was quicker."""
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
            if claimed:  # it ran, and was replaced; else another process was quicker
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


_R = TypeVar("_R")


def run_here(pipeline: Pipeline, options: RunOptions, client: SupervisorClient) -> None:
    """Run in this process, at once or when its turn has come, and say how it ended."""
    result = _run_as_standby(pipeline, options, client) if options.standby else _run_now(pipeline, options, client)
    if result is not None and not options.quiet and not options.as_json:
        say(f"{pipeline.name}: {result_text(result)}", err=True)
        tip = prepare_tip(options.master, os.environ, is_terminal=_is_terminal()) if not client.supervisor_pid else None
        if tip is not None:
            say(tip, err=True)


def _is_terminal() -> bool:
    return Terminal(stderr=True).is_terminal


def terminal_observer(pipeline: Pipeline, options: RunOptions) -> RunObserver:
    """Return the observer that shows progress in this terminal."""
    if options.quiet:
        return QuietObserver()
    if options.as_json:
        return JsonLinesProgress(pipeline.name)
    console = Terminal(stderr=True)
    return LiveProgress(pipeline.name, console) if console.is_terminal else PlainProgress(pipeline.name)


def metrics_port(options: RunOptions, must_run: bool) -> MetricsEndpoint | None:
    """Return the port that was asked for.

    Raises:
        UsageError: it is taken. One that ``must_run``, because it goes on in another's place, runs without.
    """
    if options.metrics_port is None:
        return None
    from headgate.api.metrics import MetricsPort

    try:
        return MetricsPort(options.metrics_port, options.metrics_host or METRICS_HOST)
    except UsageError as error:
        if not must_run:
            raise
        say(f"running without metrics: {error}", err=True)
        return None


def _run_now(pipeline: Pipeline, options: RunOptions, client: SupervisorClient) -> RunResult:
    port = metrics_port(options, client.supervisor_pid != 0)
    with _make_observer(pipeline, options, client.supervisor_pid != 0) as observer:
        return _report_result(
            [observer], lambda: run_to_end(lambda: _start_pipeline(pipeline, options, observer, client, port))
        )


def _start_pipeline(
    pipeline: Pipeline,
    options: RunOptions,
    observer: RunObserver,
    client: SupervisorClient,
    port: MetricsEndpoint | None,
) -> PipelineHandle:
    # run_to_end has set its handlers before it starts anything: a signal is not deadly from here on (KR7)
    client.report_listening()
    place = Takeover(
        client.claimant,
        client.after,
        client.report_claim,
        None,
        client.report_course,
        client.supervisor_pid,
        client.restarts,
    )

    def start() -> PipelineHandle:
        push = options.metrics_push
        return pipeline.start(options.master, observer=observer, fresh=options.fresh, metrics_push=push)

    with taking_over(place), quick_jvm():  # this process does nothing else with Spark
        return _start_with_metrics(port, pipeline, observer, start)


def _run_as_standby(pipeline: Pipeline, options: RunOptions, client: SupervisorClient) -> RunResult | None:
    """Wait for a turn and run; None when it never came."""
    definition = pipeline.definition_on(options.master)
    config = definition.config
    observers: list[RunObserver] = []
    make_checkpoint_directory(config)  # a standby may be the first that looks there

    def tell(notice: str, text: str) -> None:
        shown.close()  # the progress of a takeover that came too late
        if options.as_json:
            typer.echo(json.dumps({"event": "standby", "notice": notice, "text": text}))
        elif not options.quiet:
            say(f"{config.name}: {text}", err=True)

    with quick_jvm(), ExitStack() as opened, ExitStack() as shown:  # this process does nothing else with Spark
        conf = options.submission.conf
        session = WarmContext(config.name, definition.plan.parallelism, options.master, conf)
        opened.callback(session.close)

        def start() -> PipelineHandle:
            observer = shown.enter_context(_make_observer(pipeline, options, must_run=True))
            observers.append(observer)
            port = metrics_port(options, must_run=True)

            def takes_over() -> PipelineHandle:
                push = options.metrics_push
                return pipeline.start(options.master, spark=session.spark, observer=observer, metrics_push=push)

            return _start_with_metrics(port, pipeline, observer, takes_over)

        check = jvm_check(lambda: session.is_alive)
        place = config.checkpoint_root, config.name
        standing = StandbyRunner(*place, client, start, tell, check, options.silence_ms)
        return _report_result(observers, standing.run)


def _start_with_metrics(
    port: MetricsEndpoint | None, pipeline: Pipeline, observer: RunObserver, start: Callable[[], PipelineHandle]
) -> PipelineHandle:
    handle = start() if port is None else start_with_endpoint(port, pipeline.name, observer, start)
    observer.on_start(handle)
    return handle


def _report_result(observers: Sequence[RunObserver], run: Callable[[], _R]) -> _R:
    """Report the result to the last observer; a standby has one for each takeover, or none."""
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


def _make_observer(pipeline: Pipeline, options: RunOptions, must_run: bool) -> RunObserver:
    """Return the observer of a run; ``must_run`` as for ``metrics_port``."""
    shown = terminal_observer(pipeline, options)
    if options.page is None:
        return shown
    return PageObserver(shown, pipeline.definition_on(options.master), options.page, must_run=must_run)


COMMAND = [sys.executable, "-P", "-m", "headgate.cli.__main__"]
"""``headgate``, whatever is in the working directory."""


def run(
    program: ProgramArgument,
    arguments: ProgramArguments = None,
    master: MasterOption = None,
    parallelism: ParallelismOption = None,
    checkpoint_dir: CheckpointDirOption = None,
    restore: FromOption = None,
    go_back_past: GoBackOption = None,
    allow_unclaimed_state: UnclaimedOption = None,
    moved: MovedOption = None,
    describe: DescribeOption = False,
    quiet: QuietOption = False,
    as_json: ProgressJsonOption = False,
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
    client = SupervisorClient.from_environment()
    begins = StartPoint(restore, go_back_past, tuple(allow_unclaimed_state or ()), tuple(moved or ()))
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
        page=None if ui is None else PageAddress(ui, ui_host or HOST),
        metrics_push=metrics_push,
    )
    if ui is None and ui_host is not None:
        raise UsageError("--ui-host is about --ui, which is not given")
    options.check()
    set_log_directory(log_dir)
    given = arguments or ()
    if describe:
        say(_load_program(options, program, given).describe())
    elif supervised:
        _supervise(options, program, given)
    else:
        run_here(_load_program(options, program, given), options, client)


def _load_program(options: RunOptions, program: str, arguments: Sequence[str]) -> Pipeline:
    """Return the pipeline of the program, with what the command says instead of it."""
    submission = options.submission
    for file in submission.py_files:
        make_importable(importable_from(file))
    pipeline = load_pipeline(program, arguments)
    pipeline.submit_with(replace(submission, directory=program_place(program)))
    pipeline.override(parallelism=options.parallelism, checkpoint_dir=options.checkpoint_dir)
    begins = options.begins
    pipeline.begin_with(begins.restored, begins.go_back_past, begins.allow_unclaimed_state, begins.moved, options.leave)
    return pipeline


def _supervise(options: RunOptions, program: str, arguments: Sequence[str]) -> NoReturn:
    """Have drivers do it, from a supervisor."""
    if options.fresh:
        _start_over(options, program, arguments)
    exec_supervisor(_orders(options, program, arguments))


def _orders(options: RunOptions, program: str, arguments: Sequence[str]) -> Orders:
    """Return what a supervisor is to do: run the same command, without what is its own."""
    command = [*COMMAND, "run", *options.of_a_driver(), "--", program, *arguments]
    name, strategy = Path(program).stem, options.strategy
    return Orders(command, strategy, name, is_standby=options.standby, as_json=options.as_json)


def _start_over(options: RunOptions, program: str, arguments: Sequence[str]) -> None:
    """Start over here and now, once: a supervisor starts many drivers."""
    pipeline = _load_program(options, program, arguments)
    definition = pipeline.definition_on(options.master)
    make_checkpoint_directory(definition.config)
    with quick_jvm():
        parallelism, conf = definition.plan.parallelism, options.submission.conf
        check_cluster(pipeline.name, parallelism, None, options.master, conf)
    with terminal_observer(pipeline, options) as observer:
        start_over(definition, observer, options.leave)


def exec_supervisor(orders: Orders) -> NoReturn:
    """Replace this process by a supervisor: one that has imported nothing of Spark or Arrow
    (docs/spec/driver-supervisor.md)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", supervisor.__name__, orders.encoded()])
