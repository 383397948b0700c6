"""Chunks of state as bytes: what changed of each state, and what a snapshot made of chunks says of itself (MC5).

A chunk is a container with two Arrow streams for each state of which anything changed: ``rows``, and ``gone``, which
tells whose rows are there no more. Both replace what earlier chunks have of the same identity. Counterparts:
``chunked`` writes them, ``stored_chunks`` reads them. Nothing here does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.manifest import KeyGroups
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.frozen import OwnedKeys
from headgate.state.ipc import decode_batches, encode_batches
from headgate.state.keyed import Rows, counts, cut
from headgate.state.timers import TimeKind, timer_section

VERSION = 2
"""In version 1 every chunk but the first one has changes only, and all columns are those of a section."""

ROWS, GONE = "rows/", "gone/"
_WHAT, _SCHEMA, _META = "chunks", "schema/", "meta/"


@dataclass(frozen=True)
class Replaced:
    """A state, and which columns tell what a row of it replaces.

    Attributes:
        section: of the state, as any backend restores it.
        identity: rows replace those that are the same in these columns, the key's among them; (): they replace none.
        group: rows that are the same in these columns may go together; (): those of one identity.
        more: columns that rows have in chunks only, behind those of the section: their group, if these do not tell.
    """

    section: Section
    identity: tuple[str, ...]
    group: tuple[str, ...] = ()
    more: pa.Schema = field(default_factory=lambda: pa.schema([]))

    @property
    def columns(self) -> pa.Schema:
        """The columns of rows in chunks."""
        return pa.schema([*self.section.schema, *self.more])

    @property
    def gone(self) -> pa.Schema:
        """The columns of what is there no more."""
        columns = self.columns
        return pa.schema([columns.field(name) for name in self.group or self.identity])

    def portable(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of chunks as any backend restores them."""
        return batch.select(self.section.schema.names) if len(self.more) else batch


def replaced_timers(keys: KeyColumns, kind: TimeKind) -> Replaced:
    """Return what a row of timers replaces: the same timer."""
    section = timer_section(keys, kind)
    return Replaced(section, tuple(section.schema.names))


@dataclass(frozen=True)
class Change:
    """What changed of one state.

    Attributes:
        state: which one.
        rows: all that there are of each identity that changed.
        gone: the identities, or groups, of which no older row is there any more.
        is_whole: these are all rows that there are, and no older one is there any more (MC11).
    """

    state: Replaced
    rows: Sequence[pa.RecordBatch]
    gone: Sequence[pa.RecordBatch] = ()
    is_whole: bool = False


def rows_of(changes: Sequence[Change]) -> int:
    """Return how many rows changes have, and identities that have gone."""
    return sum(batch.num_rows for change in changes for batch in (*change.rows, *change.gone))


def encode_chunk(changes: Sequence[Change], keys: OwnedKeys) -> Iterator[tuple[KeyGroups, int, list[Buffer]]]:
    """Yield the files of a chunk: the key groups of each, how many rows it has, and a container.

    Raises:
        AssertionError: there is a key that is not owned; a restore would not find it.
    """
    every: Rows = [part for change in changes for part in _parts(change)]
    of_keys = [part for part in every if set(part[0].key_names) <= set(part[0].schema.names)]
    of_any_key = [part for part in every if not set(part[0].key_names) <= set(part[0].schema.names)]
    for groups, own in cut(of_keys, keys):
        parts = [*own, *of_any_key]
        found = {section.name: encode_batches(section.schema, batches) for section, batches in parts if _any(batches)}
        yield groups, sum(counts(parts).values()), encode_sections(found)


def _parts(change: Change) -> Rows:
    section = change.state.section
    return [
        (Section(f"{ROWS}{section.name}", change.state.columns, section.key_names), change.rows),
        (Section(f"{GONE}{section.name}", change.state.gone, section.key_names), change.gone),
    ]


def _any(batches: Sequence[pa.RecordBatch]) -> bool:
    return any(batch.num_rows for batch in batches)


def decode_change(sections: Mapping[str, memoryview], state: Replaced, path: str) -> Change:
    """Return what a chunk, of which these are the sections, says of one state.

    Raises:
        CorruptionError: it is of other columns.
    """
    name = state.section.name
    found = {}
    for prefix, schema in ((ROWS, state.columns), (GONE, state.gone)):
        data = sections.get(f"{prefix}{name}")
        found[prefix] = [] if data is None else decode_batches(data, schema, f"{path}, state '{name}'")
    return Change(state, found[ROWS], found[GONE])


@dataclass(frozen=True)
class ChunkFile:
    """One file of a chunk.

    Attributes:
        name: of the file.
        groups: all its keys are in these.
    """

    name: str
    groups: KeyGroups


@dataclass(frozen=True)
class DescribedChunk:
    """One chunk of a snapshot.

    Attributes:
        rows: how many it has, and keys that have gone.
        files: that hold it, each other key groups.
        whole: the states of which it has all that there was.
    """

    rows: int
    files: Sequence[ChunkFile]
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Description:
    """What a snapshot made of chunks is.

    Attributes:
        states: that are in the chunks.
        keys: whose.
        chunks: the oldest one first, which has all that there was then.
        now_ms: what time it was: what had expired is not among the rows (TL6). None: nothing expires.
        meta: sections that belong to no key, which whoever restores rows needs beside them.
        version: of all that.
    """

    states: Sequence[Replaced]
    keys: OwnedKeys
    chunks: Sequence[DescribedChunk]
    now_ms: int | None = None
    meta: Mapping[str, bytes] = field(default_factory=dict)
    version: int = VERSION

    def since(self, state: str) -> Sequence[DescribedChunk]:
        """Return the chunks that say anything of ``state``: one that has all of it, and those behind it."""
        wholes = [place for place, chunk in enumerate(self.chunks) if state in chunk.whole]
        return self.chunks[wholes[-1] if wholes else 0 :]

    def encode(self) -> list[Buffer]:
        """Return it as a container."""
        groups = self.keys.groups
        what = {
            "version": self.version,
            "groups": [groups.first, groups.count, self.keys.max_parallelism],
            "now_ms": self.now_ms,
            "chunks": [[c.rows, [_written(file) for file in c.files], sorted(c.whole)] for c in self.chunks],
            "states": [[s.section.name, s.section.key_names, s.identity, s.group, s.more.names] for s in self.states],
        }
        schemas = {f"{_SCHEMA}{s.section.name}": [s.columns.serialize()] for s in self.states}
        meta = {f"{_META}{name}": [data] for name, data in self.meta.items()}
        return encode_sections({_WHAT: [json.dumps(what).encode()], **schemas, **meta})


def decode_description(data: memoryview, where: str) -> Description:
    """Return what ``Description.encode`` has written.

    Raises:
        CorruptionError: it is not that, or of a version that is not known.
    """
    sections = decode_sections(data, where)
    try:
        what = json.loads(bytes(sections[_WHAT]))
        version = what["version"]
        if version not in range(1, VERSION + 1):
            raise UnknownFormat(where, 0, f"chunks of state, version {VERSION} at most", f"version {version}")
        first, count, max_parallelism = what["groups"]
        chunks = [_decoded_chunk(*one) for one in what["chunks"]]
        states = [_decoded_state(sections, *one) for one in what["states"]]
        meta = {name.removeprefix(_META): bytes(one) for name, one in sections.items() if name.startswith(_META)}
        keys = OwnedKeys(KeyGroups(first, count), max_parallelism)
        return Description(states, keys, chunks, what["now_ms"], meta, version)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise CorruptionError(where, 0, "what the chunks of a state are", str(error)) from error


def _written(file: ChunkFile) -> list[object]:
    return [file.name, file.groups.first, file.groups.count]


def _decoded_chunk(rows: int, files: Sequence[tuple[str, int, int]], whole: Sequence[str] = ()) -> DescribedChunk:
    found = [ChunkFile(name, KeyGroups(first, count)) for name, first, count in files]
    return DescribedChunk(rows, found, frozenset(whole))


def _decoded_state(
    sections: Mapping[str, memoryview],
    name: str,
    keys: Sequence[str],
    identity: Sequence[str],
    group: Sequence[str],
    more: Sequence[str] = (),
) -> Replaced:
    columns = list(pa.ipc.read_schema(pa.py_buffer(sections[f"{_SCHEMA}{name}"])))
    own, others = columns[: len(columns) - len(more)], columns[len(columns) - len(more) :]
    section = Section(name, pa.schema(own), tuple(keys))
    return Replaced(section, tuple(identity), tuple(group), pa.schema(others))
