"""Commands on pipelines and the sinks that they own: stop, cancel, reset, list, the page of all, ``headgate sinks``."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.table import Table

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.api.pipeline_registry import KnownPipeline, KnownState, PipelineRegistry, known_fields
from headgate.cli.checkpoints import request_and_wait, running_pipeline
from headgate.cli.options import (
    DirOption,
    JsonOption,
    LocalDirOption,
    PipelineArgument,
    ProgramArguments,
    load_pipeline,
)
from headgate.cli.output import HOST, TOKEN, PageAddress, Terminal, count_text, duration_text, say, size_text, time_text
from headgate.codec.json_files import Ending, LockHolder
from headgate.connectors.fenced_sink import FencedSink
from headgate.connectors.files.file_sink import FileSink, owners_in
from headgate.connectors.registry import sink_of
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.pipeline_identity import Owner, Target, TargetKind
from headgate.model.progress import CheckpointOutcome, ControlRequest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import savepoint_at
from headgate.runtime.driver.pipeline_lock import RunningPipeline
from headgate.runtime.driver.reset import FoundTarget, Reset, ResetPlan
from headgate.storage.urls import absolute_location, is_missing, open_storage

sinks_app = typer.Typer(help="Owners of the sinks of a directory.", no_args_is_help=True)

Location = Annotated[str, typer.Argument(help="Directory or URL that the sink writes files to.")]


@sinks_app.command("list")
def list_sinks(directory: Location) -> None:
    """List the sinks that write to a directory, and the checkpoints that each belongs to."""
    url = absolute_location(directory)
    found = {} if is_missing(url) else owners_in(open_storage(url))
    for sink, owner in found.items():
        say(f"{sink.pipeline}/{sink.node} {ownership_text(owner)}")
    if not found:
        say(f"No sink has written to {url}.")


@sinks_app.command("forget")
def forget_sink(
    owner: Annotated[str, typer.Argument(help="PIPELINE/SINK, as in the error message.")],
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|PROGRAM",
            help="Directory or URL that the sink writes files to; for a sink of your own the Python file that makes "
            "the pipeline.",
        ),
    ],
    arguments: ProgramArguments = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Allow a pipeline whose checkpoints were removed to start again with the output that it has already written.

    The target forgets which checkpoints the sink belongs to, so the next start of a pipeline of that name can claim it.
    All committed output stays. That start removes output that was prepared and never committed.
    """
    pipeline, _, node = owner.partition("/")
    if place.endswith(".py") or Path(place).is_file():
        where = place
        found, forget = _program_sink(pipeline, node, place, arguments or ())
    else:
        where = absolute_location(place)
        found, forget = _file_sink(pipeline, node, where)
    if not found.generation and found.life is None:
        raise UsageError(f"no pipeline has written to {where} as '{owner}'")
    if not yes:
        typer.confirm(f"Forget that {owner} {ownership_text(found)}?", abort=True)
    forget()
    say(f"{owner} is forgotten: the next start of that pipeline has it")


def _file_sink(pipeline: str, node: str, url: str) -> tuple[Owner, Callable[[], object]]:
    """Return the owner of the files, and a function that makes their directory forget it."""
    if is_missing(url):
        return Owner(), lambda: None
    target = FileSink(url).target(pipeline, node)
    return target.owner(), target.forget


def _program_sink(
    pipeline: str, node: str, program: str, arguments: Sequence[str]
) -> tuple[Owner, Callable[[], object]]:
    """Return the owner of the target of a sink in ``program``, and a function that makes it forget it.

    ``node`` may be a former name, by which only the target knows the sink.

    Raises:
        UsageError: there is no such sink of a user's own.
    """
    definition = load_pipeline(program, arguments).definition()
    sinks = {str(one.name): one.spec for one in definition.graph.nodes if isinstance(one.spec, FencedSink)}
    named = [sinks[node]] if node in sinks else []
    known = [one for one in sinks.values() if not one.owner(pipeline, node).is_unknown] or named
    if definition.config.name != pipeline or not known:
        there = ", ".join(f"'{definition.config.name}/{name}'" for name in sinks) or "none"
        raise UsageError(f"{program} has no sink of its own called '{pipeline}/{node}'; there is {there}")
    return known[0].owner(pipeline, node), lambda: [sink.forget_owner(pipeline, node) for sink in known]


def ownership_text(owner: Owner) -> str:
    """Return the owner as the end of a sentence."""
    if owner.life is not None:
        life = owner.life
        return f"belongs to the checkpoints in {life.home}, begun on {life.host} at {time_text(life.begun_ms)} UTC"
    return "is forgotten" if owner.is_forgotten else "was written to without a checkpoint directory"


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
    PageAddress(port, host).check("--port")
    from headgate.web.app import Overview, make_overview_app, serve_page

    token = os.environ.pop(TOKEN, None) or None
    overview = Overview(_looker(directories))
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    with serve_page(partial(make_overview_app, overview), port, host, token, "--port") as address:
        more = "add #token=… with the token to be able to stop pipelines" if token else "read only"
        say(f"page: {address} ({more}); Ctrl-C ends it")
        is_over.wait()


def _looker(directories: list[str] | None) -> PipelineRegistry:
    return PipelineRegistry([absolute_location(directory) for directory in directories or ()])


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


LOOK_S = 0.1
"""How often the pipeline's process is looked at."""


def stop(
    pipeline: PipelineArgument,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain",
            help="End the sources and process everything in flight; the pipeline is finished and does not continue. "
            "Timers of processing time do not fire.",
        ),
    ] = False,
    checkpoints: LocalDirOption = CHECKPOINT_DIR_DEFAULT,
    savepoint: Annotated[
        str | None, typer.Option(help="Directory or URL at which a savepoint of the last checkpoint is written.")
    ] = None,
) -> None:
    """Stop a pipeline that runs on this machine, and wait until it has ended.

    The pipeline takes a last checkpoint, and its next run continues from there. With --drain it stops reading, fires
    windows and timers of event time, processes everything in flight and takes the final checkpoint: then it has
    finished for good. Timers of processing time do not fire, so functions do not emit what they keep for these. If a
    pipeline is draining already, 'headgate stop' stops it at once, after a last checkpoint.
    """
    root = absolute_location(checkpoints)
    running = running_pipeline(checkpoints, pipeline)
    how = "draining" if drain else "stopping"
    outcome: CheckpointOutcome | None = None
    if savepoint is None:
        running.ask(drain=drain)
        say(f"{pipeline}: {how} {running.holder.owner}", err=True)
    else:
        say(f"{pipeline}: {how} {running.holder.owner} with a savepoint", err=True)
        url = absolute_location(savepoint)
        # one that was there before is not what this command asks for
        was_there = _is_savepoint(url)
        outcome = request_and_wait(running, ControlRequest(url, ends=True, drains=drain))
        if outcome.is_refused:
            raise UsageError(f"{pipeline} goes on, because the savepoint cannot be there: {outcome.reason}")
    ended = _wait(running, CheckpointLog(open_storage(root), pipeline), pipeline, drain)
    try:
        say(f"{pipeline}: {_outcome(ended, drain)}")
    except PipelineFailed as error:
        if savepoint is None or was_there or not _is_savepoint(url):
            raise
        raise PipelineFailed(f"{error}; the savepoint {url} is complete") from None
    if outcome is not None:
        if outcome.savepoint is None:
            raise PipelineFailed(f"{pipeline}: there is no savepoint: {outcome.reason}")
        say(f"{pipeline}: savepoint {outcome.savepoint} is complete")


def cancel(
    pipeline: PipelineArgument,
    checkpoints: LocalDirOption = CHECKPOINT_DIR_DEFAULT,
) -> None:
    """End a pipeline that runs on this machine without a last checkpoint, and wait until it has ended.

    Its next run continues from the newest checkpoint and processes everything after it again. If the program says
    Checkpointing(retain_on_cancel=False), the checkpoints are removed instead, and the pipeline does not continue.
    Savepoints stay. 'headgate stop' takes a last checkpoint and never removes anything.
    """
    root = absolute_location(checkpoints)
    running = running_pipeline(checkpoints, pipeline)
    say(f"{pipeline}: cancelling {running.holder.owner}", err=True)
    request_and_wait(running, ControlRequest(cancels=True))
    ended = _wait(running, CheckpointLog(open_storage(root), pipeline), pipeline)
    say(f"{pipeline}: {_outcome(ended, drain=False, cancel=True)}")


def _wait(running: RunningPipeline, log: CheckpointLog, pipeline: str, drain: bool = False) -> LockHolder:
    """Return how the run ended; say meanwhile which checkpoints are completed.

    If it did not end as requested, the request is repeated to its supervisor and standbys (KR15).
    """
    shown = _newest(log)
    while (ended := running.ended()) is None:
        time.sleep(LOOK_S)
        newest = _newest(log)
        if newest is not None and newest != shown:
            shown = newest
            say(f"{pipeline}: checkpoint {newest} is completed", err=True)
    if ended.ending in (Ending.NONE, Ending.FAILED, Ending.REPLACED):
        running.insist(ended, drain=drain)
    return ended


def _is_savepoint(url: str) -> bool:
    """Whether there is a complete savepoint, as far as this process can see."""
    with suppress(HeadgateError):
        return savepoint_at(url) is not None
    return False


def _newest(log: CheckpointLog) -> int | None:
    return next((int(manifest.checkpoint) for manifest in candidates(log.observe())), None)


def _outcome(ended: LockHolder, drain: bool, *, cancel: bool = False) -> str:
    """Return one sentence.

    Raises:
        PipelineFailed: it ended in another way than it was asked to.
    """
    at = "" if ended.checkpoint is None else f" from checkpoint {ended.checkpoint}"
    match ended.ending:
        case Ending.DRAINED:
            return f"drained; everything that was read is processed (final checkpoint {ended.checkpoint})"
        case Ending.FINISHED:
            return f"finished; all its input had ended (final checkpoint {ended.checkpoint})"
        case Ending.STOPPED if drain:
            raise PipelineFailed(f"it was stopped before it had drained; started again, it continues{at}")
        case Ending.STOPPED if ended.is_in_doubt:
            return (
                "cancelled; it is not known whether its checkpoints are removed: the next start begins from nothing, "
                f"or continues{at}"
            )
        case Ending.STOPPED:
            return f"{'cancelled' if cancel else 'stopped'}; started again, it continues{at}"
        case Ending.CANCELLED:
            return "cancelled, and its checkpoints are removed"
        case Ending.REPLACED:
            return "ended, and has been started again"
        case Ending.NONE | Ending.FAILED if drain and ended.supervisor_pid:
            how = "died" if ended.ending is Ending.NONE else f"failed ({ended.reason})"
            raise PipelineFailed(
                f"the driver {how} before it had drained; if its supervisor starts it again, the next one drains on"
            )
        case Ending.FAILED:
            raise PipelineFailed(f"the pipeline failed before it had ended: {ended.reason}")
        case Ending.NONE:
            raise PipelineFailed(
                "the process of the pipeline died before it had ended; started again, it continues from its newest "
                "completed checkpoint"
            )


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
    with Reset.holding_the_lock(root, pipeline, None, leave=leave or ()) as resetting:
        was_begun = not leave and resetting.finish()  # else a new order is given, without the sinks left out
        plan = resetting.plan()
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


def _text(plan: ResetPlan) -> str:
    """Return what goes and what stays."""
    rows = [("checkpoints", _checkpoints(plan))]
    rows += [("input", f"the captured DataFrame of source '{name}'") for name in plan.captured]
    rows += [(_kind(found), _held(found)) for found in plan.targets if found.holding.what]
    lines = [f"To start over, pipeline {plan.pipeline} loses:", ""]
    lines += [f"  {what:<12} {text}" for what, text in rows]
    return "\n".join([*lines, "", *_staying(plan), ""])


def _checkpoints(plan: ResetPlan) -> str:
    if not plan.checkpoints:
        return f"none completed in {plan.home}"
    return f"{count_text(len(plan.checkpoints))} in {plan.home}, the newest is {plan.checkpoints[0].checkpoint}"


def _kind(found: FoundTarget) -> str:
    return {TargetKind.FILES: "files", TargetKind.STREAM: "stream"}.get(found.target.kind, "output")


def _held(found: FoundTarget) -> str:
    preposition = "of" if found.target.kind is TargetKind.STREAM else "in"
    return f"{found.holding.what} {preposition} {found.holding.where} (sink '{found.target.sink}')"


def _staying(plan: ResetPlan) -> list[str]:
    lines = [_others(found) for found in plan.targets if found.holding.stays]
    streams = [found.target.stream for found in plan.targets if found.target.stream and found.holding.what]
    lines += [f"Readers of stream {stream} have to start over, too." for stream in sorted(set(streams))]
    lines += [_left(plan, target) for target in plan.left]
    return [*lines, "Savepoints stay."]


def _left(plan: ResetPlan, target: Target) -> str:
    sink = sink_of(target)
    where = f"stream {target.stream} in {target.place}" if target.stream else target.place
    how = "" if sink is None else f": {sink.how_to_forget(plan.pipeline, target.sink)}"
    return (
        f"Sink '{target.sink}' is left as it is ({where}); no start writes there before it was made to forget whose it "
        f"is{how}"
    )


def _others(found: FoundTarget) -> str:
    """Return what is beside the output, by name if it is not much."""
    names, count = found.holding.stays, len(found.holding.stays)
    more = f" and {count_text(count - NAMES_MAX)} more" if count > NAMES_MAX else ""
    who = "file that it has not written stays" if count == 1 else "files that it has not written stay"
    return f"{count_text(count)} {who} in {found.holding.where}: {', '.join(names[:NAMES_MAX])}{more}"


def _facts(plan: ResetPlan) -> dict[str, object]:
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
