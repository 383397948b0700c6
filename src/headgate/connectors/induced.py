"""Readers that say themselves where the barrier of a checkpoint is (docs/spec/induced.md, EI20–EI33).

Source: Flink's ``ExternallyInducedSourceReader``; rule C47. Counterpart: ``protocol.subtasks.induced`` decides when all
splits of a subtask have met their marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from headgate.connectors.base import SourceBatch, SourceReader


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """What ``poll`` returns in place of records: reading ``split`` has come to the marker of a checkpoint.

    The position of the split is behind the marker, and the split is not read on before ``read_on`` names it.
    """

    split: str
    checkpoint_id: int


Polled: TypeAlias = "SourceBatch | CheckpointMarker | None"
"""What ``poll`` returns."""


@runtime_checkable
class InducedReader(SourceReader, Protocol):
    """A ``SourceReader`` that sets the barriers of its subtask. Triggers of the coordinator do not (C47).

    Each split that is not finished meets the marker of each checkpoint, in the order of their ids. A marker that comes
    twice, or of a checkpoint that was given up, does no harm. A checkpoint whose marker is not met expires.
    """

    def read_on(self, splits: Sequence[str]) -> None:
        """Read these splits on, which stand still since their markers."""
