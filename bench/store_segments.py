"""How much slower a writer is that spreads its events over 100 segments: syncs must not multiply.

The same number of events into streams of 1, 10 and 100 segments, in turns; medians. Settings: ``events``, ``turns``,
``segments`` (a list, the first one is compared with).
"""

from __future__ import annotations

from bench.harness import Options, Result, at_most, median
from bench.stream_events import local_store, write_rate

NAME = "store_segments"

FALL_MAX = 0.1


def run(options: Options) -> Result:
    """Measure each number of segments."""
    rows = int(options.number("events", 20_000_000, quick=1_000_000))
    turns = int(options.number("turns", 7, quick=3))
    counts = options.numbers("segments", [1, 10, 100])
    found: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(turns):
        for count in counts if turn % 2 == 0 else counts[::-1]:
            with local_store(count) as store:
                found[count].append(write_rate(store, rows))
    figures: dict[str, float] = {f"written_per_s_{count}": median(rates) for count, rates in found.items()}
    falls = [1 - last / first for first, last in zip(found[counts[0]], found[counts[-1]], strict=True)]
    figures["fall"] = median(falls)
    return Result(figures | {"falls": falls}, {"fall": at_most(FALL_MAX)})
