"""What would go if a pipeline started over, as somebody looked at it, and what of it cannot be left (SO4, SO10).

Counterpart: ``starting_over``, which finds it and has it go. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headgate.connectors.owned_sinks import Holding, ResettableSink
from headgate.errors import UsageError
from headgate.model.life import Life, Mine, Owner
from headgate.model.manifest import Manifest
from headgate.model.targets import Target, TargetKind
from headgate.protocol.checkpoints.recovery import ObservedLog


@dataclass(frozen=True, slots=True)
class Found:
    """A target that will be emptied, and what it holds. ``sink``: None if there is nothing to be emptied."""

    target: Target
    sink: ResettableSink | None
    owner: Owner
    holding: Holding


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes when the pipeline starts over.

    Attributes:
        pipeline, home: its name, and where its checkpoints are.
        checkpoints: the completed ones, newest first.
        inputs: paths of captured DataFrames.
        aside: paths of what was set aside.
        targets: of all sinks that it has or had, but for what is left.
        left: targets that stay as they are, because the user said so.
        log: what was there when this was found.
        is_empty: nothing would be deleted or forgotten: the next start begins at the beginning as it is.
    """

    pipeline: str
    home: str
    checkpoints: tuple[Manifest, ...]
    inputs: tuple[str, ...]
    aside: tuple[str, ...]
    targets: tuple[Found, ...]
    left: tuple[Target, ...]
    log: ObservedLog
    is_empty: bool

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the sources whose DataFrame was captured."""
        return tuple(sorted({path.split("/")[2] for path in self.inputs}))

    @property
    def shown(self) -> object:
        """What must not change between a question and its answer."""
        return [(found.target, found.owner, found.holding) for found in self.targets]


def is_in_the_way(found: Found, life: Life | None, mine: Mine) -> bool:
    """Whether a target keeps the pipeline from beginning as it is, or would hold what a former run wrote.

    In a stream a former name of the sink may have left what nobody can see: prepared output.
    """
    others = [other.owner for other in found.owner.others if found.target.kind is TargetKind.STREAM]
    has_former = any(mine(owner) and not _is_free_for(life, owner) for owner in others)
    return bool(found.holding.what) or has_former or not _is_free_for(life, found.owner)


def _is_free_for(life: Life | None, owner: Owner) -> bool:
    return owner.is_forgotten or owner.is_nobody or (owner.life is not None and owner.life == life)


def refuse_unknown(pipeline: str, leave: Collection[str], sinks: Collection[str]) -> None:
    """Refuse to leave a sink that there is not.

    Raises:
        UsageError
    """
    unknown = sorted(set(leave) - set(sinks))
    if unknown:
        there = ", ".join(f"'{name}'" for name in sorted(sinks)) or "none"
        raise UsageError(f"pipeline '{pipeline}' has no sink '{unknown[0]}' to leave; its sinks: {there}")


def refuse_to_part(pipeline: str, leave: Collection[str], targets: Sequence[Found], mine: Mine) -> None:
    """Refuse to leave what goes with another sink: a stream is emptied of all that the pipeline wrote to it (SO10).

    Raises:
        UsageError
    """
    for found in targets:
        left = [other.sink for other in found.owner.others if other.sink in leave and mine(other.owner)]
        if found.target.kind is TargetKind.STREAM and left:
            raise UsageError(
                f"sink '{left[0]}' of pipeline '{pipeline}' cannot be left alone: sink '{found.target.sink}' writes "
                f"to {found.holding.where}, too, which is emptied of all that the pipeline wrote; leave both"
            )
