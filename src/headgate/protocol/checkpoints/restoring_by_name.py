"""What a start begins with that names a savepoint or a checkpoint (rules SV20–SV25 of docs/spec/savepoints.md).

Pure functions over the pipeline's own log and what is at the named place. Counterpart: ``runtime.driver.adopting``,
which reads the place and writes to the log. What a start begins with that names nothing is in ``recovery``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.model.places import RestoredFrom
from headgate.protocol.checkpoints.recovery import ObservedLog, Refuse, candidates, damage_behind
from headgate.remedies import GoBackBehind, NameAnotherPlace


@dataclass(frozen=True, slots=True)
class Named:
    """What a start names.

    Attributes:
        url: as it was named.
        origin: what is there; None if nothing is.
        is_newest: it was named as the newest one of its pipeline, whichever that is.
        go_back_behind: the newest checkpoint of the starting pipeline that may be left for it.
        may_go_back: whether the guarantee allows that (GM35).
    """

    url: str
    origin: RestoredFrom | None
    is_newest: bool = False
    go_back_behind: CheckpointId | None = None
    may_go_back: bool = True


@dataclass(frozen=True, slots=True)
class Adopt:
    """Restore it: it becomes the newest checkpoint of the pipeline. ``behind``: the newest one until now."""

    behind: CheckpointId | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """Start as if nothing had been named: ``newest`` descends from it, or is it (SV24)."""

    newest: CheckpointId


Decision: TypeAlias = Adopt | GoOn | Refuse


def decide(log: ObservedLog, life: str, named: Named) -> Decision:
    """Return what a pipeline with this ``log`` and ``life`` begins with."""
    manifests = candidates(log)
    newest = manifests[0] if manifests else None
    goes_back = newest is not None and named.go_back_behind == newest.checkpoint
    if newest is not None and _descends(newest, life, named) and not goes_back:
        return GoOn(newest.checkpoint)
    if damage_behind(log, newest):
        return Refuse(
            "entries of its own log cannot be read, so it is unknown what a start from elsewhere would leave behind; "
            "restore the log from a copy, or give the pipeline another checkpoint directory"
        )
    if named.origin is None:
        return Refuse("there is neither a savepoint nor a completed checkpoint", NameAnotherPlace())
    if newest is None:
        return Adopt()
    if not goes_back:
        return Refuse(_has_others(newest.checkpoint), GoBackBehind(newest.checkpoint))
    if not named.may_go_back:
        return Refuse("its mode is at_most_once, and going back would process records a second time")
    return Adopt(newest.checkpoint)


def _descends(newest: Manifest, life: str, named: Named) -> bool:
    """Whether ``newest`` is what was named, or the pipeline has been restored from that already."""
    wanted, origin = named.origin, newest.origin
    if wanted is None:
        return origin is not None and origin.url == named.url
    own = (life, newest.checkpoint)
    restored = None if origin is None else (origin.source, origin.checkpoint)
    return any(
        one is not None and one[0] == wanted.source and (named.is_newest or one[1] == wanted.checkpoint)
        for one in (own, restored)
    )


def _has_others(newest: CheckpointId) -> str:
    return (
        f"its newest checkpoint is {newest}, which does not descend from there, and what it committed since would be "
        "produced again; start it without naming anything to go on, give it another name or checkpoint directory, or, "
        f"to go back all the same, give go_back_behind={newest} (headgate run --go-back-behind {newest})"
    )
