"""Whether a life of a pipeline may write to a sink's target (rules LV2–LV6, LV11 of docs/spec/lives.md).

Pure functions over what the target remembers. Counterparts: ``runtime.driver.connectors`` asks and tells the targets;
``store`` and ``connectors.files`` remember.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum

from headgate.model.ids import Generation
from headgate.model.pipeline_identity import NO_GENERATION, OtherSink, Owner, PipelineIdentity


class Objection(Enum):
    """Why a life must not write to a target."""

    OTHER_LIFE = "another life of the pipeline owns it"
    OLDER_COPY = "it has seen a later generation than the checkpoint directory has"


def may_own(life: PipelineIdentity, owner: Owner) -> bool:
    """Whether ``life`` owns the target already or may become its owner (LV3)."""
    if owner.life is not None:
        return owner.life.id == life.id
    return owner.is_forgotten or owner.is_unknown


def objection(life: PipelineIdentity, owner: Owner, following: Generation) -> Objection | None:
    """Return what stands against starting ``life`` in front of a target that remembers ``owner``; None is good.

    ``following`` is the next generation by the checkpoint log, read *after* the target was asked: a generation is
    claimed in the log before any target hears of it, so the log knows at least as much (LV6).
    """
    if not may_own(life, owner):
        return Objection.OTHER_LIFE
    if owner.is_forgotten:
        return None
    return Objection.OLDER_COPY if owner.generation >= following else None


def owner_of_sink(sink: str, asked: str, owner: Owner) -> Owner:
    """Return what a target remembers of ``sink``, by its answer ``owner`` about ``asked``: it lists all (LV11)."""
    others = {other.sink: other.owner for other in owner.others}
    if not owner.is_unknown:
        others[asked] = replace(owner, others=())
    known = others.pop(sink, Owner())
    return replace(known, others=tuple(OtherSink(name, others[name]) for name in sorted(others)))


def may_delete_output(life: PipelineIdentity | None, home: str, host: str | None, owner: Owner) -> bool:
    """Whether a target that remembers ``owner`` holds nothing but what the pipeline at ``home`` wrote (SO4).

    ``life`` is what it is now, None if it never began. Who made a target forget was promised that it keeps all.
    """
    if owner.is_forgotten:
        return False
    if owner.life is None:
        return owner.is_unknown
    return began_at(owner, home, host) or (life is not None and owner.life.id == life.id)


def began_at(owner: Owner, home: str, host: str | None) -> bool:
    """Whether ``owner`` began at ``home``: if it is no more, its checkpoints were removed there by hand.

    ``host`` is this machine if ``home`` is a directory of its own: others may have one of the same name. None: ``home``
    is the same place for all.
    """
    return owner.life is not None and owner.life.home == home and host in (None, owner.life.host)


def floor(owners: Iterable[Owner]) -> Generation:
    """Return the generation that the next claim must exceed (LV4): what targets that forgot have seen.

    So a new life shares no generation with the one before it: that one stays fenced, and no two names of prepared
    output or of files are the same (K8).
    """
    return max((owner.generation for owner in owners if owner.is_forgotten), default=NO_GENERATION)
