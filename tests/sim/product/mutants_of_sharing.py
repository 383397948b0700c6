"""Bugs planted where processes share a transaction; seeds of ``sim.streams.sharing`` find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.mutants.test_shared_transaction_mutants import (
    participants_route_by_the_layout_of_now,
    the_end_takes_what_is_recorded,
    the_last_flush_comes_first,
    what_is_prepared_keeps_its_lease,
    whatever_is_flushed_is_recorded,
)

from headgate.protocol.store import shared_transactions as machine
from headgate.protocol.store.shared_transactions import Apply
from headgate.store.catalogue import shared
from headgate.store.transaction_writer import TransactionWriter


@contextmanager
def who_comes_again_begins_anew() -> Iterator[None]:
    """TX3: the number of a participant's last write is not remembered."""
    real = shared.join

    def join(connection: Any, wanted: Any, participant: str, token: str, now_ms: int) -> int:
        real(connection, wanted, participant, token, now_ms)
        connection.execute(shared.t.participants.update().values(sequence=0))
        return 0

    with patched(shared, "join", join):
        yield


@contextmanager
def a_flush_that_failed_is_forgotten() -> Iterator[None]:
    """TX3: what is on its way when storage fails is not tried again."""
    real = TransactionWriter._finish

    def finish(self: Any) -> None:
        flush = self._on_its_way
        try:
            real(self)
        except Exception:
            if flush is not None and self._failure is None:
                self._on_its_way, self._durable = None, flush.numbers[1]
                with patched(machine, "_on_write", lambda request, record: Apply()):
                    chunk = None
                    numbers, now_ms = flush.numbers, self._around.clock.wall_ms()
                    catalogue = self._around.catalogue
                    catalogue.write_shared(self._shared, self.participant, self._token, numbers, chunk, now_ms)
            raise

    with patched(TransactionWriter, "_finish", finish):
        yield


ALL: dict[Mutant, int] = {
    whatever_is_flushed_is_recorded: 8,
    the_end_takes_what_is_recorded: 0,
    the_last_flush_comes_first: 0,
    what_is_prepared_keeps_its_lease: 1,
    participants_route_by_the_layout_of_now: 5,
    who_comes_again_begins_anew: 0,
    a_flush_that_failed_is_forgotten: 6,
}
"""With a seed that catches each."""
