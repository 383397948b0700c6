"""The tutorial as a reader follows it: every command in its order, from an installed package to a recovered pipeline.

Fewer records than on the page. It starts Spark ten times, so `make test` leaves it to `make test-repeated`: there are
tests of their own for the page's Python (`tests/docs`), its commands and options, a clean install, and kills.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.packaging.conftest import INSTALL, ROOT, Installed, ran
from tests.packaging.reader import Reader, Terminal

pytestmark = [pytest.mark.spark, pytest.mark.deep, pytest.mark.timeout(1_800), pytest.mark.xdist_group("packaging")]

ROWS = 20_000
ENDLESS = 20
"""Rows each second of a run that is killed or stopped: it goes on for a quarter of an hour."""
PATIENT = 400
"""Rows each second of a run that is to end after its workers were killed: they are there for most of a minute."""
LESS_TO_DO = {"rows=60_000": f"rows={ROWS:_}", 'hg.Tumbling("10s")': 'hg.Tumbling("2s")', "--ui 4050": "--ui 0"}
ENDS = rf"visits: finished after [\d.]+ (m?s|min \d+ s): {ROWS:,} records in, (\d+) out, (\d+) restarts?\n"


@pytest.fixture
def reader(tmp_path: Path, installed: Installed) -> Iterator[Reader]:
    made = Reader(ROOT / "docs" / "tutorial.md", tmp_path, installed.python.parent, LESS_TO_DO)
    yield made
    made.close()


def checkpoints(reader: Reader) -> int:
    """Return the number of the newest entry in the log of checkpoints."""
    log = reader.directory / ".headgate" / "checkpoints" / "visits" / "log"
    return max((int(entry.name) for entry in log.glob("*") if entry.name.isdecimal()), default=0)


def until_checkpoint(reader: Reader, terminal: Terminal) -> None:
    """Wait for one that completes from now on: the first new entry of the log is the claim of the generation."""
    before = checkpoints(reader)
    terminal.until("another checkpoint", lambda: checkpoints(reader) >= before + 2)


def at_rate(reader: Reader, rows_per_second: int) -> None:
    """Have the saved program read at this rate from its next start on."""
    program = reader.directory / "visits.py"
    text, count = re.subn(r"rows_per_second=[\d_]+", f"rows_per_second={rows_per_second}", program.read_text())
    assert count == 1
    program.write_text(text)


def restarts_of(told: str) -> int:
    found = re.search(ENDS, told)
    assert found, told
    return int(found[3])


def test_who_follows_the_tutorial_gets_what_it_says(
    reader: Reader, built: tuple[Path, Path], installed: Installed
) -> None:
    made, entered, activated, install, doctor = reader.block("bash")
    assert (made, entered) == ("mkdir visits && cd visits", "python3 -m venv .venv")
    assert (activated, install) == (". .venv/bin/activate", "pip install ../headgate"), "what the fixtures do"
    assert "java" in reader.types(doctor).lower()
    reader.saves("visits.py")
    (describe,) = reader.block("text")
    assert "visits" in reader.types(describe)

    (run,) = reader.block("text")
    told = reader.types(run)
    (example,) = reader.block("text")
    assert re.fullmatch(ENDS.replace(f"{ROWS:,}", "60,000"), f"{example}\n"), "the page shows what is printed"
    assert restarts_of(told) == 0
    keep, look = reader.block("bash")
    reader.types(keep)
    assert reader.types(look).count("window_start") == 2
    assert "already" in reader.types(run)
    (reset,) = reader.block("text")
    assert "visits" in reader.types(reset, answer="y\n")
    assert not list((reader.directory / "counts").glob("*.jsonl"))

    (again,) = reader.block("text")
    at_rate(reader, ENDLESS)
    first = reader.starts(again)
    until_checkpoint(reader, first)
    (kill_driver,) = reader.block("bash")
    assert first.kill_like(kill_driver) >= 1
    first.ends()
    (again,) = reader.block("text")
    at_rate(reader, PATIENT)
    second = reader.starts(again)
    until_checkpoint(reader, second)
    (kill_workers,) = reader.block("bash")
    assert second.kill_like(kill_workers) >= 2
    told = second.ends()
    assert "continues from checkpoint" in told
    assert restarts_of(told) == 1
    (compare,) = reader.block("bash")
    assert reader.types(compare) == "nothing lost, nothing twice\n"

    reset, again, stop = reader.block("text")
    reader.types(reset)
    at_rate(reader, ENDLESS)
    stopped = reader.starts(again)
    until_checkpoint(reader, stopped)
    reader.types(stop)
    assert "stopped" in stopped.ends()
    at_rate(reader, 1_000)
    (wider,) = reader.block("text")
    assert restarts_of(reader.types(wider)) == 0
    assert reader.types(compare) == "nothing lost, nothing twice\n"

    reader.saves("test_visits.py")
    ran(
        [
            installed.python,
            *INSTALL,
            "-c",
            ROOT / "constraints.txt",
            "pytest",
            f"headgate-streams[ui] @ file://{built[0]}",
        ],
        reader.directory,
    )
    assert "1 passed" in reader.types("pytest -q test_visits.py")

    extra, reset, watched = reader.block("text")
    assert extra == "pip install 'headgate-streams[ui]'", "done with pytest"
    reader.types(reset)
    shown = reader.starts(watched)
    shown.until("the address of its page", lambda: re.search(r"page: .*(http://\S+)", shown.told))
    address = re.search(r"http://[\d.:]+/?", shown.told)
    assert address
    assert b"Headgate" in urllib.request.urlopen(address[0]).read()
    assert reader.has_read_all
