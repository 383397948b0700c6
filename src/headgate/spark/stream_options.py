"""Options of ``format("headgate")``, and what they say about a stream.

Counterparts: ``spark.stream_reader``, ``spark.stream_writer``. Source: SP3 of docs/spec/spark-streams.md.
Looks into the store, and changes nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.store.location import store_root
from headgate.store.store import Store
from headgate.store.streams import StreamCut, StreamInfo, no_such_stream

EARLIEST, LATEST = "earliest", "latest"

OWNERS = "spark/"
"""Prefix of the owners of all writes by Spark: queries, and single writes."""

PLACE_COLUMNS = ("_segment", "_position")
"""Where an event is: with ``place=true`` they follow the columns of the stream."""

READING = ("path", "store", "start", "end", "columns", "keys", "place", "rows_per_partition")
STREAMING = ("path", "store", "start", "columns", "place", "rows_per_batch", "holder")
WRITING = ("path", "store", "routing_key", "segments")

OF_SPARK = ("checkpointlocation", "queryname")
"""What Spark hands on beside them."""


def is_spark_owner(key: str) -> bool:
    """Return whether an owner of transactions is a query, or a write, of Spark: then each has the rows of one task."""
    return key.startswith(OWNERS)


class Options:
    """The options of one ``spark.read``, ``readStream``, ``write`` or ``writeStream``."""

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...]) -> None:
        """Check them.

        Raises:
            UsageError: an unknown one, or no stream.
        """
        self._given = {name.lower(): value for name, value in given.items()}
        unknown = sorted(self._given.keys() - set(known) - set(OF_SPARK))
        if unknown or not self._given.get("path"):
            wrong = f"there is no option {unknown[0]} here" if unknown else "the name of a stream is needed"
            raise UsageError(f"format headgate: {wrong}; the options are {', '.join(known)}")
        self.stream = self._given["path"]
        self.root = store_root(self._given.get("store"))

    def text(self, name: str) -> str | None:
        """Return an option as it was given."""
        return self._given.get(name)

    def number(self, name: str) -> int | None:
        """Return an option that is a number of at least 1; None: it was not given.

        Raises:
            UsageError: it is none.
        """
        text = self._given.get(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise UsageError(f"format headgate: {name} must be a number of at least 1, not {text!r}")
        return int(text)

    def is_on(self, name: str) -> bool:
        """Return an option that is true or false.

        Raises:
            UsageError: it is neither.
        """
        text = self._given.get(name, "false").lower()
        if text not in ("true", "false"):
            raise UsageError(f"format headgate: {name} must be true or false, not {text!r}")
        return text == "true"


@dataclass(frozen=True, slots=True)
class StreamLocation:
    """A stream that is there: which store, which stream."""

    root: str
    stream: str

    @property
    def store(self) -> Store:
        """The store, open in this process: driver and workers have its directory, or its URL."""
        return Store.shared(self.root)

    def find(self) -> StreamInfo:
        """Return the stream. A store that is not there is not made.

        Raises:
            UsageError: there is none.
        """
        if not Store.exists(self.root):
            raise no_such_stream(self.stream, self.root, ())
        return self.store.find(self.stream)

    def cut(self, text: str, option: str) -> StreamCut:
        """Return the cut that ``text`` means: earliest, latest, a cut as ``str`` gives it, or a date and time.

        Raises:
            UsageError: it means none, or one of another stream.
        """
        if text == EARLIEST:
            return self.store.head(self.stream)
        if text == LATEST:
            return self.store.tail(self.stream)
        if "#" in text:
            found = StreamCut.parse(text)
            found.check(self.find())
            return found
        try:
            date = dt.datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"format headgate: {option} must be {EARLIEST}, {LATEST}, a stream cut such as app/logs#3@0:120,1:96, "
                f"or a date and time such as 2026-01-31T12:00:00+00:00, not {text!r}"
            ) from None
        return self.store.cut_at(self.stream, date)
