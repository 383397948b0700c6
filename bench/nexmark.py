"""The queries of NEXMark side by side: Headgate, Flink SQL and Structured Streaming over the same events.

Two workers on two cores, exactly once with checkpoints each second, results thrown away. All systems read the same
Parquet files; Headgate also makes the same events in memory. Before, each query runs over small files, and its number
of results and their digest must be the same in all systems: no ratio is made of different work. ``events_per_core``
counts the events of all kinds, also those that a query never reads, per second of processor time of all processes of
a system; ratios are of these. The systems run one after another for every few queries.

Settings: ``queries`` (separated by commas; all), ``systems`` (``headgate,flink,streaming``), ``events`` (2,000,000),
``tps`` (their density in event time: 100,000), ``turns`` (2, of which the best counts), ``sql`` (1: Headgate runs the
queries in SQL, too).
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Options, Result, Target, at_least, skipped
from bench.nexmark_files import write_events
from bench.nexmark_texts import FLINK, STREAMING
from bench.peers.install import environment_python, flink_parquet
from bench.peers.measure import NotInstalled, PeerFailedError, flink_is_installed, run_peer
from headgate.nexmark import QUERIES

NAME = "nexmark"

SYSTEMS = ("headgate", "flink", "streaming")
PEERS = SYSTEMS[1:]
CHECK_EVENTS, CHECK_TPS = 10_000, 200
"""50 s of event time: every window closes, most of them more than once."""

PARTS = 8
IN_A_ROW = 4
"""Queries that a system runs before the next one does."""

TIMEOUT_S = 7_200

PER_CORE: Mapping[int, str] = {
    2_000_000: "q0 q1 q2 q14 q21 q22",
    500_000: "q3 q8 q12",
    300_000: "q5 q11 q17 q18",
    100_000: "q4 q7 q9 q19 q20",
}
"""Events per second and core to reach, from memory or from files."""

TO_FLINK, TO_FLINK_MEAN = 3.0, 8.0

Found = Mapping[str, Mapping[str, Any]]
"""What a system says of its queries: results, digest and turns, or an error."""


def run(options: Options) -> Result:
    """Run the chosen queries in all systems that are there."""
    names = [name for name in options.settings.get("queries", ",".join(_in_order())).split(",") if name]
    unknown = [name for name in names if name not in QUERIES]
    if unknown:
        raise ValueError(f"there is no query {unknown[0]!r}; there are {', '.join(_in_order())}")
    systems = options.settings.get("systems", ",".join(SYSTEMS)).split(",")
    events = int(options.number("events", 2_000_000, quick=200_000))
    tps = int(options.number("tps", 100_000, quick=10_000))
    turns, sql = int(options.number("turns", 2, quick=1)), bool(options.number("sql", 0))
    missing = {peer: reason for peer in PEERS for reason in [_what_is_missing(peer, systems)] if reason}
    found: dict[str, dict[str, Any]] = {system: {} for system in systems if system not in missing}
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        files, check = Path(directory, "files"), Path(directory, "check")
        write_events(files, events, tps, PARTS)
        write_events(check, CHECK_EVENTS, CHECK_TPS, PARTS)
        where = ["--files", str(files), "--check-files", str(check), "--turns", str(turns)]
        for start in range(0, len(names), IN_A_ROW):
            some = names[start : start + IN_A_ROW]
            for system, so_far in found.items():
                measured = _measured(system, some, where, events, tps, sql)
                so_far.update(measured)
                print(f"{system}: {json.dumps(measured)}", flush=True)
    return judged(names, events, found, missing)


def _measured(
    system: str, names: Sequence[str], where: Sequence[str], events: int, tps: int, sql: bool
) -> dict[str, Any]:
    """Run some queries in one system, in a process of its own; one that ends without results is their error."""
    try:
        if system == "headgate":
            arguments = [*names, *where, "--events", str(events), "--tps", str(tps), *(["--sql"] if sql else [])]
            return run_peer(Path(sys.executable), "bench.headgate_nexmark", arguments, timeout_seconds=TIMEOUT_S)
        if system == "flink":
            texts = {name: FLINK.get(name, QUERIES[name].sql) for name in names}
            arguments = [json.dumps(texts), *where]
            return run_peer(environment_python(), "bench.peers.nexmark_flink", arguments, timeout_seconds=TIMEOUT_S)
        able = [name for name in names if name in STREAMING]
        if not able:
            return {}
        return run_peer(
            Path(sys.executable), "bench.peers.nexmark_streaming", [*able, *where], timeout_seconds=TIMEOUT_S
        )
    except PeerFailedError as error:
        return {name: {"error": str(error)} for name in names}


def judged(names: Sequence[str], events: int, found: Mapping[str, Found], missing: Mapping[str, str]) -> Result:
    """Return events per second and core, the ratios where results are equal, their geometric means, and targets."""
    figures: dict[str, Any] = {"events": events} | {f"{peer}_missing": reason for peer, reason in missing.items()}
    targets: dict[str, Target] = {}
    ratios: dict[str, list[float]] = {peer: [] for peer in PEERS}
    own = found.get("headgate", {})
    for name in names:
        ours = _best(own.get(name), "turns", events)
        memory = _best(own.get(name), "memory", events)
        figures |= _shown(f"{name}/headgate", own.get(name), ours)
        if memory is not None:
            figures[f"{name}/headgate_memory/events_per_core"] = round(memory)
        figures |= _per_core_of(name, ours, memory)
        for peer in PEERS:
            other = found.get(peer, {}).get(name)
            theirs = _best(other, "turns", events)
            figures |= _shown(f"{name}/{peer}", other, theirs)
            if ours is None or theirs is None or other is None:
                continue
            if any(own[name][what] != other[what] for what in ("results", "digest")):
                figures[f"{name}/{peer}/unequal"] = f"{other['results']} results, Headgate has {own[name]['results']}"
                continue
            figures[f"{name}/ratio_to_{peer}"] = round(ours / theirs, 2)
            ratios[peer].append(ours / theirs)
        for bound, some in PER_CORE.items():
            if name in some.split() and own:
                targets[f"{name}/per_core"] = at_least(bound)
        if "flink" in found or "flink" in missing:
            target = at_least(TO_FLINK)
            targets[f"{name}/ratio_to_flink"] = skipped(target, "not installed") if "flink" in missing else target
    for peer, values in ratios.items():
        if values:
            figures[f"mean_ratio_to_{peer}"] = round(math.exp(sum(map(math.log, values)) / len(values)), 2)
            figures[f"queries_compared_with_{peer}"] = len(values)
    if ratios["flink"]:
        targets["mean_ratio_to_flink"] = at_least(TO_FLINK_MEAN)
    return Result(figures, targets)


def _per_core_of(name: str, *rates: float | None) -> dict[str, int]:
    known = [rate for rate in rates if rate is not None]
    return {f"{name}/per_core": round(max(known))} if known else {}


def _best(found: Mapping[str, Any] | None, turns: str, events: int) -> float | None:
    """Return the events per second of processor time in the best turn."""
    if not found or not found.get(turns):
        return None
    return events / min(float(turn["cpu_s"]) for turn in found[turns])


def _shown(label: str, found: Mapping[str, Any] | None, rate: float | None) -> dict[str, Any]:
    if not found:
        return {}
    if rate is None:
        return {f"{label}/error": str(found.get("error", "nothing was measured"))}
    seconds = min(float(turn["s"]) for turn in found["turns"])
    return {f"{label}/events_per_core": round(rate), f"{label}/s": round(seconds, 2)}


def _what_is_missing(peer: str, systems: Sequence[str]) -> str:
    if peer not in systems:
        return ""
    if peer == "flink" and not flink_is_installed(environment_python()):
        return NotInstalled("Flink SQL is not installed: run `make bench-peers`").reason
    if peer == "flink" and not flink_parquet():
        return NotInstalled("Flink's format Parquet is not installed: run `make bench-peers`, which needs Maven").reason
    return ""


def _in_order() -> list[str]:
    return sorted(QUERIES, key=lambda name: int(name[1:]))
