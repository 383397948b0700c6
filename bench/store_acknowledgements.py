"""How long an append waits until it is durable, at 50,000 events per second.

Every millisecond an append of as many events as are due, by a writer with its default linger; the clock runs from the
call of ``append`` to the completion of its future. Judged is the appends' 95th percentile. Settings: ``seconds``,
``rate``.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from bench.harness import Options, Result, at_least, at_most, percentile
from bench.stream_events import STREAM, events, local_store
from headgate.store.store import Store

NAME = "store_acknowledgements"

P95_MS_MAX = 10.0
REACHED_MIN = 0.98
WARM_S = 1.0
PAUSE_S = 0.001


def run(options: Options) -> Result:
    """Measure on files and SQLite."""
    with local_store() as store:
        found = acknowledged(store, options.number("seconds", 60, quick=5), options.number("rate", 50_000))
    return Result(found, {"p95_ms": at_most(P95_MS_MAX), "rate_reached": at_least(REACHED_MIN)})


def _noted(waits_ms: list[float], asked: float, _: object) -> None:
    waits_ms.append(1e3 * (time.perf_counter() - asked))


def acknowledged(store: Store, seconds: float, rate: float, name: str = STREAM) -> dict[str, Any]:
    """Return how long appends took, and which share of the rate was reached."""
    some = events()
    waits_ms: list[float] = []
    with store.writer(name) as writer:
        begun, sent = time.perf_counter(), 0
        while (now := time.perf_counter() - begun) < seconds:
            due = min(int(now * rate) - sent, some.num_rows)
            if due > 0:
                asked, is_warm = time.perf_counter(), now > WARM_S
                done = writer.append(some.slice(0, due))
                if is_warm:
                    done.add_done_callback(partial(_noted, waits_ms, asked))
                sent += due
            time.sleep(PAUSE_S)
        took = time.perf_counter() - begun
    shares = {f"p{share:g}_ms": percentile(waits_ms, share / 100) for share in (50, 95, 99)}
    return {**shares, "max_ms": max(waits_ms), "appends": len(waits_ms), "rate_reached": sent / took / rate}
