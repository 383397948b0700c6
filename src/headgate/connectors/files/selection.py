"""Which files, or objects of object stores and distributed file systems, a source reads, and which subtask owns each.

Counterparts: ``file_tracker``, ``object_reader`` and ``parquet``, which read them. Source: docs/spec/connectors.md.
Never opens a file.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import xxhash

from headgate.connectors.files.filesystem import ABSENT, LOCAL, FileSystem, failing, inode_of
from headgate.dataclass import dataclass
from headgate.errors import StorageError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.lineage import Location, Relocation, base, is_within
from headgate.plain_text import printable
from headgate.storage.base import ReadableStorage, StoredFile
from headgate.storage.urls import check_url, file_path, open_readable, split_object_url

PATTERN_DEFAULT = "**/*"
"""Below a directory: every file, at any depth."""

_ROTATED = re.compile(r"(?:[._-](?:\d[\d._:T-]*|old|bak|prev))+\Z")
"""What rotation appends to a name: numbers, dates and times, and a few words."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
"""A scheme of a URL. A directory that ends with a colon may be given as ``./name:/…``."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class Listing:
    """What one look at followed paths saw.

    Attributes:
        files: what may be read, sorted.
        unreadable: what is there and may not be read.
    """

    files: list[str]
    unreadable: list[str]


@dataclass(frozen=True, slots=True)
class FileSelection:
    """Files, globs and directories.

    Attributes:
        roots: absolute paths; one that contains ``*``, ``?`` or ``[`` is a glob, unless it is among ``literal``.
        pattern: glob relative to a directory among the roots. Names that begin with "." or "_" are skipped.
        system: where the files are.
        literal: the roots that are names although they look like globs.
    """

    roots: tuple[str, ...]
    pattern: str = PATTERN_DEFAULT
    system: FileSystem = LOCAL
    literal: frozenset[str] = frozenset()

    def find(self, *, skips_compressed: bool = False, reads: tuple[str, ...] = ()) -> list[str]:
        """Return what a start finds: the absolute paths of the files there are now, sorted.

        A link to another one of them is left out.

        Args:
            skips_compressed: leave compressed files out, as rotation makes them of files that were read.
            reads: ends of the names of compressed files that the source can read.

        Raises:
            UsageError: a path does not exist, cannot be read, or is compressed.
            StorageError: the files cannot be listed.
        """
        for root in self.roots:
            is_glob = self._is_glob(root)
            if is_glob and not self.system.is_directory(base := _before_magic(root)):
                raise UsageError(f"{root} is a pattern below the directory {base}, which does not exist; correct it")
            is_there = is_glob or self.system.is_directory(root) or self.system.is_file(root)
            if not is_there and not (skips_compressed and self._is_rotated_away(root)):
                raise UsageError(f"{root} does not exist; give a file, a directory or a glob that does")
        found = self._there(skips_compressed=skips_compressed)
        for path in found:
            if path.lower().endswith(COMPRESSED) and not path.lower().endswith(reads):
                raise UsageError(f"{path} is compressed in a way that this source does not read; decompress it first")
        listing = self._readable(found)
        for path in listing.unreadable:
            raise self.cannot_read(path)
        return listing.files

    def look(self) -> Listing:
        """Return what there is while files are followed: a path may not be there for a while, and anything may go."""
        return self._readable(self._there(skips_compressed=True))

    @staticmethod
    def cannot_read(path: str) -> UsageError:
        """Return the error for a file that is there and may not be read."""
        return UsageError(f"{path} cannot be read; allow this user to read it")

    def _there(self, *, skips_compressed: bool) -> set[str]:
        found: set[str] = set()
        for root in self.roots:
            with failing("list", root):
                if self._is_glob(root):
                    found.update(path for path in self.system.matching(root) if self.system.is_file(path))
                elif self.system.is_directory(root):
                    found.update(self._below(root))
                elif self.system.is_file(root):
                    found.add(root)
        return {path for path in found if not (skips_compressed and path.lower().endswith(COMPRESSED))}

    def _readable(self, paths: set[str]) -> Listing:
        """Tell those that may be read from those that may not; one that went meanwhile is neither."""
        may = [path for path in sorted(paths) if self.system.may_read(path)]
        files = [path for path in may if self.system.link_target(path) not in paths]
        return Listing(files, [path for path in sorted(paths.difference(may)) if self._may_not_read(path)])

    def _may_not_read(self, path: str) -> bool:
        inode = inode_of(path, self.system)
        return inode is not None and not self.system.may_read(path) and inode_of(path, self.system) == inode

    def _is_rotated_away(self, root: str) -> bool:
        """Whether ``root`` is only awaited: rotation has renamed it, and it was not created again yet."""
        with failing("list", root):
            try:
                siblings = self.system.siblings(root)
            except ABSENT:
                return False
        names = [os.path.splitext(path)[0] if path.lower().endswith(COMPRESSED) else path for path, _ in siblings]
        return any(name != root and series_of(name) == root for name in names)

    def _is_glob(self, root: str) -> bool:
        return glob.has_magic(root) and root not in self.literal

    def shows_all_beside(self, path: str) -> bool:
        """Whether whatever is in the directory of ``path`` is listed, too."""
        return self.pattern == PATTERN_DEFAULT and any(path.startswith(f"{root.rstrip('/')}/") for root in self.roots)

    def _below(self, root: str) -> Iterable[str]:
        if not self.system.may_list(root):
            if not self.system.is_directory(root):
                return  # it went meanwhile
            raise UsageError(f"directory {root} cannot be listed; allow this user to read it")
        for path in self.system.below(root, self.pattern):
            hidden = any(part[0] in "._" for part in Path(path).relative_to(root).parts)
            if not hidden and self.system.is_file(path):
                yield path

    def locations(self) -> tuple[Location, ...]:
        """Return the roots, each with the pattern below it unless that is every file (EV13)."""
        return tuple(Location(self._with_pattern(root), self._with_pattern(self._real(root))) for root in self.roots)

    def _real(self, root: str) -> str:
        begin = base(root)
        return os.path.realpath(begin) + root[len(begin) :] if self.system is LOCAL else root

    def _with_pattern(self, root: str) -> str:
        if self.pattern == PATTERN_DEFAULT or glob.has_magic(root) or self.system.is_file(root):
            return root
        return f"{root.rstrip('/')}/{self.pattern}"

    def carried_over(
        self, positions: Mapping[str, bytes], relocation: Relocation | None, files: Iterable[str]
    ) -> Mapping[str, bytes]:
        """Return positions under the names of today, without those of files that are not selected any more (EV17).

        Args:
            positions: of the restored checkpoint.
            relocation: what was read then; None: the same as now.
            files: what this start found.
        """
        if relocation is None:
            return positions
        selected = {*files, *self.roots}
        renamed = {relocation.of(path): position for path, position in positions.items()}
        return {
            path: position
            for path, position in renamed.items()
            if path in selected or series_of(path) in selected or self._is_awaited_below(path)
        }

    def _is_awaited_below(self, path: str) -> bool:
        """Whether ``path`` is gone, from where what it became may still be read."""
        return not self.system.is_file(path) and any(is_within(path, base(root)) for root in self.roots)

    def key(self, path: str) -> str:
        """Return what ownership of ``path`` is computed from: its name relative to its directory.

        Does not need the file to exist; moving the whole directory keeps the keys.
        """
        for root in self.roots:
            base = _before_magic(root) if self._is_glob(root) else root
            if path.startswith(base.rstrip("/") + "/"):
                return os.path.relpath(path, base)
        return os.path.basename(path)

    def __str__(self) -> str:
        return ", ".join(self.roots)


def select_files(paths: Paths, pattern: str = PATTERN_DEFAULT, system: FileSystem = LOCAL) -> FileSelection:
    """Return a selection; relative paths are relative to the working directory of this process (the driver).

    Raises:
        UsageError: no path was given, it is no path of a file, or it may be meant as a name and as a pattern.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given or any(not str(path) for path in given):
        raise UsageError("no input path was given; give a file, a directory or a glob")
    check_pattern(pattern)
    roots = [os.path.abspath(os.path.expanduser(_local(str(path)))) for path in given]
    read = [_read_as_name(root, system) for root in roots]
    literal = frozenset(root for root, (name, is_name) in zip(roots, read, strict=True) if is_name and name == root)
    return FileSelection(tuple(root for root, _ in read), pattern, system, literal)


def _local(path: str) -> str:
    """Return the path that a user gave, or that its ``file:`` URL means."""
    if "\0" in path:
        raise UsageError(f"the path '{printable(path)}' has a NUL, which no name of a file has; correct it")
    scheme = _URL.match(path)
    if scheme is None:
        return path
    if scheme[1].lower() == "file":
        return file_path(path)
    raise UsageError(f"{path} is a URL of '{scheme[1]}'; give a path on this machine or below a mounted directory")


def check_pattern(pattern: str) -> None:
    """Refuse what fits no file, whatever is there: it would wait for ever."""
    parts = pattern.split("/")
    if not pattern or "\0" in pattern or os.path.isabs(pattern) or ".." in parts:
        raise UsageError(f"pattern={pattern!r} must be a glob relative to a directory, such as '*.log' or '**/*.jsonl'")
    hidden = next((part for part in parts if part[:1] in (".", "_")), None)
    if hidden is not None:
        raise UsageError(
            f"pattern={pattern!r} fits no file, because names that begin with '.' or '_', such as '{hidden}', are "
            "skipped below a directory; give the path itself instead"
        )


def _read_as_name(root: str, system: FileSystem) -> tuple[str, bool]:
    """Return a root, and whether it is a name that looks like a glob: what exists by that name is meant.

    Directories in front of a glob are made names in it.
    """
    if not glob.has_magic(root):
        return root, False
    parts, base = root.split("/"), ""
    for index, part in enumerate(parts):
        path = f"{base}/{part}" if index else part
        if glob.has_magic(part):
            is_last = index == len(parts) - 1
            if not (system.is_directory(path) or (is_last and _is_there(path, system))):
                return "/".join([glob.escape(base), *parts[index:]]), False
            _check_only(path, glob.escape(base) + f"/{part}", root, system, is_last=is_last)
        base = path
    return root, True


def _is_there(path: str, system: FileSystem) -> bool:
    """Whether there is a file of this name, or rotation has left one of its series in its directory."""
    if system.is_file(path):
        return True
    try:
        return any(name != path and series_of(name) == path for name, _ in system.siblings(path))
    except OSError:
        return False


def _check_only(path: str, pattern: str, root: str, system: FileSystem, *, is_last: bool) -> None:
    """Raise if ``pattern`` fits others than the ``path`` of the same spelling: it is not clear what was meant."""
    for other in system.matching(pattern):
        if other != path and (is_last or system.is_directory(other)):
            raise UsageError(
                f"{root} may mean {path}, which exists, or a pattern that also fits {other}; for the former write "
                f"{root.replace(path, glob.escape(path), 1)}, for the latter give the directory and pattern="
            )


def owner_of_file(key: str, parallelism: int) -> int:
    """Return the subtask that owns a file of a directory that grows.

    Depends on the key alone, so that all subtasks agree without talking, whenever each of them sees the file. What
    rotation appends to a name does not count: all files of a series have one owner, whatever their names become.
    Frozen: xxh3-64 of the UTF-8 bytes of the series' name, modulo the parallelism.
    """
    return int(xxhash.xxh3_64_intdigest(os.fsencode(series_of(key)))) % parallelism


def series_of(key: str) -> str:
    """Return the name of the series that a file belongs to: its name without what rotation appends to it.

    ``app.log.1``, ``app.log-20260131``, ``app.log.2026-01-31_10`` and ``app.log.old`` belong to ``app.log``.
    """
    directory, name = os.path.split(key)
    stem = _ROTATED.sub("", name)
    return os.path.join(directory, stem) if any(c.isalpha() for c in stem) else key


def numbered_files(files: Iterable[str], known: Mapping[str, int | None]) -> dict[str, int]:
    """Number the files of a fixed list in the order in which they were first listed.

    Args:
        files: the list of today.
        known: the files of the restored positions, with their numbers (None: from a position that had none).
    """
    found = {path: number for path, number in known.items() if number is not None}
    new = [*sorted(set(known) - set(found)), *sorted(set(files) - set(known))]
    first = max(found.values(), default=-1) + 1
    return found | {path: first + index for index, path in enumerate(new)}


def _before_magic(root: str) -> str:
    parts = root.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or "/"


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
