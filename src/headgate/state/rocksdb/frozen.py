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
from headgate.model.manifest import KeyGroups
from headgate.state.descriptors import Section
from headgate.state.frozen import FrozenState, OwnedKeys, SnapshotTarget
from headgate.state.ipc import encode_batches
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.keyed import RANGE_BYTES_MIN, RANGES_MAX, Rows
from headgate.state.rocksdb.database import Database, Scanned
from headgate.state.rocksdb.expiring import expired_counts
from headgate.state.rocksdb.layout import group_start, runs
from headgate.state.rocksdb.stored_timers import TimerTable
from headgate.state.rocksdb.tables import Table

PART_BYTES = 16 << 20
"""Files of so many bytes make about one part: it is in memory while it is written, and again while it is restored."""

_BATCH_ROWS = 65_536


def _nothing() -> Rows:
    return []


@dataclass(frozen=True)
class Beside:
    """What a snapshot has that is not in the database: the timers that are in memory (RB11).

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
        database: Database,
        path: Path,
        tables: Sequence[Table | TimerTable],
        counts: Mapping[str, int],
        beside: Beside,
    ) -> None:
        """``path``: the checkpoint, which becomes this one's. ``counts``: of the rows of each table, expired or not."""
        super().__init__()
        self._database = database
        self._path = path
        self._tables = {table.number: table for table in tables}
        self._counts = dict(counts)
        self._beside = beside
        self._removal = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    def _rows(self) -> Mapping[str, int]:
        beside = self._beside.counts()
        return {**beside, **{name: count + beside.get(name, 0) for name, count in self._living_counts.items()}}

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
        """Write a part for each range of key groups (SF11)."""
        keys, beside = target.keys, self._beside.rows()
        with closing(self._database.opened(self._path)) as rows:
            if keys is None:
                target.put(*self._encoded(rows.scan(b"", None), beside))
                return
            for groups in self._ranges(keys.groups):
                start, end = group_start(groups.first), group_start(groups.first + groups.count)
                found = [(section, [_within(b, section, groups, keys) for b in batches]) for section, batches in beside]
                target.put(*self._encoded(rows.scan(start, end), found), groups)

    def _ranges(self, groups: KeyGroups) -> list[KeyGroups]:
        size_bytes = sum(path.stat().st_size for path in self._path.glob("*.sst"))
        wanted = max(min(RANGES_MAX, size_bytes // RANGE_BYTES_MIN), size_bytes // PART_BYTES)
        count = max(1, min(wanted, groups.count))
        ends = [groups.count * number // count for number in range(count + 1)]
        return [KeyGroups(groups.first + a, b - a) for a, b in pairwise(ends)]

    def _encoded(self, rows: Iterable[Scanned], beside: Rows) -> tuple[list[Buffer], dict[str, int]]:
        """Return a container of all sections, and how many rows each has."""
        batches: dict[int, list[pa.RecordBatch]] = {number: [] for number in self._tables}
        for number, batch in self._batches(rows):
            batches[number].append(batch)
        others = {section.name: (section, made) for section, made in beside}
        found: list[tuple[Section, Sequence[pa.RecordBatch]]] = []
        for number, made in batches.items():
            section = self._tables[number].section
            found.append((section, [*made, *others.pop(section.name, (section, ()))[1]]))
        found += others.values()
        parts: dict[str, Sequence[Buffer]] = {name: [data] for name, data in self._beside.meta.items()}
        parts |= {section.name: encode_batches(section.schema, made) for section, made in found}
        return encode_sections(parts), {section.name: sum(b.num_rows for b in made) for section, made in found}

    def _batches(self, rows: Iterable[Scanned]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of each table, many at a time, in their order."""
        waiting: dict[int, tuple[list[bytes], list[bytes]]] = {number: ([], []) for number in self._tables}
        for scanned, found in rows:
            for number, start, end in runs(scanned):
                if number not in waiting:  # heads
                    continue
                keys, values = waiting[number]
                keys += scanned[start:end]
                values += found[start:end]
                if len(keys) >= _BATCH_ROWS:
                    yield number, self._tables[number].batch(keys, values, self._beside.now_ms)
                    waiting[number] = [], []
        for number, (keys, values) in waiting.items():
            if keys:
                yield number, self._tables[number].batch(keys, values, self._beside.now_ms)

    def _forget(self) -> None:
        self._removal()
        self._beside.forget()
        self._beside = Beside(now_ms=self._beside.now_ms)


def _within(batch: pa.RecordBatch, section: Section, groups: KeyGroups, keys: OwnedKeys) -> pa.RecordBatch:
    """Return the rows of ``batch`` whose keys are in ``groups``."""
    found = key_groups(hash_columns(batch, section.key_names), keys.max_parallelism)
    return batch.filter(pa.array((found >= groups.first) & (found < groups.first + groups.count)))
