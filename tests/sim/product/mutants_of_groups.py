"""Bugs planted in reader groups; seeds of ``sim.streams.groups`` find them.

``tests/mutants/test_reader_group_mutants.py`` has those that a named test finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around, skipped

from headgate.protocol.store import group_holds, group_progress, reader_group
from headgate.protocol.store.group_progress import Progress
from headgate.protocol.store.group_watch import Watch
from headgate.protocol.store.reader_group import Done, Group, Joined
from headgate.store.catalogue import group_holding
from headgate.store.group_heart import GroupHeart
from headgate.store.group_reader import GroupReader
from headgate.store.reader_groups import ReaderGroup


def what_somebody_reads_is_given_away() -> AbstractContextManager[None]:  # RG1, RG7
    return patched(Group, "free", property(lambda self: self.readable))


def a_commit_is_lost() -> AbstractContextManager[None]:  # RG2
    return around(GroupReader, "_positions", lambda call, self: {k: v for k, v in call(self).items() if v % 3})


def a_reader_does_not_look_before_it_reads() -> AbstractContextManager[None]:  # RG18
    return skipped(GroupReader, "_look")


def successors_are_released_at_once() -> AbstractContextManager[None]:  # RG4
    def next_step(call: Any, view: Any, progress: Progress) -> Progress:
        found: Progress = call(view, progress)
        new = {x.segment_id: 0 for x in view.layout.present if x.segment_id not in found.positions}
        return replace(found, positions={**new, **found.positions})

    return around(group_progress, "next_step", next_step)


def segments_are_dealt_to_who_owes() -> AbstractContextManager[None]:  # RG9
    return patched(Group, "owed", lambda self, reader: None)


def a_marker_is_passed_where_the_reader_is_now() -> AbstractContextManager[None]:  # RG9
    def passed(call: Any, self: GroupReader) -> bool:
        if self._told:
            self._next_events(3)
        return bool(call(self))

    return around(GroupReader, "_pass_marker", passed)


def who_died_has_passed_where_it_was_asked() -> AbstractContextManager[None]:  # RG9
    return around(reader_group, "_noted", lambda call, checkpoint, reader, at: checkpoint)


def who_takes_over_keeps_what_the_other_had() -> AbstractContextManager[None]:  # RG12, RG14
    def on_joined(call: Any, group: Group, event: Joined) -> Any:
        member = group.readers.get(event.reader)
        if member is None or not event.takes_over:
            return call(group, event)
        return Done(replace(group, readers={**group.readers, event.reader: replace(member, token=event.token)}))

    return around(reader_group, "_on_joined", on_joined)


def nobody_is_taken_for_dead() -> AbstractContextManager[None]:  # RG13
    return skipped(Watch, "look", [])


def who_beats_is_not_heard() -> AbstractContextManager[None]:  # RG13
    return patched(GroupHeart, "is_due", property(lambda self: False))


def the_heart_stands_still() -> AbstractContextManager[None]:  # RG22
    return skipped(GroupHeart, "_waits_for_beat", False)


def whoever_asks_for_a_checkpoint_does_not_watch() -> AbstractContextManager[None]:  # RG8
    return skipped(ReaderGroup, "_look_at")


def a_reset_leaves_its_readers_in() -> AbstractContextManager[None]:  # RG15
    def on_reset(call: Any, group: Group, event: Any, views: Any) -> Any:
        answer = call(group, event, views)
        return Done(replace(answer.group, readers=group.readers)) if isinstance(answer, Done) else answer

    return around(reader_group, "_on_reset", on_reset)


def a_reset_begins_where_the_group_is() -> AbstractContextManager[None]:  # RG15
    def on_reset(call: Any, group: Group, event: Any, views: Any) -> Any:
        answer = call(group, event, views)
        is_back = isinstance(answer, Done) and event.checkpoint is not None
        return Done(replace(answer.group, progress=group.progress)) if is_back else answer

    return around(reader_group, "_on_reset", on_reset)


@contextmanager
def a_group_holds_nothing() -> Iterator[None]:  # RG17
    with skipped(group_holding, "_hold"), patched(group_holding, "_is_moved", lambda *_: True):
        yield


def checkpoints_hold_nothing() -> AbstractContextManager[None]:  # RG17
    return around(group_holds, "_all", lambda call, group, stream: call(replace(group, checkpoints=()), stream))


ALL: dict[Mutant, int] = {
    what_somebody_reads_is_given_away: 2,
    a_commit_is_lost: 2,
    a_reader_does_not_look_before_it_reads: 1,
    successors_are_released_at_once: 5,
    segments_are_dealt_to_who_owes: 5,
    a_marker_is_passed_where_the_reader_is_now: 2,
    who_died_has_passed_where_it_was_asked: 2,
    who_takes_over_keeps_what_the_other_had: 2,
    nobody_is_taken_for_dead: 1,
    who_beats_is_not_heard: 2,
    the_heart_stands_still: 7,
    whoever_asks_for_a_checkpoint_does_not_watch: 1,
    a_reset_leaves_its_readers_in: 15,
    a_reset_begins_where_the_group_is: 15,
    a_group_holds_nothing: 2,
    checkpoints_hold_nothing: 3,
}
"""Each with a seed that finds it."""
