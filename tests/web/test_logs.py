"""The logs that a page shows: only those of its pipeline, in whole lines, whatever is rotated meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.web import logs
from headgate.web.logs import LEFT_OUT, LogDirectory, LogReader


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.log"


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_a_shelf_has_the_logs_of_its_pipeline_and_nothing_else(tmp_path: Path) -> None:  # PG12
    shelf = LogDirectory()
    assert (shelf.place, shelf.names()) == ("", [])
    shelf.set_directory(str(tmp_path / "nowhere"))
    assert shelf.names() == []
    for name in ("worker-10.log", "worker-2.log", "spark.log", "worker-2.log.1", "other.log", "worker-x.log", "notes"):
        (tmp_path / name).touch()
    shelf.set_directory(str(tmp_path))
    assert shelf.names() == ["worker-2", "worker-10", "spark"]
    assert shelf.reader("worker-2") is not None
    assert all(shelf.reader(name) is None for name in ("other", "worker-3", "../worker-2", "worker-2.log", ""))


def test_lines_are_read_once_and_whole(log: Path) -> None:  # PG14
    reader = LogReader(log)
    assert reader.read() == ""
    add(log, "one\ntw")
    assert reader.read() == "one\n"
    assert reader.read() == ""
    add(log, "o\nthree\n")
    assert reader.read() == "two\nthree\n"


def test_of_a_long_log_the_end_is_shown_from_the_beginning_of_a_line(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # PG14
    monkeypatch.setattr(logs, "FIRST_BYTES", 10)
    monkeypatch.setattr(logs, "STEP_BYTES_MAX", 20)
    add(log, "0123456789\nfive\nsix\n")
    reader = LogReader(log)
    assert reader.read() == "five\nsix\n"
    add(log, "".join(f"line {number}\n" for number in range(9)))
    assert reader.read() == f"{LEFT_OUT}line 8\n"


def test_a_log_that_is_rotated_loses_no_line(log: Path) -> None:  # PG14
    reader = LogReader(log)
    add(log, "one\n")
    assert reader.read() == "one\n"
    add(log, "two\n")
    log.rename(log.with_name("worker-0.log.1"))
    assert reader.read() == "", "between two files"
    add(log, "three\n")
    assert reader.read() == "two\nthree\n"
    log.write_text("")
    assert reader.read() == ""
    add(log, "four\n")
    assert reader.read() == "four\n", "somebody emptied it"


def test_what_is_not_utf_8_is_shown_all_the_same(log: Path) -> None:
    log.write_bytes(b"caf\xe9\n")
    assert LogReader(log).read() == "caf\ufffd\n"
