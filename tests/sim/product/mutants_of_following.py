"""Bugs planted in programs that follow a stream; seeds of ``sim.streams.following`` find them.

``tests/mutants/test_stream_client_mutants.py`` has those that a named test finds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around, skipped

from headgate.errors import StorageError
from headgate.protocol.store.reading_order import ReadingOrder
from headgate.store.catalogue import heads, tables
from headgate.store.catalogue.base import Catalogue
from headgate.store.cuts import StreamCut
from headgate.store.following import StreamEvents, StreamFollower
from headgate.store.reader import SegmentReader


def _changes(catalogue: Catalogue, known: int | None) -> int | None:
    """Return the number that there is now; where that fails, what is ``known``: the product would not ask here."""
    try:
        return catalogue.changes()
    except StorageError:
        return known


def what_comes_while_it_looks_is_overlooked() -> AbstractContextManager[None]:  # FW6
    def read_now(call: Any, self: StreamFollower, rows_max: int) -> Any:
        found = call(self, rows_max)
        self._looked = _changes(self._catalogue, self._looked)
        return found

    return around(StreamFollower, "_read_now", read_now)


def what_comes_in_front_of_the_wait_is_overlooked() -> AbstractContextManager[None]:  # FW6
    def wait(call: Any, self: StreamFollower, until_ms: int) -> None:
        self._looked = _changes(self._catalogue, self._looked)
        call(self, until_ms)

    return around(StreamFollower, "_wait", wait)


def a_tail_is_known_to_be_one_from_the_end_of_the_look_on() -> AbstractContextManager[None]:  # FW6
    def fetch(call: Any, self: SegmentReader) -> bool:
        found: bool = call(self)
        if not found:
            self._tail_changes = _changes(self._catalogue, self._tail_changes) or -1
        return found

    return around(SegmentReader, "_fetch", fetch)


def successors_are_read_at_once() -> AbstractContextManager[None]:  # FW1
    return patched(ReadingOrder, "_passed_before", lambda self, number: True)


def segments_whose_end_could_not_be_looked_at_are_forgotten() -> AbstractContextManager[None]:  # FW8
    def end_segments(self: StreamFollower) -> bool:
        ended = [number for number in sorted(self._places) if self._is_over(number)]
        for number in ended:
            self._ended[number] = self._position(number) if self._is_wanted(number) else self._end_of(number)
            del self._places[number]
            self._readers.pop(number, None)
        if ended:
            self._look()
            for number in ended:
                self._order.end(number)
            self._take()
        return bool(ended)

    return patched(StreamFollower, "_end_segments", end_segments)


def its_cut_forgets_what_was_read_to_its_end() -> AbstractContextManager[None]:  # FW4
    def cut(call: Any, self: StreamFollower) -> StreamCut:
        found: StreamCut = call(self)
        return replace(found, positions={n: p for n, p in found.positions.items() if n not in self._ended})

    return around(StreamFollower, "cut", cut)


def what_is_given_back_is_lost() -> AbstractContextManager[None]:  # FW5
    return skipped(StreamFollower, "unread")


def what_is_given_back_comes_behind_other_segments() -> AbstractContextManager[None]:  # FW5
    def unread(call: Any, self: StreamFollower, found: StreamEvents) -> None:
        call(self, found)
        self._latest = found.segment

    return around(StreamFollower, "unread", unread)


def a_key_is_read_from_the_lowest_segment() -> AbstractContextManager[None]:  # FW7
    def is_wanted(self: StreamFollower, number: int) -> bool:
        return self._key is None or self._layout.segments[number].key_low == 0

    return patched(StreamFollower, "_is_wanted", is_wanted)


def a_part_that_reaches_past_the_head_is_forgotten() -> AbstractContextManager[None]:  # S65, S68
    def forget(call: Any, connection: Connection, stream_id: int, segment: int, head: int, limit: int) -> Any:
        part = tables.parts.c
        last = sa.select(sa.func.max(part.start + part.events_count))
        end = connection.scalar(last.where(part.stream_id == stream_id, part.segment_id == segment, part.start < head))
        return call(connection, stream_id, segment, end, limit)

    return around(heads, "_forget_parts", forget)


ALL: dict[Mutant, int] = {
    what_comes_while_it_looks_is_overlooked: 72,
    what_comes_in_front_of_the_wait_is_overlooked: 29,
    a_tail_is_known_to_be_one_from_the_end_of_the_look_on: 6,
    successors_are_read_at_once: 7,
    segments_whose_end_could_not_be_looked_at_are_forgotten: 5,
    its_cut_forgets_what_was_read_to_its_end: 7,
    what_is_given_back_is_lost: 1,
    what_is_given_back_comes_behind_other_segments: 1,
    a_key_is_read_from_the_lowest_segment: 3,
    a_part_that_reaches_past_the_head_is_forgotten: 7,
}
"""Each with a seed that finds it."""
