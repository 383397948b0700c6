"""Which pipeline owns the output of a file sink in a directory, and its reset (docs/spec/lives.md).

Like the checkpoint log a sequence of write-once objects, so that of two pipelines that come at once one gets the
directory::

<url>/_owners/<pipeline>.<sink>/0000000001      an owner, or that the one before is forgotten; the last counts

A reset deletes only what the sink's own manifests list (docs/spec/starting-over.md); other files stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from headgate.codec.json_files import decode_life, encode_life
from headgate.connectors.base import Holding
from headgate.connectors.files.file_committer import FileCommitter, refuse_if_fenced
from headgate.connectors.files.publish_log import CLAIMS, OWNERS, Ledger, SinkIdentity
from headgate.errors import StorageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import NO_GENERATION, OtherSink, Owner, PipelineIdentity
from headgate.protocol.supervision import ownership
from headgate.storage.base import (
    AlreadyExists,
    Storage,
    list_numbered,
    list_numbered_below,
    number_name,
    read_with_retries,
)

TRIES_MAX = 16
"""Each lost race means that another process wrote an ownership record; more in a row have another cause."""


class FileOwner:
    """The recorded owner of one sink in one directory."""

    def __init__(self, storage: Storage, identity: SinkIdentity) -> None:
        self._storage, self._identity = storage, identity

    def owner(self) -> Owner:
        """Return the owner, and which other sinks of a pipeline of that name write to the directory.

        Raises:
            CorruptionError, StorageError
        """
        look = _Look(self._storage)
        found = {sink: look.owner(sink) for sink in self._sinks(*look.sinks)}
        others = tuple(OtherSink(sink.node, owner) for sink, owner in found.items() if sink != self._identity)
        return replace(found[self._identity], others=others)

    def _sinks(self, *known: SinkIdentity) -> list[SinkIdentity]:
        """Return this sink and all of its pipeline that are ``known``, in the same order each time."""
        return sorted({self._identity, *(sink for sink in known if sink.pipeline == self._identity.pipeline)})

    def own(self, life: PipelineIdentity) -> Owner:
        """Let ``life`` own it, unless another one does; return the owner then."""
        for _ in range(TRIES_MAX):
            number, owner = self._read()
            if owner.life is not None or not ownership.may_own(life, owner):
                return owner
            self._put(number + 1, life)
        raise self._too_busy()

    def forget(self) -> Owner:
        """Let the next life have it; return the former owner. Nothing is removed, and older generations stay fenced."""
        for _ in range(TRIES_MAX):
            number, owner = self._read()
            if owner.is_forgotten or self._put(number + 1, None):
                return owner
        raise self._too_busy()

    def hand_over(self, life: PipelineIdentity, check: Callable[[], None]) -> None:
        """Let ``life`` own it, whatever the former owner. ``check`` raises when there is a newer generation.

        Raises:
            FencedError: ``check`` said so.
        """
        for _ in range(TRIES_MAX):
            number, owner = self._read()
            check()  # after the look: a later claim writes its record after this number
            if (owner.life is not None and owner.life.id == life.id) or self._put(number + 1, life):
                return
        raise self._too_busy()

    def _put(self, number: int, life: PipelineIdentity | None) -> bool:
        try:
            self._storage.put_if_absent(f"{self._identity.owners}/{number_name(number)}", [encode_life(life)])
        except AlreadyExists:
            return False
        return True

    def _too_busy(self) -> StorageError:
        return StorageError("own", f"{self._storage.url}/{self._identity.owners}", "others change it all the time")

    def _read(self) -> tuple[int, Owner]:
        claims = list_numbered(self._storage, self._identity.claims)
        recorded = list_numbered(self._storage, self._identity.owners)
        return max(recorded, default=0), _owner_by(self._storage, claims, recorded)


def owners_in(storage: Storage) -> dict[SinkIdentity, Owner]:
    """Return all sinks that have written to a directory, sorted, with their owners, without ``others``.

    Raises:
        CorruptionError, StorageError
    """
    look = _Look(storage)
    return {sink: look.owner(sink) for sink in look.sinks}


class _Look:
    """What a directory remembers of all sinks: two listings, however many there are; a life when asked for."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._claims, self._told = list_numbered_below(storage, CLAIMS), list_numbered_below(storage, OWNERS)
        found = {name: SinkIdentity.parse(name) for name in (*self._claims, *self._told)}
        self.sinks = sorted({sink for name, sink in found.items() if str(sink) == name})

    def owner(self, sink: SinkIdentity) -> Owner:
        """Return the owner of ``sink``."""
        return _owner_by(self._storage, self._claims.get(str(sink), {}), self._told.get(str(sink), {}))


def _owner_by(storage: Storage, claims: Iterable[int], recorded: Mapping[int, str]) -> Owner:
    """Return the owner of a sink. ``claims``: its generations; ``recorded``: its recorded owners, paths by number."""
    generation = max(map(Generation, claims), default=NO_GENERATION)
    life = None
    if recorded:
        path = recorded[max(recorded)]
        life = read_with_retries(lambda: decode_life(storage.get(path), f"{storage.url}/{path}"))
    return Owner(life, generation, is_forgotten=bool(recorded) and life is None)


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
        what = f"{len(mine):,} file{'s' * (len(mine) != 1)} with {rows:,} record{'s' * (rows != 1)}" if mine else ""
        return Holding(what, self._storage.url, tuple(path for path in paths if path not in published))

    def start_over(self, generation: Generation, life: PipelineIdentity) -> None:
        owner = FileOwner(self._storage, self._identity)
        known = owner.owner().life
        if known is not None and known.id == life.id:
            return
        FileCommitter(self._storage, self._identity, generation).recover(())  # fences first: SO5
        self._ledger.empty(self._refuse_if_fenced(generation))
        owner.hand_over(life, self._refuse_if_fenced(generation))

    def _refuse_if_fenced(self, generation: Generation) -> Callable[[], None]:
        return lambda: refuse_if_fenced(self._storage, self._identity, generation)
