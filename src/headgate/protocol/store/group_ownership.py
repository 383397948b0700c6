"""Ownership of reader groups: a group that a pipeline reads by belongs to that pipeline alone. Pure decisions.

Counterparts: ``reader_group``, which checks ownership before each change; the claimed groups of ``store``, through
which a source of a pipeline joins. Source: GS1 to GS5 of docs/spec/group-source.md. Never knows reading positions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeAlias

from headgate.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A group belongs to one source of one pipeline, which reads by it in one generation.

    Attributes:
        source: ``<pipeline>/<source>``.
        life: which life of the pipeline.
        home: the directory of its checkpoints: a pipeline that starts over has another life there.
        generation: of the pipeline; 0 until the first one has begun.
        expected: how many readers there will be; 0 while none has joined.
        is_gathered: all of them have joined, and were given their segments (GS3).
        ended: streams with a segment that was read to its end while a checkpoint was open.
    """

    source: str
    life: str
    home: str
    generation: int
    expected: int = 0
    is_gathered: bool = False
    ended: tuple[str, ...] = ()

    def joined(self, expected: int, readers_count: int) -> Claim:
        """Return it with one more reader, the ``readers_count``-th."""
        return replace(self, expected=expected, is_gathered=readers_count == expected)


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who says that a group is its own: a source, in one generation of its pipeline."""

    source: str
    life: str
    generation: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """A newer generation of the same pipeline owns the group: the caller has to stop."""

    mine: int
    newest: int


@dataclass(frozen=True, slots=True)
class NotYours:
    """``problem``: which owner the group has, and what to do."""

    problem: str


Objection: TypeAlias = Replaced | NotYours


def objection_to_claim(claim: Claim | None, wanted: Claim | None, readers: Collection[str]) -> Objection | None:
    """Return why ``wanted`` is refused; None for ``wanted``: why a reset without a pipeline is (GS1, GS2)."""
    if claim is None:
        if wanted is None:
            return None
        reading = f"{len(readers)} readers are in it" if readers else "programs that join it read by it"
        return NotYours(
            f"it does not belong to a pipeline: {reading}, and would read everything again; give the source a group of "
            "its own, or delete this one"
        )
    if wanted is None:
        return NotYours(f"it belongs to {_whose(claim)}, whose checkpoints hold where it reads")
    # the same source in the same home is the pipeline that has started over: its new life takes over
    if claim.source != wanted.source or (claim.life != wanted.life and claim.home != wanted.home):
        return NotYours(
            f"it belongs to {_whose(claim)}; give this source a group of its own, or delete the group if that pipeline "
            "no longer exists"
        )
    if claim.life == wanted.life and wanted.generation < claim.generation:
        return Replaced(wanted.generation, claim.generation)
    return None


def objection(claim: Claim | None, claimant: Claimant | None) -> Objection | None:
    """Return what stands against a reader that joins, or against who asks for a checkpoint or forgets one."""
    if claim is None and claimant is None:
        return None
    if claim is None:
        return NotYours("it was deleted and created again, and does not belong to a pipeline")
    if claimant is None:
        return NotYours(f"it belongs to {_whose(claim)}; read with a group of your own")
    if (claim.source, claim.life) != (claimant.source, claimant.life):
        return NotYours(f"it belongs to {_whose(claim)}")
    # also a newer one: it has to claim the group, by a reset, before its readers join
    if claim.generation != claimant.generation:
        return Replaced(claimant.generation, claim.generation)
    return None


def _whose(claim: Claim) -> str:
    pipeline, _, source = claim.source.rpartition("/")
    return f"source '{source}' of pipeline '{pipeline}' with its checkpoints in {claim.home}"
