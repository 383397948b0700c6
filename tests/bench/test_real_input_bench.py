"""The benchmark of files: systems give the same results, and other results are refused."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from bench.bid_files import FORMATS, write_bids
from bench.headgate_real_input import in_process
from bench.peers.real_input import polars
from bench.real_input import check, results

BIDS = 2_000


@pytest.mark.long
def test_results_are_compared_row_by_row(tmp_path: Path) -> None:
    write_bids(tmp_path, BIDS)
    found = {}
    for form in FORMATS:
        polars(tmp_path / form, tmp_path / "polars" / form, "user", "streaming")
        in_process(tmp_path / form, tmp_path / "headgate" / form, "user", parallelism=2)
        for system in ("polars", "headgate"):
            found[system, form] = results(tmp_path / system / form, "user")
    expected = found["polars", "json"]
    assert expected["bids"].sum() == BIDS
    for (system, form), rows in found.items():
        check(f"{form}/{system}", rows, expected, is_last_missing=False)
    last = pl.col("window_start") == expected["window_start"].max()
    check("without the last window", expected.filter(~last), expected, is_last_missing=True)
    wrong = expected.with_columns(total=pl.when(pl.int_range(pl.len()) == 0).then(0).otherwise("total"))
    for rows in (wrong, expected[1:], expected.filter(~last)):
        with pytest.raises(RuntimeError, match="json/other has other results"):
            check("json/other", rows, expected, is_last_missing=False)
