"""Mutants of the stream store: each breaks one promise about what is durable, and a named test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.store import test_store_acknowledgements as acknowledging
from tests.store import test_store_linger as lingering
from tests.store.storing import KEYED, STREAM

from headgate.store import catalogue as catalogues
from headgate.store.faulty import FaultyStorage
from headgate.store.linger import Linger
from headgate.store.memory import MemoryStorage
from headgate.store.store import Store
from headgate.store.writer import Appended, StreamWriter

Test = Callable[..., object]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


# -- appends ---------------------------------------------------------------------------------------------------------


@contextmanager
def a_repeated_append_is_acknowledged_at_once() -> Iterator[None]:
    """S7 before it was mended: a number that was seen is taken for one that the store has."""

    def at_once(self: StreamWriter, number: int) -> Future[Appended]:
        future: Future[Appended] = Future()
        future.set_result(Appended(is_duplicate=True))
        return future

    with patched(StreamWriter, "_future_of_first", at_once):
        yield


@contextmanager
def a_writer_goes_on_after_what_ended_it() -> Iterator[None]:
    real = StreamWriter._end

    def end(self: StreamWriter, error: Exception) -> None:
        real(self, error)
        self._failure = None

    with patched(StreamWriter, "_end", end):
        yield


@contextmanager
def numbers_below_one_are_taken_for_repeated_ones() -> Iterator[None]:
    with patched(StreamWriter, "_check_number", lambda self, sequence: None):
        yield


@contextmanager
def a_child_keeps_the_buffer_of_its_parent() -> Iterator[None]:
    real = StreamWriter._begin_in_this_process

    def keep(self: StreamWriter) -> None:
        buffered = getattr(self, "_buffer", [])
        real(self)
        self._buffer = buffered

    with patched(StreamWriter, "_begin_in_this_process", keep):
        yield


@contextmanager
def versions_of_two_connections_are_compared() -> Iterator[None]:
    with patched(catalogues, "_VERSIONS_OF_A_TAIL", 0):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            a_repeated_append_is_acknowledged_at_once,
            acknowledging.test_a_repeated_append_that_is_still_buffered_shares_its_future,
        ),
        (
            a_writer_goes_on_after_what_ended_it,
            acknowledging.test_a_writer_that_was_fenced_acknowledges_nothing_any_more,
        ),
        (
            numbers_below_one_are_taken_for_repeated_ones,
            acknowledging.test_numbers_that_no_store_can_know_are_refused_not_acknowledged,
        ),
        (
            a_child_keeps_the_buffer_of_its_parent,
            acknowledging.test_after_a_fork_the_parent_keeps_what_it_buffered,
        ),
        (
            versions_of_two_connections_are_compared,
            acknowledging.test_a_reader_taken_through_a_fork_sees_what_came_meanwhile,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_false_acknowledgement_is_caught(store: Store, mutant: Mutant, test: Test) -> None:
    assert_caught(mutant, test, store)


def test_an_acknowledgement_of_what_a_failed_flush_did_not_write_is_caught(tmp_path: Path) -> None:
    disk = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        assert_caught(
            a_repeated_append_is_acknowledged_at_once,
            acknowledging.test_a_repeated_append_is_not_acknowledged_before_the_first_is_durable,
            store,
            disk,
        )


@contextmanager
def nobody_flushes_in_time() -> Iterator[None]:
    with patched(Linger, "arm", lambda self: None), patched(lingering, "PATIENCE_S", 0.2):
        yield


@contextmanager
def a_timed_flush_that_failed_is_not_repeated() -> Iterator[None]:
    real = StreamWriter._flush_in_time

    def once(self: StreamWriter) -> bool:
        real(self)
        return True

    without = patched(StreamWriter, "_finish", _without_arming(StreamWriter._finish))
    with without, patched(StreamWriter, "_flush_in_time", once), patched(lingering, "PATIENCE_S", 0.5):
        yield


def _without_arming(real: Callable[..., None]) -> Callable[..., None]:
    def finish(self: StreamWriter, attempt: Any) -> None:
        linger, self._linger = self._linger, None
        try:
            real(self, attempt)
        finally:
            self._linger = linger

    return finish


@contextmanager
def those_who_wait_are_not_told_what_ended_the_writer() -> Iterator[None]:
    real = StreamWriter._end

    def end(self: StreamWriter, error: Exception) -> None:
        self._attempt, self._buffer = None, []
        real(self, error)

    with patched(StreamWriter, "_end", end), patched(lingering, "PATIENCE_S", 0.5):
        yield


@contextmanager
def the_thread_of_a_closed_writer_stays() -> Iterator[None]:
    with patched(Linger, "close", lambda self, wait=True: None):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            nobody_flushes_in_time,
            lingering.test_an_append_completes_although_nobody_flushes,
        ),
        (
            those_who_wait_are_not_told_what_ended_the_writer,
            lingering.test_what_ends_the_writer_is_told_to_those_who_wait,
        ),
        (
            the_thread_of_a_closed_writer_stays,
            lingering.test_no_thread_stays_behind,
        ),
    ],
)
def test_a_linger_that_does_not_keep_its_word_is_caught(
    store: Store, mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (store, monkeypatch) if test is lingering.test_no_thread_stays_behind else (store,)
    assert_caught(mutant, test, *arguments)


def test_a_timed_flush_that_gives_up_is_caught(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test = lingering.test_a_full_disk_delays_what_waits_and_loses_nothing
    assert_caught(a_timed_flush_that_failed_is_not_repeated, test, tmp_path, caplog)
