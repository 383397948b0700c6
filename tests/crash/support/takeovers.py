"""How long a pipeline had no driver, again and again, and whether that is what docs/spec/standby.md promises.

``make test`` tells the figures and judges nothing by the clock. ``make kill-drivers`` judges: each takeover by a
standby that was waiting may take ``PATIENCE`` times as long as promised, because the processes that die and start share
the machine with each other. Faults come so quickly here that now and then nobody stands by yet: the pipeline then runs
again when one of the two has started anew. That is told, and promised nowhere.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PROMISED_MS = 10_000
"""From the death of a driver until the pipeline runs under another one."""

PATIENCE = float(os.environ.get("HEADGATE_TEST_PATIENCE", "0"))
"""0: nobody judges."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """How long nobody ran the pipeline, up to the first completed checkpoint, and whether a standby was waiting."""

    took_ms: int
    was_awaited: bool


def told(takeovers: Sequence[Takeover]) -> str:
    """Return the figures in a line."""
    awaited = [one.took_ms for one in takeovers if one.was_awaited]
    others = [one.took_ms for one in takeovers if not one.was_awaited]
    return (
        f"takeovers by a standby that was waiting: {_figures(awaited)} (promised: {PROMISED_MS / 1000:.0f} s); "
        f"while no standby was waiting: {_figures(others)}"
    )


def problem(takeovers: Sequence[Takeover], patience: float = PATIENCE) -> str | None:
    """Return what is wrong with the figures, None if nothing is or nobody judges."""
    if not patience:
        return None
    allowed_ms = PROMISED_MS * patience
    awaited = [one.took_ms for one in takeovers if one.was_awaited]
    if not awaited or max(awaited) > allowed_ms:
        return f"{told(takeovers)}; allowed here: {allowed_ms / 1000:.0f} s each"
    return None


def _figures(took_ms: Sequence[int]) -> str:
    if not took_ms:
        return "none"
    return f"{len(took_ms)}, median {statistics.median(took_ms) / 1000:.1f} s, longest {max(took_ms) / 1000:.1f} s"
