"""Logs that are rotated by renaming while Spark follows them: every line once, whoever is killed, stopped or away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import Life, kill, until
from crash.results import assert_clean, read_stream

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

SERIES = ("web.log", "mail.log")
LINES = 500

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


class Logs:
    """Two programs that log, and logrotate with its default: rename, then make anew under the same name."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "logs"
        self.directory.mkdir()
        self.store = root / "store"
        self.written: list[str] = []

    def write(self, *, finished: bool = True) -> None:
        """Append to both files; ``finished``: the last line has its end."""
        for name in SERIES:
            lines = [f"{name} {len(self.written) + number}" for number in range(LINES)]
            self.written += lines
            with (self.directory / name).open("a") as file:
                file.write("\n".join(lines) + ("\n" if finished else ""))

    def end_lines(self) -> None:
        for name in SERIES:
            with (self.directory / name).open("a") as file:
                file.write("\n")

    def rotate(self) -> None:
        for name in SERIES:
            for number in range(9, 0, -1):
                older = self.directory / f"{name}.{number}"
                if older.exists():
                    older.rename(self.directory / f"{name}.{number + 1}")
            (self.directory / name).rename(self.directory / f"{name}.1")
            (self.directory / name).touch()

    def found(self) -> list[str]:
        return sorted(read_stream(self.store, "lines")["line"].to_list())

    def wait_until_read(self, life: Life) -> None:
        """Every line that is written was committed: once."""

        def is_there() -> bool:
            life.checkpoint()
            return len(self.found()) >= len(self.written)

        until(is_there, f"{len(self.written)} lines in the stream")
        assert self.found() == sorted(self.written)


def test_every_line_comes_once_though_logs_are_rotated_workers_killed_and_the_pipeline_stopped(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    logs = Logs(tmp_path)
    logs.write()
    what = spec("followed_files")
    life = run(what)
    running = life.running()
    logs.wait_until_read(life)

    logs.write()  # read by nobody yet, or in part
    logs.rotate()
    logs.write()
    kill(next(iter(running["workers"].values())))
    life.restart()
    running = life.running(after=running["generation"])
    logs.rotate()  # once more, while the next workers look for the first of the renamed files
    logs.write(finished=False)
    logs.end_lines()
    logs.wait_until_read(life)

    life.child.send({"stop": what["name"]})
    life.result()
    logs.write()  # nobody reads
    logs.rotate()
    logs.write()
    logs.rotate()
    logs.write()
    life = run({**what, "parallelism": 1})
    life.running(workers=1)
    logs.wait_until_read(life)

    life.child.send({"drain": what["name"]})
    assert life.result()["is_finished"]
    assert logs.found() == sorted(logs.written)
    assert_clean(tmp_path)
