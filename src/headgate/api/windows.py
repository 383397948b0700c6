"""Kinds of windows."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.api.not_yet import not_there_yet
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Consecutive windows of ``size``, aligned to 1970-01-01 00:00 UTC. Each record falls into exactly one of them."""

    size: Duration

    def __post_init__(self) -> None:
        if self.size_ms <= 0:
            raise UsageError("a window's size must be longer than zero")

    @property
    def size_ms(self) -> int:
        """The size in milliseconds."""
        return duration_ms(self.size, "window size")


class Sliding:
    """Sliding windows are not there yet."""

    def __init__(self, *args: object, **options: object) -> None:
        not_there_yet("a sliding window", "use headgate.Tumbling('5m')")


class Session:
    """Session windows are not there yet."""

    def __init__(self, *args: object, **options: object) -> None:
        not_there_yet("a session window", "use headgate.Tumbling('5m')")
