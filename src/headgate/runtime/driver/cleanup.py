"""Removes the checkpoints of a pipeline that was cancelled or failed permanently (docs/spec/retaining.md).

Order: claim, choose, recover the sinks, give the log up, remove files. Until the log is given up everything is as
after any start that died; from then on no checkpoint is restored, whatever is left of it.
``protocol.supervision.supervisor`` decides when this happens. Runs in the driver's storage thread.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.environment import ThreadEnded
from headgate.errors import FencedError, HeadgateError, UsageError
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import NextClaim
from headgate.protocol.checkpoints.restore_selection import UnrestorableCheckpoints
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.restore import check_compatible
from headgate.runtime.driver import restart
from headgate.runtime.driver.savepoint_start import is_same_directory
from headgate.runtime.driver.takeover import Takeover
from headgate.runtime.surroundings import Surroundings


def remove_checkpoints(
    definition: PipelineDefinition,
    log: CheckpointLog,
    takeover: Takeover,
    note: Callable[[str], None],
    around: Surroundings,
    unsound: UnrestorableCheckpoints | None = None,
    doubt: Callable[[str], None] | None = None,
) -> bool:
    """Commit what the newest checkpoint promises, abort the rest, then remove all checkpoints of the pipeline.

    Savepoints, what was set aside, and everything of another driver or pipeline stay. Never raises: what is in the way
    is noted, and keeps the checkpoints. ``unsound``: what workers of this run could not restore (R57). ``doubt`` is
    called in place of ``note`` when it is unknown whether they are given up.

    Returns:
        Whether no checkpoint can be restored any more.
    """
    try:
        settled = _settle_output(definition, log, takeover, note, around, unsound)
    except ThreadEnded:
        raise
    except BaseException as error:  # what a sink raises must not keep the run from its end
        note(f"the checkpoints are kept: {_said(error)}")
        return False
    if settled is None:
        # no checkpoint was ever completed, so there is none to give up, only files of aborted ones
        _sweep(log, note, around)
        return False
    if not _give_up(log, takeover.claimant, settled, note, doubt or note, around):
        return False
    note(f"the checkpoints at {log.url} were removed, because the pipeline does not retain them")
    return True


def _settle_output(
    definition: PipelineDefinition,
    log: CheckpointLog,
    takeover: Takeover,
    note: Callable[[str], None],
    around: Surroundings,
    unsound: UnrestorableCheckpoints | None,
) -> NextClaim | None:
    """Commit or abort all prepared output; return the claim that did so, None if there is nothing to give up.

    Raises:
        HeadgateError: the checkpoints have to stay.
    """
    mine = log.generation or takeover.after
    if not mine:  # C70
        raise UsageError("this run never got as far as to claim them")
    claimed = restart.claim(definition, log, takeover.claimant, mine, around)
    takeover.on_claim(claimed.next.generation)  # C74: the next generation must know that it follows one
    restored, choice = restart.choose_checkpoint(definition, log, claimed, around, unsound)
    _refuse_incomplete(choice)
    if restored is not None:
        check_compatible(restored, definition)
    # before the log is given up: it is all that knows what was promised (C71)
    restart.recover_sinks(definition, log, claimed.next.generation, restored, around, note).close()
    if restored is None:
        return None
    # output is settled by now: this refusal only keeps the checkpoints
    refuse_while_needed(log, claimed.log)
    return claimed.next


def _give_up(
    log: CheckpointLog,
    owner: str,
    settled: NextClaim,
    note: Callable[[str], None],
    doubt: Callable[[str], None],
    around: Surroundings,
) -> bool:
    """Give the log up, and remove files; return whether it is certain that it was given up."""
    wall_ms = around.wall_ms()
    try:
        restart.retry_transient(lambda: log.give_up(owner, wall_ms, settled.generation), around)
    except FencedError as error:
        return _was_given_up(log, settled, error, note, doubt, around)
    except ThreadEnded:
        raise
    except BaseException as error:
        # the entry may have been written all the same: neither "kept" nor "removed" would be true
        _note_doubt(log, error, doubt)
        return False
    # files follow: a crash here leaves garbage, which the next start sweeps, and no checkpoint
    _sweep(log, note, around)
    return True


def _was_given_up(
    log: CheckpointLog,
    settled: NextClaim,
    replaced: FencedError,
    note: Callable[[str], None],
    doubt: Callable[[str], None],
    around: Surroundings,
) -> bool:
    """Return whether the driver that claimed meanwhile began after our attempt, the answer to which was lost (C72).

    What is there is its own, also what is left of the former life.
    """
    try:
        life = recovery.life_of(restart.retry_transient(log.observe, around))
    except ThreadEnded:
        raise
    except BaseException as error:
        _note_doubt(log, error, doubt)
        return False
    if life == settled.life:
        note(f"the checkpoints are kept: {replaced}")
    return life != settled.life


def _note_doubt(log: CheckpointLog, error: BaseException, doubt: Callable[[str], None]) -> None:
    doubt(f"it is not known whether the checkpoints at {log.url} are given up; the next start sees: {_said(error)}")


def _sweep(log: CheckpointLog, note: Callable[[str], None], around: Surroundings) -> None:
    """Remove unneeded files; whatever fails, the run must come to its end."""
    try:
        restart.clean_up(log.files.sweep, around, note)
    except ThreadEnded:
        raise
    except BaseException as error:
        note(f"could not remove old checkpoint files: {_said(error)}")


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"


def _refuse_incomplete(choice: recovery.Choice) -> None:
    """Refuse to remove what its user has to decide about.

    Raises:
        UsageError
    """
    match choice:
        case recovery.NothingLeft():
            raise UsageError("the pipeline has finished, and its final checkpoint says so")
        case recovery.Restore(skipped=skipped) if skipped:
            raise UsageError(f"{skipped[0].path} cannot be read ({skipped[0].problem}), and may be needed to mend it")
        case _:
            return


def refuse_while_needed(log: CheckpointLog, observed: recovery.ObservedLog) -> None:
    """Refuse while another pipeline of this storage, restored from here, has no checkpoint of its own.

    Also if it is unknown: the origin may be in an entry that cannot be read now.

    Raises:
        UsageError
        CorruptionError, StorageError
    """
    life = log.known_identity(observed)
    for other in log.beside():
        there = other.observe()
        newest = next(iter(recovery.candidates(there)), None)
        damage = next(iter(recovery.damage_after(there, newest)), None)
        if damage is not None:
            raise UsageError(
                f"{damage.path} cannot be read ({damage.problem}), so it is not known whether {other.url} was restored "
                "from them and needs their files; mend that first"
            )
        if newest is not None and _was_restored_from(newest, log.url, "" if life is None else life.id):
            raise UsageError(f"{other.url} was restored from them, and has no checkpoint of its own yet")


def _was_restored_from(newest: Manifest, url: str, life: str) -> bool:
    """Whether the files of ``newest`` are those of the pipeline at ``url``, by its identity or by its path."""
    place, origin = newest.place, newest.origin
    if place is None:
        return False
    is_here = is_same_directory(f"{place.url.rstrip('/')}/{place.prefix}", url)
    return is_here or (origin is not None and origin.source == life)
