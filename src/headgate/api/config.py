"""What a user configures about a pipeline, with durations as text; translated into ``headgate.model.config``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from headgate.connectors.base import Sink
from headgate.errors import UsageError
from headgate.model import config as model
from headgate.model.config import CheckpointConfig, Duration, duration_ms
from headgate.model.options import Guarantee
from headgate.storage.backends import absolute_location

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
        interval_ms = 0 if self.interval is None else duration_ms(self.interval, "checkpointing interval")
        if mode is Guarantee.AT_MOST_ONCE and not interval_ms:  # GM33
            raise UsageError(
                "mode='at_most_once' processes what was read when a checkpoint has recorded that, so it needs an "
                "interval; give Checkpointing(interval='1s', mode='at_most_once')"
            )
        min_pause_ms = duration_ms(self.min_pause, "checkpointing min_pause")
        max_concurrent = _count(self.max_concurrent, 1, "checkpointing max_concurrent")
        if min_pause_ms and max_concurrent > 1:  # C4
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
            retain_on_cancel=_fact(self.retain_on_cancel, "checkpointing retain_on_cancel"),
            retain_on_failure=_fact(self.retain_on_failure, "checkpointing retain_on_failure"),
        )

    def _alignment_timeout_ms(self, mode: Guarantee) -> int | None:  # UA1
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

    def to_config(self) -> model.RestartStrategy:
        """Return it in milliseconds.

        Raises:
            UsageError: a value is out of range.
        """
        if self.multiplier < 1:
            raise UsageError(f"restart multiplier must be at least 1, but is {self.multiplier}")
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
        exceptions: a record for which the Python function of a ``map``, ``flat_map`` or ``filter`` raises is a bad
            record, too; its ``problem`` has the traceback. Without it, and in all other functions, an exception fails
            the pipeline.
    """

    sink: Sink
    exceptions: bool = False


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


def _fact(value: bool, what: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} must be True or False, not {value!r}")
    return value


def _count(value: int, least: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} must be an integer of at least {least}, but is {value!r}")
    return value


def _positive(value_ms: int, what: str) -> int:
    if value_ms <= 0:
        raise UsageError(f"{what} must be longer than zero")
    return value_ms
