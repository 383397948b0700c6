"""``headgate checkpoints`` and ``headgate savepoints``: list, show and take them.

Reads only, but for ``take`` and ``discard``; a running pipeline is not disturbed. Never removes a savepoint.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.api.pipeline_registry import remembered_pipelines
from headgate.cli.options import AnyPipelineArgument, DirOption, JsonOption, PipelineArgument
from headgate.cli.output import Terminal, duration_text, say, size_text, time_text
from headgate.codec.snapshot import IN_FLIGHT_PREFIX
from headgate.display.progress import counted as number_of
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.config import Guarantee
from headgate.model.manifest import SAVEPOINT_VERSION, Claim, Manifest, Savepoint, SnapshotPart, SubtaskEntry
from headgate.model.progress import CheckpointOutcome, ControlRequest
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog, candidates, has_given_up
from headgate.protocol.checkpoints.restore_selection import KeptAside
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory, refuse_unless_newest_is_known, savepoints_below
from headgate.runtime.driver.pipeline_lock import RunningPipeline, is_running_here
from headgate.storage.base import NotFound
from headgate.storage.urls import absolute_location, is_missing, local_directory, open_storage

DATA_CHARS_MAX = 200
"""Characters shown of what a hook returned."""

LOOK_S = 0.05
"""Between two looks for the answer of a pipeline."""

app = typer.Typer(help="Completed checkpoints of pipelines.", no_args_is_help=True)


@app.command("list")
def list_checkpoints(
    pipeline: AnyPipelineArgument = None,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """List the completed checkpoints of a pipeline, or the pipelines of a directory."""
    if pipeline is None:
        names = _pipelines(directory)
        if not names and not as_json:
            say(f"There are no checkpoints in {absolute_location(directory)}.")
        if as_json:
            typer.echo(json.dumps(names))
        elif names:
            say("\n".join(names))
        return
    log = _read_log(directory, pipeline)
    if as_json:
        counted = log.counted()
        typer.echo(json.dumps([{**_entry_fields(entry), "counts": entry in counted} for entry in log.entries]))
    else:
        _print_entries(log)
        _print_aside(CheckpointLog(open_storage(absolute_location(directory)), pipeline).files.aside())


@app.command("show")
def show_checkpoint(
    pipeline: PipelineArgument,
    checkpoint: Annotated[int | None, typer.Argument(help="Id of the checkpoint; default is the newest.")] = None,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Show one checkpoint: the snapshot of each subtask, and what it promises to commit."""
    observed = _read_log(directory, pipeline)
    if checkpoint is None:
        refuse_unless_newest_is_known(observed)
    manifests = candidates(observed)
    found = [m for m in manifests if checkpoint in (None, m.checkpoint)]
    if not found:
        there = ", ".join(str(m.checkpoint) for m in reversed(manifests)) or "none"
        what = "completed checkpoint" if checkpoint is None else f"checkpoint {checkpoint}"
        raise UsageError(f"pipeline '{pipeline}' has no {what}; there is {there}")
    manifest = found[0]
    if as_json:
        typer.echo(json.dumps({**manifest_fields(manifest), "subtasks": subtask_fields(manifest)}))
    else:
        print_manifest(manifest)


@app.command("take")
def take_checkpoint(
    pipeline: PipelineArgument,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
) -> None:
    """Take a checkpoint of a pipeline that runs on this machine now, and wait until it has completed."""
    outcome = request_and_wait(running_pipeline(directory, pipeline), ControlRequest())
    if outcome.checkpoint is None:
        raise PipelineFailed(f"{pipeline}: there is no new checkpoint: {outcome.reason}")
    say(f"{pipeline}: checkpoint {outcome.checkpoint} is completed")


@app.command("discard")
def discard_checkpoints(
    pipeline: PipelineArgument,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove damaged checkpoints that were kept aside when a start went back to an older one."""
    _read_log(directory, pipeline)
    log = CheckpointLog(open_storage(absolute_location(directory)), pipeline)
    found = log.files.aside()
    if not found:
        say(f"Nothing is kept aside at {log.url}.")
        return
    _print_aside(found)
    if not yes:
        typer.confirm("Remove their files for good?", abort=True)
    say(f"{log.discard_aside()} files removed")


def running_pipeline(directory: str, pipeline: str) -> RunningPipeline:
    """Return the pipeline that runs with its checkpoints in ``directory``.

    Raises:
        UsageError: it does not. Says where one of its name runs on this machine.
    """
    root = absolute_location(directory)
    try:
        return RunningPipeline.find(root, pipeline)
    except UsageError as error:
        others = [place for name, place in remembered_pipelines() if name == pipeline and place != root]
        places = [place for place in others if _runs(place, pipeline)]
        if not places:
            raise
        raise UsageError(f"{error.message}. A pipeline '{pipeline}' runs with --dir {shlex.quote(places[0])}") from None


def _runs(place: str, pipeline: str) -> bool:
    try:
        return is_running_here(place, pipeline)
    except HeadgateError:  # another user's, or out of reach
        return False


def request_and_wait(running: RunningPipeline, request: ControlRequest) -> CheckpointOutcome:
    """Send a request to a running pipeline, and wait for its outcome."""
    ask = running.ask_for(request)
    try:
        while (outcome := ask.answered()) is None:
            if running.ended() is not None:
                return ask.answered() or CheckpointOutcome(None, "the pipeline ended")
            time.sleep(LOOK_S)
        return outcome
    finally:
        ask.remove()


def _print_aside(found: list[KeptAside]) -> None:
    for aside in found:
        what = f"kept aside: what came after checkpoint {aside.above} and before {aside.below}"
        say(f"{what}: {'; '.join(aside.why.splitlines())}", fg=typer.colors.RED)


def _pipelines(directory: str) -> list[str]:
    if is_missing(absolute_location(directory)):
        return []
    paths = open_storage(absolute_location(directory)).list("")
    return sorted({path.split("/log/", 1)[0] for path in paths if "/log/" in path})


def _read_log(directory: str, pipeline: str) -> ObservedLog:
    root = absolute_location(directory)
    if is_missing(root):
        raise UsageError(f"there are no checkpoints at {root}/{pipeline}: there is no directory {root}")
    log = CheckpointLog(open_storage(root), pipeline)
    observed = log.observe()
    if not observed.entries:
        others = ", ".join(_pipelines(directory)) or "none"
        raise UsageError(f"there are no checkpoints at {log.url}; the pipelines in this directory are: {others}")
    return observed


def _print_entries(log: ObservedLog) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("checkpoint", "generation", "triggered (UTC)", "duration", "size", "remark"):
        table.add_column(title, justify="left" if title in ("remark", "triggered (UTC)") else "right")
    damaged = []
    claims = 0
    counted = log.counted()
    for entry in log.entries:
        match entry.content:
            case Manifest() as m:
                remark = ("final" if m.is_final else "") + (" (draining)" if m.is_draining else "")
                remark += "" if m.mode is Guarantee.EXACTLY_ONCE else f" {m.mode.value}"
                remark += "" if m.place is None else f" restored from {m.place.url}"
                remark += "" if entry in counted else " (not counted)"
                moment, size = time_text(m.trigger_wall_ms), size_text(m.size_bytes)
                duration = duration_text(m.duration_ms)
                table.add_row(str(m.checkpoint), str(m.generation), moment, duration, size, remark.strip())
            case Damage() as damage if entry in counted:
                damaged.append(damage)
            case Claim():
                claims += 1
    nothing = f"No completed checkpoint yet; {number_of(claims, 'start')} recorded."
    if has_given_up(log):
        nothing = "Its checkpoints were removed when it was cancelled or had failed; another start begins from nothing."
    Terminal().print(table if table.row_count and not has_given_up(log) else nothing)
    for damage in damaged:
        say(f"{damage.path} cannot be used: {damage.problem}", fg=typer.colors.RED)
    for sequence in log.lost():
        say(f"missing: log entry {sequence}", fg=typer.colors.RED)


def print_manifest(manifest: Manifest) -> None:
    """Print what a checkpoint, or a savepoint, holds."""
    fields = manifest_fields(manifest)
    for name, value in fields.items():
        if name not in ("state", "hooks") and value != "":
            say(f"{name.replace('_', ' ')}: {value}")
    table = Table(box=None, pad_edge=False)
    for title in ("subtask", "size", "rows", "committables", "snapshot"):
        table.add_column(title)
    for row in subtask_fields(manifest):
        size, path = size_text(row["size_bytes"]), row["path"] or "inline"
        table.add_row(row["subtask"], size, _rows_text(row["rows"]), str(row["committables"]), path)
    Terminal().print(table)
    if any(entry.delays is not None for entry in manifest.entries):
        Terminal().print(_delays_table(manifest))
    for node, text in manifest.state_texts.items():
        if text:
            say(f"state of {node}: {text}")
    for name, found in fields["hooks"].items():
        say(f"hook {name}: {'nothing' if found is None else found}")
    for name, counts in _rows_by_state(manifest).items():
        each = ", ".join(f"{subtask} {count:,}" for subtask, count in counts.items())
        say(f"rows of {name}: {sum(counts.values()):,} ({each})")


def _delays_table(manifest: Manifest) -> Table:
    """Return how long each subtask waited for barriers, and the in-flight data of unaligned checkpoints."""
    table = Table(box=None, pad_edge=False)
    for title in ("subtask", "first barrier after", "aligned for", "in flight"):
        table.add_column(title, justify="left" if title == "subtask" else "right")
    for entry in manifest.entries:
        if entry.delays is not None:
            start, alignment = duration_text(entry.delays.start_ms), duration_text(entry.delays.alignment_ms)
            table.add_row(str(entry.subtask), start, alignment, size_text(_in_flight_bytes(entry)))
    return table


def _in_flight_bytes(entry: SubtaskEntry) -> int:
    return sum(part.size_bytes for part in entry.parts if part.section.startswith(IN_FLIGHT_PREFIX))


def _rows_text(rows: dict[str, dict[str, int]] | None) -> str:
    """Return the number of rows in all states of one subtask; "?" if a snapshot does not count them."""
    return "?" if rows is None else f"{sum(sum(states.values()) for states in rows.values()):,}"


def _rows_by_state(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return ``operator/state → subtask → rows``."""
    found: dict[str, dict[str, int]] = {}
    for entry in manifest.entries:
        for node, states in (entry.rows or {}).items():
            for state, count in states.items():
                found.setdefault(f"{node}/{state}", {})[str(entry.subtask)] = count
    return found


def _entry_fields(entry: ObservedEntry) -> dict[str, Any]:
    match entry.content:
        case Manifest() as manifest:
            return {"sequence": entry.sequence, "kind": "checkpoint", **manifest_fields(manifest)}
        case Claim() as claim:
            return {
                "sequence": entry.sequence,
                "kind": "claim",
                "generation": claim.generation,
                "owner": claim.owner,
                "wall_ms": claim.wall_ms,
            }
        case Damage() as damage:
            return {"sequence": entry.sequence, "kind": "unreadable", "path": damage.path, "problem": damage.problem}


def manifest_fields(manifest: Manifest) -> dict[str, Any]:
    """Return what a checkpoint is, for people and for JSON."""
    return {
        "checkpoint": manifest.checkpoint,
        "generation": manifest.generation,
        "triggered": time_text(manifest.trigger_wall_ms),
        "duration_ms": manifest.duration_ms,
        "size_bytes": manifest.size_bytes,
        "parallelism": manifest.parallelism,
        "key_groups": manifest.max_parallelism,
        "mode": manifest.mode.value,
        "is_final": manifest.is_final,
        "is_draining": manifest.is_draining,
        "committables": len(manifest.committables),
        "restored_from": "" if manifest.origin is None else manifest.origin.url,
        "state": {node: text for node, text in manifest.state_texts.items() if text},
        "hooks": {state.hook: None if state.data is None else _data_text(state.data) for state in manifest.hooks},
    }


def _data_text(data: bytes) -> str:
    """Return what a hook returned: its beginning as text where it is text, else as numbers."""
    size = f"{len(data):,} bytes"
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode()
        if text.isprintable():
            return f"{size}: {text[:DATA_CHARS_MAX]}{'…' if len(text) > DATA_CHARS_MAX else ''}"
    shown = data[: DATA_CHARS_MAX // 2]
    return f"{size}: {shown.hex()}{'…' if len(data) > len(shown) else ''}"


def subtask_fields(manifest: Manifest) -> list[dict[str, Any]]:
    """Return what each subtask contributed."""
    return [
        {
            "subtask": str(entry.subtask),
            "size_bytes": entry.size_bytes,
            "rows": entry.rows,
            "committables": len(entry.committables),
            "path": ", ".join(dict.fromkeys(part.path for part in entry.parts if part.path)),
            "in_flight_bytes": _in_flight_bytes(entry),
            "start_delay_ms": None if entry.delays is None else entry.delays.start_ms,
            "alignment_ms": None if entry.delays is None else entry.delays.alignment_ms,
            "parts": [_part_fields(part) for part in entry.parts],
        }
        for entry in manifest.entries
    ]


def _part_fields(part: SnapshotPart) -> dict[str, Any]:
    keys = part.key_groups
    return {
        "section": part.section,
        "size_bytes": part.size_bytes,
        "key_groups": None if keys is None else [keys.first, keys.first + keys.count - 1],
        "path": part.path,
    }


savepoints_app = typer.Typer(help="Savepoints of pipelines.", no_args_is_help=True)


@savepoints_app.command("take")
def take_savepoint(
    pipeline: PipelineArgument,
    path: Annotated[str, typer.Argument(help="An empty or new directory, or a URL.")],
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
) -> None:
    """Write a savepoint of a pipeline that runs on this machine, and wait until it is complete."""
    outcome = request_and_wait(running_pipeline(directory, pipeline), ControlRequest(absolute_location(path)))
    if outcome.savepoint is None:
        raise PipelineFailed(f"{pipeline}: there is no savepoint: {outcome.reason}")
    say(f"{pipeline}: savepoint {outcome.savepoint} is complete (checkpoint {outcome.checkpoint})")


@savepoints_app.command("show")
def show_savepoint(
    path: Annotated[str, typer.Argument(help="Where the savepoint is.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a savepoint holds."""
    savepoint = _savepoint_at(absolute_location(path))
    if as_json:
        typer.echo(json.dumps({**_fields(savepoint), "subtasks": subtask_fields(savepoint.manifest)}))
        return
    say(f"savepoint of pipeline {savepoint.pipeline}, complete since {time_text(savepoint.taken_ms)} UTC")
    print_manifest(savepoint.manifest)


@savepoints_app.command("list")
def list_savepoints(
    path: Annotated[str, typer.Argument(help="A directory or a URL below which savepoints are.")],
    as_json: JsonOption = False,
) -> None:
    """List the savepoints below a path."""
    root = _existing(absolute_location(path))
    found = {where: _at_or_why_not(f"{root.rstrip('/')}/{where}".rstrip("/")) for where in savepoints_below(root)}
    if as_json:
        fields = [
            {"path": where, **(_fields(one) if isinstance(one, Savepoint) else {"problem": one})}
            for where, one in found.items()
        ]
        typer.echo(json.dumps(fields))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("savepoint", "pipeline", "checkpoint", "complete since (UTC)", "size", ""):
        table.add_column(title, justify="right" if title in ("checkpoint", "size") else "left")
    for where, one in found.items():
        if isinstance(one, Savepoint):
            manifest = one.manifest
            size, moment = size_text(manifest.size_bytes), time_text(one.taken_ms)
            table.add_row(where or ".", one.pipeline, str(manifest.checkpoint), moment, size, manifest.mode.value)
        else:
            table.add_row(where or ".", "", "", "", "", one)
    Terminal().print(table if found else f"There are no savepoints below {root}.")


def _savepoint_at(url: str) -> Savepoint:
    try:
        return SavepointDirectory(_existing(url)).read()
    except NotFound:
        raise UsageError(
            f"there is no savepoint at {url}; 'headgate savepoints list' shows those below a path"
        ) from None


def _at_or_why_not(url: str) -> Savepoint | str:
    try:
        return _savepoint_at(url)
    except HeadgateError as error:
        return str(error)


def _existing(url: str) -> str:
    """Return ``url``; a directory that is missing is not made by looking at it."""
    if is_missing(url):
        raise UsageError(f"there is no directory {local_directory(url)}")
    return url


def _fields(savepoint: Savepoint) -> dict[str, Any]:
    return {
        "format": SAVEPOINT_VERSION,
        "id": savepoint.id,
        "pipeline": savepoint.pipeline,
        "complete_since": time_text(savepoint.taken_ms),
        **manifest_fields(savepoint.manifest),
    }
