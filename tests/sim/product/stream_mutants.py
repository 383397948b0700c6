"""Mutants of the stream store and its connectors, for the simulator: each breaks one promise of exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.mutants.harness import Mutant, patched

from headgate.connectors.streams import StreamCommitter, StreamSourceReader
from headgate.model.ids import CheckpointId
from headgate.sim.machine.surroundings import SimThreads
from headgate.store.catalogue import sql, transactions, writers
from headgate.store.catalogue.base import Numbers, Recovered
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.linger import Linger
from headgate.store.spilling import Part
from headgate.store.streams import StreamInfo
from headgate.store.transactions import TransactionLog


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
        patched(SqlCatalogue, "find_append", lambda self, path: None),
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
    with patched(transactions, "_fence_of", lambda connection, owner: 0):
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
    a_part_that_could_not_be_written_is_forgotten: 2,
    nobody_waits_for_the_part_that_is_written: 2,
    threads_flush_at_once: 2,
    nobody_flushes_what_lingers: 9,
}
"""Of the threads of the store, which only somebody next door uses so: such seeds have a neighbour."""

MUTANTS: dict[Mutant, int] = {
    recovery_aborts_nothing: 0,
    recovery_keeps_nothing: 120,
    an_append_is_not_looked_up: 0,
    numbers_are_not_remembered: 0,
    a_sweep_takes_what_is_prepared: 0,
    outcomes_are_forgotten_too_early: 0,
    positions_are_those_of_the_last_poll: 0,
}
"""With a seed that catches each. ``named`` has a test for the other one."""
