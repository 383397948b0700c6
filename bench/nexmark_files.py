"""The events of ``bench/nexmark`` in Parquet, for all systems the same, divided in the two ways in which they are read.

``whole/KIND`` has two files that grow side by side in event time: one for each worker. ``parts/KIND`` has the same
records in files that follow one another in event time: a micro-batch each, and a last one with a record that is an
hour later, because Structured Streaming closes windows only when a later record has come.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headgate.nexmark import Nexmark
from headgate.nexmark.events import CYCLE, SCHEMAS, Kind

WORKERS = 2
ROW_GROUP = 131_072
_STEP = 10_000 * CYCLE
LAST_US = 3_600_000_000


def write_events(directory: Path, events: int, tps: int, parts: int) -> dict[str, int]:
    """Write ``events`` events of all kinds; return how many records there are of each kind."""
    counts: dict[str, int] = {}
    for kind in SCHEMAS:
        counts[kind] = _write_kind(directory, kind, events, tps, parts)  # type: ignore[arg-type]
    return counts


def _write_kind(directory: Path, kind: Kind, events: int, tps: int, parts: int) -> int:
    made, schema = Nexmark(kind, events=events, tps=tps), SCHEMAS[kind]
    whole, in_parts = directory / "whole" / kind, directory / "parts" / kind
    for place in (whole, in_parts):
        place.mkdir(parents=True)
    files = [pq.ParquetWriter(whole / f"{worker}.parquet", schema) for worker in range(WORKERS)]
    count = 0
    for part in range(parts):
        low, high = (events * bound // parts // CYCLE * CYCLE for bound in (part, part + 1))
        high = events if part == parts - 1 else high
        with pq.ParquetWriter(in_parts / f"{part:04}.parquet", schema) as one:
            for start in range(low, high, _STEP):
                numbers = np.arange(start, min(start + _STEP, high), dtype=np.int64)
                batch = made.batch(numbers)
                one.write_batch(batch, row_group_size=ROW_GROUP)
                count += batch.num_rows
                for worker, file in enumerate(files):
                    own = made.batch(numbers[numbers // CYCLE % WORKERS == worker])
                    file.write_batch(own, row_group_size=ROW_GROUP)
    for file in files:
        file.close()
    last = pa.table(made.batch(np.arange(CYCLE, dtype=np.int64))).slice(0, 1).to_pydict()
    late_us = made.base_ms * 1_000 + events * 1_000_000 // tps + LAST_US
    last["date_time"] = [late_us]
    pq.write_table(pa.Table.from_pydict(last, schema), in_parts / f"{parts:04}.parquet")
    return count
