"""Snapshot of a database: a RocksDB checkpoint at a barrier, written as its files or as portable rows.

The checkpoint's files are links. It is read in the upload thread, through a handle of its own: whatever becomes of
the database, nothing here changes. Files that earlier checkpoints hold are referred to instead of written; which may
be shared is decided by ``protocol.checkpoints``. Large files are parts of their own; the small ones that change with
every checkpoint are in the description, with the tables and the keys. As portable rows, in canonical sections,
any backend restores it at any parallelism. Counterpart: ``database_restore``.
"""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from headgate.codec.snapshot import DATABASE_DESCRIPTION, Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.state.descriptors import Section, StateKind
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.rocksdb.database import FileRange, Scanned, disk_error
from headgate.state.rocksdb.database import Rows as DatabaseRows
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.row_encoding import expiries_of, group_start, runs
from headgate.state.rocksdb.sst_checksums import check_blocks
from headgate.state.rocksdb.tables import PackedTable, Table
from headgate.state.rocksdb.timers import TimerTable
from headgate.state.snapshot import (
    RANGE_BYTES_MIN,
    RANGES_MAX,
    FrozenState,
    LocalDamage,
    OwnedKeys,
    Rows,
    SnapshotTarget,
    encode_batches,
)
from headgate.state.ttl import TTL
from headgate.storage.base import read_name

VERSION = 1

AnyTable: TypeAlias = Table | PackedTable | TimerTable

_WHAT = "what"
_SMALL, _META = "small/", "meta/"
_SECTION, _TYPES = "section/", "types/"
_VALUE = "value"
_TIMERS = "timers"
"""Of a table of timers; others have a kind of state."""

_PACK = "pack"
"""Field of a table that shares its rows with others: the number of the table that has the rows."""

_LARGE_NAME = re.compile(r"[0-9]{6,20}\.sst")
_SMALL_NAME = re.compile(r"CURRENT|MANIFEST-[0-9]{6,20}|rocksdict-config\.json")
"""What RocksDB and its library call files: opening a database writes files with these names."""

_SOME_TTL = TTL("1ms")


def sections_of(table: AnyTable) -> tuple[Section, ...]:
    """Return what the rows of a table are in a snapshot."""
    return tuple(member.section for member in table.members) if isinstance(table, PackedTable) else (table.section,)


@dataclass(frozen=True)
class Description:
    """What a database is.

    Attributes:
        tables: what its rows mean.
        keys: that are in it.
        names: of its large files.
        ranges: where each of these is, in the same order.
        small: its other files.
        meta: sections that belong to no key: a restore of rows needs them.
        now_ms: what time it was: what had expired is not part of the state.
        is_whole: whether all rows of ``keys`` are in these files; not if some were left out.
    """

    tables: Sequence[AnyTable]
    keys: OwnedKeys
    names: Sequence[str] = ()
    ranges: Sequence[FileRange] = ()
    small: Mapping[str, bytes] = field(default_factory=dict)
    meta: Mapping[str, bytes] = field(default_factory=dict)
    now_ms: int = 0
    is_whole: bool = True

    def is_of(self, tables: Sequence[AnyTable]) -> bool:
        """Whether rows of ``tables`` are stored as they are here, however long they live."""
        return [_storage_form(table) for table in self.tables] == [_storage_form(table) for table in tables]

    @property
    def latest_ms(self) -> dict[int, int]:
        """When the last row of each table expires, at the latest, by its number."""
        return {one.number: self.now_ms + one.ttl.duration_ms for one in self.tables if one.ttl is not None}

    def encode(self) -> list[Buffer]:
        """Return it as a container."""
        groups = self.keys.groups
        what = {
            "version": VERSION,
            "now_ms": self.now_ms,
            "groups": [groups.first, groups.count, self.keys.max_parallelism],
            "files": list(self.names),
            "ranges": [astuple(one) for one in self.ranges],
            "tables": [told for table in self.tables for told in _encoded_tables(table)],
        }
        found: dict[str, Sequence[Buffer]] = {_WHAT: [json.dumps(what).encode()]}
        for table in chain.from_iterable(map(_single, self.tables)):
            found[f"{_SECTION}{table.number}"] = [table.section.schema.serialize()]
            found[f"{_TYPES}{table.number}"] = [_types(table).serialize()]
        found |= {f"{_META}{name}": [data] for name, data in self.meta.items()}
        return encode_sections(found | {f"{_SMALL}{name}": [data] for name, data in self.small.items()})


@dataclass(frozen=True, slots=True)
class Continued:
    """What a database went on with.

    Attributes:
        rows: how many each state has, and each kind of timers.
        latest_ms: when the last row of each table that expires does so, at the latest, by its number.
        groups: the key groups of its keys.
    """

    rows: Mapping[str, int]
    latest_ms: Mapping[int, int]
    groups: range


def decode_description(data: memoryview, where: str) -> Description:
    """Return what ``Description.encode`` has written.

    Raises:
        CorruptionError: it is not that, of a version that is not known, or names a file as RocksDB never does.
    """
    sections = decode_sections(data, where)
    try:
        what = json.loads(bytes(sections[_WHAT]))
        if what["version"] != VERSION:
            raise UnknownFormat(where, 0, f"files of a database, version {VERSION}", f"version {what['version']}")
        first, count, max_parallelism = what["groups"]
        tables = _decoded_tables(what["tables"], sections)
        names = [read_name(str(name), where, _LARGE_NAME) for name in what["files"]]
        ranges = [FileRange(*map(int, one)) for one in what["ranges"]]
        now_ms = int(what["now_ms"])
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise CorruptionError(where, 0, "what the files of a database are", str(error)) from error
    if len(ranges) != len(names):
        raise CorruptionError(where, 0, f"where each of {len(names)} files is", f"{len(ranges)} places")
    small, meta = (_named(sections, prefix) for prefix in (_SMALL, _META))
    for name in small:
        read_name(name, where, _SMALL_NAME)
    keys = OwnedKeys(KeyGroups(first, count), max_parallelism)
    return Description(tables, keys, names, ranges, small, meta, now_ms)


def _named(sections: Mapping[str, memoryview], prefix: str) -> dict[str, bytes]:
    return {name.removeprefix(prefix): bytes(data) for name, data in sections.items() if name.startswith(prefix)}


def can_describe(tables: Sequence[object]) -> bool:
    """Whether a description tells everything about ``tables``; other databases are written as rows."""
    return all(
        isinstance(one, TimerTable) or (isinstance(one, Table) and _without_evolution(one) == one)
        for table in tables
        for one in (table.members if isinstance(table, PackedTable) else (table,))
    )


def _single(table: AnyTable) -> Sequence[Table | TimerTable]:
    """Return those that share rows one by one."""
    return table.members if isinstance(table, PackedTable) else (table,)


def _without_evolution(table: Table) -> Table:
    """Return what remains of a table in a description."""
    numbers = table.number, table.section, table.kind, table.outer, table.dtype
    return Table(*numbers, is_record=table.is_record, ttl=table.ttl)


def _storage_form(table: AnyTable) -> AnyTable:
    """Return what is the same for tables with rows that are stored in the same way, however long they live."""
    return replace(table, ttl=_SOME_TTL) if isinstance(table, Table) and table.ttl is not None else table


def _types(table: Table | TimerTable) -> pa.Schema:
    outer = table.types if isinstance(table, TimerTable) else table.outer
    value = [] if isinstance(table, TimerTable) else [pa.field(_VALUE, table.dtype)]
    return pa.schema([*(pa.field(str(at), dtype) for at, dtype in enumerate(outer)), *value])


def _encoded_tables(table: AnyTable) -> list[dict[str, object]]:
    if isinstance(table, PackedTable):
        return [{**_encoded_table(member), _PACK: table.number} for member in table.members]
    return [_encoded_table(table)]


def _encoded_table(table: Table | TimerTable) -> dict[str, object]:
    told: dict[str, object] = {
        "number": table.number,
        "name": table.section.name,
        "keys": list(table.section.key_names),
    }
    if isinstance(table, TimerTable):
        return {**told, "kind": _TIMERS}
    told |= {"kind": table.kind.value, "is_record": table.is_record}
    return told if table.ttl is None else {**told, "ttl_ms": table.ttl.duration_ms}


def _decoded_tables(told: Sequence[Mapping[str, object]], sections: Mapping[str, memoryview]) -> list[AnyTable]:
    found: list[AnyTable] = []
    for pack, some in groupby(told, key=lambda table: table.get(_PACK)):
        tables = [_decoded_table(table, sections) for table in some]
        if pack is None:
            found += tables
        else:
            found.append(PackedTable(tuple(table for table in tables if isinstance(table, Table))))
    return found


def _decoded_table(table: Mapping[str, object], sections: Mapping[str, memoryview]) -> Table | TimerTable:
    number = int(str(table["number"]))
    keys = table["keys"]
    assert isinstance(keys, list)
    schema, types = (pa.ipc.read_schema(pa.py_buffer(sections[f"{one}{number}"])) for one in (_SECTION, _TYPES))
    section = Section(str(table["name"]), schema, tuple(keys))
    if table["kind"] == _TIMERS:
        return TimerTable(number, section, tuple(types.types))
    ttl = TTL(timedelta(milliseconds=int(str(table["ttl_ms"])))) if "ttl_ms" in table else None
    kind, value = StateKind(table["kind"]), types.types[-1]
    return Table(number, section, kind, tuple(types.types[:-1]), value, is_record=bool(table["is_record"]), ttl=ttl)


SIZE_BYTES_MIN = 1 << 20
"""A database with smaller files is written as rows: there is little to be saved, and any backend reads these."""

KnownFiles: TypeAlias = dict[str, tuple[int, int]]
"""Size and checksum of files of one database, by name, as far as they were once read or written whole."""

SST_SUFFIX = ".sst"
_UNDESCRIBED_ENDINGS = (SST_SUFFIX, ".log", "LOG", "LOCK", "IDENTITY")
"""Endings of what is in no description: nothing was logged, and opening it makes the others."""

_OPTIONS_PREFIX = "OPTIONS-"
"""Files of options are in no description either: a restored database is opened with options of its own."""


def can_write_files(checkpoint: Path, tables: Sequence[object]) -> bool:
    """Whether a checkpoint is written as its files: they are large enough, and can be described."""
    return (
        can_describe(tables)
        and sum(path.stat().st_size for path in checkpoint.glob(f"*{SST_SUFFIX}")) >= SIZE_BYTES_MIN
    )


def write_files(
    target: SnapshotTarget,
    shareable: Mapping[str, SnapshotPart],
    checkpoint: Path,
    known: KnownFiles,
    description: Description,
    ranges: Mapping[str, FileRange],
    rows: Mapping[str, int],
) -> None:
    """Write what is not shareable yet, and refer to the rest. May be repeated.

    Args:
        target: where they go.
        shareable: what may be referred to.
        checkpoint: the directory of the files.
        known: of this database; what is written is added.
        description: what the database is; its files are added.
        ranges: where each of the large files is.
        rows: of each state.

    Raises:
        LocalDamage: a file is not as it was written; nothing of it is.
        StorageError
    """
    large = sorted(checkpoint.glob(f"*{SST_SUFFIX}"))
    for path in large:
        there = shareable.get(path.name)
        # not by its name alone: another life of the database may have called another file so
        if there is not None and known.get(path.name) == (there.size_bytes, there.checksum):
            target.share(there)
            continue
        data = _read(path)
        # before it is uploaded: once the checkpoint is complete, everything is restored from these bytes
        _check(path, data, known.get(path.name))
        part = target.put_file(path.name, [data])
        # also for another try: then the file must be the same
        known[path.name] = part.size_bytes, part.checksum
    small = {path.name: _read(path) for path in sorted(checkpoint.iterdir()) if _is_described(path.name)}
    names = [path.name for path in large]
    # those that ``check`` saw when it opened the checkpoint: another one belongs to no state
    if set(names) != ranges.keys():
        raise LocalDamage(str(checkpoint), 0, f"the files {sorted(ranges)}", f"{names}")
    assert description.is_whole, "only a restore leaves files out"
    whole = replace(description, names=names, ranges=[ranges[name] for name in names], small=small)
    target.describe_files(whole.encode(), rows, DATABASE_DESCRIPTION)


def _is_described(name: str) -> bool:
    return not name.startswith(_OPTIONS_PREFIX) and not name.endswith(_UNDESCRIBED_ENDINGS)


def _check(path: Path, data: bytes, known: tuple[int, int] | None) -> None:
    """Make sure that ``data`` is what it was when it was ``known``, or else that it is what RocksDB wrote."""
    if known is None:
        check_blocks(data, path)
        return
    found = len(data), xxhash.xxh3_64_intdigest(data)
    if found != known:
        raise LocalDamage(
            str(path), 0, f"{known[0]} bytes with checksum {known[1]:016x}", f"{found[0]} with {found[1]:016x}"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise LocalDamage(str(path), 0, "a file of a RocksDB database", "no file") from error
    except OSError as error:
        raise disk_error("read", path, error) from error


PART_BYTES = 16 << 20
"""Files of so many bytes make about one part: it is in memory while it is written, and again while it is restored."""

_BATCH_ROWS = 65_536


def _no_rows() -> Rows:
    return []


def expired_counts(rows: DatabaseRows, tables: Sequence[AnyTable], now_ms: int) -> dict[str, int]:
    """Return how many rows of each section of ``tables`` that expire have done so."""
    found = {table.number: 0 for table in tables if table.ttl is not None}
    if found:
        for scanned, values in rows.scan(b"", None):
            for number, start, end in runs(scanned):
                if number in found:
                    found[number] += int(np.count_nonzero(expiries_of(values[start:end]) <= now_ms))
    expiring = [table for table in tables if table.number in found]
    return {section.name: found[table.number] for table in expiring for section in sections_of(table)}


@dataclass(frozen=True)
class ExtraSections:
    """What a snapshot has that is not in the database: timers in memory, and what belongs to no key.

    Attributes:
        rows: returns rows of sections, which the database may have more of.
        counts: returns how many each of these has.
        meta: sections that belong to no key.
        now_ms: what time it was: what had expired is in no snapshot.
        forget: gives all of it up.
    """

    rows: Callable[[], Rows] = _no_rows
    counts: Callable[[], Mapping[str, int]] = dict
    meta: Mapping[str, bytes] = field(default_factory=dict)
    now_ms: int = 0
    forget: Callable[[], object] = dict


class FrozenDatabase(FrozenState):
    """The rows of all tables at a barrier."""

    def __init__(
        self,
        local: LocalDatabase,
        path: Path,
        tables: Sequence[AnyTable],
        counts: Mapping[str, int],
        beside: ExtraSections,
    ) -> None:
        """Make it of a checkpoint.

        Args:
            local: of the database.
            path: the checkpoint, which becomes this one's.
            tables: what is in it.
            counts: of the rows of each table, expired or not.
            beside: what is not in it.
        """
        super().__init__()
        self._local = local
        self._database = local.database
        self._has_files = False
        self._path = path
        self._tables = {table.number: table for table in tables}
        self._counts = dict(counts)
        self._extra = beside
        assert len(self._tables) == len(tables), "each table has a number of its own"
        # also if it is never written or released: the links keep old files of the database on the disk
        self._removal = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    def _rows(self) -> Mapping[str, int]:
        """Return what was counted; in files, what has expired and did not go yet is there, and counts."""
        beside, counts = self._extra.counts(), self._counts if self._has_files else self._living_counts
        return {**beside, **{name: count + beside.get(name, 0) for name, count in counts.items()}}

    @cached_property
    def _living_counts(self) -> Mapping[str, int]:
        """What was counted, less what the database says has expired: so a row that was lost is missed all the same."""
        if all(table.ttl is None for table in self._tables.values()):
            return self._counts
        with closing(self._database.opened(self._path)) as rows:
            expired = expired_counts(rows, list(self._tables.values()), self._extra.now_ms)
        return {name: count - expired.get(name, 0) for name, count in self._counts.items()}

    def _encode(self) -> Sequence[Buffer]:
        with closing(self._database.opened(self._path)) as rows:
            return self._encoded(rows.scan(b"", None), self._extra.rows())[0]

    def _write(self, target: SnapshotTarget) -> None:
        """Write the files of the database, or a part for each range of key groups."""
        keys, shareable, beside = target.keys, target.files, self._extra.rows()
        # a savepoint (``shareable`` is None) is portable, so it has rows
        if keys is not None and shareable is not None and can_write_files(self._path, list(self._tables.values())):
            self._write_files(target, keys, shareable, beside)
            return
        with closing(self._database.opened(self._path)) as rows:
            if keys is None:
                target.put(*self._encoded(rows.scan(b"", None), beside))
                return
            for groups in self._ranges(keys.groups):
                start, end = group_start(groups.first), group_start(groups.first + groups.count)
                found = [(section, [_within(b, section, groups, keys) for b in batches]) for section, batches in beside]
                target.put(*self._encoded(rows.scan(start, end), found), groups)

    def _write_files(
        self, target: SnapshotTarget, keys: OwnedKeys, shareable: Mapping[str, SnapshotPart], beside: Rows
    ) -> None:
        """Write the database as it is, and what is beside it as ever."""
        # before anything is written: whether the files fit together
        ranges = self._database.check(self._path)
        # from now on ``rows`` counts what is in the files, expired or not
        self._has_files = True
        about = self._extra
        found, counts = self._encoded((), beside)
        if beside or about.meta:
            target.put(found, counts, keys.groups)
        description = Description(list(self._tables.values()), keys, meta=about.meta, now_ms=about.now_ms)
        write_files(target, shareable, self._path, self._local.known, description, ranges, self._counts)

    def _ranges(self, groups: KeyGroups) -> list[KeyGroups]:
        size_bytes = sum(path.stat().st_size for path in self._path.glob("*.sst"))
        wanted = max(min(RANGES_MAX, size_bytes // RANGE_BYTES_MIN), size_bytes // PART_BYTES)
        count = max(1, min(wanted, groups.count))
        ends = [groups.count * number // count for number in range(count + 1)]
        return [KeyGroups(groups.first + a, b - a) for a, b in pairwise(ends)]

    def _encoded(self, rows: Iterable[Scanned], beside: Rows) -> tuple[list[Buffer], dict[str, int]]:
        """Return a container of all sections, and how many rows each has."""
        return encode_sections_of(list(self._tables.values()), rows, beside, self._extra.meta, self._extra.now_ms)

    def _forget(self) -> None:
        # the files may serve a restore on this machine; what was written as rows would not
        if self._has_files and self._removal.detach() is not None:
            self._local.keep(self._path)
        self._removal()
        self._extra.forget()
        self._extra = ExtraSections(now_ms=self._extra.now_ms)


def encode_sections_of(
    tables: Sequence[AnyTable],
    rows: Iterable[Scanned],
    beside: Rows = (),
    meta: Mapping[str, bytes] | None = None,
    now_ms: int = 0,
) -> tuple[list[Buffer], dict[str, int]]:
    """Return a container of the sections of all tables, and of ``beside``, and how many rows each has.

    A section that a table and ``beside`` have holds the rows of both. What has expired at ``now_ms`` is left out.
    """
    by_number = {table.number: table for table in tables}
    sections = {section.name: section for table in tables for section in sections_of(table)}
    batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in sections}
    for name, batch in _batches(by_number, rows, now_ms):
        batches[name].append(batch)
    others = {section.name: (section, made) for section, made in beside}
    found: list[tuple[Section, Sequence[pa.RecordBatch]]] = []
    for name, made in batches.items():
        section = sections[name]
        found.append((section, [*made, *others.pop(name, (section, ()))[1]]))
    found += others.values()
    parts: dict[str, Sequence[Buffer]] = {name: [data] for name, data in (meta or {}).items()}
    parts |= {section.name: encode_batches(section.schema, made) for section, made in found}
    return encode_sections(parts), {section.name: sum(b.num_rows for b in made) for section, made in found}


def _batches(
    tables: Mapping[int, AnyTable], rows: Iterable[Scanned], now_ms: int
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of each section, by its name, many at a time, in their order."""
    waiting: dict[int, tuple[list[bytes], list[bytes]]] = {number: ([], []) for number in tables}
    for scanned, found in rows:
        for number, start, end in runs(scanned):
            if number not in waiting:  # heads
                continue
            keys, values = waiting[number]
            keys += scanned[start:end]
            values += found[start:end]
            if len(keys) >= _BATCH_ROWS:
                yield from _of_sections(tables[number], keys, values, now_ms)
                waiting[number] = [], []
    for number, (keys, values) in waiting.items():
        if keys:
            yield from _of_sections(tables[number], keys, values, now_ms)


def _of_sections(
    table: AnyTable, keys: Sequence[bytes], values: Sequence[bytes], now_ms: int
) -> Iterator[tuple[str, pa.RecordBatch]]:
    if isinstance(table, PackedTable):
        for section, batch in zip(sections_of(table), table.batches(keys, values, now_ms), strict=True):
            yield section.name, batch
    else:
        yield table.section.name, table.batch(keys, values, now_ms)


def _within(batch: pa.RecordBatch, section: Section, groups: KeyGroups, keys: OwnedKeys) -> pa.RecordBatch:
    """Return the rows of ``batch`` with keys in ``groups``."""
    found = key_groups(hash_columns(batch, section.key_names), keys.max_parallelism)
    return batch.filter(pa.array((found >= groups.first) & (found < groups.first + groups.count)))
