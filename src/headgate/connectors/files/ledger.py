"""What a file sink has published, and what it is about to publish: its manifests and its intents.

Counterpart: ``commit`` writes both, readers of manifests read the first. Source: rules D4, D5, D9, D11 and D12 of
docs/spec/connectors.md. Touches files with records only to delete all of them (``empty``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence

from headgate.connectors.files.layout import (
    COMMITTED,
    PUBLISHING,
    SinkIdentity,
    StagedFile,
    decode_files,
    digest,
    encode_files,
)
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.storage.reading import read_again

MERGE_AFTER = 256
"""Manifests of single commits before they are merged, so that their number stays small (D9)."""

MANIFEST_FILES_MAX = 20_000
"""Files in one merged manifest, about 3 MB of it: a merge never rewrites more than that (D9)."""

LIST_TRIES_MAX = 8
"""A reader may meet a merge between listing and reading; more often in a row is damage."""

_MERGED = "merged-"
_PATH = re.compile(rf"(?:{COMMITTED}|{PUBLISHING})/[^/]+/(?:{_MERGED})?([0-9]{{10,}})-[0-9a-f]{{16}}\.json")


class Ledger:
    """Manifests and intents of one sink. Both have the form ``<checkpoint>-<digest>.json`` and list files.

    The checkpoint in a name is at least that of every file listed there.
    """

    def __init__(self, storage: Storage, identity: SinkIdentity) -> None:
        self._storage, self._identity = storage, identity
        self._unmerged_count: int | None = None

    def listed(self, files: Sequence[StagedFile], oldest: CheckpointId) -> set[StagedFile]:
        """Return those of ``files`` that a manifest lists (K7, D5). None of them is older than ``oldest``."""
        return set(files) & _read_all(self._storage, self._identity.committed, oldest)

    def intended(self) -> dict[str, list[StagedFile]]:
        """Return what commits that were begun decided to publish, by intent (D11)."""
        found: dict[str, list[StagedFile]] = {}
        for path in _manifests(self._storage, self._identity.publishing):
            with contextlib.suppress(NotFound):  # its commit ended in an older generation
                found[path] = read_manifest(self._storage, path)
        return found

    def intend(self, checkpoint: CheckpointId, files: Sequence[StagedFile]) -> str:
        """Decide durably that ``files``, all of them prepared, are published; return the intent."""
        path, content = self._named(self._identity.publishing, f"{checkpoint:010d}", files)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(path, [content])
        return path

    def withdraw(self, intents: Collection[str]) -> None:
        """Forget intents."""
        for path in intents:
            self._storage.delete(path)

    def add(self, checkpoint: CheckpointId, files: Sequence[StagedFile]) -> None:
        """List ``files`` in one manifest. Its name contains its content's digest: a repeated commit finds it there."""
        path, content = self._named(self._identity.committed, f"{checkpoint:010d}", files)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(path, [content])
        if self._unmerged_count is None:
            self._unmerged_count = len(_unmerged(_manifests(self._storage, self._identity.committed)))
        else:
            self._unmerged_count += 1
        if self._unmerged_count >= MERGE_AFTER:
            self._unmerged_count = None  # looked at again: a merge may be cut short
            with contextlib.suppress(NotFound):  # a committer about to be fenced merges too
                self._merge()

    def published(self) -> set[StagedFile]:
        """Return everything that the manifests list, whether it is still there or not."""
        return _read_all(self._storage, self._identity.committed, CheckpointId(0))

    def empty(self, check: Callable[[], None]) -> None:
        """Delete every file that a manifest lists, then the manifest: cut short, the next call finds it there (SO6).

        ``check`` raises when somebody newer publishes here; what that one lists is never read behind it. Several may do
        it at once: a manifest that is gone was emptied by another one, or merged by a slow commit, so others are looked
        for then.
        """
        is_whole = False
        while not is_whole:
            paths = _manifests(self._storage, self._identity.committed)
            check()
            is_whole = all(self._is_emptied(path) for path in paths)

    def _is_emptied(self, path: str) -> bool:
        """Delete what a manifest lists, and the manifest; return whether it was there."""
        try:
            files = read_manifest(self._storage, path)
        except NotFound:
            return False
        for name in (*(file.name for file in files), path):
            self._storage.delete(name)
        return True

    def _merge(self) -> None:
        """Move what single manifests list into the newest merged one, or into new ones when it is full (D9).

        A crash half-way leaves files listed twice, which readers do not mind.
        """
        paths = _manifests(self._storage, self._identity.committed)
        sources = _unmerged(paths)
        if not sources:
            return
        files: dict[str, StagedFile] = {}
        newest = _merged(paths)[-1:]
        if newest:
            before = read_manifest(self._storage, newest[0])
            if len(before) < MANIFEST_FILES_MAX:
                sources = newest + sources
        for path in sources:
            files |= {file.name: file for file in read_manifest(self._storage, path)}
        last = f"{_MERGED}{max(_number(path) for path in sources):010d}"
        listed = list(files.values())
        written: set[str] = set()
        for start in range(0, len(listed), MANIFEST_FILES_MAX):
            part = listed[start : start + MANIFEST_FILES_MAX]
            path, content = self._named(self._identity.committed, last, part)
            with contextlib.suppress(AlreadyExists):
                self._storage.put_if_absent(path, [content])
            written.add(path)
        for path in sources:
            if path not in written:  # one that held all of this already
                self._storage.delete(path)

    def _named(self, directory: str, number: str, files: Sequence[StagedFile]) -> tuple[str, bytes]:
        content = encode_files(files)
        return f"{directory}/{number}-{digest([content])}.json", content


def read_manifest(storage: Storage, path: str) -> list[StagedFile]:
    """Return the files that one manifest or intent lists.

    Raises:
        NotFound
        CorruptionError
    """
    return read_again(lambda: decode_files(f"{storage.url}/{path}", storage.get(path)))


def all_listed(storage: Storage) -> set[str]:
    """Return the names in all manifests of all sinks: those of each commit all at once (D4)."""
    return {file.name for file in _read_all(storage, COMMITTED, CheckpointId(0))}


def _read_all(storage: Storage, directory: str, oldest: CheckpointId) -> set[StagedFile]:
    """Read all manifests below ``directory`` that may list files of ``oldest`` or newer, as they are at one moment.

    A merge writes the merged manifest before it deletes others: who sees no new one has missed nothing.
    """
    for _ in range(LIST_TRIES_MAX):
        paths = [path for path in _manifests(storage, directory) if _number(path) >= oldest]
        with contextlib.suppress(NotFound):  # merged meanwhile
            found = {file for path in paths for file in read_manifest(storage, path)}
            again = [path for path in _manifests(storage, directory) if _number(path) >= oldest]
            if _merged(again) == _merged(paths):
                return found
    raise CorruptionError(f"{storage.url}/{directory}", 0, "manifests that can be read", "names without objects")


def _manifests(storage: Storage, directory: str) -> list[str]:
    """Return the manifests below ``directory``, oldest first; what others left there is none (O25)."""
    paths = [path for path in storage.list(directory) if _PATH.fullmatch(path) is not None]
    return sorted(paths, key=lambda path: (_number(path), path))


def _number(path: str) -> int:
    match = _PATH.fullmatch(path)
    assert match is not None
    return int(match[1])


def _unmerged(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not path.rsplit("/", 1)[1].startswith(_MERGED)]


def _merged(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if path.rsplit("/", 1)[1].startswith(_MERGED)]
