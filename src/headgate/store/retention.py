"""How long events stay: the policy of a stream, and its form in the catalogue.

Counterpart: ``catalogue.heads`` finds the cut, ``protocol.store.truncation`` limits it. Source: Pravega's retention
policies (S71 of docs/spec/stream-store.md).
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

from headgate.codec.malformed import MALFORMED
from headgate.errors import CorruptionError, UsageError
from headgate.model.config import Duration, duration_ms, size_bytes


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What may be truncated by itself; checked, see ``Retention``. At least one of both is given.

    Attributes:
        age_ms: events that became visible longer ago.
        size_bytes: the oldest ones, as long as those behind them have so many bytes.
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


def policy_of(retention: object) -> RetentionPolicy | None:
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
        return RetentionPolicy(_number(found["age_ms"]), _number(found["size_bytes"]))
    except (*MALFORMED, TypeError, KeyError) as error:
        raise CorruptionError(where, 0, "a retention policy", text) from error


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(value)
