"""What checkpoints cost: a pipeline of three shuffles without them, and with them at four intervals, in both modes.

The shape is that of the ABS paper's evaluation (Carbone et al. 2015, section 6): six operators, three full shuffles,
per-key sums and the sources' offsets as state. One start of the pipeline for each mode; in it windows without and with
checkpoints in turns, which are asked for (``bench/on_demand.py``). Compared are the windows of a pair.
Settings: ``pairs``, ``keys``, ``intervals`` (some of the four), ``scale`` (of the length of windows), ``warm_up`` (s).
``python -m bench.plot`` draws what it prints.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from bench.harness import Options, Result, Target, at_least, at_most, median, skipped, spread
from bench.on_demand import Window, measure
from bench.pairs import Overhead, Pair, with_first
from bench.running import records_out, running, wait_for

NAME = "checkpoint_overhead"

MODES = ("exactly_once", "at_least_once")
OVERHEAD_MAX: Mapping[int, float] = {10_000: 0.02, 3_000: 0.03, 1_000: 0.05, 250: 0.15}
"""By interval in milliseconds."""

WINDOW_S: Mapping[int, float] = {10_000: 20.0, 3_000: 9.0, 1_000: 6.0, 250: 5.0}
"""Whole intervals, so that each window has its share of checkpoints."""
WINDOW_S_QUICK: Mapping[int, float] = {3_000: 3.0, 1_000: 2.0, 250: 2.0}

COMPLETED_SHARE_MIN = 0.8
"""Of the checkpoints that were asked for: with fewer, the cost is that of a longer interval."""

WARM_UP_S = 5.0
PAIRS = 7
SOURCE = "source"


@dataclass(frozen=True, slots=True)
class Compared:
    """One window without checkpoints and one with them, beside each other in time."""

    without: Window
    with_: Window


Measured = Mapping[int, Sequence[Compared]]
"""By interval."""


def run(options: Options) -> Result:
    """Measure both modes, judge every interval."""
    pairs, keys = int(options.number("pairs", PAIRS, quick=2)), int(options.number("keys", 100_000))
    scale, warm_up_s = options.number("scale", 1), options.number("warm_up", WARM_UP_S, quick=2)
    windows = WINDOW_S_QUICK if options.quick else WINDOW_S
    intervals = options.numbers("intervals", list(windows))
    seconds = {interval_ms: length_s * scale for interval_ms, length_s in windows.items() if interval_ms in intervals}
    return judged({mode: compare(mode, pairs, keys, seconds, warm_up_s) for mode in MODES})


def compare(mode: str, pairs: int, keys: int, seconds: Mapping[int, float], warm_up_s: float) -> Measured:
    """Run the pipeline in ``mode`` once; return the pairs of windows of each interval."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    found: dict[int, list[Compared]] = {interval_ms: [] for interval_ms in seconds}
    try:
        with running(pipeline(directory, mode, keys).definition()) as handle:
            wait_for(handle, lambda reports: all(records_out(r, SOURCE) > 0 for r in reports.values()), "deliver")
            handle.wait(warm_up_s)
            for number in range(pairs):
                for interval_ms, length_s in seconds.items():
                    order = (interval_ms, None) if with_first(number) else (None, interval_ms)
                    windows = {interval: measure(handle, SOURCE, length_s, interval) for interval in order}
                    compared = Compared(windows[None], windows[interval_ms])
                    found[interval_ms].append(compared)
                    print(_sentence(mode, number, interval_ms, compared), flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def judged(measured: Mapping[str, Measured]) -> Result:
    """Return the overhead of every mode and interval, and the targets of those that were measured."""
    figures: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    measurements: list[dict[str, Any]] = []
    for mode, by_interval in measured.items():
        for interval_ms, bound in OVERHEAD_MAX.items():
            name, target = f"overhead_{mode}_{interval_ms}ms", at_most(bound)
            targets[name] = target if interval_ms in by_interval else skipped(target, "not in this run")
            if interval_ms in by_interval:
                told, completed = _told(by_interval[interval_ms]), f"completed_{mode}_{interval_ms}ms"
                figures |= {name: told["overhead"]["median"], f"{name}_quartiles": _quartiles(told["overhead"])}
                figures[completed] = told["checkpoints"] / max(told["checkpoints_wanted"], 1)
                targets[completed] = at_least(COMPLETED_SHARE_MIN)
                measurements.append({"mode": mode, "interval_ms": interval_ms, "at_most": bound, **told})
    return Result(figures | {"measurements": measurements}, targets)


def _told(found: Sequence[Compared]) -> dict[str, Any]:
    without = [compared.without.events_per_s for compared in found]
    return {
        "overhead": asdict(_overhead(found, "events_per_s")),
        "overhead_cpu": asdict(_overhead(found, "events_per_cpu_s")),
        "events_per_s_without": median(without),
        "events_per_s_without_spread": spread(without),
        "checkpoints": sum(compared.with_.completed for compared in found),
        "checkpoints_wanted": sum(compared.with_.wanted for compared in found),
        "checkpoint_ms_median": median([compared.with_.checkpoint_ms for compared in found]),
        "pairs": [asdict(compared) for compared in found],
    }


def _quartiles(overhead: Mapping[str, float]) -> str:
    return f"{overhead['low']:.1%} to {overhead['high']:.1%}"


def _overhead(found: Sequence[Compared], rate: str) -> Overhead:
    return Overhead.of([Pair(getattr(c.without, rate), getattr(c.with_, rate)) for c in found])


def _sentence(mode: str, number: int, interval_ms: int, compared: Compared) -> str:
    without, with_ = compared.without, compared.with_
    return (
        f"{mode}, {interval_ms} ms, pair {number + 1}: {without.events_per_s / 1e6:.2f} M/s without, "
        f"{with_.events_per_s / 1e6:.2f} M/s with {with_.completed} of {with_.wanted} checkpoints "
        f"({with_.checkpoint_ms:.0f} ms each)"
    )


# -- the pipeline ---------------------------------------------------------------------------------------------------


class Totals(hg.BatchProcessFunction):
    """Adds to a sum for each key, and passes every record on with the sum."""

    schema = {"a": pa.int64(), "b": pa.int64(), "value": pa.int64(), "total": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare the sum."""
        self.total = state.value("total", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Add the batch."""
        self.total.update(batch["value"], "add")
        return batch.with_columns(total=self.total.get())


def pipeline(directory: str, mode: str, keys: int) -> hg.Pipeline:
    """Return source ⇉ step ⇉ sums by ``a`` ⇉ sums by ``b`` → step → sink, every ⇉ a full shuffle."""
    checkpointing = hg.Checkpointing(interval=None, dir=directory, mode=mode)
    p = hg.Pipeline("checkpoint-overhead", parallelism=2, checkpointing=checkpointing)
    columns = {"a": hg.Uniform(0, keys), "b": hg.Uniform(0, keys), "value": hg.Uniform(0, 1_000)}
    read = p.source(hg.Generator(columns=columns, timestamp=None), name=SOURCE)
    step = read.rebalance().with_columns(total=pl.lit(0, pl.Int64), name="step")
    by_a = step.key_by("a").process(Totals(), name="sums-by-a")
    by_b = by_a.key_by("b").process(Totals(), name="sums-by-b")
    by_b.filter(pl.col("total") >= 0, name="last-step").sink(hg.Discard(), name="sink")
    return p
