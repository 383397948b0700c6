"""Mutants of the logs on a page: somebody else reads them, another file is read, lines are lost; a named test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_progress_book as books
from tests.web import test_logs, test_peers, test_serving

from headgate.runtime.driver import alignment_book
from headgate.web import peers
from headgate.web.answers import Access, Endpoint
from headgate.web.logs import LogReader, LogShelf


@contextmanager
def everybody_on_the_machine_reads_logs() -> Iterator[None]:
    def of_owner(self: Access, endpoint: Endpoint) -> Endpoint:
        return self.reading(endpoint)

    with patched(Access, "of_owner", of_owner):
        yield


@contextmanager
def the_other_end_says_whose_the_browser_is() -> Iterator[None]:
    real = peers.owner_in
    with patched(peers, "owner_in", lambda table, browser, page: real(table, page, browser)):
        yield


@contextmanager
def a_closed_connection_still_says_whose_it_is() -> Iterator[None]:
    with patched(peers, "ESTABLISHED", "06"):
        yield


@contextmanager
def a_browser_names_any_file() -> Iterator[None]:
    def reader(self: LogShelf, name: str) -> LogReader:
        return LogReader(Path(self.place) / f"{name}.log")

    with patched(LogShelf, "reader", reader):
        yield


@contextmanager
def what_was_rotated_is_forgotten() -> Iterator[None]:
    with patched(LogReader, "_rest_of_the_former", lambda self, before: ""):
        yield


@contextmanager
def half_a_line_counts_as_read() -> Iterator[None]:
    real = LogReader.read

    def read(self: LogReader) -> str:
        found = real(self)
        if self._place is not None and self._path.exists():
            self._place = replace(self._place, offset=self._path.stat().st_size)
        return found

    with patched(LogReader, "read", read):
        yield


@contextmanager
def all_of_a_long_log_is_sent() -> Iterator[None]:
    def begin(self: LogReader, inode: int, size_bytes: int) -> tuple[int, bool]:
        place: Any = self._place
        return (0 if place is None or place.inode != inode else min(place.offset, size_bytes)), False

    with patched(LogReader, "_begin", begin):
        yield


@contextmanager
def a_book_of_alignments_grows() -> Iterator[None]:
    with patched(alignment_book, "ALIGNED_CHECKPOINTS_MAX", 1 << 30):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (the_other_end_says_whose_the_browser_is, test_peers.test_the_browsers_end_says_whose_it_is),
        (a_closed_connection_still_says_whose_it_is, test_peers.test_the_browsers_end_says_whose_it_is),
        (a_book_of_alignments_grows, books.test_alignments_are_kept_by_checkpoint_and_subtask_and_bounded),
    ],
)
def test_whose_browser_it_is_and_what_is_kept_is_checked(mutant: Mutant, test: Callable[..., object]) -> None:  # PG13
    assert_caught(mutant, test)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (what_was_rotated_is_forgotten, test_logs.test_a_log_that_is_rotated_loses_no_line),
        (half_a_line_counts_as_read, test_logs.test_lines_are_read_once_and_whole),
    ],
)
def test_lost_lines_are_found(mutant: Mutant, test: Callable[..., object], tmp_path: Path) -> None:  # PG14
    assert_caught(mutant, test, tmp_path / "worker-0.log")


def test_a_log_without_bounds_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # PG14
    test = test_logs.test_of_a_long_log_the_end_is_shown_from_the_beginning_of_a_line
    assert_caught(all_of_a_long_log_is_sent, test, tmp_path / "worker-0.log", monkeypatch)


def test_a_page_that_gives_logs_away_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # PG12, PG13
    assert_caught(
        a_browser_names_any_file, test_logs.test_a_shelf_has_the_logs_of_its_pipeline_and_nothing_else, tmp_path
    )
    test = test_serving.test_logs_are_read_by_their_owner_and_by_whoever_has_the_token

    def on_a_page() -> None:
        with test_serving.Page(tmp_path, "sesame").served() as page:
            test(page, tmp_path, monkeypatch)

    assert_caught(everybody_on_the_machine_reads_logs, on_a_page)
