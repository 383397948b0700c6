"""Command line: ``python -m headgate.sim --seeds 5000 --jobs 2``, or ``--seed N --trace`` for one story."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path

from headgate.sim.coverage_table import LEAST, left_out, measure, share, table, write
from headgate.sim.kinds import (
    asking,
    cancelling,
    changing,
    chunks,
    custom,
    expiring,
    followed,
    induced,
    listening,
    mixed,
    modes,
    overtaking,
    resetting,
    rocks,
    savepoints,
    sided,
    standing_by,
    timed,
)
from headgate.sim.product.run import Result, run_seed
from headgate.sim.streams import afar, following, grouped, groups, sharing, streams

KINDS: dict[str, Callable[..., Result]] = {
    "streams": streams.run_seed,
    "modes": modes.run_seed,
    "induced": induced.run_seed,
    "mixed": mixed.run_seed,
    "overtaking": overtaking.run_seed,
    "savepoints": savepoints.run_seed,
    "changing": changing.run_seed,
    "asking": asking.run_seed,
    "rocksdb": rocks.run_seed,
    "chunks": chunks.run_seed,
    "cancelling": cancelling.run_seed,
    "resets": resetting.run_seed,
    "timers": timed.run_seed,
    "ttl": expiring.run_seed,
    "custom": custom.run_seed,
    "followed": followed.run_seed,
    "standby": standing_by.run_seed,
    "listeners": listening.run_seed,
    "broadcast": sided.run_seed,
    "groups": groups.run_seed,
    "sharing": sharing.run_seed,
    "grouped": grouped.run_seed,
    "following": following.run_seed,
    "afar": afar.run_seed,
}
"""Runs of another kind, by their option."""

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
    parser.add_argument("--write", type=Path, help="put that table between its marks on this page")
    parser.add_argument("--streams", action="store_true", help="pipelines between streams of the store")
    parser.add_argument("--modes", action="store_true", help="pipelines that count at least or at most once")
    parser.add_argument("--induced", action="store_true", help="pipelines whose sources set their own barriers")
    parser.add_argument("--mixed", action="store_true", help="such sources in other guarantees and beside savepoints")
    parser.add_argument("--overtaking", action="store_true", help="pipelines whose barriers overtake what waits")
    parser.add_argument("--savepoints", action="store_true", help="pipelines that are moved with savepoints")
    parser.add_argument("--changing", action="store_true", help="pipelines that are another one at the next start")
    parser.add_argument("--asking", action="store_true", help="pipelines whose users ask for checkpoints")
    parser.add_argument("--rocksdb", action="store_true", help="pipelines whose state is in RocksDB")
    parser.add_argument("--chunks", action="store_true", help="pipelines whose checkpoints refer to chunks of state")
    parser.add_argument("--cancelling", action="store_true", help="pipelines that do not retain their checkpoints")
    parser.add_argument("--resets", action="store_true", help="pipelines whose users have them start over")
    parser.add_argument("--timers", action="store_true", help="pipelines whose functions have timers")
    parser.add_argument("--ttl", action="store_true", help="pipelines whose functions have state that expires")
    parser.add_argument("--custom", action="store_true", help="pipelines between sources and sinks that users write")
    parser.add_argument("--followed", action="store_true", help="pipelines that follow files which are rotated")
    parser.add_argument("--standby", action="store_true", help="pipelines with keepers and standbys")
    parser.add_argument("--listeners", action="store_true", help="listeners that are told twice and out of order")
    parser.add_argument("--broadcast", action="store_true", help="pipelines with a broadcast side")
    parser.add_argument("--groups", action="store_true", help="readers that share streams as a group")
    parser.add_argument("--sharing", action="store_true", help="transactions of a stream that two processes share")
    parser.add_argument("--grouped", action="store_true", help="pipelines whose subtasks share a stream by a group")
    parser.add_argument("--following", action="store_true", help="programs that follow a stream and wait")
    parser.add_argument("--afar", action="store_true", help="programs whose store is on an object store or a server")
    chosen = parser.parse_args(arguments)
    logging.getLogger("headgate").addHandler(logging.NullHandler())  # a seed tells its story elsewhere
    if chosen.coverage:
        found = measure(chosen.first, chosen.seeds, chosen.jobs, list(KINDS))
        text = table(found, chosen.seeds, len(KINDS))
        print(text)
        print(left_out())
        if chosen.write is not None:
            write(chosen.write, text)
        if share(found) < LEAST:
            print(f"less than {LEAST:.0%}: something new is run by no seed, or too few seeds were run", file=sys.stderr)
            return 1
        return 0
    run = next((run for kind, run in KINDS.items() if getattr(chosen, kind)), run_seed)
    if chosen.seed is not None:
        return _one(run, chosen.seed, is_traced=chosen.trace)
    return _many(run, range(chosen.first, chosen.first + chosen.seeds), chosen.jobs, keeps_going=chosen.keep_going)


def _one(run: Callable[..., Result], seed: int, *, is_traced: bool) -> int:
    result = run(seed, is_traced=is_traced)
    if is_traced:
        print("\n".join(result.story))
    print(f"seed {seed}: {result.events_count} events, {result.virtual_ms} virtual ms, digest {result.digest}")
    if result.violation is not None:
        _explain(run, result, with_story=not is_traced)
        return 1
    return 0


def _many(run: Callable[[int], Result], seeds: range, jobs: int, *, keeps_going: bool) -> int:
    started = time.monotonic()
    done, events, failed = 0, 0, []
    for result in _results(run, seeds, jobs):
        done += 1
        events += result.events_count
        if result.violation is not None:
            failed.append(result.seed)
            _explain(run, result, with_story=not keeps_going)
            if not keeps_going:
                break
        if done % 50 == 0 and sys.stderr.isatty():
            seconds = time.monotonic() - started
            print(f"\r{done} of {len(seeds)} seeds, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    if failed:
        print(f"failed seeds: {' '.join(map(str, failed))}")
    seconds = time.monotonic() - started
    kind = next((kind for kind, each in KINDS.items() if each is run), "the product")
    print(f"{done} seeds of {kind}, {len(failed)} violations, {events} events, {seconds:.0f} s")
    return 1 if failed else 0


def _results(run: Callable[[int], Result], seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    gc.freeze()  # a seed makes much garbage in no circle; to look for circles so rarely takes a twentieth less time
    gc.set_threshold(50_000, 20, 100)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with Pool(jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=4)


def _explain(run: Callable[..., Result], result: Result, *, with_story: bool) -> None:
    print(f"\nseed {result.seed} violates {result.violation}")
    kind = next((f"--{kind} " for kind, each in KINDS.items() if each is run), "")
    print(f"repeat it: python -m headgate.sim {kind}--seed {result.seed} --trace")
    if with_story:
        print("\n".join(result.story[-STORY_LINES:]))


if __name__ == "__main__":
    sys.exit(main())
