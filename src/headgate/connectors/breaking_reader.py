"""A reader that stays broken: the base of those that read files and streams (N23)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headgate.connectors.base import SourceBatch


class BreakingReader(ABC):
    """A reader that is unusable after its first failure, and says so each time: it never seems to be at its end (N23).

    What the failing call had taken is neither delivered nor put back; another reader begins at the last positions
    that were asked for.
    """

    _failure: Exception | None = None

    def poll(self) -> SourceBatch | None:
        """See ``SourceReader``."""
        self._refuse_if_broken()
        try:
            return self._poll()
        except Exception as error:
            self._failure = error
            raise

    def is_finished(self) -> bool:
        """See ``SourceReader``."""
        return self._failure is None and self._has_ended()

    def positions(self) -> dict[str, bytes]:
        """See ``SourceReader``."""
        self._refuse_if_broken()
        return self._positions()

    def _refuse_if_broken(self) -> None:
        if self._failure is not None:
            raise self._failure

    @abstractmethod
    def _poll(self) -> SourceBatch | None:
        """Do what ``poll`` does."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """Return whether all input has ended, if nothing failed."""

    @abstractmethod
    def _positions(self) -> dict[str, bytes]:
        """Return a position for each split owned, finished ones too."""
