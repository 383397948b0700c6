"""A failure as a value: what kind it is, and what people are told about it.

Made where something fails (a worker, a coordinator, a claim), decided upon by ``protocol.supervision.supervisor``,
shown to the user at the end. What is decided goes by the kind, never by the words (G14).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headgate.plain_text import printable
from headgate.remedies import Remedy


class FailureKind(Enum):
    """What may be done about a failure."""

    LOST = "lost"
    """A process, connection or machine failed: start again."""
    USER_CODE = "user-code"
    """The user's function raised: start again, once for the same failure."""
    DAMAGED = "damaged"
    """The restored checkpoint cannot be used, which only a worker could find: start again, from what the policy for
    damaged checkpoints says (R57)."""
    UNEXPLAINED = "unexplained"
    """Spark ended the job of the workers for a reason that tells neither: start again, once (G9)."""
    DETERMINISTIC = "deterministic"
    """Starting again cannot help."""
    DENIED = "denied"
    """A target refuses what was promised: starting again cannot help, and what says so must stay."""
    REPLACED = "replaced"
    """Another driver runs the pipeline now: stop, and leave everything to it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a generation ended.

    Attributes:
        kind: what may be done about it.
        reason: one sentence.
        detail: a short traceback or "".
        path: of damage, the file of the checkpoint, or "".
    """

    kind: FailureKind
    reason: str
    detail: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        """Make texts printable: what raised them may have said anything."""
        object.__setattr__(self, "reason", printable(self.reason))
        object.__setattr__(self, "detail", printable(self.detail))

    @property
    def is_hopeless(self) -> bool:
        """Whether starting again cannot help, whatever was before."""
        return self.kind in (FailureKind.DETERMINISTIC, FailureKind.DENIED, FailureKind.REPLACED)


@dataclass(frozen=True, slots=True)
class Refusal(Failure):
    """A claim that failed, and what the user can do about it. It stays in the driver: no message carries it."""

    remedy: Remedy | None = None
