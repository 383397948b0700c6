"""Readers that say themselves where the barrier of a checkpoint is (docs/spec/induced.md, EI20–EI33).

Source: Flink's ``ExternallyInducedSourceReader``; rule C47. Counterpart: ``protocol.subtasks.induced`` decides when all
splits of a subtask have met their marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from headgate.connectors.base import SourceBatch, SourceContext, SourceReader


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """What ``poll`` returns in place of records: reading ``split`` has come to the marker of a checkpoint.

    The position of the split is behind the marker, and the split is not read on before ``read_on`` names it.
    """

    split: str
    checkpoint_id: int


Polled: TypeAlias = SourceBatch | CheckpointMarker | None
"""What ``poll`` returns."""


@runtime_checkable
class InducedReader(Protocol):
    """A reader that sets the barriers of its subtask. Triggers of the coordinator do not (C47).

    Each split that is not finished meets the marker of each checkpoint, in the order of their ids. A marker that comes
    twice, or of a checkpoint that was given up, does no harm. A checkpoint whose marker is not met expires. Everything
    else is as ``SourceReader`` says.
    """

    def splits(self) -> Sequence[str]:
        """See ``SourceReader``."""

    def poll(self) -> Polled:
        """Return the next records, or the marker that is next in a split, or None. See ``SourceReader``."""

    def read_on(self, splits: Sequence[str]) -> None:
        """Read these splits on, which stand still since their markers."""

    def is_finished(self) -> bool:
        """See ``SourceReader``."""

    def positions(self) -> dict[str, bytes]:
        """See ``SourceReader``."""

    def wakeup_ms(self) -> int:
        """See ``SourceReader``."""

    def close(self) -> None:
        """See ``SourceReader``."""


AnyReader: TypeAlias = SourceReader | InducedReader


class InducedSource(Protocol):
    """Configuration of a source whose readers set their own barriers; see ``connectors.base.Source``."""

    def schema(self) -> pa.Schema:
        """See ``Source``."""

    def identity(self) -> str:
        """See ``Source``."""

    def open(self, context: SourceContext) -> InducedReader:
        """See ``Source``."""
