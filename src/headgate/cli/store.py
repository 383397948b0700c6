"""The store for commands: opening it, its options, and ``headgate store serve``.

``serve`` gives a store in a directory to other processes and machines, until a signal. Counterpart:
``headgate.store.server``. Source: docs/spec/served-store.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from headgate.cli.options import JsonOption
from headgate.cli.output import say, size_text, time_text
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import HeadgateError, UsageError
from headgate.model.config import SecurityConfig
from headgate.store.addresses import PORT, TOKEN_FILE_VARIABLE
from headgate.store.client.connection import read_tokens
from headgate.store.location import store_root
from headgate.store.server.handlers import ServerCounts
from headgate.store.server.server import ServerOptions, StoreServer, own_token_file
from headgate.store.store import Store

StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Directory, or URL, of the store. Default: $HEADGATE_STORE, else .headgate/store."),
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
TOPIC, PRAVEGA = "kafka:", "pravega:"
ELSEWHERE = (TOPIC, PRAVEGA)
"""What names of other systems begin with, in a copy."""

Name = Annotated[str, typer.Argument(help="Name of the stream, such as app/logs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse options that were given.

    Raises:
        UsageError: one was.
    """
    for option, given in options.items():
        if given:
            raise UsageError(f"{option} is {why}")


def print_result(text: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    """Say what was done, for people or for programs."""
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        say(text)


def confirm(question: str, *, yes: bool, as_json: bool) -> None:
    """Ask, unless ``yes`` was said before; anything but yes ends the command. Where JSON goes, no question does."""
    if not yes:
        typer.confirm(question, abort=True, err=as_json)


@contextlib.contextmanager
def open_store(root: str | None, *, makes: bool = False, chunks: str | None = None) -> Iterator[Store]:
    """Give the store; errors of its user end the command with one sentence.

    ``makes``: also where there is none; ``chunks`` says where a store on a server is to keep its events.
    """
    try:
        if not makes and not Store.exists(root):
            raise UsageError(
                f"there is no stream store at {store_root(root)}; --store names another one, and "
                "'headgate streams create' makes one"
            )
        with Store.open(root, chunks=chunks) as store:
            yield store
    except HeadgateError as error:
        say(f"Error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
    except UnicodeEncodeError as error:
        say(f"Error: {error.object!r} is no text: it has bytes that are not UTF-8", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from error
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing is wrong
        raise typer.Exit(0) from None


app = typer.Typer(help="The store itself.", no_args_is_help=True)

PERIOD_S = 5.0
"""Between two lines about requests."""


Tell: TypeAlias = Callable[[str, dict[str, Any]], None]


@app.callback()
def group() -> None:
    """The store itself."""


@app.command("serve")
def serve(
    store: StoreOption = None,
    host: Annotated[
        str, typer.Option(help="Address of this machine to listen on; 0.0.0.0: all of them.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65_535)] = PORT,
    token_file: Annotated[
        str | None,
        typer.Option(
            help="File with the token that clients must know; if there are several, one per line. "
            "Default: from the environment, or else the file 'token' in the store's directory, made if missing."
        ),
    ] = None,
    tls: Annotated[
        bool | None, typer.Option("--tls/--no-tls", help="Encrypt connections. Default: not on loopback.")
    ] = None,
    certificate_file: Annotated[
        str | None,
        typer.Option(help="Certificate of the server, PEM; by default the server makes one."),
    ] = None,
    key_file: Annotated[str | None, typer.Option(help="Key of the certificate, PEM.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the store in a directory to other machines, until SIGTERM or Ctrl-C.

    The store is created if it does not exist. Clients open it as headgate://HOST:PORT, and need the token. Without
    --token-file, it is in the file that HEADGATE_STORE_TOKEN_FILE names, or in HEADGATE_STORE_TOKEN, or else in the
    file that is printed.
    """
    if "://" in store_root(store):
        raise UsageError(f"{store_root(store)} is no directory: a store that is shared already is not served once more")
    security = _security(tls, certificate_file, key_file)
    is_given = bool(read_tokens(token_file))
    is_over = threading.Event()
    tell = _tell_json if as_json else _tell_lines
    with open_store(store, makes=True) as own:
        made = "" if is_given else str(own_token_file(Path(own.root)))
        options = ServerOptions(
            host, port, partial(read_tokens, made or token_file), security, machine=socket.gethostname()
        )
        with own.serve(options) as server:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: is_over.set())
            _start(server, tell, own.root, made)
            _watch(server, is_over, tell)
        tell("stopped", {"counts": server.counts})


def _security(tls: bool | None, certificate_file: str | None, key_file: str | None) -> SecurityConfig:
    if (certificate_file is None) != (key_file is None):
        raise UsageError("--certificate-file and --key-file belong together: give both or none")
    if certificate_file is not None and tls is False:
        raise UsageError("--certificate-file has no use with --no-tls; leave one of them out")
    return SecurityConfig(tls=tls, certificate_file=certificate_file or "", key_file=key_file or "")


def _start(server: StoreServer, tell: Tell, root: str, token_file: str) -> None:
    tell(
        "serving",
        {
            "url": server.address.url,
            "store": root,
            "tls": server.tls is not None,
            "token_file": token_file,
            "pid": os.getpid(),
        },
    )


def _watch(server: StoreServer, is_over: threading.Event, tell: Tell) -> None:
    told = ServerCounts()
    while not is_over.wait(PERIOD_S):
        counts = server.counts
        if counts != told:
            tell("requests", {"counts": counts})
        told = counts


def _tell_json(event: str, fields: dict[str, Any]) -> None:
    told = {name: value for name, value in fields.items() if name != "counts"}
    told |= asdict(fields["counts"]) if "counts" in fields else {}
    typer.echo(json.dumps({"event": event, "at_ms": SYSTEM_CLOCK.wall_ms(), **told}))


def _tell_lines(event: str, fields: dict[str, Any]) -> None:
    if event == "serving":
        how = "encrypted" if fields["tls"] else "not encrypted"
        say(f"serving {fields['store']} at {fields['url']} ({how}, for those who have the token); Ctrl-C ends it")
        if fields["token_file"]:
            say(f"clients need: export {TOKEN_FILE_VARIABLE}={shlex.quote(fields['token_file'])}")
        return
    counts: ServerCounts = fields["counts"]
    parts = [f"{counts.requests:,} requests", f"{counts.errors:,} answered by an error"]
    parts += [f"{counts.refused:,} refused"] if counts.refused else []
    parts += [f"{counts.failures:,} failed"] if counts.failures else []
    parts += [f"{size_text(counts.bytes_in)} in", f"{size_text(counts.bytes_out)} out"]
    parts += [f"{counts.connections:,} connections"] if event == "requests" else []
    say(f"{time_text(SYSTEM_CLOCK.wall_ms())} {'stopped: ' if event == 'stopped' else ''}{', '.join(parts)}")
