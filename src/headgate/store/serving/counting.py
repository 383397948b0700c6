"""What a server has done so far, for people and programs who watch it (SS15 of docs/spec/served-store.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headgate.threads import SYSTEM_THREADS, Threads


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the server began.

    Attributes:
        requests: questions answered; those for news do not count.
        errors: of them, answered by an error that the store's rules give, such as a stream that is not there.
        failures: of them, that the server could not answer: a mistake of ours.
        refused: greetings of those who do not know the token, or are of another version, and what was no question.
        bytes_in, bytes_out: of chunks.
        connections: open now.
    """

    requests: int = 0
    errors: int = 0
    failures: int = 0
    refused: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0


class Counting:
    """The counts of a server; threads share it."""

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._lock = threads.lock()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """As they are now."""
        return self._counts

    def add(self, **more: int) -> None:
        """Count."""
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})
