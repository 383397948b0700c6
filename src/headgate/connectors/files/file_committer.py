"""Publishes prepared files, and reads what was published.

Counterpart: ``sink`` prepares them, ``ledger`` remembers what was published. Source: docs/spec/connectors.md; K1–K8 and
K18. Lives in the driver. Never decides what may be committed: a permit does.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import polars as pl

from headgate import fault_points
from headgate.connectors.base import Committer
from headgate.connectors.encode import decode
from headgate.connectors.files.partitions import values_of
from headgate.connectors.files.publish_log import Ledger, SinkIdentity, StagedFile, all_listed, decode_files, digest
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError, gone
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.base import AlreadyExists, NotFound, Storage, is_probe, read_with_retries, refuse_unless_exclusive
from headgate.storage.object_names import list_numbered
from headgate.storage.urls import open_storage

_GENERATION = re.compile(r"-\d{10}-\d{5}-(\d{10})-\d{5}\.")
"""In the name of a prepared file (see ``layout``)."""

PUBLISHED_AT_ONCE = 16
"""An object store takes a few tenths of a second for a file: a hundred one after the other would delay a checkpoint."""


class FileCommitter(Committer):
    """Decides the prepared files of one sink, for one generation."""

    knows_outcomes = True

    def __init__(self, storage: Storage, identity: SinkIdentity, generation: Generation) -> None:
        self._storage, self._identity, self._generation = storage, identity, generation
        self._ledger = Ledger(storage, identity)
        self._left_behind = ""

    def recover(self, keep: Sequence[Committable]) -> None:
        """Claim the sink for this generation, then remove every prepared file that ``keep`` does not list.

        Raises:
            FencedError: a newer generation claimed it.
        """
        self._refuse_if_fenced()
        if not list_numbered(self._storage, self._identity.claims):
            refuse_unless_exclusive(self._storage, self._identity.claims)
        with contextlib.suppress(AlreadyExists):  # this generation, in an earlier call
            self._storage.put_if_absent(self._identity.claim(self._generation), [b"claimed\n"])
        self._refuse_if_fenced()
        files = {file for committable in keep for file in self._files(committable)}
        kept = {self._identity.staged(file.name) for file in files}
        intended = self._ledger.intended().items()
        mine = {path: found for path, found in intended if all(self._is_mine(file.name) for file in found)}
        dropped = {path: found for path, found in mine.items() if not files.issuperset(found)}
        given_up = {file for found in dropped.values() for file in found} - files
        self._take_back(given_up)
        self._ledger.withdraw(dropped)
        self._sweep(kept)
        for file in self._published(given_up):  # by a slow commit, meanwhile; now it has nothing left to publish
            self._storage.delete(file.name)
        try:
            self._tidy()
            self._left_behind = ""
        except StorageError as error:
            self._left_behind = str(error)

    def _sweep(self, kept: Collection[str]) -> None:
        """Remove what is prepared, but for ``kept``."""
        for path in self._storage.list(self._identity.staging):
            if path not in kept and self._is_mine(path):
                self._storage.delete(path)

    def _tidy(self) -> None:
        """Remove leftovers: unfinished writes, claims below ours, probes of the storage."""
        identity = self._identity
        for directory in (identity.staging, identity.publishing, identity.committed, identity.claims, identity.owners):
            self._storage.sweep_unfinished(directory)
        claims = list_numbered(self._storage, identity.claims)
        older = [path for found, path in claims.items() if found < self._generation]
        for path in (*older, *filter(is_probe, self._storage.list(identity.claims))):
            self._storage.delete(path)

    def left_behind(self) -> str:
        return self._left_behind

    def _take_back(self, files: set[StagedFile]) -> None:
        """Unpublish what a commit that is given up had published and not listed: it will be produced again.

        Back among the prepared files, from where it is swept: cut short, this leaves nothing that a later recovery or
        commit would take for published and taken away.
        """
        for file in self._published(files):
            with contextlib.suppress(AlreadyExists, NotFound):
                self._storage.rename_if_absent(file.name, self._identity.staged(file.name))
                continue
            self._storage.delete(file.name)  # a copy: its prepared form is still there

    def _published(self, files: set[StagedFile]) -> Iterator[StagedFile]:
        """Return those of ``files`` that have their final names, and that no manifest lists."""
        listed = self._ledger.listed(list(files), CheckpointId(0)) if files else set()
        for file in sorted(files - listed, key=lambda file: file.name):
            try:
                read_with_retries(partial(self._check_content, file))
            except (NotFound, CorruptionError):  # not published, or a foreign file under its name
                continue
            yield file

    def _is_mine(self, name: str) -> bool:
        """Whether no newer generation prepared ``name``: one that was stopped meanwhile must not sweep its heir's."""
        found = _GENERATION.search(name.rpartition("/")[2])  # not in the value of a partition
        return found is None or int(found.group(1)) <= self._generation

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Give the files their final names in order of checkpoint (K2), then list them in one manifest.

        Raises:
            UsageError: a committable is newer than the permit (K1), or of another sink.
            FencedError: a newer generation owns the sink.
            CorruptionError: a file is neither prepared nor committed, or another one has its name (K5).
        """
        if not committables:
            return
        self._check(permit, committables)
        self._refuse_if_fenced()
        ordered = sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index, c.generation))
        files = [file for committable in ordered for file in self._files(committable)]
        listed = self._ledger.listed(files, ordered[0].checkpoint)
        missing = [file for file in files if file not in listed]
        if missing:
            self._decide(permit.checkpoint, missing)
            for _, same in itertools.groupby(ordered, key=lambda committable: committable.checkpoint):
                self._publish_all([file for each in same for file in self._files(each) if file not in listed])
            self._refuse_if_fenced()
            self._ledger.add(permit.checkpoint, missing)
        for file in listed:  # prepared once more, by a request that took effect late
            self._storage.delete(self._identity.staged(file.name))
        self._ledger.withdraw([path for path, found in self._ledger.intended().items() if set(files).issuperset(found)])

    def denial(self, committable: Committable) -> str:
        files = self._files(committable)
        listed = self._ledger.listed(files, committable.checkpoint)
        try:
            self._see_that_they_are_there([file for file in files if file not in listed])
        except CorruptionError as error:
            return str(error)
        return ""

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

    def _decide(self, checkpoint: CheckpointId, files: Sequence[StagedFile]) -> None:
        """See that all of ``files`` are there, then write down that they are published.

        From then on one that is gone was published and taken away.
        """
        self._see_that_they_are_there(files)
        intent = self._ledger.intend(checkpoint, files)
        try:
            self._refuse_if_fenced()
        except FencedError:
            self._ledger.withdraw([intent])  # the newer generation may have looked before it was there
            raise

    def _see_that_they_are_there(self, files: Sequence[StagedFile]) -> None:
        """Raise unless each of ``files`` is prepared, or was decided to be published.

        Raises:
            CorruptionError: one is gone (K5), or another one has its name.
        """
        staged = set(self._storage.list(self._identity.staging))
        decided = {file for found in self._ledger.intended().values() for file in found}
        for file in files:
            if self._identity.staged(file.name) not in staged and file not in decided:
                # published by a commit that has ended, or gone
                read_with_retries(partial(self._check_content, file))

    def _publish_all(self, files: Sequence[StagedFile]) -> None:
        """Publish files of one checkpoint; several at once where each takes several requests over a network."""
        if self._storage.is_afar and len(files) > 1:
            fault_points.reach("in-publish")
            with ThreadPoolExecutor(PUBLISHED_AT_ONCE, thread_name_prefix="publish") as pool:
                for _ in pool.map(self._publish, files):
                    pass
            return
        for file in files:
            fault_points.reach("in-publish")
            self._publish(file)

    def _publish(self, file: StagedFile) -> None:
        """Rename, or find that it was done before."""
        staged = self._identity.staged(file.name)
        try:
            self._storage.rename_if_absent(staged, file.name)
        except AlreadyExists:  # then the content decides, not the name (K7)
            read_with_retries(partial(self._check_content, file))
            self._storage.delete(staged)
        except NotFound:
            return

    def _check_content(self, file: StagedFile) -> None:
        where = f"{self._storage.url}/{file.name}"
        try:
            found = digest([self._storage.get(file.name)])
        except NotFound:
            expected = f"a file of {file.size_bytes} bytes"
            raise gone(CorruptionError(where, 0, expected, "neither it nor its staged form")) from None
        if found != file.checksum:
            raise gone(CorruptionError(where, 0, f"checksum {file.checksum}", f"checksum {found}"))

    def _refuse_if_fenced(self) -> None:
        refuse_if_fenced(self._storage, self._identity, self._generation)


def refuse_if_fenced(storage: Storage, identity: SinkIdentity, generation: Generation) -> None:
    """Raise when a newer generation owns the sink.

    Raises:
        FencedError
    """
    newest = newest_generation(storage, identity)
    if newest is not None and newest > generation:
        raise FencedError(f"sink '{identity.node}' of pipeline '{identity.pipeline}'", generation, newest)


def newest_generation(storage: Storage, identity: SinkIdentity) -> Generation | None:
    """Return the newest generation that claimed the sink, or None."""
    return max((Generation(found) for found in list_numbered(storage, identity.claims)), default=None)


def committed_files(url: str) -> list[str]:
    """Return the paths, relative to ``url``, of all files of completed checkpoints, sorted.

    Files of checkpoints that a restore went back past are among them; files that were taken away are not.

    All files of a checkpoint appear in it at once (unlike in a listing of the directory).
    """
    storage = open_storage(url)
    listed = all_listed(storage)
    return sorted(listed.intersection(storage.list("")))


def read_committed(url: str) -> pl.DataFrame:
    """Return the records of all completed checkpoints (JSON types are inferred); no columns if there is no file.

    Columns that the files are partitioned by are texts.
    """
    storage = open_storage(url)
    frames = list(_frames(storage, committed_files(url))) or [pl.DataFrame()]
    return pl.concat(frames, how="diagonal_relaxed")


def _frames(storage: Storage, names: Sequence[str]) -> Iterator[pl.DataFrame]:
    for name in names:
        with contextlib.suppress(NotFound):  # taken away meanwhile
            frame = decode(name.rsplit(".", 1)[1], storage.get(name))
            values = values_of(name)
            yield frame.with_columns(pl.lit(value, pl.String).alias(column) for column, value in values.items())
