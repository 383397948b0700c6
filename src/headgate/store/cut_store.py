"""Where streams begin: the part of a store about stream cuts, truncation, holds and retention.

Counterpart: ``store.Store``, which is all of this too; ``catalogue.heads``. Source: S65 to S71 of
docs/spec/stream-store.md. Heads move in the catalogue, then what nobody can read any more goes; each step may be cut
short, and the next truncation of the stream goes on where it was left.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping

from headgate.clock import Clock
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.protocol.store.truncation import Extent, Hold, is_of_group, needed_by
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.cuts import StreamCut
from headgate.store.retention import Retention, policy_of
from headgate.store.streams import StreamInfo

PARTS_AT_A_TIME = 2_000
"""A sweep keeps other writers of the catalogue waiting for so many rows."""

LOOK_INTERVAL_MS = 60_000
"""So often a process that writes to a stream looks what may go."""

_log = logging.getLogger("headgate")


class CutStore:
    """The part of a store that decides which events to keep: stream cuts, truncation, holds and retention."""

    def __init__(self, catalogue: Catalogue, storage: Storage, clock: Clock) -> None:
        """Use ``Store.open``."""
        self._catalogue = catalogue
        self._storage = storage
        self._clock = clock
        self._now_ms = clock.wall_ms
        self._look_due_ms: dict[str, int] = {}

    # -- cuts --------------------------------------------------------------------------------------------------------

    def head(self, name: str) -> StreamCut:  # S65
        """Return the cut at which a stream begins."""
        return self._cut(name, lambda extent: extent.head)

    def tail(self, name: str) -> StreamCut:
        """Return the cut at which a stream ends now."""
        return self._cut(name, lambda extent: extent.end)

    def cut_at(self, name: str, date: dt.datetime) -> StreamCut:  # S66
        """Return the cut in front of all events that became visible at ``date`` or later.

        Args:
            name: the name of the stream.
            date: a date with a time zone, or in the time zone of the machine.
        """
        stream = self._catalogue.find_stream(name)
        positions = self._catalogue.cut_at(stream, round(date.timestamp() * 1_000))
        return StreamCut(stream.name, stream.stream_id, positions)

    def events_between(self, begin: StreamCut, end: StreamCut | None = None) -> int:
        """Return the number of events between two cuts of a stream. Without a second cut: up to its end."""
        extents = self._catalogue.extents(self._stream_of(begin))
        last = {segment: extent.end for segment, extent in extents.items()} if end is None else end.positions
        return sum(_between(begin.positions, last, segment, extent) for segment, extent in extents.items())

    # -- truncation --------------------------------------------------------------------------------------------------

    def truncate(self, cut: StreamCut, *, force: bool = False) -> StreamCut:  # S65
        """Remove the events before ``cut`` for good, and return where the stream begins now.

        Repeating the call, or passing a cut before the head, changes nothing.

        Args:
            cut: where to truncate: a cut such as ``tail`` or ``cut_at`` returns.
            force: also remove events that a holder still needs.

        Raises:
            UsageError: it is not a cut of an existing stream, or a holder still needs events before it; the message
                names the holder.
        """
        stream = self._stream_of(cut)
        self._catalogue.truncate(stream, cut.positions, anyway=force)
        self._tidy(stream)
        return self.head(stream.name)

    def hold(self, cut: StreamCut, *, holder: str, life: str = "", epoch: int = 0) -> None:
        """Keep all events behind ``cut``, until ``holder`` holds another cut of the stream or releases it.

        Args:
            cut: the holder needs no events before it.
            holder: the name of the holder, which holds one cut per stream.
            life: for a holder that another process may replace.
            epoch: a later one of the same life fences it.

        Raises:
            TruncatedError: events behind the cut have already been truncated.
            FencedError: a later epoch of the same life already holds a cut.
            UsageError: it is not a cut of an existing stream, or the name is that of a reader group.
        """
        if is_of_group(holder):
            raise UsageError(f"'{holder}' is the name under which a reader group holds; hold it under another one")
        self._catalogue.hold(self._stream_of(cut), Hold(holder, cut.positions, life, epoch))

    @property
    def is_untouched(self) -> bool:  # CT8
        """Whether reading leaves the store unchanged: it is of an older release, or cannot be written to."""
        return self._catalogue.is_untouched

    def release(self, name: str, *, holder: str) -> None:
        """Release the cut that ``holder`` holds of a stream. The call can be repeated."""
        self._catalogue.release(self._catalogue.find_stream(name), holder)

    def holds(self, name: str) -> dict[str, StreamCut]:
        """Return the held cuts of a stream, by holder."""
        stream = self._catalogue.find_stream(name)
        found = self._catalogue.holds(stream)
        return {hold.holder: StreamCut(stream.name, stream.stream_id, hold.positions) for hold in found}

    def needed_by(self, name: str) -> list[str]:
        """Return the holders that have not read a stream to its present end."""
        stream = self._catalogue.find_stream(name)
        _, extents = self._catalogue.layout_and_extents(stream)
        return list(needed_by(extents, self._catalogue.holds(stream)))

    # -- retention ---------------------------------------------------------------------------------------------------

    def set_retention(self, name: str, retention: Retention | None) -> StreamInfo:  # S71
        """Set how long events of a stream stay, from the next look on. None: for ever.

        Raises:
            UsageError: there is no such stream, or the retention is impossible.
        """
        return self._catalogue.set_retention(name, policy_of(retention))

    def retain(self, name: str) -> StreamCut:  # S71
        """Truncate a stream now as far as its retention says, and return where it begins.

        Writers and sinks do this by themselves, once a minute.
        """
        stream = self._catalogue.find_stream(name)
        if self._let_go(stream):
            self._tidy(stream)
        return self.head(name)

    def look_after(self, name: str) -> None:
        """Do what ``retain`` and ``autoscale`` do, unless this process has just done so. It never takes long.

        It never fails: what cannot be removed now is removed by a later look.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._look_due_ms.get(name, now_ms):
            return
        self._look_due_ms[name] = now_ms + LOOK_INTERVAL_MS
        try:
            stream = self._catalogue.find_stream(name)
        except HeadgateError as error:
            _log.warning("stream '%s' could not be looked at: %s; trying again in a minute", name, error)
            return
        self._look_at(stream)

    def _look_at(self, stream: StreamInfo) -> None:
        """Do what is due for a stream, and never fail."""
        try:
            if stream.retention is None:
                return
            self._let_go(stream)
            if not self._tidy_some(stream):
                self._look_due_ms[stream.name] = self._clock.monotonic_ms()  # the next one goes on
        except HeadgateError as error:
            what = f"old events of stream '{stream.name}' could not be removed"
            _log.warning("%s: %s; trying again in a minute", what, error)

    def _let_go(self, stream: StreamInfo) -> bool:
        """Move heads as far as the retention says; return whether any moved. Others wait for the move only."""
        cut = self._catalogue.retention_cut(stream, self._now_ms())
        return bool(cut and self._catalogue.retain(stream, cut))

    # -- files -------------------------------------------------------------------------------------------------------

    def _tidy(self, stream: StreamInfo) -> None:
        while not self._tidy_some(stream):
            pass

    def _tidy_some(self, stream: StreamInfo) -> bool:
        """Forget parts before the heads and delete the files that hold nothing else (S68); return whether that is all.

        A file that cannot be deleted now is tried again by the next truncation.
        """
        found = self._catalogue.sweep(stream, PARTS_AT_A_TIME)
        gone = [path for path in found.garbage if self._delete(path)]
        if gone:
            self._catalogue.swept(gone)
        return found.is_done

    def _delete(self, path: str) -> bool:
        try:
            self._storage.delete(path)
        except StorageError:
            return False
        return True

    def _stream_of(self, cut: StreamCut) -> StreamInfo:
        stream = self._catalogue.find_stream(cut.stream)
        cut.check(stream)
        return stream

    def _cut(self, name: str, position: Callable[[Extent], int]) -> StreamCut:
        stream = self._catalogue.find_stream(name)
        extents = self._catalogue.extents(stream)
        return StreamCut(stream.name, stream.stream_id, {segment: position(x) for segment, x in extents.items()})


def _between(first: Mapping[int, int], last: Mapping[int, int], segment: int, extent: Extent) -> int:
    begin = max(first.get(segment, extent.head), extent.head)
    return max(0, min(last.get(segment, 0), extent.end) - begin)  # what a cut does not name came behind it
