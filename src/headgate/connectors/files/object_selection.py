"""Which objects of object stores, or files of a distributed file system, a source reads.

Counterpart: ``selection`` for local files; ``object_reader``, which reads them. Source: docs/spec/connectors.md.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from headgate.connectors.files.selection import COMPRESSED, PATTERN_DEFAULT, Paths, check_pattern
from headgate.dataclass import dataclass
from headgate.errors import StorageError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.lineage import Location, Relocation
from headgate.storage.base import ReadableStorage, StoredFile
from headgate.storage.urls import check_url, open_readable, split_object_url

Replacement: TypeAlias = Literal["fail", "read"]
"""What happens when an object that was read, or is being read, is replaced by another one under its name."""


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """How objects are found.

    Attributes:
        follow: whether new ones are looked for while the pipeline runs.
        discovery_ms: how long after one look the next one begins.
        max_age_ms: with ``follow``, an object that was written so much earlier than the newest one that was seen has
            been read, or is not read.
        replaced: what is done about replaced ones.
    """

    follow: bool
    discovery_ms: int
    max_age_ms: int
    replaced: Replacement


def object_options(
    selection: ObjectSelection | None,
    *,
    follow: bool,
    discovery_interval: Duration | None,
    replaced: Replacement | None,
    max_age: Duration | None,
) -> ObjectOptions:
    """Return the options of a source of URLs, with the defaults.

    Raises:
        UsageError: an option is none of those that there are, or the paths are local.
    """
    if selection is None and (replaced is not None or max_age is not None):
        name = "replaced" if replaced is not None else "max_age"
        raise UsageError(f"{name}= is for URLs such as s3://bucket/prefix/; leave it out for local files")
    if replaced not in (None, "fail", "read"):
        raise UsageError(f'replaced={replaced!r} must be "fail" or "read"')
    discovery_ms = duration_ms(discovery_interval or "10s", "discovery_interval")
    return ObjectOptions(follow, discovery_ms, duration_ms(max_age or "7d", "max_age"), replaced or "fail")


@dataclass(frozen=True, slots=True)
class ObjectRoot:
    """One URL that was given.

    Attributes:
        url: as it was given.
        storage: the root of its storage, such as ``s3://bucket``.
        directory: where files are listed, without a slash at its end; "": everywhere in the storage.
        pattern: which files below it, as a glob relative to it.
        may_be_file: it may be the name of one file.
    """

    url: str
    storage: str
    directory: str
    pattern: str
    may_be_file: bool

    def find(self, opened: ReadableStorage) -> list[StoredFile]:
        """Return the files there are now, under their URLs."""
        single = opened.file(self.directory) if self.may_be_file else None
        if single is not None:
            return [self._named(single)]
        fits = glob_expression(self.pattern)
        begin = len(self.directory) + 1 if self.directory else 0
        found = opened.files(self.directory)
        return [self._named(file) for file in found if is_shown(name := file.path[begin:]) and fits.fullmatch(name)]

    def refuse_two_meanings(self, opened: ReadableStorage) -> None:
        """Refuse the name of a file that is the name of a directory, too: an object store has both.

        Raises:
            UsageError
            StorageError
        """
        if self.may_be_file and opened.file(self.directory) is not None and opened.files(self.directory):
            raise UsageError(
                f"{self.url} is an object, and there are others below {self.url}/; write {self.url}/ to read those, or "
                "a pattern that only the object fits, with one of its characters in brackets"
            )

    def _named(self, file: StoredFile) -> StoredFile:
        return replace(file, path=f"{self.storage}/{file.path}")


@dataclass(frozen=True, slots=True)
class ObjectSelection:
    """The files at some URLs."""

    roots: tuple[ObjectRoot, ...]

    def find(self, reads: tuple[str, ...] = COMPRESSED) -> list[StoredFile]:
        """Return the files there are now, sorted by URL.

        Args:
            reads: ends of the names of compressed files that the source can read.

        Raises:
            UsageError: a file is compressed in another way, or what the storage needs is not installed.
            StorageError: the storage does not answer, or refuses.
        """
        found: dict[str, StoredFile] = {}
        for root in self.roots:
            found.update((file.path, file) for file in root.find(open_readable(root.storage)))
        for path in found:
            if path.lower().endswith(COMPRESSED) and not path.lower().endswith(reads):
                raise UsageError(f"{path} is compressed in a way that this source does not read; decompress it first")
        return [found[path] for path in sorted(found)]

    def find_at_start(self, options: ObjectOptions, reads: tuple[str, ...] = COMPRESSED) -> tuple[StoredFile, ...]:
        """Return what ``find`` returns, or say why the start fails.

        Raises:
            UsageError: the storage refuses, or there is nothing to read and none is awaited.
        """
        try:
            for root in self.roots:
                root.refuse_two_meanings(open_readable(root.storage))
            found = tuple(self.find(reads))
        except StorageError as error:
            if error.is_transient:
                raise
            raise UsageError(f"{self} cannot be read: {error.cause}; correct the URL or the credentials") from error
        if not found and not options.follow:
            raise UsageError(f"there is no file at {self}; correct the URL, or use follow=True to wait")
        return found

    def locations(self) -> tuple[Location, ...]:
        """Return the URLs."""
        urls = [root.url.rstrip("/") for root in self.roots]
        return tuple(Location(url, url) for url in urls)

    def carried_over(self, positions: Mapping[str, bytes], relocation: Relocation | None) -> Mapping[str, bytes]:
        """Return positions under the names of today, without those that are not selected any more (EV17)."""
        if relocation is None:
            return positions
        renamed = {relocation.of(path): position for path, position in positions.items()}
        return {path: position for path, position in renamed.items() if "://" not in path or self._has(path)}

    def _has(self, path: str) -> bool:
        return any(self._is_below(path, root) for root in self.roots)

    @staticmethod
    def _is_below(path: str, root: ObjectRoot) -> bool:
        base = f"{root.storage}/{root.directory}".rstrip("/")
        return path == base or path.startswith(f"{base}/")

    def __str__(self) -> str:
        return ", ".join(root.url for root in self.roots)


def select_objects(paths: Paths, pattern: str = PATTERN_DEFAULT) -> ObjectSelection | None:
    """Return the selection of URLs; None: all ``paths`` are local.

    Raises:
        UsageError: some are local and some are not, ``check_url`` refuses a URL, or it cannot be read from.
    """
    given = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for path in given:
        check_url(path)
    split = {url: split_object_url(url) for url in given}
    urls = {url: found for url, found in split.items() if found is not None}
    if not urls:
        return None
    local = next((path for path in given if path not in urls), None)
    if local is not None:
        raise UsageError(f"{next(iter(urls))} and {local} cannot be read by one source; make a source for each")
    check_pattern(pattern)
    return ObjectSelection(tuple(_root(url, *found, pattern) for url, found in urls.items()))


def _root(url: str, storage: str, path: str, pattern: str) -> ObjectRoot:
    open_readable(storage)
    parts = path.strip("/").split("/")
    magic = next((at for at, part in enumerate(parts) if glob.has_magic(part)), None)
    if magic is None:
        return ObjectRoot(url, storage, path.strip("/"), pattern, bool(path) and not path.endswith("/"))
    within = "/".join(parts[magic:])
    check_pattern(within)
    return ObjectRoot(url, storage, "/".join(parts[:magic]), within, may_be_file=False)


def is_shown(name: str) -> bool:
    """Whether a name relative to the directory that was given is no hidden one, by the rules of Hadoop and Spark.

    ``_temporary``, ``_SUCCESS``, ``.x`` and ``a._COPYING_`` are hidden; ``_day=1``, which names a partition, is not.
    """
    parts = name.split("/")
    hidden = (part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)
    return bool(name) and not name.endswith(("/", "._COPYING_")) and not any(hidden)


_TOKENS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


def glob_expression(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob; ``**/`` is any number of directories."""
    texts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(texts.get(token) or _literal(token) for token in _TOKENS.findall(pattern)), re.DOTALL)


def _literal(token: str) -> str:
    if len(token) == 1:
        return re.escape(token)
    inner = re.sub(r"([\\^\[&|~])", r"\\\1", token[1:-1])
    return f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"


def in_order(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Return files in the order in which they were written."""
    return sorted(files, key=lambda file: (file.modified_ms, file.path))
