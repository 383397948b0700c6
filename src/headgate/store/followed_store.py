"""Whole streams as one program reads them: the part of a store that begins somewhere and reads on.

Counterpart: ``store.Store``, which is all of this too; ``following.StreamFollower``. Source: rules FW1 to FW8 of
docs/spec/stream-clients.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

import pyarrow as pa

from headgate.errors import TruncatedError, UsageError
from headgate.protocol.store.reading_order import FirstStart
from headgate.protocol.store.truncation import Extent
from headgate.store.autoscaled_store import AutoscaledStore
from headgate.store.cuts import StreamCut
from headgate.store.fetching import Fetching
from headgate.store.following import OnlyKey, StreamFollower
from headgate.store.streams import StreamInfo
from headgate.threads import Threads

EARLIEST, LATEST = "earliest", "latest"


class FollowedStore(AutoscaledStore):
    """The part of a store that reads whole streams without a reader group."""

    _threads: Threads
    _fetching: Fetching

    def follow(
        self,
        name: str,
        *,
        start: str | StreamCut | dt.datetime = EARLIEST,
        end: str | StreamCut | None = None,
        key: object = None,
    ) -> StreamFollower:  # FW2
        """Return a reader of all segments of a stream, including those that it gets when it is scaled.

        Args:
            name: the name of the stream.
            start: ``"earliest"``, ``"latest"`` (only events from now on), a cut, or a date (only events that became
                visible then or later).
            end: where to end: a cut, or ``"latest"`` for the present end. None: where the stream is sealed.
            key: return only events with this value of the routing key. None: all events.

        Raises:
            UsageError: there is no such stream, the cut is of another stream, or the stream has no routing key.
            TruncatedError: the events at ``start`` no longer exist.
        """
        stream = self._catalogue.find_stream(name)
        _, extents = self._catalogue.layout_and_extents(stream)
        begin = self._begin(stream, extents, start)
        moment = {segment: extent.end for segment, extent in extents.items()}
        if isinstance(end, StreamCut):
            _check_there(end, stream, extents)
            moment = dict(end.positions)
        elif end not in (None, LATEST):
            raise UsageError(f"a reader of a stream ends at a cut or at 'latest', not at {end!r}")
        first = FirstStart(moment, start == LATEST, end is not None, begin)
        only = None if key is None else _only(stream, key)
        return StreamFollower(
            self._catalogue, self._storage, stream, first, only, self._fetching, self._threads, self._clock
        )

    def _begin(
        self, stream: StreamInfo, extents: Mapping[int, Extent], start: str | StreamCut | dt.datetime
    ) -> Mapping[int, int] | None:
        """Return the positions at which a reader begins; None: at an end of the stream."""
        if isinstance(start, dt.datetime):
            return self.cut_at(stream.name, start).positions
        if isinstance(start, StreamCut):
            _check_there(start, stream, extents)
            for segment, position in sorted(start.positions.items()):
                if position < extents[segment].head:
                    raise TruncatedError(stream.name, segment, position, extents[segment].head)
            return start.positions
        if start not in (EARLIEST, LATEST):
            raise UsageError(f"a reader of a stream starts at 'earliest', 'latest', a cut or a date, not at {start!r}")
        return None


def _check_there(cut: StreamCut, stream: StreamInfo, extents: Mapping[int, Extent]) -> None:
    cut.check(stream)
    for segment, position in sorted(cut.positions.items()):
        if segment not in extents or position > extents[segment].end:
            raise UsageError(
                f"the cut {cut} names position {position} of segment {segment}, which stream '{stream.name}' does not "
                "have: it comes from another store"
            )


def _only(stream: StreamInfo, key: object) -> OnlyKey:
    """Return which events have ``key``, given as a value or as its text.

    Raises:
        UsageError: the stream has no routing key, or ``key`` can be no value of it.
    """
    if stream.routing_key is None:
        raise UsageError(f"stream '{stream.name}' has no routing key, so it has no events of one key")
    dtype = stream.schema.field(stream.routing_key).type
    try:
        value = pa.scalar(key).cast(dtype)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{key!r} is no value of '{stream.routing_key}', the routing key of stream '{stream.name}', which is of "
            f"type {dtype}"
        ) from error
    return OnlyKey.of(stream, value)
