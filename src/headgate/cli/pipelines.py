"""``headgate pipelines`` and ``headgate ui``: all pipelines of this user on this machine, as a list and as a page."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from typing import Annotated, TypeAlias

import typer
from rich.table import Table

from headgate.api.known import KnownPipeline, KnownState, Looker, known_fields
from headgate.cli.options import JsonOption
from headgate.cli.page import HOST, TOKEN, PagePlace
from headgate.cli.terminal import Terminal
from headgate.cli.text import duration_text, say, size_text, time_text
from headgate.storage.backends import absolute_location

PORT = 4_050

DirectoriesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--dir", help="Another directory of checkpoints to look at; may be given several times."),
]


def pipelines(directories: DirectoriesOption = None, as_json: JsonOption = False) -> None:
    """List the pipelines that you have run on this machine: what runs, the newest checkpoints, and the pages."""
    found = _looker(directories).look()
    if as_json:
        typer.echo(json.dumps([known_fields(one) for one in found]))
    elif not found:
        say("No pipeline is known here; 'headgate run PROGRAM.py' starts one, --dir DIR looks elsewhere.")
    else:
        _print(found)


def ui(
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = PORT,
    host: Annotated[
        str,
        typer.Option(help="Address of this machine to listen on; others than loopback need HEADGATE_UI_TOKEN."),
    ] = HOST,
    directories: DirectoriesOption = None,
) -> None:
    """Show the pipelines that you have run on this machine on a web page, live, until Ctrl-C.

    It leads to the pages of those that run with --ui. With a token in HEADGATE_UI_TOKEN, who has it may ask for
    checkpoints and savepoints, stop and drain; without one the page is read only.
    """
    PagePlace(port, host).check("--port")
    from headgate.web.overview import Overview, make_overview
    from headgate.web.serving import serving

    token = os.environ.pop(TOKEN, None) or None
    overview = Overview(_looker(directories))
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    with serving(partial(make_overview, overview), port, host, token, "--port") as address:
        more = "add #token=… with the token to be able to stop pipelines" if token else "read only"
        say(f"page: {address} ({more}); Ctrl-C ends it")
        is_over.wait()


def _looker(directories: list[str] | None) -> Looker:
    return Looker([absolute_location(directory) for directory in directories or ()])


def _print(found: list[KnownPipeline]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("pipeline", "state", "checkpoint", "triggered (UTC)", "duration", "size", "checkpoints in", "page"):
        table.add_column(title, justify="right" if title in ("checkpoint", "duration", "size") else "left")
    for one in found:
        numbers = [""] * 4
        if one.checkpoint is not None and one.triggered_ms is not None:
            numbers = [str(one.checkpoint), time_text(one.triggered_ms)]
            numbers += [duration_text(one.duration_ms or 0), size_text(one.size_bytes or 0)]
        table.add_row(one.name, one.state.value, *numbers, one.place, one.page)
    Terminal().print(table)
    for one in found:
        if one.detail and one.state in (KnownState.FAILED, KnownState.UNKNOWN, KnownState.RUNNING):
            say(f"{one.name}: {one.detail}")
