"""Frozen state whose rows have keys: written in one part, or cut by key group if there is much of it (SF11).

Counterpart: ``runtime.checkpoints.restoring``, which gives a worker only the parts that hold keys of its own. The parts
of one snapshot cover the key groups that the subtask owned, each with one; a restore may take them in any order.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import Buffer, encode_sections
from headgate.model.manifest import KeyGroups
from headgate.state.descriptors import Section
from headgate.state.frozen import FrozenState, OwnedKeys, SnapshotTarget
from headgate.state.ipc import encode_batches
from headgate.state.key_hash import hash_columns, key_groups

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
            target.put(self._encoded(sections), counts(sections))
            return
        for groups, rows in cut(sections, target.keys):
            target.put(self._encoded(rows), counts(rows), groups)

    def _encoded(self, sections: Rows) -> list[Buffer]:
        found: dict[str, Sequence[Buffer]] = {name: [data] for name, data in self._meta().items()}
        found |= {section.name: encode_batches(section.schema, batches) for section, batches in sections}
        return encode_sections(found)


def cut(sections: Rows, keys: OwnedKeys) -> Iterator[tuple[KeyGroups, Rows]]:
    """Yield the rows of each range of key groups; the rows of a key stay in their order.

    Raises:
        AssertionError: there is a key that is not owned; a restore would not find it.
    """
    size_bytes = sum(batch.nbytes for _, batches in sections for batch in batches)
    ranges = ranges_of(keys.groups, size_bytes)
    if len(ranges) == 1:
        yield ranges[0], sections
        return
    starts = np.array([groups.first for groups in ranges], np.int64)
    places = [[_places(batch, section, keys, starts) for batch in batches] for section, batches in sections]
    for number, groups in enumerate(ranges):
        yield (
            groups,
            [
                (section, [b.filter(pa.array(p == number)) for b, p in zip(batches, of_batches, strict=True)])
                for (section, batches), of_batches in zip(sections, places, strict=True)
            ],
        )


def ranges_of(groups: KeyGroups, size_bytes: int) -> list[KeyGroups]:
    """Return the ranges into which ``size_bytes`` of state in ``groups`` are cut, about equal ones."""
    count = max(1, min(RANGES_MAX, groups.count, size_bytes // RANGE_BYTES_MIN))
    ends = [groups.count * number // count for number in range(count + 1)]
    return [KeyGroups(groups.first + a, b - a) for a, b in itertools.pairwise(ends)]


def _places(batch: pa.RecordBatch, section: Section, keys: OwnedKeys, starts: np.ndarray) -> np.ndarray:
    """Return the number of the range that each row is in."""
    found = key_groups(hash_columns(batch, section.key_names), keys.max_parallelism)
    first, end = keys.groups.first, keys.groups.first + keys.groups.count
    assert ((found >= first) & (found < end)).all(), f"state '{section.name}' has a key that its subtask does not own"
    return np.searchsorted(starts, found, side="right") - 1


def counts(sections: Rows) -> dict[str, int]:
    """Return how many rows each section has."""
    return {section.name: sum(batch.num_rows for batch in batches) for section, batches in sections}
