"""The windowed count side by side: Headgate, Structured Streaming and Flink SQL in one run on one machine.

Generated events (key, value, timestamp) → hash shuffle → 5 s tumbling count and sum per key → discarded, two workers
on two cores, exactly-once checkpoints every second on disk, with 1,000 and with 100,000 keys. The peers' half is
``bench/peers/``, Headgate's is ``bench/headgate_windowed.py``; this module orders the runs and compares.
Settings: ``keys`` (list), ``seconds`` (per run), ``pairs`` (of runs with checkpoints off and on),
``paced`` (runs at half of the rate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness import Options, Result, Target, at_least, at_most, median, skipped, spread
from bench.peers.measure import NotInstalled, measure_flink, measure_structured_streaming
from bench.peers.structured_streaming import BATCH_ROWS, BATCH_ROWS_QUICK

NAME = "windowed_count"

KEYS = (1_000, 100_000)
CHECKPOINT_INTERVAL_MS = 1_000
SLOWDOWN_MAX = 0.05
LATENCY_P99_MS_MAX = 50.0
ALIGNMENT_MS_MAX = 5.0

Measure = Callable[..., dict[str, Any]]
"""``measure_headgate(keys, seconds, checkpoint_interval_ms, rate=None)``, see ``bench/headgate_windowed.py``."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Ratios to reach for one number of keys; None: no target."""

    streaming_best: float
    streaming_best_1s: float | None
    flink: float


GOALS: Mapping[int, Goals] = {
    1_000: Goals(streaming_best=3.0, streaming_best_1s=None, flink=15.0),
    100_000: Goals(streaming_best=2.0, streaming_best_1s=5.0, flink=20.0),
}


def run(options: Options) -> Result:
    """Measure every number of keys and judge the targets of those that have some."""
    # Imported here, not above: comparing figures must be testable without a runtime.
    from bench.headgate_windowed import measure_headgate

    figures: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    for keys in options.numbers("keys", KEYS):
        headgate = measure_headgate_runs(measure_headgate, keys, options)
        streaming = measure_structured_streaming(
            keys,
            seconds=options.number("seconds", 8, quick=4),
            batch_rows=BATCH_ROWS_QUICK if options.quick else BATCH_ROWS,
        )
        flink = measure_flink(keys, seconds=options.number("seconds", 15, quick=6))
        compared = compare(keys, headgate, streaming, flink)
        figures |= compared.figures
        targets |= compared.targets
    return Result(figures, targets)


def measure_headgate_runs(measure: Measure, keys: int, options: Options) -> dict[str, Any]:
    """Measure Headgate with checkpoints off and on in turns, then its latency at half of the rate, three times.

    In turns (A B A B …), because a machine that grows slower meanwhile must not count against one of the two.
    """
    seconds = options.number("seconds", 10, quick=5)
    off: list[dict[str, Any]] = []
    on: list[dict[str, Any]] = []
    for _ in range(int(options.number("pairs", 5, quick=2))):
        off.append(measure(keys, seconds, None))
        on.append(measure(keys, seconds, CHECKPOINT_INTERVAL_MS))
    rate = median(_column(on, "events_per_s"))
    paced = [
        measure(keys, seconds, CHECKPOINT_INTERVAL_MS, rate=int(rate / 2))
        for _ in range(int(options.number("paced", 3, quick=1)))
    ]
    return {
        "events_per_s": rate,
        "events_per_s_no_checkpoints": median(_column(off, "events_per_s")),
        "events_per_s_spread": spread(_column(on, "events_per_s")),
        "alignment_ms_median": median(_column(on, "alignment_ms_median")),
        "latency_ms_p99": median(_column(paced, "latency_ms_p99")),
        "events_per_s_at_half": median(_column(paced, "events_per_s")),
        "runs": on,
        "runs_no_checkpoints": off,
    }


def compare(
    keys: int, headgate: Mapping[str, Any], streaming: Mapping[str, Any], flink: Mapping[str, Any] | NotInstalled
) -> Result:
    """Return the ratios and targets for ``keys`` keys, every figure with the number of keys in its name."""
    rate, suffix = float(headgate["events_per_s"]), f"_{keys}_keys"
    figures: dict[str, Any] = {
        f"headgate{suffix}": dict(headgate),
        f"structured_streaming{suffix}": dict(streaming),
        f"ratio_streaming_best{suffix}": _ratio(rate, streaming["events_per_s_best"]),
        f"ratio_streaming_best_1s{suffix}": _ratio(rate, streaming["events_per_s_best_1s"]),
        f"slowdown_by_checkpoints{suffix}": 1 - rate / float(headgate["events_per_s_no_checkpoints"]),
        f"latency_ms_p99{suffix}": headgate["latency_ms_p99"],
        f"alignment_ms_median{suffix}": headgate["alignment_ms_median"],
    }
    targets: dict[str, Target] = {
        f"slowdown_by_checkpoints{suffix}": at_most(SLOWDOWN_MAX),
        f"latency_ms_p99{suffix}": at_most(LATENCY_P99_MS_MAX),
        f"alignment_ms_median{suffix}": at_most(ALIGNMENT_MS_MAX),
    }
    installed = not isinstance(flink, NotInstalled)
    figures[f"flink{suffix}"] = dict(flink) if not isinstance(flink, NotInstalled) else flink.reason
    figures[f"ratio_flink{suffix}"] = (
        _ratio(rate, flink["events_per_s"]) if not isinstance(flink, NotInstalled) else None
    )
    if keys in GOALS:
        goals = GOALS[keys]
        targets[f"ratio_streaming_best{suffix}"] = at_least(goals.streaming_best)
        if goals.streaming_best_1s is not None:
            targets[f"ratio_streaming_best_1s{suffix}"] = _one_second_target(goals.streaming_best_1s, streaming)
        target = at_least(goals.flink)
        targets[f"ratio_flink{suffix}"] = target if installed else skipped(target, "not installed")
    return Result(figures, targets)


def _one_second_target(bound: float, streaming: Mapping[str, Any]) -> Target:
    target = at_least(bound)
    if streaming["events_per_s_best_1s"] is None:
        return skipped(target, "no micro-batch size of the sweep stayed within a second")
    return target


def _ratio(rate: float, peer: float | None) -> float | None:
    return rate / float(peer) if peer else None


def _column(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(run[name]) for run in runs]
