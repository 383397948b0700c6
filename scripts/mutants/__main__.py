"""Mutation testing of one part: change it in one place, and see whether its tests notice.

    make mutants PART=protocol/checkpoints              200 mutants, of all kinds
    make mutants PART=store/reader.py SAMPLE=all        all mutants of one module
    make mutants PART=state SAMPLE=400 SEED=7           another sample, and a larger one

A mutant is one change of the syntax tree (``mutations.py``). It is killed when a test fails that runs the changed line,
or when the tests need many times as much processor time as usual. Survivors are printed with the change: a test is
missing, or the change makes no difference. Which test runs which line is kept in ``build/mutants``. Nothing in ``src``
is written.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
from mutations import Mutant, mutants_of
from session import DIED, OPTIONS, Child, Found, Session, exchange, measured, run_all, run_anew

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TESTS, CACHE = ROOT / "src" / "headgate", ROOT / "tests", ROOT / "build" / "mutants"
MARKS = "not spark and not crash and not simulator and not mutant and not run"
MEASURING_S = 3600
QUICK_S = 10
AGAIN: Found = {"again": True}
Lines = dict[str, tuple[float, dict[str, list[int]]]]
"""By name of a test: its seconds of a processor, and the lines that it runs by file."""


def files_of(part: str) -> list[Path]:
    """Return the modules of a part: of a package, or one module."""
    place = SOURCE / part
    if not place.exists():
        place = place.with_suffix(".py")
    found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    if not found or not found[0].exists():
        raise SystemExit(f"no package or module src/headgate/{part}")
    return found


def tests_of(part: str) -> list[Path]:
    """Return the tests that mirror a part: its folder and file, or the folder around it."""
    part = part.removesuffix(".py").rstrip("/")
    place = TESTS / part
    beside = sorted(place.parent.glob(f"test_{place.name}.py")) + sorted(place.parent.glob(f"test_{place.name}_*.py"))
    if place.is_dir():
        return [place, *beside]
    while not beside and not place.is_dir():
        place = place.parent
    return beside or [place]


def key_of(files: list[Path], places: list[Path], marks: str) -> str:
    """Return what changes when a file or a test of the part does."""
    tests = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    digest = hashlib.sha256(marks.encode())
    for file in (*files, *tests):
        digest.update(f"{file}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Runner:
    """Measures the tests of a part once, then runs its mutants."""

    def __init__(self, part: str, places: list[Path], jobs: int, slowest_s: float, budget_s: float, marks: str) -> None:
        self._part, self._places, self._jobs = part, places, jobs
        self._slowest_s, self._budget_s, self._marks = slowest_s, budget_s, marks
        files = files_of(part)
        self._sources = {str(file): file.read_text() for file in files}
        self._cache = CACHE / f"{part.replace('/', '-')}-{key_of(files, places, marks)}.json"
        self._lines: Lines = {}
        self._mutants: list[Mutant] = []
        self._is_killed: dict[int, bool] = {}
        self._killers: dict[int, str] = {}
        self._late_count = 0
        self._began = time.monotonic()

    def run(self, sample: int | None, seed: int) -> None:
        """Run a sample of the mutants, or all; print what survives, and the score."""
        found = [mutant for file, source in self._sources.items() for mutant in mutants_of(file, source)]
        chosen = found if sample is None else random.Random(seed).sample(found, min(sample, len(found)))
        self._mutants = sorted(chosen, key=lambda mutant: (mutant.file, mutant.start, mutant.text))
        print(f"{self._part}: {len(chosen)} of {len(found)} mutants, tests in {', '.join(map(_name, self._places))}")
        child = Child(self._collect, MEASURING_S, is_loud=True)
        try:
            over = child.take(wait_s=None)
        except SystemExit:
            child.end()
            raise
        if over is None or "killed" not in over:
            raise SystemExit(f"the tests could not be collected: {over}")
        self._lines = json.loads(self._cache.read_text())
        self._is_killed = {int(number): is_killed for number, is_killed in over["killed"].items()}
        self._run_all([n for n in range(len(chosen)) if n not in self._is_killed], self._run_anew, least_s=60)
        for number, mutant in enumerate(self._mutants):
            if not self._is_killed[number]:
                why = "" if self._tests_of(mutant) else " no test runs it"
                print(
                    f"\n{_name(Path(mutant.file))}:{mutant.lines[0]}:{why}\n{mutant.diff(self._sources[mutant.file])}"
                )
        killed, count = sum(self._is_killed.values()), len(chosen)
        print(
            f"\n{self._part}: {killed} of {count} killed ({100 * killed / max(1, count):.1f} %), seed {seed}; "
            f"{self._late_count} of them by time"
        )

    def _collect(self) -> Found:
        """Collect the tests once, and fork for each mutant for which nothing has to be imported again."""

        def work(session: Session) -> None:
            if not self._cache.exists():
                self._measure(session)
            self._lines = json.loads(self._cache.read_text())
            quick = [number for number, mutant in enumerate(self._mutants) if mutant.is_in_function]
            self._run_all(quick, lambda mutant, names: self._exchanged(session, mutant, names), least_s=QUICK_S)
            self._check(session)

        pytest.main(["-s", "-m", self._marks, *OPTIONS, *map(str, self._places)], plugins=[Session(work)])
        return {"killed": self._is_killed} if self._lines else {}  # JSON makes texts of the numbers

    def _measure(self, session: Session) -> None:
        """Note which test runs which line; leave out tests that fail or are slow."""
        print(f"measuring {len(session.items)} tests", flush=True)
        by_file: dict[str, list[str]] = {}
        for name in session.items:
            by_file.setdefault(name.split("::")[0], []).append(name)
        shares = [[n for names in list(by_file.values())[i :: self._jobs] for n in names] for i in range(self._jobs)]
        works = [(partial(measured, session, share, list(self._sources)), MEASURING_S) for share in shares if share]
        lines: Lines = {}
        for _, found in run_all(works, self._jobs):
            if "error" in found:
                raise RuntimeError(f"the tests could not be measured:\n{found['error']}")
            lines.update(found)
        usable = {name: found for name, found in lines.items() if found[0] <= self._slowest_s}
        print(f"left out: {len(session.items) - len(usable)} that fail or are slow", flush=True)
        self._cache.parent.mkdir(parents=True, exist_ok=True)
        self._cache.write_text(json.dumps(usable))

    def _check(self, session: Session) -> None:
        """Take back what was killed by tests that fail without a mutant, too: by luck, or in another order."""
        killers = sorted(set(self._killers.values()))
        works = [(partial(lambda name: {"failed": session.run([name])}, name), MEASURING_S) for name in killers]
        failed = {killers[n] for n, found in run_all(works, self._jobs) if found.get("failed") != []}
        for number in [number for number, name in self._killers.items() if name in failed]:
            print(f"{self._killers[number]} fails without a mutant, too")
            self._is_killed[number] = False

    def _exchanged(self, session: Session, mutant: Mutant, names: list[str]) -> Found:
        source = self._sources[mutant.file]
        return {"failed": session.run(names)} if exchange(mutant.file, source, mutant.applied(source)) else AGAIN

    def _run_anew(self, mutant: Mutant, names: list[str]) -> Found:
        return run_anew(mutant.file, mutant.applied(self._sources[mutant.file]), names)

    def _run_all(self, numbers: list[int], work: Callable[[Mutant, list[str]], Found], least_s: float) -> None:
        """Run mutants in children, and note which are killed; not those that need everything imported again.

        Also what crashed is tried again so: libraries with threads may not survive that they are forked.
        """
        tests = {number: self._tests_of(self._mutants[number]) for number in numbers}
        self._is_killed.update({number: False for number in numbers if not tests[number]})
        tried = [number for number in numbers if tests[number]]
        works = (
            (partial(work, self._mutants[n], tests[n]), least_s + 3 * sum(self._lines[name][0] for name in tests[n]))
            for n in tried
        )
        for number, found in run_all(works, self._jobs):
            if "error" in found:
                print(f"{self._mutants[tried[number]]} did not run:\n{found['error']}")
            if found != AGAIN and (found != DIED or least_s > QUICK_S):
                self._is_killed[tried[number]] = found.get("failed") != []
                self._late_count += found == {}
                for name in found.get("failed", ()):
                    self._killers[tried[number]] = name
                self._tell()

    def _tell(self) -> None:
        done, killed = len(self._is_killed), sum(self._is_killed.values())
        text = f"{done} of {len(self._mutants)}, {killed} killed, {time.monotonic() - self._began:.0f} s"
        if sys.stdout.isatty():
            print(f"\r{text} ", end="", flush=True)
        elif done % 25 == 0:
            print(text, flush=True)

    def _tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the lines, the quickest first. What a module does once is for all tests of it."""
        found = self._tests_at(mutant.file, *mutant.lines)
        if found or mutant.is_in_function:
            return found
        return self._tests_at(mutant.file, 0, 1 << 30) or self._affordable(
            (seconds, name) for name, (seconds, _) in self._lines.items()
        )

    def _tests_at(self, file: str, first: int, last: int) -> list[str]:
        tests = self._lines.items()
        found = [(s, name) for name, (s, lines) in tests if any(first <= line <= last for line in lines.get(file, ()))]
        return self._affordable(found)

    def _affordable(self, tests: Iterable[tuple[float, str]]) -> list[str]:
        """Return the quickest tests, as many as need no more than the budget of a mutant together, and one at least."""
        ordered = sorted(tests)
        sums = accumulate(seconds for seconds, _ in ordered)
        return [name for (_, name), total in zip(ordered, sums, strict=True) if total <= self._budget_s] or [
            name for _, name in ordered[:1]
        ]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", help="a package or a module, from src/headgate: protocol/checkpoints")
    parser.add_argument("--sample", default="200", help="how many mutants, or all")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--tests", nargs="*", type=Path, default=[], help="instead of those that mirror the part")
    parser.add_argument("--quick", action="store_true", help="without tests that are marked as long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    parser.add_argument(
        "--slowest", type=float, default=20, help="seconds of a processor; tests that take longer are left out"
    )
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests for one mutant, quickest first")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends the children
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for library in ("numpy", "pyarrow", "polars", "sqlalchemy", "msgspec"):
        importlib.import_module(library)  # once, for all children
    places = [path.resolve() for path in options.tests] or tests_of(options.part)
    marks = f"{MARKS} and not long" if options.quick else MARKS
    runner = Runner(options.part, places, options.jobs, options.slowest, options.budget, marks)
    runner.run(None if options.sample == "all" else int(options.sample), options.seed)


if __name__ == "__main__":
    main()
