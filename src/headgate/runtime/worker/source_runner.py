"""Reads the source of one subtask: gives its records to the chain, and tells the machine of markers and the end.

Everything happens in the mailbox thread. ``AheadReader`` reads ahead of what is processed, for pipelines that count
every record at most once: records wait in memory until a checkpoint has recorded a position after them (GM30, GM32,
GM35 of docs/spec/guarantees.md). ``protocol.subtasks.externally_induced`` decides when a source that sets its own
barrier is cut.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from functools import partial

from headgate.connectors.base import (
    AnyReader,
    CheckpointMarker,
    EncodingReader,
    InducedReader,
    PartsReader,
    PausableReader,
    Polled,
    SourceBatch,
    SplitPosition,
)
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Guarantee
from headgate.model.ids import CheckpointId
from headgate.model.progress import SourceProgress, SplitProgress
from headgate.operators.timestamps import WithTimestampsOperator
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.subtasks.alignment import ReadAhead
from headgate.protocol.subtasks.subtask import SplitsSeen
from headgate.protocol.watermarks import WATERMARK_MIN_MS, SplitAligner
from headgate.runtime.worker.chain import Chain
from headgate.runtime.worker.subtask_parts import SubtaskParts

HELD_BYTES_MAX = 64 << 20
"""What one subtask holds; reading waits beyond it."""

WAIT_MS = 1_000
"""Where nothing can be read, a completed checkpoint wakes the mailbox earlier."""


def is_progress(polled: Polled) -> bool:
    """Whether reading has come forward: a batch without records is none, unless its split has ended with it."""
    if not isinstance(polled, SourceBatch):
        return polled is not None
    return polled.is_split_finished or polled.batch.num_rows > 0 or polled.bad is not None


def event_times(chain: Chain) -> WithTimestampsOperator | None:
    """Return what takes event times from the records of the source at the head of ``chain``, if they have any."""
    found = (link.operator for link in chain.links if isinstance(link.operator, WithTimestampsOperator))
    return next(found, None)


@dataclass(frozen=True, slots=True)
class _Held:
    """A batch, its size, and where reading would have begun to read it again."""

    batch: SourceBatch
    size_bytes: int
    positions: dict[str, bytes]


def split_positions(reader: AnyReader | AheadReader) -> Mapping[str, SplitPosition]:
    """Return what a reader says of its splits; one that does not derive from ``SourceReader`` need not say anything."""
    progress: Callable[[], Mapping[str, SplitPosition]] = getattr(reader, "progress", dict)
    return progress()


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
        """Return the positions of a snapshot that is taken now (GM32)."""
        # At most once: the recorded position is after what is held, so a crash loses it and it is never read twice.
        # Only the last snapshot of a stop may be before it, because nothing of it is processed any more.
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
        """Read nothing more; what is held is still to be processed."""
        self._is_ended = True

    # -- what a source does ---------------------------------------------------------------------------------------

    def splits(self) -> Sequence[str]:
        """Return those that something may still be handed over of."""
        return tuple(dict.fromkeys((*self._inner.splits(), *(held.batch.split for held in self._held))))

    def poll(self) -> Polled:
        """Read on, if there is room, and hand the next batch over, if it may be processed.

        A marker is returned when it is read: the positions of its snapshot are those of reading.
        """
        marker = self._read_on()
        if marker is not None:
            return marker
        # one look at the source for each batch handed over: reading stays ahead without a thread of its own
        if not self._gate.may_take:
            return None
        self._gate.take()
        assert self._held, "what the gate releases was read and is held (GM30)"
        held = self._held.popleft()
        self._held_bytes -= held.size_bytes
        assert self._held_bytes >= 0, "what is handed over was counted when it was read"
        return held.batch

    def _read_on(self) -> CheckpointMarker | None:
        if self._is_ended or self.is_full:
            return None
        # taken before the poll: a reader that begins there again reads this very batch
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
        """Whether reading waits until something of what is held may be processed."""
        return self._held_bytes >= HELD_BYTES_MAX

    def is_finished(self) -> bool:
        """Whether everything that is read has been handed over, and nothing follows."""
        return not self._held and (self._is_ended or self._inner.is_finished())

    def positions(self) -> dict[str, bytes]:
        """Return where reading goes on. Snapshots ask ``cut``."""
        return self._inner.positions()

    def progress(self) -> Mapping[str, SplitPosition]:
        """Return how far splits were read, what is held included."""
        return split_positions(self._inner)

    def wakeup_ms(self) -> int:
        if self._gate.may_take:
            return 0
        reads_on = not (self.is_full or self._is_ended or self._inner.is_finished())
        return self._inner.wakeup_ms() if reads_on else WAIT_MS

    def close(self) -> None:
        """Drop what is held."""
        self._held.clear()
        self._inner.close()


REPORTS_PER_TIMEOUT = 4
"""How often a source says that it reads towards a marker: one report that is late must not look like a standstill."""


@dataclass(slots=True)
class MarkerReports:
    """When a source that sets its own barrier says that it comes forward (EI34).

    No report is made about a marker that is met soon.
    """

    period_ms: int
    _since: tuple[int, int] | None = None
    """When it was last looked, and how much had been read then."""
    _reported: tuple[CheckpointId, ...] = ()

    def due(self, awaited: tuple[CheckpointId, ...], read_count: int, now_ms: int) -> tuple[CheckpointId, ...] | None:
        """Return for which checkpoints to report that it is not cut yet; None: no report is due.

        Args:
            awaited: those that it has not been cut for.
            read_count: how much it has read.
            now_ms: the time.
        """
        if any(checkpoint not in awaited for checkpoint in self._reported):  # a cut begins the timeout (EI35): at once
            self._reported = tuple(checkpoint for checkpoint in self._reported if checkpoint in awaited)
            return self._reported
        if not awaited:
            self._since = None
        elif self._since is None:
            self._since = now_ms, read_count
        elif now_ms - self._since[0] >= self.period_ms and read_count > self._since[1]:
            self._since, self._reported = (now_ms, read_count), awaited
            return awaited
        return None


@dataclass(slots=True)
class SourceState:
    """What is read in one subtask."""

    reader: AnyReader | AheadReader
    ahead: AheadReader | None = None
    """``reader``, if it reads ahead of what is processed (GM30)."""
    splits: tuple[str, ...] | None = None
    """The splits last announced to the chain; None: none yet."""
    finished_splits: set[str] = field(default_factory=set)
    is_over: bool = False
    """Whether it is not read any more, even if there is more to read (E7, E9)."""
    markers: InducedReader | None = None
    """What reads, if it sets the barriers of this subtask (EI20)."""
    seen: SplitsSeen = field(default_factory=lambda: SplitsSeen(()))
    """What the machine knows of its splits, if it does."""
    records: dict[str, int] = field(default_factory=dict)
    """Records read of each split that has not ended, bad ones included."""
    _polled_count: int = 0

    @staticmethod
    def of(reader: AnyReader | None, mode: Guarantee, *, is_over: bool) -> SourceState | None:
        """Return the source that ``reader`` reads, if there is one."""
        if reader is None:
            return None
        ahead = AheadReader(reader) if mode is Guarantee.AT_MOST_ONCE else None
        markers = reader if isinstance(reader, InducedReader) else None
        return SourceState(ahead or reader, ahead, is_over=is_over, markers=markers)

    def positions(self, checkpoint: CheckpointId, *, is_last: bool) -> dict[str, bytes]:
        """Return those of a snapshot that is taken now."""
        return self.reader.positions() if self.ahead is None else self.ahead.cut(checkpoint, is_last=is_last)

    @property
    def unprocessed_from(self) -> dict[str, bytes] | None:
        """Where reading goes on without the held batches (SV9); None: as in every snapshot."""
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
        """Return which splits a marker may still come from (EI25, EI26)."""
        assert self.markers is not None, "only sources that set barriers have markers"
        if self.is_over or (self.ahead is not None and self.ahead.is_ended):
            return SplitsSeen((), is_read=False)
        return SplitsSeen(tuple(self.markers.splits()), is_read=self.ahead is None or not self.ahead.is_full)

    def check_marker(self, marker: CheckpointMarker, held: Collection[str], name: str) -> bool:
        """Return whether ``marker`` is to be reported: not if its split has ended with it, which counts as well (EI25).

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
        """Refuse records that follow a marker (EI21). Records that were read ahead of it may come later.

        Raises:
            UsageError
        """
        if self.ahead is None and polled.split in held:
            raise UsageError(
                f"the reader of source '{name}' returned records of split '{polled.split}' behind a marker before "
                "read_on() named that split: they would be in the wrong checkpoint"
            )


class SourceRunner:
    """What is read in one subtask, and how far."""

    def __init__(
        self,
        source: SourceState,
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
        self._aligner = self._aligner_for(parts)
        self._timestamps = event_times(parts.chain)
        self._marker_reports = None if source.markers is None else MarkerReports(parts.reads_on_ms)
        self._has_ended = self._is_progress_broken = False
        self._paused: frozenset[str] = frozenset()
        self._parts = parts.reader if isinstance(parts.reader, PartsReader) else None
        self._rate_limit = parts.rate_limit
        if isinstance(parts.reader, EncodingReader) and parts.chain.head.output.takes_lazy_rows:
            parts.reader.keep_text_encoded()
        self._splits_count = 0
        self._reported_share: tuple[int, int] | None = None

    def _aligner_for(self, parts: SubtaskParts) -> SplitAligner | None:
        """Return what aligns the splits; one that does not take part reports once that it has nothing to read."""
        if isinstance(parts.reader, PausableReader) and self.source.ahead is None:
            return parts.aligner
        if parts.aligner is not None and parts.aligner.has_others:
            self._reports.source_position(parts.subtask, None)
        return None

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
            if self.source.reader.splits():  # without any it may find some with the first poll
                self._update_splits()
        self.see_splits()

    def drain(self) -> None:
        """Read nothing more: it ends with the next step, and its positions stay where they are (E7)."""
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
        """Have it read on after the markers of ``splits``."""
        assert self.source.markers is not None, "only sources that set barriers have markers"
        self.source.markers.read_on(splits)

    def read_to(self, limit_ms: int) -> None:
        """Sources with event times may read so far (W21)."""
        if self._aligner is not None and self._aligner.has_others:
            self._aligner.limit_ms = limit_ms

    def share(self, splits: int, part: int) -> None:
        """All subtasks read so many splits together, and may read ``part``."""
        if self._rate_limit is not None:
            self._rate_limit.divide(self._splits_count, splits)
        if self._parts is not None and not self.source.is_over:
            self._chain.head.run(partial(self._parts.begin_part, part))

    def _report_share(self) -> None:
        """Report what is read, if it has changed."""
        found = (self._splits_count, 0 if self._parts is None else self._parts.ended_parts)
        if found != self._reported_share:
            self._reported_share = found
            self._reports.source_share(self._subtask, *found)

    def tick(self, now_ms: int) -> None:
        """Say that it comes forward, if that is due (EI34), and how far it is (W23)."""
        if self._aligner is not None:
            if self._timestamps is not None and self._paused:
                self._timestamps.on_pause(self._paused, now_ms)
            report = self._aligner.report(now_ms, is_over=self._has_ended or self.source.is_over)
            if report is not None:
                self._reports.source_position(self._subtask, report[0])
        if self._parts is not None or self._rate_limit is not None:
            self._report_share()
        if self._limit_ms() and self._timestamps is not None:  # the splits are not idle
            self._timestamps.on_pause(frozenset(self.source.splits or ()), now_ms)
        if self._marker_reports is None:
            return
        uncut = self._marker_reports.due(self._machine.awaited_markers, self.source.read_count, now_ms)
        if uncut is not None:
            self._reports.reads_on(self._subtask, uncut)

    def wakeup_ms(self) -> int | None:
        """Return when to read again; None: not before a message comes."""
        if self._machine.is_suspended or self._stands_still():
            return None
        limit_ms = self._limit_ms()
        if limit_ms:
            return limit_ms
        if self._aligner is not None and self._aligner.is_waiting:
            return WAIT_MS  # the limit wakes the mailbox earlier
        return self.source.reader.wakeup_ms()

    def _limit_ms(self) -> int:
        """Return how long the rate limit has reading wait. It does not hold markers of checkpoints up."""
        if self._rate_limit is None or self._has_ended or self.source.is_over or self._machine.awaited_markers:
            return 0
        return self._rate_limit.wait_ms()

    def step(self) -> bool:
        """Read; return whether anything was done."""
        if self._has_ended or self._machine.is_suspended or self._limit_ms():
            return False
        # The rate limit is asked before the reader: what a poll has returned must be processed, its position has moved
        # on.
        polled = self._chain.head.timed(self._poll)
        if isinstance(polled, CheckpointMarker):
            self._meet(polled)
            return True
        if polled is not None:
            self.process(polled)
            return True
        if not self.source.is_over:
            # a poll that returned nothing may all the same have found splits, or given some up
            self._update_splits()
            if not self.source.reader.is_finished():
                self.see_splits()
                return False
        self._has_ended = True
        # the machine answers with the last watermark, finish() and the end of data, all within this call (T7)
        self._handle(machine.SourceEnded())
        self.see_splits()  # after the end of data: a source at its end counts as cut (EI25)
        return True

    def _poll(self) -> Polled:
        """Read on, in the split with the lowest position (W20)."""
        reader, aligner = self.source.reader, self._aligner
        if aligner is None or not isinstance(reader, PausableReader):
            return self.source.poll()
        while True:
            # Until every marker is met no split is paused: the slower ones may already stand at theirs (W25).
            paused = frozenset() if self._machine.awaited_markers else aligner.paused()
            if paused != self._paused:
                self._paused = paused
                reader.pause(paused)
            polled = self.source.poll()
            # ends: it looks again only after it set splits aside as exhausted, and there are finitely many
            if polled is not None or self.source.is_over or not aligner.found_nothing(reader.is_behind):
                return polled

    def _note_position(self, polled: SourceBatch) -> None:
        assert self._aligner is not None
        if polled.is_split_finished:
            self._aligner.finish(polled.split)
        elif polled.batch.num_rows == 0 and polled.bad is None:
            return
        elif self._timestamps is not None:
            self._aligner.read(polled.split, self._timestamps.latest_ms(polled.split))
        elif polled.written_ms is not None:
            self._aligner.read(polled.split, polled.written_ms)
        else:  # neither is known: it is read as it comes
            self._aligner.finish(polled.split)

    def _meet(self, marker: CheckpointMarker) -> None:
        """The reader has met a marker; it reads on when the machine says so (EI21)."""
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
        """Whether nothing can be read before a message comes: every split has met its marker."""
        held = self._machine.held_splits
        return bool(held) and set(self.source.seen.splits) <= set(held)

    def progress(self) -> SourceProgress:
        """Return how far the splits were read that have not ended."""
        node = self._chain.vertex.head.name
        try:
            found = split_positions(self.source.reader)
            times = self._chain.event_times()
            names = [split for split in self.source.splits or () if split not in self.source.finished_splits]
            splits = [self._split(split, found.get(split), *times.get(split, (None, False))) for split in names]
            unit = next((one.unit for one in found.values()), "records")
        except Exception:
            if not self._is_progress_broken:  # a report is not worth a run
                logging.getLogger("headgate").warning(
                    "the reader of source '%s' reports no progress", node, exc_info=True
                )
            self._is_progress_broken = True
            return SourceProgress(node)
        return SourceProgress.of(node, unit, splits)

    def _split(self, split: str, found: SplitPosition | None, watermark_ms: int | None, is_idle: bool) -> SplitProgress:
        position, end = (None, None) if found is None else (found.position, found.end)
        return SplitProgress(
            split,
            self._subtask.index,
            position,
            end,
            None if position is None or end is None else max(end - position, 0),
            self.source.records.get(split, 0),
            watermark_ms=watermark_ms,
            is_idle=is_idle,
            is_waiting=split in self._paused,
            undecided=0 if found is None else found.undecided,
        )

    def process(self, polled: SourceBatch) -> None:
        """Give the chain what was read."""
        self.source.check_records(polled, self._machine.held_splits, str(self._chain.vertex.head.name))
        self._resume()
        if self.source.splits is None or polled.split not in self.source.splits:
            self._update_splits(polled.split)
        # the split is announced before its first record: event time waits for those that were announced
        self._chain.set_origin(polled.split)
        records = self.source.records
        bad_rows = 0 if polled.bad is None else polled.bad.num_rows
        records[polled.split] = records.get(polled.split, 0) + polled.batch.num_rows + bad_rows
        if self._rate_limit is not None:
            self._rate_limit.take(polled.batch.num_rows + bad_rows)
        if polled.bad is not None:
            self._chain.head.output.divert(polled.bad)
        if polled.batch.num_rows:
            if self._timestamps is not None:  # in front of the records; W26
                self._timestamps.limit(polled.split, None if polled.watermark_ms is None else WATERMARK_MIN_MS)
            self._chain.head.process(polled.batch)
        if self._timestamps is not None and polled.watermark_ms is not None:
            self._timestamps.limit(polled.split, polled.watermark_ms)
        if self._aligner is not None:
            self._note_position(polled)
        if polled.is_split_finished:
            # after its last records, and followers before the end: this order keeps event time from passing over them
            self._update_following(polled.split)
            self.source.finished_splits.add(polled.split)
            del records[polled.split]
            self._splits_count = len(self.source.reader.splits())
            self._chain.on_split_finished(polled.split)
            self.see_splits()

    def _update_splits(self, also: str | None = None) -> None:
        owned = tuple(self.source.reader.splits())
        self._splits_count = len(owned)
        # a reader drops a split together with the last batch of it, which is still to be processed as that split's
        if also is not None and also not in owned:
            owned = (*owned, also)
        if owned != self.source.splits:
            self.source.splits = owned
            if self._aligner is not None:
                self._aligner.assign(owned)
            self._chain.on_splits(owned)

    def _update_following(self, ended: str) -> None:
        """Announce splits that came with the end of one before that: else event time would pass over them."""
        if set(self.source.reader.splits()) - set(self.source.splits or ()):
            self._update_splits(ended)

    def close(self) -> None:
        """Release the reader."""
        self.source.reader.close()
