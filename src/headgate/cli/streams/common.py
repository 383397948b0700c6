"""Options, store access and answers of the ``headgate streams`` commands."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from headgate.cli.output import say
from headgate.errors import HeadgateError, UsageError
from headgate.store.store import Store, store_root

StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Directory, or URL, of the store. Default: $HEADGATE_STORE, else .headgate/store."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Name = Annotated[str, typer.Argument(help="Name of the stream, such as app/logs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def print_result(text: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    """Say what was done, for people or for programs (CL4)."""
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
        if not makes and not Store.exists(root):  # CT13
            raise UsageError(
                f"there is no stream store at {store_root(root)}; --store names another one, and "
                "'headgate streams create' makes one"
            )
        with Store.open(root, chunks=chunks) as store:
            yield store
    except HeadgateError as error:
        say(f"Error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
    except UnicodeEncodeError as error:  # CL8
        say(f"Error: {error.object!r} is no text: it has bytes that are not UTF-8", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from error
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing is wrong
        raise typer.Exit(0) from None
