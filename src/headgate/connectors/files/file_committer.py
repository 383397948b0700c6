"""Publishes prepared files, and reads what was published.

Counterpart: ``sink`` prepares them, ``ledger`` remembers what was published. Source: docs/spec/connectors.md; K1–K8 and
K18. Lives in the driver. Never decides what may be committed: a permit does.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import polars as pl

from headgate import fault_points
from headgate.connectors.base import Committer
from headgate.connectors.encode import decode
from headgate.connectors.files.publish_log import (
    UPLOADED,
    Ledger,
    OpenUpload,
    SinkIdentity,
    StagedFile,
    all_listed,
    decode_files,
    decode_uploads,
    digest,
    values_of,
)
from headgate.distribution import install_command
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError, gone
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.base import (
    AlreadyExists,
    NotFound,
    Storage,
    Uploads,
    is_probe,
    list_numbered,
    read_with_retries,
    refuse_unless_exclusive,
)
from headgate.storage.urls import open_storage

_GENERATION = re.compile(r"-\d{10}-\d{5}-(\d{10})-\d{5}\.")
"""In the name of a prepared file (see ``layout``)."""

PUBLISHED_AT_ONCE = 16
"""An object store takes a few tenths of a second for a file: a hundred one after the other would delay a checkpoint."""


class FileCommitter(Committer):
    """Decides the prepared files of one sink, for one generation."""

    knows_outcomes = True

    def __init__(
        self, storage: Storage, identity: SinkIdentity, generation: Generation, *, has_uploads: bool = True
    ) -> None:
        """``has_uploads``: if the storage takes files in parts, look for uploads that no commit completed."""
        self._storage, self._identity, self._generation = storage, identity, generation
        self._has_uploads = has_uploads and storage.uploads is not None
        self._ledger = Ledger(storage, identity)
        self._left_behind = ""

    def recover(self, keep: Sequence[Committable]) -> None:
        """Claim the sink for this generation, then remove every prepared file that ``keep`` does not list.

        Raises:
            FencedError: a newer generation claimed it.
        """
        self._refuse_if_fenced()
        # at the first claim of a sink only: fences rest on put-if-absent, which some stores accept and do not honour
        if not list_numbered(self._storage, self._identity.claims):
            refuse_unless_exclusive(self._storage, self._identity.claims)
        with contextlib.suppress(AlreadyExists):  # this generation, in an earlier call
            self._storage.put_if_absent(self._identity.claim(self._generation), [b"claimed\n"])
        # again: a newer generation may have claimed since, and nothing of it must be swept
        self._refuse_if_fenced()
        files = {file for committable in keep for file in self._files(committable)}
        kept = {self._identity.staged(file.name) for file in files}
        kept_uploads = {upload.id for committable in keep for upload in self._uploads(committable).values()}
        intended = self._ledger.intended().items()
        mine = {path: found for path, found in intended if all(self._is_mine(file.name) for file in found)}
        # a commit of an older generation had begun, and its checkpoint is not the one that is restored
        dropped = {path: found for path, found in mine.items() if not files.issuperset(found)}
        given_up = {file for found in dropped.values() for file in found} - files
        # while the intent is there, a recovery after this one finds the files again, should this one be cut short
        self._take_back(given_up)
        self._ledger.withdraw(dropped)
        self._sweep(kept)
        self._abort_uploads(kept_uploads)
        for file in self._published(given_up):  # by a slow commit, meanwhile; now it has nothing left to publish
            self._storage.delete(file.name)
        try:
            # of leftovers nothing depends: the run begins without a clean directory, too
            self._tidy()
            self._left_behind = ""
        except StorageError as error:
            self._left_behind = str(error)

    def _sweep(self, kept: Collection[str]) -> None:
        """Remove what is prepared, but for ``kept``."""
        for path in self._storage.list(self._identity.staging):
            if path not in kept and self._is_mine(path):
                self._storage.delete(path)

    def _abort_uploads(self, kept: Collection[str]) -> None:
        """Remove uploads of this sink that were not completed, but for ``kept``."""
        if not self._has_uploads:
            return
        for path, upload in self._uploads_of_storage.list(""):
            is_of_sink = self._identity.is_file_name(path) or path.startswith(f"{self._identity.staging}/")
            if upload not in kept and is_of_sink and self._is_mine(path) and not self._is_in_other_place(path):
                self._uploads_of_storage.abort(path, upload)

    def _is_in_other_place(self, path: str) -> bool:
        """Whether a sink of this name in another pipeline has its place in a directory here, such as ``stage=test``."""
        directories = itertools.accumulate(path.split("/")[:-1], lambda above, name: f"{above}/{name}")
        return any(self._storage.list(f"{directory}/{self._identity.claims}") for directory in directories)

    @property
    def _uploads_of_storage(self) -> Uploads:
        """How the storage takes files in parts.

        Raises:
            UsageError: what that needs is not installed.
        """
        if self._storage.uploads is None:
            raise UsageError(
                f"files below {self._storage.url} were uploaded in parts, and completing them needs the package "
                f"botocore and the settings of the workers in the driver, too: {install_command('s3')}"
            )
        return self._storage.uploads

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
                self._move(file, file.name, self._identity.staged(file.name))
                continue
            self._storage.delete(file.name)  # a copy: its prepared form is still there

    def _move(self, file: StagedFile, source: str, target: str) -> None:
        """Rename an object of ``file``, which keeps the mark of its upload.

        Raises:
            NotFound, AlreadyExists
        """
        if file.mark is None:
            self._storage.rename_if_absent(source, target)
            return
        self._uploads_of_storage.copy_if_absent(source, target, file.size_bytes, file.mark)
        self._storage.delete(source)

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
        # before anything moves: the newer generation may have given these files up, and produce them again
        self._refuse_if_fenced()
        ordered = sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index, c.generation))
        files = [file for committable in ordered for file in self._files(committable)]
        uploads = {name: upload for committable in ordered for name, upload in self._uploads(committable).items()}
        listed = self._ledger.listed(files, ordered[0].checkpoint)
        missing = [file for file in files if file not in listed]
        if missing:
            self._decide(permit.checkpoint, missing, uploads)
            for _, same in itertools.groupby(ordered, key=lambda committable: committable.checkpoint):
                self._publish_all([file for each in same for file in self._files(each) if file not in listed], uploads)
            # files count once they are listed: a generation that is replaced meanwhile stops in front of that
            self._refuse_if_fenced()
            self._ledger.add(permit.checkpoint, missing)
        for file in files:
            if file in listed:  # prepared once more, by a request that took effect late
                self._storage.delete(self._identity.staged(file.name))
        # last: until a manifest lists them, only the intent says that a missing file was published and taken away
        self._ledger.withdraw([path for path, found in self._ledger.intended().items() if set(files).issuperset(found)])

    def denial(self, committable: Committable) -> str:
        files = self._files(committable)
        listed = self._ledger.listed(files, committable.checkpoint)
        try:
            missing = [file for file in files if file not in listed]
            self._see_that_they_are_there(missing, self._uploads(committable))
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

    def _uploads(self, committable: Committable) -> dict[str, OpenUpload]:
        where = f"committable of {self._identity.node} for checkpoint {committable.checkpoint}"
        return decode_uploads(where, committable.payload)

    def _decide(self, checkpoint: CheckpointId, files: Sequence[StagedFile], uploads: Mapping[str, OpenUpload]) -> None:
        """See that all of ``files`` are there, then write down that they are published.

        From then on one that is gone was published and taken away.
        """
        self._see_that_they_are_there(files, uploads)
        intent = self._ledger.intend(checkpoint, files)
        try:
            self._refuse_if_fenced()
        except FencedError:
            self._ledger.withdraw([intent])  # the newer generation may have looked before it was there
            raise

    def _see_that_they_are_there(self, files: Sequence[StagedFile], uploads: Mapping[str, OpenUpload]) -> None:
        """Raise unless each of ``files`` is prepared, or was decided to be published.

        Raises:
            CorruptionError: one is gone (K5), or another one has its name.
        """
        staged = set(self._storage.list(self._identity.staging))
        if uploads:
            staged.update(upload for _, upload in self._uploads_of_storage.list(""))
        decided = {file for found in self._ledger.intended().values() for file in found}
        for file in files:
            upload = uploads.get(file.name)
            is_there = self._identity.staged(file.name) in staged or (upload is not None and upload.id in staged)
            if is_there or file in decided:
                continue
            if upload is None or not self._uploads_of_storage.is_open(file.name, upload.id):
                # published by a commit that has ended, or gone
                read_with_retries(partial(self._check_content, file))

    def _publish_all(self, files: Sequence[StagedFile], uploads: Mapping[str, OpenUpload]) -> None:
        """Publish files of one checkpoint; several at once where each takes several requests over a network."""
        if self._storage.is_afar and len(files) > 1:
            fault_points.reach("in-publish")
            with ThreadPoolExecutor(PUBLISHED_AT_ONCE, thread_name_prefix="publish") as pool:
                # iterated, so that what failed in a thread is raised here
                for _ in pool.map(lambda file: self._publish(file, uploads.get(file.name)), files):
                    pass
            return
        for file in files:
            fault_points.reach("in-publish")
            self._publish(file, uploads.get(file.name))

    def _publish(self, file: StagedFile, upload: OpenUpload | None) -> None:
        """Complete its upload, or rename it; or find that it was done before."""
        if upload is not None:
            self._complete(file, upload)
            return
        staged = self._identity.staged(file.name)
        try:
            self._storage.rename_if_absent(staged, file.name)
        except AlreadyExists:  # then the content decides, not the name (K7)
            read_with_retries(partial(self._check_content, file))
            self._storage.delete(staged)
        except NotFound:
            # ``_decide`` has seen it: an earlier try renamed it, and a consumer may have taken it away since
            return

    def _complete(self, file: StagedFile, upload: OpenUpload) -> None:
        """Complete an upload, and see that the file is there; or find that it was completed before.

        Raises:
            CorruptionError: neither the upload nor the file is there. A consumer that took it away before the commit
                ended cannot be told from a rule that removed the upload.
            StorageError: the store says that the upload is completed, but shows no file.
        """
        is_completed = False
        try:
            self._uploads_of_storage.complete(file.name, upload.id, upload.etags)
            is_completed = True
        except AlreadyExists:  # then its mark decides
            pass
        except NotFound:  # a recovery that was cut short may have taken it back
            with contextlib.suppress(NotFound, AlreadyExists):
                self._move(file, self._identity.staged(file.name), file.name)
        try:
            read_with_retries(partial(self._check_content, file))
        except CorruptionError as error:
            if is_completed:  # a server says so that was ended while it did this, or that is still at it
                raise StorageError("complete the upload of", f"{self._storage.url}/{file.name}", str(error)) from error
            raise
        if not is_completed:
            self._uploads_of_storage.abort(file.name, upload.id)

    def _check_content(self, file: StagedFile) -> None:
        where = f"{self._storage.url}/{file.name}"
        try:
            found = self._checksum(file)
        except NotFound:
            expected = f"a file of {file.size_bytes} bytes"
            raise gone(CorruptionError(where, 0, expected, "neither it nor its staged form")) from None
        if found != file.checksum:
            raise gone(CorruptionError(where, 0, f"checksum {file.checksum}", f"checksum {found}"))

    def _checksum(self, file: StagedFile) -> str:
        """Return what ``StagedFile.checksum`` is of the object under the name of ``file``.

        Raises:
            NotFound
        """
        if file.mark is None:
            return digest([self._storage.get(file.name)])
        mark = self._uploads_of_storage.mark(file.name)
        if mark is None:
            raise NotFound(file.name)
        return UPLOADED + mark

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
