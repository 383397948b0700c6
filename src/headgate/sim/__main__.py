"""Command line of the simulator: ``python -m headgate.sim --seeds 5000``, ``--seed N --trace``, ``mutants``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import Pool

from headgate.sim.marks import Mark
from headgate.sim.run import Result, has_loops, run_seed

STORY_LINES = 60
"""Lines of a failing run's story that are printed."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headgate.sim", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("seeds", "mutants", "cover"), default="seeds")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="print the whole story of the seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--loops", dest="loops", action="store_true", default=None, help="only graphs with loops")
    shape.add_argument("--no-loops", dest="loops", action="store_false", help="only graphs without")
    parser.add_argument("--marks", action="store_true", help="print how many seeds reached each mark")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    chosen = parser.parse_args(arguments)
    if chosen.what == "mutants":
        from headgate.sim.mutants import print_table

        return print_table()
    if chosen.seed is not None:
        return _one(chosen.seed, chosen.loops, is_traced=chosen.trace)
    if chosen.what == "cover":
        return _cover(range(chosen.first, chosen.first + chosen.seeds), chosen.loops, chosen.jobs)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    return _many(seeds, chosen.loops, chosen.jobs, shows_marks=chosen.marks, keeps_going=chosen.keep_going)


def _one(seed: int, loops: bool | None, *, is_traced: bool) -> int:
    result = run_seed(seed, loops=loops, is_traced=is_traced)
    if is_traced:
        print("\n".join(result.story))
    print(f"seed {seed}: {result.events_count} events, {result.virtual_ms} virtual ms, digest {result.digest}")
    if result.violation is not None:
        _explain(result, with_story=not is_traced)
        return 1
    return 0


def _many(seeds: range, loops: bool | None, jobs: int, *, shows_marks: bool, keeps_going: bool) -> int:
    started, events, slowest = time.monotonic(), 0, (0.0, 0)
    reached: Counter[Mark] = Counter()
    failed: list[int] = []
    done = 0
    before = started
    for result in _results(seeds, loops, jobs):
        done += 1
        now = time.monotonic()
        slowest = max(slowest, (now - before, result.seed))
        before = now
        events += result.events_count
        reached.update(result.marks.keys())
        if result.violation is not None:
            failed.append(result.seed)
            _explain(result, with_story=not keeps_going)
            if not keeps_going:
                break
        if done % 100 == 0 and sys.stderr.isatty():
            print(f"\r{done} of {len(seeds)} seeds, {now - started:.0f} s", end="", file=sys.stderr, flush=True)
    if shows_marks:
        for mark in Mark:
            print(f"{reached[mark]:6d}  {mark.name}: {mark.value}")
    seconds = time.monotonic() - started
    if failed:
        print(f"failed seeds: {' '.join(map(str, failed))}")
    print(
        f"{done} seeds, {len(failed)} violations, {events} events, {len(reached)} of {len(Mark)} marks reached, "
        f"{seconds:.0f} s, slowest seed {slowest[1]}"
    )
    return 1 if failed else 0


def _cover(seeds: range, loops: bool | None, jobs: int) -> int:
    """Print few seeds that together reach every mark: the list for tests/sim/test_runs.py."""
    reached = {result.seed: set(result.marks) for result in _results(seeds, loops, jobs)}
    missing, chosen = set(Mark), []
    while missing and reached:
        best = max(reached, key=lambda seed: (len(reached[seed] & missing), -seed))
        if not reached[best] & missing:
            break
        chosen.append(best)
        missing -= reached[best]
    print(f"seeds {chosen}, never reached: {sorted(mark.name for mark in missing)}")
    return 1 if missing else 0


def _results(seeds: Iterable[int], loops: bool | None, jobs: int) -> Iterator[Result]:
    run = partial(run_seed, loops=loops)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with Pool(jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=8)


def _explain(result: Result, *, with_story: bool) -> None:
    print(f"\nseed {result.seed} violates {result.violation}")
    shape = "" if result.loops == has_loops(result.seed) else " --loops" if result.loops else " --no-loops"
    print(f"repeat it: python -m headgate.sim --seed {result.seed}{shape} --trace")
    if with_story:
        print("\n".join(result.story[-STORY_LINES:]))


if __name__ == "__main__":
    sys.exit(main())
