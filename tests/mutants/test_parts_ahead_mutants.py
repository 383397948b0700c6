"""Mutants of reading ahead: what is asked for when, what is told when, and what is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.store import test_parts_ahead as ahead_tests
from tests.store.test_parts_ahead import Room, room, written

from headgate.store import read_ahead
from headgate.store.fetching import Fetch, Fetching
from headgate.store.fetching import Room as Bytes
from headgate.store.read_ahead import ReadAhead

__all__ = ["room", "written"]  # fixtures

Test = Callable[..., object]


@contextmanager
def who_reads_one_part_is_thought_to_read_on() -> Iterator[None]:  # S82
    usual = ReadAhead.ask

    def ask(self: ReadAhead, parts: Iterable[Any], end: int | None) -> None:
        self._is_reading_on = True
        usual(self, parts, end)

    with patched(ReadAhead, "ask", ask):
        yield


@contextmanager
def ends_are_passed_over() -> Iterator[None]:  # S82
    usual = ReadAhead._new
    with patched(ReadAhead, "_new", lambda self, parts, end: usual(self, parts, None)):
        yield


@contextmanager
def as_much_is_asked_for_as_there_is() -> Iterator[None]:  # S82
    usual = ReadAhead.ask

    def ask(self: ReadAhead, parts: Iterable[Any], end: int | None) -> None:
        with patched(read_ahead, "AHEAD_BYTES", 1 << 60):
            usual(self, parts, end)

    with patched(ReadAhead, "ask", ask):
        yield


def room_has_no_end() -> AbstractContextManager[None]:  # S82
    def take(self: Bytes, fetch: Fetch) -> bool:
        self._taken[fetch] = fetch.size_bytes
        return True

    return patched(Bytes, "take", take)


@contextmanager
def each_part_is_a_request() -> Iterator[None]:  # S82
    usual = read_ahead.runs_of

    def runs_of(parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            yield from usual([part])

    with patched(read_ahead, "runs_of", runs_of):
        yield


def who_gets_no_thread_takes_room_for_ever() -> AbstractContextManager[None]:  # S82
    return patched(Bytes, "give_back", lambda self, fetch: None)


def what_is_given_up_is_fetched_all_the_same() -> AbstractContextManager[None]:  # S83
    return patched(Fetch, "let_go", lambda self: self._room.give_back(self))


def closing_gives_nothing_up() -> AbstractContextManager[None]:  # S83
    return patched(ReadAhead, "forget", lambda self: None)


def a_dropped_reader_keeps_its_room() -> AbstractContextManager[None]:  # S83
    class Never:
        atexit = False

    return patched(read_ahead.weakref, "finalize", lambda *arguments: Never())


def a_fork_is_not_noticed() -> AbstractContextManager[None]:  # S83
    return patched(ReadAhead, "_notice_fork", lambda self: None)


@contextmanager
def a_closed_store_forgets_who_waits() -> Iterator[None]:  # S83
    usual = Fetching.close

    def close(self: Fetching) -> None:
        for pool, _ in self._here.values():
            getattr(pool, "calls", []).clear()
        usual(self)

    with patched(Fetching, "close", close):
        yield


@contextmanager
def a_failure_of_long_ago_is_told() -> Iterator[None]:  # S84
    with patched(Fetch, "is_over", property(lambda self: False)):
        yield


@contextmanager
def what_fails_ahead_is_told_at_once() -> Iterator[None]:  # S84
    usual = ReadAhead.ask

    def ask(self: ReadAhead, parts: Iterable[Any], end: int | None) -> None:
        usual(self, parts, end)
        for asked in list(self._asked):
            asked.fetch.wait()

    with patched(ReadAhead, "ask", ask):
        yield


def a_failed_part_is_nobodys() -> AbstractContextManager[None]:  # S84
    def wait(self: Fetch) -> bytes | None:
        while not self._over.wait(20):
            pass
        return bytes(self.size_bytes) if self._error is not None else self._payload

    return patched(Fetch, "wait", wait)


def a_failure_keeps_its_reader() -> AbstractContextManager[None]:  # S83
    def wait(self: Fetch) -> bytes | None:
        while not self._over.wait(20):
            pass
        if self._error is not None:
            raise self._error
        return self._payload

    return patched(Fetch, "wait", wait)


@contextmanager
def bytes_are_taken_from_where_the_run_begins() -> Iterator[None]:  # S84
    usual = ReadAhead._fetched

    def fetched(self: ReadAhead, path: str, offset: int, size_bytes: int) -> memoryview | None:
        whole = self._asked[0] if self._asked else None
        found = usual(self, path, offset, size_bytes)
        if found is None or whole is None:
            return found
        return memoryview(whole.fetch._payload or bytes(found))[:size_bytes]

    with patched(ReadAhead, "_fetched", fetched):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            who_reads_one_part_is_thought_to_read_on,
            ahead_tests.test_parts_that_follow_are_on_their_way_together_over_borders_of_chunks,
        ),
        (ends_are_passed_over, ahead_tests.test_nothing_behind_an_end_is_fetched),
        (as_much_is_asked_for_as_there_is, ahead_tests.test_what_is_fetched_ahead_is_bounded_in_requests_and_bytes),
        (room_has_no_end, ahead_tests.test_all_readers_of_a_store_share_its_room),
        (each_part_is_a_request, ahead_tests.test_parts_behind_each_other_in_a_file_are_one_request),
        (who_gets_no_thread_takes_room_for_ever, ahead_tests.test_without_a_thread_each_part_is_asked_for_in_its_turn),
        (
            what_is_given_up_is_fetched_all_the_same,
            ahead_tests.test_a_closed_reader_ends_what_has_not_begun_and_can_read_on,
        ),
        (
            what_is_given_up_is_fetched_all_the_same,
            ahead_tests.test_what_is_under_way_when_a_reader_is_closed_is_not_kept,
        ),
        (closing_gives_nothing_up, ahead_tests.test_a_closed_reader_ends_what_has_not_begun_and_can_read_on),
        (a_dropped_reader_keeps_its_room, ahead_tests.test_a_reader_that_is_dropped_gives_its_room_back),
        (a_failure_keeps_its_reader, ahead_tests.test_a_reader_that_failed_and_is_dropped_gives_its_room_back),
        (a_fork_is_not_noticed, ahead_tests.test_a_reader_taken_through_a_fork_waits_for_nothing_of_its_parent),
        (a_closed_store_forgets_who_waits, ahead_tests.test_a_closed_store_lets_nobody_wait),
        (a_failure_of_long_ago_is_told, ahead_tests.test_a_failure_that_nobody_waited_for_is_asked_for_again),
        (what_fails_ahead_is_told_at_once, ahead_tests.test_a_failure_is_told_behind_everything_before_it),
        (a_failed_part_is_nobodys, ahead_tests.test_a_failure_is_told_behind_everything_before_it),
        (bytes_are_taken_from_where_the_run_begins, ahead_tests.test_parts_behind_each_other_in_a_file_are_one_request),
    ],
)
def test_a_bug_planted_in_reading_ahead_is_caught(
    mutant: Mutant, test: Test, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"room": room, "monkeypatch": monkeypatch, "pick": 0}
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    assert_caught(mutant, test, *(wanted[name] for name in names))
