"""What stands in front of a broadcast side: it has its records come to every subtask in one order (BC2, BC3, BC8).

All records go through its first subtask, which sends them on to everybody. Without that each subtask would see those
of several senders in an order of its own. Keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.operators.base import WATERMARK_MAX_MS, Operator
from headgate.operators.unreadable import divert_unreadable
from headgate.protocol.watermarks import Origin


@dataclass(frozen=True)
class OrderingSpec:
    """Pass records on.

    Attributes:
        is_timed: they have event times; else they never hold those of the other side back.
        by_row: they are for a Python function, which cannot be given every time (OP4).
    """

    is_timed: bool
    by_row: bool

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return OrderingOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``."""
        return schema


class OrderingOperator(Operator):
    """Passes records on; event time only if they have some."""

    def __init__(self, spec: OrderingSpec) -> None:
        self._spec = spec

    def on_splits(self, origins: Sequence[Origin]) -> None:
        """See ``Operator``. Whoever has no event times says at once that nobody need wait for them (BC8)."""
        if not self._spec.is_timed:
            self.output.emit_idle(True)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``. A record that no function could be given is a bad one here, once, and not everywhere."""
        self.output.emit(divert_unreadable(self, batch) if self._spec.by_row else batch)

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``Operator``."""
        if self._spec.is_timed or watermark_ms == WATERMARK_MAX_MS:
            self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """See ``Operator``."""
        if self._spec.is_timed:
            self.output.emit_idle(is_idle)
