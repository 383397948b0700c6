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
from dataclasses import dataclass
from pathlib import Path

import headgate

SOURCE = Path(headgate.__file__).parent
ROOMS = ("model", "protocol", "runtime", "store", "state")
TRANSACTIONS = ("commit", "layout", "ledger", "owner", "rotation", "sink", "writer", "buffer")
"""Of ``connectors/files``: what decides whether output is there once."""

THIN = (
    "runtime/process.py",  # threads, sockets and clocks of the operating system
    "runtime/wire/tls.py",  # certificates
    "runtime/wire/tls_streams.py",  # OpenSSL
    "runtime/driver/pipeline_lock.py",  # a lock of the file system
    "runtime/driver/stopping.py",  # signals between processes
    "store/catalogue/database.py",  # connections to SQLite's file
    "store/catalogue/making_lock.py",  # a lock of the file system
    "store/catalogue/looking.py",  # SQLite's file and its locks
    "store/catalogue/opening.py",  # SQLite's file and its locks
    "store/catalogue/untouched.py",  # files of older versions
    "store/catalogue/versions.py",  # tables of older versions, in files
)
"""Beside ``spark/``, ``storage/local.py`` and ``storage/object_store.py``, which are in no room that is measured."""

BROKEN_RULES = (r"raise self\._violation", r"raise AssertionError", r"case _:\s*\n\s*assert_never\(.*")
"""Statements that run only when a machine's rule is broken: a seed that reached one would fail. They do not count."""

OTHERS_SHARE = 4
"""For so many seeds, one more runs a pipeline between streams, one another guarantee, one hooks and markers."""

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
    files += [SOURCE / "connectors" / "files" / f"{name}.py" for name in TRANSACTIONS]
    files.append(SOURCE / "connectors" / "streams.py")
    return sorted(path for path in files if path.name != "__init__.py")


def measure(first: int, seeds: int, jobs: int) -> dict[str, Covered]:
    """Run seeds under ``coverage``; return what they ran, by path below ``headgate``."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "settings.toml")
        include = json.dumps([str(path) for path in measured_files()])
        settings.write_text(
            f"[tool.coverage.run]\nbranch = true\nparallel = true\nconcurrency = ['greenlet']\ninclude = {include}\n"
            f"data_file = {json.dumps(str(Path(scratch, 'data')))}\n"
            f"[tool.coverage.report]\nexclude_also = {json.dumps(BROKEN_RULES)}\n",
            encoding="utf-8",
        )
        coverage = [sys.executable, "-m", "coverage"]
        options = [f"--rcfile={settings}"]
        program = [*coverage, "run", *options, "-m", "headgate.sim.product"]
        others = [([option], seeds // OTHERS_SHARE) for option in ("--streams", "--modes", "--induced")]
        for kind, count in (([], seeds), *others):
            slices = [_slice(first, count, jobs, job) for job in range(jobs)]
            running = [subprocess.Popen([*program, *kind, *arguments]) for arguments in slices]
            codes = [process.wait() for process in running]
            if any(codes):
                raise SystemExit("a seed failed: see above")
        subprocess.run([*coverage, "combine", "-q", *options], check=True, cwd=scratch)
        report = Path(scratch, "report.json")
        subprocess.run([*coverage, "json", "-q", *options, "-o", str(report)], check=True, cwd=scratch)
        return dict(_read(json.loads(report.read_text(encoding="utf-8"))["files"]))


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


def table(found: dict[str, Covered], seeds: int) -> str:
    """Return the table as Markdown: rooms, then files."""
    rest = {name: covered for name, covered in found.items() if name not in THIN}
    whole = _sum(list(rest.values()))
    lines = [
        f"{seeds:,} seeds ran {whole.share:.1%} of the statements and branches below, thin files aside.",
        "",
        "| File | Statements run | of | Branches run | of | Share |",
        "|---|---|---|---|---|---|",
    ]
    for room in sorted({name.rsplit("/", 1)[0] for name in rest}):
        files = {name: covered for name, covered in rest.items() if name.rsplit("/", 1)[0] == room}
        lines.append(_line(f"**{room}/**", _sum(list(files.values()))))
        lines += [_line(name.rsplit("/", 1)[1], covered) for name, covered in files.items()]
    return "\n".join(lines) + "\n"


def _sum(covered: Sequence[Covered]) -> Covered:
    return sum(covered, Covered(0, 0, 0, 0))


def _line(name: str, c: Covered) -> str:
    return f"| {name} | {c.statements_run} | {c.statements} | {c.branches_run} | {c.branches} | {c.share:.0%} |"


def write(page: Path, text: str) -> None:
    """Put the table between its marks on ``page``."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
