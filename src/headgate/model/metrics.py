"""Measurements: each is a name, labels that say of what, and a value.

Workers report them (``runtime.worker.metrics``), the driver adds them up (``runtime.driver.progress``). A counter
is a total since the generation began; a gauge is how it was when the report was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of name and value, by name."""

BAD_RECORDS = "bad_records"
BUSY = "busy"
"""Share of the time since the report before in which the worker did not sleep, 0 to 1."""
BUSY_MS = "busy_ms"
"""Time that the worker's thread spent in the operator itself."""
BYTES_IN = "bytes_in"
BYTES_OUT = "bytes_out"
CLOCK_S = "clock_s"
"""The worker's own monotonic clock, so that two reports give rates."""
EDGE = "edge"
"""Label: the edge between two chains that was measured, its index in ``Plan.edges``."""
FILL = "fill"
"""Of an edge: the share of the credit that waits at the receiver, of the fullest channel, 0 to 1."""
HELD_BACK_MS = "held_back_ms"
"""Backpressure: time in which the operator had input, and those downstream had no room for its output."""
IDLE_MS = "idle_ms"
"""The rest of the time: it waited for records, or for its turn in the thread of its worker."""
LATE_RECORDS = "late"
"""Records that came after their window had closed; counted by the operators that drop them."""
NODE = "node"
"""Label: the operator that was measured."""
QUEUED_BATCHES = "queued_batches"
QUEUED_BYTES = "queued_bytes"
RECORDS = "records"
"""Of an edge: what its sender has sent."""
RECORDS_IN = "records_in"
RECORDS_OUT = "records_out"
WATERMARK_MS = "watermark_ms"

OF_EVERY_NODE = frozenset(
    {
        BAD_RECORDS,
        BUSY_MS,
        HELD_BACK_MS,
        IDLE_MS,
        QUEUED_BATCHES,
        QUEUED_BYTES,
        RECORDS_IN,
        RECORDS_OUT,
        WATERMARK_MS,
    }
)
"""What the runtime measures of each operator; all else with the label ``NODE`` the operator counts itself."""


class Sample(NamedTuple):
    """One measurement."""

    name: str
    labels: Labels
    value: int | float

    def label(self, name: str) -> str | None:
        """Return the value of label ``name``, or None."""
        return dict(self.labels).get(name)


class Samples:
    """The measurements of one report, found by name and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._values = {(sample.name, sample.labels): sample for sample in samples}

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._values.values())

    def value(self, name: str, **labels: str) -> int | float | None:
        """Return what was measured of ``labels``, or None."""
        found = self._values.get((name, tuple(sorted(labels.items()))))
        return None if found is None else found.value

    def of(self, label: str, value: str) -> dict[str, int | float]:
        """Return everything that was measured of ``label`` = ``value``, by name."""
        return {sample.name: sample.value for sample in self if (label, value) in sample.labels}
