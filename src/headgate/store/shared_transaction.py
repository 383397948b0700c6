"""A transaction that several processes write: its verbs.

Counterpart: ``transactional_store`` makes it, ``transaction_writer`` writes to it, ``catalogue.shared`` records it.
Source: rules TX1 to TX13 of docs/spec/shared-transactions.md.
"""

from __future__ import annotations

from contextlib import suppress

from headgate.errors import StorageError, UsageError
from headgate.protocol.store.shared_transactions import Abort, Commit, Prepare, Verdict
from headgate.store.catalogue.base import Shared, TransactionInfo
from headgate.store.chunks import delete_quietly
from headgate.store.transaction_writer import Around, TransactionWriter, directory_of


def sweep(around: Around, stream_id: int, owner: str, name: str) -> None:
    """Remove what participants that died left of a transaction that has ended: nothing can record it any more."""
    with suppress(StorageError):  # then ``Store.collect_orphans`` finds it
        base = directory_of(stream_id, owner, name)
        found = around.storage.list(base)
        around.storage.sweep_unfinished(base)
        known = around.catalogue.known_chunks(found)  # behind the list of files
        delete_quietly(around.storage, [path for path in found if path not in known])


class SharedTransaction:
    """A transaction of a stream that several processes write, and that is committed or aborted as a whole.

    Any process that has the store open gets at it with its stream and its ``id`` (``Store.transaction``). Every method
    may be repeated after a ``StorageError``.
    """

    def __init__(self, around: Around, shared: Shared) -> None:
        """Use ``Store.begin_shared`` or ``Store.transaction``."""
        self._around = around
        self._shared = shared

    @property
    def id(self) -> str:
        """What another process asks for."""
        return self._shared.name

    @property
    def stream(self) -> str:
        """The name of its stream."""
        return self._shared.stream.name

    @property
    def lease_ms(self) -> int:
        """How long it may go without a sign of life while it is open."""
        return self._shared.lease_ms

    def writer(self, participant: str = "") -> TransactionWriter:
        """Return a writer of this transaction; any number of them, in any processes, write at the same time.

        Args:
            participant: a name that stays the same when the process is started again: then numbered writes that were
                durable are not there twice, and the former writer of that name is refused from now on. Default: a new
                name.

        Raises:
            FencedError: the transaction takes no more events, or its owner was replaced.
            UsageError: its stream was deleted, or it is not known any more.
        """
        return TransactionWriter(self._around, self._shared, participant or self._around.new_name())

    def ping(self) -> None:
        """Renew the lease, as writing does. Call it several times in a lease while work on a batch takes long.

        Raises:
            FencedError: it was aborted, perhaps because its lease was over; begin another one.
        """
        self._around.catalogue.ping_shared(self._shared, self._around.clock.wall_ms())

    def prepare(self) -> None:
        """Take no more events, and wait for ``commit`` or ``abort`` however long that takes: no lease any more.

        What participants have flushed is in it. What they have not is not, and they are told so.

        Raises:
            FencedError: it was aborted, perhaps because its lease was over; begin another one.
        """
        self._decide(Prepare())

    def commit(self) -> None:
        """Make all its events visible in one step; those of each participant in the order in which it wrote them.

        Raises:
            FencedError: it was aborted, perhaps because its lease was over, so its events are gone.
            UsageError: it is not known any more: nobody can say how it ended.
        """
        self._decide(Commit())
        self._sweep()
        self._around.look_after(self.stream)

    def abort(self) -> None:
        """Drop its events. It may be open or prepared.

        Raises:
            FencedError: it was committed, and readers may have seen it.
            UsageError: it is not known any more: nobody can say how it ended.
        """
        self._decide(Abort())
        self._sweep()

    def status(self) -> TransactionInfo:
        """Return what is recorded of it now.

        Raises:
            UsageError: it is not known any more.
        """
        around, shared = self._around, self._shared
        found = around.catalogue.transactions(shared.owner, shared.name, shared.stream.name)
        for info in found:
            if info.name == shared.name:
                return info
        around.catalogue.find_shared(shared.stream.name, shared.name)  # says what is missing
        raise UsageError(f"transaction '{shared.name}' of stream '{shared.stream.name}' came just now; ask again")

    def _decide(self, verdict: Verdict) -> None:
        now_ms = self._around.clock.wall_ms()
        orphans = self._around.catalogue.decide_shared(self._shared, verdict, now_ms)
        delete_quietly(self._around.storage, orphans)

    def _sweep(self) -> None:
        sweep(self._around, self._shared.stream.stream_id, self._shared.owner, self._shared.name)
