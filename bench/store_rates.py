"""Events of 100 bytes per second into the stream store, and out of it: one writer, one reader, files and SQLite.

Every chunk of up to 32 MiB is synced before it is visible. In turns: a new stream is written, then read twice; the
second reading is judged, since the first one may find files that are not in memory. Settings: ``events``, ``turns``,
``segments``.
"""

from __future__ import annotations

from bench.harness import Options, Result, at_least, median
from bench.stream_events import local_store, read_rate, write_rate

NAME = "store_rates"

WRITTEN_MIN, READ_MIN = 4_000_000, 20_000_000


def run(options: Options) -> Result:
    """Measure both."""
    rows = int(options.number("events", 20_000_000, quick=1_000_000))
    turns, segments = int(options.number("turns", 5, quick=3)), int(options.number("segments", 4))
    written, read = [], []
    for _ in range(turns):
        with local_store(segments) as store:
            written.append(write_rate(store, rows))
            read_rate(store)
            read.append(read_rate(store))
    figures = {"written_per_s": median(written), "read_per_s": median(read), "written": written, "read": read}
    return Result(figures, {"written_per_s": at_least(WRITTEN_MIN), "read_per_s": at_least(READ_MIN)})
