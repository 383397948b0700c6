"""``headgate reset``: a pipeline starts over; its checkpoints and everything that it has written go.

Counterparts: ``runtime.driver.starting_over``, which does it, and ``headgate run --fresh``, which has the program.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.cli.options import DirOption, JsonOption, PipelineArgument
from headgate.cli.text import count_text, say
from headgate.connectors.recorded import sink_of
from headgate.model.targets import Target, TargetKind
from headgate.runtime.driver.reset_plan import Found, Plan
from headgate.runtime.driver.starting_over import StartingOver
from headgate.storage.backends import absolute_location

NAMES_MAX = 3
"""Of the files that stay, so many are named."""


def reset(
    pipeline: PipelineArgument,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    leave: Annotated[
        list[str] | None,
        typer.Option(help="A sink whose target no longer exists: it is not emptied. May be repeated."),
    ] = None,
) -> None:
    """Make a pipeline start over: delete its checkpoints and all files and events that it has written.

    The command lists what it will delete, and asks. It deletes all or nothing: if it is killed half-way, the same
    command, or the next start of the pipeline, finishes the job. Savepoints and files of others are kept.

    A pipeline with a sink of your own needs its program: headgate run PROGRAM --fresh. With --json the command only
    lists what it would delete, unless --yes is given as well.

    If a target cannot be reached, nothing is deleted. If it no longer exists, name its sink with --leave.
    """
    root = absolute_location(directory)
    with StartingOver.holding_the_lock(root, pipeline, None, leave=leave or ()) as resetting:
        was_begun = not leave and resetting.finish()  # else that is ordered anew, without what is left
        plan = resetting.look()
        if as_json:
            is_wanted = yes and not plan.is_empty
            if is_wanted:
                resetting.carry_out(plan)
            typer.echo(json.dumps({**_facts(plan), "is_reset": is_wanted or was_begun}))
            return
        if plan.is_empty:
            say(f"Nothing to delete: the next start of {pipeline} begins at the beginning.")
            return
        say(_text(plan))
        if not yes:
            typer.confirm("Delete all of this?", abort=True)
        resetting.carry_out(plan)
    say(f"{pipeline} is reset: its next start begins at the beginning.")


def _text(plan: Plan) -> str:
    """Return what goes and what stays."""
    rows = [("checkpoints", _checkpoints(plan))]
    rows += [("input", f"the captured DataFrame of source '{name}'") for name in plan.captured]
    rows += [(_kind(found), _held(found)) for found in plan.targets if found.holding.what]
    lines = [f"To start over, pipeline {plan.pipeline} loses:", ""]
    lines += [f"  {what:<12} {text}" for what, text in rows]
    return "\n".join([*lines, "", *_staying(plan), ""])


def _checkpoints(plan: Plan) -> str:
    if not plan.checkpoints:
        return f"none completed in {plan.home}"
    return f"{count_text(len(plan.checkpoints))} in {plan.home}, the newest is {plan.checkpoints[0].checkpoint}"


def _kind(found: Found) -> str:
    return {TargetKind.FILES: "files", TargetKind.STREAM: "stream"}.get(found.target.kind, "output")


def _held(found: Found) -> str:
    preposition = "of" if found.target.kind is TargetKind.STREAM else "in"
    return f"{found.holding.what} {preposition} {found.holding.where} (sink '{found.target.sink}')"


def _staying(plan: Plan) -> list[str]:
    lines = [_others(found) for found in plan.targets if found.holding.stays]
    streams = [found.target.stream for found in plan.targets if found.target.stream and found.holding.what]
    lines += [f"Readers of stream {stream} have to start over, too." for stream in sorted(set(streams))]
    lines += [_left(plan, target) for target in plan.left]
    return [*lines, "Savepoints stay."]


def _left(plan: Plan, target: Target) -> str:
    sink = sink_of(target)
    where = f"stream {target.stream} in {target.place}" if target.stream else target.place
    how = "" if sink is None else f": {sink.how_to_forget(plan.pipeline, target.sink)}"
    return (
        f"Sink '{target.sink}' is left as it is ({where}); no start writes there before it was made to forget whose it "
        f"is{how}"
    )


def _others(found: Found) -> str:
    """Return what is beside the output, by name if it is not much."""
    names, count = found.holding.stays, len(found.holding.stays)
    more = f" and {count_text(count - NAMES_MAX)} more" if count > NAMES_MAX else ""
    who = "file that it has not written stays" if count == 1 else "files that it has not written stay"
    return f"{count_text(count)} {who} in {found.holding.where}: {', '.join(names[:NAMES_MAX])}{more}"


def _facts(plan: Plan) -> dict[str, object]:
    return {
        "pipeline": plan.pipeline,
        "checkpoints": [int(manifest.checkpoint) for manifest in plan.checkpoints],
        "home": plan.home,
        "captured": list(plan.captured),
        "left": sorted({target.sink for target in plan.left}),
        "sinks": [
            {
                "sink": found.target.sink,
                "kind": found.target.kind.value,
                "where": found.holding.where,
                "holds": found.holding.what,
                "stays": list(found.holding.stays),
            }
            for found in plan.targets
        ],
    }
