"""The source at the head of a chain: its reader, and what that one must not do.

Counterparts: ``runtime.worker.source_reading``, which polls it, ``protocol.subtasks.induced``, which decides when one
that sets its own barrier is cut. Never decides anything about checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from headgate.connectors.base import SourceBatch
from headgate.connectors.induced import AnyReader, CheckpointMarker, InducedReader, Polled
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.model.options import Guarantee
from headgate.protocol.subtasks.events import SplitsSeen
from headgate.runtime.worker.ahead_reader import AheadReader, is_progress

REPORTS_PER_TIMEOUT = 4
"""How often a source says that it reads towards a marker: one report that is late must not look like a standstill."""


@dataclass(slots=True)
class MarkerReports:
    """When a source that sets its own barrier says that it comes forward (EI34).

    Nothing is told of a marker that is met soon.
    """

    period_ms: int
    _since: tuple[int, int] | None = None
    """When it was last looked, and how much had been read then."""
    _told: tuple[CheckpointId, ...] = ()

    def due(self, awaited: tuple[CheckpointId, ...], read_count: int, now_ms: int) -> tuple[CheckpointId, ...] | None:
        """Return for which checkpoints to say that it is not cut yet; None: nothing is to be told now.

        Args:
            awaited: those that it has not been cut for.
            read_count: how much it has read.
            now_ms: the time.
        """
        if any(checkpoint not in awaited for checkpoint in self._told):  # a cut begins the timeout (EI35): at once
            self._told = tuple(checkpoint for checkpoint in self._told if checkpoint in awaited)
            return self._told
        if not awaited:
            self._since = None
        elif self._since is None:
            self._since = now_ms, read_count
        elif now_ms - self._since[0] >= self.period_ms and read_count > self._since[1]:
            self._since, self._told = (now_ms, read_count), awaited
            return awaited
        return None


@dataclass(slots=True)
class Source:
    """What is read in one subtask."""

    reader: AnyReader | AheadReader
    ahead: AheadReader | None = None
    """``reader``, if it reads ahead of what is processed (GM30)."""
    splits: tuple[str, ...] | None = None
    """What the chain was told that it owns; None: nothing yet."""
    finished_splits: set[str] = field(default_factory=set)
    is_over: bool = False
    """Whether it is not read any more, even if there is more to read (E7, E9)."""
    markers: InducedReader | None = None
    """What reads, if it sets the barriers of this subtask (EI20)."""
    seen: SplitsSeen = field(default_factory=lambda: SplitsSeen(()))
    """What the machine knows of its splits, if it does."""
    _polled_count: int = 0

    @staticmethod
    def of(reader: AnyReader | None, mode: Guarantee, *, is_over: bool) -> Source | None:
        """Return the source that ``reader`` reads, if there is one."""
        if reader is None:
            return None
        ahead = AheadReader(reader) if mode is Guarantee.AT_MOST_ONCE else None
        markers = reader if isinstance(reader, InducedReader) else None
        return Source(ahead or reader, ahead, is_over=is_over, markers=markers)

    def positions(self, checkpoint: CheckpointId, *, is_last: bool) -> dict[str, bytes]:
        """Return those of a snapshot that is taken now."""
        return self.reader.positions() if self.ahead is None else self.ahead.cut(checkpoint, is_last=is_last)

    @property
    def unprocessed_from(self) -> dict[str, bytes] | None:
        """Where reading goes on for whoever has none of what is held (SV9); None: as in every snapshot."""
        return None if self.ahead is None else self.ahead.unprocessed_from

    def poll(self) -> Polled:
        """Read, unless it is over."""
        polled = None if self.is_over else self.reader.poll()
        self._polled_count += is_progress(polled)
        return polled

    @property
    def read_count(self) -> int:
        """How often reading came forward."""
        return self._polled_count if self.ahead is None else self.ahead.read_count

    def splits_now(self) -> SplitsSeen:
        """Return which splits a marker may still come from (EI25, EI26, EI30)."""
        assert self.markers is not None
        if self.is_over or (self.ahead is not None and self.ahead.is_ended):
            return SplitsSeen((), is_read=False)
        return SplitsSeen(tuple(self.markers.splits()), is_read=self.ahead is None or not self.ahead.is_full)

    def check_marker(self, marker: CheckpointMarker, held: Collection[str], name: str) -> bool:
        """Return whether ``marker`` is to be told: not if its split has ended with it, which counts as well (EI25).

        Raises:
            UsageError: the reader must not have met it (EI21).
        """
        if self.markers is None:
            problem = "and has no read_on() that would have it go on"
        elif marker.split in held:
            problem = "and had gone on in it before read_on() named that split"
        elif marker.split in self.seen.splits:
            return True
        elif marker.split in self.markers.positions():
            return False
        else:
            problem = "which it does not own"
        raise UsageError(
            f"the reader of source '{name}' met the marker of checkpoint {marker.checkpoint_id} in split "
            f"'{marker.split}', {problem}"
        )

    def check_records(self, polled: SourceBatch, held: Collection[str], name: str) -> None:
        """Refuse records from behind a marker (EI21). Those that were read ahead of it come later, and are none.

        Raises:
            UsageError
        """
        if self.ahead is None and polled.split in held:
            raise UsageError(
                f"the reader of source '{name}' returned records of split '{polled.split}' behind a marker before "
                "read_on() named that split: they would be in the wrong checkpoint"
            )
