"""The identity of a pipeline for its sinks, what it writes to, and its drivers' names and heartbeats.

Rules: docs/spec/lives.md, docs/spec/starting-over.md; heartbeats, beside the log for standbys: docs/spec/standby.md.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.ids import CheckpointId, Generation

LIFE_VERSION = 1

NO_GENERATION = Generation(0)


@dataclass(frozen=True, slots=True)
class PipelineIdentity:
    """Who a pipeline is to the targets of its sinks. Drawn once, at its very first start.

    Attributes:
        id: random; nothing else counts when two are compared.
        home: the checkpoint directory that it was drawn in.
        host: the machine that drew it.
        begun_ms: when, in milliseconds since 1970.
    """

    id: str
    home: str
    host: str
    begun_ms: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a sink's target: the pipeline that writes to it, as the target records it.

    Attributes:
        life: None for a new target, or one that was released.
        generation: the newest one that it fences for; 0 when there was none.
        is_forgotten: a user released it: the next life that comes may own it.
        others: what else a pipeline of that name wrote to it, by other sinks or by the former name of this one.
            Known only to a caller that reads the whole record of the target.
    """

    life: PipelineIdentity | None = None
    generation: Generation = NO_GENERATION
    is_forgotten: bool = False
    others: tuple[OtherSink, ...] = ()

    @property
    def is_unknown(self) -> bool:
        """Whether the target knows nothing of this sink."""
        return self.life is None and not self.generation and not self.is_forgotten


@dataclass(frozen=True, slots=True)
class OtherSink:
    """A sink of a pipeline of the same name, in front of the same target. ``sink``: its name."""

    sink: str
    owner: Owner


Mine: TypeAlias = Callable[[Owner], bool]
"""Whether a pipeline that starts over may delete what such an owner wrote (SO4)."""


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
    """Order to reset a pipeline: it takes effect once the log has it (SO2).

    Attributes:
        token: unique; the entry of the log that makes the order count names it.
        targets: all that has to be emptied.
        beside: paths of what was captured and set aside when the order was given. The order does not cover later ones.
    """

    token: str
    targets: tuple[Target, ...]
    beside: tuple[str, ...] = ()


_DRIVER = ", driver "


def driver_id(owner: str, token: str) -> str:
    """Return the name of one driver of ``owner``; ``token`` differs for each."""
    return f"{owner}{_DRIVER}{token}"


def supervisor_id(process_id: int, host: str) -> str:
    """Return the owner of a driver that a supervisor starts again when it has died."""
    return f"supervisor {process_id} on {host}"


def owner_of(name: str) -> str:
    """Return the owner of the driver that claims under ``name``."""
    return name.partition(_DRIVER)[0]


HEARTBEAT_VERSION = 1

REASON_CHARS_MAX = 500
"""Of a failure: a heartbeat is small."""


class Course(Enum):
    """What a run is at, or how it ended."""

    RUNNING = "running"
    STOPPING = "stopping"
    """Its user asked it to stop."""
    DRAINING = "draining"
    """Its user asked it to drain."""
    STOPPED = "stopped"
    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"
    """Starting again may help."""
    FAILED_FOR_GOOD = "failed-for-good"
    """It failed, and a user has to change something before the next start."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of one generation, or its last word.

    Attributes:
        owner: under which name it was claimed.
        count: differs from beat to beat.
        checkpoint: the newest completed one, at the end.
        reason: of a failure.
        was_draining: whether a run that failed had been asked to drain.
    """

    generation: Generation
    owner: str
    count: int
    course: Course = Course.RUNNING
    checkpoint: CheckpointId | None = None
    reason: str = ""
    was_draining: bool = False
