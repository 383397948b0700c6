"""Bugs planted where processes share a transaction; seeds of ``sim.product.sharing`` find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.mutants.test_shared_transaction_mutants import (
    the_end_takes_what_is_recorded,
    the_last_flush_comes_first,
    whatever_is_flushed_is_recorded,
)

from headgate.protocol.store import shared_transactions as machine
from headgate.protocol.store.shared_transactions import Apply, Commit, Done
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import shared
from headgate.store.transaction_writer import TransactionWriter


def what_expired_counts_as_committed() -> AbstractContextManager[None]:
    """TX2: whoever commits what was aborted hears that it is done."""

    def on_verdict(request: Any, record: Any) -> Any:
        is_late = record.status is Status.ABORTED and isinstance(request, Commit)
        return Done() if is_late else real(request, record)

    real = machine._on_verdict
    return patched(machine, "_on_verdict", on_verdict)


def what_is_prepared_takes_events() -> AbstractContextManager[None]:
    """S12, TX3: who is late writes behind the verdict of the others, and hears that it is recorded."""

    def on_write(request: Any, record: Any) -> Any:
        answer = real(request, record)
        return Done() if isinstance(answer, machine.RefuseEnded) else answer

    real = machine._on_write
    return patched(machine, "_on_write", on_write)


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
    what_expired_counts_as_committed: 0,
    what_is_prepared_takes_events: 0,
    who_comes_again_begins_anew: 0,
    a_flush_that_failed_is_forgotten: 6,
}
"""With a seed that catches each."""
