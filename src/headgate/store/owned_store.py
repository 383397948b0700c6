"""Transactions of one process, the markers of checkpoints, and whose all that is: the part of a store for its owners.

Counterpart: ``store.Store``, which is all of this too; ``transactions.TransactionLog``. Source: S12 to S18, S43 and S60
to S63 of docs/spec/stream-store.md, docs/spec/lives.md and docs/spec/starting-over.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from headgate.errors import StorageError
from headgate.model.life import Life, Mine, Owner
from headgate.store.catalogue.values import Contents, Frontier, TransactionInfo
from headgate.store.chunks import delete_quietly
from headgate.store.open_transaction import Transaction
from headgate.store.streams import StreamReset
from headgate.store.transactional_store import TransactionalStore
from headgate.store.transactions import TransactionLog


class OwnedStore(TransactionalStore):
    """What owners do in it: a sink of a pipeline is one, and so is a source that cuts its stream."""

    _transactions: TransactionLog

    def mark(self, stream: str, *, owner: str, generation: int, checkpoint: int) -> dict[int, int]:  # S60, S85
        """Record where every segment ends now, as a marker for a checkpoint of ``owner``.

        Return where the segments end that take events; the others have ended for good. Only readers of the owner
        see the marker. It takes no position in the stream.

        Raises:
            UsageError: there is no such stream.
        """
        return self._catalogue.mark(stream, owner, generation, checkpoint)

    def frontier(
        self, stream: str, *, owner: str, generation: int, segments: Collection[int] | None = None
    ) -> Frontier:  # S62
        """Return how far a reader that looks for markers of ``owner`` may read, and the markers before that.

        ``segments``: those that it reads; None: all that the stream ever had.
        """
        return self._catalogue.frontier(stream, owner, generation, None if segments is None else sorted(segments))

    def unmark(self, *, owner: str, generation: int, first: int, last: int) -> None:  # S63
        """Forget the markers of checkpoints ``first`` to ``last`` of one generation of ``owner``."""
        self._catalogue.unmark(owner, generation, first, last)

    def unmark_others(self, *, owner: str, generation: int) -> None:  # S63
        """Forget the markers of all generations of ``owner`` but this one."""
        self._catalogue.unmark_others(owner, generation)

    def begin(self, stream: str, *, owner: str, epoch: int, name: str = "") -> Transaction:
        """Begin a transaction that only this process writes; see ``begin_shared`` for one that others write, too.

        You can also pass ``name`` later, to ``Transaction.seal``. The transaction leaves no trace until it is prepared.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: there is no such stream, it is sealed, or the name is taken.
        """
        return self._transactions.begin(stream, name, owner, epoch)

    def commit_transactions(self, names: Sequence[tuple[str, str]], *, owner: str, epoch: int) -> None:  # S13, S14
        """Commit prepared transactions, given as (stream, name), in one step.

        Raises:
            FencedError, CorruptionError, StorageError: see ``TransactionLog.commit``.
        """
        self._transactions.commit(names, owner, epoch)

    def abort_transaction(self, stream: str, name: str, *, owner: str, epoch: int) -> None:  # S13
        """Abort a prepared transaction, or make sure that none can be prepared under this name."""
        self._transactions.abort(stream, name, owner, epoch)

    def forget_outcomes(self, names: Sequence[str], *, owner: str, epoch: int) -> None:  # S17
        """Forget how these transactions of ``owner`` were decided, because it will never ask again.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
        """
        self._catalogue.forget_outcomes(names, owner, epoch)

    def list_transactions(
        self, *, owner: str | None = None, prefix: str = "", stream: str | None = None
    ) -> list[TransactionInfo]:
        """Return all recorded transactions by name: prepared and decided ones, and open ones of several processes."""
        return self._catalogue.transactions(owner, prefix, stream)

    def fence(self, owner: str, epoch: int) -> None:  # S18
        """Refuse all older epochs of ``owner`` from now on.

        Raises:
            FencedError: a newer epoch exists.
        """
        self._catalogue.fence(owner, epoch)

    def recover(
        self,
        stream: str,
        *,
        owner: str,
        epoch: int,
        keep: Collection[str] = (),
        leave: Callable[[StorageError], None] = lambda error: None,
    ) -> list[str]:  # S43
        """Fence older epochs, abort prepared transactions that are not in ``keep``, and remove leftovers.

        ``stream`` is the stream that ``owner`` writes from now on; its transactions in other streams are aborted as
        well. Leftovers that cannot be removed now are harmless and stay for the next epoch; ``leave`` is called
        with the reason. Returns the names of the aborted transactions.
        """
        return self._transactions.recover(stream, owner, epoch, keep, leave)

    def owner(self, owner: str, stream: str = "", of: str = "") -> Owner:
        """Return the life of a pipeline that this store has recorded for ``owner`` (docs/spec/lives.md).

        ``others``: the other owners whose names begin with ``of`` and that have written to ``stream``.
        """
        return self._catalogue.owner(owner, stream, of)

    def own(self, owner: str, life: Life) -> Owner:
        """Record ``life`` for ``owner``, unless another life is recorded. Return the life that is recorded now."""
        return self._catalogue.own(owner, life)

    def forget_owner(self, owner: str) -> Owner:
        """Forget the life of ``owner``, so that the next life can claim it. Return the former life. Removes nothing.

        Prepared transactions stay until the next life aborts them, and older epochs stay fenced.
        """
        return self._catalogue.forget_owner(owner)

    def contents(self, stream: str, of: str, mine: Mine) -> Contents:
        """Return how many events ``stream`` has, and whether they are by owners that count as ``mine``, or by others.

        Own owners have names that begin with ``of``. A missing stream is empty.
        """
        return self._catalogue.contents(stream, of, mine)

    def start_over(self, reset: StreamReset) -> str | None:  # SO5
        """Fence the owner, empty its streams and record another life as the owner, in one step.

        A stream to which the pipeline has written nothing stays as it is, unless it is empty.

        Returns:
            None if it is done. Otherwise a stream that others have written to as well; nothing has changed then.

        Raises:
            FencedError: a newer epoch exists.
        """
        shared = self._catalogue.start_over(reset, self._now_ms())
        if shared is not None:
            return shared
        paths = self._storage.list("")
        known = {str(info.stream_id) for info in self._catalogue.list_streams("")}  # behind the list of files
        delete_quietly(self._storage, [path for path in paths if path.partition("/")[0] not in known])
        return None

    def abort_prepared(self, owner: str) -> int:
        """Abort the prepared and open transactions of ``owner`` that no process will decide any more.

        Never call it while a process of the owner is alive. Returns the number of aborted transactions.
        """
        epoch = self.owner(owner).generation
        waiting = [x for x in self.list_transactions(owner=owner) if not x.status.is_terminal]
        for transaction in waiting:
            self.abort_transaction(transaction.stream, transaction.name, owner=owner, epoch=epoch)
        return len(waiting)
