"""Which statements and branches of the product the seeds ran, per file (``--coverage``).

Each job is a process of its own under ``coverage``, so that what runs at import counts. Thin files, which cannot run in
the machine room, are named here and in docs/spec/simulator.md, where the table is kept between two marks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import headgate
from headgate.dataclass import dataclass

SOURCE = Path(headgate.__file__).parent
ROOMS = ("model", "protocol", "runtime", "store", "state", "connectors/streams")
SINKS = (
    "fenced_sink",
    "files/file_committer",
    "files/file_sink",
    "files/file_writer",
    "files/publish_log",
    "files/rotation",
    "ledger_sink",
    "two_phase_sink",
)
"""Of ``connectors``: what decides whether output is there once, and what of it is removed."""

LEAST = 0.9
"""So much of what is not thin the seeds must run."""

THIN = {
    "runtime/surroundings.py": "sockets and chance of the operating system, and the end of a process",
    "runtime/wire/connection.py": "OpenSSL",
    "runtime/driver/pipeline_lock.py": "a lock of the file system, and signals between processes",
    "store/catalogue/sqlite.py": "connections to SQLite's file",
}
"""What cannot run in the machine room, of what is measured, and why."""

ELSEWHERE = {
    "environment.py": "the operating system's clocks, threads, connections and secrets",
    "tls.py": "certificates",
    "storage/local.py": "the file system",
    "storage/local_files.py": "the file system",
    "storage/object_store.py": "object stores",
    "spark": "Spark: launcher, task entry, ends in DataFrames, its own processors, streams in its jobs",
    "cli/supervisor.py": "the processes of a supervisor and its driver: forks, signals, pipes",
    "cli/run.py": "the process of a standby: signals",
}
"""What cannot run there either, and is in no room that is measured."""

_CHANGED = "programs that are changed between two runs"
_SERVER = "stores on a database server"

NOT_YET = {
    "runtime/savepoint_writer": "savepoints from frames",
    "model/schema_evolution.py": _CHANGED,
    "model/state_schema.py": _CHANGED,
    "protocol/checkpoints/compatibility.py": _CHANGED,
    "protocol/store/micro_batches.py": "streams in jobs of Spark",
    "store/catalogue/postgresql": _SERVER,
    "store/location.py": _SERVER,
}
"""What no seed runs yet: rooms and files in the table, but not in the share that is judged. Gaps known by name."""

BROKEN_RULES = (r"raise self\._violation", r"raise AssertionError", r"case _:\s*\n\s*assert_never\(.*")
"""Statements that run only when a machine's rule is broken: a seed that reached one would fail. They do not count."""

OTHERS_SHARE = 4
"""For so many seeds, one more runs of every other kind."""

BEGIN, END = "<!-- coverage -->", "<!-- end of coverage -->"


@dataclass(frozen=True, slots=True)
class Covered:
    """What was run of one file, or of several."""

    statements: int
    statements_run: int
    branches: int
    branches_run: int

    @property
    def share(self) -> float:
        """Statements and branches run, of all."""
        return (self.statements_run + self.branches_run) / max(self.statements + self.branches, 1)

    def __add__(self, other: Covered) -> Covered:
        return Covered(
            self.statements + other.statements,
            self.statements_run + other.statements_run,
            self.branches + other.branches,
            self.branches_run + other.branches_run,
        )


def measured_files() -> list[Path]:
    """Return the files that the table is about."""
    files = [path for room in ROOMS for path in (SOURCE / room).rglob("*.py")]
    files += [SOURCE / "connectors" / f"{name}.py" for name in SINKS]
    return sorted(path for path in files if path.name != "__init__.py")


def measure(first: int, seeds: int, jobs: int, kinds: Sequence[str]) -> dict[str, Covered]:
    """Run seeds of all ``kinds`` under ``coverage``; return what they ran, by path below ``headgate``.

    Files that no seed imports are in it: none of their statements was run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "settings.toml")
        rooms = [*ROOMS, "connectors"]  # ``source``, not ``include``, has those that nobody imports
        source = json.dumps([str(SOURCE / room) for room in rooms if not room.startswith("connectors/")])
        settings.write_text(
            f"[tool.coverage.run]\nbranch = true\nparallel = true\nconcurrency = ['greenlet']\nsource = {source}\n"
            f"data_file = {json.dumps(str(Path(scratch, 'data')))}\n"
            f"[tool.coverage.report]\nexclude_also = {json.dumps(BROKEN_RULES)}\n",
            encoding="utf-8",
        )
        coverage = [sys.executable, "-m", "coverage"]
        options = [f"--rcfile={settings}"]
        program = [*coverage, "run", *options, "-m", "headgate.sim"]
        others = [([f"--{kind}"], max(1, seeds // OTHERS_SHARE)) for kind in kinds]
        for option, count in (([], seeds), *others):
            slices = [_slice(first, count, jobs, job) for job in range(jobs)]
            running = [subprocess.Popen([*program, *option, *arguments]) for arguments in slices]
            codes = [process.wait() for process in running]
            if any(codes):
                raise SystemExit("a seed failed: see above")
        subprocess.run([*coverage, "combine", "-q", *options], check=True, cwd=scratch)
        report = Path(scratch, "report.json")
        subprocess.run([*coverage, "json", "-q", *options, "-o", str(report)], check=True, cwd=scratch)
        found = dict(_read(json.loads(report.read_text(encoding="utf-8"))["files"]))
    wanted = [str(path.relative_to(SOURCE)) for path in measured_files()]
    return {name: found[name] for name in wanted if name in found}  # it leaves out what has no statement


def _slice(first: int, seeds: int, jobs: int, job: int) -> list[str]:
    """Return the arguments of one job."""
    low, high = seeds * job // jobs, seeds * (job + 1) // jobs
    return ["--from", str(first + low), "--seeds", str(high - low)]


def _read(files: dict[str, dict[str, dict[str, int]]]) -> Iterator[tuple[str, Covered]]:
    for name, found in sorted(files.items()):
        summary = found["summary"]
        covered = Covered(
            summary["num_statements"], summary["covered_lines"], summary["num_branches"], summary["covered_branches"]
        )
        yield str(Path(os.path.abspath(name)).relative_to(SOURCE)), covered


def share(found: dict[str, Covered]) -> float:
    """Return which part of what is not thin was run, ``NOT_YET`` aside."""
    rest = _rest(found).items()
    return _sum([covered for name, covered in rest if not {name, name.rsplit("/", 1)[0]} & NOT_YET.keys()]).share


def _rest(found: dict[str, Covered]) -> dict[str, Covered]:
    return {name: covered for name, covered in found.items() if name not in THIN}


def table(found: dict[str, Covered], seeds: int, kinds_count: int = 0) -> str:
    """Return the table as Markdown: rooms, then files."""
    rest = _rest(found)
    more = f", and {max(1, seeds // OTHERS_SHARE)} of each of {kinds_count} other kinds," if kinds_count else ""
    lines = [
        f"{seeds:,} seeds{more} ran {share(found):.1%} of the statements and branches below, thin files and what no "
        f"seed runs yet ({', '.join(NOT_YET)}) aside; {_sum(list(rest.values())).share:.1%} with the latter.",
        "",
        "| File | Statements run | of | Branches run | of | Share |",
        "|---|---|---|---|---|---|",
    ]
    for room in sorted({name.rsplit("/", 1)[0] for name in rest}):
        files = {name: covered for name, covered in rest.items() if name.rsplit("/", 1)[0] == room}
        lines.append(_line(f"**{room}/**", _sum(list(files.values()))))
        lines += [_line(name.rsplit("/", 1)[1], covered) for name, covered in files.items()]
    return "\n".join(lines) + "\n"


def left_out() -> str:
    """Return how much cannot run in the machine room."""
    thin, elsewhere = (sum(map(_lines, names)) for names in (THIN, ELSEWHERE))
    return f"left out: {thin:,} lines of thin files, and {elsewhere:,} lines in rooms that are not measured"


def _lines(name: str) -> int:
    path = SOURCE / name
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def _sum(covered: Sequence[Covered]) -> Covered:
    return sum(covered, Covered(0, 0, 0, 0))


def _line(name: str, c: Covered) -> str:
    return f"| {name} | {c.statements_run} | {c.statements} | {c.branches_run} | {c.branches} | {c.share:.0%} |"


def write(page: Path, text: str) -> None:
    """Put the table's first paragraph, the sum, between its marks on ``page``."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text.partition(chr(10) * 2)[0]}\n{END}{after}", encoding="utf-8")
