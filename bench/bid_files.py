"""Files of bids for ``bench/real_input``: the same records as JSON lines, Parquet, CSV and gzip JSON, four files each.

The bids are those of ``headgate.nexmark``, with a key of 100,000 whole numbers (``auction``) and one of 10,000 texts
(``user``). A file goes on in event time where the one before it ends; all four together have ``SPAN_S``, whatever the
number of bids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.nexmark import Nexmark

FILES = 4
SPAN_S = 40
NUMBER_KEYS, TEXT_KEYS = 100_000, 10_000
FORMATS = ("json", "parquet", "csv", "json.gz")
COLUMNS = {"auction": int, "user": str, "price": int, "channel": str, "url": str, "date_time": pl.Datetime("us")}
_PART = 250_000


def write_bids(directory: Path, bids: int, formats: Sequence[str] = FORMATS) -> None:
    """Write ``bids`` bids in each of ``formats``, in a directory of its name."""
    for name in formats:
        (directory / name).mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        share = bids // FILES
        lows = range(0, share, _PART)
        frame = pl.concat(_bids(number * share + low, min(_PART, share - low), FILES * share) for low in lows)
        text = frame.with_columns(pl.col("date_time").dt.to_string("%Y-%m-%dT%H:%M:%S%.6f"))
        for name in formats:
            path = directory / name / f"{number}.{name}"
            if name == "parquet":
                frame.write_parquet(path, row_group_size=262_144)
            elif name == "csv":
                text.write_csv(path)
            elif name == "json":
                text.write_ndjson(path)
            else:
                text.write_ndjson(path, compression="gzip")


def _bids(first: int, count: int, of: int) -> pl.DataFrame:
    """Return bids ``first`` to ``first + count``, of so many."""
    kinds = Nexmark("bid", columns=("price", "channel", "url"))
    made = pl.DataFrame(pa.Table.from_batches([kinds.batch(np.arange(2 * first, 2 * (first + count)))]))[:count]
    draw = np.random.default_rng(first)
    number = pl.Series(draw.integers(0, TEXT_KEYS, count))
    times = kinds.base_ms * 1_000 + (first + np.arange(count)) * SPAN_S * 1_000_000 // of
    return pl.select(
        pl.Series("auction", draw.integers(0, NUMBER_KEYS, count)),
        pl.format("user-{}", number.cast(pl.String).str.zfill(5)).alias("user"),
        made["price"],
        made["channel"],
        made["url"],
        pl.Series("date_time", times).cast(pl.Datetime("us")),
    )
