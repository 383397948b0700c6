"""One record per key in memory: see ``backend.RecordBackend``. Counterpart: ``operators.reduce``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

import pyarrow as pa

from headgate.state.backend import Ownership, Record, restored_batches
from headgate.state.descriptors import Section
from headgate.state.frozen import FrozenState
from headgate.state.keyed import KeyedState, Rows
from headgate.state.memory.cells import FrozenCells, MemoryCells
from headgate.state.row_values import python_values

_ENCODE_ROWS = 16_384


class _Frozen(KeyedState):
    """The records at a barrier."""

    def __init__(self, section: Section, cells: FrozenCells) -> None:
        super().__init__()
        self._section = section
        self._cells = cells

    def _rows(self) -> Mapping[str, int]:
        return {self._section.name: len(self._cells.objects)}

    def _sections(self) -> Rows:
        return [(self._section, list(self._batches(self._section.schema)))]

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        records = iter(self._cells.objects.values())
        while part := list(islice(records, _ENCODE_ROWS)):  # in parts, because each holds up the processing thread
            columns = zip(*part, strict=True)
            arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _forget(self) -> None:
        self._cells.release()


class MemoryRecords:
    """See ``backend.RecordBackend``."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._cells = MemoryCells()
        self._key_of = itemgetter(*(section.schema.get_field_index(name) for name in section.key_names))

    def load(self, keys: Iterable[Any]) -> dict[Any, Record]:
        """See ``RecordBackend``."""
        self._cells.absorb()
        return self._cells.get_all(keys)

    def store(self, records: Mapping[Any, Record]) -> None:
        """See ``RecordBackend``."""
        self._cells.put_all(records)

    def freeze(self) -> FrozenState:
        """See ``StateBackend``; until a release, changes go to an overlay (OP8)."""
        return _Frozen(self._section, self._cells.freeze())

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        for batch in restored_batches(sections, self._section, path, owner):
            records = zip(*(python_values(column) for column in batch.columns), strict=True)
            self._cells.put_all({self._key_of(record): record for record in records})
