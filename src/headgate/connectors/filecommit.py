"""Publishes prepared files, and reads what was published.

Counterpart: ``filesink`` prepares them. Source: rules D3–D9 of docs/spec/connectors.md; K1–K8 and K18.
Lives in the driver. Never decides what may be committed: a permit does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import polars as pl

from headgate import faultpoints
from headgate.connectors.encode import decode
from headgate.connectors.filelayout import COMMITTED, SinkIdentity, StagedFile, decode_files, digest, encode_files
from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.commit import CommitPermit
from headgate.store.local import sweep_unfinished
from headgate.store.storage import AlreadyExists, NotFound, Storage, open_storage

COMPACT_AFTER = 256
"""Manifests of single commits before they are merged into one, so that their number stays small (B21, D9)."""

LIST_TRIES_MAX = 8
"""A reader may meet a compaction between listing and reading; more often in a row is damage."""

_MERGED = "merged-"


class FileCommitter:
    """Decides the prepared files of one sink, for one generation."""

    def __init__(self, storage: Storage, identity: SinkIdentity, generation: Generation) -> None:
        self._storage, self._identity, self._generation = storage, identity, generation
        self._manifests_count: int | None = None

    def recover(self, keep: Sequence[Committable]) -> None:
        """Claim the sink for this generation, then remove every prepared file that ``keep`` does not list (K6).

        Raises:
            FencedError: a newer generation claimed it.
        """
        refuse_if_fenced(self._storage, self._identity, self._generation)
        with contextlib.suppress(AlreadyExists):  # this generation, in an earlier call
            self._storage.put_if_absent(self._identity.claim(self._generation), [b"claimed\n"])
        refuse_if_fenced(self._storage, self._identity, self._generation)
        kept = {self._identity.staged(file.name) for c in keep for file in self._files(c)}
        for directory in (
            self._identity.staging,
            self._identity.committed,
            self._identity.claims,
            self._identity.owners,
        ):
            sweep_unfinished(self._storage, directory)
        for path in self._storage.list(self._identity.staging):
            if path not in kept:
                self._storage.delete(path)
        for path in self._storage.list(self._identity.claims):
            if _claimed(path) < self._generation:
                self._storage.delete(path)

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Give the files their final names in order of checkpoint (K2), then list them in one manifest (D4).

        Raises:
            UsageError: a committable is newer than the permit (K1), or of another sink.
            FencedError: a newer generation owns the sink.
            CorruptionError: a file is neither prepared nor committed, or not the one that was prepared (K5).
        """
        if not committables:
            return
        self._check(permit, committables)
        refuse_if_fenced(self._storage, self._identity, self._generation)
        files: list[StagedFile] = []
        for committable in sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index, c.generation)):
            for file in self._files(committable):
                faultpoints.reach("in-publish")
                self._publish(file)
                files.append(file)
        self._list(permit.checkpoint, files)

    def _check(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        for committable in committables:
            if committable.checkpoint > permit.checkpoint:
                raise UsageError(
                    f"output of checkpoint {committable.checkpoint} must not be committed: "
                    f"only {permit.checkpoint} is known to be completed"
                )
            if committable.sink != self._identity.node:
                raise UsageError(f"committable of sink '{committable.sink}' was given to '{self._identity.node}'")

    def _files(self, committable: Committable) -> list[StagedFile]:
        where = f"committable of {self._identity.node} for checkpoint {committable.checkpoint}"
        return decode_files(where, committable.payload)

    def _publish(self, file: StagedFile) -> None:
        """Rename, or find that it was done before: then the content decides, not the name (K7, D5)."""
        staged = self._identity.staged(file.name)
        try:
            self._storage.rename_if_absent(staged, file.name)
        except AlreadyExists:
            self._check_content(file)
            self._storage.delete(staged)
        except NotFound:
            self._check_content(file)

    def _check_content(self, file: StagedFile) -> None:
        try:
            found = digest([self._storage.get(file.name)])
        except NotFound:
            where = f"{self._storage.url}/{file.name}"
            raise CorruptionError(
                where, 0, f"a file of {file.size_bytes} bytes", "neither it nor its staged form"
            ) from None
        if found != file.checksum:
            where = f"{self._storage.url}/{file.name}"
            raise CorruptionError(where, 0, f"checksum {file.checksum}", f"checksum {found}")

    def _list(self, checkpoint: CheckpointId, files: Sequence[StagedFile]) -> None:
        """Write the manifest. Its name contains its content's digest: a repeated commit finds it there."""
        content = encode_files(files)
        name = f"{self._identity.committed}/{checkpoint:010d}-{digest([content])}.json"
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(name, [content])
        if self._manifests_count is None:
            self._manifests_count = len(_single_manifests(self._storage, self._identity.committed))
        else:
            self._manifests_count += 1
        if self._manifests_count >= COMPACT_AFTER:
            with contextlib.suppress(NotFound):  # a committer about to be fenced merges too
                self._compact()
            self._manifests_count = 0

    def _compact(self) -> None:
        """Merge manifests; a crash half-way leaves files listed twice, which readers do not mind."""
        names = _single_manifests(self._storage, self._identity.committed)
        merged: dict[str, StagedFile] = {}
        for name in names:
            merged |= {file.name: file for file in decode_files(name, self._storage.get(name))}
        content = encode_files(list(merged.values()))
        last = names[-1].rsplit("/", 1)[1].split("-")[0]
        with contextlib.suppress(AlreadyExists):
            path = f"{self._identity.committed}/{_MERGED}{last}-{digest([content])}.json"
            self._storage.put_if_absent(path, [content])
        for name in names:
            self._storage.delete(name)

    def close(self) -> None:
        """Nothing is open."""


def refuse_if_fenced(storage: Storage, identity: SinkIdentity, generation: Generation) -> None:
    """Raise when a newer generation owns the sink (D8).

    Raises:
        FencedError
    """
    newest = newest_generation(storage, identity)
    if newest is not None and newest > generation:
        raise FencedError(f"sink '{identity.node}' of pipeline '{identity.pipeline}'", generation, newest)


def newest_generation(storage: Storage, identity: SinkIdentity) -> Generation | None:
    """Return the newest generation that claimed the sink, or None."""
    return max((Generation(_claimed(path)) for path in storage.list(identity.claims)), default=None)


def committed_files(url: str) -> list[str]:
    """Return the paths, relative to ``url``, of all files of completed checkpoints, sorted. Files of checkpoints that a
    restore went back behind are among them (D10).

    All files of a checkpoint appear in it at once (unlike in a listing of the directory).
    """
    storage = open_storage(url)
    for _ in range(LIST_TRIES_MAX):
        names = storage.list(COMMITTED)
        with contextlib.suppress(NotFound):  # merged meanwhile
            found = {file.name for name in names for file in decode_files(name, storage.get(name))}
            if _merged_manifests(storage.list(COMMITTED)) == _merged_manifests(names):
                return sorted(found)
    raise CorruptionError(f"{url}/{COMMITTED}", 0, "manifests that can be read", "names without objects")


def read_committed(url: str) -> pl.DataFrame:
    """Return the records of all completed checkpoints (JSON types are inferred); no columns if there is no file."""
    storage = open_storage(url)
    return pl.concat(list(_frames(storage, committed_files(url))) or [pl.DataFrame()], how="diagonal_relaxed")


def _frames(storage: Storage, names: Sequence[str]) -> Iterator[pl.DataFrame]:
    for name in names:
        yield decode(name.rsplit(".", 1)[1], storage.get(name))


def _single_manifests(storage: Storage, directory: str) -> list[str]:
    names = storage.list(directory)
    return sorted(set(names) - set(_merged_manifests(names)))


def _merged_manifests(names: Sequence[str]) -> list[str]:
    return [path for path in names if path.rsplit("/", 1)[1].startswith(_MERGED)]


def _claimed(path: str) -> int:
    return int(path.rsplit("/", 1)[1])
