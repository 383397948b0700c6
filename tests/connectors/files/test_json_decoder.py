"""Lines to records: what a bad line costs, and what each kind of refusal says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headgate.connectors.files.line_decoders import JsonDecoder
from headgate.connectors.files.line_file import Lines


def lines_of(values: list[bytes]) -> Lines:
    lengths = [len(value) + 1 for value in values]
    return Lines(pa.array(values, pa.large_binary()), np.cumsum([0, *lengths[:-1]]))


class CountingDecoder(JsonDecoder):
    """Counts the lines that are parsed."""

    parsed = 0

    def _parse(self, values: pa.LargeStringArray) -> pa.RecordBatch:
        self.parsed += len(values)
        return super()._parse(values)


@pytest.mark.parametrize("at", [0, 1_234, 4_095])
def test_one_bad_line_costs_two_more_passes_over_its_block(at: int) -> None:
    values = [b'{"n":%d}' % number for number in range(4_096)]
    sound = CountingDecoder(pa.schema([("n", pa.int64())]))
    assert sound.decode(lines_of(values)).batch.num_rows == sound.parsed == 4_096
    values[at] = b'{"n":"x"}'
    decoder = CountingDecoder(pa.schema([("n", pa.int64())]))
    decoded = decoder.decode(lines_of(values))
    assert decoded.batch.column(0).to_pylist() == [number for number in range(4_096) if number != at]
    assert len(decoded.refused.problems) == 1
    assert decoder.parsed <= 3 * 4_096


USER = pa.struct([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_a_field_that_is_required_at_any_depth_is_missing_in_a_bad_record() -> None:
    schema = pa.schema(
        [
            ("user", USER),
            ("tags", pa.list_(pa.field("item", pa.string(), nullable=False))),
            ("friends", pa.list_(pa.struct([pa.field("user", USER)]))),
        ]
    )
    sound = [
        b'{"user":{"id":1,"name":null},"tags":["a"],"friends":[{"user":{"id":2}},null,{"user":null}]}',
        b'{"user":null,"tags":null,"friends":null}',
        b"{}",
    ]
    bad = {
        b'{"user":{"name":"x"}}': "user.id",
        b'{"user":{"id":null}}': "user.id",
        b'{"tags":["a",null]}': "tags[]",
        b'{"friends":[{"user":{"id":1}},{"user":{}}]}': "friends[].user.id",
    }
    decoded = JsonDecoder(schema).decode(lines_of([sound[0], *bad, *sound[1:]]))
    assert decoded.batch.num_rows == 3
    assert decoded.batch.column("user").to_pylist() == [{"id": 1, "name": None}, None, None]
    assert len(decoded.starts) == 3
    assert dict(zip(decoded.refused.texts, decoded.refused.problems, strict=True)) == {
        line.decode(): f"field '{path}' is missing or null" for line, path in bad.items()
    }
