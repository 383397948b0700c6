"""Restore the files of a database from a checkpoint: continue with them, or read their rows.

Files that a worker of this machine left are linked instead of fetched, if they are the same ones. Nothing is opened
before every file is there and verified, and nothing of it is used before its rows are counted. What is wrong then,
and again in files that were fetched once more, is the checkpoint's, unless the files here have changed (R57).

For some key groups only the files with rows of theirs are fetched: a database is in the order of its key groups. The
library cannot open a database of which only some files are there, so an edit that removes the others is added to its
MANIFEST. The format is that of LevelDB: records in blocks of 32 KiB, and no piece crosses the end of a block, each with
a checksum (Castagnoli's CRC of 32 bits, rotated and shifted); in an edit, tag 6 says "at this level, the file with this
number was removed". Source: the pages "MANIFEST" and "Write-Ahead-Log-File-Format" of RocksDB's wiki.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct

import pyarrow as pa
import xxhash

from headgate.codec.snapshot import Buffer
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.state.backend import Ownership
from headgate.state.rocksdb.database import FileRange, Rows, SharedMemory, directory_error, disk_error, open_read_only
from headgate.state.rocksdb.database_snapshot import (
    PART_BYTES,
    AnyTable,
    Continued,
    Description,
    KnownFiles,
    decode_description,
    encode_sections_of,
    sections_of,
)
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.row_encoding import group_start, runs
from headgate.state.rocksdb.tables import PackedTable
from headgate.state.snapshot import LocalDamage, OwnedKeys, StoredFiles, UnsoundFiles
from headgate.storage.local_files import ProcessDirectory

_BLOCK_BYTES = 32 << 10
_HEADER = Struct("<IHB")
"""Checksum of the kind and the piece, length of the piece, kind."""

_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_REMOVED = 6
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_32_BITS = 0xFFFFFFFF


def remove_from_manifest(manifest: bytes, files: Iterable[tuple[int, int]]) -> bytes:
    """Return ``manifest`` with a note that ``files`` were removed: the level and the number of each."""
    note = b"".join(bytes(chain.from_iterable(map(_varint, (_REMOVED, *file)))) for file in files)
    return manifest + b"".join(_pieces(note, len(manifest))) if note else manifest


def _pieces(record: bytes, written_bytes: int) -> Iterator[bytes]:
    """Yield ``record`` as it is stored after ``written_bytes`` of others."""
    at, is_first = 0, True
    while at < len(record):
        room = _BLOCK_BYTES - written_bytes % _BLOCK_BYTES
        if room <= _HEADER.size:  # not even a byte after a header; a header alone would be a piece of nothing
            yield bytes(room) if room < _HEADER.size else _piece(_FIRST if is_first else _MIDDLE, b"")
            is_first = is_first and room < _HEADER.size
            written_bytes += room
            continue
        piece = record[at : at + room - _HEADER.size]
        at += len(piece)
        yield _piece(_kind(is_first=is_first, is_last=at == len(record)), piece)
        written_bytes += _HEADER.size + len(piece)
        is_first = False


def _kind(*, is_first: bool, is_last: bool) -> int:
    if is_first:
        return _FULL if is_last else _FIRST
    return _LAST if is_last else _MIDDLE


def _piece(kind: int, data: bytes) -> bytes:
    checksum = _crc32c(bytes([kind]) + data)
    masked = ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & _32_BITS
    return _HEADER.pack(masked, len(data), kind) + data


def _varint(number: int) -> Iterator[int]:
    while number >= 0x80:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


def _made_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _made_table()


def _crc32c(data: bytes) -> int:
    """Return CRC-32C. The standard library has only the other polynomial; notes are short."""
    found = _32_BITS
    for byte in data:
        found = _TABLE[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ _32_BITS


_MANIFEST = "MANIFEST-"


def files_of_key_groups(description: Description, groups: KeyGroups) -> Description:
    """Return the database that ``description`` tells of without the files that have no row of ``groups``."""
    assert description.is_whole, "files are selected once: a second edit would remove them from the MANIFEST twice"
    ranges = dict(zip(description.names, description.ranges, strict=True))
    removed = {name: found for name, found in ranges.items() if not _may_have(found, groups)}
    manifests = [name for name in description.small if name.startswith(_MANIFEST)]
    if not removed or len(manifests) != 1:  # without one, opening it fails with the reason
        return description
    (manifest,) = manifests
    notes = remove_from_manifest(
        description.small[manifest], [(found.level, int(Path(name).stem)) for name, found in sorted(removed.items())]
    )
    left = {name: found for name, found in ranges.items() if name not in removed}
    small = {**description.small, manifest: notes}
    return replace(description, names=list(left), ranges=list(left.values()), small=small, is_whole=False)


def _may_have(file: FileRange, groups: KeyGroups) -> bool:
    return file.first_group < groups.first + groups.count and groups.first <= file.last_group


def check_files(rows: Rows, description: Description, where: str) -> None:
    """Make sure that an opened database has the files that ``description`` tells of, where it says, and no others.

    Its rows cannot be counted: it is unknown how many of them are in the files that are not here.

    Raises:
        UnsoundFiles: it is not so.
    """
    found, wanted = rows.files(), dict(zip(description.names, description.ranges, strict=True))
    if found != wanted:
        raise UnsoundFiles(where, 0, f"the files {_files_text(wanted.items())}", _files_text(found.items()))


def _files_text(files: Iterable[tuple[str, FileRange]]) -> str:
    return ", ".join(
        f"{name} (level {f.level}, key groups {f.first_group} to {f.last_group})" for name, f in sorted(files)
    )


LocalCopies = Callable[[str], Iterable[Path]]
"""Returns where a file with this name may be on this machine."""

_UNCHANGED_NAMES = ("CURRENT", "MANIFEST-")
"""The small files that stay as they are when a database is opened for reading: rocksdict rewrites its own."""

_READ_BYTES = 8 << 20
_MEMORY_BYTES = 32 << 20
"""Of a database that is only read from one end to the other."""


def read_description(stored: StoredFiles) -> Description:
    """Return what the files of a checkpoint are, after checking that it has all of them.

    Raises:
        UnsoundFiles: one is missing, or it does not say what they are.
        CorruptionError, StorageError
    """
    data = stored.read(stored.description)
    try:
        description = decode_description(data, stored.where)
    except CorruptionError as error:
        raise UnsoundFiles(stored.path_of(stored.description), 0, error.expected, error.found) from error
    missing = sorted(set(description.names) - stored.files.keys())
    if missing:
        expected = f"the file {missing[0]} of a RocksDB database"
        raise UnsoundFiles(stored.path_of(stored.description), 0, expected, "no part with this name")
    return description


def fetch(stored: StoredFiles, description: Description, to: Path, near: LocalCopies) -> KnownFiles:
    """Have all files in the directory ``to``, which does not exist; return what is known of them.

    Raises:
        CorruptionError: a file is damaged or missing, and is named. Nothing is left in ``to``.
        StorageError
    """
    known: KnownFiles = {}
    try:
        # fails if it exists: what another try left must not mix with these files
        to.mkdir(0o700)
        for name in description.names:
            part = stored.files[name]
            if not any(_is_linked(path, to / name, part) for path in near(name)):
                _write(to / name, stored.read(part))
            known[name] = part.size_bytes, part.checksum
        for name, data in description.small.items():
            _write(to / name, data)
    except OSError as error:
        shutil.rmtree(to, ignore_errors=True)
        raise disk_error("write", to, error) from error
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        raise
    return known


def _is_linked(path: Path, to: Path, part: SnapshotPart) -> bool:
    """Link ``path`` if it is what ``part`` says: what is near may be damaged, or of another database."""
    try:
        if path.stat().st_size != part.size_bytes:
            return False
        # linked first, then checked: the owner may remove its own name at any time, but not this one
        os.link(path, to)
        if _file_checksum(to) == part.checksum:
            return True
        to.unlink()
    except OSError:  # it was removed, or cannot be read
        to.unlink(missing_ok=True)
    return False


def _file_checksum(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.intdigest()


def _write(path: Path, data: Buffer) -> None:
    with path.open("wb") as file:
        file.write(data)


def check_rows(rows: Rows, tables: Sequence[AnyTable], wanted: Mapping[str, int], where: str) -> None:
    """Make sure that each state has as many rows as its manifest says, and that there are no other states.

    Raises:
        UnsoundFiles: it is not so.
    """
    found = _count_rows(rows, tables)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name, 0) != wanted.get(name, 0):
            expected = f"{wanted.get(name, 0)} rows of state '{name}'"
            raise UnsoundFiles(where, 0, expected, f"{found.get(name, 0)} rows")


def _count_rows(rows: Rows, tables: Sequence[AnyTable]) -> dict[str, int]:
    """Return how many rows each section has. Values are looked at only if several states share them."""
    by_number = {table.number: table for table in tables}
    found = {section.name: 0 for table in tables for section in sections_of(table)}
    has_packed = any(isinstance(table, PackedTable) for table in tables)
    scanned = rows.scan(b"", None) if has_packed else ((some, ()) for some in rows.scan_rows(b"", None))
    for some, values in scanned:
        for number, start, end in runs(some):
            table = by_number.get(number)
            if isinstance(table, PackedTable):
                for section, count in zip(sections_of(table), table.counts(values[start:end]), strict=True):
                    found[section.name] += count
            elif table is not None:
                found[table.section.name] += end - start
    return found


@contextmanager
def attribute_damage(stored: StoredFiles, description: Description, directory: Path) -> Iterator[None]:
    """Tell what is wrong with the files in ``directory`` by the files of the checkpoint that they are (R57).

    Raises:
        UnsoundFiles: they are as the checkpoint has them, so it is the checkpoint's.
        LocalDamage: they are not any more. The small ones are looked at in any case.
        StorageError: it is something else.
    """
    try:
        yield
    except (LocalDamage, UnsoundFiles, StorageError) as error:
        # looked at in any case: an error in files that have changed here says nothing of the checkpoint
        path = _changed_file(stored, description, directory)
        if path is not None:
            raise LocalDamage(str(path), 0, "what the checkpoint has", "other bytes") from error
        if not isinstance(error, LocalDamage):
            raise
        named = next((part for name, part in stored.files.items() if f"/{name}" in error.found), stored.description)
        found = error.found.replace(f"{directory}/", "")
        raise UnsoundFiles(stored.path_of(named), error.offset, "files that RocksDB can read", found) from error
    path = _changed_small_file(description, directory)  # RocksDB takes a wrong length in a MANIFEST for its end
    if path is not None:
        raise LocalDamage(str(path), 0, "what the checkpoint has", "other bytes")


def _changed_file(stored: StoredFiles, description: Description, directory: Path) -> Path | None:
    """Return a file that is not as the checkpoint has it."""
    try:
        for name in description.names:
            part, path = stored.files[name], directory / name
            if (path.stat().st_size, _file_checksum(path)) != (part.size_bytes, part.checksum):
                return path
    except OSError:
        return path
    return _changed_small_file(description, directory)


def _changed_small_file(description: Description, directory: Path) -> Path | None:
    try:
        for name, data in description.small.items():
            path = directory / name
            if name.startswith(_UNCHANGED_NAMES) and path.read_bytes() != data:
                return path
    except OSError:
        return path
    return None


def recorded_counts(stored: StoredFiles) -> dict[str, int]:
    """Return how many rows each state has, as the manifest says."""
    return {name: count for states in (stored.description.rows or {}).values() for name, count in states.items()}


def continue_from(
    local: LocalDatabase, stored: StoredFiles, tables: Sequence[AnyTable], owner: Ownership
) -> Continued | None:
    """Have in the empty database ``local`` what a checkpoint holds, if it is of the same states and keys.

    Returns:
        What it is; None: it is of others, and nothing was done.

    Raises:
        UnsoundFiles: the checkpoint cannot be restored, whatever its checksums say.
        LocalDamage: what is on this disk is damaged, when it was fetched once more as well.
        CorruptionError, StorageError
    """
    if stored.are_chunks:
        return None
    description = read_description(stored)
    owned = key_groups_of_subtask(owner.subtask_index, owner.max_parallelism, owner.parallelism)
    keys = OwnedKeys(KeyGroups(owned.start, len(owned)), owner.max_parallelism)
    if description.keys != keys or not description.is_of(tables):
        return None
    path = local.directory / "restored"
    try:
        known = _fetch_and_check(local, stored, description, path, local.near)
    except (LocalDamage, UnsoundFiles):  # what is near went bad, or was misread: says nothing of the checkpoint
        known = _fetch_and_check(local, stored, description, path, _no_local_copies)
    assert known.keys() == set(description.names), "every file was linked or fetched"
    # verified and counted: from here on the database is that of the checkpoint
    local.database.continue_from(path)
    # with their checksums, so that the next snapshot shares the files without reading them
    local.known = known
    counts = recorded_counts(stored)
    rows = {section.name: counts.get(section.name, 0) for table in tables for section in sections_of(table)}
    return Continued(rows, description.latest_ms, owned)


def _fetch_and_check(
    local: LocalDatabase, stored: StoredFiles, description: Description, path: Path, near: LocalCopies
) -> KnownFiles:
    """Have the files in ``path``, opened and counted once; nothing is left there of what is not sound."""
    known = fetch(stored, description, path, near)
    try:
        with attribute_damage(stored, description, path), closing(local.database.opened(path)) as rows:
            check_rows(rows, description.tables, recorded_counts(stored), stored.path_of(stored.description))
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return known


class PortableRows:
    """The rows of a database as any backend restores them, in parts by key group.

    The database is opened in a directory of its own when the first part is asked for, and goes after the last one.
    """

    def __init__(self, stored: StoredFiles, parent: Path, groups: KeyGroups) -> None:
        """``groups``: the wanted rows are theirs."""
        self._stored = stored
        self._parent = parent
        self._groups = groups
        count = max(1, min(stored.size_bytes // PART_BYTES, groups.count))
        ends = [groups.first + groups.count * number // count for number in range(count + 1)]
        self._left = dict.fromkeys(pairwise(ends))
        self.parts: list[Callable[[], memoryview]] = [partial(self.read, *ends) for ends in self._left]
        self._rows: Rows | None = None
        self._description: Description
        self._close: Callable[[], object] = _do_nothing

    def read(self, first: int, end: int) -> memoryview:
        """Return a container with the rows of the key groups from ``first`` on, up to and without ``end``.

        Raises:
            UnsoundFiles, LocalDamage: see ``continue_from``.
            CorruptionError, StorageError
        """
        try:
            found = self._encoded(first, end)
        except BaseException:
            self.close()
            raise
        # a part may be asked for again, by a try after one that failed
        self._left.pop((first, end), None)
        if not self._left:
            self.close()
        return memoryview(b"".join(memoryview(one) for one in found))

    def _encoded(self, first: int, end: int) -> Sequence[Buffer]:
        try:
            return self._encoded_once(first, end)
        except (LocalDamage, UnsoundFiles):  # as in ``continue_from``
            self.close()
            return self._encoded_once(first, end)

    def _encoded_once(self, first: int, end: int) -> Sequence[Buffer]:
        if self._rows is None:
            self._description = self._open()
        assert self._rows is not None
        with attribute_damage(self._stored, self._description, self._rows.path):
            rows, told = self._rows.scan(group_start(first), group_start(end)), self._description
            return encode_sections_of(told.tables, rows, (), told.meta, told.now_ms)[0]

    def close(self) -> None:
        """Remove the database. Idempotent; the next read opens it again."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        self._close()

    def _open(self) -> Description:
        description = read_description(self._stored)
        try:
            own = ProcessDirectory(self._parent, is_users=True)
        except OSError as error:
            raise directory_error(self._parent, error) from error
        # also if reading stops half way
        self._close = weakref.finalize(self, own.remove)
        path = own.path / "db"
        description = files_of_key_groups(description, self._groups)
        fetch(self._stored, description, path, _no_local_copies)
        with attribute_damage(self._stored, description, path):
            self._rows = open_read_only(path, SharedMemory(_MEMORY_BYTES))
            where = self._stored.path_of(self._stored.description)
            if description.is_whole:
                check_rows(self._rows, description.tables, recorded_counts(self._stored), where)
            else:
                check_files(self._rows, description, where)
        return description


def schema_of(stored: StoredFiles, state: str) -> pa.Schema:
    """Return the columns of the rows of ``state``.

    Raises:
        CorruptionError
    """
    for section in chain.from_iterable(map(sections_of, read_description(stored).tables)):
        if section.name == state:
            return section.schema
    raise CorruptionError(stored.where, 0, f"a table of state '{state}'", "none")


def portable_rows(stored: StoredFiles, directory: str | None, groups: KeyGroups) -> list[Callable[[], memoryview]]:
    """Return what reads the rows of ``groups``, a part at a time. ``directory``: None: the system's for such files."""
    parent = Path(directory or tempfile.gettempdir()) / f"headgate-reading-{os.getuid()}"
    return PortableRows(stored, parent, groups).parts


def _do_nothing() -> None: ...


def _no_local_copies(name: str) -> Iterable[Path]:
    return ()
