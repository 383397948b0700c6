"""Mutants of connectors: what is written while a pipeline is built, and readers that failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import tests.connectors.files.test_file_sink as sinks
import tests.connectors.test_broken_readers as readers
from tests.mutants.harness import assert_caught, patched

from headgate.connectors.breaking_reader import BreakingReader
from headgate.connectors.files.sink import FileSink

Mutant = Callable[[], AbstractContextManager[None]]


def the_check_makes_the_directory() -> AbstractContextManager[None]:
    return patched(FileSink, "check", lambda self, schema: self.make_target(schema))


def asking_makes_the_directory() -> AbstractContextManager[None]:
    return patched(FileSink, "owner", lambda self, pipeline, node: self.target(pipeline, node).owner())


def a_broken_reader_goes_on() -> AbstractContextManager[None]:
    return patched(BreakingReader, "_refuse_if_broken", lambda self: None)


def a_broken_reader_may_have_ended() -> AbstractContextManager[None]:
    return patched(BreakingReader, "is_finished", lambda self: self._has_ended())


@pytest.mark.parametrize("mutant", [the_check_makes_the_directory, asking_makes_the_directory])
def test_writing_while_a_pipeline_is_built_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    assert_caught(mutant, sinks.test_a_check_writes_nothing_and_says_where_nothing_could_be_written, tmp_path)


@pytest.mark.parametrize("mutant", [a_broken_reader_goes_on, a_broken_reader_may_have_ended])
def test_reading_on_after_a_failure_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    made, owner, name = readers.CASES["the only file"]

    def reads(where: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            readers.test_a_reader_that_failed_says_so_each_time_and_another_one_reads_on(
                made, owner, name, 1, where, patch
            )

    assert_caught(mutant, reads, tmp_path)
