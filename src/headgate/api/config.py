"""What a user configures: checkpointing, restarts, bad records, state, security.

Translated into ``headgate.model.config``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, TypeAlias

from headgate.connectors.base import Sink, check_is_sink
from headgate.errors import UsageError
from headgate.model import config as model
from headgate.model.config import (
    Access,
    CheckpointConfig,
    DamagedCheckpoint,
    DeniedOutput,
    Duration,
    Guarantee,
    RestartStrategy,
    RuntimeConfig,
    SecurityConfig,
    check_switches,
    duration_ms,
    size_bytes,
)
from headgate.operators import user_functions
from headgate.operators.schemas import canonical_schema
from headgate.storage.local_files import checked_access
from headgate.storage.urls import absolute_location

CHECKPOINT_DIR_DEFAULT = ".headgate/checkpoints"
"""Below the working directory of the driver."""

_MODES = ", ".join(f"'{mode.value}'" for mode in Guarantee)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """How checkpoints are taken.

    Attributes:
        interval: time between two checkpoints; None or 0: only a last one, at the end of bounded input or at a stop.
        dir: a directory or an object store's URL; default ``.headgate/checkpoints`` in the working directory.
        timeout: a checkpoint that takes longer is aborted. With sources that set their own barrier, the time starts
            when they have reached their markers, which may take up to 64 timeouts as long as they make progress.
        min_pause: minimum time between the end of one checkpoint and the start of the next.
        max_concurrent: how many checkpoints may be under way at the same time.
        tolerable_failures: how many checkpoints in a row may fail before the pipeline restarts.
        retained: how many completed checkpoints are kept.
        mode: ``"exactly_once"``, ``"at_least_once"`` or ``"at_most_once"``; docs/guarantees.md compares them.
        alignment_timeout: under backpressure, how long after its trigger a checkpoint waits for the records in front
            of it before it stores them instead. 0: it never waits; None: it always waits.
        retain_on_cancel: False removes the checkpoints when the pipeline is cancelled. Stopping it keeps them.
        retain_on_failure: False removes them when the pipeline has failed and a restart would not help.
    """

    interval: Duration | None = "1s"
    dir: str | os.PathLike[str] | None = None
    timeout: Duration = "10m"
    min_pause: Duration = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    retained: int = 2
    mode: str = "exactly_once"
    alignment_timeout: Duration | None = None
    retain_on_cancel: bool = True
    retain_on_failure: bool = True

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> CheckpointConfig:
        """Return it in milliseconds.

        Raises:
            UsageError: a value is out of range, or the values do not fit together.
        """
        mode = _mode(self.mode)
        retained = {"retain_on_cancel": self.retain_on_cancel, "retain_on_failure": self.retain_on_failure}
        check_switches("checkpointing ", **retained)
        interval_ms = 0 if self.interval is None else duration_ms(self.interval, "checkpointing interval")
        if mode is Guarantee.AT_MOST_ONCE and not interval_ms:
            raise UsageError(
                "mode='at_most_once' processes what was read when a checkpoint has recorded that, so it needs an "
                "interval; give Checkpointing(interval='1s', mode='at_most_once')"
            )
        min_pause_ms = duration_ms(self.min_pause, "checkpointing min_pause")
        max_concurrent = _count(self.max_concurrent, 1, "checkpointing max_concurrent")
        if min_pause_ms and max_concurrent > 1:
            raise UsageError(
                "checkpointing min_pause is the least time between two checkpoints, and "
                f"max_concurrent={max_concurrent} lets them overlap; give one of them"
            )
        return CheckpointConfig(
            interval_ms=interval_ms,
            timeout_ms=_positive(duration_ms(self.timeout, "checkpointing timeout"), "checkpointing timeout"),
            min_pause_ms=min_pause_ms,
            max_concurrent=max_concurrent,
            tolerable_failures=_count(self.tolerable_failures, 0, "checkpointing tolerable_failures"),
            retained=_count(self.retained, 1, "checkpointing retained"),
            mode=mode,
            alignment_timeout_ms=self._alignment_timeout_ms(mode),
            **retained,
        )

    def _alignment_timeout_ms(self, mode: Guarantee) -> int | None:
        if self.alignment_timeout is None:
            return None
        if mode is not Guarantee.EXACTLY_ONCE:
            raise UsageError(
                f"checkpointing alignment_timeout is for mode='exactly_once'; mode='{mode.value}' does not need it, "
                "so leave it out"
            )
        if self.max_concurrent > 1:
            raise UsageError(
                "checkpointing alignment_timeout keeps a checkpoint from waiting for records in front of it, and "
                f"max_concurrent={self.max_concurrent} would store those twice; give one of them"
            )
        return duration_ms(self.alignment_timeout, "checkpointing alignment_timeout")

    def root(self) -> str:
        """Return the checkpoint directory as an absolute path or URL."""
        return absolute_location(CHECKPOINT_DIR_DEFAULT if self.dir is None else self.dir)


@dataclass(frozen=True, slots=True)
class NoRestart:
    """The first failure fails the pipeline."""

    def to_config(self) -> model.RestartStrategy:
        """Return it as plain data."""
        return model.NoRestart()


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """Restart up to ``attempts`` times (None: without limit), each after ``delay``."""

    attempts: int | None = None
    delay: Duration = "1s"

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> model.RestartStrategy:
        """Return it in milliseconds.

        Raises:
            UsageError: a value is out of range.
        """
        return model.FixedDelay(_attempts(self.attempts), duration_ms(self.delay, "restart delay"))


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Restart after a delay that grows by ``multiplier`` and is reset after ``reset_after`` without a failure.

    ``jitter`` is the fraction of the delay that is randomised; ``attempts`` None means without limit.
    """

    initial: Duration = "100ms"
    maximum: Duration = "1m"
    multiplier: float = 2.0
    reset_after: Duration = "1m"
    jitter: float = 0.1
    attempts: int | None = None

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> model.RestartStrategy:
        """Return it in milliseconds.

        Raises:
            UsageError: a value is out of range.
        """
        if not 1 <= self.multiplier < math.inf:
            raise UsageError(f"restart multiplier must be a number of at least 1, but is {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"restart jitter must be between 0 and 1, but is {self.jitter}")
        return model.ExponentialDelay(
            initial_ms=duration_ms(self.initial, "restart initial delay"),
            max_ms=duration_ms(self.maximum, "restart maximum delay"),
            multiplier=self.multiplier,
            reset_after_ms=duration_ms(self.reset_after, "restart reset_after"),
            jitter=self.jitter,
            attempts=_attempts(self.attempts),
        )


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Restart after ``delay`` unless more than ``failures`` failures fell within ``interval``."""

    failures: int = 3
    interval: Duration = "1m"
    delay: Duration = "1s"

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> model.RestartStrategy:
        """Return it in milliseconds.

        Raises:
            UsageError: a value is out of range.
        """
        return model.FailureRate(
            failures_max=_count(self.failures, 0, "restart failures"),
            interval_ms=_positive(duration_ms(self.interval, "restart interval"), "restart interval"),
            delay_ms=duration_ms(self.delay, "restart delay"),
        )


Restart: TypeAlias = NoRestart | FixedDelay | ExponentialDelay | FailureRate


@dataclass(frozen=True, slots=True)
class Fail:
    """Policy for bad records: the first one fails the pipeline, naming the record and its position."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Policy for bad records: divert them to ``sink``, within the same checkpoint and therefore also exactly once.

    The sink gets the columns ``node``, ``problem``, ``position`` and ``record``, all text.

    Attributes:
        sink: the sink that receives the bad records.
        exceptions: a record for which the Python function of a ``map``, ``flat_map``, ``filter`` or ``map_async``
            raises is a bad record, too; its ``problem`` has the traceback. Without it, and in all other functions, an
            exception fails the pipeline.
    """

    sink: Sink
    exceptions: bool = False

    def __post_init__(self) -> None:
        check_is_sink(self.sink)
        check_switches("DeadLetter: ", exceptions=self.exceptions)


BadRecords: TypeAlias = Fail | DeadLetter


def _mode(text: str) -> Guarantee:
    """Return the mode of that name; words may be joined by hyphens, too."""
    if text == "unaligned":  # refused before there can be a loop, so the sentence covers both
        raise UsageError(
            "unaligned checkpoints are no mode: give Checkpointing(alignment_timeout='1s'), with which a checkpoint "
            "goes over to them under back-pressure"
        )
    try:
        return Guarantee(text.replace("-", "_") if isinstance(text, str) else text)
    except ValueError:
        raise UsageError(f"checkpointing mode must be one of {_MODES}, not {text!r}") from None


def _attempts(value: int | None) -> int | None:
    return None if value is None else _count(value, 0, "restart attempts")


def _count(value: int, least: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} must be an integer of at least {least}, but is {value!r}")
    return value


def _positive(value_ms: int, what: str) -> int:
    if value_ms <= 0:
        raise UsageError(f"{what} must be longer than zero")
    return value_ms


def byte_count(value: int, what: str) -> int:
    """Return ``value``, which counts bytes.

    Raises:
        UsageError
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{what} must be a number of bytes, 0 or more, but is {value!r}")
    return value


def whole(value: int, most: int, what: str) -> int:
    """Return ``value``, which counts from 1 to ``most``.

    Raises:
        UsageError
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{what} must be an integer between 1 and {most}, but is {value!r}")
    return value


def instance(value: Any, kinds: Any, what: str) -> Any:
    """Return ``value``, which is of one of ``kinds``.

    Raises:
        UsageError
    """
    if not isinstance(value, kinds):
        names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        raise UsageError(f"{what}= must be {' or '.join(f'headgate.{name}(...)' for name in names)}, not {value!r}")
    return value


def checked_restart(strategy: Restart) -> RestartStrategy:
    """Return ``strategy`` as plain data.

    Raises:
        UsageError
    """
    found: Restart = instance(strategy, (NoRestart, FixedDelay, ExponentialDelay, FailureRate), "restart")
    return found.to_config()


AUTO = "auto"


def checked_runtime(loop_memory_bytes: int, loop_disk_bytes_max: int, max_drift: Duration | None) -> RuntimeConfig:
    """Return what the loops of a worker may take, and how far splits of sources may drift apart.

    Raises:
        UsageError
    """
    return RuntimeConfig(
        loop_memory_bytes=byte_count(loop_memory_bytes, "loop_memory_bytes"),
        loop_disk_bytes_max=byte_count(loop_disk_bytes_max, "loop_disk_bytes_max"),
        aligns_sources=max_drift is not None,
        max_drift_ms=None if max_drift is None or max_drift == AUTO else duration_ms(max_drift, "max_drift"),
    )


def checked_bad_records(policy: BadRecords) -> BadRecords:
    """Return ``policy`` if its sink can take bad records.

    Raises:
        UsageError
    """
    instance(policy, (Fail, DeadLetter), "bad_records")
    if isinstance(policy, DeadLetter):
        instance(policy.exceptions, bool, "exceptions of bad_records")
        try:
            policy.sink.check(canonical_schema(user_functions.BAD_RECORD_SCHEMA))
        except UsageError as error:
            raise UsageError(f"bad_records: {error.message}") from None
    return policy


def checked_damage_policy(policy: str) -> DamagedCheckpoint:
    """Return what ``policy`` says.

    Raises:
        UsageError
    """
    try:
        return DamagedCheckpoint(policy)
    except ValueError:
        raise UsageError(f"on_damaged_checkpoint must be 'previous' or 'fail', not {policy!r}") from None


def checked_denial_policy(policy: str) -> DeniedOutput:
    """Return what ``policy`` says.

    Raises:
        UsageError
    """
    try:
        return DeniedOutput(policy)
    except ValueError:
        raise UsageError(f"on_denied_output must be 'fail' or 'lose', not {policy!r}") from None


MEMORY_MIN = 16 << 20
"""With less, RocksDB would only write and read its own files."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Keeps keyed state in the memory of the workers. The default, and the fastest as long as the state fits."""

    def to_config(self) -> model.StateConfig:
        """Return it as plain data."""
        return model.MemoryState()


@dataclass(frozen=True, slots=True)
class RocksDB:
    """Keeps keyed state in RocksDB on the workers' local disks, and recently used state in memory.

    Needs the package rocksdict: ``pip install 'headgate-streams[rocksdb]'``.

    Attributes:
        memory: how much memory the state of one worker may use, in all operators together.
        dir: a directory on a local disk of each worker's machine, as an absolute path. The default is the directory of
            Spark's own temporary files. Only this user can read its content, and none of it has to be kept.
    """

    memory: str | int = "512MB"
    dir: str | None = None

    def to_config(self) -> model.StateConfig:
        """Return it in bytes.

        Raises:
            UsageError: a value is wrong, or the package is not installed.
        """
        from headgate.state.worker_backends import require_rocksdict

        require_rocksdict()
        memory_bytes = size_bytes(self.memory, "memory of RocksDB")
        if memory_bytes < MEMORY_MIN:
            raise UsageError(f"memory of RocksDB must be at least '16MB', but is {self.memory!r}")
        if self.dir is not None and not (isinstance(self.dir, str) and os.path.isabs(self.dir)):
            raise UsageError(
                f"dir of RocksDB must be the absolute path of a directory on each worker's machine, not {self.dir!r}"
            )
        return model.RocksState(memory_bytes, None if self.dir is None else absolute_location(self.dir))


StateChoice: TypeAlias = Memory | RocksDB


def state_config(state: StateChoice) -> model.StateConfig:
    """Return a state choice as plain data.

    Raises:
        UsageError: it is none, a value is wrong, or a package is not installed.
    """
    found: StateChoice = instance(state, (Memory, RocksDB), "state")
    return found.to_config()


def operator_state(state: StateChoice | None) -> model.StateConfig | None:
    """Return the state choice of one operator as plain data; None: that of the pipeline.

    Raises:
        UsageError: see ``state_config``.
    """
    return None if state is None else state_config(state)


PathText = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Security:
    """Permissions of a pipeline's files, and encryption of its connections.

    Attributes:
        access: the readers of a checkpoint directory that the pipeline creates. "owner": only the user that runs the
            pipeline. "group": also the directory's group, for drivers and executors that run as different users. For an
            existing directory, its permissions decide: it is shared if its group may write to it and its setgid bit is
            set.
        tls: which connections are encrypted. None (default): all that do not go to a loopback address; True: all;
            False: none. Every connection is authenticated, encrypted or not.
        certificate_file, key_file, ca_file: the certificate of every process, its key, and the authority that signed
            it, as PEM files under the same path on every machine. By default each process makes its own certificate,
            and the job's secret proves that it is the right one.
    """

    access: str = Access.OWNER.value
    tls: bool | None = None
    certificate_file: PathText | None = None
    key_file: PathText | None = None
    ca_file: PathText | None = None

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> SecurityConfig:
        """Return it as plain data.

        Raises:
            UsageError: a value is wrong.
        """
        access = checked_access(self.access, "security access", Access.OWNER, Access.GROUP)
        if self.tls is not None and not isinstance(self.tls, bool):
            raise UsageError(f"security tls must be True, False or None (all but loopback), not {self.tls!r}")
        files = [self.certificate_file, self.key_file, self.ca_file]
        given = [file for file in files if file is not None]
        if given and len(given) < len(files):
            raise UsageError("security certificate_file, key_file and ca_file belong together: give all three or none")
        if given and self.tls is False:
            raise UsageError("security certificate_file has no use with tls=False; leave one of them out")
        certificate, key, ca = ("" if file is None else os.path.abspath(file) for file in files)
        return SecurityConfig(access, self.tls, certificate, key, ca)
