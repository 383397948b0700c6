"""``headgate streams update``: other columns for a stream.

Counterpart: ``headgate.store.schema_store``. ``streams`` has the other commands.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.streams_open import JsonOption, Name, StoreOption, answer, opened
from headgate.cli.streams_text import parse_columns


def add_update(app: typer.Typer) -> None:
    """Add the command of this file to those about streams."""
    app.command("update")(update)


def update(
    name: Name,
    columns: Annotated[str, typer.Option(help="Columns that are added or get a wider type, as name:type,…")],
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Add columns to a stream, or widen the types of numbers. Stored events are not rewritten.

    They have null in new columns. Programs that write or read the former columns keep working.
    """
    with opened(store) as opened_store:
        info = opened_store.update_stream(name, columns=parse_columns(columns))
        found = ", ".join(f"{field.name}: {field.type}" for field in info.schema)
        facts = {"stream": info.name, "schema_version": info.schema_version}
        types = {field.name: str(field.type) for field in info.schema}
        answer(
            f"stream {info.name}: schema {info.schema_version}, {found}", {**facts, "columns": types}, as_json=as_json
        )
