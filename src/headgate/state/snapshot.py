"""Snapshots of state: frozen state, the target that it is written to, its parts by key group, and stored files.

``freeze`` of a backend returns state as it was at a barrier. ``runtime.checkpoints`` has it write itself beside
processing, perhaps more than once, and releases it when the snapshot is durable or given up (docs/spec/state.md,
docs/spec/subtask.md). Rows of keys are written in one part, or cut by key group if there are many: a restore reads only
the parts that hold keys of its own, in any order.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.snapshot import (
    CHUNKS_DESCRIPTION,
    DATABASE_DESCRIPTION,
    Buffer,
    encode_sections,
)
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.state.descriptors import Section
from headgate.state.key_hash import hash_columns, key_groups


def encode_batches(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> list[pa.Buffer]:
    """Return ``batches`` of ``schema`` as the buffers of one section."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return [sink.getvalue()]


class _Buffers:
    """A file that keeps what is written to it. Arrow hands it buffers of columns as they are."""

    closed = False

    def __init__(self) -> None:
        self.found: list[Buffer] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        """Keep ``data``."""
        self.found.append(data)
        return len(data)

    def flush(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """There is nothing to do."""


def batch_buffers(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> list[Buffer]:
    """Return what ``encode_batches`` does without a copy: many buffers, most of which are those of the columns.

    A section of several buffers cannot be looked into before it is written (``codec.snapshot.section_views``).
    """
    sink = _Buffers()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.found


def decode_batches(data: memoryview, schema: pa.Schema, path: str) -> list[pa.RecordBatch]:
    """Return what ``encode_batches`` wrote, as views into ``data``.

    Raises:
        CorruptionError: it is not such a stream, or its schema is another one.
    """
    found, batches = decode_stream(data, path)
    if not found.equals(schema):
        raise CorruptionError(path, 0, f"columns {schema.names}", f"columns {found.names} or other types")
    return batches


def decode_stream(data: memoryview, path: str) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the schema and the batches that are in ``data``, as views into it.

    Raises:
        CorruptionError: it is not such a stream.
    """
    try:
        return read_stream(data)
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(path, 0, "an Arrow stream", str(error)) from error


class LocalDamage(CorruptionError):  # noqa: N818 - it says which files are damaged
    """Files of a database on a local disk contradict themselves: no checkpoint has them, or has others."""


class UnsoundFiles(CorruptionError):  # noqa: N818 - it says which files are damaged
    """Files in a checkpoint are as they were written, and hold something wrong: opening them finds out (R57)."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredFiles:
    """The files of one operator's state in one former subtask.

    Attributes:
        parts: the files by their names, and one that says what they are (``is_description``).
        read: returns the bytes of a part, verified.
        where: they are, for messages.
        directory: in which the paths of parts are, for messages.
    """

    parts: Sequence[SnapshotPart]
    read: Callable[[SnapshotPart], memoryview]
    where: str
    directory: str

    @property
    def description(self) -> SnapshotPart:
        """The part that says what the others are.

        Raises:
            CorruptionError: there is none.
        """
        found = [part for part in self.parts if is_description(part)]
        if len(found) != 1:
            raise CorruptionError(self.where, 0, "one description of the files of a state", f"{len(found)}")
        return found[0]

    @property
    def are_chunks(self) -> bool:
        """Whether the files are chunks of state in memory, and no database."""
        return any(part.name == CHUNKS_DESCRIPTION for part in self.parts)

    @property
    def files(self) -> Mapping[str, SnapshotPart]:
        """The files by name."""
        return {part.name: part for part in self.parts if not is_description(part)}

    def path_of(self, part: SnapshotPart) -> str:
        """Return what to call ``part``, for messages."""
        return f"{self.directory}/{part.path}" if part.path else self.where

    @property
    def size_bytes(self) -> int:
        """How large they are together."""
        return sum(part.size_bytes for part in self.parts)


def is_description(part: SnapshotPart) -> bool:
    """Whether a part of the files of a backend says what the others are."""
    return part.name in (CHUNKS_DESCRIPTION, DATABASE_DESCRIPTION)


@dataclass(frozen=True, slots=True)
class OwnedKeys:
    """The keys of a subtask: the key groups that it owns, of ``max_parallelism``."""

    groups: KeyGroups
    max_parallelism: int


class SnapshotTarget(Protocol):
    """Where the state of one operator goes. The order of its parts is kept."""

    @property
    def keys(self) -> OwnedKeys | None:
        """Owner of the keys, for state that is cut by key group; None: write it in one part."""

    def put(
        self,
        chunks: Iterable[Buffer],
        rows: Mapping[str, int] | None,
        key_groups: KeyGroups | None = None,
        name: str = "",
    ) -> SnapshotPart:
        """Write one part; return the reference, to be shared once a checkpoint with it is completed.

        Args:
            chunks: its bytes.
            rows: of each section of state in it; None if its bytes do not tell.
            key_groups: all of its keys are in these; None: every restore needs it.
            name: for the operator itself.

        Raises:
            StorageError
        """

    def share(self, part: SnapshotPart) -> None:
        """Refer to a part that may be shared, instead of writing it again (SF6, SF15)."""

    @property
    def files(self) -> Mapping[str, SnapshotPart] | None:
        """Files of this state that may be shared, by name (SF15).

        None: the state must be portable, in parts that every backend reads, as in a savepoint.
        """

    def put_file(self, name: str, chunks: Iterable[Buffer], key_groups: KeyGroups | None = None) -> SnapshotPart:
        """Write one file of a backend, apart from everything else, so that it can be removed when it is not needed.

        Args:
            name: no other file of this state is called so.
            chunks: its bytes.
            key_groups: all of its keys are in these; None: in those of the subtask.

        Raises:
            StorageError
        """

    def describe_files(self, chunks: Iterable[Buffer], rows: Mapping[str, int], name: str) -> SnapshotPart:
        """Write what the files of this snapshot are.

        Args:
            chunks: the description, for a restore.
            rows: of each state in the files. Nothing else counts them before they are restored.
            name: of the description: it says which backend wrote the files.

        Raises:
            StorageError
        """


class FrozenState(ABC):
    """State as it was at a barrier; later changes of its owner must not show in it.

    ``rows`` and ``write_to`` change nothing, so a write that failed can be repeated. They run in an upload thread, and
    so does ``release``.
    """

    def __init__(self) -> None:
        self.is_released = False

    def rows(self) -> Mapping[str, int]:
        """Return how many rows each section of state must have, counted in what was frozen, not in its encoding.

        A row is a value, an element, an entry, an accumulator, a record. ``codec.snapshot_rows`` counts those of the
        bytes.
        """
        self._assert_held()
        return self._rows()

    def encode(self) -> Sequence[Buffer]:
        """Return the snapshot's bytes as a list of buffers (``codec.snapshot``); can be repeated until ``release``."""
        self._assert_held()
        return self._encode()

    def write_to(self, target: SnapshotTarget) -> None:
        """Write the state, in as many parts as it likes; can be repeated until ``release``.

        Raises:
            StorageError
        """
        self._assert_held()
        self._write(target)

    def release(self) -> None:
        """Give the state up: it is durable, or will not be written. The second time nothing happens.

        Afterwards:
            The owner may change what it had frozen; ``write_to`` raises, because it would find something else.
        """
        if not self.is_released:
            self._forget()
            self.is_released = True

    def _assert_held(self) -> None:
        if self.is_released:
            raise AssertionError(f"{type(self).__qualname__} was released: it has nothing to write any more")

    @abstractmethod
    def _rows(self) -> Mapping[str, int]: ...

    def _write(self, target: SnapshotTarget) -> None:
        """Write one part that every restore reads; state that is cut by key group writes more."""
        target.put(self._encode(), self._rows())

    @abstractmethod
    def _encode(self) -> Sequence[Buffer]:
        """Return the whole state as a container of ``codec.snapshot``."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the references to what was frozen."""


RANGES_MAX = 8
"""A snapshot of one operator has at most so many parts in each subtask: a rescale reads at most two of them in vain."""

RANGE_BYTES_MIN = 1 << 20
"""A smaller part is not worth a request of its own."""

Rows: TypeAlias = Sequence[tuple[Section, Sequence[pa.RecordBatch]]]


class KeyedState(FrozenState):
    """Rows of keys that one subtask owned at a barrier."""

    def sections(self) -> Rows:
        """Return the rows of each section."""
        self._assert_held()
        return self._sections()

    @abstractmethod
    def _sections(self) -> Rows:
        """Return the rows of each section, in the same order each time."""

    def _meta(self) -> Mapping[str, bytes]:
        """Return what belongs to no key; every part has it."""
        return {}

    def _encode(self) -> Sequence[Buffer]:
        return self._encoded(self._sections())

    def _write(self, target: SnapshotTarget) -> None:
        self._write_rows(target, self._sections())

    def _write_rows(self, target: SnapshotTarget, sections: Rows) -> None:
        """Write a part for each range of key groups."""
        if target.keys is None:
            target.put(self._encoded(sections), row_counts(sections))
            return
        for groups, rows in cut_by_key_group(sections, target.keys):
            target.put(self._encoded(rows), row_counts(rows), groups)

    def _encoded(self, sections: Rows) -> list[Buffer]:
        found: dict[str, Sequence[Buffer]] = {name: [data] for name, data in self._meta().items()}
        found |= {section.name: encode_batches(section.schema, batches) for section, batches in sections}
        return encode_sections(found)


def cut_by_key_group(sections: Rows, keys: OwnedKeys) -> Iterator[tuple[KeyGroups, Rows]]:
    """Yield the rows of each range of key groups; the rows of a key stay in their order.

    Raises:
        AssertionError: there is a key that is not owned; a restore would not find it.
    """
    size_bytes = sum(batch.nbytes for _, batches in sections for batch in batches)
    ranges = key_group_ranges(keys.groups, size_bytes)
    if len(ranges) == 1:
        yield ranges[0], sections
        return
    starts = np.array([groups.first for groups in ranges], np.int64)
    places = [[_range_numbers(batch, section, keys, starts) for batch in batches] for section, batches in sections]
    for number, groups in enumerate(ranges):
        yield (
            groups,
            [
                (section, [b.filter(pa.array(p == number)) for b, p in zip(batches, of_batches, strict=True)])
                for (section, batches), of_batches in zip(sections, places, strict=True)
            ],
        )


def key_group_ranges(groups: KeyGroups, size_bytes: int) -> list[KeyGroups]:
    """Return the ranges into which ``size_bytes`` of state in ``groups`` are cut, about equal ones."""
    count = max(1, min(RANGES_MAX, groups.count, size_bytes // RANGE_BYTES_MIN))
    ends = [groups.count * number // count for number in range(count + 1)]
    return [KeyGroups(groups.first + a, b - a) for a, b in itertools.pairwise(ends)]


def _range_numbers(batch: pa.RecordBatch, section: Section, keys: OwnedKeys, starts: np.ndarray) -> np.ndarray:
    """Return the number of the range that each row is in."""
    found = key_groups(hash_columns(batch, section.key_names), keys.max_parallelism)
    first, end = keys.groups.first, keys.groups.first + keys.groups.count
    assert ((found >= first) & (found < end)).all(), f"state '{section.name}' has a key that its subtask does not own"
    return np.searchsorted(starts, found, side="right") - 1


def row_counts(sections: Rows) -> dict[str, int]:
    """Return how many rows each section has."""
    return {section.name: sum(batch.num_rows for batch in batches) for section, batches in sections}
