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
    """One fresh, empty target.

    Attributes:
        sink: writes to it.
        read: returns the committed records as dicts, as a foreign reader sees them.
        leftovers: returns the names of prepared or open things, temporary files and connections that are there.
        lose_prepared: makes the target forget or abort what is prepared; None when it cannot.
        take: a consumer takes away all that is visible; None where there is no such consumer.
        advance_clock: moves the target's clock so many milliseconds on, so that it ends what has waited for longer than
            the sink's ``transaction_timeout``; None where the target looks at no clock.
        failing: while it is entered, call number n at the target fails once with an error that passes, before it has
            an effect (False) or behind it (True); what it yields says whether it came to that. Sinks derived from
            ``TwoPhaseSink`` and ``LedgerSink`` need none.
        is_ordered: ``read`` returns records in the order in which they became visible.
    """

    sink: Sink
    read: Callable[[], Sequence[dict[str, Any]]]
    leftovers: Callable[[], Sequence[str]] = tuple
    lose_prepared: Callable[[], None] | None = None
    take: Callable[[], None] | None = None
    advance_clock: Callable[[int], None] | None = None
    failing: Callable[[int, bool], AbstractContextManager[HasFailed]] | None = None
    is_ordered: bool = False
