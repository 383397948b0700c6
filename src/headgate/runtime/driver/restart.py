"""Starts or restarts a pipeline: claim a generation, choose the checkpoint, fence and recover the sinks.

Order: ask the sinks for their owner, claim, restore what the start names, choose the newest sound checkpoint, recover
the sinks, reset the hooks (R6–R14, LV2). Runs in the driver's storage thread. ``protocol.checkpoints.recovery``
decides which checkpoint is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from headgate import fault_points
from headgate.dataclass import dataclass
from headgate.environment import ThreadEnded, is_cancelled
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError, with_remedy
from headgate.model.config import DamagedCheckpoint, DeniedOutput
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Left, Manifest, RestoredFrom, SnapshotPart
from headgate.model.pipeline_identity import NO_GENERATION
from headgate.model.plan import PipelineDefinition
from headgate.operators.specs import is_listening
from headgate.protocol.checkpoints import recovery, restore_selection
from headgate.protocol.checkpoints.commit import (
    CommitPermit,
    forgettable_before,
    given_up,
    left_since,
    promised_output,
    still_promised,
)
from headgate.protocol.checkpoints.restore_selection import Adopt, UnrestorableCheckpoints
from headgate.protocol.checkpoints.retention import Retention
from headgate.protocol.supervision import ownership
from headgate.runtime.checkpoints.log import CheckpointLog, Claimed
from headgate.runtime.checkpoints.restore import check_compatible
from headgate.runtime.driver.connectors import (
    SinkCommits,
    SinkOwnership,
    SourceRetention,
    make_targets,
    refusing_permanent_errors,
)
from headgate.runtime.driver.hook_calls import HookCalls
from headgate.runtime.driver.savepoint_start import Adoption
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.storage.urls import open_storage

_T = TypeVar("_T")

RETRY_PAUSES_S = (0.1, 0.3, 1.0, 2.0)
"""Pauses between tries while storage or a target has a transient fault, before the claim counts as failed."""


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """A generation that may be deployed. ``restored`` is None on a first start."""

    generation: Generation
    first_checkpoint: CheckpointId
    restored: Manifest | None
    retained: tuple[CheckpointId, ...]
    commits: SinkCommits
    origin: RestoredFrom | None = None
    """The savepoint or checkpoint that a start named and the restored one descends from (SV24)."""
    left: tuple[Left, ...] = ()
    """The older checkpoints that it does not descend from (SV26)."""
    life: str = ""
    """Which life of the pipeline it belongs to."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The pipeline has ended before: nothing is to be done."""

    manifest: Manifest


def begin_generation(
    definition: PipelineDefinition,
    log: CheckpointLog,
    owner: str,
    note: Callable[[str], None],
    mine: Generation | None = None,
    around: Surroundings = PROCESS,
    hooks: HookCalls | None = None,
    unsound: UnrestorableCheckpoints | None = None,
) -> NewGeneration | Finished:
    """Claim the next generation and make everything ready for its deployment.

    ``mine`` is the generation that this driver claimed before: if another driver claimed since, this one stops.
    ``unsound``: what workers of this run could not restore.

    Raises:
        UsageError: the state does not fit the pipeline, or nothing sound can be restored.
        OutputDenied: a target denies what the restored checkpoint promised (K5).
        StorageError, FencedError
    """
    # from the claim on no older generation completes a checkpoint; those that run do not know it yet (R6)
    claimed = _claim_and_adopt(definition, log, owner, mine, note, around)
    restored, choice = choose_checkpoint(definition, log, claimed, around, unsound)
    left: tuple[Left, ...] = ()
    if restored is not None:
        # first: sweeping files and aborting output below would destroy what was passed over (R51)
        left = _set_aside(log, claimed, choice, restored, note, around) + given_up(restored, definition)
        # a misfit refuses the start while the sinks are as they were
        check_compatible(restored, definition)
        for text in recovery.changes(restored, definition):
            note(text)
    # older generations can write to no target from here on, and what the checkpoint promised is visible
    commits = recover_sinks(definition, log, claimed.next.generation, restored, around, note)
    with _closed_on_failure(commits):
        sources = SourceRetention(definition, log, claimed.next.generation)
        retry_transient(lambda: sources.update(claimed.log), around)
        retry_transient(lambda: sources.publish(restored, begins=True), around)
        retained = recovery.retained(claimed.log, restored)
        log.restored(retained)
        for text in commits.left_behind():
            note(text)
        clean_up(log.files.sweep, around, note)
        _forget_outcomes(commits, claimed.log, around, note)
        # its sinks are recovered all the same: its driver may have died before the final commit
        if isinstance(choice, recovery.NothingLeft) and not _repeats_completion(definition, note):
            clean_up(lambda: _drop_unretained(log, retained, definition.config.checkpoints.retained), around, note)
            commits.close()
            return Finished(choice.manifest)
        # external systems last: they go back only for a start that nothing above can refuse
        begin, generation = hooks or HookCalls(), claimed.next.generation
        retry_transient(lambda: begin.begin(definition.config.name, generation, restored, log.life_id, log.url), around)
    origin = None if restored is None else restored.origin
    begun = NewGeneration(claimed.next.generation, claimed.first_checkpoint, restored, retained, commits, origin, left)
    return replace(begun, life=log.life_id)


def _claim_and_adopt(
    definition: PipelineDefinition,
    log: CheckpointLog,
    owner: str,
    mine: Generation | None,
    note: Callable[[str], None],
    around: Surroundings,
) -> Claimed:
    """Claim a generation; restore what the start names, unless that was done before."""
    adoption = _find_named(definition, log, around)
    if adoption is not None and isinstance(adoption.decide(retry_transient(log.observe, around)), Adopt):
        retry_transient(adoption.check, around)  # SV20: before anything is written
    floor = Generation(0) if adoption is None else adoption.floor
    claimed = claim(definition, log, owner, mine, around, floor)
    fault_points.reach("after-claim")
    return claimed if adoption is None else _adopt_named(adoption, claimed, note, around)


def choose_checkpoint(
    definition: PipelineDefinition,
    log: CheckpointLog,
    claimed: Claimed,
    around: Surroundings,
    unsound: UnrestorableCheckpoints | None = None,
) -> tuple[Manifest | None, recovery.Choice]:
    """Return what the generation just claimed begins with, None if there never was a completed checkpoint.

    Raises:
        UsageError: nothing sound can be restored.
        FencedError: what seems to be damaged may have been removed by the driver that replaced this one.
        StorageError
    """
    choice = _choose(definition, log, claimed.log, around, unsound or UnrestorableCheckpoints())
    # asked after the choice: a newer driver removes files, and what it removed looks like damage
    newest = retry_transient(log.newer_generation, around)
    if newest is not None:
        raise FencedError(f"pipeline {definition.config.name}", claimed.next.generation, newest)
    match choice:
        case recovery.Refuse():
            said = f"pipeline '{definition.config.name}' cannot be restored from {log.url}: {choice.reason}"
            raise with_remedy(UsageError(said), choice.remedy)
        case recovery.StartFresh():
            return None, choice
        case recovery.NothingLeft() | recovery.Restore():
            return choice.manifest, choice


def recover_sinks(
    definition: PipelineDefinition,
    log: CheckpointLog,
    generation: Generation,
    restored: Manifest | None,
    around: Surroundings,
    note: Callable[[str], None],
) -> SinkCommits:
    """Fence the sinks for ``generation``, abort what ``restored`` does not promise and commit what it does.

    Raises:
        OutputDenied: a target denies what was promised (K5).
        StorageError, FencedError
    """
    retry_transient(lambda: make_targets(definition), around)
    place = None if restored is None else restored.place
    promised = () if restored is None else restored.committables
    adopted = frozenset(part for output in promised for part in output.parts)

    def read(part: SnapshotPart) -> memoryview:
        """Read output of ``restored`` in its place, and that of the checkpoints to come in ours."""
        return log.files.read(part, place if part in adopted else None)

    lose = None
    if definition.config.on_denied is DeniedOutput.LOSE:
        retry_transient(log.lost_output.look, around)
        lose = log.lost_output.losing(around.wall_ms, note)
    commits = SinkCommits(definition, generation, read, lose)
    permit = None if restored is None else CommitPermit(restored.checkpoint, generation)
    keep = () if restored is None else still_promised(restored, definition)  # whatever the parallelism was
    with _closed_on_failure(commits):
        # as a whole again after a failure half way: fencing, aborting and committing may be repeated
        retry_transient(lambda: commits.recover(permit, keep), around)
    return commits


@contextmanager
def _closed_on_failure(commits: SinkCommits) -> Iterator[None]:
    try:
        yield
    except ThreadEnded:
        raise
    except BaseException as error:
        try:
            commits.close()
        except ThreadEnded:
            raise
        except BaseException as another:  # it is not why the generation cannot begin
            error.add_note(f"and closing a sink failed: {another}")
        raise


def _repeats_completion(definition: PipelineDefinition, note: Callable[[str], None]) -> bool:
    """Whether a finished pipeline runs again, to repeat the completion of its last checkpoint to listeners."""
    if not has_listeners(definition):
        return False
    note("all input has been processed; checkpoint listeners are notified once more")
    return True


def _find_named(definition: PipelineDefinition, log: CheckpointLog, around: Surroundings) -> Adoption | None:
    """Return what this start names; what may be out of reach for a moment is looked for again."""
    for pause_s in RETRY_PAUSES_S:
        adoption = Adoption.find(definition, log)
        if adoption is None or not adoption.is_transient:
            return adoption
        around.sleep(pause_s)
    return Adoption.find(definition, log)


def _adopt_named(adoption: Adoption, claimed: Claimed, note: Callable[[str], None], around: Surroundings) -> Claimed:
    """Restore what was named, unless that was done before; no other driver changes the log in ``claimed`` now."""
    # decided again: until the claim another driver may have gone on, or have restored the same
    decision = adoption.decide(claimed.log)
    if isinstance(decision, Adopt):
        retry_transient(adoption.check, around)
        adoptable = retry_transient(lambda: adoption.adoptable(claimed), around)
        retry_transient(lambda: adoption.ask_targets(adoptable), around)
        # the one step: before it the old checkpoints are restored, after it this one, whatever dies
        claimed = adoption.adopt(claimed, adoptable)
        fault_points.reach("after-adoption")
    for text in adoption.notes(decision):
        note(text)
    return claimed


def has_listeners(definition: PipelineDefinition) -> bool:
    """Whether a listener may have missed the completion of the final checkpoint."""
    return any(is_listening(node.spec) for vertex in definition.plan.vertices for node in vertex.nodes)


def _set_aside(
    log: CheckpointLog,
    claimed: Claimed,
    choice: recovery.Choice,
    restored: Manifest,
    note: Callable[[str], None],
    around: Surroundings,
) -> tuple[Left, ...]:
    """Keep what this start cannot use, before anything is swept or aborted (R51), and say so.

    Return the checkpoints that no later one descends from.
    """
    restore = choice if isinstance(choice, recovery.Restore) else recovery.Restore(restored)
    gaps = recovery.gaps(claimed.log, restored, claimed.first_checkpoint, restore.skipped)
    if not gaps:
        return restored.left
    _note_gaps(restored, gaps, note)
    if restore.contradicts:
        _note_repeated_output(restore, note)
    retry_transient(lambda: log.files.set_aside(claimed.log, gaps, restored.checkpoint), around)
    note("the checkpoints that cannot be used are kept aside until 'headgate checkpoints discard' removes them")
    is_passed = any(gap.above == restored.checkpoint for gap in gaps)
    return left_since(restored, claimed.first_checkpoint) if is_passed else restored.left


def clean_up(call: Callable[[], None], around: Surroundings, note: Callable[[str], None]) -> None:
    """Remove unneeded files; what cannot be removed now, a later generation removes."""
    try:
        retry_transient(call, around)
    except StorageError as error:
        note(f"could not remove old checkpoint files: {error}")


def _forget_outcomes(
    commits: SinkCommits, observed: recovery.ObservedLog, around: Surroundings, note: Callable[[str], None]
) -> None:
    """Let targets forget outcomes that no checkpoint asks for: a run may be too short to do so itself."""
    before = forgettable_before(observed)
    if before is None:
        return
    try:
        retry_transient(lambda: commits.forget(before, promised_output(observed)), around)
    except (FencedError, ThreadEnded):
        raise
    except BaseException as error:  # of a user's sink, too: the next start tries again
        note(f"could not let the sinks forget what was decided before checkpoint {before}: {error}")


def _drop_unretained(log: CheckpointLog, completed: Sequence[CheckpointId], count_max: int) -> None:
    """Of a pipeline that has finished: no checkpoint will be completed any more that makes older ones go (C31)."""
    assert completed, "a pipeline that has finished has its final checkpoint"
    oldest = Retention(count_max, completed[:-1]).oldest_with(completed[-1])
    log.drop(CheckpointId(oldest - 1), oldest)


def claim(
    definition: PipelineDefinition,
    log: CheckpointLog,
    owner: str,
    mine: Generation | None,
    around: Surroundings,
    above: Generation = NO_GENERATION,
) -> Claimed:
    """Claim a generation above ``above``, once all sinks belong to this life of the pipeline (LV2, LV3).

    Raises:
        UsageError: a sink belongs to another one, or the owner of the pipeline or a sink can never be read (K5).
        StorageError, FencedError
    """
    wall_ms, host = around.wall_ms(), around.host
    unknown = f"pipeline '{definition.config.name}' cannot tell which life of it {log.url} holds"
    with refusing_permanent_errors(unknown):
        life = retry_transient(lambda: log.identity(host, wall_ms), around)
    fault_points.reach("after-life")
    sinks = SinkOwnership(definition, life, log.url, host)
    # before the claim: a refusal leaves targets and log as they are (LV2)
    owners = retry_transient(sinks.ask, around)
    observed = retry_transient(log.observe, around)  # after the answers (LV6)
    number = recovery.life_of(observed)
    if number:  # LV7
        with refusing_permanent_errors(unknown):
            life = retry_transient(lambda: log.identity_after_reset(number, host, wall_ms), around)
        sinks = SinkOwnership(definition, life, log.url, host)
    _refuse_unfinished_reset(definition, log, observed, around)
    sinks.check(owners, recovery.next_claim(observed).generation)
    targets = definition.targets
    orders: tuple[str, ...] = ()
    if not log.generation and targets is not None:  # the sinks of one process do not change
        # durable before the claim: a reset without the program finds every target that may hold output
        retry_transient(lambda: log.sink_registry.note(number, targets), around)
        orders = retry_transient(log.sink_registry.orders, around)
    floor = max(above, ownership.floor(owners.values()))
    claimed = retry_transient(lambda: log.claim(owner, wall_ms, mine, floor, number), around)
    with suppress(StorageError):  # SO2: the step of an order that was there before the claim is fenced by it
        log.sink_registry.withdraw(orders)
    # after the claim: no target ever knows a later generation than the log (LV6)
    retry_transient(sinks.take, around)
    return claimed


def _refuse_unfinished_reset(
    definition: PipelineDefinition, log: CheckpointLog, observed: recovery.ObservedLog, around: Surroundings
) -> None:
    """Refuse to write to targets that are half empty (SO3): a start finishes the reset first.

    Raises:
        UsageError
    """
    token = recovery.decided_reset(observed)
    if token is not None and retry_transient(lambda: log.sink_registry.order(token), around) is not None:
        raise UsageError(
            f"pipeline '{definition.config.name}' is being reset, and not all of its output is deleted yet; start it "
            "again when that is over"
        )


def has_finished(definition: PipelineDefinition, around: Surroundings = PROCESS) -> bool:
    """Whether a start will find nothing left to do, so that it needs no workers. Changes nothing.

    False if that is unknown: the claim decides.
    """
    config = definition.config
    if config.start.restore is not None or has_listeners(definition):
        return False
    try:
        log = CheckpointLog(open_storage(config.checkpoint_root), config.name)
        choice = _choose(definition, log, log.observe(), around, UnrestorableCheckpoints())
    except HeadgateError:
        return False
    return isinstance(choice, recovery.NothingLeft)


def _choose(
    definition: PipelineDefinition,
    log: CheckpointLog,
    observed: recovery.ObservedLog,
    around: Surroundings,
    unsound: UnrestorableCheckpoints,
) -> recovery.Choice:
    """Verify candidates from the newest down to the first sound one, then choose."""
    damage: dict[CheckpointId, list[recovery.Damage]] = {}
    manifests = recovery.candidates(observed)
    for manifest in manifests:
        found = restore_selection.left_by_user(manifest, manifests[0])
        found = found or retry_transient(lambda manifest=manifest: log.files.verify(manifest), around)  # type: ignore[misc]
        damage[manifest.checkpoint] = (
            found or unsound.of(manifest) or _abandoned_by_rollback(definition, log, manifest, around)
        )
        if not damage[manifest.checkpoint]:
            # older ones need not be read: verifying one reads all of its files
            break
    return recovery.choose(observed, damage, definition.config.on_damaged)


def _abandoned_by_rollback(
    definition: PipelineDefinition, log: CheckpointLog, manifest: Manifest, around: Surroundings
) -> list[recovery.Damage]:
    """Return which former start went back to before ``manifest``, unless only the user may go back (R14)."""
    if definition.config.on_damaged is DamagedCheckpoint.FAIL:
        return []
    return restore_selection.rolled_back_by(manifest, retry_transient(log.files.rolled_back_by, around))


def _note_gaps(restored: Manifest, gaps: Sequence[recovery.Gap], note: Callable[[str], None]) -> None:
    for gap in gaps:
        is_newer = gap.above == restored.checkpoint
        used = f"checkpoint {restored.checkpoint}"
        instead = f"using {used} instead" if is_newer else f"it is older than {used}, which is used"
        for damage in gap.damages:
            note(f"{damage.path} cannot be used: {damage.problem}; {instead}")


def _note_repeated_output(choice: recovery.Restore, note: Callable[[str], None]) -> None:
    ids = ", ".join(str(c) for c in choice.contradicts)
    note(
        f"output that checkpoint {ids} committed will be produced again, because the pipeline goes back to "
        f"checkpoint {choice.manifest.checkpoint}; remove it at the target if it must not be there twice. What it "
        "had prepared and not committed yet is aborted, and produced again too"
    )


def retry_transient(call: Callable[[], _T], around: Surroundings) -> _T:
    """Return what ``call`` does, tried again while a transient fault may pass.

    Raises:
        StorageError: it did not pass.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return call()
        except StorageError as error:
            # a run that is ended does not wait for storage
            if not error.is_transient or is_cancelled():
                raise
            around.sleep(pause_s)
    return call()  # the last try: its error counts as the failure of the claim
