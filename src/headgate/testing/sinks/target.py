"""What a test says about the target of a sink: how to read it, and what can happen to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from headgate.connectors.base import Sink

SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("text", pa.large_string())])
"""Records that the kit writes: ``number`` counts from 0, ``text`` is its decimal form."""

PIPELINE = "kit"
NODE = "sink"


HasFailed: TypeAlias = Callable[[], bool]


def not_said(name: str) -> str:
    """Return why a step is left out that needs ``Target(name=…)`` (KT3)."""
    return f"Target({name}=...) is not given"


@dataclass(frozen=True, slots=True)
class Target:
    """A fresh, empty target of a sink, for ``check_sink``.

    Attributes:
        sink: the sink that writes to the target.
        read: returns the committed records as dicts, as an independent reader sees them.
        leftovers: returns the names of all prepared or open transactions, temporary files and connections.
        lose_prepared: makes the target forget or abort prepared transactions. None if it cannot.
        take: plays a consumer that removes all visible records. None if the target has no such consumers.
        advance_clock: advances the target's clock by this many milliseconds, so that the target ends transactions that
            have waited for longer than the sink's ``transaction_timeout``. None if the target uses no clock.
        failing: a context manager in which call number n at the target fails once with a transient error, before the
            call takes effect (False) or after it (True). It yields whether the call happened. Sinks that derive from
            ``TwoPhaseSink`` or ``LedgerSink`` do not need it.
        is_ordered: whether ``read`` returns records in the order in which they became visible.
    """

    sink: Sink
    read: Callable[[], Sequence[dict[str, Any]]]
    leftovers: Callable[[], Sequence[str]] = tuple
    lose_prepared: Callable[[], None] | None = None
    take: Callable[[], None] | None = None
    advance_clock: Callable[[int], None] | None = None
    failing: Callable[[int, bool], AbstractContextManager[HasFailed]] | None = None
    is_ordered: bool = False
