"""What a user can do about an error, as values: programs decide by them, and people read the message.

An error that has one says in its message the same, in words, which may be mended at any time. Counterpart:
``errors``, whose ``remedy`` each of these is. Never decides who does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class RestoreFiles:
    """Files of checkpoints are damaged: restore them from a copy."""


@dataclass(frozen=True, slots=True)
class PutCheckpointsBack:
    """A target remembers checkpoints that were in this place and were removed: put them back."""


@dataclass(frozen=True, slots=True)
class BringOutputBack:
    """A target denies output that was promised: bring back what is missing there."""


@dataclass(frozen=True, slots=True)
class NameAnotherPlace:
    """Nothing is at the place that the start names, or a target denies what it promised: name another one, or none."""


@dataclass(frozen=True, slots=True)
class GoBackBehind:
    """The pipeline has newer checkpoints than the start names; ``checkpoint``, the newest, has to be named, too."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class LeaveBehind:
    """The pipeline lacks the operator or sink ``name``: bring it back, or allow what it has to be left behind."""

    name: str


@dataclass(frozen=True, slots=True)
class NameOperator:
    """The operator ``name`` is new and has state: give it a name of its own."""

    name: str


Remedy: TypeAlias = (
    RestoreFiles | PutCheckpointsBack | BringOutputBack | NameAnotherPlace | GoBackBehind | LeaveBehind | NameOperator
)
