"""What the files of a database in a checkpoint are: its tables, its keys, and its small files (RB20).

Counterparts: ``increments`` writes it, ``reopening`` reads it. Large files are parts of their own; the small ones that
change with every checkpoint are in here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError
from headgate.model.manifest import KeyGroups
from headgate.state.descriptors import Section, StateKind
from headgate.state.frozen import OwnedKeys
from headgate.state.rocksdb.tables import Table

VERSION = 1

_WHAT = "what"
_SMALL = "small/"
_SECTION, _TYPES = "section/", "types/"
_VALUE = "value"


@dataclass(frozen=True)
class Description:
    """What a database is.

    Attributes:
        tables: what its rows mean.
        keys: whose keys are in it.
        names: of its large files.
        small: its other files.
    """

    tables: Sequence[Table]
    keys: OwnedKeys
    names: Sequence[str]
    small: Mapping[str, bytes]

    def encode(self) -> list[Buffer]:
        """Return it as a container."""
        groups = self.keys.groups
        what = {
            "version": VERSION,
            "groups": [groups.first, groups.count, self.keys.max_parallelism],
            "files": list(self.names),
            "tables": [_table(table) for table in self.tables],
        }
        found: dict[str, Sequence[Buffer]] = {_WHAT: [json.dumps(what).encode()]}
        for table in self.tables:
            types = [pa.field(str(at), dtype) for at, dtype in enumerate(table.outer)]
            found[f"{_SECTION}{table.number}"] = [table.section.schema.serialize()]
            found[f"{_TYPES}{table.number}"] = [pa.schema([*types, pa.field(_VALUE, table.dtype)]).serialize()]
        return encode_sections(found | {f"{_SMALL}{name}": [data] for name, data in self.small.items()})


def decode_description(data: memoryview, where: str) -> Description:
    """Return what ``Description.encode`` has written.

    Raises:
        CorruptionError: it is not that, or of a version that is not known.
    """
    sections = decode_sections(data, where)
    try:
        what = json.loads(bytes(sections[_WHAT]))
        if what["version"] != VERSION:
            raise CorruptionError(where, 0, f"files of a database, version {VERSION}", f"version {what['version']}")
        first, count, max_parallelism = what["groups"]
        tables = [_decoded(table, sections) for table in what["tables"]]
        names = [str(name) for name in what["files"]]
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise CorruptionError(where, 0, "what the files of a database are", str(error)) from error
    small = {name.removeprefix(_SMALL): bytes(file) for name, file in sections.items() if name.startswith(_SMALL)}
    return Description(tables, OwnedKeys(KeyGroups(first, count), max_parallelism), names, small)


def is_told_by(tables: Sequence[object]) -> bool:
    """Whether a description tells everything about ``tables``; other databases are written as rows."""
    return all(isinstance(table, Table) and _copy(table) == table for table in tables)


def _copy(table: Table) -> Table:
    """Return what remains of a table in a description."""
    return Table(table.number, table.section, table.kind, table.outer, table.dtype, is_record=table.is_record)


def _table(table: Table) -> dict[str, object]:
    return {
        "number": table.number,
        "name": table.section.name,
        "keys": list(table.section.key_names),
        "kind": table.kind.value,
        "is_record": table.is_record,
    }


def _decoded(table: Mapping[str, object], sections: Mapping[str, memoryview]) -> Table:
    number = int(str(table["number"]))
    keys = table["keys"]
    assert isinstance(keys, list)
    schema, types = (pa.ipc.read_schema(pa.py_buffer(sections[f"{one}{number}"])) for one in (_SECTION, _TYPES))
    return Table(
        number,
        Section(str(table["name"]), schema, tuple(keys)),
        StateKind(table["kind"]),
        tuple(types.types[:-1]),
        types.types[-1],
        is_record=bool(table["is_record"]),
    )
