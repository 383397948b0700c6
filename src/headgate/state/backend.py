"""What a state backend is: it holds all keyed state of one operator in one subtask.

There are two views on state, by row and by column, because a Python function looks at one key at a time and a
vectorised one at thousands. A backend serves one of them. Users see neither: their handles
(``operators.processfunction``, ``operators.processbatch``) call these methods, so that another backend changes no
user code. Not thread-safe; only ``FrozenSections.encode`` runs beside processing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from headgate.state.descriptors import KeyColumns, StateDescriptor, section_schema
from headgate.state.ipc import decode_batches
from headgate.state.ownership import owned_rows


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which keys this subtask owns (KG8)."""

    max_parallelism: int
    parallelism: int
    subtask_index: int


class FrozenSections(Protocol):
    """All states as they were at a barrier."""

    def encode(self) -> Sequence[bytes | bytearray | memoryview | pa.Buffer]:
        """Return the snapshot (``codec.snapshot``, a section per state). Runs in an upload thread."""


class StateBackend(Protocol):
    """What both views have."""

    def freeze(self) -> FrozenSections:
        """Return the states as they are now, in microseconds (ST5)."""

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """Add the state of the keys that ``owner`` owns from one former subtask's snapshot (ST4)."""


class RowCells(Protocol):
    """One state by row: an object per key. The object is immutable, or a list or dict that the backend owns."""

    def get(self, key: Any) -> Any:
        """Return the object of ``key``, or None. Do not change it."""

    def writable(self, key: Any) -> Any:
        """Return the list or dict of ``key`` in order to change it, or None if it has none."""

    def put(self, key: Any, value: Any) -> None:
        """Set the object of ``key``; it belongs to the backend afterwards."""

    def remove(self, key: Any) -> None:
        """Forget ``key``; nothing happens if it has nothing."""

    def keys(self) -> Iterable[Any]:
        """Return the keys that have something."""


class RowBackend(StateBackend, Protocol):
    """State by row: keys are Python values (tuples of them if the key has several columns)."""

    def cells(self, descriptor: StateDescriptor) -> RowCells:
        """Return the cells of one declared state."""

    def all_keys(self) -> list[Any]:
        """Return all keys that have any state."""


def restored_batches(
    data: memoryview, keys: KeyColumns, descriptor: StateDescriptor, path: str, owner: Ownership
) -> Iterator[pa.RecordBatch]:
    """Read a state's section; return the rows that ``owner`` owns (ST4).

    Raises:
        CorruptionError: it is not such a section.
    """
    for batch in decode_batches(data, section_schema(keys, descriptor), f"{path}, state '{descriptor.name}'"):
        owned = owned_rows(batch, keys.section_names, owner.max_parallelism, owner.parallelism, owner.subtask_index)
        if owned.num_rows:
            yield owned
