"""Who writes to a target, and the names of what is written: what both kinds of users' sinks share (CS1, CS2).

Counterparts: ``two_phase`` and ``ledger``. Source: K3, K8 and K14 of docs/spec/two-phase-commit.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headgate.codec.life import decode_life
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit

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
        mine, theirs = life_in(self), life_in(remembered)
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
    """The name of one piece of output of one subtask: no other output ever has it (CS2).

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


def life_in(fence: Fence) -> Life | None:
    """Return the life in ``fence``; None when nobody told it, or it is forgotten.

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
