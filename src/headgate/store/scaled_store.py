"""Which segments streams have: the part of a store about layouts, scaling, and what pipelines have passed of it.

Counterpart: ``store.Store``, which is all of this too; ``catalogue.scaling``; ``protocol.store.layouts`` decides.
Source: CT6, S72 to S75 and SC40 of docs/spec/stream-store.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from headgate.errors import UsageError
from headgate.protocol.store import layouts
from headgate.protocol.store.layouts import Layout, Plan, Refused
from headgate.protocol.store.truncation import Extent
from headgate.store.catalogue.values import Reading
from headgate.store.schema_store import SchemaStore
from headgate.store.streams import OtherLayoutError, StreamInfo


class ScaledStore(SchemaStore):
    """The part of a store that manages the segments of streams."""

    def layout(self, name: str) -> Layout:  # CT6
        """Return the segments of a stream, and the keys that each of them takes.

        Raises:
            UsageError: there is no such stream.
        """
        return self._catalogue.layout(name)

    def split(self, name: str, segment: int, into: int = 2) -> Layout:  # S72
        """Scale a stream: from now on, ``into`` segments take the keys of one segment. No event moves.

        Writers, transactions and pipelines that read the stream continue. The events of each key stay in order.

        Raises:
            UsageError: there is no such stream, or the segment takes no events any more.
        """
        return self._scale(name, lambda layout: layouts.split(layout, segment, into))

    def merge(self, name: str, segments: Collection[int]) -> Layout:
        """Scale a stream: from now on, one segment takes the keys of several neighbouring segments; see ``split``.

        Raises:
            UsageError: there is no such stream, or the segments are not neighbours that take events.
        """
        return self._scale(name, lambda layout: layouts.merge(layout, segments))

    def resize(self, name: str, segments: int) -> Layout:
        """Scale a stream: from now on, this number of segments share the keys equally; see ``split``.

        Raises:
            UsageError: there is no such stream, or it already has these segments.
        """
        return self._scale(name, lambda layout: layouts.resize(layout, segments))

    def layout_and_extents(self, stream: StreamInfo) -> tuple[Layout, dict[int, Extent]]:
        """Return the segments of a stream, with the head and the end of each, as of one moment."""
        return self._catalogue.layout_and_extents(stream)

    def look(self, stream: StreamInfo) -> tuple[int, bool]:
        """Return the number of a stream's present layout, and whether the stream is sealed. Takes some µs."""
        return self._catalogue.look(stream)

    def pass_segments(self, stream: StreamInfo, reader: Reading, segments: Collection[int]) -> None:  # SC40
        """Record that a pipeline has processed everything in these closed segments."""
        self._catalogue.pass_segments(stream, reader, segments)

    def passed(self, stream: StreamInfo, reader: Reading) -> set[int]:  # SC40
        """Return the segments that a pipeline has passed."""
        return self._catalogue.passed(stream, reader)

    def _scale(self, name: str, plan: Callable[[Layout], Plan | Refused]) -> Layout:
        while True:
            wanted = plan(self._catalogue.layout(name))
            if isinstance(wanted, Refused):
                raise UsageError(f"stream '{name}' cannot be scaled: {wanted.problem}")
            with suppress(OtherLayoutError):  # somebody else has scaled it, or a late commit (S75): plan anew
                return self._catalogue.scale_stream(name, wanted, self._now_ms())
