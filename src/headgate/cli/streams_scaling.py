"""``headgate streams scaling``: how a stream is scaled by itself.

Counterpart: ``headgate.store.autoscaled_store``. ``streams`` has the other commands.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.streams_open import JsonOption, Name, StoreOption, answer, opened
from headgate.errors import UsageError
from headgate.store.scaling import Scaling


def add_scaling(app: typer.Typer) -> None:
    """Add the command of this file to those about streams."""
    app.command("scaling")(scaling)


def scaling(
    name: Name,
    events: Annotated[int | None, typer.Option("--events-per-second", help="Target for one segment.")] = None,
    data: Annotated[str | None, typer.Option("--bytes-per-second", help="Target for one segment, such as 1MB.")] = None,
    least: Annotated[int, typer.Option("--min-segments", help="Least number of segments.")] = 1,
    most: Annotated[int, typer.Option("--max-segments", help="Greatest number of segments.")] = 64,
    cool_down: Annotated[str, typer.Option("--cool-down", help="Time between two steps.")] = "10 minutes",
    off: Annotated[bool, typer.Option("--off", help="Turn automatic scaling off.")] = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Show or set how a stream scales automatically: hot segments are split, cold neighbours merged.

    Processes that write to the stream check once a minute.
    """
    is_set = events is not None or data is not None
    with opened(store) as opened_store:
        if off and is_set:
            raise UsageError("--off goes with neither --events-per-second nor --bytes-per-second")
        if off:
            opened_store.set_scaling(name, None)
        elif is_set:
            opened_store.set_scaling(name, Scaling(events, data, least, most, cool_down))
        policy = opened_store.find(name).scaling
        told = f"stream {name}: " + ("it is scaled by hand only" if policy is None else str(policy))
        answer(told, {"stream": name, "scaling": None if policy is None else str(policy)}, as_json=as_json)
