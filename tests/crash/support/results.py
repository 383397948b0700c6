"""What a pipeline has written, compared with a plain recount; and what it must not leave behind (I1, I3, I6)."""

from __future__ import annotations

import functools
from pathlib import Path

import polars as pl
import pyarrow as pa

from crash.support import pipelines
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.base import TEMP_PREFIX
from headgate.storage.urls import open_storage
from headgate.store.store import Store


def read_stream(store_root: Path, stream: str) -> pl.DataFrame:
    """Return every event of a stream."""
    with Store.open(store_root) as store:
        info = store.describe(stream)
        batches = []
        for segment in range(info.segments_count):
            reader = store.reader(stream, segment)
            while (batch := reader.read()) is not None:
                batches.append(batch)
        return pl.from_arrow(pa.Table.from_batches(batches, info.schema))


def assert_equal(found: pl.DataFrame, expected: pl.DataFrame, what: str) -> None:
    """Compare as multisets and say how many records were lost and duplicated."""
    columns = expected.columns
    a = found.select(columns).cast(dict(expected.schema)).group_by(columns).agg(found=pl.len())
    b = expected.group_by(columns).agg(expected=pl.len())
    both = a.join(b, on=columns, how="full", coalesce=True, nulls_equal=True).with_columns(
        pl.col("found").fill_null(0).cast(pl.Int64), pl.col("expected").fill_null(0).cast(pl.Int64)
    )
    wrong = both.filter(pl.col("found") != pl.col("expected"))
    lost = wrong.filter(pl.col("found") < pl.col("expected"))
    twice = wrong.filter(pl.col("found") > pl.col("expected"))
    assert wrong.is_empty(), f"{what}: {lost.height} lost: {lost.head(5)}; {twice.height} too many: {twice.head(5)}"


@functools.cache
def expected_standard(rows: int) -> dict[str, pl.DataFrame]:
    return pipelines.expected_standard(rows)


def read_rows(root: Path) -> pl.DataFrame:
    """Return what the sink ``rows`` of ``pipelines.standard`` has committed."""
    if (root / "rows").exists():
        return read_committed(str(root / "rows"))
    return read_stream(root / "store", "out/rows")


def assert_nothing_twice(root: Path, rows: int) -> None:
    """What a stopped ``pipelines.standard`` has committed so far is part of the expected, each record once."""
    found, expected = read_rows(root), expected_standard(rows)["rows"]
    assert found["id"].n_unique() == found.height
    assert found.join(expected, on=expected.columns, how="anti").is_empty()


def assert_standard(root: Path, rows: int) -> None:
    """Everything that ``pipelines.standard`` writes is there exactly once, and nothing else."""
    expected = expected_standard(rows)
    assert_equal(read_rows(root), expected["rows"], "rows")
    assert_equal(read_committed(str(root / "windows")), expected["windows"], "windows")
    assert_equal(read_committed(str(root / "counts")), expected["counts"], "counts")


def assert_clean(root: Path, retained: int = 2) -> None:
    """No prepared transaction, staged file, temporary file, or checkpoint beyond the retained ones is left."""
    if (root / "store").exists():
        with Store.open(root / "store") as store:
            undecided = [t for t in store.list_transactions() if t.status.name not in ("COMMITTED", "ABORTED")]
            assert undecided == []
            assert store.fsck() == []
    for place in root.rglob("_staging"):
        # a worker of a former generation may have been ended while it wrote, after the last one had looked; this is
        # what the next start does
        open_storage(str(place)).sweep_unfinished()
    staged = [str(p) for p in root.rglob("_staging/**/*") if p.is_file()]
    assert staged == []
    temporary = [str(p) for p in root.rglob(f"{TEMP_PREFIX}*")]
    assert temporary == []
    for pipeline in (root / "checkpoints").glob("*"):
        kept = {p.name for p in pipeline.glob("chk-*") if any(p.iterdir())} - _shared_from(pipeline)
        assert len(kept) <= retained, kept


def _shared_from(pipeline: Path) -> set[str]:
    """Return the directories of former checkpoints in which retained ones have files (SF15)."""
    observed = CheckpointLog(open_storage(str(pipeline.parent)), pipeline.name).observe()
    manifests = [entry.content for entry in observed.entries if isinstance(entry.content, Manifest)]
    own = {f"chk-{manifest.checkpoint:010d}" for manifest in manifests}
    paths = [part.path for manifest in manifests for entry in manifest.entries for part in entry.parts]
    return {path.partition("/")[0] for path in paths if path} - own
