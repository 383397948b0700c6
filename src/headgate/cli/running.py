"""Runs the pipeline of ``headgate run`` in this process, at once or when its turn has come, and shows how it goes.

Counterparts: ``cli.run`` says what is to run, ``cli.standby`` when it is a standby's turn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import typer

from headgate.api.pipeline import METRICS_HOST, Pipeline
from headgate.api.preparing import make_checkpoint_directory
from headgate.api.running import NumbersPort, run_to_end, start_with_metrics
from headgate.cli.kept import Kept
from headgate.cli.page import ShownByPage
from headgate.cli.progress import JsonLinesProgress, LiveProgress, PlainProgress, Quiet, ShownObserver
from headgate.cli.run_options import RunOptions
from headgate.cli.standby import StandingBy, jvm_check
from headgate.cli.terminal import Terminal
from headgate.cli.text import result_text, say
from headgate.cli.tips import prepare_tip
from headgate.errors import HeadgateError, UsageError
from headgate.model.progress import PipelineHandle, RunResult
from headgate.runtime.driver.succession import Succession, succeeding
from headgate.spark.jvm_settings import quick_jvm
from headgate.spark.session import WarmSession

_R = TypeVar("_R")


def run_here(pipeline: Pipeline, options: RunOptions, kept: Kept) -> None:
    """Run in this process, at once or when its turn has come, and say how it ended."""
    result = _standing_by(pipeline, options, kept) if options.standby else _running(pipeline, options, kept)
    if result is not None and not options.quiet and not options.as_json:
        say(f"{pipeline.name}: {result_text(result)}", err=True)
        tip = prepare_tip(options.master, os.environ, is_terminal=_is_terminal()) if not kept.keeper else None
        if tip is not None:
            say(tip, err=True)


def _is_terminal() -> bool:
    return Terminal(stderr=True).is_terminal


def shown_by(pipeline: Pipeline, options: RunOptions) -> ShownObserver:
    """Return who shows progress in this terminal."""
    if options.quiet:
        return Quiet()
    if options.as_json:
        return JsonLinesProgress(pipeline.name)
    console = Terminal(stderr=True)
    return LiveProgress(pipeline.name, console) if console.is_terminal else PlainProgress(pipeline.name)


def metrics_port(options: RunOptions, must_run: bool) -> NumbersPort | None:
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
        say(f"running without metrics: {error}", err=True)
        return None


def _running(pipeline: Pipeline, options: RunOptions, kept: Kept) -> RunResult:
    port = metrics_port(options, kept.keeper != 0)
    with _observer(pipeline, options, kept.keeper != 0) as observer:
        return _told([observer], lambda: run_to_end(lambda: _started(pipeline, options, observer, kept, port)))


def _started(
    pipeline: Pipeline, options: RunOptions, observer: ShownObserver, kept: Kept, port: NumbersPort | None
) -> PipelineHandle:
    kept.listens()
    place = Succession(kept.claimant, kept.after, kept.claimed, None, kept.wished, kept.keeper, kept.restarts)

    def start() -> PipelineHandle:
        push = options.metrics_push
        return pipeline.start(options.master, observer=observer, fresh=options.fresh, metrics_push=push)

    with succeeding(place), quick_jvm():  # this process does nothing else with Spark
        return _begun(port, pipeline, observer, start)


def _standing_by(pipeline: Pipeline, options: RunOptions, kept: Kept) -> RunResult | None:
    """Wait for a turn and run; None when it never came."""
    definition = pipeline.definition_on(options.master)
    config = definition.config
    observers: list[ShownObserver] = []
    make_checkpoint_directory(config)  # as the start of a pipeline does it: whoever looks there first makes it

    def tell(notice: str, text: str) -> None:
        shown.close()  # the progress of a takeover that came too late
        if options.as_json:
            typer.echo(json.dumps({"event": "standby", "notice": notice, "text": text}))
        elif not options.quiet:
            say(f"{config.name}: {text}", err=True)

    with quick_jvm(), ExitStack() as opened, ExitStack() as shown:  # this process does nothing else with Spark
        conf = options.submission.conf
        session = WarmSession(config.name, definition.plan.parallelism, options.master, conf)
        opened.callback(session.close)

        def start() -> PipelineHandle:
            observer = shown.enter_context(_observer(pipeline, options, must_run=True))
            observers.append(observer)
            port = metrics_port(options, must_run=True)

            def takes_over() -> PipelineHandle:
                push = options.metrics_push
                return pipeline.start(options.master, spark=session.spark, observer=observer, metrics_push=push)

            return _begun(port, pipeline, observer, takes_over)

        check = jvm_check(lambda: session.is_alive)
        place = config.checkpoint_root, config.name
        standing = StandingBy(*place, kept, start, tell, check, options.silence_ms)
        return _told(observers, standing.run)


def _begun(
    port: NumbersPort | None, pipeline: Pipeline, observer: ShownObserver, start: Callable[[], PipelineHandle]
) -> PipelineHandle:
    handle = start() if port is None else start_with_metrics(port, pipeline.name, observer, start)
    observer.on_start(handle)
    return handle


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


def _observer(pipeline: Pipeline, options: RunOptions, must_run: bool) -> ShownObserver:
    """Return who shows progress; ``must_run`` as for ``metrics_port``."""
    shown = shown_by(pipeline, options)
    if options.page is None:
        return shown
    return ShownByPage(shown, pipeline.definition_on(options.master), options.page, must_run=must_run)
