"""Incremental snapshots of the state in memory: changes since a snapshot, written as a chain of chunks.

A *chunk* is what changed between two snapshots. The first one of a chain is everything that there was; each of the
others begins where the one before it ends. A snapshot is a chain that ends with its chunk. A chunk is a
container with two Arrow streams for each state of which anything changed: ``rows``, and ``gone``, the identities
that have no rows any more. Both replace what earlier chunks have of the same identity. Little state is written as rows,
and so is what must be portable, such as a savepoint (SV3). Counterpart: ``incremental_restore``.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field

import pyarrow as pa

from headgate.codec.snapshot import CHUNKS_DESCRIPTION, Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.state.backend import TimeKind, timer_section
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.memory.change_tracking import Interval
from headgate.state.snapshot import (
    KeyedState,
    OwnedKeys,
    Rows,
    SnapshotTarget,
    batch_buffers,
    cut_by_key_group,
    decode_batches,
    row_counts,
)

CHUNKS_MAX = 32
"""A chain has about so many chunks: a restore reads each of them."""

BEGINNING = -(1 << 62)
"""What is before the first interval."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What changed after the snapshot ``after``, up to the snapshot ``until``.

    Attributes:
        rows: how many rows it has, and keys that have gone.
        files: which hold it, each some key groups.
        whole: the states of which it has all that there was: older chunks say nothing of them.
    """

    after: int
    until: int
    rows: int
    files: tuple[SnapshotPart, ...]
    whole: frozenset[str] = frozenset()


class ChunkLog:
    """The chunks that one backend wrote, as far as they may be shared. Used by the thread that writes snapshots."""

    def __init__(self) -> None:
        self.interval = Interval()
        self._known: tuple[Chunk, ...] = ()
        self._names_before = 0

    def end_interval(self) -> int:
        """Everything was frozen: what changes from now on belongs to the next snapshot. Return the number of this."""
        self.interval.number += 1
        return self.interval.number - 1

    def continue_from(self, chunks: Sequence[tuple[int, tuple[SnapshotPart, ...], frozenset[str]]]) -> None:
        """What these chunks say was restored, and nothing else: the next snapshot may go on from them.

        Args:
            chunks: rows, files and whole states of each, in order.
        """
        assert chunks, "a snapshot of chunks has at least one"
        assert not self._known, "a backend is restored before it writes"
        ends = range(1 - len(chunks), 1)
        starts = [BEGINNING, *ends[:-1]]
        placed = zip(starts, ends, chunks, strict=True)
        self._known = tuple(Chunk(after, until, *found) for after, until, found in placed)
        numbers = [int(file.name.partition("-")[0]) for _, files, _ in chunks for file in files]
        self._names_before = max(numbers, default=0)
        # what was restored counts as of interval 0
        self.interval.number = 1

    def forget(self) -> None:
        """The next snapshot has everything."""
        self._known = ()

    def name(self, number: int, place: int) -> str:
        """Return what to call a file of the snapshot ``number``: no other one of its snapshot is called so."""
        return f"{self._names_before + number}-{place}{_CHUNK_SUFFIX}"

    def chain(self, shareable: Mapping[str, SnapshotPart]) -> list[Chunk]:
        """Return the longest chain of which every file may be shared. They all are of one snapshot (SF15)."""
        # two may begin where the same one ends, after chunks were written together: the later one counts
        found = {c.after: c for c in self._known if all(shareable.get(f.name) == f for f in c.files)}
        chain: list[Chunk] = []
        at = BEGINNING
        while (chunk := found.get(at)) is not None:
            assert chunk.until > at, "a chunk ends after it begins"
            chain.append(chunk)
            at = chunk.until
        return chain

    def wrote(self, number: int, chain: Sequence[Chunk], new: Chunk | None) -> None:
        """The snapshot ``number`` was written, where ``chain`` could be shared.

        What is in neither is in a snapshot no more that may be the newest one, and will never be shared again.
        """
        assert number < self.interval.number, "a snapshot is written after its interval has ended"
        assert new is None or new.until == number, "the newest chunk ends with its snapshot"
        self._known = (*chain, *(() if new is None else (new,)))
        firsts = [chunk.until for chunk in self._known if chunk.after == BEGINNING]
        self.interval.needed_since = min(firsts, default=number)


def chunks_to_share(chain: Sequence[Chunk], live_rows: int, changed: Callable[[int], int | None]) -> Sequence[Chunk]:
    """Return the chunks that a snapshot refers to; none: it writes everything.

    Args:
        chain: what it may refer to.
        live_rows: how many rows there are.
        changed: returns how many rows are to be written after a snapshot; None: of no state it is known which.
    """
    if len(chain) >= CHUNKS_MAX:
        chain = chain[:1]  # what changed since the first one is written together
    new_rows = changed(chain[-1].until) if chain else None
    if new_rows is None:
        return ()
    # a restore shall not read more than twice what there is
    return chain if sum(chunk.rows for chunk in chain) + new_rows < 2 * live_rows else ()


VERSION = 1
"""Of a description, and of the chunks that it tells of."""

_CHUNK_SUFFIX = ".chunk"
"""How the names of files end that are chunks."""

ROWS, GONE = "rows/", "gone/"
_WHAT, _SCHEMA, _META = "chunks", "schema/", "meta/"


@dataclass(frozen=True)
class Replaced:
    """A state, and which columns tell what a row of it replaces.

    Attributes:
        section: of the state, as any backend restores it.
        identity: rows replace those that are the same in these columns, the key's among them; (): they replace none.
        group: rows that are the same in these columns may go together; (): those of one identity.
        more: columns that rows have in chunks only, after those of the section: their group, if these do not tell.
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
        is_whole: these are all rows that there are, and no older one is there any more.
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
    for groups, own in cut_by_key_group(of_keys, keys):
        parts = [*own, *of_any_key]
        found = {section.name: batch_buffers(section.schema, batches) for section, batches in parts if _any(batches)}
        yield groups, sum(row_counts(parts).values()), encode_sections(found)


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
        keys: that are in it.
        chunks: the oldest one first, which has all that there was then.
        now_ms: what time it was: what had expired is not among the rows. None: nothing expires.
        meta: sections that belong to no key, which a restore of the rows needs beside them.
    """

    states: Sequence[Replaced]
    keys: OwnedKeys
    chunks: Sequence[DescribedChunk]
    now_ms: int | None = None
    meta: Mapping[str, bytes] = field(default_factory=dict)

    def since(self, state: str) -> Sequence[DescribedChunk]:
        """Return the chunks that say anything of ``state``: one that has all of it, and the later ones."""
        wholes = [place for place, chunk in enumerate(self.chunks) if state in chunk.whole]
        return self.chunks[wholes[-1] if wholes else 0 :]

    def encode(self) -> list[Buffer]:
        """Return it as a container."""
        groups = self.keys.groups
        what = {
            "version": VERSION,
            "groups": [groups.first, groups.count, self.keys.max_parallelism],
            "now_ms": self.now_ms,
            "chunks": [
                [c.rows, [[x.name, x.groups.first, x.groups.count] for x in c.files], sorted(c.whole)]
                for c in self.chunks
            ],
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
        if what["version"] != VERSION:
            raise UnknownFormat(where, 0, f"chunks of state, version {VERSION}", f"version {what['version']}")
        first, count, max_parallelism = what["groups"]
        chunks = [_decoded_chunk(*one) for one in what["chunks"]]
        states = [_decoded_state(sections, *one) for one in what["states"]]
        meta = {name.removeprefix(_META): bytes(one) for name, one in sections.items() if name.startswith(_META)}
        keys = OwnedKeys(KeyGroups(first, count), max_parallelism)
        return Description(states, keys, chunks, what["now_ms"], meta)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise CorruptionError(where, 0, "what the chunks of a state are", str(error)) from error


def _decoded_chunk(rows: int, files: Sequence[tuple[str, int, int]], whole: Sequence[str]) -> DescribedChunk:
    found = [ChunkFile(name, KeyGroups(first, count)) for name, first, count in files]
    return DescribedChunk(rows, found, frozenset(whole))


def _decoded_state(
    sections: Mapping[str, memoryview],
    name: str,
    keys: Sequence[str],
    identity: Sequence[str],
    group: Sequence[str],
    more: Sequence[str],
) -> Replaced:
    columns = list(pa.ipc.read_schema(pa.py_buffer(sections[f"{_SCHEMA}{name}"])))
    own, others = columns[: len(columns) - len(more)], columns[len(columns) - len(more) :]
    section = Section(name, pa.schema(own), tuple(keys))
    return Replaced(section, tuple(identity), tuple(group), pa.schema(others))


SIZE_BYTES_MIN = 256 << 10
"""Less state is written as rows each time: there is little to be saved."""


class ChunkedState(KeyedState):
    """The states of one operator at a barrier, of which it is known what changed before it."""

    def __init__(self, log: ChunkLog, number: int) -> None:
        """``number``: of the interval that ended with the barrier."""
        super().__init__()
        self._log = log
        self._number = number

    @abstractmethod
    def _changes(self, after: int | None) -> Sequence[Change]:
        """Return what changed after a snapshot, of all states, in the same order each time; None: everything.

        Of a state of which that is not known, return all that there is.
        """

    @abstractmethod
    def _changed_counts(self, after: int) -> Mapping[str, int | None]:
        """Return how much of each state changed after a snapshot; None: unknown."""

    def _meta_of_rows(self) -> Mapping[str, bytes]:
        """Return the sections of ``_meta`` that a restore of the rows of chunks needs."""
        return {}

    def _now_ms(self) -> int | None:
        """Return what time it was, if anything expires."""
        return None

    def _sections(self) -> Rows:
        return _portable_rows(self._changes(None))

    def _write(self, target: SnapshotTarget) -> None:
        """Write the changes since what may be shared, or everything."""
        keys, shareable = target.keys, target.files
        if keys is None or shareable is None:
            super()._write(target)
            return
        chain = self._log.chain(shareable)
        on = chunks_to_share(chain, sum(self._rows().values()), self._changed_count)
        changes = self._changes(on[-1].until if on else None)
        if not on and sum(batch.nbytes for change in changes for batch in change.rows) < max(1, SIZE_BYTES_MIN):
            self._write_rows(target, _portable_rows(changes))
            # rows are in no chunk: the next snapshot has nothing to refer to
            self._log.wrote(self._number, (), None)
            return
        new = self._put_chunk(target, keys, changes, on)
        self._describe(target, keys, changes, [*on, *new])
        if self._meta():
            self._write_rows(target, [(change.state.section, ()) for change in changes])  # one without any is damage
        # ``chain``, not ``on``: this snapshot may never be completed, and then the next one refers to all of it
        self._log.wrote(self._number, chain, new[0] if new else None)

    def _changed_count(self, after: int) -> int | None:
        """Return how many rows a chunk has that begins after a snapshot; None: of no state it is known which."""
        counts, live = self._changed_counts(after), self._rows()
        if all(count is None for count in counts.values()):
            return None
        return sum(live[name] if count is None else count for name, count in counts.items())

    def _put_chunk(
        self, target: SnapshotTarget, keys: OwnedKeys, changes: Sequence[Change], on: Sequence[Chunk]
    ) -> list[Chunk]:
        """Refer to the chunks ``on``, and write another one, if anything has changed."""
        for chunk in on:
            for file in chunk.files:
                target.share(file)
        whole = frozenset(change.state.section.name for change in changes if change.is_whole)
        if not rows_of(changes) and not whole:
            return []
        files: list[SnapshotPart] = []
        for place, (groups, rows, data) in enumerate(encode_chunk(changes, keys)):
            if rows or not on:  # the files of the first chunk say how a restore takes the state apart
                files.append(target.put_file(self._log.name(self._number, place), data, groups))
        after = on[-1].until if on else BEGINNING
        assert after < self._number, "a chunk begins before the snapshot that it ends with"
        return [Chunk(after, self._number, rows_of(changes), tuple(files), whole)]

    def _describe(
        self, target: SnapshotTarget, keys: OwnedKeys, changes: Sequence[Change], chunks: Sequence[Chunk]
    ) -> None:
        states = [change.state for change in changes]
        found = [DescribedChunk(one.rows, [_file(part, keys) for part in one.files], one.whole) for one in chunks]
        rows = self._rows()
        of_states = {state.section.name: rows[state.section.name] for state in states}
        target.describe_files(
            Description(states, keys, found, self._now_ms(), self._meta_of_rows()).encode(),
            of_states,
            CHUNKS_DESCRIPTION,
        )


def _file(part: SnapshotPart, keys: OwnedKeys) -> ChunkFile:
    return ChunkFile(part.name, part.key_groups or keys.groups)


def _portable_rows(changes: Sequence[Change]) -> Rows:
    return [(change.state.section, list(map(change.state.portable, change.rows))) for change in changes]
