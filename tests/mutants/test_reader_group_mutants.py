"""Mutants of reader groups: of what is decided, and of how the store carries it out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_group_hold_decisions as decided
from tests.protocol.store import test_reader_group as tests
from tests.protocol.store.grouping import Log
from tests.store import test_group_holds as holds
from tests.store import test_reader_groups as stored

from headgate.errors import FencedError
from headgate.protocol.store import group_holds, group_progress, group_shares, group_watch, reader_group
from headgate.protocol.store.group_progress import Progress
from headgate.protocol.store.reader_group import Done, Group
from headgate.store import cut_store
from headgate.store.catalogue import group_holding, groups
from headgate.store.group_reader import GroupReader
from headgate.store.reader import SegmentReader
from headgate.store.store import Store


def what_somebody_reads_is_given_away() -> AbstractContextManager[None]:  # RG1, RG7
    return patched(Group, "free", property(lambda self: self.readable))


def positions_go_back() -> AbstractContextManager[None]:  # RG2
    return patched(Progress, "moved", lambda self, found: replace(self, positions={**self.positions, **found}))


def positions_of_others_count() -> AbstractContextManager[None]:  # RG1
    real = reader_group._moved

    def moved(group: Any, reader: str, positions: Any) -> Any:
        for anybody in group.readers:
            group = real(group, anybody, positions)
        return group

    return patched(reader_group, "_moved", moved)


def who_follows_does_not_wait() -> AbstractContextManager[None]:  # RG4
    return patched(group_progress.ReadingOrder, "_passed_before", lambda self, number: True)


def a_checkpoint_is_where_the_group_was() -> AbstractContextManager[None]:  # RG9
    return patched(reader_group, "_noted", lambda checkpoint, reader, positions: checkpoint)


def who_owes_gets_segments() -> AbstractContextManager[None]:  # RG9
    real = group_shares.dealt

    def dealt(shares: Any, free: Any, takers: Any, sizes: Any) -> Any:
        return real(shares, free, takers or ["a", "b"], sizes) if len(takers) != 1 else real(shares, free, "b", sizes)

    return patched(reader_group, "dealt", dealt)


def who_owes_ends_segments() -> AbstractContextManager[None]:  # RG9
    real = reader_group._of_reader

    def of_reader(group: Any, event: Any, views: Any) -> Any:
        answer = real(group, event, views)
        if isinstance(answer, Done) and hasattr(event, "ended"):
            return Done(reader_group._released(answer.group, event.reader, views))
        return answer

    return patched(reader_group, "_of_reader", of_reader)


def who_joins_later_owes_too() -> AbstractContextManager[None]:  # RG8
    def owed(self: Any, reader: str) -> str | None:
        return next((x.name for x in self.checkpoints if not x.is_complete), None)

    return patched(Group, "owed", owed)


def all_checkpoints_are_kept() -> AbstractContextManager[None]:  # RG11
    return patched(reader_group, "_trimmed", lambda group: group)


def a_name_is_enough() -> AbstractContextManager[None]:  # RG12
    real = reader_group._of_reader

    def of_reader(group: Any, event: Any, views: Any) -> Any:
        member = group.readers.get(event.reader)
        return real(group, replace(event, token=member.token) if member else event, views)

    return patched(reader_group, "_of_reader", of_reader)


def whoever_was_silent_once_is_dead() -> AbstractContextManager[None]:  # RG13
    def handle(group: Any, event: Any, views: Any) -> Any:
        if isinstance(event, reader_group.Silent) and event.reader in group.readers:
            event = replace(event, beats=group.readers[event.reader].beats)
        return real(group, event, views)

    real = reader_group._handle
    return patched(reader_group, "_handle", handle)


def a_watcher_counts_what_it_slept() -> AbstractContextManager[None]:  # RG13
    return patched(group_watch, "LOOKS_PER_LEASE", 1)


def a_reset_keeps_its_readers() -> AbstractContextManager[None]:  # RG15
    real = reader_group._on_reset

    def on_reset(group: Any, event: Any, views: Any) -> Any:
        answer = real(group, event, views)
        return Done(replace(answer.group, readers=group.readers)) if isinstance(answer, Done) else answer

    return patched(reader_group, "_on_reset", on_reset)


def a_reset_is_made_again() -> AbstractContextManager[None]:  # RG3
    real = reader_group._on_reset
    return patched(reader_group, "_on_reset", lambda group, event, views: real(replace(group, reset=""), event, views))


def shares_are_counted() -> AbstractContextManager[None]:  # RG6
    return patched(group_shares, "_weight", lambda segment, sizes: 1)


def a_cut_leaves_out_what_was_read() -> AbstractContextManager[None]:  # RG10
    return patched(tests, "whole_cut", lambda view, progress: {**progress.begins, **progress.positions})


def a_sealed_stream_goes_on() -> AbstractContextManager[None]:  # RG5
    real = group_progress._kept
    return patched(group_progress, "_kept", lambda view, *rest: real(replace(view, is_sealed=False), *rest))


def nothing_is_held() -> AbstractContextManager[None]:  # RG17
    return patched(group_holding, "_write_hold", lambda connection, info, holder, wanted: None)


def checkpoints_hold_nothing() -> AbstractContextManager[None]:  # RG17
    return patched(group_holds, "_all", lambda group, stream: [group.progress[stream]])


def other_segments_are_not_noticed() -> AbstractContextManager[None]:  # RG28
    return patched(group_holds, "_shape", lambda progress: 0)


def a_checkpoint_holds_nothing_back() -> AbstractContextManager[None]:  # RG28
    real = group_holds._lowest
    return patched(group_holds, "_lowest", lambda found: real(found[:1]))


def a_reset_moves_what_was_held() -> AbstractContextManager[None]:  # RG28
    real = group_holds.moved
    return patched(
        group_holds, "moved", lambda before, after, stream: real(replace(before, epoch=after.epoch), after, stream)
    )


def nobody_misses_what_is_not_held() -> AbstractContextManager[None]:  # RG28
    real = group_holding._is_moved
    return patched(group_holding, "_is_moved", lambda *given: real(*given) or True)


def what_is_gone_is_held() -> AbstractContextManager[None]:  # RG28
    return patched(group_holds, "worth_holding", lambda view, wanted: dict(wanted))


def nothing_may_be_held() -> AbstractContextManager[None]:  # RG17, RG28
    real = group_holds.worth_holding

    def worth_holding(view: Any, wanted: Any) -> dict[int, int]:
        found = real(view, wanted)
        is_gone = all(
            view.layout.segments[x].closed_epoch is not None and group_holds._is_empty(view, x) for x in found
        )
        return {} if is_gone else found

    return patched(group_holds, "worth_holding", worth_holding)


def open_segments_without_events_are_let_go_of() -> AbstractContextManager[None]:  # RG28
    real = group_holds._is_empty
    return patched(
        group_holds,
        "worth_holding",
        lambda view, wanted: {segment: position for segment, position in wanted.items() if not real(view, segment)},
    )


def all_segments_are_sampled() -> AbstractContextManager[None]:  # RG29
    return patched(groups, "SEGMENTS_SAMPLED", 1_000)


HOLDS: dict[Mutant, Callable[..., None]] = {
    a_reset_moves_what_was_held: holds.test_a_group_holds_a_stream_that_was_made_anew_from_its_reset_on,
    nobody_misses_what_is_not_held: holds.test_what_somebody_let_go_of_is_held_again_when_the_group_moves,
    nothing_may_be_held: holds.test_a_group_that_names_only_closed_segments_without_events_holds_all_that_follows,
    what_is_gone_is_held: holds.test_nothing_is_held_of_closed_segments_whose_events_are_gone,
}


@pytest.mark.parametrize("mutant", HOLDS, ids=lambda mutant: mutant.__name__)
def test_mutants_of_what_is_held_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    test = HOLDS[mutant]

    def run() -> None:
        for store in holds.stored(tmp_path / "store"):
            test(store)

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    assert_caught(mutant, run)


def test_a_guess_that_asks_for_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(
        all_segments_are_sampled, holds.test_what_is_unread_in_many_segments_is_guessed_from_some, 250, monkeypatch
    )


def who_heard_no_answer_reads_on() -> AbstractContextManager[None]:  # RG18
    real = GroupReader._look
    return patched(GroupReader, "_look", lambda self: None if self.reader_id == "a" else real(self))


def who_is_gone_reads_on() -> AbstractContextManager[None]:  # RG12
    real = GroupReader._take

    def take(self: Any, found: Any) -> None:
        with suppress(FencedError):
            real(self, found)

    return patched(GroupReader, "_take", take)


def a_read_is_processed_at_once() -> AbstractContextManager[None]:  # RG19
    real = GroupReader._next_events

    def next_events(self: Any, rows_max: int) -> Any:
        found = real(self, rows_max)
        self.commit()
        return found

    return patched(GroupReader, "_next_events", next_events)


def a_marker_is_passed_when_it_is_told() -> AbstractContextManager[None]:  # RG9
    real = GroupReader.read

    def read(self: Any, rows_max: int = 1_000) -> Any:
        found = real(self, rows_max)
        self._pass_marker()
        return found

    return patched(GroupReader, "read", read)


def columns_of_before_stay() -> AbstractContextManager[None]:  # RG27
    return patched(GroupReader, "_read_segment", lambda self, segment, rows_max: self._segments[segment].read(rows_max))


def only_the_position_goes_back() -> AbstractContextManager[None]:  # RG27
    return patched(SegmentReader, "back_to", lambda self, position: setattr(self, "position", position))


def streams_are_found_by_their_names() -> AbstractContextManager[None]:  # RG26
    def seen(connection: Any, group: Any, stream: str) -> Any:
        info = groups.sql_streams.find_stream(connection, stream, "")
        return info, group_holding.view(connection, info)

    return patched(group_holding, "seen", seen)


def anybody_holds_as_a_group() -> AbstractContextManager[None]:  # RG17
    return patched(cut_store, "is_of_group", lambda holder: False)


OF_THE_STORE: dict[Mutant, Callable[..., None]] = {
    nothing_is_held: stored.test_what_a_group_needs_is_not_truncated_unless_it_is_said,
    checkpoints_hold_nothing: stored.test_what_a_group_needs_is_not_truncated_unless_it_is_said,
    who_heard_no_answer_reads_on: stored.test_an_answer_that_was_lost_costs_and_repeats_nothing,
    columns_of_before_stay: stored.test_columns_that_are_added_come_to_the_readers_of_a_group,
    only_the_position_goes_back: stored.test_columns_that_are_added_come_to_the_readers_of_a_group,
    streams_are_found_by_their_names: (
        stored.test_a_group_one_of_whose_streams_was_deleted_begins_anew_in_it_and_goes_on_in_the_others
    ),
    anybody_holds_as_a_group: stored.test_nobody_else_holds_under_the_name_of_a_group,
    who_is_gone_reads_on: stored.test_without_commits_everything_is_read_again,
    a_read_is_processed_at_once: stored.test_without_commits_everything_is_read_again,
    a_marker_is_passed_when_it_is_told: stored.test_a_checkpoint_comes_as_a_marker_to_each_reader_and_is_gone_back_to,
}


@pytest.mark.parametrize("mutant", OF_THE_STORE, ids=lambda mutant: mutant.__name__)
def test_mutants_of_the_store_are_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test, clock = OF_THE_STORE[mutant], stored.Clock()

    def run() -> None:
        with Store.open(tmp_path / "store") as opened, monkeypatch.context() as patch:
            store = Store(opened.root, opened._catalogue, opened._storage, clock=clock)
            store.create_stream(stored.STREAM, stored.KEYED, segments=2, routing_key="key")
            given = {"store": store, "clock": clock, "monkeypatch": patch}
            wanted = test.__code__.co_varnames[: test.__code__.co_argcount]  # type: ignore[attr-defined]
            test(**{name: given[name] for name in wanted})

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    assert_caught(mutant, run)


MUTANTS: dict[Mutant, Callable[..., None]] = {
    what_somebody_reads_is_given_away: tests.test_each_segment_belongs_to_one_reader,
    positions_go_back: tests.test_positions_never_go_back_and_are_those_of_who_has_the_segment,
    positions_of_others_count: tests.test_positions_never_go_back_and_are_those_of_who_has_the_segment,
    who_follows_does_not_wait: tests.test_a_segment_that_follows_waits_for_all_before_it,
    a_checkpoint_is_where_the_group_was: tests.test_a_checkpoint_is_where_all_have_met_its_marker,
    who_owes_gets_segments: tests.test_while_a_reader_owes_it_gets_and_gives_and_ends_nothing,
    who_owes_ends_segments: tests.test_while_a_reader_owes_it_gets_and_gives_and_ends_nothing,
    who_joins_later_owes_too: tests.test_who_joins_later_owes_nothing_and_without_readers_it_is_complete,
    all_checkpoints_are_kept: tests.test_only_the_last_completed_checkpoints_are_kept,
    a_name_is_enough: tests.test_a_reader_that_was_taken_for_dead_is_refused_and_changes_nothing,
    whoever_was_silent_once_is_dead: tests.test_who_has_lived_since_is_not_dead,
    a_watcher_counts_what_it_slept: tests.test_a_watcher_counts_only_what_it_has_seen,
    a_reset_keeps_its_readers: tests.test_a_reset_begins_anew_without_readers,
    a_reset_is_made_again: tests.test_an_event_that_is_repeated_changes_nothing,
    shares_are_counted: tests.test_shares_follow_what_is_unread_and_come_to_rest,
    a_cut_leaves_out_what_was_read: tests.test_a_segment_that_follows_waits_for_all_before_it,
    other_segments_are_not_noticed: decided.test_other_segments_have_to_be_looked_at,
    a_checkpoint_holds_nothing_back: decided.test_what_moved_is_told_and_a_checkpoint_holds_it_back,
    open_segments_without_events_are_let_go_of: decided.test_closed_segments_without_events_are_not_worth_holding,
    a_sealed_stream_goes_on: tests.test_a_sealed_stream_is_read_to_its_end,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Mutant) -> None:
    test = MUTANTS[mutant]

    def run() -> None:
        if test.__code__.co_argcount:  # type: ignore[attr-defined]
            log = Log()
            for number in range(8):
                log.write(number)
            test(log)
        else:
            test()

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    assert_caught(mutant, run)
