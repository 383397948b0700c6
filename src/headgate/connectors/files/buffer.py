"""Records on their way to a file: in memory, in a temporary file, or held back as state of the pipeline.

Counterpart: ``writer``, which decides when they become a file. Source: rules D2 and D13 of
docs/spec/connectors.md. Never decides anything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError, StorageError
from headgate.operators.base import RestoredState
from headgate.state.frozen import FrozenState
from headgate.state.ipc import encode_batches

_SECTION = "records"


class RowBuffer:
    """Records of one transaction, in memory and beyond ``buffer_bytes`` in an unnamed temporary file."""

    def __init__(self, schema: pa.Schema, buffer_bytes: int) -> None:
        self._schema, self._buffer_bytes = schema, buffer_bytes
        self._batches: list[pa.RecordBatch] = []
        self._compacted_count = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self.size_bytes = 0
        """Arrow bytes in memory."""

    @property
    def has_spilled(self) -> bool:
        """Whether some records are in the temporary file."""
        return self._file is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return not self._batches and self._file is None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add records.

        Raises:
            StorageError: the temporary file cannot be written.
        """
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self.size_bytes += batch.nbytes  # of the slice: the whole of its buffers may be shared
        if self.size_bytes >= self._buffer_bytes:
            self._spill()

    def compact(self) -> tuple[pa.RecordBatch, ...]:
        """Return all records, which are in memory; what was added since the last call is one batch of its own now.

        They may stay for long: copied, they keep no larger buffers alive that they are slices of.
        """
        assert not self.has_spilled
        added = self._batches[self._compacted_count :]
        if added:
            self._batches[self._compacted_count :] = [pa.concat_batches(added)]
            self._compacted_count = len(self._batches)
        return tuple(self._batches)

    def _spill(self) -> None:
        try:
            if self._writer is None:
                self._file = tempfile.TemporaryFile(prefix="headgate-")  # noqa: SIM115 - closed with the buffer
                self._writer = pa.ipc.new_file(self._file, self._schema)
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema))
        except OSError as error:
            raise StorageError("write", tempfile.gettempdir(), str(error)) from error
        self._batches, self._compacted_count, self.size_bytes = [], 0, 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return all records in order; can be called again. No record can be added afterwards."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._file is not None:
            reader = pa.ipc.open_file(self._file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        yield from self._batches

    def close(self) -> None:
        """Drop the records."""
        self._batches = []
        if self._file is not None:
            self._file.close()


class HeldRecords(FrozenState):
    """Records that were held back at a barrier. Batches never change, so later ones cannot show."""

    def __init__(self, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
        super().__init__()
        self._schema, self._batches = schema, tuple(batches)

    def _rows(self) -> Mapping[str, int]:
        return {_SECTION: sum(batch.num_rows for batch in self._batches)}

    def _encode(self) -> Sequence[Buffer]:
        return encode_sections({_SECTION: encode_batches(self._schema, self._batches)})

    def _forget(self) -> None:
        self._batches = ()


def held_in(state: RestoredState, node: str) -> list[pa.RecordBatch]:
    """Return what ``HeldRecords`` encoded, with the columns that it had then.

    Raises:
        CorruptionError: it is none.
    """
    path = f"records held back by '{node}', subtask {state.subtask_index}"
    sections = decode_sections(state.payload, path)
    if _SECTION not in sections:
        raise CorruptionError(path, 0, f"a section '{_SECTION}'", ", ".join(sections) or "nothing")
    try:
        return read_stream(sections[_SECTION])[1]
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(path, 0, "an Arrow stream", str(error)) from error
