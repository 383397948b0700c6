"""Planted bugs of the stream store, its servers, followers, reader groups and shared transactions.

Each is a patch of the product, a run of the simulator, and a seed that finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import few
from tests.mutants.harness import Mutant, around, patched, skipped
from tests.mutants.seeds import Finder, assert_found, found_by

from headgate.connectors.streams import StreamCommitter, StreamSourceReader
from headgate.connectors.streams.group_source import GroupCheckpointHook
from headgate.connectors.streams.segments import SegmentCuts
from headgate.model.ids import CheckpointId
from headgate.protocol.store import group_ownership, reading_order, truncation
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reader_group import Group, Watch
from headgate.protocol.store.reading_order import Progress
from headgate.store.catalogue import chunk_index, pipeline_rows, shared_transaction_rows, tables
from headgate.store.catalogue.records import Numbers, Recovered
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.client.connection import Client, RequestOutcome
from headgate.store.core import FetchBudget
from headgate.store.follower import StreamFollower
from headgate.store.reader_groups import group_start
from headgate.store.server.handlers import Deduplication
from headgate.store.streams import StreamCut, StreamInfo
from headgate.store.writer import FlushTimer


@contextmanager
def recovery_aborts_nothing() -> Iterator[None]:
    """What a checkpoint that failed had prepared stays prepared for ever."""

    def recover(self: SqlCatalogue, stream: str, owner: str, epoch: int, *_: object) -> Recovered:
        self.fence(owner, epoch)
        return Recovered((), (), (self.find_stream(stream),))

    with patched(SqlCatalogue, "recover", recover):
        yield


@contextmanager
def recovery_keeps_nothing() -> Iterator[None]:
    """What the restored checkpoint promised is aborted."""
    real = SqlCatalogue.recover

    def recover(self: SqlCatalogue, stream: str, owner: str, epoch: int, keep: object, now_ms: int) -> Recovered:
        return real(self, stream, owner, epoch, (), now_ms)

    with patched(SqlCatalogue, "recover", recover):
        yield


@contextmanager
def numbers_are_not_remembered() -> Iterator[None]:
    """A producer that died begins where it thinks it was."""
    real = chunk_index.advance_writer

    def advance(connection: Any, stream: StreamInfo, numbers: Numbers) -> None:
        real(connection, stream, numbers)
        if numbers.last % 3 == 0:
            connection.execute(tables.writers.update().values(sequence=numbers.last - 1))

    with patched(chunk_index, "advance_writer", advance):
        yield


@contextmanager
def outcomes_are_forgotten_too_early() -> Iterator[None]:
    """K20: a checkpoint that may still be restored asks for what the store has forgotten."""
    real = StreamCommitter.commit

    def commit(self: StreamCommitter, permit: Any, committables: Sequence[Any]) -> None:
        real(self, permit, committables)
        self.forget(CheckpointId(permit.checkpoint + 1), list)

    with patched(StreamCommitter, "commit", commit):
        yield


@contextmanager
def positions_are_those_of_the_last_poll() -> Iterator[None]:
    """A restart reads the last batch again."""
    real = StreamSourceReader.poll

    def poll(self: StreamSourceReader) -> Any:
        self._before = real_positions(self)  # type: ignore[attr-defined]
        return real(self)

    real_positions = StreamSourceReader.positions
    late = patched(StreamSourceReader, "positions", lambda self: getattr(self, "_before", None) or real_positions(self))
    with late, patched(StreamSourceReader, "poll", poll):
        yield


@contextmanager
def nobody_flushes_what_lingers() -> Iterator[None]:
    """An append waits until its writer is flushed."""
    with patched(FlushTimer, "arm", lambda self: True):
        yield


@contextmanager
def a_reset_empties_nothing() -> Iterator[None]:
    """SO5: the owner changes, and what it wrote stays."""
    with patched(pipeline_rows, "_empty_stream", lambda *_: None):
        yield


@contextmanager
def a_reset_leaves_the_owner() -> Iterator[None]:
    """Whoever looks next takes the streams for ones that are still to be emptied."""
    real = SqlCatalogue.start_over

    def start_over(self: SqlCatalogue, reset: Any, mine: Any, now_ms: int) -> str | None:
        found = real(self, reset, mine, now_ms)
        self.forget_owner(reset.owner)
        return found

    with patched(SqlCatalogue, "start_over", start_over):
        yield


@contextmanager
def readers_run_over_markers() -> Iterator[None]:
    """SC21: a checkpoint holds what came behind its cut."""
    with patched(SegmentCuts, "limit", lambda self, segment: self._frontier.ends[segment]):
        yield


@contextmanager
def retention_takes_what_is_held() -> Iterator[None]:
    """S71: what the checkpoints of a pipeline need goes."""
    real = truncation.retain
    with patched(truncation, "retain", lambda cut, extents, holds: real(cut, extents, ())):
        yield


@contextmanager
def positions_of_what_follows_pass_nothing() -> Iterator[None]:
    """A segment without a position is always taken for one that nobody has read."""
    real = reading_order.passed_by

    def passed_by(layout: Layout, extents: Any, places: Any) -> set[int]:
        return real(layout, extents, places) & places.keys()

    with patched(reading_order, "passed_by", passed_by):
        yield


def what_is_given_up_takes_room_for_ever() -> AbstractContextManager[None]:  # S83
    return patched(FetchBudget, "give_back", lambda self, fetch: None)


def a_lost_answer_is_asked_for_again_as_if_it_only_read() -> AbstractContextManager[None]:  # SS9
    return around(Client, "ask", lambda call, self, question, is_once=False: call(self, question))


def a_late_question_is_carried_out() -> AbstractContextManager[None]:  # SS9
    return patched(Deduplication, "settle", lambda self, name, wait_s: RequestOutcome(is_over=True, is_void=True))


def its_cut_forgets_what_was_read_to_its_end() -> AbstractContextManager[None]:
    def cut(call: Any, self: StreamFollower) -> StreamCut:
        found: StreamCut = call(self)
        return replace(found, positions={n: p for n, p in found.positions.items() if n not in self._ended})

    return around(StreamFollower, "cut", cut)


def what_is_given_back_is_lost() -> AbstractContextManager[None]:  # FW5
    return skipped(StreamFollower, "unread")


def _where_it_is(hook: GroupCheckpointHook) -> StreamCut:
    catalogue, name, stream = hook._group._catalogue, hook._name, hook._stream
    stream_id = catalogue.find_group(name).group.streams[stream]
    return StreamCut(stream, stream_id, catalogue.group_cuts(name, None)[stream])


def a_restart_leaves_the_group_where_it_is() -> AbstractContextManager[None]:
    """GS5: what was read behind the checkpoint is not read again."""

    def restore(self: GroupCheckpointHook, checkpoint_id: int, data: bytes | None) -> None:
        self._group.begin(group_start("earliest", [_where_it_is(self)]))

    return patched(GroupCheckpointHook, "restore", restore)


def anybody_joins() -> AbstractContextManager[None]:
    """GS1: so programs take segments away from the pipeline."""
    return patched(group_ownership, "objection", lambda claim, claimant: None)


def what_somebody_reads_is_given_away() -> AbstractContextManager[None]:  # RG1, RG7
    return patched(Group, "free", property(lambda self: self.readable))


def successors_are_released_at_once() -> AbstractContextManager[None]:  # RG4
    def next_step(call: Any, view: Any, progress: Progress) -> Progress:
        found: Progress = call(view, progress)
        new = {x.segment_id: 0 for x in view.layout.present if x.segment_id not in found.positions}
        return replace(found, positions={**new, **found.positions})

    return around(reading_order, "next_step", next_step)


def segments_are_dealt_to_who_owes() -> AbstractContextManager[None]:  # RG9
    return patched(Group, "owed", lambda self, reader: None)


def nobody_is_taken_for_dead() -> AbstractContextManager[None]:  # RG13
    return skipped(Watch, "look", [])


@contextmanager
def who_comes_again_begins_anew() -> Iterator[None]:
    """TX3: the number of a participant's last write is not remembered."""
    real = SqlCatalogue.join_shared

    def join(self: SqlCatalogue, wanted: Any, participant: str, token: str, now_ms: int) -> int:
        real(self, wanted, participant, token, now_ms)
        with self._database.write() as connection:
            connection.execute(tables.participants.update().values(sequence=0))
        return 0

    with patched(SqlCatalogue, "join_shared", join):
        yield


def participants_route_by_the_layout_of_now() -> AbstractContextManager[None]:
    def find(connection: Any, present: Any, name: str) -> Any:
        return replace(real(connection, present, name), stream=present)

    real = shared_transaction_rows._find
    return patched(shared_transaction_rows, "_find", find)


MUTANTS: list[tuple[Mutant, Finder, int]] = [
    (recovery_aborts_nothing, found_by("streams", is_plain=True), 2),
    (recovery_keeps_nothing, found_by("streams", is_plain=True), 4),
    (numbers_are_not_remembered, found_by("streams", is_plain=True), 0),
    (outcomes_are_forgotten_too_early, found_by("streams", is_plain=True), 1),
    (positions_are_those_of_the_last_poll, found_by("streams", is_plain=True), 1),
    (nobody_flushes_what_lingers, found_by("streams"), 9),
    (a_reset_empties_nothing, found_by("streams"), 1),
    (a_reset_leaves_the_owner, found_by("streams"), 1),
    (readers_run_over_markers, found_by("streams"), 114),
    (positions_of_what_follows_pass_nothing, found_by("streams"), 114),
    (retention_takes_what_is_held, found_by("streams"), 0),
    (what_is_given_up_takes_room_for_ever, found_by("remote-store"), 3),
    (a_lost_answer_is_asked_for_again_as_if_it_only_read, found_by("remote-store"), 2),
    (a_late_question_is_carried_out, found_by("remote-store"), 0),
    (its_cut_forgets_what_was_read_to_its_end, found_by("followers"), 7),
    (what_is_given_back_is_lost, found_by("followers"), 1),
    (anybody_joins, found_by("group-pipelines"), 0),
    (a_restart_leaves_the_group_where_it_is, found_by("group-pipelines"), 0),
    (what_somebody_reads_is_given_away, found_by("groups"), 2),
    (successors_are_released_at_once, found_by("groups"), 5),
    (segments_are_dealt_to_who_owes, found_by("groups"), 5),
    (nobody_is_taken_for_dead, found_by("groups"), 1),
    (who_comes_again_begins_anew, found_by("shared-transactions"), 0),
    (participants_route_by_the_layout_of_now, found_by("shared-transactions"), 5),
]


@pytest.mark.parametrize(("mutant", "run", "seed"), few(MUTANTS, 8), ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_planted_bug_of_the_store_is_found(mutant: Mutant, run: Finder, seed: int) -> None:
    assert_found(mutant, run, seed)
