"""Mutants of what programs read and write streams with: followers, tasks, commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api import test_async_cancelling as cancelling
from tests.api import test_async_store as tasks
from tests.cli import test_streams_copy as copies
from tests.cli import test_streams_write as commands
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_reading_order as order
from tests.store import test_following as following
from tests.store.storing import KEYED, STREAM

from headgate.api.aio.beside import Beside
from headgate.api.aio.calls import Calls
from headgate.api.aio.reading import AsyncStreamFollower
from headgate.cli import streams_write
from headgate.protocol.store.reading_order import ReadingOrder
from headgate.store.following import StreamFollower
from headgate.store.group_reader import CheckpointMarker, GroupReader
from headgate.store.reader import SegmentReader
from headgate.store.shared_transaction import SharedTransaction
from headgate.store.store import Store


def what_follows_does_not_wait() -> AbstractContextManager[None]:  # FW1
    return patched(ReadingOrder, "_passed_before", lambda self, number: True)


@contextmanager
def events_come_in_the_schema_of_before() -> Iterator[None]:  # FW3
    with pytest.MonkeyPatch.context() as patch:
        nothing = property(lambda self: 0, lambda self, version: None)
        patch.setattr(SegmentReader, "newest_schema", nothing, raising=False)
        yield


def a_cut_forgets_what_was_read_to_its_end() -> AbstractContextManager[None]:  # FW4
    real = StreamFollower.cut

    def cut(self: Any) -> Any:
        here = {number: self._position(number) for number in self._places}
        return replace(real(self), positions=here)

    return patched(StreamFollower, "cut", cut)


def segments_end_before_what_follows_was_seen() -> AbstractContextManager[None]:  # FW8
    def end_segments(self: Any) -> bool:
        ended = [number for number in sorted(self._places) if self._is_over(number)]
        for number in ended:
            self._ended[number] = self._position(number)
            del self._places[number]
            self._readers.pop(number, None)
        if ended:
            self._look()
            for number in ended:
                self._order.end(number)
            self._take()
        return bool(ended)

    return patched(StreamFollower, "_end_segments", end_segments)


def only_the_position_goes_back() -> AbstractContextManager[None]:  # FW8
    return patched(SegmentReader, "back_to", lambda self, position: setattr(self, "position", position))


def what_is_given_back_is_lost() -> AbstractContextManager[None]:  # FW5, AC4
    return patched(StreamFollower, "unread", lambda self, found: None)


def everything_that_waits_is_looked_at_again() -> AbstractContextManager[None]:  # SC40
    real = ReadingOrder.ready

    def ready(self: Any) -> Any:
        self._unchecked |= self.waiting.keys()
        return real(self)

    return patched(ReadingOrder, "ready", ready)


def test_a_history_that_is_gone_through_again_and_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test = order.test_a_long_history_costs_as_much_as_it_has_segments
    assert_caught(everything_that_waits_is_looked_at_again, test, monkeypatch)


def who_waits_asks_all_the_time() -> AbstractContextManager[None]:  # FW6
    def read_now(self: Any, rows_max: int) -> Any:
        self._look()
        return real(self, rows_max)

    real = StreamFollower._read_now
    return patched(StreamFollower, "_read_now", read_now)


def one_key_is_looked_for_everywhere() -> AbstractContextManager[None]:  # FW7
    return patched(StreamFollower, "_is_wanted", lambda self, number: True)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (what_follows_does_not_wait, following.test_a_stream_that_is_scaled_is_followed_in_the_order_of_each_key),
        (
            events_come_in_the_schema_of_before,
            following.test_columns_that_are_added_come_with_the_first_event_that_has_them,
        ),
        (segments_end_before_what_follows_was_seen, following.test_a_call_that_fails_costs_a_follower_nothing),
        (only_the_position_goes_back, following.test_a_look_at_new_columns_that_fails_costs_nothing),
        (a_cut_forgets_what_was_read_to_its_end, following.test_who_follows_from_its_cut_gets_the_rest),
        (what_is_given_back_is_lost, following.test_what_is_given_back_is_returned_again),
    ],
)
def test_a_follower_that_is_wrong_is_caught(tmp_path: Path, mutant: Mutant, test: Callable[[Store], object]) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        assert_caught(mutant, test, store)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (who_waits_asks_all_the_time, following.test_who_waits_asks_the_catalogue_only_when_something_has_changed),
        (one_key_is_looked_for_everywhere, following.test_one_key_is_read_from_its_segments_only),
    ],
)
def test_a_follower_that_asks_too_much_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, test: Callable[..., object]
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        assert_caught(mutant, test, store, monkeypatch)


def calls_are_made_in_the_loop() -> AbstractContextManager[None]:  # AC1
    async def run(self: Any, call: Callable[[], Any], undo: Any = None) -> Any:
        return call()

    return patched(Calls, "run", run)


def who_is_cancelled_leaves_its_call_behind() -> AbstractContextManager[None]:  # AC2
    async def settle(self: Any, asked: Any, undo: Any) -> None:
        return None

    return patched(Calls, "_settle", settle)


def nothing_is_taken_back() -> AbstractContextManager[None]:  # AC3
    real = Calls.run
    return patched(Calls, "run", lambda self, call, undo=None: real(self, call))


def a_group_reader_takes_nothing_back() -> AbstractContextManager[None]:  # AC4
    return patched(GroupReader, "unread", lambda self, found: None)


def markers_are_not_taken_back() -> AbstractContextManager[None]:  # AC4
    real = GroupReader.unread

    def unread(self: Any, found: Any) -> None:
        if not isinstance(found, CheckpointMarker):
            real(self, found)

    return patched(GroupReader, "unread", unread)


def calls_overlap() -> AbstractContextManager[None]:  # AC5
    real = Beside.__init__
    return patched(Beside, "__init__", lambda self, calls, blocking, in_turn=False: real(self, calls, blocking))


def it_looks_before_it_reads_the_number() -> AbstractContextManager[None]:  # AC6
    def look(self: Any, rows_max: int) -> Any:
        found = self._blocking.read(rows_max)
        return self._changes(), found, None

    return patched(AsyncStreamFollower, "_look", look)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (calls_are_made_in_the_loop, tasks.test_no_call_is_made_in_the_thread_of_the_loop),
        (what_is_given_back_is_lost, cancelling.test_a_cancelled_read_loses_nothing),
        (a_group_reader_takes_nothing_back, cancelling.test_what_a_cancelled_read_had_found_is_not_committed),
        (markers_are_not_taken_back, cancelling.test_a_marker_that_nobody_was_told_of_is_not_passed),
    ],
)
def test_tasks_that_are_wronged_are_caught(tmp_path: Path, mutant: Mutant, test: Callable[[Path], object]) -> None:
    assert_caught(mutant, test, tmp_path)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (calls_overlap, tasks.test_calls_of_one_reader_do_not_overlap),
        (nothing_is_taken_back, cancelling.test_what_a_cancelled_call_has_made_is_taken_back),
        (it_looks_before_it_reads_the_number, tasks.test_what_comes_between_a_look_and_the_wait_is_not_missed),
    ],
)
def test_what_is_left_behind_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, test: Callable[..., object]
) -> None:
    assert_caught(mutant, test, tmp_path, monkeypatch)


def test_a_call_that_is_left_behind_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = cancelling.test_who_is_cancelled_in_a_call_ends_when_it_has_ended
    assert_caught(who_is_cancelled_leaves_its_call_behind, test, tmp_path, monkeypatch, 1)


def blocks_are_numbered_instead_of_events() -> AbstractContextManager[None]:  # CL3
    return patched(streams_write, "_append", lambda writer, batch, is_numbered: writer.append(batch))


def test_numbers_of_blocks_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    assert_caught(blocks_are_numbered_instead_of_events, commands.test_what_was_killed_goes_on, monkeypatch)


def a_copy_that_failed_is_committed() -> AbstractContextManager[None]:  # CL5
    return patched(SharedTransaction, "abort", lambda self: self.commit())


def test_a_copy_in_parts_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    monkeypatch.setenv("HEADGATE_STORE", str(root))
    with Store.open() as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        copies.write(store, 0, 40)
    assert_caught(a_copy_that_failed_is_committed, copies.test_a_copy_that_fails_leaves_nothing, root, monkeypatch)
