"""A stream that is written and scaled all the time, for tests of pipelines between streams."""

from __future__ import annotations

import datetime as dt
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from headgate.errors import UsageError
from headgate.store.store import Store

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64()), ("at", pa.timestamp("ms"))])
KEYS = 16


class Traffic:
    """Appends rounds of one event per key, and scales streams between them."""

    def __init__(self, store: Store, *streams: str) -> None:
        self._store, self._streams = store, streams
        self._rng = random.Random(7)
        self.rounds_count = self.scaled_count = 0
        self.at_work = threading.Lock()
        """Whoever holds it keeps it from appending: an append that a crash of a server meets may be there or not."""

    def append(self) -> None:
        number = self.rounds_count
        at = dt.datetime(2024, 1, 1) + dt.timedelta(milliseconds=100 * number)
        rows = [{"key": f"k{key}", "value": number, "at": at} for key in range(KEYS)]
        with self._store.writer("in") as writer:
            writer.append(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        self.rounds_count += 1

    def scale(self) -> None:
        there = {info.name for info in self._store.list_streams()}
        name = self._rng.choice([name for name in self._streams if name in there])
        present = [segment.segment_id for segment in self._store.layout(name).present]
        at = self._rng.randrange(len(present))
        try:
            if len(present) < 3 or (len(present) < 5 and self._rng.random() < 0.5):
                self._store.split(name, present[at])
            else:
                self._store.merge(name, present[max(0, at - 1) : at + 1] if at else present[:2])
        except UsageError:  # a commit has opened others meanwhile (S75)
            return
        self.scaled_count += 1


@contextmanager
def flowing(
    store: Store,
    is_over: threading.Event,
    *streams: str,
    rounds: int = 5,
    most: int = 1_000_000,
    pause_s: float = 0.005,
) -> Iterator[Traffic]:
    """Append, and scale each time after so many rounds, at most so often, until it is over; then seal the input."""

    with Store.open(store.root) as own:
        traffic = Traffic(own, *streams)

        def flow() -> None:
            while not is_over.wait(pause_s):  # the pace: not a wait for anything
                with traffic.at_work:
                    traffic.append()
                    if traffic.rounds_count % rounds == 0 and traffic.scaled_count < most:
                        traffic.scale()
            own.seal("in")

        thread = threading.Thread(target=flow)
        thread.start()
        try:
            yield traffic
        finally:
            is_over.set()
            thread.join()


def rows_of(store: Store, stream: str) -> list[dict[str, object]]:
    """Everything in a stream: what follows a segment has a higher number."""
    found = []
    for segment in range(len(store.describe(stream).ends)):
        reader = store.reader(stream, segment)
        while (batch := reader.read()) is not None:
            found += batch.to_pylist()
    return found


def per_key(store: Store, stream: str = "out") -> dict[str, list[int]]:
    """The numbers of each key's events, in the order in which they are read."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows_of(store, stream):
        found[str(row["key"])].append(int(str(row["value"])))
    return dict(found)


def all_rounds(traffic: Traffic) -> dict[str, list[int]]:
    """What ``per_key`` must find when each event went through once, in order."""
    return {f"k{key}": list(range(traffic.rounds_count)) for key in range(KEYS)}
