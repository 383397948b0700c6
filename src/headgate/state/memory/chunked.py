"""State in memory at a barrier, which writes what changed since a snapshot that it may refer to (MC1).

Counterparts: ``chunk_log`` says since which one, ``stored_chunks`` reads it. Little state is written as rows, and so is
what must be portable, such as a savepoint (SV3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from headgate.model.manifest import SnapshotPart
from headgate.state.frozen import OwnedKeys, SnapshotTarget
from headgate.state.keyed import KeyedState, Rows
from headgate.state.memory.chunk_log import BEGINNING, Chunk, ChunkLog, kept
from headgate.state.memory.chunks import Change, ChunkFile, DescribedChunk, Description, encode_chunk, rows_of

SIZE_BYTES_MIN = 256 << 10
"""Less state is written as rows each time: there is little to be saved, and older releases read these."""


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

        Of a state of which that is not known, return all that there is (MC11).
        """

    @abstractmethod
    def _changed_counts(self, after: int) -> Mapping[str, int | None]:
        """Return how much of each state changed after a snapshot; None: nobody knows."""

    def _meta_of_rows(self) -> Mapping[str, bytes]:
        """Return what whoever restores the rows of chunks needs beside them, of what ``_meta`` returns."""
        return {}

    def _now_ms(self) -> int | None:
        """Return what time it was, if anything expires."""
        return None

    def _sections(self) -> Rows:
        return _rows_of(self._changes(None))

    def _write(self, target: SnapshotTarget) -> None:
        """Write the changes since what may be shared, or everything (MC1)."""
        keys, shareable = target.keys, target.files
        if keys is None or shareable is None:
            super()._write(target)
            return
        chain = self._log.chain(shareable)
        on = kept(chain, sum(self._rows().values()), self._changed_count)
        changes = self._changes(on[-1].until if on else None)
        if not on and _size_bytes(changes) < max(1, SIZE_BYTES_MIN):
            self._write_rows(target, _rows_of(changes))
            self._log.wrote(self._number, (), None)
            return
        new = self._put_chunk(target, keys, changes, on)
        self._describe(target, keys, changes, [*on, *new])
        if self._meta():
            self._write_rows(target, [(change.state.section, ()) for change in changes])  # one without any is damage
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
        return [Chunk(after, self._number, rows_of(changes), tuple(files), whole)]

    def _describe(
        self, target: SnapshotTarget, keys: OwnedKeys, changes: Sequence[Change], chunks: Sequence[Chunk]
    ) -> None:
        states = [change.state for change in changes]
        found = [DescribedChunk(one.rows, [_file(part, keys) for part in one.files], one.whole) for one in chunks]
        rows = self._rows()
        of_states = {state.section.name: rows[state.section.name] for state in states}
        target.describe_files(
            Description(states, keys, found, self._now_ms(), self._meta_of_rows()).encode(), of_states
        )


def _file(part: SnapshotPart, keys: OwnedKeys) -> ChunkFile:
    return ChunkFile(part.name, part.key_groups or keys.groups)


def _rows_of(changes: Sequence[Change]) -> Rows:
    return [(change.state.section, list(map(change.state.portable, change.rows))) for change in changes]


def _size_bytes(changes: Sequence[Change]) -> int:
    return sum(batch.nbytes for change in changes for batch in change.rows)
