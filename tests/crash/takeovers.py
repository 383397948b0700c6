"""How long a pipeline had no driver, again and again, and whether that is what docs/spec/standby.md promises.

``make test`` tells the figures and judges nothing by the clock. ``make kill-drivers`` judges: each takeover may take
``PATIENCE`` times as long as promised, because the processes that die and start share the machine with each other.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

PROMISED_MS = 10_000
"""From the death of a driver until the pipeline runs under another one."""

PATIENCE = float(os.environ.get("HEADGATE_TEST_PATIENCE", "0"))
"""0: nobody judges."""


def told(takeovers_ms: Sequence[int]) -> str:
    """Return the figures in a line."""
    if not takeovers_ms:
        return "no takeovers"
    median_ms, most_ms = statistics.median(takeovers_ms), max(takeovers_ms)
    return (
        f"{len(takeovers_ms)} takeovers, each to its first completed checkpoint: median {median_ms / 1000:.1f} s, "
        f"longest {most_ms / 1000:.1f} s (promised: {PROMISED_MS / 1000:.0f} s)"
    )


def problem(takeovers_ms: Sequence[int], patience: float = PATIENCE) -> str | None:
    """Return what is wrong with the figures, None if nothing is or nobody judges."""
    if not patience:
        return None
    allowed_ms = PROMISED_MS * patience
    if not takeovers_ms or max(takeovers_ms) > allowed_ms:
        return f"{told(takeovers_ms)}; allowed here: {allowed_ms / 1000:.0f} s each"
    return None
