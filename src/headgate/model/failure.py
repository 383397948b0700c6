"""A failure as a value: what kind it is, what the user reads about it, and the exit code that says it.

Made where something fails (a worker, a coordinator, a claim), decided upon by ``protocol.supervision.supervisor``.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from headgate.dataclass import dataclass
from headgate.errors import BadRecord, FencedError, HeadgateError, OutputDenied, PipelineFailed, Remedy, UsageError
from headgate.plain_text import printable


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
    def is_permanent(self) -> bool:
        """Whether starting again cannot help, whatever was before."""
        return self.kind in (FailureKind.DETERMINISTIC, FailureKind.DENIED, FailureKind.REPLACED)


@dataclass(frozen=True, slots=True)
class Refusal(Failure):
    """A claim that failed, and what the user can do about it. It stays in the driver: no message carries it."""

    remedy: Remedy | None = None


class ExitCode(IntEnum):
    """Exit codes of ``headgate``. A process that a signal killed has none of these."""

    DONE = 0
    """Finished, drained, or stopped after a last checkpoint."""
    FAILED = 1
    """Starting again may help: a process, a machine or storage failed."""
    USAGE = 2
    """The command, the program or the configuration is wrong."""
    FOR_GOOD = 3
    """Starting again fails in the same way until a user changes something."""
    REPLACED = 4
    """Another driver runs the pipeline now."""


def exit_code_of(error: HeadgateError) -> ExitCode:
    """Return the exit code for ``error``: it says whether to start the command again."""
    match error:
        case UsageError():
            return ExitCode.USAGE
        case FencedError():
            return ExitCode.REPLACED
        case OutputDenied() | BadRecord() | PipelineFailed(is_for_good=True):
            return ExitCode.FOR_GOOD
        case _:
            return ExitCode.FAILED
