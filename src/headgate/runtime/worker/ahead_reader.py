"""Reads a source ahead of what is processed, for pipelines that count every record at most once.

What was read waits in memory until a checkpoint has recorded a position behind it. Decisions are those of
``protocol.subtasks.read_ahead``; rules GM30–GM37 of docs/spec/guarantees.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headgate.connectors.base import SourceBatch
from headgate.connectors.induced import AnyReader, CheckpointMarker, Polled
from headgate.model.ids import CheckpointId
from headgate.protocol.subtasks.read_ahead import ReadAhead

HELD_BYTES_MAX = 64 << 20
"""What one subtask holds; reading waits beyond it (GM36)."""

WAIT_MS = 1_000
"""Where nothing can be read, a completed checkpoint wakes the mailbox earlier."""


def is_progress(polled: Polled) -> bool:
    """Whether reading has come forward: a batch without records is none, unless its split has ended with it."""
    if not isinstance(polled, SourceBatch):
        return polled is not None
    return polled.is_split_finished or polled.batch.num_rows > 0 or polled.bad is not None


@dataclass(frozen=True, slots=True)
class _Held:
    """A batch, its size, and where reading would have begun to read it again."""

    batch: SourceBatch
    size_bytes: int
    positions: dict[str, bytes]


class AheadReader:
    """A ``SourceReader`` that hands over what a completed checkpoint covers."""

    def __init__(self, inner: AnyReader) -> None:
        self._inner = inner
        self._gate = ReadAhead()
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._is_ended = False
        self.read_count = 0
        """Batches and markers that were read, whether or not they were handed over."""

    # -- what a source cannot know ------------------------------------------------------------------------------

    def cut(self, checkpoint: CheckpointId, *, is_last: bool) -> dict[str, bytes]:
        """Return the positions of a snapshot that is taken now (GM31, GM32)."""
        is_ahead = self._gate.cut(checkpoint, is_last=is_last)
        return self._inner.positions() if is_ahead else self.unprocessed_from

    @property
    def unprocessed_from(self) -> dict[str, bytes]:
        """Positions in front of everything that is held (SV9)."""
        return self._held[0].positions if self._held else self._inner.positions()

    def completed(self, checkpoint: CheckpointId) -> None:
        """What ``checkpoint`` covers may be processed."""
        self._gate.completed(checkpoint)

    def end(self) -> None:
        """Read nothing more; what is held is still to be processed (GM37)."""
        self._is_ended = True

    # -- what a source does ---------------------------------------------------------------------------------------

    def splits(self) -> Sequence[str]:
        """Return those that something may still be handed over of."""
        return tuple(dict.fromkeys((*self._inner.splits(), *(held.batch.split for held in self._held))))

    def poll(self) -> Polled:
        """Read on, if there is room, and hand the next batch over, if it may be processed.

        A marker is told when it is read: the positions of its snapshot are those of reading (GM31, EI30).
        """
        marker = self._read_on()
        if marker is not None:
            return marker
        if not self._gate.may_take:
            return None
        self._gate.take()
        held = self._held.popleft()
        self._held_bytes -= held.size_bytes
        return held.batch

    def _read_on(self) -> CheckpointMarker | None:
        if self._is_ended or self.is_full:
            return None
        positions = self._inner.positions()
        batch: Polled = self._inner.poll()
        self.read_count += is_progress(batch)
        if isinstance(batch, CheckpointMarker):
            return batch
        if batch is not None:
            size_bytes = batch.batch.nbytes + (0 if batch.bad is None else batch.bad.nbytes)
            self._held.append(_Held(batch, size_bytes, positions))
            self._held_bytes += size_bytes
            self._gate.read()
        return None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more is read."""
        return self._is_ended

    @property
    def is_full(self) -> bool:
        """Whether reading waits until something of what is held may be processed (GM36)."""
        return self._held_bytes >= HELD_BYTES_MAX

    def is_finished(self) -> bool:
        """Whether everything that is read has been handed over, and nothing follows."""
        return not self._held and (self._is_ended or self._inner.is_finished())

    def positions(self) -> dict[str, bytes]:
        """Return where reading goes on. Snapshots ask ``cut``."""
        return self._inner.positions()

    def wakeup_ms(self) -> int:
        """See ``SourceReader``."""
        if self._gate.may_take:
            return 0
        reads_on = not (self.is_full or self._is_ended or self._inner.is_finished())
        return self._inner.wakeup_ms() if reads_on else WAIT_MS

    def close(self) -> None:
        """Drop what is held."""
        self._held.clear()
        self._inner.close()
