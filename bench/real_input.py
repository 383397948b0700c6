"""Windows of 5 s over files of bids: Headgate, Structured Streaming and Polars, one after another on the same files.

Count, sum and maximum of the price per key, to files; Headgate and Structured Streaming exactly once. Four files in
each of the formats JSON lines, Parquet, CSV and gzip JSON; a text key of 10,000 values and a whole number of 100,000.
``s`` is measured from the first record to the end, without the start of Spark; ``cpu_s`` is the processor time of all
processes of a system in that time. Each run is a process of its own. Settings: ``bids`` (4,000,000), ``turns`` (3),
``formats`` and ``keys`` (separated by commas), ``systems``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.bid_files import FORMATS, write_bids
from bench.harness import Options, Result, Target, at_least, at_most, median
from bench.peers.measure import run_peer

NAME = "real_input"

KEYS = {"text": "user", "number": "auction"}
PEERS = ("streaming", "polars-streaming", "polars-in-memory")
BOUNDS = {"json": (6.0, 2.0), "parquet": (10.0, 3.0)}
"""How many times as fast as Structured Streaming, and at most how many times as long as Polars' streaming engine."""

TEXT_COST_MAX = 1.5


def run(options: Options) -> Result:
    """Measure all systems in turns on every format and key."""
    bids, turns = int(options.number("bids", 4_000_000, quick=400_000)), int(options.number("turns", 3, quick=1))
    formats = options.settings.get("formats", ",".join(FORMATS)).split(",")
    keys = options.settings.get("keys", ",".join(KEYS)).split(",")
    systems = options.settings.get("systems", ",".join(("headgate", *PEERS))).split(",")
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        write_bids(Path(directory), bids, formats)
        for _ in range(turns):
            for form in formats:
                for key in keys:
                    for system in systems:
                        one = measure(system, Path(directory) / form, KEYS[key])
                        print(f"{form}/{key}/{system}: {json.dumps(one)}", flush=True)
                        found.setdefault(f"{form}/{key}/{system}", []).append(one)
    return judged(found)


def measure(system: str, files: Path, key: str) -> dict[str, Any]:
    """Run one system in a process of its own."""
    if system == "headgate":
        return run_peer(Path(sys.executable), "bench.headgate_real_input", [str(files), "--key", key])
    return run_peer(Path(sys.executable), "bench.peers.real_input", [system, str(files), "--key", key])


def judged(found: dict[str, list[dict[str, Any]]]) -> Result:
    """Return the medians, how they compare, and the targets."""
    figures: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    for name, turns in found.items():
        figures[f"{name}/s"] = round(median([one["s"] for one in turns]), 3)
        figures[f"{name}/cpu_s"] = round(median([one["cpu_s"] for one in turns]), 3)
    for case in dict.fromkeys(name.rpartition("/")[0] for name in found):
        own = figures.get(f"{case}/headgate/s")
        form, _, key = case.partition("/")
        for peer in PEERS:
            other = figures.get(f"{case}/{peer}/s")
            if own and other:
                figures[f"{case}/ratio_to_{peer}"] = round(other / own, 2)
        if form in BOUNDS:
            faster, slower = BOUNDS[form]
            targets[f"{case}/ratio_to_streaming"] = at_least(faster)
            targets[f"{case}/ratio_to_polars-streaming"] = at_least(round(1 / slower, 2))
        number = figures.get(f"{form}/number/headgate/s")
        if key == "text" and own and number:
            figures[f"{form}/text_cost"] = round(own / number, 2)
            targets[f"{form}/text_cost"] = at_most(TEXT_COST_MAX)
    return Result(figures, {name: target for name, target in targets.items() if name in figures})
