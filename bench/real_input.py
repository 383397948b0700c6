"""Windows of 5 s over files of bids: Headgate, Structured Streaming, Flink SQL and Polars, in turns on the same files.

Count, sum and maximum of the price per key, to files; all but Polars exactly once. Four files in each of the formats
JSON lines, Parquet, CSV and gzip JSON; a text key of 10,000 values and a whole number of 100,000. ``s`` is measured
from the first record to the end, without the start of Spark and Flink; ``cpu_s`` is the processor time of all processes
of a system in that time, and what ratios come from: on a busy machine, the clock measures the others. Each run is a
process of its own, and its results are compared with those of the other systems, row by row. Settings: ``bids``
(4,000,000), ``turns`` (3), ``formats``, ``keys`` and ``systems`` (separated by commas).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from bench.bid_files import FORMATS, write_bids
from bench.harness import Options, Result, Target, at_least, at_most, median
from bench.peers.measure import NotInstalled, measure_files_flink, run_peer

NAME = "real_input"

KEYS = {"text": "user", "number": "auction"}
PEERS = ("streaming", "flink", "polars-streaming", "polars-in-memory")
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
        expected: dict[str, pl.DataFrame] = {}
        for _ in range(turns):
            for form in formats:
                for key in keys:
                    for system in systems:
                        name, output = f"{form}/{key}/{system}", Path(directory) / "out"
                        one = measure(system, Path(directory) / form, output, KEYS[key])
                        if isinstance(one, NotInstalled):
                            print(f"{name}: {one.reason}", flush=True)
                            continue
                        rows = results(output, KEYS[key])
                        check(name, rows, expected.setdefault(key, rows), is_last_missing=system == "streaming")
                        shutil.rmtree(output)
                        one["load"] = round(os.getloadavg()[0], 1)
                        print(f"{name}: {json.dumps(one)}", flush=True)
                        found.setdefault(name, []).append(one)
    return judged(found)


def measure(system: str, files: Path, output: Path, key: str) -> dict[str, Any] | NotInstalled:
    """Run one system in a process of its own."""
    if system == "flink":
        return measure_files_flink(files, key, output)
    arguments = [str(files), str(output), "--key", key]
    if system == "headgate":
        return run_peer(Path(sys.executable), "bench.headgate_real_input", arguments)
    return run_peer(Path(sys.executable), "bench.peers.real_input", [system, *arguments])


def results(output: Path, key: str) -> pl.DataFrame:
    """Return what a system wrote, in order."""
    inside = ((path, path.relative_to(output).parts) for path in output.rglob("*") if path.is_file())
    files = [path for path, parts in inside if not any(part.startswith((".", "_")) for part in parts)]
    frame = pl.concat(
        pl.read_parquet(file, glob=False, hive_partitioning=False).select(
            pl.col("window_start").dt.cast_time_unit("us").dt.replace_time_zone(None),
            key,
            *(pl.col(name).cast(pl.Int64) for name in ("bids", "total", "highest")),
        )
        for file in files
    )
    return frame.sort("window_start", key)


def check(name: str, found: pl.DataFrame, expected: pl.DataFrame, *, is_last_missing: bool) -> None:
    """Compare results, if need be without the last window.

    Raises:
        RuntimeError: they differ.
    """
    if is_last_missing:
        last = expected["window_start"].max()
        found, expected = (one.filter(pl.col("window_start") != last) for one in (found, expected))
    if not found.equals(expected):
        raise RuntimeError(
            f"{name} has other results: {found.height} rows of {found['bids'].sum()} bids, "
            f"and not {expected.height} of {expected['bids'].sum()}"
        )


def judged(found: dict[str, list[dict[str, Any]]]) -> Result:
    """Return the medians, how they compare, and the targets."""
    figures: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    for name, turns in found.items():
        for figure in ("s", "cpu_s", "load"):
            figures[f"{name}/{figure}"] = round(median([one[figure] for one in turns]), 3)
    for case in dict.fromkeys(name.rpartition("/")[0] for name in found):
        own = figures.get(f"{case}/headgate/cpu_s")
        form, _, key = case.partition("/")
        for peer in PEERS:
            other = figures.get(f"{case}/{peer}/cpu_s")
            if own and other:
                figures[f"{case}/ratio_to_{peer}"] = round(other / own, 2)
        if form in BOUNDS:
            faster, slower = BOUNDS[form]
            targets[f"{case}/ratio_to_streaming"] = at_least(faster)
            targets[f"{case}/ratio_to_polars-streaming"] = at_least(round(1 / slower, 2))
        number = figures.get(f"{form}/number/headgate/cpu_s")
        if key == "text" and own and number:
            figures[f"{form}/text_cost"] = round(own / number, 2)
            targets[f"{form}/text_cost"] = at_most(TEXT_COST_MAX)
    return Result(figures, {name: target for name, target in targets.items() if name in figures})
