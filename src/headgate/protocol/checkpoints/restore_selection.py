"""Which checkpoint a start may restore.

Named ones (rules SV20–SV25 of docs/spec/savepoints.md), and unusable ones (R57).

Pure functions over the pipeline's own log, what is at the named place, and what workers found. Counterpart:
``runtime.driver``, which reads the place and writes to the log. What a start restores that names nothing is decided
in ``recovery``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.errors import GoBackPast, NameAnotherPlace
from headgate.model.failure import Failure
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest, RestoredFrom
from headgate.protocol.checkpoints.commit import is_in_line
from headgate.protocol.checkpoints.recovery import Damage, ObservedLog, Refuse, candidates, damage_after


@dataclass(frozen=True, slots=True)
class KeptAside:
    """The checkpoints after ``above`` and before ``below`` are kept: a start could not use them. ``why`` names the
    damage. They may share files of older ones, so those stay, too (SF7)."""

    above: CheckpointId
    below: CheckpointId
    why: str


def left_by_user(manifest: Manifest, newest: Manifest) -> list[Damage]:
    """Return why ``manifest`` is not restored: its user left it for ``newest``, and its output was aborted then."""
    if is_in_line(manifest.checkpoint, newest):
        return []
    return [Damage(_name(manifest), "the pipeline left it")]


def rolled_back_by(manifest: Manifest, asides: Iterable[KeptAside]) -> list[Damage]:
    """Return which former start went back past ``manifest``: its output was aborted then.

    ``asides``: of starts that went back past the checkpoints that they set aside.
    """
    reasons = [aside.why for aside in asides if aside.above < manifest.checkpoint < aside.below]
    return [Damage(_name(manifest), f"a former start went back past it: {why}") for why in reasons[:1]]


def _name(manifest: Manifest) -> str:
    return f"checkpoint {manifest.checkpoint}"


class UnrestorableCheckpoints:
    """What workers found so far."""

    def __init__(self) -> None:
        self._found: list[tuple[Manifest, Damage]] = []

    def note(self, restored: Manifest, failure: Failure) -> None:
        """A worker could not restore its part of ``restored``."""
        self._found.append((restored, Damage(failure.path, failure.reason)))

    def of(self, manifest: Manifest) -> list[Damage]:
        """Return what is wrong with ``manifest``: it was found in it, or in a file that it shares (SF15)."""
        return [
            damage
            for restored, damage in self._found
            if restored.checkpoint == manifest.checkpoint or _has(manifest, restored, damage.path)
        ]


def _has(manifest: Manifest, restored: Manifest, path: str) -> bool:
    """Whether the file at ``path``, which was found in ``restored``, is one of ``manifest``, too."""
    if manifest.place != restored.place:
        return False
    # a worker reports the path with its directory in front
    return any(path.endswith(f"/{file}") for file in manifest.files & restored.files)


@dataclass(frozen=True, slots=True)
class Named:
    """What a start names.

    Attributes:
        url: as it was named.
        origin: what is there; None if nothing is.
        is_newest: it was named as the newest one of its pipeline, whichever that is.
        is_same_cut: as ``Savepoint.is_same_cut`` says; a checkpoint is the same cut as itself.
        trigger_wall_ms: when its checkpoint began. Two copies of a log may give one id to two checkpoints.
        go_back_past: the newest checkpoint of the starting pipeline that may be left for it.
        may_go_back: whether the guarantee allows that (GM35).
    """

    url: str
    origin: RestoredFrom | None
    is_newest: bool = False
    is_same_cut: bool = True
    trigger_wall_ms: int = 0
    go_back_past: CheckpointId | None = None
    may_go_back: bool = True


@dataclass(frozen=True, slots=True)
class Adopt:
    """Restore a checkpoint from elsewhere: it becomes the newest one of the pipeline.

    Attributes:
        passed: the newest one until now, if the pipeline goes back past it.
        after: the output of the checkpoints from here to ``passed`` is produced again, that of this one is not; None if
            it is not known which is.
    """

    passed: CheckpointId | None = None
    after: CheckpointId | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """Start as if nothing had been named: ``newest`` descends from it, or is it (SV24)."""

    newest: CheckpointId


Decision: TypeAlias = Adopt | GoOn | Refuse


def decide_named(log: ObservedLog, life: str, named: Named) -> Decision:
    """Return what a pipeline with this ``log`` and ``life`` begins with."""
    manifests = candidates(log)
    newest = manifests[0] if manifests else None
    goes_back = newest is not None and named.go_back_past == newest.checkpoint
    # first: a program that is started again with the same words must go on, and not go back a second time (SV24)
    if newest is not None and _was_restored(newest, life, named) and not goes_back:
        return GoOn(newest.checkpoint)
    if damage_after(log, newest):
        return Refuse(
            "entries of its own log cannot be read, so it is unknown what a start from elsewhere would leave behind; "
            "restore the log from a copy, or give the pipeline another checkpoint directory"
        )
    if named.origin is None:
        return Refuse("there is neither a savepoint nor a completed checkpoint", NameAnotherPlace())
    if newest is None or _stands_there(newest, life, named.origin, named):
        return Adopt()
    after = _repeated_after(newest, life, named.origin)
    if not goes_back:
        return Refuse(_has_others(newest.checkpoint, after), GoBackPast(newest.checkpoint))
    if not named.may_go_back:
        return Refuse("its mode is at_most_once, and going back would process records a second time")
    return Adopt(newest.checkpoint, after)


def _was_restored(newest: Manifest, life: str, named: Named) -> bool:
    """Whether the pipeline has been restored from what is named already, or that is its own newest checkpoint."""
    wanted, origin = named.origin, newest.origin
    if wanted is None:
        return origin is not None and origin.url == named.url
    if named.is_newest and wanted.source == life:
        return True
    is_from_there = origin is not None and origin.source == wanted.source
    return is_from_there and (named.is_newest or origin.checkpoint == wanted.checkpoint)  # type: ignore[union-attr]


def _stands_there(newest: Manifest, life: str, wanted: RestoredFrom, named: Named) -> bool:
    """Whether the pipeline has committed nothing since: ``newest`` is the checkpoint of what is named, or was restored
    from that checkpoint, and no other has been completed (SV25)."""
    if not wanted.life or not named.is_same_cut or named.trigger_wall_ms != newest.trigger_wall_ms:
        return False
    origin = newest.origin
    stands = {(life, newest.checkpoint)}
    if origin is not None and origin.adopted == newest.checkpoint:
        stands.add((origin.life, origin.checkpoint))
    return (wanted.life, wanted.checkpoint) in stands


def _repeated_after(newest: Manifest, life: str, wanted: RestoredFrom) -> CheckpointId | None:
    """Return after which of its own checkpoints a pipeline would repeat its output; None if that is unknown."""
    if wanted.life and wanted.life == life and wanted.checkpoint <= newest.checkpoint:
        return wanted.checkpoint
    origin = newest.origin
    if origin is not None and (origin.source, origin.checkpoint) == (wanted.source, wanted.checkpoint):
        return origin.adopted
    return None


def committed_by(after: CheckpointId, newest: CheckpointId) -> str:
    """Return, for people, which checkpoints committed what is produced again."""
    if newest == after + 1:
        return f"checkpoint {newest}"
    return f"checkpoints {after + 1} to {newest}"


def _has_others(newest: CheckpointId, after: CheckpointId | None) -> str:
    again = "which is not known to descend from there, so that its output might be produced again"
    if after is not None and after < newest:
        again = f"and what {committed_by(after, newest)} committed would be produced again"
    elif after is not None:
        again = "after which records were processed that would be processed a second time"
    return (
        f"its newest checkpoint is {newest}, {again}; start it without naming anything to go on, give it another name "
        f"or checkpoint directory, or, to go back all the same, give go_back_past={newest} (headgate run "
        f"--go-back-past {newest})"
    )
