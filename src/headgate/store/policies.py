"""Policies of a stream: how long its events stay, and how many segments it gets by itself.

Counterparts: ``protocol.store.truncation`` and ``protocol.store.layouts``, which decide by them. Source: Pravega's
retention and scaling policies (S71 and S79 of docs/spec/stream-store.md).
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

from headgate.codec.json_files import MALFORMED
from headgate.errors import CorruptionError, UsageError
from headgate.model.config import Duration, duration_ms, size_bytes
from headgate.protocol.store.layouts import SEGMENTS_MAX, ScalingPolicy, Unit


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Retention policy of a stream, checked; see ``Retention``. At least one of both is given.

    Attributes:
        age_ms: events that became visible longer ago.
        size_bytes: the oldest events, as long as those after them have so many bytes.
    """

    age_ms: int | None = None
    size_bytes: int | None = None

    def __str__(self) -> str:
        parts = [] if self.age_ms is None else [str(dt.timedelta(milliseconds=self.age_ms))]
        parts += [] if self.size_bytes is None else [f"{self.size_bytes:,} bytes"]
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the events of a stream stay.

    Events that are older than ``age`` are removed. While the stream is larger than ``size``, its oldest events are
    removed. Events that a pipeline or another holder holds (``Store.hold``) are never removed.

    Attributes:
        age: a duration such as ``"7 days"``. None: no limit.
        size: a stored size such as ``"10GB"``. None: no limit.
    """

    age: Duration | None = None
    size: str | int | None = None

    def checked(self) -> RetentionPolicy:
        """Return it in milliseconds and bytes.

        Raises:
            UsageError: neither is given, or one is not a duration or not a size.
        """
        if self.age is None and self.size is None:
            raise UsageError("Retention needs age=, size= or both, such as Retention(age='7 days', size='10GB')")
        age_ms = None if self.age is None else duration_ms(self.age, "Retention(age=)")
        most = None if self.size is None else size_bytes(self.size, "Retention(size=)")
        if age_ms == 0 or most == 0:
            raise UsageError("Retention(age=) and Retention(size=) must be more than 0")
        return RetentionPolicy(age_ms, most)


def retention_policy_of(retention: object) -> RetentionPolicy | None:
    """Return what a user gave as ``retention=``, checked; None: nothing goes by itself.

    Raises:
        UsageError: it is no ``Retention``, or one that cannot be.
    """
    if retention is None:
        return None
    if not isinstance(retention, Retention):
        raise UsageError(f"retention must be a Retention, such as Retention(age='7 days'), not {retention!r}")
    return retention.checked()


def recorded_retention(age_ms: int | None, size_bytes: int | None) -> Retention | None:
    """Return what a user would give for a policy that has been written down; with neither, none."""
    if age_ms is None and size_bytes is None:
        return None
    return Retention(None if age_ms is None else f"{age_ms}ms", size_bytes)


def encode_retention(policy: RetentionPolicy | None) -> str | None:
    """Return the policy as the catalogue has it."""
    return None if policy is None else json.dumps({"age_ms": policy.age_ms, "size_bytes": policy.size_bytes})


def decode_retention(where: str, text: str | None) -> RetentionPolicy | None:
    """Return the policy that ``encode_retention`` made ``text`` of.

    Raises:
        CorruptionError: it is none.
    """
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
        return RetentionPolicy(_positive_or_none(found["age_ms"]), _positive_or_none(found["size_bytes"]))
    except (*MALFORMED, TypeError, KeyError) as error:
        raise CorruptionError(where, 0, "a retention policy", text) from error


def _positive_or_none(value: object) -> int | None:
    if value is None or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(value)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Adjusts the number of segments of a stream automatically to the rate at which it is written.

    Give one of the two targets. A segment is split if its rate is far above the target, or above it for ten minutes.
    Neighbouring segments are merged if their rates together are below half of the target for twenty minutes.

    Attributes:
        events_per_second: the target rate of one segment, in events per second.
        bytes_per_second: the target rate of one segment in stored bytes, such as ``"1MB"``.
        min_segments, max_segments: the smallest and the largest number of segments.
        cool_down: the minimum time between two steps; steps by hand count, too.
    """

    events_per_second: int | None = None
    bytes_per_second: str | int | None = None
    min_segments: int = 1
    max_segments: int = 64
    cool_down: Duration = "10 minutes"

    def checked(self) -> ScalingPolicy:
        """Return it in numbers.

        Raises:
            UsageError: it has no target, two targets or an invalid one, or its bounds are impossible.
        """
        events, data = self.events_per_second, self.bytes_per_second
        if (events is None) == (data is None):
            raise UsageError("Scaling needs events_per_second= or bytes_per_second=, one of both")
        if data is not None:
            unit, target = Unit.BYTES, size_bytes(data, "Scaling(bytes_per_second=)")
        else:
            unit, target = Unit.EVENTS, events if isinstance(events, int) else 0
        if target < 1:
            raise UsageError(f"Scaling({unit}_per_second=) must be a whole number of at least 1")
        if not 1 <= self.min_segments <= self.max_segments <= SEGMENTS_MAX:
            raise UsageError(
                f"Scaling(min_segments={self.min_segments}, max_segments={self.max_segments}) cannot be: a stream has "
                f"1 to {SEGMENTS_MAX} segments, and the first number is not above the second"
            )
        cool_down_ms = duration_ms(self.cool_down, "Scaling(cool_down=)")
        return ScalingPolicy(unit, target, self.min_segments, self.max_segments, cool_down_ms)


def scaling_policy_of(scaling: object) -> ScalingPolicy | None:
    """Return what a user gave as ``scaling=``, checked; None: the stream is scaled by hand only.

    Raises:
        UsageError: it is no ``Scaling``, or one that cannot be.
    """
    if scaling is None:
        return None
    if not isinstance(scaling, Scaling):
        raise UsageError(f"scaling must be a Scaling, such as Scaling(events_per_second=1_000), not {scaling!r}")
    return scaling.checked()


def encode_scaling(policy: ScalingPolicy | None) -> str | None:
    """Return the policy as the catalogue has it."""
    if policy is None:
        return None
    numbers = [policy.target, policy.segments_min, policy.segments_max, policy.cool_down_ms]
    return json.dumps({"unit": policy.unit.value, "numbers": numbers})


def decode_scaling(where: str, text: str | None) -> ScalingPolicy | None:
    """Return the policy that ``encode_scaling`` made ``text`` of.

    Raises:
        CorruptionError: it is none.
    """
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
        target, least, most, cool_down_ms = (int(number) for number in found["numbers"])
        if target < 1 or not 1 <= least <= most:
            raise ValueError(text)
        return ScalingPolicy(Unit(found["unit"]), target, least, most, cool_down_ms)
    except (*MALFORMED, TypeError, KeyError) as error:
        raise CorruptionError(where, 0, "a scaling policy", text) from error
