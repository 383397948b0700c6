"""Mutants of the stream store and its connectors, for the simulator: each breaks one promise of exactly once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import Mutant, patched

from headgate.connectors.stream_cuts import SegmentCuts
from headgate.connectors.streams import StreamCommitter, StreamSource, StreamSourceReader
from headgate.model.ids import CheckpointId
from headgate.protocol.store import autoscaling, layouts, reading_order, truncation
from headgate.protocol.store.autoscaling import Observed, ScalingPolicy
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reading_order import ReadingOrder
from headgate.sim.machine.surroundings import SimThreads
from headgate.store.appends import FlushAttempt
from headgate.store.catalogue import owners, sql, starting_over, transactions, writers
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.values import AppendFound, Contents, Numbers, Recovered
from headgate.store.cuts import StreamCut
from headgate.store.linger import Linger
from headgate.store.spilling import Part
from headgate.store.streams import OtherLayoutError, StreamInfo
from headgate.store.transactions import TransactionLog
from headgate.store.writer import StreamWriter


@contextmanager
def recovery_aborts_nothing() -> Iterator[None]:
    """SC6: what a checkpoint that failed had prepared stays prepared for ever."""

    def recover(connection: Any, present: StreamInfo, owner: str, epoch: int, *_: object) -> Recovered:
        transactions.raise_fence(connection, owner, epoch)
        return Recovered((), (), (present,))

    with patched(transactions, "recover", recover):
        yield


@contextmanager
def recovery_keeps_nothing() -> Iterator[None]:
    """SC6: what the restored checkpoint promised is aborted."""
    real = SqlCatalogue.recover

    def recover(self: SqlCatalogue, stream: str, owner: str, epoch: int, keep: object, now_ms: int) -> Recovered:
        return real(self, stream, owner, epoch, (), now_ms)

    with patched(SqlCatalogue, "recover", recover):
        yield


@contextmanager
def an_append_is_not_looked_up() -> Iterator[None]:
    """S38: a flush whose answer was lost is written again."""
    with (
        patched(SqlCatalogue, "find_append", lambda self, path: AppendFound()),
        patched(writers, "advance", lambda connection, stream, numbers: None),
    ):
        yield


@contextmanager
def numbers_are_not_remembered() -> Iterator[None]:
    """S7: a producer that died begins where it thinks it was."""
    real = writers.advance

    def advance(connection: Any, stream: StreamInfo, numbers: Numbers) -> None:
        real(connection, stream, numbers)
        if numbers.last % 3 == 0:
            connection.execute(sql.t.writers.update().values(sequence=numbers.last - 1))

    with patched(writers, "advance", advance):
        yield


@contextmanager
def a_sweep_takes_what_is_prepared() -> Iterator[None]:
    """S43: files that the catalogue counts on are removed with the leftovers."""
    real = TransactionLog._sweep

    def sweep(self: TransactionLog, stream: StreamInfo, owner: str, epoch: int) -> None:
        with patched(SqlCatalogue, "chunk_paths", lambda self, below="": set()):
            real(self, stream, owner, epoch)

    with patched(TransactionLog, "_sweep", sweep):
        yield


@contextmanager
def outcomes_are_forgotten_too_early() -> Iterator[None]:
    """S17, K20: a checkpoint that may still be restored asks for what the store has forgotten."""
    real = StreamCommitter.commit

    def commit(self: StreamCommitter, permit: Any, committables: Sequence[Any]) -> None:
        real(self, permit, committables)
        self.forget(CheckpointId(permit.checkpoint + 1))

    with patched(StreamCommitter, "commit", commit):
        yield


@contextmanager
def positions_are_those_of_the_last_poll() -> Iterator[None]:
    """SC1: a restart reads the last batch again."""
    real = StreamSourceReader.poll

    def poll(self: StreamSourceReader) -> Any:
        self._before = real_positions(self)  # type: ignore[attr-defined]
        return real(self)

    real_positions = StreamSourceReader.positions
    late = patched(StreamSourceReader, "positions", lambda self: getattr(self, "_before", None) or real_positions(self))
    with late, patched(StreamSourceReader, "poll", poll):
        yield


@contextmanager
def fences_are_not_looked_at() -> Iterator[None]:
    """S18: an older generation goes on writing."""
    with patched(transactions, "fence_of", lambda connection, owner: 0):
        yield


@contextmanager
def a_part_that_could_not_be_written_is_forgotten() -> Iterator[None]:
    """S70: what a large transaction wrote beside its writer, and failed to write, is not written again."""
    real = Part.is_written

    def is_written(self: Part) -> bool:
        real(self)
        return True

    with patched(Part, "is_written", is_written):
        yield


@contextmanager
def nobody_waits_for_the_part_that_is_written() -> Iterator[None]:
    """S70: a transaction is prepared without what is on its way to the storage."""

    def is_written(self: Part) -> bool:
        return True

    with patched(Part, "is_written", is_written):
        yield


@contextmanager
def threads_flush_at_once() -> Iterator[None]:
    """S38: the lock of a flush lets everybody in, as one of ``threading`` does on one thread."""
    with patched(SimThreads, "reentrant_lock", lambda self: threading.RLock()):
        yield


@contextmanager
def nobody_flushes_what_lingers() -> Iterator[None]:
    """S41: an append waits until somebody flushes."""
    with patched(Linger, "arm", lambda self: None):
        yield


SHARED: dict[Mutant, int] = {
    a_part_that_could_not_be_written_is_forgotten: 44,
    nobody_waits_for_the_part_that_is_written: 2,
    threads_flush_at_once: 2,
    nobody_flushes_what_lingers: 9,
}
"""Of the threads of the store, which only somebody next door uses so: such seeds have a neighbour."""


@contextmanager
def a_reset_empties_nothing() -> Iterator[None]:
    """SO5: the owner changes, and what it wrote stays."""
    with patched(starting_over, "empty", lambda *_: None):
        yield


@contextmanager
def a_reset_leaves_the_owner() -> Iterator[None]:
    """SO6: whoever looks next takes the streams for ones that are still to be emptied."""
    with patched(owners, "hand_over", lambda *_: None):
        yield


@contextmanager
def a_reset_fences_nobody() -> Iterator[None]:
    """SO5: a driver that was replaced writes to the streams of the next life."""
    real = transactions.raise_fence

    def raise_fence(connection: Any, owner: str, epoch: int) -> None:
        if sys._getframe(1).f_code.co_name != "start_over":
            real(connection, owner, epoch)

    aborts = patched(starting_over.transactions, "recover", lambda *_: Recovered((), (), ()))
    with patched(transactions, "raise_fence", raise_fence), aborts:
        yield


@contextmanager
def a_reset_takes_everything_for_that_of_others() -> Iterator[None]:
    """SO4: a stream that only the pipeline wrote to is left alone."""
    real = starting_over.contents

    def contents(*arguments: Any) -> Contents:
        return replace(real(*arguments), ours=False, others=True)

    with patched(starting_over, "contents", contents):
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
def a_first_start_holds_less_than_it_reads() -> Iterator[None]:
    """SC30: the first event of each segment goes before it is read."""
    real = StreamSource._needed

    def needed(self: StreamSource, head: StreamCut, positions: Any) -> StreamCut:
        found = real(self, head, positions)
        return found if positions else replace(found, positions={s: at + 1 for s, at in found.positions.items()})

    with patched(StreamSource, "_needed", needed):
        yield


EMPTIED: dict[Mutant, int] = {
    a_reset_empties_nothing: 1,
    a_reset_leaves_the_owner: 1,
    a_reset_fences_nobody: 1,
    a_reset_takes_everything_for_that_of_others: 1,
    readers_run_over_markers: 114,
    retention_takes_what_is_held: 0,
    a_first_start_holds_less_than_it_reads: 0,
}
"""Of starting over, of stream cuts and of truncation, with a seed that has them (SM83, SM84, SM85)."""


@contextmanager
def what_follows_is_read_at_once() -> Iterator[None]:
    """SC40: keys overtake themselves where segments of two subtasks are merged."""
    with patched(ReadingOrder, "_passed_before", lambda self, number: True):
        yield


@contextmanager
def late_events_go_anywhere() -> Iterator[None]:
    """S75: they are not where their keys are."""

    def home(layout: Layout, number: int) -> int | None:
        return next(x.segment_id for x in layout.present if x.overlaps(layout.segments[number]))

    with patched(layouts, "_home", home):
        yield


@contextmanager
def a_scaled_append_is_made_twice() -> Iterator[None]:
    """S73: what took effect before the stream was scaled is not looked for."""
    real = StreamWriter._append

    def append(self: StreamWriter, attempt: FlushAttempt) -> Any:
        if attempt.encoded is not None and attempt.encoded.segments != tuple(
            segment.segment_id for segment in self._catalogue.find_stream(self.stream.name).segments
        ):
            raise OtherLayoutError("scaled")
        return real(self, attempt)

    with patched(StreamWriter, "_append", append):
        yield


@contextmanager
def positions_of_what_follows_pass_nothing() -> Iterator[None]:
    """SC40: a segment without a position is always taken for one that nobody has read."""
    real = reading_order.passed_by

    def passed_by(layout: Layout, extents: Any, places: Any) -> set[int]:
        return real(layout, extents, places) & places.keys()

    with patched(reading_order, "passed_by", passed_by):
        yield


@contextmanager
def a_policy_knows_no_bounds() -> Iterator[None]:
    """S79: a hot segment is split however many there are."""
    real = autoscaling._splits

    def splits(policy: ScalingPolicy, observed: Observed, present: Any) -> Any:
        return real(replace(policy, segments_max=64), observed, present)

    with patched(autoscaling, "_splits", splits):
        yield


SCALED: dict[Mutant, int] = {
    a_policy_knows_no_bounds: 11,
    what_follows_is_read_at_once: 15,
    late_events_go_anywhere: 15,
    a_scaled_append_is_made_twice: 4,
    positions_of_what_follows_pass_nothing: 114,
}
"""Of streams that are scaled, with a seed that has them (SM86)."""

MUTANTS: dict[Mutant, int] = {
    recovery_aborts_nothing: 0,
    recovery_keeps_nothing: 10,
    an_append_is_not_looked_up: 0,
    numbers_are_not_remembered: 0,
    a_sweep_takes_what_is_prepared: 0,
    outcomes_are_forgotten_too_early: 0,
    positions_are_those_of_the_last_poll: 6,
}
"""With a seed that catches each. ``named`` has a test for the other one."""
