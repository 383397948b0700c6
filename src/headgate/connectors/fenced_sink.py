"""The base of sinks that users write: fences, names of output, and which pipeline owns the target.

The target stores the fence with the pipeline's identity in one place, so that ``claim`` checks and writes both in one
step. Counterparts: ``two_phase_sink`` and ``ledger_sink``. Source: docs/spec/lives.md,
docs/spec/two-phase-commit.md and the CS rules of docs/spec/connectors.md.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from headgate.codec.json_files import decode_life, encode_life
from headgate.connectors.base import Holding, Sink
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Mine, OtherSink, Owner, PipelineIdentity
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.supervision import ownership

_NAME = re.compile(r"(?P<owner>.+)-(?P<number>\d{10,})-(?P<subtask>\d{5,})-(?P<generation>\d{10,})")


@dataclass(frozen=True, slots=True)
class Fence:
    """Identifies one generation of one sink. A target stores the newest fence and refuses older ones.

    Attributes:
        owner: the name by which the target knows the sink: the pipeline's name and the sink's name.
        generation: a number that rises with every start and restart of the pipeline.
        life: identifies the life of the pipeline, as a text of some hundred characters. The target stores it beside the
            generation. In the workers it is empty, because only generations are compared there.
    """

    owner: str
    generation: int
    life: str = ""

    def refuse_if_replaced_by(self, remembered: Fence | None) -> None:
        """Raise if the fence that the target has stored is newer, or belongs to another pipeline of the same name.

        Pass None if the target has stored none.

        Raises:
            FencedError: it is.
        """
        if remembered is None:
            return
        self.refuse_if_older_than(remembered.generation)
        mine, theirs = decode_fence_life(self), decode_fence_life(remembered)
        if mine is not None and theirs is not None and mine.id != theirs.id:
            raise FencedError(f"sink '{self.owner}' belongs to the pipeline with its checkpoints in {theirs.home}")

    def refuse_if_older_than(self, newest: int | None) -> None:
        """Raise if the target knows a newer generation.

        ``newest`` is the generation that the target has stored, or None. ``claim`` has to compare more than the
        generation: see ``refuse_if_replaced_by``.

        Raises:
            FencedError: it does.
        """
        if newest is not None and newest > self.generation:
            raise FencedError(f"sink '{self.owner}'", Generation(self.generation), Generation(newest))


@dataclass(frozen=True, slots=True)
class OutputName:
    """The name of one piece of output of one subtask: no other output ever has it.

    Attributes:
        number: of the checkpoint, or of the transaction within subtask and generation.
    """

    owner: str
    number: int
    subtask: int
    generation: int

    def __str__(self) -> str:
        return f"{self.owner}-{self.number:010d}-{self.subtask:05d}-{self.generation:010d}"

    @staticmethod
    def parse(text: str) -> OutputName | None:
        """Return the parts of a name, or None if it is none."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        return OutputName(match["owner"], int(match["number"]), int(match["subtask"]), int(match["generation"]))


def decode_fence_life(fence: Fence) -> PipelineIdentity | None:
    """Return the life in ``fence``; None when there is none, or it is forgotten.

    Raises:
        CorruptionError: the target does not give back what it was given.
    """
    where = f"the life that the target of sink '{fence.owner}' remembers"
    return decode_life(fence.life.encode(), where) if fence.life else None


def owner_of(pipeline: str, node: str) -> str:
    """Return the name under which a target knows a sink. Both parts are names, which contain no such sign."""
    return f"{pipeline}:{node}"


@contextmanager
def transient(errors: tuple[type[Exception], ...], operation: str, owner: str) -> Iterator[None]:
    """Turn what a target raises and may pass into what the runtime tries again (CS5)."""
    try:
        yield
    # first: ``errors`` may be as wide as Exception, and no other try helps against a fence
    except HeadgateError:
        raise
    except errors as error:
        raise StorageError(operation, owner, f"{type(error).__name__}: {error}", is_transient=True) from error


def in_order(permit: CommitPermit, committables: Sequence[Committable]) -> list[Committable]:
    """Return what is to be committed, oldest checkpoint first (K2).

    Raises:
        UsageError: something is newer than the permit (K1).
    """
    for committable in committables:
        if committable.checkpoint > permit.checkpoint:
            raise UsageError(
                f"output of checkpoint {committable.checkpoint} must not be committed: only {permit.checkpoint} is "
                "known to be completed"
            )
    return sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index, c.generation))


_CANNOT_REMOVE = (
    "{kind} cannot remove what it wrote: give it a method remove_output(self, fence) that does; or empty its target "
    "yourself, run headgate sinks forget for it, and start over then"
)


class FencedSink(Sink, ABC):
    """Base class of users' sinks. The target stores the fence of the generation that has claimed it.

    Attributes:
        transient_errors: exceptions of the target after which another try may help.
    """

    transient_errors: tuple[type[Exception], ...] = (OSError,)
    has_owner = True
    can_be_reset = True

    # -- what users write -------------------------------------------------------------------------------------------

    @abstractmethod
    def claim(self, fence: Fence) -> None:
        """Store the whole ``fence`` in the target for ``fence.owner``, in one step.

        Raises:
            FencedError: the target has stored a newer fence, or another life (``fence.refuse_if_replaced_by``).
        """

    def claimed(self, owner: str) -> Fence | None:
        """Return the fence that ``claim`` stored for ``owner``, or None if there is none. Changes nothing.

        Raises:
            UsageError: the class has no such method of its own.
        """
        raise UsageError(
            f"{type(self).__name__} cannot tell which pipeline its target belongs to, and one that starts over would "
            "lose or repeat output there: give it a method claimed(self, owner) that returns the Fence that claim has "
            "remembered, with its life, or None"
        )

    def all_claimed(self) -> Iterable[Fence]:
        """Return the fences that ``claim`` stored for all owners with output in the same place. Changes nothing.

        This includes owners other than this sink. Headgate uses the newest fence of each owner, and of equal ones the
        last. Return () if the target cannot list them; Headgate then does not notice a pipeline that starts over with
        another name for the sink.

        Raises:
            UsageError: the class has no such method of its own.
        """
        raise UsageError(
            f"{type(self).__name__} cannot tell which other sinks have written to its target, and a pipeline that "
            "starts over with another name for the sink would repeat output there: give it a method all_claimed(self) "
            "that returns the Fences that claim has remembered for all owners"
        )

    def remove_output(self, fence: Fence) -> None:
        """Remove everything that ``fence.owner`` ever committed, including the ledger: its pipeline starts over.

        Compare the fence in the same step. Before this call, Headgate has called ``claim(fence)`` and aborted all
        prepared output. The call may be repeated after it raised, and after it succeeded.

        Raises:
            FencedError: a newer generation has claimed the target. Nothing must be removed then.
            UsageError: the class has no such method of its own.
        """
        raise UsageError(_CANNOT_REMOVE.format(kind=type(self).__name__))

    # -- what the runtime and people call ---------------------------------------------------------------------------

    def owner(self, pipeline: str, node: str) -> Owner:
        owner = owner_of(pipeline, node)
        with transient(self.transient_errors, "ask", owner):
            return replace(self._remembered(owner), others=self._others(pipeline, owner))

    def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
        owner = owner_of(pipeline, node)
        with transient(self.transient_errors, "own", owner):
            known = self._remembered(owner)
            # it is owned already, perhaps since an earlier call the answer of which was lost
            if known.life is not None or not ownership.may_own(life, known):
                return known
            try:
                # with the stored generation: this changes the owner and fences no writer
                self.claim(Fence(owner, int(known.generation), encode_life(life).decode()))
            except FencedError:  # another owner was quicker
                return self._known(owner, StorageError("own", owner, "others claim it all the time"))
            # read back: a target that does not keep lives would have no owner, and any pipeline could take it
            return self._known(owner, self._forgets_lives())

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``connectors.base.Sink``. The amount of output is not known for a user's target."""
        kind = type(self).__name__
        known = self.owner(pipeline, node)
        if known.is_unknown or known.is_forgotten:
            return Holding("", kind)
        problem = "" if can_remove_output(self) else _CANNOT_REMOVE.format(kind=kind)
        return Holding("all its output", kind, problem=problem)

    def start_over(self, pipeline: str, node: str, generation: Generation, life: PipelineIdentity, mine: Mine) -> None:
        owner = owner_of(pipeline, node)
        with transient(self.transient_errors, "start over in", owner):
            known = self._remembered(owner)
            # an earlier call came to its end; there may be output of the new life by now
            if known.life is not None and known.life.id == life.id:
                return
            if not known.is_unknown and not known.is_forgotten:
                self._remove(pipeline, node, generation)
            self.claim(Fence(owner, int(generation), encode_life(None).decode()))  # claim knows one life at a time
            self.claim(Fence(owner, int(generation), encode_life(life).decode()))

    def _remove(self, pipeline: str, node: str, generation: Generation) -> None:
        """Fence all generations before ``generation``, abort what they prepared, remove what they committed."""
        committer = self.open_committer(pipeline, node, generation)
        try:
            committer.recover(())
        finally:
            committer.close()
        self.remove_output(with_stored_life(self, Fence(owner_of(pipeline, node), int(generation))))

    def how_to_forget(self, pipeline: str, node: str) -> str:
        return f"headgate sinks forget '{pipeline}/{node}' PROGRAM (the file that makes the pipeline)"

    def forget_owner(self, pipeline: str, sink: str) -> Owner:
        """Let the next pipeline of that name have the target, to start over there; return the former owner.

        Nothing is removed, and older generations stay fenced. For the command line: ``headgate sinks forget``.

        Raises:
            StorageError: the target cannot be reached.
        """
        owner = owner_of(pipeline, sink)
        with transient(self.transient_errors, "forget the owner of", owner):
            known = self._remembered(owner)
            if not known.is_forgotten:
                self.claim(Fence(owner, int(known.generation), encode_life(None).decode()))
                # read back, as in ``own``
                if not self._remembered(owner).is_forgotten:
                    raise self._forgets_lives()
            return known

    def _remembered(self, owner: str) -> Owner:
        fence = self.claimed(owner)
        return Owner() if fence is None else _owner_in(fence)

    def _others(self, pipeline: str, owner: str) -> tuple[OtherSink, ...]:
        of = owner_of(pipeline, "")
        known = _newest(fence for fence in self.all_claimed() if fence.owner.startswith(of))
        return tuple(
            OtherSink(name.removeprefix(of), _owner_in(known[name])) for name in sorted(known) if name != owner
        )

    def _known(self, owner: str, problem: Exception) -> Owner:
        """Return the owner of the target after a claim. Raise ``problem`` if there is none."""
        found = self._remembered(owner)
        if found.life is None:
            raise problem
        return found

    def _forgets_lives(self) -> UsageError:
        return UsageError(
            f"{type(self).__name__} does not keep the life of a pipeline in its target, and one that starts over would "
            "lose or repeat output there: have claim store fence.life beside the generation, and claimed return both"
        )


def can_remove_output(sink: FencedSink) -> bool:
    """Return whether the class of ``sink`` has a method ``remove_output`` of its own."""
    return type(sink).remove_output is not FencedSink.remove_output


def _newest(fences: Iterable[Fence]) -> dict[str, Fence]:
    """Return the newest fence of each owner, of equal ones the last."""
    # sorted is stable, and what comes later replaces what came before
    return {fence.owner: fence for fence in sorted(fences, key=lambda fence: fence.generation)}


def _owner_in(fence: Fence) -> Owner:
    life = decode_fence_life(fence)
    return Owner(life, Generation(fence.generation), is_forgotten=life is None and bool(fence.life))


def with_stored_life(sink: FencedSink, fence: Fence) -> Fence:
    """Return ``fence`` with the life that the target has stored, so that claiming a generation keeps it."""
    known = sink.claimed(fence.owner)
    return fence if known is None else replace(fence, life=known.life or "")
