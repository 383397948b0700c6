"""Start from a named savepoint or checkpoint: it becomes the newest checkpoint of the pipeline's own log.

From then on the log alone decides what to restore (docs/spec/savepoints.md). The pipeline's identity is never
restored: its sinks decide about that as at any start. Runs in the driver's storage thread, as a part of
``restart``; changes nothing at the named place.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, HeadgateError, NameAnotherPlace, StorageError, UsageError, with_remedy
from headgate.model.config import DeniedOutput, Guarantee
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, Left, Manifest, Place, RestoredFrom
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import commit, recovery
from headgate.protocol.checkpoints.commit import promised_output
from headgate.protocol.checkpoints.recovery import ObservedLog, Refuse
from headgate.protocol.checkpoints.restore_selection import Adopt, GoOn, Named, committed_by, decide_named
from headgate.runtime.checkpoints.log import CheckpointLog, Claimed, Outcome
from headgate.runtime.checkpoints.restore import check_compatible
from headgate.runtime.checkpoints.savepoints import named_log, refuse_unless_newest_is_known, savepoint_at
from headgate.runtime.driver.connectors import SinkCommits, make_targets
from headgate.storage.urls import local_directory


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """What is at a named place.

    Attributes:
        manifest: says where its files are.
        pipeline: name of the pipeline that wrote it.
        what: it is, for messages.
        is_newest: it was named as the newest one.
        is_same_cut: see ``Savepoint``.
        newest: checkpoint of the log that it was found in, if it was in one.
    """

    manifest: Manifest
    origin: RestoredFrom
    pipeline: str
    what: str
    is_newest: bool = False
    is_same_cut: bool = True
    newest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Adoptable:
    """What becomes the newest checkpoint.

    Attributes:
        manifest: of it, with the output that is promised once more.
        remembered: of that output what no target was let forget, by this pipeline's own log (K20).
        newest: the newest checkpoint until now.
    """

    manifest: Manifest
    remembered: frozenset[Committable] = frozenset()
    newest: Manifest | None = None


class Adoption:
    """What one start names, and what is there. Make it with ``find``."""

    def __init__(
        self,
        definition: PipelineDefinition,
        log: CheckpointLog,
        url: str,
        found: FoundCheckpoint | None,
        problem: HeadgateError | None = None,
    ) -> None:
        """Use ``find``. ``problem``: why the place could not be read."""
        self._problem = problem
        self._is_checked = False
        self._definition = definition
        self._log = log
        self._url = url
        self._found = found
        start = definition.config.start
        may_go_back = definition.config.checkpoints.mode is not Guarantee.AT_MOST_ONCE
        self._named = Named(url, None, go_back_past=start.go_back_past, may_go_back=may_go_back)
        if found is not None:
            began_ms = found.manifest.trigger_wall_ms
            self._named = replace(
                self._named,
                origin=found.origin,
                is_newest=found.is_newest,
                is_same_cut=found.is_same_cut,
                trigger_wall_ms=began_ms,
            )

    @classmethod
    def find(cls, definition: PipelineDefinition, log: CheckpointLog) -> Adoption | None:
        """Return what this start names, None if nothing. Changes nothing.

        What cannot be read does not matter to a pipeline that was restored from there before (SV24).
        """
        url = definition.config.start.restore
        if url is None:
            return None
        try:
            return cls(definition, log, url, _savepoint_at(url) or _checkpoint_at(url, log))
        except CorruptionError as error:  # SV20
            return cls(definition, log, url, None, UsageError(f"{url} cannot be restored: {error}"))
        except StorageError as error:
            return cls(definition, log, url, None, error)

    @property
    def is_transient(self) -> bool:
        """Whether a transient error of storage hides what is there."""
        return isinstance(self._problem, StorageError) and self._problem.is_transient

    @property
    def floor(self) -> Generation:
        """The generation that the next one must exceed."""
        return Generation(0) if self._found is None else self._found.manifest.generation

    def decide(self, observed: ObservedLog) -> Adopt | GoOn:
        """Return what this start does, in front of this log of its own.

        Raises:
            UsageError: it must not, or cannot.
            StorageError: the named place cannot be read now.
        """
        known = self._log.known_identity(observed)
        decision = decide_named(observed, "" if known is None else known.id, self._named)
        # refused for want of what could not be read: that is what the user can mend
        if isinstance(decision, Refuse) and self._problem is not None:
            raise self._problem
        if isinstance(decision, Refuse):
            name = self._definition.config.name
            refusal = UsageError(f"pipeline '{name}' is not restored from {self._url}: {decision.reason}")
            raise with_remedy(refusal, decision.remedy)
        if self._found is not None and not self._is_own_life(self._found, observed):
            self._found = replace(self._found, manifest=commit.for_other_targets(self._found.manifest))
        return decision

    def check(self) -> None:
        """Read everything that is to be restored, and compare it with the pipeline (SV20). Once.

        Raises:
            UsageError: it is damaged, or does not fit.
            StorageError
        """
        if self._is_checked:
            return
        assert self._found is not None, "decide() refuses a place without a checkpoint"
        damage = self._log.files.verify(self._found.manifest)
        if damage:
            named = "; ".join(f"{d.path}: {d.problem}" for d in damage)
            raise UsageError(f"{self._found.what} cannot be read and is not restored: {named}")
        check_compatible(self._found.manifest, self._definition)
        self._is_checked = True

    def adoptable(self, claimed: Claimed) -> Adoptable:
        """Return what ``adopt`` is to write, in front of the log as it was claimed. Changes nothing.

        Raises:
            CorruptionError, StorageError
        """
        found = self._found
        assert found is not None, "decide() refuses a place without a checkpoint"
        # above both: what is promised once more is of earlier ids, and new ids are not used twice (R7)
        checkpoint = CheckpointId(max(claimed.first_checkpoint, found.manifest.checkpoint + 1))
        manifest = replace(found.manifest, checkpoint=checkpoint, generation=claimed.next.generation)
        origin = replace(found.origin, adopted=checkpoint)
        manifest = replace(manifest, origin=origin, hooks=found.manifest.hooks_as_called())
        newest = next(iter(recovery.candidates(claimed.log)), None)
        own = newest if self._is_own_life(found, claimed.log) else None
        if own is not None:
            left = commit.left_since(found.manifest, checkpoint)
        else:
            # of another life: it descends from none of the checkpoints here (SV26)
            left = () if newest is None else (Left(CheckpointId(0), checkpoint),)
        manifest = replace(manifest, left=left)
        promised = frozenset(found.manifest.committables)
        if found.pipeline != self._definition.config.name:  # SV26
            return Adoptable(commit.without(manifest, promised), newest=newest)
        # what a newer checkpoint of the same life does not promise any more was committed (SV26)
        settled = [commit.settled(found.manifest, newer) for newer in (found.newest, own) if newer is not None]
        manifest = commit.without(manifest, frozenset().union(*settled))
        remembered = commit.among(manifest.committables, promised_output(claimed.log))
        return Adoptable(manifest, remembered, newest)

    def _is_own_life(self, found: FoundCheckpoint, observed: ObservedLog) -> bool:
        """Whether ids of ``found`` mean what they mean in the log of this pipeline."""
        life = self._log.known_identity(observed)
        return found.pipeline == self._definition.config.name and life is not None and life.id == found.origin.life

    def ask_targets(self, adoptable: Adoptable) -> None:
        """Ask the targets for what would be promised once more, while nothing is adopted (SV20).

        Raises:
            UsageError: one denies it, or was let forget it.
            StorageError, FencedError
        """
        promised = commit.still_promised(adoptable.manifest, self._definition)
        if not promised:
            return
        # a target that was never written to is asked, too
        make_targets(self._definition)
        place, generation = adoptable.manifest.place, adoptable.manifest.generation
        commits = SinkCommits(self._definition, generation, lambda part: self._log.files.read(part, place))
        with contextlib.closing(commits):
            may_lose = self._definition.config.on_denied is DeniedOutput.LOSE
            why = commits.denial(promised, adoptable.remembered, may_lose=may_lose)
        if why:
            raise with_remedy(self._refusal(adoptable, why), NameAnotherPlace())

    def _refusal(self, adoptable: Adoptable, why: str) -> UsageError:
        ways = (
            "name another checkpoint or a savepoint, or start it with the checkpoint directory that this was taken in"
        )
        if adoptable.newest is not None:
            at = adoptable.newest.checkpoint
            ways = (
                f"start it without naming anything to go on from checkpoint {at}, or name another checkpoint, or a "
                f"savepoint (headgate run --restore PLACE --go-back-past {at})"
            )
        name = self._definition.config.name
        return UsageError(f"pipeline '{name}' is not restored from {self._url}: {why}; {ways}")

    def adopt(self, claimed: Claimed, adoptable: Adoptable) -> Claimed:
        """Write it to the log as the newest checkpoint of the generation just claimed.

        Raises:
            FencedError: another generation was claimed.
            StorageError: it may or may not be written; the next claim sees.
        """
        manifest = adoptable.manifest
        # as for any checkpoint: of two drivers at once one is refused here (R42)
        self._log.reserve(manifest.checkpoint)
        # it may have been written: the next claim of this start sees, and decides again
        if self._log.append(manifest) is not Outcome.WRITTEN:
            raise StorageError("restore", self._log.url, self._log.problem or "it is not known whether it was written")
        return Claimed(claimed.next, CheckpointId(manifest.checkpoint + 1), self._log.observe())

    def notes(self, decision: Adopt | GoOn) -> list[str]:
        """Return what the user should read about it."""
        if isinstance(decision, GoOn) or self._found is None:
            return [f"{self._url} was restored before; the pipeline goes on from its own newest checkpoint"]
        found = self._found
        said = [f"restored from {found.what}"]
        if decision.passed is not None:
            said.append(f"going back past checkpoint {decision.passed}: {_repeated_output_text(decision)}")
        if found.manifest.committables and found.pipeline != self._definition.config.name:
            said.append(
                f"output that this checkpoint had promised is committed by pipeline '{found.pipeline}', not by this one"
            )
        return said


def _repeated_output_text(decision: Adopt) -> str:
    """Return what the user may have to remove, and never any other output."""
    passed, after = decision.passed, decision.after
    if passed is None or after == passed:
        return "no output was committed since"
    if after is None:
        return (
            "it is not known to descend from there, so that none, some or all of its output may be produced again; "
            "compare before you remove any"
        )
    return (
        f"output that {committed_by(after, passed)} committed will be produced again; remove that output, and no "
        "other, at the target if it must not be there twice"
    )


def _savepoint_at(url: str) -> FoundCheckpoint | None:
    savepoint = savepoint_at(url)
    if savepoint is None:
        return None
    manifest = replace(savepoint.manifest, place=Place(url, savepoint.files))
    origin = RestoredFrom(savepoint.id, manifest.checkpoint, url, savepoint.life)
    what = f"the savepoint {url} (of pipeline '{savepoint.pipeline}', checkpoint {manifest.checkpoint})"
    return FoundCheckpoint(manifest, origin, savepoint.pipeline, what, is_same_cut=savepoint.is_same_cut)


def _checkpoint_at(url: str, own: CheckpointLog) -> FoundCheckpoint | None:
    """Return the checkpoint at ``<directory>/<pipeline>`` or ``<directory>/<pipeline>/chk-<id>``.

    Raises:
        CorruptionError: the newest one is meant, and the log is damaged where it may be.
        UsageError, StorageError
    """
    named = named_log(url)
    if named is None:
        return None
    log = named.open()
    observed = log.observe()
    manifests = recovery.candidates(observed)
    if named.checkpoint is None and not is_same_directory(log.url, own.url):  # of its own, R14 decides
        refuse_unless_newest_is_known(observed)
    found = [m for m in manifests if named.checkpoint in (None, m.checkpoint)]
    if not found:
        return None
    manifest, life = found[0], log.known_identity(observed)
    if not is_same_directory(log.url, own.url) and manifest.place is None:
        manifest = replace(manifest, place=Place(named.root, named.pipeline))
    known = "" if life is None else life.id
    origin = RestoredFrom(known or log.url, found[0].checkpoint, url, known)
    what = f"checkpoint {manifest.checkpoint} of pipeline '{named.pipeline}' at {log.url}"
    return FoundCheckpoint(manifest, origin, named.pipeline, what, named.checkpoint is None, newest=manifests[0])


def is_same_directory(url: str, other: str) -> bool:
    """Whether two URLs are one directory, whatever links lead there: then its files are the pipeline's own (SF4)."""
    one, two = local_directory(url), local_directory(other)
    return url == other or (one is not None and two is not None and one.resolve() == two.resolve())
