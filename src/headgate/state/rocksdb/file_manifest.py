"""Description of a database's files in a checkpoint: its tables, its keys, and its small files (RB20).

``database_snapshot`` writes it, ``database_restore`` reads it. Large files are parts of their own; the small ones that
change with every checkpoint are in the description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from itertools import chain, groupby
from typing import TypeAlias

import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.manifest import KeyGroups
from headgate.state.descriptors import Section, StateKind
from headgate.state.rocksdb.database import FileRange
from headgate.state.rocksdb.tables import PackedTable, Table
from headgate.state.rocksdb.timers import TimerTable
from headgate.state.snapshot import OwnedKeys
from headgate.state.ttl import TTL
from headgate.storage.object_names import read_name

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
"""What RocksDB and its library call files: opening a database writes files with these names (SE8)."""

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
        now_ms: what time it was: what had expired is not part of the state (TL6).
        is_whole: whether all rows of ``keys`` are in these files; not if some were left out (RB29).
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
        """When the last row of each table expires, at the latest, by its number (TL7)."""
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
