"""How far the segments of a stream were read, as checkpoints store it.

Counterpart: ``source``. Source: SC1, SC30 and SC40 of docs/spec/stream-store.md; 8 bytes, with an end 16, big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from headgate.errors import CorruptionError
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reading_order import Place, passed_by
from headgate.protocol.store.truncation import Extent

_POSITION = struct.Struct(">q")
_POSITION_AND_END = struct.Struct(">qq")


def encode_position(place: Place) -> bytes:
    """Return the position of a segment as it is stored."""
    if place.end is None:
        return _POSITION.pack(place.position)
    return _POSITION_AND_END.pack(place.position, place.end)


def decode_position(split: str, data: bytes) -> Place:
    """Return how far a segment was read, with its end when it is not followed.

    Raises:
        CorruptionError
    """
    if len(data) == _POSITION.size:
        return Place(int(_POSITION.unpack(data)[0]))
    if len(data) == _POSITION_AND_END.size:
        position, end = _POSITION_AND_END.unpack(data)
        return Place(int(position), int(end))
    raise CorruptionError(f"position of split '{split}'", 0, "8 or 16 bytes", f"{len(data)}")


def places_of(stream: str, positions: Mapping[str, bytes]) -> dict[int, Place]:
    """Return the positions of a stream's segments, by number.

    Raises:
        CorruptionError
    """
    mine = {split: data for split, data in positions.items() if split.rpartition("/")[0] == stream}
    return {int(split.rpartition("/")[2]): decode_position(split, data) for split, data in mine.items()}


def first_needed(layout: Layout, extents: Mapping[int, Extent], places: Mapping[int, Place]) -> dict[int, int]:
    """Return, for every segment, from where on a checkpoint with these positions needs it."""
    passed = passed_by(layout, extents, places)
    needed = {}
    for number, extent in extents.items():
        place = places.get(number)
        is_begun = place is not None and place.is_begun
        needed[number] = place.position if place is not None and is_begun else extent.head
        if number in passed:
            needed[number] = extent.end
    return needed
