"""Stream cuts: one position in every segment of a stream, and the text that carries one into another process.

Counterpart: ``store.Store`` gives and takes them. Source: Pravega's StreamCut, S66 of docs/spec/stream-store.md.
Never looks into a catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headgate.errors import UsageError
from headgate.store.streams import StreamInfo

_TEXT = re.compile(
    r"(?P<stream>[^#@]+)#(?P<id>[0-9]{1,18})@(?P<positions>[0-9]{1,9}:[0-9]{1,18}(,[0-9]{1,9}:[0-9]{1,18})*)"
)


@dataclass(frozen=True, slots=True)
class StreamCut:
    """A position in every segment of a stream, which divides its events into those before the cut and those behind it.

    ``str`` returns text such as ``app/logs#3@0:120,1:96``, which ``parse`` reads in any process.

    Attributes:
        stream: the name of the stream.
        stream_id: the number of the stream. A stream that is created later under the same name has another number.
        positions: maps each segment to the position of the first event behind the cut.
    """

    stream: str
    stream_id: int
    positions: Mapping[int, int]

    def __str__(self) -> str:
        pairs = ",".join(f"{segment}:{position}" for segment, position in sorted(self.positions.items()))
        return f"{self.stream}#{self.stream_id}@{pairs}"

    @classmethod
    def parse(cls, text: str) -> StreamCut:
        """Return the cut that ``text`` represents.

        Raises:
            UsageError: ``text`` is not a cut.
        """
        match = _TEXT.fullmatch(text)
        pairs = [pair.partition(":") for pair in match["positions"].split(",")] if match else []
        positions = {int(segment): int(position) for segment, _, position in pairs}
        if match is None or len(positions) != len(pairs):
            raise UsageError(f"{text!r} is no stream cut; one looks like app/logs#3@0:120,1:96")
        return cls(match["stream"], int(match["id"]), positions)

    def check(self, stream: StreamInfo) -> None:
        """Check that this is a cut of ``stream``.

        Raises:
            UsageError: it is a cut of another stream.
        """
        if self.stream != stream.name:
            raise UsageError(f"the cut {self} is of another stream than '{stream.name}'")
        if self.stream_id != stream.stream_id:
            raise UsageError(
                f"the cut {self} is of a former stream '{stream.name}', or of another store: the one that is there now "
                f"has number {stream.stream_id}"
            )
