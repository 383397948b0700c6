"""``headgate nexmark``: run the queries of the NEXMark benchmark over generated events."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headgate.api.config import Checkpointing
from headgate.api.pipeline import Pipeline
from headgate.cli.options import (
    MasterOption,
    ParallelismOption,
    ProgressJsonOption,
    QuietOption,
    RunOptions,
    StartPoint,
)
from headgate.cli.output import say
from headgate.cli.run import run_here
from headgate.cli.supervisor import SupervisorClient
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.memory import Discard
from headgate.nexmark.events import Nexmark
from headgate.nexmark.queries import Tables, in_order, query

app = typer.Typer(help="The queries of the NEXMark benchmark.", no_args_is_help=True)

EVENTS = 1_000_000


@app.command("list")
def list_queries() -> None:
    """List the queries that there are."""
    for found in in_order():
        say(f"{found.name:4} {found.about}")


@app.command("run")
def run_query(
    name: Annotated[str, typer.Argument(metavar="QUERY", help="Name of the query, such as q5.")],
    events: Annotated[int, typer.Option(help="Number of persons, auctions and bids together.")] = EVENTS,
    tps: Annotated[
        int, typer.Option(help="Events within a second of event time. It says nothing about speed.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Another seed gives other events.")] = 0,
    use_sql: Annotated[bool, typer.Option("--sql", help="Run its text in SQL.")] = False,
    parallelism: ParallelismOption = None,
    interval: Annotated[str, typer.Option(help="Time between checkpoints.")] = "1s",
    output: Annotated[
        Path | None, typer.Option(help="Directory for Parquet files of the results; without it they are discarded.")
    ] = None,
    master: MasterOption = None,
    quiet: QuietOption = False,
    as_json: ProgressJsonOption = False,
) -> None:
    """Run a query over generated events until they end, and print how fast it was.

    The checkpoints are kept in a temporary directory, which is removed at the end.
    """
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="headgate-nexmark-"))
        pipeline = Pipeline(f"nexmark-{name}", checkpointing=Checkpointing(dir=directory, interval=interval))
        tables = Tables(pipeline, partial(Nexmark, events=events, tps=tps, seed=seed))
        found = query(name)
        results = tables.sql(found.sql) if use_sql else found.build(tables)
        files = None if output is None else FileSink(output, "parquet", partition_by=found.partition_by)
        results.sink(files or Discard(), name="results")
        pipeline.override(parallelism=parallelism)
        begins = StartPoint(None, None, ())
        options = RunOptions(master, parallelism, None, begins, quiet, as_json, False, False, None)
        options.check()
        began_s = time.monotonic()
        run_here(pipeline, options, SupervisorClient.from_environment())
        took_s = time.monotonic() - began_s
    if not quiet and not as_json:
        say(f"{name}: {events:,} events in {took_s:.1f} s, the start of Spark included", err=True)
