"""A program whose state is in RocksDB, with checkpoints that share files; killed while it removes some of them.

Driver and workers are one process (``headgate.testing``), so that a kill takes all of them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate import testing

PADS = 400


class Padded(hg.ProcessFunction):
    """Counts the records of a key, beside a map that is large from the beginning and changes little."""

    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.pads = state.map("pads", pa.int64(), pa.large_binary())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        n = self.n.get(0) + 1
        for at in range(PADS) if n == 1 else (n % PADS,):
            self.pads.put(at, hashlib.shake_128(f"{context.key}/{at}/{n}".encode()).digest(1_000))
        assert len(self.pads) == PADS
        self.n.put(n)
        yield {"key": context.key, "n": n}


def program(root: Path, rows: int, keys: int) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(interval="40ms", dir=root / "checkpoints", retained=2)
    state = hg.RocksDB(memory="32MB", dir=str(root / "local"))
    p = hg.Pipeline("p", parallelism=2, checkpointing=checkpointing, state=state)
    columns = {"key": hg.RowNumber()}
    source = p.source(hg.Generator(columns, rows=rows, rows_per_second=600, time="deterministic"))
    numbered = source.select(key="key").map(lambda row: {"key": row["key"] % keys})
    numbered.key_by("key").process(Padded(), name="padded").sink(hg.FileSink(root / "rows", "parquet"), name="rows")
    return p


if __name__ == "__main__":
    testing.run(program(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), timeout_s=300)
