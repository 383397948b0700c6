"""A transaction that several processes write: its verbs.

Counterpart: ``transactional_store`` makes it, ``transaction_writer`` writes to it, ``catalogue.shared`` records it.
Source: rules TX1 to TX13 of docs/spec/shared-transactions.md.
"""

from __future__ import annotations

from contextlib import suppress

from headgate.errors import StorageError, UsageError
from headgate.protocol.store.shared_transactions import Abort, Commit, Prepare, Verdict
from headgate.store.catalogue.values import Shared, TransactionInfo
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

    Any process that has opened the store can find it by its stream and its ``id`` (``Store.transaction``). Every method
    may be repeated after a ``StorageError``.
    """

    def __init__(self, around: Around, shared: Shared) -> None:
        """Use ``Store.begin_shared`` or ``Store.transaction``."""
        self._around = around
        self._shared = shared

    @property
    def id(self) -> str:
        """The id by which other processes find this transaction."""
        return self._shared.name

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._shared.stream.name

    @property
    def lease_ms(self) -> int:
        """The lease in ms: an open transaction is aborted if it is not renewed for this long."""
        return self._shared.lease_ms

    def writer(self, participant: str = "") -> TransactionWriter:
        """Return a writer of this transaction. Any number of writers, in any processes, can write at the same time.

        Args:
            participant: a name that stays the same when the process is started again. Numbered writes that are already
                durable are then not written twice, and the former writer of that name is refused from now on. Default:
                a new name.

        Raises:
            FencedError: the transaction takes no more events, or its owner was replaced.
            UsageError: the stream was deleted, or the transaction is no longer known.
        """
        return TransactionWriter(self._around, self._shared, participant or self._around.new_name())

    def ping(self) -> None:
        """Renew the lease, as a write does. If you work on a batch for long, call it several times per lease.

        Raises:
            FencedError: the transaction was aborted, perhaps because its lease was over. Begin another one.
        """
        self._around.catalogue.ping_shared(self._shared, self._around.clock.wall_ms())

    def prepare(self) -> None:
        """Take no more events, and wait without any limit for ``commit`` or ``abort``: the lease no longer applies.

        The transaction contains what its participants have flushed. It does not contain what they have not flushed;
        they get an error.

        Raises:
            FencedError: the transaction was aborted, perhaps because its lease was over. Begin another one.
        """
        self._decide(Prepare())

    def commit(self) -> None:
        """Make all events visible in one step. Each participant's events are in the order in which it wrote them.

        Raises:
            FencedError: the transaction was aborted, perhaps because its lease was over. Its events are gone.
            UsageError: the transaction is no longer known, so it is unknown how it ended.
        """
        self._decide(Commit())
        self._sweep()
        self._around.look_after(self.stream)

    def abort(self) -> None:
        """Drop the events of the transaction, which may be open or prepared.

        Raises:
            FencedError: the transaction was committed, and readers may have seen its events.
            UsageError: the transaction is no longer known, so it is unknown how it ended.
        """
        self._decide(Abort())
        self._sweep()

    def status(self) -> TransactionInfo:
        """Return the recorded status of the transaction.

        Raises:
            UsageError: the transaction is no longer known.
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
