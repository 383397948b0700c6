"""Transactions of one store: the catalogue's verbs, and the files that they leave.

Counterpart: ``protocol.store.transactions`` decides, ``catalogue`` records. Source: S12 to S18 of
docs/spec/stream-store.md. An open transaction writes nothing to the catalogue: until ``prepare`` its chunks are orphans
below ``<stream>/txn/<owner>/<epoch>/``, which ``TransactionLog.recover`` of a newer epoch sweeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from headgate.errors import StorageError, UsageError
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.values import ChunkRecord
from headgate.store.chunks import delete_quietly
from headgate.store.evolving import Schemas
from headgate.store.open_transaction import Transaction, owner_directory
from headgate.store.spilling import Spilling
from headgate.store.streams import StreamInfo
from headgate.threads import Threads

_CHUNK = re.compile(r"([0-9]+)/[^/]+\.chunk")
"""What this module writes below an owner's directory: epoch and file."""


class TransactionLog:
    """Transactions of one store: each method is one verb of the catalogue, with what it means for the files."""

    def __init__(
        self,
        catalogue: Catalogue,
        storage: Storage,
        now_ms: Callable[[], int],
        new_name: Callable[[], str],
        threads: Threads,
    ) -> None:
        """Use ``Store``."""
        self._spilling = Spilling(threads)
        self._catalogue = catalogue
        self._storage = storage
        self._now_ms = now_ms
        self._new_name = new_name

    def begin(self, stream: str, name: str, owner: str, epoch: int) -> Transaction:
        """Return an open transaction.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: the name is taken, or the stream is sealed.
        """
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        info = self._catalogue.begin(stream, name, owner, epoch)
        schemas = Schemas(self._catalogue, info)
        return Transaction(self, self._storage, info, name, owner, epoch, self._new_name, self._spilling, schemas)

    def prepare(self, transaction: Transaction, chunks: Sequence[ChunkRecord]) -> None:
        """Record ``transaction`` as prepared, with the durable files that hold its events (S12)."""
        x = transaction
        self._catalogue.prepare(x.stream, x.name, x.owner, x.epoch, chunks, self._now_ms())

    def commit(self, names: Sequence[tuple[str, str]], owner: str, epoch: int) -> None:
        """Commit (stream, transaction name) pairs in one step: readers see all of them or nothing (S14).

        Raises:
            FencedError: a newer epoch of ``owner`` exists; nothing was committed.
            CorruptionError: one is unknown or was aborted (S13); nothing was committed.
            StorageError: the outcome is unknown; repeating is safe.
        """
        self._catalogue.commit(names, owner, epoch, self._now_ms())

    def abort(self, stream: str, name: str, owner: str, epoch: int) -> None:
        """Abort a transaction; its events go away.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """
        delete_quietly(self._storage, self._catalogue.abort(stream, name, owner, epoch, self._now_ms()))

    def recover(
        self, stream: str, owner: str, epoch: int, keep: Collection[str], leave: Callable[[StorageError], None]
    ) -> list[str]:
        """Fence older epochs, abort what ``owner`` has prepared and is not in ``keep``, sweep what is left of them.

        In every stream of the store: the owner may have written to another one before (S43). ``leave`` hears why
        something cannot be swept now; the next epoch tries again.

        Returns:
            the names aborted.

        Raises:
            FencedError: a newer epoch exists.
        """
        recovered = self._catalogue.recover(stream, owner, epoch, keep, self._now_ms())
        delete_quietly(self._storage, recovered.orphans)
        try:
            for info in recovered.streams:
                self._sweep(info, owner, epoch)
        except StorageError as error:
            leave(error)
        return list(recovered.aborted)

    def _sweep(self, stream: StreamInfo, owner: str, epoch: int) -> None:
        """Remove chunks that older epochs left without a record: they can never be prepared any more."""
        base = owner_directory(stream.stream_id, owner)
        self._storage.sweep_unfinished(base)
        matches = [(path, _CHUNK.fullmatch(path[len(base) + 1 :])) for path in self._storage.list(base)]
        found = [path for path, match in matches if match and int(match[1]) < epoch]  # a stranger's file stays
        if found:
            known = self._catalogue.chunk_paths(base)
            delete_quietly(self._storage, [path for path in found if path not in known])
