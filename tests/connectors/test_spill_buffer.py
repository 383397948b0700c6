"""A buffer of records gives the same pieces again, and a full disk is a fault of storage."""

from __future__ import annotations

import tempfile

import pyarrow as pa
import pytest

from headgate.connectors.spill_buffer import SpillBuffer
from headgate.errors import StorageError

SCHEMA = pa.schema([("n", pa.int64())])


def test_a_temporary_file_that_cannot_be_made_is_a_storage_error_that_names_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    buffer = SpillBuffer(SCHEMA, 8)
    buffer.add(pa.record_batch([[]], schema=SCHEMA))
    assert buffer.is_empty
    with pytest.raises(StorageError, match="No space left on device") as caught:
        buffer.add(pa.record_batch([[1, 2]], schema=SCHEMA))
    assert caught.value.is_transient
    assert tempfile.gettempdir() in str(caught.value)
    assert not buffer.is_empty, "the records are still there"


@pytest.mark.parametrize("piece_bytes", [1, 100, 300, 1 << 20])
def test_pieces_are_the_same_however_often_they_are_asked_for(piece_bytes: int) -> None:
    buffer = SpillBuffer(SCHEMA, piece_bytes)
    for number in range(20):
        buffer.add(pa.record_batch([list(range(number))], schema=SCHEMA))
    first = [buffer.piece(number) for number in range(buffer.count)]
    again = [buffer.piece(number) for number in reversed(range(buffer.count))][::-1]
    assert first == again
    rows = [n for batch in buffer.batches() for n in batch["n"].to_pylist()]
    assert rows == [n for number in range(20) for n in range(number)]
    rows = [row for piece in first for batch in pa.ipc.open_stream(piece) for row in batch["n"].to_pylist()]
    assert rows == [n for number in range(20) for n in range(number)]
    buffer.close()
    assert buffer.is_empty


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_temporary_file_that_fails_is_a_fault_of_storage(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = SpillBuffer(SCHEMA, 1)
    buffer.add(pa.record_batch([[1]], schema=SCHEMA))

    class Full:
        def seek(self, *_: int) -> int:
            raise OSError(28, "No space left on device")

        fileno = seek

        def close(self) -> None:
            pass

    file, buffer._file = buffer._file, Full()  # type: ignore[assignment]
    assert file is not None
    file.close()
    with pytest.raises(StorageError, match="No space left"):
        buffer.add(pa.record_batch([[2]], schema=SCHEMA)) if operation == "write" else buffer.piece(0)
