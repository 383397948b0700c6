"""Whether the options of a pipeline are of the right kind and within their limits.

Counterpart: ``headgate.api.pipeline``. What options mean together for a graph, ``headgate.api.guarantees`` checks.
"""

from __future__ import annotations

from typing import Any

from headgate.api.config import (
    BadRecords,
    DeadLetter,
    ExponentialDelay,
    Fail,
    FailureRate,
    FixedDelay,
    NoRestart,
    Restart,
)
from headgate.errors import UsageError
from headgate.model.config import DamagedCheckpoint, DeniedOutput, RestartStrategy, RuntimeConfig
from headgate.operators import bad_records
from headgate.operators.types import canonical_schema


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


def checked_runtime(loop_memory_bytes: int, loop_disk_bytes_max: int) -> RuntimeConfig:
    """Return what the loops of a worker may take.

    Raises:
        UsageError
    """
    return RuntimeConfig(
        loop_memory_bytes=byte_count(loop_memory_bytes, "loop_memory_bytes"),
        loop_disk_bytes_max=byte_count(loop_disk_bytes_max, "loop_disk_bytes_max"),
    )


def checked_bad_records(policy: BadRecords) -> BadRecords:
    """Return ``policy``, whose sink can take bad records.

    Raises:
        UsageError
    """
    instance(policy, (Fail, DeadLetter), "bad_records")
    if isinstance(policy, DeadLetter):
        instance(policy.exceptions, bool, "exceptions of bad_records")
        try:
            policy.sink.check(canonical_schema(bad_records.SCHEMA))
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
