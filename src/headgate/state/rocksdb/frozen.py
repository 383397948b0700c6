"""A database as it was at a barrier: a checkpoint of it, whose files are links (RB7 of docs/spec/rocksdb.md).

It writes itself as every backend does, in canonical sections (ST3), so that any backend restores it at any parallelism.
It is read in the upload thread, through a handle of its own: whatever becomes of the database, nothing here changes.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from headgate.codec.snapshot import Buffer, encode_sections
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.state.descriptors import Section
from headgate.state.frozen import FrozenState, OwnedKeys, SnapshotTarget
from headgate.state.ipc import encode_batches
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.keyed import RANGE_BYTES_MIN, RANGES_MAX, Rows
from headgate.state.rocksdb.database import Scanned
from headgate.state.rocksdb.described import AnyTable, Description, sections_of
from headgate.state.rocksdb.expiring import expired_counts
from headgate.state.rocksdb.increments import may_be_files, write_files
from headgate.state.rocksdb.layout import group_start, runs
from headgate.state.rocksdb.packed import PackedTable
from headgate.state.rocksdb.room import LocalDatabase

PART_BYTES = 16 << 20
"""Files of so many bytes make about one part: it is in memory while it is written, and again while it is restored."""

_BATCH_ROWS = 65_536


def _nothing() -> Rows:
    return []


@dataclass(frozen=True)
class Beside:
    """What a snapshot has that is not in the database: timers in memory (RB11), and what belongs to no key.

    Attributes:
        rows: returns rows of sections, which the database may have more of.
        counts: returns how many each of these has.
        meta: sections that belong to no key.
        now_ms: what time it was: what had expired is in no snapshot (TL6).
        forget: gives all of it up.
    """

    rows: Callable[[], Rows] = _nothing
    counts: Callable[[], Mapping[str, int]] = dict
    meta: Mapping[str, bytes] = field(default_factory=dict)
    now_ms: int = 0
    forget: Callable[[], object] = dict


class FrozenDatabase(FrozenState):
    """The rows of all tables at a barrier."""

    def __init__(
        self,
        place: LocalDatabase,
        path: Path,
        tables: Sequence[AnyTable],
        counts: Mapping[str, int],
        beside: Beside,
    ) -> None:
        """Make it of a checkpoint.

        Args:
            place: of the database.
            path: the checkpoint, which becomes this one's.
            tables: what is in it.
            counts: of the rows of each table, expired or not.
            beside: what is not in it.
        """
        super().__init__()
        self._place = place
        self._database = place.database
        self._has_files = False
        self._path = path
        self._tables = {table.number: table for table in tables}
        self._counts = dict(counts)
        self._beside = beside
        self._removal = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    def _rows(self) -> Mapping[str, int]:
        """Return what was counted; in files, what has expired and did not go yet is there, and counts (RB24)."""
        beside, counts = self._beside.counts(), self._counts if self._has_files else self._living_counts
        return {**beside, **{name: count + beside.get(name, 0) for name, count in counts.items()}}

    @cached_property
    def _living_counts(self) -> Mapping[str, int]:
        """What was counted, less what the database says has expired: so a row that was lost is missed all the same."""
        if all(table.ttl is None for table in self._tables.values()):
            return self._counts
        with closing(self._database.opened(self._path)) as rows:
            expired = expired_counts(rows, list(self._tables.values()), self._beside.now_ms)
        return {name: count - expired.get(name, 0) for name, count in self._counts.items()}

    def _encode(self) -> Sequence[Buffer]:
        with closing(self._database.opened(self._path)) as rows:
            return self._encoded(rows.scan(b"", None), self._beside.rows())[0]

    def _write(self, target: SnapshotTarget) -> None:
        """Write the files of the database (RB20), or a part for each range of key groups (SF11)."""
        keys, shareable, beside = target.keys, target.files, self._beside.rows()
        if keys is not None and shareable is not None and may_be_files(self._path, list(self._tables.values())):
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
        ranges = self._database.check(self._path)
        self._has_files = True
        about = self._beside
        found, counts = self._encoded((), beside)
        if beside or about.meta:
            target.put(found, counts, keys.groups)
        description = Description(list(self._tables.values()), keys, meta=about.meta, now_ms=about.now_ms)
        write_files(target, shareable, self._path, self._place.known, description, ranges, self._counts)

    def _ranges(self, groups: KeyGroups) -> list[KeyGroups]:
        size_bytes = sum(path.stat().st_size for path in self._path.glob("*.sst"))
        wanted = max(min(RANGES_MAX, size_bytes // RANGE_BYTES_MIN), size_bytes // PART_BYTES)
        count = max(1, min(wanted, groups.count))
        ends = [groups.count * number // count for number in range(count + 1)]
        return [KeyGroups(groups.first + a, b - a) for a, b in pairwise(ends)]

    def _encoded(self, rows: Iterable[Scanned], beside: Rows) -> tuple[list[Buffer], dict[str, int]]:
        """Return a container of all sections, and how many rows each has."""
        return encode_rows(list(self._tables.values()), rows, beside, self._beside.meta, self._beside.now_ms)

    def _forget(self) -> None:
        if self._has_files and self._removal.detach() is not None:
            self._place.keep(self._path)
        self._removal()
        self._beside.forget()
        self._beside = Beside(now_ms=self._beside.now_ms)


def encode_rows(
    tables: Sequence[AnyTable],
    rows: Iterable[Scanned],
    beside: Rows = (),
    meta: Mapping[str, bytes] | None = None,
    now_ms: int = 0,
) -> tuple[list[Buffer], dict[str, int]]:
    """Return a container of the sections of all tables, and of ``beside``, and how many rows each has.

    A section that a table and ``beside`` have holds the rows of both. What has expired at ``now_ms`` is left out (TL6).
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
    """Return the rows of ``batch`` whose keys are in ``groups``."""
    found = key_groups(hash_columns(batch, section.key_names), keys.max_parallelism)
    return batch.filter(pa.array((found >= groups.first) & (found < groups.first + groups.count)))
