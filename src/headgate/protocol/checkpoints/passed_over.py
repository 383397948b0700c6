"""Checkpoints to which no start returns by itself, though their bytes may be sound (R57 and SV25 of docs/spec).

Pure. Counterparts: ``runtime.driver.claims``, which asks before it chooses; ``unsound``, about what cannot be restored
at all; ``promises``, which knows what descends from what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.promises import is_in_line
from headgate.protocol.checkpoints.recovery import Damage


@dataclass(frozen=True, slots=True)
class Aside:
    """The checkpoints after ``above`` and before ``below`` are kept: a start could not use them. ``why`` names the
    damage. They may share files of older ones, so those stay, too (SF7)."""

    above: CheckpointId
    below: CheckpointId
    why: str


def left_by_its_user(manifest: Manifest, newest: Manifest) -> list[Damage]:
    """Return why ``manifest`` is not restored behind the back of its user, who left it for ``newest``: what it had
    promised was aborted then."""
    if is_in_line(manifest.checkpoint, newest):
        return []
    return [Damage(_name(manifest), "the pipeline left it")]


def gone_back_behind(manifest: Manifest, asides: Iterable[Aside]) -> list[Damage]:
    """Return which former start went back behind ``manifest``: what it had promised was aborted then.

    ``asides``: of starts that went back behind what they kept.
    """
    reasons = [aside.why for aside in asides if aside.above < manifest.checkpoint < aside.below]
    return [Damage(_name(manifest), f"a former start went back behind it: {why}") for why in reasons[:1]]


def _name(manifest: Manifest) -> str:
    return f"checkpoint {manifest.checkpoint}"
