"""Empties a directory of what one sink has published there, so that its pipeline starts over.

Counterpart: ``sink.FileSink``. Source: SO4 to SO6 of docs/spec/starting-over.md. Only what the sink's own manifests
list is deleted; whatever else is in the directory stays.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.connectors.files.commit import FileCommitter, refuse_if_fenced
from headgate.connectors.files.layout import SinkIdentity
from headgate.connectors.files.ledger import Ledger
from headgate.connectors.files.owner import FileOwner
from headgate.connectors.owned_sinks import Holding
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.storage.base import Storage


class PublishedFiles:
    """What one sink has published in one directory."""

    def __init__(self, storage: Storage, identity: SinkIdentity) -> None:
        self._storage, self._identity = storage, identity
        self._ledger = Ledger(storage, identity)

    def holding(self) -> Holding:
        """Return how much it is, and what is in the directory beside it. Changes nothing.

        Raises:
            CorruptionError, StorageError
        """
        published = {file.name: file for file in self._ledger.published()}
        paths = [path for path in self._storage.list("") if not path.startswith("_")]
        mine = [published[path] for path in paths if path in published]
        rows = sum(file.rows for file in mine)
        what = f"{len(mine):,} file{'s' * (len(mine) != 1)} with {rows:,} records" if mine else ""
        return Holding(what, self._storage.url, tuple(path for path in paths if path not in published))

    def start_over(self, generation: Generation, life: Life) -> None:
        """See ``connectors.base.ResettableSink``."""
        owner = FileOwner(self._storage, self._identity)
        known = owner.owner().life
        if known is not None and known.id == life.id:
            return
        FileCommitter(self._storage, self._identity, generation).recover(())  # fences first: SO5
        self._ledger.empty(self._refuse_if_fenced(generation))
        owner.hand_over(life, self._refuse_if_fenced(generation))

    def _refuse_if_fenced(self, generation: Generation) -> Callable[[], None]:
        return lambda: refuse_if_fenced(self._storage, self._identity, generation)
