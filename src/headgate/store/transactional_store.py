"""Transactions that several processes write: the part of a store that begins, finds and expires them.

Counterpart: ``store.Store``, which is all of this too; ``shared_transaction.SharedTransaction``. Source: rules TX1 and
TX8 of docs/spec/shared-transactions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headgate.errors import HeadgateError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.protocol.store.shared_transactions import LEASE_MS_MAX, LEASE_MS_MIN
from headgate.store.catalogue.values import Shared
from headgate.store.chunks import delete_quietly
from headgate.store.grouped_store import GroupedStore
from headgate.store.shared_transaction import SharedTransaction, sweep
from headgate.store.streams import StreamInfo
from headgate.store.transaction_writer import Around
from headgate.threads import Threads

LEASE = "10 minutes"
OWNER = "writers"

_log = logging.getLogger("headgate")


class TransactionalStore(GroupedStore):
    """The part of a store that begins, finds and expires transactions that several processes write."""

    _threads: Threads
    _new_name: Callable[[], str]

    def begin_shared(
        self, stream: str, *, lease: Duration = LEASE, owner: str = OWNER, epoch: int = 0
    ) -> SharedTransaction:
        """Begin a transaction that several processes write. They find it by its ``id`` with ``transaction``.

        Args:
            stream: the stream that receives the events.
            lease: the transaction is aborted if no process writes to it or pings it for this long; 0.1 seconds to one
                day. A prepared transaction has no lease.
            owner: who begins it. The store remembers outcomes, and lists transactions, by owner.
            epoch: with ``fence``, a newer epoch refuses all writers of transactions of the owner's older epochs.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: there is no such stream, it is sealed, or the lease is out of range.
        """
        lease_ms = duration_ms(lease, "lease")
        if not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise UsageError(f"the lease of a transaction is {LEASE_MS_MIN} ms to {LEASE_MS_MAX} ms, not {lease_ms} ms")
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        name = self._new_name()
        now_ms = self._clock.wall_ms()
        shared = self._catalogue.begin_shared(stream, name, owner, epoch, lease_ms, now_ms)
        return self._opened(shared)

    def transaction(self, stream: str, id: str) -> SharedTransaction:
        """Return a transaction that any process began with ``begin_shared``, whether or not it has been decided since.

        Raises:
            UsageError: there is no such stream, or no such transaction: it was never begun there, or was decided so
                long ago that its outcome is forgotten.
        """
        return self._opened(self._catalogue.find_shared(stream, id))

    def expire_transactions(self, stream: str) -> list[str]:
        """Check the leases of a stream's open transactions, and return the ids of those that this call aborted.

        Writing to the stream, committing, and beginning or finding a transaction do this automatically. It takes two
        checks to abort a transaction: the first one only notes that the lease is over, and another one, half a lease
        later, aborts.

        Raises:
            UsageError: there is no such stream.
        """
        return self._expire(self._catalogue.find_stream(stream))

    def _opened(self, shared: Shared) -> SharedTransaction:
        self._expire_in_passing(shared.stream)
        return SharedTransaction(self._around(), shared)

    def _around(self) -> Around:
        return Around(self._catalogue, self._storage, self._clock, self._threads, self._new_name, self.look_after)

    def _look_at(self, stream: StreamInfo) -> None:
        """See ``CutStore``."""
        super()._look_at(stream)
        self._expire_in_passing(stream)

    def _expire_in_passing(self, stream: StreamInfo) -> None:
        """Look at leases, and never fail."""
        if self.is_untouched:
            return  # looking at a store that may not be written to (CT8)
        try:
            self._expire(stream)
        except HeadgateError as error:
            _log.warning("leases of stream '%s' could not be looked at: %s; trying again later", stream.name, error)

    def _expire(self, stream: StreamInfo) -> list[str]:
        now_ms = self._clock.wall_ms()
        if stream.lease_due_ms is None or now_ms < stream.lease_due_ms:
            return []
        expired = self._catalogue.expire_shared(stream, now_ms)
        for found in expired:
            _log.warning("transaction '%s' of stream '%s' was aborted: its lease was over", found.name, stream.name)
            delete_quietly(self._storage, found.orphans)
            sweep(self._around(), stream.stream_id, found.owner, found.name)
        return [found.name for found in expired]
