"""What a ``LedgerSink`` publishes: the records of one subtask and checkpoint under one name, read piece by piece.

Counterpart: ``ledger``, which prepares it. Two forms of a committable's payload: 1 holds name and records, 2 the name
and how many pieces there are (SF13, CS8). Never holds more than one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.connectors.custom.fence import OutputName
from headgate.errors import CorruptionError, UsageError
from headgate.model.manifest import Committable, SnapshotPart

_WHOLE = b"1\n"
_INDEX = b"2\n"

PieceReader: TypeAlias = Callable[[SnapshotPart], memoryview]


class LedgerOutput:
    """The records of one subtask and checkpoint. Iterating reads them from the checkpoint, a batch at a time.

    Attributes:
        name: identifies the output; no other output ever has this name. Write it into the ledger together with the
            records.
    """

    def __init__(self, committable: Committable, read: PieceReader) -> None:
        """Look at the name; no record is read yet.

        Raises:
            CorruptionError: the payload has another form, or pieces are missing.
        """
        self._committable, self._read = committable, read
        payload = committable.payload
        end = payload.find(b"\n", len(_WHOLE))
        if not payload.startswith((_WHOLE, _INDEX)) or end < 0:
            raise self._damage("version 1 or 2 and a name", repr(payload[:20]))
        self.name = payload[len(_WHOLE) : end].decode(errors="replace")
        rest = memoryview(payload)[end + 1 :]
        self._whole = rest if payload.startswith(_WHOLE) else None
        if self._whole is None:
            self._refuse_other_count(bytes(rest[:20]).decode(errors="replace"))

    @property
    def checkpoint(self) -> int:
        """The checkpoint that the records belong to."""
        return int(self._committable.checkpoint)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the records in the order in which they were written.

        Raises:
            CorruptionError: they are damaged or gone.
            StorageError: they cannot be read now.
        """
        if self._whole is not None:
            yield from self._batches(self._whole)
        for piece in self._committable.pieces:
            yield from self._batches(self._read(piece))

    def _batches(self, data: memoryview) -> Iterator[pa.RecordBatch]:
        try:
            batches = read_stream(data, is_compressed=True)[1]
        except (pa.ArrowException, OSError) as error:
            raise CorruptionError(f"output {self.name}", 0, "an Arrow stream", str(error)) from error
        yield from batches

    def _refuse_other_count(self, said: str) -> None:
        found = str(len(self._committable.pieces))
        if said != found:
            raise self._damage(f"{said} pieces", found)

    def _damage(self, expected: str, found: str) -> CorruptionError:
        one = self._committable
        return CorruptionError(f"committable of sink '{one.sink}' for checkpoint {one.checkpoint}", 0, expected, found)


def encode_whole(name: str, records: bytes) -> bytes:
    """Return the payload of output that is not in pieces."""
    return b"".join((_WHOLE, name.encode(), b"\n", records))


def encode_index(name: str, pieces_count: int) -> bytes:
    """Return the payload of output in pieces."""
    return b"%s%s\n%d" % (_INDEX, name.encode(), pieces_count)


def checkpoint_of(name: str) -> int:
    """Return the checkpoint of a name in a ledger.

    Raises:
        UsageError: it is none.
    """
    found = OutputName.parse(name)
    if found is None:
        raise UsageError(f"'{name}' is no name of published output; names look like pipeline:sink-0000000001-00000-…")
    return found.number
