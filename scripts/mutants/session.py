"""One run of pytest that collects the tests of a part once, and forks for whatever runs some of them.

A child never returns: what it found goes through a pipe, and its parent goes on as if nothing had been imported,
patched or started. A mutant within a function gets into a child by exchanging the function's code, so nothing has to be
imported again. What a module or a class does when it is made is changed by an import hook, in a child that was forked
before anything of the product was imported.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from math import ceil
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import coverage
import pytest

Found = dict[str, Any]
DIED: Found = {"died": True}
WAITS = 10
"""How many times its processor time a child may take."""
STUCK_S = 20
"""A child that takes next to no processor time for so long waits for what never comes."""
TICKS_MIN = 10
"""So much of it tells that a child goes on: a tenth of a second, more than any poll takes."""
LOOK_S = 2
OPTIONS = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0")


class Child:
    """A forked process that runs ``work`` and sends what it returns; killed when its time is over.

    Its time is processor time, which other work on the machine does not change; what waits now and then gets ten times
    as much, and what does nothing else is killed.
    """

    def __init__(self, work: Callable[[], Found], limit_s: float, *, is_loud: bool = False) -> None:
        self._limit_s = limit_s
        self._until = time.monotonic() + WAITS * limit_s
        self._looked = self._moved = time.monotonic()
        self._ticks = 0
        self._is_late = False
        self._is_loud = is_loud
        self._directory = tempfile.mkdtemp(prefix="mutant-")
        self.pipe, writing = os.pipe()
        self._data = b""
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._run(work, writing)
        os.close(writing)
        if not is_loud:
            with contextlib.suppress(OSError):
                os.setpgid(self._pid, self._pid)  # as the child does: either of them is first

    def _run(self, work: Callable[[], Found], writing: int) -> NoReturn:
        try:
            if not self._is_loud:
                os.setpgid(0, 0)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CPU, (ceil(self._limit_s), resource.RLIM_INFINITY))
                nothing = os.open(os.devnull, os.O_RDWR)
                for number in (0, 1, 2):
                    os.dup2(nothing, number)
                os.environ.update(PYTEST_DEBUG_TEMPROOT=self._directory, TMPDIR=self._directory)
                tempfile.tempdir = self._directory
            try:
                found = work()
            except BaseException:
                found = {"error": traceback.format_exc()}
            with open(writing, "wb") as answer:
                answer.write(json.dumps(found).encode())
        finally:
            sys.stdout.flush()
            os._exit(0)

    def take(self, wait_s: float | None = 0) -> Found | None:
        """Return what the child found when it is over; ``{}`` when its time was, ``DIED`` when it crashed."""
        while select.select([self.pipe], [], [], wait_s)[0]:
            data = os.read(self.pipe, 1 << 16)
            self._data += data
            if not data:
                return self.end() or ({} if self._is_late else DIED)
        is_late = time.monotonic() > self._until or (not self._is_loud and self._is_stuck())
        return self.end() if is_late else None  # too late: nothing was sent

    def _is_stuck(self) -> bool:
        """Whether neither the child nor what it started has done anything for a while."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked, (ticks, is_running) = now, _activity_of(self._pid)
        if is_running or ticks - self._ticks >= TICKS_MIN:
            self._ticks, self._moved = ticks, now
        return now - self._moved > STUCK_S

    def end(self) -> Found:
        """Kill the child, and whatever it started, if it is still there; return what it had sent."""
        with contextlib.suppress(ProcessLookupError):
            if self._is_loud:
                os.kill(self._pid, signal.SIGTERM)  # it ends its own children
            else:
                os.killpg(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        os.close(self.pipe)
        shutil.rmtree(self._directory, ignore_errors=True)
        return dict(json.loads(self._data)) if self._data else {}


def _activity_of(group: int) -> tuple[int, bool]:
    """Return the processor time that a group of processes has taken, and whether one of its threads wants more now.

    Where the system does not say so, one does.
    """
    count, is_running = 0, not Path("/proc/self/stat").exists()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = _stat(process)
            if int(words[2]) == group:
                count += sum(map(int, words[11:15]))
                is_running |= any(_stat(thread)[0] in "RD" for thread in process.glob("task/*"))
    return count, is_running


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()


def run_all(works: Iterable[tuple[Callable[[], Found], float]], jobs: int) -> Iterator[tuple[int, Found]]:
    """Run each work in a child, ``jobs`` at a time; yield the number of each, and what it found."""
    waiting = enumerate(works)
    running: dict[int, Child] = {}
    try:
        while True:
            while len(running) < jobs and (following := next(waiting, None)) is not None:
                number, (work, limit_s) = following
                running[number] = Child(work, limit_s)
            if not running:
                return
            select.select([child.pipe for child in running.values()], [], [], 0.2)
            for number, child in list(running.items()):
                found = child.take()
                if found is not None:
                    del running[number]
                    yield number, found
    finally:
        for child in running.values():
            child.end()


class Session:
    """A plugin for pytest: gives the collected tests to ``work`` instead of running them."""

    def __init__(self, work: Callable[[Session], None]) -> None:
        self.items: dict[str, pytest.Item] = {}
        self.is_collected = False
        self._work = work
        self._failed: list[str] = []

    def pytest_configure(self) -> None:
        """Have Hypothesis stop at the first failure, and remember nothing."""
        import hypothesis  # not before pytest has seen to its plugins

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), database=None, phases=phases)
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Work with what was collected."""
        self.is_collected = not session.testsfailed
        self.items = {item.nodeid: item for item in session.items}
        if self.is_collected:
            self._work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what failed."""
        if report.failed:
            self._failed.append(report.nodeid)

    def run(self, names: Sequence[str], stop: bool = True, before: Callable[[str], None] | None = None) -> list[str]:
        """Run tests in this process; return those that failed, only the first if ``stop``. Only children do so."""
        self._failed = []
        for name, following in zip(names, (*names[1:], None), strict=True):
            if before is not None:
                before(name)
            item = self.items[name]
            then = None if following is None else self.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
            if stop and self._failed:
                break
        return self._failed


def measured(session: Session, names: Sequence[str], files: Sequence[str]) -> Found:
    """Run tests; return by name, without those that fail, the processor time of each and the lines of ``files``."""
    tracer = coverage.Coverage(data_file=None, include=list(files), config_file=False)
    tracer.set_option("run:disable_warnings", ["no-data-collected"])  # some tests may run none of the lines
    started: list[float] = []

    def begin(name: str) -> None:
        tracer.switch_context(name)
        started.append(_processor_s())

    tracer.start()
    failed = session.run(names, stop=False, before=begin)
    tracer.stop()
    started.append(_processor_s())
    data = tracer.get_data()
    lines: dict[str, dict[str, list[int]]] = {name: {} for name in names}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            for name in contexts:
                if name in lines:
                    lines[name].setdefault(file, []).append(line)
    seconds = {name: after - before for name, before, after in zip(names, started, started[1:], strict=False)}
    return {name: [round(seconds[name], 3), lines[name]] for name in names if name not in failed}


def _processor_s() -> float:
    """Return the processor time of this process and of all that it has started and ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def exchange(file: str, source: str, mutated: str) -> bool:
    """Give functions of ``file`` the code that ``mutated`` has for them; return whether all that differ have it now."""
    new = _functions_in(compile(mutated, file, "exec", dont_inherit=True))
    known = _functions_in(compile(source, file, "exec", dont_inherit=True))
    old: dict[str, list[FunctionType]] = {}
    gc.unfreeze()  # what the tests' conftest has frozen is not among the objects otherwise
    objects = gc.get_objects()
    gc.freeze()
    for found in objects:
        if type(found) is FunctionType and found.__code__.co_filename == file:
            old.setdefault(found.__code__.co_qualname, []).append(found)
    for name, codes in new.items():
        if codes == known[name]:
            continue
        functions = old.get(name, [])
        places = sorted({function.__code__.co_firstlineno for function in functions})
        if len(places) != len(codes):
            return False  # not imported yet, or defined twice
        for function in functions:
            code = codes[places.index(function.__code__.co_firstlineno)]
            if code.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = code
    return True


def _functions_in(code: CodeType) -> dict[str, list[CodeType]]:
    """Return by qualified name the code of functions that a module or its classes define, in their order."""
    found: dict[str, list[CodeType]] = {}
    for part in code.co_consts:
        if isinstance(part, CodeType) and "<" not in part.co_qualname:
            if part.co_flags & 0x2:  # CO_NEWLOCALS: of a function, not of a class
                found.setdefault(part.co_qualname, []).append(part)
            for name, codes in _functions_in(part).items():
                found.setdefault(name, []).extend(codes)
    return found


class Mutated(SourceFileLoader):
    """Imports one file from a text instead."""

    def __init__(self, file: str, source: str) -> None:
        SourceFileLoader.__init__(self, "mutated", file)
        self._source = source

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find what others would, with this loader for the one file."""
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin != self.path:
            return None
        self.name = name
        spec.loader = self
        return spec

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text; nothing is written."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


def run_anew(file: str, source: str, names: Sequence[str]) -> Found:
    """Import everything, ``file`` from ``source``, and run tests; in a child that has imported nothing yet."""
    sys.meta_path.insert(0, Mutated(file, source))
    failed: list[str] = []
    session = Session(lambda session: failed.extend(session.run([n for n in names if n in session.items])))
    # plain asserts: pytest would import the product by itself to rewrite its asserts
    pytest.main(["--assert=plain", *OPTIONS, *dict.fromkeys(name.split("::")[0] for name in names)], plugins=[session])
    return {"failed": failed[:1] or ([] if session.is_collected else ["its import"])}
