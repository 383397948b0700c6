from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.operators.harness import Harness

from headgate.errors import BadRecord, UsageError
from headgate.model.ids import ChannelIndex
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.keys import KeyCheckSpec
from headgate.operators.timestamps import TIME_MAX_MS, WithTimestampsSpec
from headgate.protocol.watermarks import ChannelOrigin

CHANNELS = [ChannelOrigin(ChannelIndex(index)) for index in range(3)]


def times(*values: int | None) -> pa.RecordBatch:
    return pa.record_batch({"ts": pa.array(values, pa.int64())})


def test_records_go_before_the_watermark_that_they_raise() -> None:  # W15
    run = Harness(WithTimestampsSpec("ts", out_of_orderness_ms=5))
    run.send(times(100, 200))
    assert run.out.log == [("batch", 2), ("watermark", 194)]


def test_watermarks_go_out_every_ten_milliseconds_at_most_and_before_a_barrier() -> None:  # W15
    run = Harness(WithTimestampsSpec("ts"))
    run.send(times(100))
    run.send(times(200))
    assert run.out.watermarks() == [99]
    run.advance(9)
    assert run.out.watermarks() == [99]
    run.advance(1)
    assert run.out.watermarks() == [99, 199]
    run.send(times(300))
    run.operator.before_barrier()
    assert run.out.watermarks() == [99, 199, 299]


def test_each_split_has_its_own_event_time_and_the_slowest_counts() -> None:  # W2
    run = Harness(WithTimestampsSpec("ts"))
    run.operator.on_splits(["a", "b"])
    run.send(times(900), "a")
    assert run.out.watermarks() == []
    run.send(times(300), "b")
    run.operator.on_split_finished("b")
    run.advance(10)
    assert run.out.watermarks() == [299, 899]


def test_a_silent_split_is_left_out_after_the_idle_timeout() -> None:  # W7
    run = Harness(WithTimestampsSpec("ts", idle_timeout_ms=100))
    run.operator.on_splits(["a", "b"])
    run.advance(60)
    run.send(times(900), "a")
    assert run.operator.next_tick_ms() == 1_100
    run.advance(40)
    assert run.out.log[1:] == [("watermark", 899)]
    run.advance(60)
    assert run.out.log[2:] == [("idle", True)]
    run.send(times(950), "b")
    assert run.out.log[3:] == [("batch", 1), ("idle", False), ("watermark", 949)]


def test_only_the_last_watermark_of_before_passes() -> None:  # W15
    run = Harness(WithTimestampsSpec("ts"))
    run.operator.on_watermark(5)
    run.operator.on_idle(True)
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert run.out.log == [("watermark", WATERMARK_MAX_MS)]


def test_a_watermark_that_waits_goes_out_before_the_last_one() -> None:  # W15
    run = Harness(WithTimestampsSpec("ts"))
    run.send(times(100))
    run.send(times(200))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert run.out.watermarks() == [99, 199, WATERMARK_MAX_MS]


def test_event_time_continues_after_a_restore() -> None:
    run = Harness(WithTimestampsSpec("ts"))
    run.operator.on_splits(["a", "b"])
    run.send(times(900), "a")
    run.send(times(500), "b")
    restored = Harness(WithTimestampsSpec("ts"), [run.snapshot()])
    restored.operator.on_splits(["a", "b"])
    assert restored.out.watermarks() == [499]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_split_that_moved_between_subtasks_the_latest_time_counts_after_a_restore(order: tuple[int, int]) -> None:
    runs = [Harness(WithTimestampsSpec("ts"), subtask=(index, 2)) for index in range(2)]
    runs[0].send(times(500), "a")
    runs[1].send(times(900), "a")
    restored = Harness(WithTimestampsSpec("ts"), [runs[index].snapshot() for index in order])
    restored.operator.on_splits(["a"])
    assert restored.out.watermarks() == [899]


@pytest.mark.parametrize("begun_ms", [0, 10**12])
def test_after_a_restore_silence_counts_anew_whatever_the_clock_of_the_machine_says(begun_ms: int) -> None:
    run = Harness(WithTimestampsSpec("ts", idle_timeout_ms=100))
    run.operator.on_splits(["a", "b"])
    run.send(times(900), "a")
    run.send(times(500), "b")
    run.advance(99)
    restored = Harness(WithTimestampsSpec("ts", idle_timeout_ms=100), [run.snapshot()], begun_ms=begun_ms)
    restored.operator.on_splits(["a", "b"])
    assert restored.operator.next_tick_ms() == begun_ms + 100
    restored.advance(99)
    restored.send(times(950), "a")
    assert restored.out.watermarks() == [499]
    restored.advance(1)
    assert restored.out.watermarks() == [499, 949], "b was silent for as long as the timeout says, and no less"


def test_a_snapshot_holds_no_reading_of_a_clock() -> None:
    payloads = []
    for begun_ms in (0, 123_456, 10**12):
        run = Harness(WithTimestampsSpec("ts", idle_timeout_ms=100), begun_ms=begun_ms)
        run.send(times(900), "a")
        run.advance(50)
        payloads.append(bytes(run.snapshot().payload))
    assert len(set(payloads)) == 1


def test_the_times_of_splits_move_with_them_to_another_parallelism() -> None:  # W9
    first, second = (Harness(WithTimestampsSpec("ts"), subtask=(i, 2)) for i in range(2))
    for run, split, ms in ((first, "a", 900), (first, "c", 700), (second, "b", 500)):
        run.operator.on_splits(["a", "c"] if run is first else ["b"])
        run.send(times(ms), split)
    states = [first.snapshot(), second.snapshot()]
    found = []
    for index, splits in enumerate((["a"], ["b"], ["c"])):
        moved = Harness(WithTimestampsSpec("ts"), states, subtask=(index, 3))
        moved.operator.on_splits(splits)
        found.append(moved.out.watermarks())
        states_again = moved.snapshot()
        assert bytes(states_again.payload).count(b":") == 1, "nobody keeps what others own"
    assert found == [[899], [499], [699]]


def test_the_newer_time_counts_where_a_former_owner_kept_an_older_one() -> None:  # W9
    old, new = (Harness(WithTimestampsSpec("ts"), subtask=(i, 2)) for i in range(2))
    old.send(times(100), "a")
    new.send(times(300), "a")
    moved = Harness(WithTimestampsSpec("ts"), [old.snapshot(), new.snapshot()])
    moved.operator.on_splits(["a"])
    assert moved.out.watermarks() == [299]


def test_behind_a_shuffle_no_channel_starts_ahead_of_what_any_former_one_may_still_deliver() -> None:  # W17
    first, second = (Harness(WithTimestampsSpec("ts"), subtask=(i, 2)) for i in range(2))
    first.send(times(900), CHANNELS[0])
    first.send(times(450), CHANNELS[1])
    second.send(times(1_000), CHANNELS[0])
    states = [first.snapshot(), second.snapshot()]
    moved = Harness(WithTimestampsSpec("ts", idle_timeout_ms=100), states, subtask=(1, 3))
    moved.operator.on_splits([CHANNELS[0], CHANNELS[1], CHANNELS[2]])
    assert moved.out.watermarks() == [449]
    moved.send(times(2_000), CHANNELS[0])
    moved.advance(10)
    assert moved.out.watermarks() == [449], "channel-1 may deliver a record of the time 450 after this"
    moved.send(times(500), CHANNELS[1])
    moved.send(times(800), CHANNELS[2])
    moved.advance(10)
    assert moved.out.watermarks() == [449, 499]


def test_a_split_that_is_named_like_a_channel_is_a_split() -> None:  # W9, W17
    run = Harness(WithTimestampsSpec("ts"), subtask=(0, 2))
    run.operator.on_splits(["channel-0"])
    run.send(times(900), "channel-0")
    moved = Harness(WithTimestampsSpec("ts"), [run.snapshot()], subtask=(0, 3))
    moved.operator.on_splits(["channel-0"])
    assert moved.out.watermarks() == [899], "its time has moved with it"


def test_behind_a_shuffle_a_silent_channel_holds_event_time_back_after_a_restore_as_before() -> None:  # W17
    run = Harness(WithTimestampsSpec("ts"))
    run.operator.on_splits([CHANNELS[0], CHANNELS[1]])
    run.send(times(900), CHANNELS[0])
    assert run.out.watermarks() == [899], "a channel that never delivered holds nothing back"
    run.send(times(950), CHANNELS[1])
    restored = Harness(WithTimestampsSpec("ts"), [run.snapshot()])
    restored.operator.on_splits([CHANNELS[0], CHANNELS[1]])
    restored.send(times(5_000), CHANNELS[1])
    restored.advance(10)
    assert restored.out.watermarks() == [899]


@pytest.mark.parametrize(
    ("column", "good"),
    [
        (pa.array([5, None, -1, TIME_MAX_MS, TIME_MAX_MS - 1]), [5, TIME_MAX_MS - 1]),
        (pa.array([5, None, -1, 1 << 62]).view(pa.timestamp("us")), [5]),
        (pa.array([5, None, -1, 84_006, 84_005], pa.int32()).view(pa.date32()), [5, 84_005]),
    ],
)
def test_null_and_absurd_times_are_bad_records(column: pa.Array, good: list[int]) -> None:
    batch = pa.record_batch({"ts": column})
    run = Harness(WithTimestampsSpec("ts"), diverts=True)
    run.send(batch, "app.log")
    kept = run.out.batches[0].column(0)
    assert kept.view(pa.int32() if pa.types.is_date32(kept.type) else pa.int64()).to_pylist() == good
    assert [bad["problem"].split(":")[0] for bad in run.out.bad][:2] == [
        "its time 'ts' is null",
        "its time 'ts' is outside 1970 to 2200 or the range that was configured",
    ]
    assert len(run.out.bad) == len(column) - len(good)
    assert run.out.bad[0]["position"] == "app.log"
    with pytest.raises(BadRecord, match=r"refused a record at app\.log: its time 'ts' is null"):
        Harness(WithTimestampsSpec("ts")).send(batch, "app.log")


def test_a_batch_of_bad_times_only_raises_no_watermark() -> None:
    run = Harness(WithTimestampsSpec("ts"), diverts=True)
    run.send(times(None, -5))
    assert run.out.log == []


def test_wrong_time_columns_are_refused_by_name() -> None:
    schema = pa.schema([("ts", pa.large_string())])
    with pytest.raises(UsageError, match="operator 'x': the time column 'ts' must be a timestamp"):
        WithTimestampsSpec("ts").output_schema(schema, "x")
    with pytest.raises(UsageError, match="no column 'at'; the columns are ts: large_string"):
        WithTimestampsSpec("at").output_schema(schema, "x")


def test_null_and_nan_keys_are_bad_records_and_others_pass_by_reference() -> None:
    good = pa.record_batch({"a": pa.array([1, 2]), "b": pa.array([1.0, 2.0])})
    run = Harness(KeyCheckSpec(("a", "b")), diverts=True)
    run.send(good)
    assert run.out.batches == [good]
    assert run.out.batches[0] is good
    run.send(pa.record_batch({"a": pa.array([None, 2, 3]), "b": pa.array([1.0, float("nan"), 4.0])}), "s")
    assert run.out.batches[1].to_pylist() == [{"a": 3, "b": 4.0}]
    assert [bad["problem"] for bad in run.out.bad] == ["its key 'a' is null", "its key 'b' is NaN"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [((), "at least one column"), (("z",), "no column 'z'"), (("a", "a"), "named twice"), (("l",), "cannot be a key")],
)
def test_wrong_keys_are_refused(keys: tuple[Any, ...], message: str) -> None:
    schema = pa.schema([("a", pa.int64()), ("l", pa.large_list(pa.int64()))])
    with pytest.raises(UsageError, match=f"operator 'k': .*{message}"):
        KeyCheckSpec(keys).output_schema(schema, "k")


def test_a_channel_that_was_read_on_behind_its_barrier_holds_nobody_elses_records_to_be_late() -> None:
    ahead, behind = (Harness(WithTimestampsSpec("ts"), subtask=(i, 2)) for i in range(2))
    ahead.send(times(900), CHANNELS[0])
    behind.send(times(450), CHANNELS[0])
    states = [replace(one.snapshot(), is_exact=False) for one in (ahead, behind)]
    restored = Harness(WithTimestampsSpec("ts"), states, subtask=(0, 2))
    restored.operator.on_splits([CHANNELS[0], CHANNELS[1]])
    restored.send(times(500), CHANNELS[0])
    restored.advance(10)
    assert max(restored.out.watermarks()) < 500, "what went to the other subtask before may come here now"
