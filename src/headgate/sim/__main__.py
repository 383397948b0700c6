"""Command line: ``python -m headgate.sim --seeds 5000 --jobs 2``, or ``--seed N --trace`` for one story."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from headgate.sim.coverage_table import LEAST, left_out, measure, share, table, write
from headgate.sim.product.run import Result
from headgate.sim.scenario_table import SCENARIOS, Scenario
from headgate.sim.scenario_table import scenario as find

STORY_LINES = 60
"""Lines of a failing run's story that are printed."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headgate.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="print the whole story of the seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    parser.add_argument("--coverage", action="store_true", help="print what the seeds ran of the product, per file")
    parser.add_argument("--write", type=Path, help="put the sum of that table between its marks on this page")
    parser.add_argument("--every-scenario", action="store_true", help="run so many seeds of each scenario")
    for scenario in SCENARIOS[1:]:
        parser.add_argument(f"--{scenario.name}", action="store_true", help=scenario.about)
    chosen = parser.parse_args(arguments)
    logging.getLogger("headgate").addHandler(logging.NullHandler())  # a seed tells its story elsewhere
    if chosen.coverage:
        found = measure(chosen.first, chosen.seeds, chosen.jobs, [scenario.name for scenario in SCENARIOS[1:]])
        text = table(found, chosen.seeds, len(SCENARIOS) - 1)
        print(text)
        print(left_out())
        if chosen.write is not None:
            write(chosen.write, text)
        if share(found) < LEAST:
            print(f"less than {LEAST:.0%}: something new is run by no seed, or too few seeds were run", file=sys.stderr)
            return 1
        return 0
    scenario = next((one for one in SCENARIOS[1:] if getattr(chosen, one.name.replace("-", "_"))), SCENARIOS[0])
    if chosen.seed is not None:
        return _one(scenario, chosen.seed, is_traced=chosen.trace)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    for each in SCENARIOS if chosen.every_scenario else (scenario,):
        if _many(each, seeds, chosen.jobs, keeps_going=chosen.keep_going):
            return 1
    return 0


def _one(scenario: Scenario, seed: int, *, is_traced: bool) -> int:
    result = scenario.run_seed(seed, is_traced=is_traced)
    if is_traced:
        print("\n".join(result.story))
    print(f"seed {seed}: {result.events_count} events, {result.virtual_ms} virtual ms, digest {result.digest}")
    if result.violation is not None:
        _explain(scenario, result, with_story=not is_traced)
        return 1
    return 0


def _many(scenario: Scenario, seeds: range, jobs: int, *, keeps_going: bool) -> int:
    started = time.monotonic()
    done, events, failed = 0, 0, []
    for result in _results(scenario, seeds, jobs):
        done += 1
        events += result.events_count
        if result.violation is not None:
            failed.append(result.seed)
            _explain(scenario, result, with_story=not keeps_going)
            if not keeps_going:
                break
        if done % 50 == 0 and sys.stderr.isatty():
            seconds = time.monotonic() - started
            print(f"\r{done} of {len(seeds)} seeds, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    if failed:
        print(f"failed seeds: {' '.join(map(str, failed))}")
    seconds = time.monotonic() - started
    print(
        f"{done} seeds of {scenario.name or 'the product'}, {len(failed)} violations, {events} events, {seconds:.0f} s"
    )
    return 1 if failed else 0


def _results(scenario: Scenario, seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    gc.freeze()  # a seed makes much garbage in no circle; to look for circles so rarely takes a twentieth less time
    gc.set_threshold(50_000, 20, 100)
    if jobs <= 1:
        yield from map(scenario.run_seed, seeds)
        return
    with Pool(jobs) as pool:
        yield from pool.imap(partial(_run_seed, scenario.name), seeds, chunksize=4)


def _run_seed(name: str, seed: int) -> Result:
    """Run a seed in another process: it finds the scenario by its name, because kinds made of two have no module."""
    return find(name).run_seed(seed)


def _explain(scenario: Scenario, result: Result, *, with_story: bool) -> None:
    print(f"\nseed {result.seed} violates {result.violation}")
    option = f"--{scenario.name} " if scenario.name else ""
    print(f"repeat it: python -m headgate.sim {option}--seed {result.seed} --trace")
    if with_story:
        print("\n".join(result.story[-STORY_LINES:]))


if __name__ == "__main__":
    sys.exit(main())
