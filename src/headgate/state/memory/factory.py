"""State in memory, as operators ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.state.backend import ColumnBackend, RecordBackend, RowBackend, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.memory.row_backend import MemoryRecords, MemoryRowBackend
from headgate.state.memory.window_backend import MemoryMergedRows, MemoryWindowRows
from headgate.state.window_aggregates import Accumulator, MergedRows


class MemoryStates:
    """See ``backend.StateFactory``."""

    def by_row(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> RowBackend:
        """See ``StateFactory``."""
        return MemoryRowBackend(keys, descriptors, has_timers=has_timers)

    def by_column(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> ColumnBackend:
        """See ``StateFactory``."""
        return MemoryColumnBackend(keys, descriptors, has_timers=has_timers)

    def records(self, section: Section) -> RecordBackend:
        """See ``StateFactory``."""
        return MemoryRecords(section)

    def by_window(self, keys: KeyColumns, rows: WindowRows) -> WindowBackend[list[pa.RecordBatch]]:
        """See ``StateFactory``."""
        return MemoryWindowRows(rows)

    def merged_by_window(
        self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]
    ) -> WindowBackend[MergedRows]:
        """See ``StateFactory``."""
        return MemoryMergedRows(keys, rows, accumulators)
