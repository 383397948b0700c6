"""What a pipeline writes to, as it is written down beside its checkpoints, and an order to start over.

Source: docs/spec/starting-over.md. Counterparts: ``codec.targets``, ``runtime.checkpoints.records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TARGETS_VERSION = 1


class TargetKind(Enum):
    """What is at a target, and so who can empty it."""

    FILES = "files"
    STREAM = "stream"
    NOTHING = "nothing"
    """The sink keeps nothing, such as ``Discard``."""
    OWN = "own"
    """Of a class of a user's own: only a program that has the sink knows how to empty it."""


@dataclass(frozen=True, slots=True)
class Target:
    """What one sink writes to.

    Attributes:
        sink: name of the sink in the pipeline.
        kind: says what the other fields mean.
        place: directory or URL of files, root of a stream store, or the name of a user's class.
        stream: its name; the rest is how the sink makes it, if it does.
    """

    sink: str
    kind: TargetKind
    place: str = ""
    stream: str = ""
    create: bool = True
    segments: int = 0
    routing_key: str | None = None
    retention_age_ms: int | None = None
    retention_size_bytes: int | None = None

    @property
    def place_key(self) -> tuple[str, TargetKind, str, str]:
        """Equal for two records of the same sink in front of the same target."""
        return (self.sink, self.kind, self.place, self.stream)


@dataclass(frozen=True, slots=True)
class ResetOrder:
    """Somebody wants a pipeline to start over: it counts once the log says so (SO2).

    Attributes:
        token: nothing else is called so; the entry of the log that makes it count names it.
        targets: all that has to be emptied.
        beside: paths of what was captured and set aside when it was given. What comes there later is not the order's.
    """

    token: str
    targets: tuple[Target, ...]
    beside: tuple[str, ...] = ()
