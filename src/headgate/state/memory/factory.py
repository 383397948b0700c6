"""State in memory, as operators ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.state.backend import ColumnBackend, RowBackend
from headgate.state.descriptors import KeyColumns, StateDescriptor
from headgate.state.memory.by_column import MemoryColumnBackend
from headgate.state.memory.rows import MemoryRowBackend


class MemoryStates:
    """See ``backend.StateFactory``."""

    def by_row(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor]) -> RowBackend:
        """See ``StateFactory``."""
        return MemoryRowBackend(keys, descriptors)

    def by_column(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor]) -> ColumnBackend:
        """See ``StateFactory``."""
        return MemoryColumnBackend(keys, descriptors)
