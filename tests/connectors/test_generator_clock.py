"""A generator's pace and times on a machine whose date is set."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.clocks import HandClock

from headgate.connectors.base import SourceContext
from headgate.connectors.generator import Generator, GeneratorReader


@pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
def test_setting_the_date_changes_neither_the_pace_nor_the_times_of_records(step_ms: int) -> None:
    source = Generator(rows_per_second=1_000, pool_rows=64, batch_rows=64)
    clock = HandClock(passed_ms=77, date_ms=1_700_000_000_000)
    reader = GeneratorReader(source, SourceContext("p", "source", 0, 1, None), clock)
    made = []
    for _ in range(100):
        clock.advance(20, date_step_ms=step_ms)
        batch = reader.poll()
        assert batch is not None
        made.append((batch.batch.num_rows, int(batch.batch["ts"].cast(pa.int64())[0].as_py()) // 1_000))
    assert made == [(20, 1_700_000_000_000 + 20 * turn) for turn in range(1, 101)]
