"""Mutants of sources that read by a reader group: of whose a group is, of its readers, and of the hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.connectors import test_group_source as stored
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import grouping
from tests.protocol.store import test_group_claims as tests
from tests.protocol.store.grouping import Log

from headgate.connectors.hooks import ASK_AGAIN
from headgate.connectors.streams.group_hook import GroupCheckpointHook
from headgate.connectors.streams.group_reading import GroupSourceReader
from headgate.protocol.store import group_claims, reader_group
from headgate.protocol.store.group_claims import Claim
from headgate.store.claimed_groups import ClaimedGroup, ClaimedReader
from headgate.store.store import Store


def anybody_uses_the_group() -> AbstractContextManager[None]:  # GS1
    return patched(group_claims, "objection", lambda claim, claimant: None)


def anybody_takes_the_group() -> AbstractContextManager[None]:  # GS1, GS2
    return patched(group_claims, "objection_to_claim", lambda claim, wanted, readers: None)


def a_life_at_home_is_another_pipeline() -> AbstractContextManager[None]:  # GS2
    real = group_claims.objection_to_claim

    def objection(claim: Any, wanted: Any, readers: Any) -> Any:
        return real(claim, None if wanted is None else replace(wanted, home=wanted.life), readers)

    return patched(group_claims, "objection_to_claim", objection)


def whoever_comes_first_gets_everything() -> AbstractContextManager[None]:  # GS3
    return patched(Claim, "joined", lambda self, expected, count: replace(self, expected=expected, is_gathered=True))


def what_follows_is_released_at_once() -> AbstractContextManager[None]:  # GS6
    return patched(
        reader_group, "_claimed_step", lambda group, event, views: reader_group._released(group, event.reader, views)
    )


def what_follows_goes_to_anybody() -> AbstractContextManager[None]:  # GS7
    return patched(reader_group, "_heirs", lambda group, seen, reader, views: {})


def segments_change_hands() -> AbstractContextManager[None]:  # GS4
    real = reader_group.settled

    def settled(group: Any, sizes: Any, *, balances: bool = True) -> Any:
        found = real(replace(group, claim=None), sizes, balances=balances)
        return replace(found, claim=group.claim)

    return patched(grouping, "settled", settled)


def three_checkpoints_are_enough() -> AbstractContextManager[None]:  # GS14
    real = reader_group._on_checkpoint

    def on_checkpoint(group: Any, event: Any) -> Any:
        answer = real(replace(group, claim=None), event)
        return replace(answer, group=replace(answer.group, claim=group.claim)) if hasattr(answer, "group") else answer

    return patched(reader_group, "_on_checkpoint", on_checkpoint)


def a_segment_ends_before_its_heirs_are_known() -> AbstractContextManager[None]:  # GS7
    return patched(GroupSourceReader, "_is_over", lambda self, split: self._readers[split].has_ended())


def what_follows_is_read_at_once() -> AbstractContextManager[None]:  # GS8
    real = GroupSourceReader._see

    def see(self: GroupSourceReader) -> None:
        real(self)
        self._waits_for.clear()

    return patched(GroupSourceReader, "_see", see)


def who_is_cut_without_a_marker_tells_nobody() -> AbstractContextManager[None]:  # GS12
    real = GroupSourceReader.snapshot

    def snapshot(self: GroupSourceReader, context: Any) -> None:
        if self._member.owed == context.checkpoint_id:
            real(self, context)

    return patched(GroupSourceReader, "snapshot", snapshot)


def a_marker_that_is_over_is_passed_by_nobody() -> AbstractContextManager[None]:  # GS11
    def read_on(self: GroupSourceReader, splits: Any) -> None:
        self._still -= set(splits)

    return patched(GroupSourceReader, "read_on", read_on)


def a_reader_does_not_stand_still() -> AbstractContextManager[None]:  # GS10
    real = GroupSourceReader._next

    def step(self: GroupSourceReader) -> Any:
        found = real(self)
        self._still.clear()
        return found

    return patched(GroupSourceReader, "_next", step)


def the_hook_does_not_wait() -> AbstractContextManager[None]:  # GS13
    return patched(ClaimedGroup, "is_complete", lambda self, checkpoint: True)


def the_hook_asks_twice() -> AbstractContextManager[None]:  # GS14
    def trigger(self: GroupCheckpointHook, checkpoint_id: int) -> Any:
        self._group.ask(checkpoint_id)
        if not self._group.is_complete(checkpoint_id):
            return ASK_AGAIN
        return b"{}"

    return patched(GroupCheckpointHook, "trigger", trigger)


def a_restart_trusts_the_group() -> AbstractContextManager[None]:  # GS5, GS13
    def restore(self: GroupCheckpointHook, checkpoint_id: int, data: bytes | None) -> None:
        self._group.begin(self._start_of(checkpoint_id))  # type: ignore[attr-defined]

    def start_of(self: GroupCheckpointHook, checkpoint_id: int) -> Any:
        from headgate.store.reader_groups import group_start

        return group_start("earliest", [self._group.cut(checkpoint_id)])

    GroupCheckpointHook._start_of = start_of  # type: ignore[attr-defined]
    return patched(GroupCheckpointHook, "restore", restore)


def a_given_up_checkpoint_stays() -> AbstractContextManager[None]:  # GS14
    return patched(GroupCheckpointHook, "_forget", lambda self, first, last: None)


def an_older_generation_reads_on() -> AbstractContextManager[None]:  # GS2
    def take(self: ClaimedReader, found: Any) -> None:
        self.group = found.group

    return patched(ClaimedReader, "_take", take)


PURE: list[tuple[Mutant, Callable[[Log], None]]] = [
    (anybody_uses_the_group, tests.test_a_group_of_a_pipeline_is_nobody_elses),
    (anybody_takes_the_group, tests.test_another_pipeline_does_not_get_the_group_and_another_life_at_home_does),
    (
        a_life_at_home_is_another_pipeline,
        tests.test_another_pipeline_does_not_get_the_group_and_another_life_at_home_does,
    ),
    (whoever_comes_first_gets_everything, tests.test_nothing_is_dealt_out_before_all_have_joined),
    (what_follows_is_released_at_once, tests.test_what_follows_is_released_when_nobody_owes_a_checkpoint),
    (what_follows_goes_to_anybody, tests.test_what_follows_segments_without_events_goes_the_same_way),
    (three_checkpoints_are_enough, tests.test_more_than_three_checkpoints_may_be_open),
]

STORED: list[tuple[Mutant, Callable[[Store], None]]] = [
    (
        a_segment_ends_before_its_heirs_are_known,
        stored.test_a_segment_that_was_read_to_its_end_holds_event_time_until_its_heirs_are_there,
    ),
    (what_follows_is_read_at_once, stored.test_what_follows_waits_for_a_completed_checkpoint),
    (who_is_cut_without_a_marker_tells_nobody, stored.test_a_subtask_without_segments_is_cut_with_the_others),
    (who_is_cut_without_a_marker_tells_nobody, stored.test_a_source_that_is_not_read_on_is_cut_where_it_is),
    (a_marker_that_is_over_is_passed_by_nobody, stored.test_a_marker_of_a_checkpoint_that_is_over_is_passed),
    (a_reader_does_not_stand_still, stored.test_each_reader_is_cut_where_it_meets_the_marker),
    (the_hook_does_not_wait, stored.test_each_reader_is_cut_where_it_meets_the_marker),
    (the_hook_asks_twice, stored.test_a_checkpoint_of_the_group_is_never_asked_for_twice),
    (a_restart_trusts_the_group, stored.test_a_generation_is_dealt_anew_at_another_parallelism),
    (a_given_up_checkpoint_stays, stored.test_a_checkpoint_that_was_given_up_keeps_nobody_waiting),
    (an_older_generation_reads_on, stored.test_a_generation_is_dealt_anew_at_another_parallelism),
]


@pytest.mark.parametrize(("mutant", "test"), PURE, ids=lambda value: value.__name__)
def test_mutants_of_whose_a_group_is_are_caught(mutant: Mutant, test: Callable[[Log], None]) -> None:
    found = Log()
    for number in range(8):
        found.write(number)
    assert_caught(mutant, test, found)


def test_segments_that_change_hands_are_caught() -> None:
    assert_caught(segments_change_hands, tests.test_segments_stay_with_their_readers)


@pytest.mark.parametrize(("mutant", "test"), STORED, ids=lambda value: value.__name__)
def test_mutants_of_readers_and_hooks_are_caught(mutant: Mutant, test: Callable[[Store], None], tmp_path: Path) -> None:
    store = Store.shared(tmp_path / "store")
    store.create_stream(stored.NAME, stored.SCHEMA, segments=3, routing_key="key")
    assert_caught(mutant, test, store)
