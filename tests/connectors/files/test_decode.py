"""Lines to records: what a bad line costs, and what each kind of refusal says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headgate.connectors.files.decode import JsonDecoder
from headgate.connectors.files.lines import Lines


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
def test_one_bad_line_costs_two_more_passes_over_its_block(at: int) -> None:  # N11
    values = [b'{"n":%d}' % number for number in range(4_096)]
    sound = CountingDecoder(pa.schema([("n", pa.int64())]))
    assert sound.decode(lines_of(values)).batch.num_rows == sound.parsed == 4_096
    values[at] = b'{"n":"x"}'
    decoder = CountingDecoder(pa.schema([("n", pa.int64())]))
    decoded = decoder.decode(lines_of(values))
    assert decoded.batch.column(0).to_pylist() == [number for number in range(4_096) if number != at]
    assert len(decoded.refused.problems) == 1
    assert decoder.parsed <= 3 * 4_096
