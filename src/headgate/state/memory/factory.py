"""State in memory, as operators ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.state.aggregate_table import Accumulator
from headgate.state.backend import ColumnBackend, RecordBackend, RowBackend, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor
from headgate.state.memory.by_column import MemoryColumnBackend
from headgate.state.memory.records import MemoryRecords
from headgate.state.memory.rows import MemoryRowBackend
from headgate.state.memory.windows import MemoryMergedRows, MemoryWindowRows
from headgate.state.window_rows import MergedRows


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
