"""Event time through a stream of Pravega: the marks that it makes, and a chain of pipelines over a backlog."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.servers.pravega import PravegaServer, context
from tests.servers.processes import START_S
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.pravega.controller import StreamName
from headgate.connectors.pravega.time_marks import RETAINED_MAX, MarkReader, SegmentTimes, TimeMark, time_mark
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import CorruptionError
from headgate.protocol.watermarks import WATERMARK_MIN_MS

pytestmark = pytest.mark.xdist_group("pravega")

RECORDED = bytes.fromhex(
    "000001000000006100000000000007d000000000000007d0020000010000000018000000000000000000000000000000003fe0000000000000"
    "0000000000000036000001000000001800000000000000013fe00000000000003ff0000000000000000000000000001b00000000"
)
"""What Pravega 0.13 wrote for a stream of two segments, whose writer noted 2000."""


def test_a_mark_says_that_no_later_event_is_as_early() -> None:  # PV13
    assert time_mark(RECORDED, 113, "marks") == TimeMark(113, 1_999, {0: 54, 1: 27})


@pytest.mark.parametrize(
    "data",
    [b"", RECORDED[:40], b"\1" + RECORDED[1:], RECORDED[:24] + b"\0", RECORDED[:24] + b"\xff"],
    ids=["empty", "cut off", "other format", "no segments", "no number"],
)
def test_what_is_no_mark_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="a watermark of Pravega"):
        time_mark(data, 0, "marks")


def test_a_mark_may_have_many_segments() -> None:
    head, entry = RECORDED[25:33], RECORDED[41:65]
    entries = b"".join(head + number.to_bytes(8, "big") + entry for number in range(300))
    assert time_mark(RECORDED[:24] + b"\x41\x2c" + entries, 0, "marks").cut == dict.fromkeys(range(300), 54)


MARKS = [
    TimeMark(0, 10, {0: 100, 1: 100}),
    TimeMark(50, 20, {0: 200, 1: 100}),
    TimeMark(90, 30, {1: 300, 2 | 1 << 32: 0, 3 | 1 << 32: 50}),
]
SPLIT = 2 | 1 << 32


def test_a_segment_has_the_time_of_the_last_mark_that_it_has_passed() -> None:  # PV13
    times = SegmentTimes(0)
    times.add(MARKS)
    assert [times.watermark_ms(0, at) for at in (0, 99, 100, 199, 200, 999)] == [
        WATERMARK_MIN_MS, WATERMARK_MIN_MS, 10, 10, 20, 20
    ]  # fmt: skip
    assert [times.watermark_ms(1, at) for at in (99, 100, 299, 300)] == [WATERMARK_MIN_MS, 20, 20, 30]
    assert times.watermark_ms(SPLIT, 0) == 30
    assert times.watermark_ms(SPLIT + 1, 49) == 20


def test_a_mark_that_comes_later_holds_for_what_was_read_before_it() -> None:
    times = SegmentTimes(0)
    times.add(MARKS[:1])
    assert times.watermark_ms(0, 500) == 10
    times.add(MARKS[1:])
    assert times.watermark_ms(0, 500) == 20


@pytest.mark.parametrize("offset", [0, 100, 250, 300])
def test_marks_that_are_forgotten_or_not_read_again_change_nothing(offset: int) -> None:
    times = SegmentTimes(0)
    times.add(MARKS)
    before = [times.watermark_ms(1, offset), times.watermark_ms(SPLIT, 0)]
    times.keep_for([1, SPLIT])
    begin = min(times.begin_of(1), times.begin_of(SPLIT))
    restored = SegmentTimes(begin)
    restored.add(mark for mark in MARKS if mark.at >= begin)
    for one in (times, restored):
        assert [one.watermark_ms(1, offset), one.watermark_ms(SPLIT, 0)] == before


def test_no_more_marks_are_read_than_the_slowest_segment_may_need() -> None:
    times = SegmentTimes(0)
    times.add(TimeMark(at, at, {0: at, 1: at}) for at in range(RETAINED_MAX))
    for offsets, wants_more in (((RETAINED_MAX, 0), False), ((RETAINED_MAX, 500), True)):
        assert [times.watermark_ms(segment, at) for segment, at in enumerate(offsets)] == [
            min(at, RETAINED_MAX - 1) for at in offsets
        ]
        times.keep_for([0, 1])
        assert times.wants_more is wants_more
    assert times.begin_of(1) == 500


# -- the real thing ----------------------------------------------------------------------------------------------------


def test_a_time_that_goes_back_and_a_writer_that_is_gone_are_no_errors(pravega: PravegaServer) -> None:  # PV12
    stream = StreamName.parse(pravega.create_stream(1))
    for time_ms in (2_000, 1_000, 2_000):
        pravega.client.note_time(stream, "w", {0: 0}, time_ms)
    for _ in range(2):
        pravega.client.forget_time(stream, "w")
    marks = MarkReader(pravega.client, stream, SYSTEM_ENVIRONMENT, 0)
    deadline = time.monotonic() + START_S
    while not (found := marks.read()):
        assert time.monotonic() < deadline
    assert found == [TimeMark(0, 1_999, {0: 0})]
    marks.close()


ROWS, STEP_MS, KEYS = 8_000, 25, 20


@pytest.fixture(scope="module")
def backlog(pravega: PravegaServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stream whose events are out of order, written by two subtasks, one of which was killed.

    Each segment is read in several batches.
    """
    stream = pravega.create_stream(3)
    checkpointing = hg.Checkpointing(interval="200ms", dir=tmp_path_factory.mktemp("one"))
    one = hg.Pipeline(f"p-{uuid.uuid4().hex}", checkpointing=checkpointing)
    numbers = one.source(hg.Generator(columns={"n": hg.RowNumber()}, rows=ROWS, rows_per_second=2_000))
    rows = numbers.select(ts=pl.col("n") * STEP_MS, key=(pl.col("n") % KEYS).cast(pl.String), pad=pl.lit("x" * 2_000))
    rows.with_timestamps("ts").rebalance().sink(hg.PravegaSink(pravega.address, stream, key="key"))
    result = run_killing(one, 4, parallelism=2)
    assert result.restarts
    return stream


def source(server: PravegaServer, stream: str, **options: Any) -> hg.Pravega:
    return hg.Pravega(
        server.address, stream, format="json", schema={"ts": int, "key": str}, end="latest", **options
    )  # fmt: skip


@pytest.mark.parametrize("noted_time", [True, False])
def test_nothing_of_a_backlog_is_late_in_the_second_pipeline(
    pravega: PravegaServer, backlog: str, tmp_path: Path, noted_time: bool
) -> None:  # PV12, PV13
    two = hg.Pipeline("two", parallelism=2, checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    rows = two.source(source(pravega, backlog, noted_time=noted_time)).with_timestamps("ts")
    counts = rows.key_by("key").window(hg.Tumbling("2s")).agg(count=pl.len())
    counts.sink(hg.FileSink(tmp_path / "counts", "parquet"))
    result = testing.run(two, timeout_s=300)
    counted = int(read_committed(str(tmp_path / "counts"))["count"].sum())
    assert counted + result.late_records == ROWS
    assert (result.late_records == 0) is noted_time


def test_no_event_behind_a_watermark_is_as_early_and_a_restart_goes_on_there(
    pravega: PravegaServer, backlog: str
) -> None:  # PV13
    reading = source(pravega, backlog, noted_time=True)
    reading.schema()
    found: dict[str, list[int]] = defaultdict(list)
    count, positions = 0, None
    deadline = time.monotonic() + START_S
    while True:
        reader = reading.open(context(positions))
        rows = 0
        while not reader.is_finished() and rows < ROWS // 4:
            assert time.monotonic() < deadline
            batch = reader.poll()
            if batch is None or batch.is_split_finished:
                continue
            assert batch.watermark_ms is not None
            times = batch.batch.column("ts").to_pylist()
            assert not times or min(times) > max(found[batch.split], default=WATERMARK_MIN_MS)
            found[batch.split].append(batch.watermark_ms)
            rows += len(times)
        count += rows
        positions = reader.positions()
        is_finished = reader.is_finished()
        reader.close()
        if is_finished:
            break
    assert count == ROWS
    assert len(found) == 3
    assert all(len(set(watermarks)) > 1 for watermarks in found.values())
