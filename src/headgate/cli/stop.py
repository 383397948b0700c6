"""``headgate stop`` and ``cancel``: stop, drain or cancel a pipeline that another process of this machine runs."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.cli.checkpoints import asked
from headgate.cli.options import LocalDirOption, PipelineArgument
from headgate.cli.text import say
from headgate.codec.lock_holder import Ending, LockHolder
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.progress import CheckpointOutcome
from headgate.model.run_request import RunRequest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.named import savepoint_at
from headgate.runtime.driver.stopping import RunningPipeline
from headgate.storage.backends import absolute_location, open_storage

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
    running = RunningPipeline.find(root, pipeline)
    how = "draining" if drain else "stopping"
    outcome: CheckpointOutcome | None = None
    if savepoint is None:
        running.ask(drain=drain)
        say(f"{pipeline}: {how} {running.holder.owner}", err=True)
    else:
        say(f"{pipeline}: {how} {running.holder.owner} with a savepoint", err=True)
        url = absolute_location(savepoint)
        was_there = _is_savepoint(url)
        outcome = asked(running, RunRequest(url, ends=True, drains=drain))
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
    running = RunningPipeline.find(root, pipeline)
    say(f"{pipeline}: cancelling {running.holder.owner}", err=True)
    asked(running, RunRequest(cancels=True))
    ended = _wait(running, CheckpointLog(open_storage(root), pipeline), pipeline)
    say(f"{pipeline}: {_outcome(ended, drain=False, cancel=True)}")


def _wait(running: RunningPipeline, log: CheckpointLog, pipeline: str, drain: bool = False) -> LockHolder:
    """Return how the run ended; say meanwhile which checkpoints are completed.

    One that did not end as it was asked to may be started again by others, who have to know (KR15, SB15).
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
                "cancelled; it is not known whether its checkpoints are removed: the next start begins anew, or "
                f"continues{at}"
            )
        case Ending.STOPPED:
            return f"{'cancelled' if cancel else 'stopped'}; started again, it continues{at}"
        case Ending.CANCELLED:
            return "cancelled, and its checkpoints are removed"
        case Ending.REPLACED:
            return "ended, and has been started again"
        case Ending.NONE | Ending.FAILED if drain and ended.keeper:
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
