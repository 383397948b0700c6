"""Runs one benchmark or all of them: ``python -m bench.run [NAME] [--quick] [--set name=value …]``.

The last printed line of a benchmark is one JSON object; the exit status is 1 when it missed a target or failed. Of
all benchmarks together the last line is one object too, with the figures of each under its name. Every benchmark of
such a series gets a process of its own, so that none inherits another's JVM, threads or memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bench.harness import DIRECTORY, Options, Result, bench_names, machine, report

STATUS_MISSED = 1
STATUS_USAGE = 2


def run_one(name: str, options: Options) -> int:
    """Run benchmark ``name`` in this process and report it; a failure is reported in the same form."""
    print(f"{name} on {_headline()}", flush=True)
    try:
        result: Result = importlib.import_module(f"bench.{name}").run(options)
    except Exception as error:
        # A broken benchmark must still end with its line, or whoever reads the lines waits for it.
        sentence = f"{type(error).__name__}: {error}"
        print(f"{name} failed: {sentence}", flush=True)
        print(json.dumps({"bench": name, "figures": {}, "targets": {}, "met": False, "error": sentence}), flush=True)
        return STATUS_MISSED
    figures = {"machine": machine()} | dict(result.figures)
    return report(name, Result(figures, result.targets))


def run_all(names: Sequence[str], arguments: Sequence[str]) -> int:
    """Run every benchmark in a process of its own, pass its output on and print the combined line."""
    results: dict[str, dict[str, Any]] = {}
    met = True
    for name in names:
        command = [sys.executable, "-m", "bench.run", name, *arguments]
        last = ""
        with subprocess.Popen(command, cwd=DIRECTORY.parent, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    last = line if line.strip() else last
            except BaseException:
                process.terminate()
                raise
        results[name] = _object_of(last)
        met = met and process.returncode == 0 and bool(results[name].get("met"))
    combined = {
        "bench": "all",
        "figures": {name: result.get("figures", {}) for name, result in results.items()},
        "targets": {name: result.get("targets", {}) for name, result in results.items()},
        "met": met,
    }
    print(json.dumps(combined), flush=True)
    return 0 if met else STATUS_MISSED


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; return the exit status."""
    names = bench_names()
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="run Headgate's benchmarks")
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="short runs, indicative figures")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the benchmark")
    parsed = parser.parse_args(arguments)
    # SIGTERM ends like Ctrl-C does, so that the peers and their JVMs are ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    settings = dict(pair.partition("=")[::2] for pair in parsed.set)
    if parsed.name is None:
        passed_on = [*(["--quick"] if parsed.quick else []), *(f"--set={pair}" for pair in parsed.set)]
        return run_all(names, passed_on)
    if parsed.name not in names:
        known = ", ".join(names) or "none"
        print(f"there is no benchmark {parsed.name!r}; the benchmarks are: {known}", file=sys.stderr)
        return STATUS_USAGE
    return run_one(parsed.name, Options(quick=parsed.quick, settings=settings))


def _headline() -> str:
    here = machine()
    return f"{here['cores']} cores, {here['cpu']}, {here['memory_gib']} GiB, Python {here['python']}"


def _object_of(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
