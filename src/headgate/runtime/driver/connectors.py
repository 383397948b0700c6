"""The driver's side of connectors: ownership of sink targets, commits of sinks, and retention of sources' input.

One generation's committers commit what completed checkpoints promised (docs/spec/two-phase-commit.md). Ownership is
asked for, refused or taken before a generation is claimed (docs/spec/lives.md); ``protocol.supervision`` decides.
Sources that retain their input learn what restorable checkpoints still need: it follows from the log
alone, so a replaced driver says nothing that its successor would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeAlias, cast

from headgate import fault_points
from headgate.connectors.base import Committer, HoldContext, Sink, Source
from headgate.environment import ThreadEnded, close_all
from headgate.errors import (
    GO_ON_WITHOUT_IT,
    CorruptionError,
    FencedError,
    HeadgateError,
    LeaveBehind,
    OutputDenied,
    PutCheckpointsBack,
    StorageError,
    UsageError,
    gone,
    with_remedy,
)
from headgate.model.graph import Role
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, Manifest, Place, SnapshotPart
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.model.plan import PipelineDefinition
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates
from headgate.protocol.supervision import ownership
from headgate.protocol.supervision.ownership import Objection
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.state_reader.lookup import StoredCheckpoint
from headgate.runtime.state_reader.reader import PartReader, states_of
from headgate.runtime.state_reader.schema import Kind
from headgate.storage.base import NotFound
from headgate.storage.urls import local_directory


@contextmanager
def refusing_permanent_errors(problem: str) -> Iterator[None]:
    """Refuse to go on when something is damaged, or storage says that waiting does not help.

    Args:
        problem: what cannot be done then, as a clause.

    Raises:
        UsageError: starting again cannot help.
    """
    try:
        yield
    except StorageError as error:
        if error.is_transient:
            raise
        raise _refusal(problem, error) from error
    except CorruptionError as error:
        raise _refusal(problem, error) from error


def _refusal(problem: str, error: Exception) -> UsageError:
    return UsageError(f"{problem}: {error}; starting again cannot help before that is mended")


Lose: TypeAlias = Callable[[Committable, str], None]
"""Called with output that is gone, and why."""


class SinkCommits:
    """Committers by sink node."""

    def __init__(
        self,
        definition: PipelineDefinition,
        generation: Generation,
        read: Callable[[SnapshotPart], memoryview],
        lose: Lose | None = None,
    ) -> None:
        """Open them.

        Args:
            definition: the pipeline with its sinks.
            generation: that they are opened for.
            read: reads what a manifest refers to.
            lose: called with output that its target denies, and that is gone; None: that stops the pipeline.

        Raises:
            UsageError: one can never be opened (K5).
        """
        self._read, self._lose = read, lose
        self._committers: dict[str, Committer] = {}
        try:
            for node in definition.graph.nodes:
                if node.role is Role.SINK:
                    name, sink = str(node.name), cast(Sink, node.spec)
                    with refusing_permanent_errors(f"sink '{name}' cannot be opened"):
                        self._committers[name] = sink.open_committer(definition.config.name, name, generation)
                        _refuse_listening(name, sink, self._committers[name])
            for committer in self._committers.values():
                committer.read_pieces_with(self._output)
        except ThreadEnded:
            raise
        except BaseException:
            # the next try opens all of them again: connections would pile up with each
            with contextlib.suppress(Exception):
                self.close()
            raise

    def recover(self, permit: CommitPermit | None, keep: Sequence[Committable]) -> None:
        """Fence older generations, abort what the restored checkpoint does not promise, commit what it does.

        Args:
            permit: for the restored checkpoint; None when there is none (then ``keep`` is empty).
            keep: everything that checkpoint promised to commit.

        Raises:
            OutputDenied: a target denies what was promised, or refuses for good (K5).
            StorageError: a transient one; repeating is safe.
            FencedError
        """
        assert permit is not None or not keep, "only a restored checkpoint promises output"
        checkpoint = 0 if permit is None else permit.checkpoint
        assert all(c.checkpoint <= checkpoint for c in keep), "a checkpoint promised output of a later one"
        # all targets are fenced before output is committed at any: from then on no older writer can add to it
        for name, committer in self._committers.items():
            fault_points.reach("in-recover")
            with _denials(name, checkpoint):
                committer.recover([self._with_payload(c) for c in keep if c.sink == name])
        # without one nothing was ever promised: all that was prepared is aborted by now
        if permit is not None:
            self.commit(permit, keep)

    def denial(
        self, committables: Sequence[Committable], remembered: Collection[Committable], *, may_lose: bool
    ) -> str:
        """Return why ``commit`` would be denied, or might show output twice, as a clause; "" if not. Changes nothing.

        Args:
            committables: that are to be promised again.
            remembered: those that no target was let forget.
            may_lose: what is gone may be lost.

        Raises:
            StorageError: a transient one; repeating is safe.
            FencedError
        """
        denied: list[str] = []
        for one in committables:
            committer = self._committers.get(one.sink)
            if committer is None:
                continue
            why = self._denial(committer, one) if committer.knows_outcomes and not may_lose else ""
            if why:
                denied.append(
                    f"sink '{one.sink}' denies output that it promised for checkpoint {one.checkpoint}: {why}"
                )
            why = "" if denied or one in remembered else self._doubt(committer, one)
            if why:
                return why
        if not denied:
            return ""
        more = f"; {len(denied):,} pieces of output are denied in all" if len(denied) > 1 else ""
        return f"{denied[0]}{more}; {GO_ON_WITHOUT_IT}"

    def _denial(self, committer: Committer, committable: Committable) -> str:
        try:
            with _denials(committable.sink, committable.checkpoint):
                return committer.denial(self._with_payload(committable))
        except OutputDenied as error:
            return error.cause

    def _doubt(self, committer: Committer, committable: Committable) -> str:
        at, sink = committable.checkpoint, committable.sink
        try:
            with _denials(sink, at):
                if not committer.may_have_forgotten(self._with_payload(committable)):
                    return ""
        except OutputDenied as error:
            return f"sink '{sink}' cannot tell whether it committed the output of checkpoint {at}: {error.cause}"
        return (
            f"it is no longer known whether the output of checkpoint {at} was committed: the target of sink '{sink}' "
            "may have been let forget it"
        )

    def left_behind(self) -> list[str]:
        """Return notes about unneeded things that ``recover`` could not remove."""
        left = {name: committer.left_behind() for name, committer in self._committers.items()}
        return [
            f"could not remove what is left at sink '{name}': {why}; the next start tries again"
            for name, why in left.items()
            if why
        ]

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Commit sink by sink what one permit covers, each in order of checkpoint (K2). Idempotent as a whole.

        A sink gets all of it at once: output of a checkpoint that was aborted belongs to the completed one that
        carries it, and is not shown before the rest.

        Raises:
            OutputDenied: a target denies what was promised, or refuses for good (K5).
            UsageError: the pipeline has no such sink.
            StorageError: a transient one; repeating is safe.
            FencedError
        """
        # Output is shown only once the checkpoint that covers it is durable: a later one may still be aborted.
        assert all(c.checkpoint <= permit.checkpoint for c in committables), "the permit is of an earlier checkpoint"
        # asked before anything is committed: a permit is refused as a whole
        unknown = {c.sink for c in committables} - set(self._committers)
        if unknown:
            raise with_remedy(UsageError(_no_such_sink(min(unknown))), LeaveBehind(min(unknown)))
        ordered = sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index, c.generation))
        for name, committer in self._committers.items():
            mine = [c for c in ordered if c.sink == name]
            if mine:
                fault_points.reach("in-commit")
                with _denials(name, permit.checkpoint):
                    self._commit(committer, permit, mine)

    def _commit(self, committer: Committer, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Commit all at once; if the target denies that, one by one, and lose those that are gone."""
        try:
            # a crash within this call is no harm: what is committed already stays so when it is repeated (K1)
            committer.commit(permit, [self._with_payload(c) for c in committables])
        except HeadgateError as error:
            if self._lose is None or not error.is_output_gone:
                raise
        else:
            return
        for committable in committables:
            try:
                committer.commit(permit, [self._with_payload(committable)])
            except HeadgateError as error:
                if not error.is_output_gone:
                    raise
                # durable before the commit counts as done: a crash in between meets the same denial again
                self._lose(committable, str(error))

    def _with_payload(self, committable: Committable) -> Committable:
        """Return ``committable`` as its sink prepared it."""
        if committable.stored is None:
            return committable
        # too large for the manifest, so it was stored beside it
        return replace(committable, payload=bytes(self._output(committable.stored)), stored=None)

    def _output(self, stored: SnapshotPart) -> memoryview:
        """Return prepared output as it was stored; that it is gone is damage, too."""
        try:
            return self._read(stored)
        except NotFound as error:
            expected = f"{stored.size_bytes} bytes of prepared output"
            raise gone(CorruptionError(error.path, 0, expected, "no file")) from error

    def forget(self, before: CheckpointId, promised: Sequence[Committable]) -> None:
        """Let targets forget outcomes that no checkpoint can ask for any more (K20).

        Args:
            before: no retained checkpoint asks for anything of those below.
            promised: all that they ask for.
        """
        for name, committer in self._committers.items():
            if committer.can_forget:
                mine = [c for c in promised if c.sink == name]
                # a function: payloads are read only for a target that needs them
                committer.forget(before, lambda mine=mine: [self._with_payload(c) for c in mine])  # type: ignore[misc]

    def close(self) -> None:
        """Release resources of every target."""
        close_all(committer.close for committer in self._committers.values())


def make_targets(definition: PipelineDefinition) -> None:
    """Make the targets that are not there yet: nothing was written before the run began.

    Raises:
        UsageError: one cannot be made, or is not what it was when the pipeline was built.
        StorageError: repeating is safe.
    """
    for node in definition.graph.nodes:
        if node.role is Role.SINK:
            try:
                with refusing_permanent_errors("its target cannot be made"):
                    cast(Sink, node.spec).make_target(definition.schema(node.name))
            except UsageError as error:
                raise UsageError(f"operator '{node.name}': {error.message}") from None


@contextlib.contextmanager
def _denials(sink: str, checkpoint: int) -> Iterator[None]:
    """Tell apart what a repetition may cure from what it cannot."""
    try:
        yield
    # a newer generation is at work, which commits the same: no denial
    except FencedError:
        raise
    except StorageError as error:
        if error.is_transient:
            raise
        raise OutputDenied(sink, checkpoint, str(error), is_refused=True) from error
    except HeadgateError as error:
        denied = OutputDenied(sink, checkpoint, str(error))
        raise (gone(denied) if error.is_output_gone else denied) from error


def _refuse_listening(name: str, sink: object, committer: object) -> None:
    """Refuse a committer that listens: only ``commit`` reaches it, unless it is the sink itself."""
    if isinstance(committer, CheckpointListener) and committer is not sink:
        raise UsageError(
            f"the committer of sink '{name}' is a headgate.CheckpointListener, and would never be told: commit() "
            "says what is completed; let the sink or its writer listen"
        )


def _no_such_sink(name: str) -> str:
    """Say what to do about output of a sink that is gone (SV30)."""
    return (
        f"output prepared for sink '{name}' cannot be committed: the pipeline has no such sink; bring it back under "
        f"this name, or, to give that output up, give allow_unclaimed_state=['{name}'] "
        f"(headgate run --allow-unclaimed-state {name})"
    )


class SinkOwnership:
    """The sinks of one pipeline with targets that remember an owner, asked for one identity ``life`` of it."""

    def __init__(self, definition: PipelineDefinition, life: PipelineIdentity, home: str, host: str) -> None:
        """``home`` is where the checkpoints of ``life`` are now, and ``host`` this machine, for messages."""
        self._pipeline, self._life, self._home = definition.config.name, life, home
        self._host = host_of(home, host)
        self._sinks = {
            str(node.name): sink
            for node in definition.graph.nodes
            if node.role is Role.SINK and (sink := cast(Sink, node.spec)).has_owner
        }

    def ask(self) -> dict[str, Owner]:
        """Return what every target remembers. Changes nothing. Sinks that share a target are asked once (LV11).

        Raises:
            UsageError: one can never say so (K5).
            StorageError: repeating is safe.
        """
        found: dict[str, Owner] = {}
        asked: dict[object, str] = {}
        for name, sink in self._sinks.items():
            neighbour = asked.setdefault(_target(name, sink), name)
            if neighbour != name:
                found[name] = ownership.owner_of_sink(name, neighbour, found[neighbour])
                continue
            with refusing_permanent_errors(
                f"sink '{name}' of pipeline '{self._pipeline}' cannot name the owner of its target"
            ):
                found[name] = sink.owner(self._pipeline, name)
        return found

    def check(self, owners: dict[str, Owner], following: Generation) -> None:
        """Refuse to go on if any target has another owner (LV2): then no target is changed.

        Raises:
            UsageError: names the owner and the remedy.
        """
        own = [(name, name, owner) for name, owner in owners.items()]
        # what the target knows under other sink names counts, too: else a renamed sink would pass
        others = [(name, other.sink, other.owner) for name, owner in owners.items() for other in owner.others]
        for name, known_as, owner in own + others:
            problem = ownership.objection(self._life, owner, following)
            if problem is not None:
                raise self._refusal(name, known_as, owner, problem, following)

    def take(self) -> None:
        """Make this life the owner of every target, all in the same order (LV3).

        Raises:
            UsageError: another owner was quicker, or a target can never be owned (K5).
            StorageError: repeating is safe.
        """
        for name, owner in self._owners_after():
            if not ownership.may_own(self._life, owner):
                raise self._refusal(name, name, owner, Objection.OTHER_LIFE, Generation(0))

    def _owners_after(self) -> Iterator[tuple[str, Owner]]:
        for name, sink in self._sinks.items():
            with refusing_permanent_errors(
                f"sink '{name}' of pipeline '{self._pipeline}' cannot store the owner of its target"
            ):
                # one step at the target: of two lives the first wins, and both learn which (LV3)
                owner = sink.own(self._pipeline, name, self._life)
            yield name, owner

    def _refusal(self, name: str, known_as: str, owner: Owner, problem: Objection, following: Generation) -> UsageError:
        """Return the refusal for sink ``name``, which its target knows as ``known_as``: the owner, and the remedy."""
        forget = self._sinks[name].how_to_forget(self._pipeline, known_as)
        sink = f"sink '{name}' of pipeline '{self._pipeline}'"
        if known_as != name:
            sink = f"the target of {sink} knows its sink '{known_as}', which"
        if problem is Objection.OLDER_COPY:
            return UsageError(
                f"{sink} was written to by generation {owner.generation}, but the checkpoints in {self._home} end "
                f"before generation {following}: they are an older copy; restore the newest ones, or, to produce again "
                f"what was committed since, run: {forget}"
            )
        refusal = UsageError(
            f"{sink} belongs to {_owner_text(owner, self._home, self._host)}, and what that one wrote would be there "
            f"twice; {self._what_to_do(owner)}, or, to start over in front of the same target, which keeps what it "
            f"holds, run: {forget}"
        )
        return with_remedy(refusal, PutCheckpointsBack() if self._is_former(owner) else None)

    def _is_former(self, owner: Owner) -> bool:
        return ownership.began_at(owner, self._home, self._host)

    def _what_to_do(self, owner: Owner) -> str:
        if self._is_former(owner):
            return (
                "put these checkpoints back, or give it another name, or delete what that one wrote and start over: "
                "headgate run PROGRAM --fresh"
            )
        return "run the pipeline with that checkpoint directory, or give it another name"


def _target(name: str, sink: Sink) -> object:
    """Return what is equal for sinks that share a target."""
    return name if sink.shared_target is None else (type(sink), sink.shared_target)


def host_of(home: str, host: str) -> str | None:
    """Return ``host`` if ``home`` is a directory of its own; None if it is the same place for all."""
    return None if local_directory(home) is None else host


def _owner_text(owner: Owner, home: str, host: str | None) -> str:
    if owner.life is None:
        return f"another checkpoint directory than {home} (a target that was not given fence.life does not say which)"
    when = datetime.fromtimestamp(owner.life.begun_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    begun = f"begun on {owner.life.host} at {when} UTC"
    if ownership.began_at(owner, home, host):
        return f"former checkpoints of the same name in {home}, {begun} and removed since"
    return f"the pipeline of the same name with its checkpoints in {owner.life.home}, {begun}"


Positions = dict[str, bytes]
"""Split → position."""


class SourceRetention:
    """The sources of one pipeline that retain their input or publish positions, and what was last given to them."""

    def __init__(self, definition: PipelineDefinition, log: CheckpointLog, generation: Generation) -> None:
        self._pipeline = definition.config.name
        self._root = definition.config.checkpoint_root
        self._log, self._generation = log, generation
        sources = {
            node.name: node.spec
            for node in definition.graph.nodes
            if node.role is Role.SOURCE and isinstance(node.spec, Source)
        }
        self._sources = {node: source for node, source in sources.items() if source.holds}
        self._publishing = {node: source for node, source in sources.items() if source.publishes}
        self._held: dict[str, list[Positions]] = {}

    def update(self, observed: ObservedLog) -> None:
        """Have every source hold what the checkpoints in the log that may be restored need.

        Raises:
            StorageError: a source, or a checkpoint, cannot be reached now; repeating is safe.
            FencedError: a later generation holds it by now.
        """
        manifests = candidates(observed) if self._sources else []
        for node, source in self._sources.items():
            try:
                needed = [self._positions(manifest, node) for manifest in manifests]
            except CorruptionError:  # what it needs stays held as it is: a user may bring its file back
                continue
            # another system is called, so only for something new
            if self._held.get(node) != needed:
                source.hold(self._context(node), needed)
                # noted after it was done: a failed call is repeated with the next update
                self._held[node] = needed

    @property
    def publishes(self) -> bool:
        """Whether any source is to publish positions."""
        return bool(self._publishing)

    def publish(self, manifest: Manifest | None, *, begins: bool = False) -> None:
        """Have sources publish what a checkpoint has read. ``begins``: the generation begins with it, or without any.

        Raises:
            StorageError: a source, or the checkpoint, cannot be reached now; repeating is safe.
            FencedError: a later generation has published already.
            UsageError: others use what is published.
        """
        for node, source in self._publishing.items():
            positions = {} if manifest is None else self._positions(manifest, node)
            checkpoint = None if manifest is None else manifest.checkpoint
            source.publish(self._context(node), checkpoint, positions, begins=begins)

    def _context(self, node: str) -> HoldContext:
        return HoldContext(self._pipeline, node, self._log.life_id, self._generation)

    def _positions(self, manifest: Manifest, node: str) -> Positions:
        place = manifest.place or Place(self._root, self._pipeline)
        what = f"checkpoint {manifest.checkpoint} of pipeline '{self._pipeline}'"
        checkpoint = StoredCheckpoint(what, self._pipeline, replace(manifest, place=place))
        try:
            storage = checkpoint.storage()
            states = states_of(checkpoint, storage, node, is_counted=False)
        except UsageError:  # the place of a savepoint that is not there any more
            raise CorruptionError(place.url, 0, f"the files of {what}", "no directory") from None
        reader, found = PartReader(checkpoint, storage), Positions()
        for state in states:
            if state.shape.kind is Kind.POSITIONS:
                for piece in state.pieces:
                    for batch in reader.decoded(node, piece).batches:
                        found |= {row["split"]: row["position"] for row in batch.to_pylist()}
        return found
