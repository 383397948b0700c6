"""Records that a file sink holds back are read back only as what they were."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headgate.codec.snapshot import encode_sections
from headgate.connectors.files.file_writer import HeldRecords, decode_held_records
from headgate.errors import CorruptionError
from headgate.operators.base import RestoredState
from headgate.state.snapshot import encode_batches

SCHEMA = pa.schema([("n", pa.int64())])


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([list(numbers)], schema=SCHEMA)


def state_of(**sections: bytes) -> RestoredState:
    encoded = encode_sections({name: [data] for name, data in sections.items()})
    return RestoredState(2, 4, memoryview(b"".join(bytes(memoryview(part)) for part in encoded)))


def test_records_held_back_come_back_with_the_columns_that_they_had() -> None:
    held = HeldRecords(SCHEMA, [batch(1), batch(2, 3)])
    assert held.rows() == {"records": 3}
    data = b"".join(bytes(memoryview(part)) for part in held.encode())
    assert decode_held_records(RestoredState(0, 1, memoryview(data)), "out") == [batch(1), batch(2, 3)]


def test_state_that_holds_no_records_is_refused_with_whose_it_was() -> None:
    whole = bytes(memoryview(encode_batches(SCHEMA, [batch(1, 2, 3)])[0]))
    with pytest.raises(CorruptionError, match="held back by 'out', subtask 2 is damaged at byte 0: expected a section"):
        decode_held_records(state_of(other=b"x"), "out")
    for size in range(0, len(whole) - 8, 9):
        with pytest.raises(CorruptionError, match="subtask 2 is damaged at byte 0: expected an Arrow stream"):
            decode_held_records(state_of(records=whole[:size]), "out")
