"""Mutants of readers of a group that wait, are busy or come back, and of what the check says about groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.sim.product.patching import around, skipped
from tests.store import test_group_audit as audit
from tests.store import test_group_waiting as waiting

from headgate.errors import HeadgateError
from headgate.protocol.store.group_watch import Watch
from headgate.store.catalogue import group_audit, group_holding, group_rows
from headgate.store.group_heart import GroupHeart
from headgate.store.group_reader import LOOK_PAUSE_MS, GroupReader
from headgate.store.reader_groups import ReaderGroup
from headgate.store.store import Store


def a_read_does_not_wait() -> AbstractContextManager[None]:  # RG21
    return patched(GroupReader, "read", lambda self, rows_max=10, timeout=0: self._read_now(rows_max))


def a_reader_that_waits_hears_nothing() -> AbstractContextManager[None]:  # RG21
    def wait(self: Any, until_ms: int) -> None:
        self._pause.wait((until_ms - self._clock.monotonic_ms()) / 1_000)

    return patched(GroupReader, "_wait", wait)


def a_reader_that_waits_asks_for_everything() -> AbstractContextManager[None]:  # RG21
    return patched(GroupReader, "_wait", lambda self, until_ms: self._pause.wait(LOOK_PAUSE_MS / 1_000))


def changes_are_counted_from_when_it_waits() -> AbstractContextManager[None]:  # RG21
    def wait(call: Any, self: Any, until_ms: int) -> None:
        self._changes = self._catalogue.changes()
        call(self, until_ms)

    return around(GroupReader, "_wait", wait)


def whoever_waits_commits_nothing() -> AbstractContextManager[None]:  # RG21
    return skipped(GroupReader, "_is_commit_due", False)


def it_waits_although_all_has_ended() -> AbstractContextManager[None]:  # RG21
    return patched(GroupReader, "has_ended", property(lambda self: False))


def the_heart_stands_still() -> AbstractContextManager[None]:  # RG22
    return skipped(GroupHeart, "_waits_for_beat", False)


def the_heart_beats_for_ever() -> AbstractContextManager[None]:  # RG22
    def init(call: Any, self: Any, beat: Any, lease_ms: int, busy_ms: int | None, *rest: Any) -> None:
        call(self, beat, lease_ms, None if busy_ms is None else 10**9, *rest)

    return around(GroupHeart, "__init__", init)


def the_heart_outlives_its_reader() -> AbstractContextManager[None]:  # RG22
    return skipped(GroupHeart, "close")


def the_heart_keeps_its_reader() -> AbstractContextManager[None]:  # RG22
    def init(call: Any, self: Any, beat: Any, *rest: Any) -> None:
        call(self, beat, *rest)
        self.kept = beat

    return around(GroupHeart, "__init__", init)


def a_failure_stops_the_heart() -> AbstractContextManager[None]:  # RG22
    def run(self: Any) -> None:
        while self._waits_for_beat():
            try:
                self._beat(self.next_number())
            except HeadgateError:
                return

    return patched(GroupHeart, "_run", run)


def who_is_fenced_beats_on() -> AbstractContextManager[None]:  # RG12, RG22
    def run(self: Any) -> None:
        while self._waits_for_beat():
            try:
                self._beat(self.next_number())
            except HeadgateError:
                continue

    return patched(GroupHeart, "_run", run)


def who_waits_for_its_name_does_not_watch() -> AbstractContextManager[None]:  # RG23
    return skipped(ReaderGroup, "_look_at")


def beats_are_not_heard() -> AbstractContextManager[None]:  # RG13, RG23
    def silence_ms(call: Any, self: Any, name: str, member: Any, passed_ms: int) -> int:
        if name in self._heard:
            self._heard[name].beats = member.beats
        return int(call(self, name, member, passed_ms))

    return around(Watch, "_silence_ms", silence_ms)


def contradictions_are_read() -> AbstractContextManager[None]:  # RG24
    return skipped(group_rows, "contradictions", [])


def positions_are_not_compared() -> AbstractContextManager[None]:  # RG24
    return skipped(group_audit, "_beyond", [])


def what_is_held_is_not_compared() -> AbstractContextManager[None]:  # RG24
    return skipped(group_audit, "_is_held_too_little", False)


def every_hold_is_a_groups() -> AbstractContextManager[None]:  # RG25
    return patched(group_holding, "group_of", lambda holder: holder.removeprefix("reader group "))


def a_repair_believes_everything() -> AbstractContextManager[None]:  # RG25
    return skipped(group_audit, "_fits", True)


def unreadable(store: Store) -> None:
    audit.test_a_group_that_cannot_be_read_is_a_problem_and_can_be_deleted(
        store, b'"owners":[]', b'"owners":[["app/events",0,"nobody"]]'
    )


WAITING: dict[Mutant, Callable[[], None]] = {
    a_read_does_not_wait: waiting.test_a_read_waits_until_something_comes_or_its_time_is_over,
    a_reader_that_waits_hears_nothing: waiting.test_a_read_waits_until_something_comes_or_its_time_is_over,
    a_reader_that_waits_asks_for_everything: (
        waiting.test_a_reader_that_waits_asks_the_store_for_nothing_but_whether_it_has_changed
    ),
    changes_are_counted_from_when_it_waits: waiting.test_what_came_while_it_looked_is_not_waited_for,
    whoever_waits_commits_nothing: waiting.test_what_was_returned_is_committed_while_its_reader_waits,
    it_waits_although_all_has_ended: waiting.test_nobody_waits_for_what_cannot_come,
    the_heart_stands_still: waiting.test_a_thread_says_that_a_busy_reader_lives_for_as_long_as_it_may_be_busy,
    the_heart_beats_for_ever: waiting.test_whoever_was_busy_for_too_long_is_refused_and_does_not_come_back,
    the_heart_outlives_its_reader: waiting.test_the_thread_ends_with_its_reader_and_goes_on_after_a_failure,
    the_heart_keeps_its_reader: waiting.test_the_thread_ends_when_nobody_has_its_reader_any_more,
    a_failure_stops_the_heart: waiting.test_the_thread_ends_with_its_reader_and_goes_on_after_a_failure,
    who_is_fenced_beats_on: waiting.test_the_thread_ends_when_its_reader_is_out_of_the_group,
    who_waits_for_its_name_does_not_watch: waiting.test_a_name_is_free_when_its_reader_has_been_silent_for_its_lease,
    beats_are_not_heard: waiting.test_who_has_the_name_and_lives_keeps_it,
}
STORED: dict[Mutant, Callable[[Store], None]] = {
    contradictions_are_read: unreadable,
    positions_are_not_compared: audit.test_a_position_that_the_stream_does_not_have_is_a_problem,
    what_is_held_is_not_compared: audit.test_what_a_group_holds_is_checked_and_mended,
    every_hold_is_a_groups: audit.test_a_repair_leaves_alone_what_it_cannot_know,
    a_repair_believes_everything: audit.test_a_repair_leaves_alone_what_it_cannot_know,
}


@pytest.mark.parametrize("mutant", WAITING, ids=lambda mutant: mutant.__name__)
def test_mutants_of_waiting_are_caught(mutant: Mutant) -> None:
    assert_caught(mutant, WAITING[mutant])


@pytest.mark.parametrize("mutant", STORED, ids=lambda mutant: mutant.__name__)
def test_mutants_of_the_check_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    lives = iter(range(10))

    def test() -> None:
        with contextmanager(audit.stored)(tmp_path / f"life {next(lives)}") as store:
            STORED[mutant](store)

    test.__name__ = STORED[mutant].__name__  # type: ignore[attr-defined]
    assert_caught(mutant, test)
