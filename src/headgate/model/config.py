"""Configuration of a pipeline and of its checkpoints.

Frozen values with defaults, durations in integer milliseconds.

The options of a checkpoint travel with its trigger and its barriers (rules GM2, GM3 of docs/spec/guarantees.md).
"""

from __future__ import annotations

import math
import re
from dataclasses import field
from enum import Enum
from fractions import Fraction
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.ids import MAX_PARALLELISM_DEFAULT, CheckpointId
from headgate.model.lineage import Moves


class CheckpointKind(Enum):
    """Kind of a checkpoint, by its owner."""

    CHECKPOINT = "checkpoint"
    """The pipeline's: removed when newer ones are retained."""
    SAVEPOINT = "savepoint"
    """The pipeline's, and what is written of it below ``target`` is the user's: never removed by the pipeline (SV1)."""


class Alignment(Enum):
    """What a subtask does with the channels that a barrier has come on."""

    ALIGNED = "aligned"
    """It reads nothing more from them until the barrier has come on all."""
    TRACKED = "tracked"
    """It reads on, so its snapshot may hold records from after the barrier."""
    TIMED = "timed"
    """As ``ALIGNED``, but for a while; then the barrier overtakes what waits in front of it (UA3)."""
    OVERTAKING = "overtaking"
    """As ``TIMED``, and somewhere on its way it did not wait any longer (UA6)."""

    @property
    def may_overtake(self) -> bool:
        """Whether records that are in flight may be in a snapshot."""
        return self in (Alignment.TIMED, Alignment.OVERTAKING)


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of a checkpoint. All its barriers carry the same ones.

    Attributes:
        target: of a savepoint: where its snapshots go, too (``places.Place`` as text).
        is_last: no source sends a record after its barrier (GM3).
    """

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    alignment: Alignment = Alignment.ALIGNED
    target: str | None = None
    is_last: bool = False


ORDINARY = CheckpointOptions()


class Guarantee(Enum):
    """How often the effect of a record is in what a pipeline committed, whatever failed."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    """Never less; what overtook a barrier may count again after a failure."""
    AT_MOST_ONCE = "at_most_once"
    """Never more; what was on its way when something failed is lost, and nothing is processed again."""

    @property
    def alignment(self) -> Alignment:
        """What its subtasks do with barriers (GM2)."""
        return Alignment.TRACKED if self is Guarantee.AT_LEAST_ONCE else Alignment.ALIGNED

    def options(self, *, is_last: bool, may_overtake: bool = False) -> CheckpointOptions:
        """Return what its checkpoints are to be; ``is_last``: a stop waits for this one (GM3)."""
        if self is Guarantee.EXACTLY_ONCE:  # what is sent after the last barrier is in no snapshot
            return CheckpointOptions(alignment=Alignment.TIMED) if may_overtake else ORDINARY
        return CheckpointOptions(alignment=self.alignment, is_last=is_last)


class Access(Enum):
    """Who may read and write what is created in a local directory."""

    OWNER = "owner"
    """Only the user who runs the process that creates it."""
    GROUP = "group"
    """Also the group of the directory: for drivers and executors that run as different users."""
    UMASK = "umask"
    """The users that the umask of the process allows: for output that others consume."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """What the user chose (``headgate.Security``).

    Attributes:
        access: of a checkpoint directory that does not exist yet; one that exists decides by itself.
        tls: True and False for all connections; None: all but those over loopback.
        certificate_file, key_file, ca_file: the user's own certificate, PEM, on every machine; "" makes one per job.
    """

    access: Access = Access.OWNER
    tls: bool | None = None
    certificate_file: str = ""
    key_file: str = ""
    ca_file: str = ""


_DURATION = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]+)\s*")
_UNITS_MS = {
    1: ("ms", "millisecond", "milliseconds"),
    1_000: ("s", "sec", "second", "seconds"),
    60_000: ("m", "min", "minute", "minutes"),
    3_600_000: ("h", "hour", "hours"),
    86_400_000: ("d", "day", "days"),
}
_DAY_MS = 86_400_000
DURATION_MS_MAX = 36_500 * _DAY_MS
"""A hundred years: more overflows what threads can wait, and means that something never happens."""

_UNIT_MS = {name: unit_ms for unit_ms, names in _UNITS_MS.items() for name in names}


@runtime_checkable
class Timespan(Protocol):
    """What ``datetime.timedelta`` is, and pandas' ``Timedelta``."""

    def total_seconds(self) -> float:
        """Return it in seconds."""
        ...


Duration: TypeAlias = str | Timespan | Literal[0]
"""A duration as text (``"500ms"``, ``"1s"``, ``"5 minutes"``) or as ``datetime.timedelta``; 0 is none."""


def duration_ms(value: Duration, what: str = "duration") -> int:
    """Return ``value`` in milliseconds.

    Raises:
        UsageError: it is negative, has a part of a millisecond, is too long or no duration; ``what`` names it in the
            message.
    """
    if isinstance(value, Timespan):
        return _whole_ms(_span_ms(value), value, what)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value == 0:
            return 0
        raise UsageError(f"{what} is {value} without a unit: write '{value}s' for seconds, or '{value}ms'")
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a duration such as '1s' or a timedelta, not {value!r}")
    match = _DURATION.fullmatch(value)
    if match is None or match.group(2) not in _UNIT_MS:
        raise UsageError(f"{what} must look like '500ms', '1s', '5 minutes' or '1h', not {value!r}")
    return _whole_ms(Fraction(match.group(1)) * _UNIT_MS[match.group(2)], value, what)


def check_switches(where: str, **switches: object) -> None:
    """Check options that are on or off. ``where`` is the beginning of the message, such as ``"CsvFiles: "``.

    Raises:
        UsageError: one is neither True nor False: a text such as "no" would else be true.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{where}{name}= must be True or False, not {value!r}")


def _span_ms(span: Timespan) -> Fraction:
    """Return it exactly; NaN, as of pandas' ``NaT``, is no duration."""
    parts = [getattr(span, name, None) for name in ("days", "seconds", "microseconds")]
    if all(isinstance(part, int) for part in parts):
        days, seconds, micros = (int(part or 0) for part in parts)
        nanos = int(getattr(span, "nanoseconds", 0))
        return Fraction(((days * 86_400 + seconds) * 1_000_000 + micros) * 1_000 + nanos, 1_000_000)
    seconds_float = span.total_seconds()
    return Fraction(-1) if seconds_float != seconds_float else Fraction(seconds_float) * 1_000


def _whole_ms(found: Fraction, value: Duration, what: str) -> int:
    """Return whole milliseconds; nothing is rounded."""
    if found < 0:
        raise UsageError(f"{what} must not be negative, but is {value}")
    if found > DURATION_MS_MAX:
        raise UsageError(f"{what} is {value}, but must be at most {DURATION_MS_MAX // _DAY_MS} days")
    if found.denominator != 1:
        raise UsageError(f"{what} is {value}, but durations are whole milliseconds: write '{math.ceil(found)}ms'")
    return int(found)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How checkpoints are taken (names and meaning as in Flink's ``execution.checkpointing.*``).

    Attributes:
        interval_ms: base period; 0 switches periodic checkpoints off (the final one is still taken).
        timeout_ms: a pending checkpoint older than this expires, unless sources still read towards its marker.
        min_pause_ms: least time between a completion and the next periodic trigger.
        max_concurrent: pending checkpoints at a time.
        tolerable_failures: consecutive counted failures that are forgiven; one more fails the pipeline's
            current generation (the restart strategy then decides).
        retained: completed checkpoints kept.
        inline_bytes_max: state up to this size travels inside the manifest.
        mode: what is guaranteed.
        alignment_timeout_ms: how long a subtask aligns before its barriers overtake what waits; None: as long as it
            takes.
        retain_on_cancel: whether a cancelled pipeline keeps its checkpoints.
        retain_on_failure: whether one keeps them that has failed for good.
    """

    interval_ms: int = 1_000
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    retained: int = 2
    inline_bytes_max: int = 20_480
    mode: Guarantee = Guarantee.EXACTLY_ONCE
    alignment_timeout_ms: int | None = None
    retain_on_cancel: bool = True
    retain_on_failure: bool = True

    @property
    def alignment(self) -> Alignment:
        """What subtasks do with barriers (GM2)."""
        return self.mode.alignment if self.alignment_timeout_ms is None else Alignment.TIMED


@dataclass(frozen=True, slots=True)
class NoRestart:
    """The first failure fails the pipeline."""


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """Restart up to ``attempts`` times (None: without limit), each after ``delay_ms``."""

    attempts: int | None = None
    delay_ms: int = 1_000


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Restart after a delay that grows by ``multiplier`` and resets after ``reset_after_ms`` without failure.

    ``jitter`` is the fraction of the delay that is randomised (0 to 1); ``attempts`` None means no limit.
    """

    initial_ms: int = 100
    max_ms: int = 60_000
    multiplier: float = 2.0
    reset_after_ms: int = 60_000
    jitter: float = 0.1
    attempts: int | None = None


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Restart after ``delay_ms`` unless more than ``failures_max`` failures fell within ``interval_ms``."""

    failures_max: int = 3
    interval_ms: int = 60_000
    delay_ms: int = 1_000


RestartStrategy: TypeAlias = NoRestart | FixedDelay | ExponentialDelay | FailureRate


class DamagedCheckpoint(Enum):
    """What to do when the newest completed checkpoint is damaged (C36)."""

    PREVIOUS = "previous"
    FAIL = "fail"


class DeniedOutput(Enum):
    """What to do when a target denies output that a completed checkpoint promised (K5)."""

    FAIL = "fail"
    LOSE = "lose"


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
_SIZE_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def size_bytes(value: str | int, what: str = "size") -> int:
    """Return a size such as ``"64MB"`` or ``"2GB"`` in bytes: a kilobyte is 1,024 of them, as in Spark.

    Raises:
        UsageError: it is none; ``what`` names it in the message.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"{what} must be a size such as '64MB' or '2GB', or a number of bytes, not {value!r}")
    return int(float(match.group(1)) * (1 << _SIZE_SHIFTS[match.group(2).lower().rstrip("ib")]))


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Keyed state is in memory."""


@dataclass(frozen=True, slots=True)
class RocksState:
    """Keyed state is in RocksDB.

    Attributes:
        memory_bytes: what all databases of one worker may use of its memory together.
        directory: on each worker's machine; None: where Spark puts its own temporary files.
    """

    memory_bytes: int
    directory: str | None = None


StateConfig: TypeAlias = MemoryState | RocksState

LOOP_MEMORY_BYTES = 64 << 20
LOOP_DISK_BYTES_MAX = 16 << 30


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Limits and periods of the runtime.

    Attributes:
        credit_bytes: bytes that may be unread on one channel.
        flush_ms: most time a partly filled buffer waits while the worker is not busy.
        heartbeat_ms, heartbeat_timeout_ms: period of the control channel's signs of life, and the silence
            after which a worker counts as lost.
        loop_memory_bytes: what feedback queues and loop logs of one worker keep in memory; more goes to disk, and
            the loops' regular input waits.
        loop_disk_bytes_max: what they may take on disk; more fails the pipeline.
        aligns_sources: whether splits of sources wait for slower ones, by event time.
        max_drift_ms: how far one may be ahead; None: it follows how fast the slowest one advances.
    """

    credit_bytes: int = 4 << 20
    flush_ms: int = 5
    heartbeat_ms: int = 500
    heartbeat_timeout_ms: int = 5_000
    loop_memory_bytes: int = LOOP_MEMORY_BYTES
    loop_disk_bytes_max: int = LOOP_DISK_BYTES_MAX
    aligns_sources: bool = True
    max_drift_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StartConfig:
    """Options of a start for the checkpoint that it begins with (docs/spec/savepoints.md).

    Attributes:
        restore: a savepoint, or the checkpoints of a pipeline, or one of them; None: the pipeline's own newest one.
        go_back_past: the newest checkpoint of the pipeline that may be left for it.
        allow_unclaimed_state: operators that may be missing from the program although they have state.
        moved: former place → present place, for sources and sinks that moved (EV15).
    """

    restore: str | None = None
    go_back_past: CheckpointId | None = None
    allow_unclaimed_state: frozenset[str] = frozenset()
    moved: Moves = ()


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Everything about a pipeline that is not its graph.

    Attributes:
        state: where keyed state is.
        operator_states: where it is of operators that say so themselves, by name.
    """

    name: str
    parallelism: int
    checkpoint_root: str
    max_parallelism: int = MAX_PARALLELISM_DEFAULT
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: RestartStrategy = field(default_factory=ExponentialDelay)
    on_damaged: DamagedCheckpoint = DamagedCheckpoint.PREVIOUS
    on_denied: DeniedOutput = DeniedOutput.FAIL
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    start: StartConfig = field(default_factory=StartConfig)
    state: StateConfig = field(default_factory=MemoryState)
    operator_states: tuple[tuple[str, StateConfig], ...] = ()
