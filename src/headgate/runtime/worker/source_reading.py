"""Reads the source of one subtask: gives its records to the chain, and tells the machine of its markers and its end.

Part of the ``SubtaskRunner`` of a source; everything happens in the mailbox thread. Counterparts:
``runtime.worker.sources`` (the reader, and what it must not do), ``protocol.subtasks.induced``, which decides when a
source that sets its own barrier is cut.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.connectors.base import SourceBatch
from headgate.connectors.induced import CheckpointMarker
from headgate.model.ids import CheckpointId
from headgate.protocol.subtasks import subtask as machine
from headgate.runtime.worker.sources import MarkerReports, Source
from headgate.runtime.worker.subtask_parts import SubtaskParts


class SourceReading:
    """What is read in one subtask, and how far."""

    def __init__(
        self,
        source: Source,
        parts: SubtaskParts,
        subtask: machine.Subtask,
        handle: Callable[[machine.Event], None],
        resume: Callable[[], None],
    ) -> None:
        """Make it; ``handle`` gives the machine an event, ``resume`` says that there is more input (T10)."""
        self.source = source
        self._subtask = parts.subtask
        self._chain = parts.chain
        self._reports = parts.reports
        self._machine = subtask
        self._handle = handle
        self._resume = resume
        self._marker_reports = None if source.markers is None else MarkerReports(parts.reads_on_ms)
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether only barriers may follow."""
        return self._has_ended

    @property
    def sets_barriers(self) -> bool:
        """Whether it sets the barriers of this subtask (EI20)."""
        return self.source.markers is not None

    def start(self) -> None:
        """Announce the splits, once, before the first step."""
        if not self.source.is_over:
            if not self.source.reader.is_finished():
                self._resume()
            if self.source.reader.splits():  # whoever has none may find some with the first poll, and is not idle yet
                self._update_splits()
        self.see_splits()

    def drain(self) -> None:
        """Read nothing more: it ends with the next step, and its positions stay where they are (E7, E8)."""
        if self.source.ahead is not None:
            self.source.ahead.end()
        else:
            self.source.is_over = True
        self.see_splits()  # EI26: no marker is met any more

    def completed(self, checkpoint: CheckpointId) -> None:
        """``checkpoint`` is complete: what waited for that may be processed."""
        if self.source.ahead is not None:
            self.source.ahead.completed(checkpoint)

    def read_on(self, splits: tuple[str, ...]) -> None:
        """Have it go on behind the markers of ``splits``."""
        assert self.source.markers is not None
        self.source.markers.read_on(splits)

    def tick(self, now_ms: int) -> None:
        """Say that it comes forward, if that is due (EI34)."""
        if self._marker_reports is None:
            return
        uncut = self._marker_reports.due(self._machine.awaited_markers, self.source.read_count, now_ms)
        if uncut is not None:
            self._reports.reads_on(self._subtask, uncut)

    def wakeup_ms(self) -> int | None:
        """Return when to read again; None: not before a message comes."""
        if self._machine.is_suspended or self._stands_still():
            return None
        return self.source.reader.wakeup_ms()

    def step(self) -> bool:
        """Read; return whether anything was done."""
        if self._has_ended or self._machine.is_suspended:
            return False
        polled = self._chain.head.timed(self.source.poll)
        if isinstance(polled, CheckpointMarker):
            self._meet(polled)
            return True
        if polled is not None:
            self.process(polled)
            return True
        if not self.source.is_over:
            self._update_splits()
            if not self.source.reader.is_finished():
                self.see_splits()
                return False
        self._has_ended = True
        self._handle(machine.SourceEnded())
        self.see_splits()  # behind the end of data: a source at its end counts as cut (EI25)
        return True

    def _meet(self, marker: CheckpointMarker) -> None:
        """The reader stands behind a marker; it goes on when the machine says so (EI21)."""
        self.see_splits()
        if self.source.check_marker(marker, self._machine.held_splits, str(self._chain.vertex.head.name)):
            self._handle(machine.MarkerMet(marker.split, CheckpointId(marker.checkpoint_id)))

    def see_splits(self) -> None:
        """Tell the machine of a source that sets its barriers which splits may still bring one, if that changed."""
        if self.source.markers is None:
            return
        now = machine.SplitsSeen(()) if self._has_ended else self.source.splits_now()
        if now != self.source.seen:
            self.source.seen = now
            self._handle(now)

    def _stands_still(self) -> bool:
        """Whether nothing can be read before a message comes: every split stands behind its marker."""
        held = self._machine.held_splits
        return bool(held) and set(self.source.seen.splits) <= set(held)

    def process(self, polled: SourceBatch) -> None:
        """Give the chain what was read."""
        self.source.check_records(polled, self._machine.held_splits, str(self._chain.vertex.head.name))
        self._resume()
        if self.source.splits is None or polled.split not in self.source.splits:
            self._update_splits(polled.split)
        self._chain.set_origin(polled.split)
        if polled.bad is not None:
            self._chain.head.output.divert(polled.bad)
        if polled.batch.num_rows:
            self._chain.head.process(polled.batch)
        if polled.is_split_finished:
            self._update_following(polled.split)
            self.source.finished_splits.add(polled.split)
            self._chain.on_split_finished(polled.split)
            self.see_splits()

    def _update_splits(self, also: str | None = None) -> None:
        owned = tuple(self.source.reader.splits())
        if also is not None and also not in owned:
            owned = (*owned, also)
        if owned != self.source.splits:
            self.source.splits = owned
            self._chain.on_splits(owned)

    def _update_following(self, ended: str) -> None:
        """Announce splits that came with the end of one before that: else event time would pass over them."""
        if set(self.source.reader.splits()) - set(self.source.splits or ()):
            self._update_splits(ended)

    def close(self) -> None:
        """Release the reader."""
        self.source.reader.close()
