"""Whether the checkpoints of a run are removed when it is over (rule C70 of docs/spec/retaining.md).

Part of the ``Supervisor``, which says when: not before nobody writes any more.
"""

from __future__ import annotations

from headgate.model.failure import Failure, FailureKind


class Removal:
    """What the configuration, whoever cancels and the last failure say about it."""

    def __init__(self, *, retain_on_cancel: bool, retain_on_failure: bool) -> None:
        self._retain_on_cancel = retain_on_cancel
        self._retain_on_failure = retain_on_failure
        self._is_due = False

    @property
    def is_due(self) -> bool:
        """Whether they are to be removed, and nobody has begun."""
        return self._is_due

    def cancelled(self, *, retain: bool) -> None:
        """The run is cancelled; ``retain``: whoever cancels wants them kept."""
        self._is_due = not (self._retain_on_cancel or retain)

    def cancelled_again(self, *, retain: bool) -> None:
        """The run is ending already: nothing is removed yet, so they may still be kept (C70)."""
        self._is_due &= not retain

    def failed(self, failure: Failure, *, has_run: bool) -> None:
        """The run ends with ``failure``; ``has_run``: any generation ran."""
        self._is_due |= self._is_after(failure, has_run=has_run)

    def _is_after(self, failure: Failure, *, has_run: bool) -> bool:
        """Whether nobody goes on from the checkpoints of a run that ended so (C70).

        What starting again may help, a keeper, a standby or the same command starts again; what failed before anything
        ran may be a mistake in the program that is new. A claim and a commit are what a removal begins with: if they
        succeed then, starting again would have helped.
        """
        is_for_good = failure.kind in (FailureKind.USER_CODE, FailureKind.DETERMINISTIC)
        return not self._retain_on_failure and has_run and is_for_good

    def begin(self) -> bool:
        """Return whether to remove them now; once."""
        is_due, self._is_due = self._is_due, False
        return is_due
