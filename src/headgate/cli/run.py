"""``headgate run``: run the pipeline of a program and show its progress."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from headgate.api.pipeline import Pipeline
from headgate.api.running import run_to_end
from headgate.cli.load import load_pipeline
from headgate.cli.progress import JsonLinesProgress, LiveProgress, PlainProgress, Quiet, ShownObserver
from headgate.cli.text import count_text, duration_text
from headgate.errors import UsageError
from headgate.model.progress import PipelineHandle, RunResult
from headgate.spark.session import quick_jvm


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
    describe: Annotated[bool, typer.Option("--describe", help="Print the plan and exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write progress as JSON lines.")] = False,
) -> None:
    """Run a pipeline until its input ends.

    The program is loaded, not executed as a script: the pipeline is what it calls 'pipeline' or 'p', or what its
    function pipeline() returns. Ctrl-C or SIGTERM stops after a last checkpoint; the same command continues from
    there. SIGUSR1 drains: reading stops, everything in flight is processed, and the pipeline has finished. 'headgate
    stop' sends either from another terminal.
    """
    if quiet and as_json:
        raise UsageError("give --quiet or --json, not both")
    pipeline = load_pipeline(program, arguments or ())
    pipeline.override(parallelism=parallelism, checkpoint_dir=checkpoint_dir)
    if describe:
        typer.echo(pipeline.describe())
        return
    with _observer(pipeline, quiet, as_json) as observer:
        result = run_to_end(lambda: _started(pipeline, master, observer))
    if not quiet and not as_json:
        typer.echo(f"{pipeline.name}: {result_text(result)}", err=True)


def _started(pipeline: Pipeline, master: str | None, observer: ShownObserver) -> PipelineHandle:
    with quick_jvm():  # this process does nothing else with Spark
        return pipeline.start(master, observer=observer)


def result_text(result: RunResult) -> str:
    """Return how a run ended, in one sentence."""
    ended = "drained" if result.is_drained else "finished"
    how = ended if result.is_finished else "stopped; the same command continues"
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
