"""From the creation of a record until a committed reader sees it, and the shortest interval that is kept up with.

Generated records at a limited rate → shuffle → stream store, two workers, exactly once. A reader in this process looks
at every segment all the time and sees committed records only; it compares its clock with the time of creation that each
record carries (both are this machine's). One start of the pipeline; checkpoints are asked for at one interval after
the other (``bench/on_demand.py``). An interval is kept up with when nearly every checkpoint that was asked for was one
of its own, the source was not slowed down, and records became visible as soon as with the longest one.
Settings: ``seconds`` (at the first interval; half of it at each of the others), ``rate``, ``intervals_ms`` (list).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
from bench.harness import Options, Result, at_most
from bench.on_demand import Window, measure
from bench.running import records_out, running, wait_for
from headgate.store.reader import SegmentReader
from headgate.store.store import Store

NAME = "commit_latency"

INTERVALS_MS = (250, 100, 50, 40, 30, 20)
INTERVALS_MS_QUICK = (250, 50, 20)
P99_MS_MAX = 600.0
RATE = 20_000

COMPLETED_SHARE_MIN = 0.95
RATE_SHARE_MIN = 0.98

WARM_UP_S = 5.0
LOOK_S = 0.002
STREAM, SOURCE = "bench/visible", "source"


def run(options: Options) -> Result:
    """Measure every interval; judge the first one."""
    seconds, rate = options.number("seconds", 30, quick=5), options.number("rate", RATE)
    intervals_ms = options.numbers("intervals_ms", INTERVALS_MS_QUICK if options.quick else INTERVALS_MS)
    return judged(measure_all(seconds, rate, intervals_ms), rate)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured at one interval."""

    window: Window
    latencies_ms: np.ndarray[Any, np.dtype[np.float64]]
    """Of every record that became visible meanwhile."""

    def quantile_ms(self, share: float) -> float:
        """Return the latency that ``share`` of the records did not exceed; not a number without records."""
        return float(np.quantile(self.latencies_ms, share)) if len(self.latencies_ms) else float("nan")

    def keeps_up(self, rate: float) -> bool:
        """Whether the pipeline kept up with ``rate`` records and the checkpoints per second."""
        window = self.window
        return (
            window.completed >= COMPLETED_SHARE_MIN * window.wanted
            and window.events_per_s >= RATE_SHARE_MIN * rate
            and self.quantile_ms(0.99) <= P99_MS_MAX
        )


def judged(seen: Mapping[int, Seen], rate: float) -> Result:
    """Return the latencies at the longest interval, and the shortest one that is kept up with."""
    longest = max(seen)
    name = f"visible_ms_p99_{longest}ms"
    figures: dict[str, Any] = {
        f"visible_ms_p50_{longest}ms": seen[longest].quantile_ms(0.5),
        name: seen[longest].quantile_ms(0.99),
        f"visible_ms_max_{longest}ms": seen[longest].quantile_ms(1.0),
        "shortest_interval_ms": shortest(seen, rate),
        "by_interval_ms": {str(interval_ms): _told(found, rate) for interval_ms, found in seen.items()},
    }
    return Result(figures, {name: at_most(P99_MS_MAX)})


def shortest(seen: Mapping[int, Seen], rate: float) -> int | None:
    """Return the least interval that is kept up with, and every longer one, too; None if not even the longest is."""
    found = None
    for interval_ms in sorted(seen, reverse=True):
        if not seen[interval_ms].keeps_up(rate):
            break
        found = interval_ms
    return found


def _told(seen: Seen, rate: float) -> dict[str, Any]:
    quantiles = {f"visible_ms_p{share:g}": seen.quantile_ms(share / 100) for share in (50, 99, 99.9)}
    return {"keeps_up": seen.keeps_up(rate), **quantiles, **asdict(seen.window), "records": len(seen.latencies_ms)}


def measure_all(seconds: float, rate: float, intervals_ms: Sequence[int]) -> dict[int, Seen]:
    """Run the pipeline once; return what was measured at each interval."""
    directory = Path(tempfile.mkdtemp(prefix="headgate-bench-"))
    found: dict[int, Seen] = {}
    try:
        with running(pipeline(directory, rate).definition()) as handle, CommittedReader(directory / "store") as reader:
            wait_for(handle, lambda reports: all(records_out(r, SOURCE) > 0 for r in reports.values()), "deliver")
            measure(handle, SOURCE, WARM_UP_S, intervals_ms[0])
            for interval_ms in intervals_ms:
                length_s = seconds if interval_ms == intervals_ms[0] else seconds / 2
                window = measure(handle, SOURCE, length_s, interval_ms, on_begin=reader.take)
                found[interval_ms] = Seen(window, reader.take())
                print(f"{interval_ms} ms: {_told(found[interval_ms], rate)}", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def pipeline(directory: Path, rate: float) -> hg.Pipeline:
    """Return the pipeline under test; ``rate`` is that of both workers together."""
    checkpointing = hg.Checkpointing(interval=None, dir=directory / "checkpoints")
    p = hg.Pipeline("commit-latency", parallelism=2, checkpointing=checkpointing)
    columns = {"key": hg.Uniform(0, 1_000), "value": hg.Uniform(0, 1_000)}
    source = hg.Generator(columns=columns, rows_per_second=rate, time="processing")
    records = p.source(source, name=SOURCE).rebalance()
    records.sink(hg.StreamSink(STREAM, store=str(directory / "store"), segments=2), name="sink")
    return p


class CommittedReader:
    """Reads the stream in a thread of its own, and notes how old each record is when it can be read."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stop = threading.Event()
        self._found: deque[np.ndarray[Any, np.dtype[np.float64]]] = deque()  # one thread appends, another takes
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench-reader", daemon=True)

    def __enter__(self) -> CommittedReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the latencies in milliseconds of what became visible since the last call.

        Raises:
            RuntimeError: the reader failed.
        """
        if self._error is not None:
            raise RuntimeError("the reader of the stream failed") from self._error
        found = [self._found.popleft() for _ in range(len(self._found))]
        return np.concatenate(found) if found else np.zeros(0)

    def _run(self) -> None:
        try:
            with Store.open(str(self._root)) as store:
                readers = [store.reader(STREAM, segment) for segment in range(store.describe(STREAM).segments_count)]
                while not self._stop.wait(LOOK_S):
                    for reader in readers:
                        self._read(reader)
        except BaseException as error:
            self._error = error

    def _read(self, reader: SegmentReader) -> None:
        while (batch := reader.read()) is not None:
            self._found.append(latencies_ms(batch, time.time_ns() // 1_000))  # noqa: TID251 - records carry dates


def latencies_ms(batch: pa.RecordBatch, now_us: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return how old the records of ``batch`` are."""
    return (now_us - np.asarray(batch.column("ts").cast(pa.int64()))) / 1_000
