from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.operators.harness import BORN_MS, Harness

from headgate.errors import BadRecord, UsageError
from headgate.model.ids import ChannelIndex
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.keys import KeyCheckSpec
from headgate.operators.timestamps import TIME_MAX_MS, WatermarkGenerator, WithTimestampsOperator, WithTimestampsSpec
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
    [
        ((), "at least one column"),
        (("z",), "no column 'z'"),
        (("a", "a"), "named twice"),
        (("l",), "cannot be a key; integers, floats"),
    ],
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


def test_each_split_says_its_watermark_and_whether_it_is_idle() -> None:
    run = Harness(WithTimestampsSpec("ts", out_of_orderness_ms=5, idle_timeout_ms=100))
    run.operator.on_splits(["a", "b"])
    run.send(times(900), "a")
    assert run.operator.origins() == {"a": (894, False), "b": (None, False)}
    run.advance(60)
    run.send(times(300), "b")
    run.advance(40)
    assert run.operator.origins() == {"a": (894, True), "b": (294, False)}
    run.operator.on_split_finished("a")
    assert run.operator.origins() == {"b": (294, False)}


def dates(*ms: int) -> pa.RecordBatch:
    """Times by the clock of the harness, which says ``BORN_MS`` at 0."""
    return times(*(BORN_MS + each for each in ms))


def test_a_time_too_far_ahead_of_the_clock_is_a_bad_record() -> None:
    run = Harness(WithTimestampsSpec("ts", max_ahead_ms=500), diverts=True)
    run.send(dates(900, 1_501, 1_500, 10**12))
    assert [row["ts"] - BORN_MS for row in run.out.rows()] == [900, 1_500]
    assert run.out.watermarks() == [BORN_MS + 1_499]
    assert [row["problem"] for row in run.out.bad] == [
        f"its time 'ts' is more than 0.5 s ahead of the clock: {BORN_MS + 1_501}",
        f"its time 'ts' is more than 0.5 s ahead of the clock: {BORN_MS + 10**12}",
    ]
    run.advance(1_000)
    run.send(dates(1_501))
    assert len(run.out.rows()) == 3
    with pytest.raises(BadRecord, match="ahead of the clock"):
        Harness(WithTimestampsSpec("ts", max_ahead_ms=500)).send(dates(5_000))


def test_days_and_microseconds_may_be_too_far_ahead() -> None:
    day = 86_400_000
    today = BORN_MS // day
    for dtype, per_day in ((pa.date32(), 1), (pa.timestamp("us"), day * 1_000)):
        run = Harness(WithTimestampsSpec("ts", max_ahead_ms=day), diverts=True)
        values = pa.array([(today + 1) * per_day, (today + 2) * per_day], pa.int64())
        values = values.cast(pa.int32() if dtype == pa.date32() else pa.int64()).cast(dtype)
        run.send(pa.record_batch({"ts": values}))
        assert (len(run.out.rows()), len(run.out.bad)) == (1, 1)


def wait(run: Harness, ms: int) -> None:
    """Let time pass as a runtime does, which looks whenever something is due."""
    for _ in range(ms // 100):
        run.advance(100)


def test_the_event_time_of_a_silent_split_advances_with_the_clock() -> None:
    run = Harness(WithTimestampsSpec("ts", out_of_orderness_ms=0, silent_after_ms=1_000))
    run.operator.on_splits(["a", "b"])
    run.send(times(50_000), "a")
    assert run.out.watermarks() == []
    run.send(times(40_000), "b")
    assert run.out.watermarks() == [39_999]
    wait(run, 900)
    run.send(times(51_000), "a")
    assert run.out.watermarks() == [39_999]
    run.advance(100)  # b is silent for 1 s
    run.advance(100)
    run.advance(100)
    assert run.out.watermarks() == [39_999, 40_099, 40_199]
    run.send(times(40_100), "b")  # late, and event time does not go back
    wait(run, 900)
    assert run.out.watermarks()[-1] == 40_199
    for _ in range(5):
        run.advance(100)
    assert run.out.watermarks()[-1] == 40_599
    states = [run.snapshot()]
    restored = Harness(WithTimestampsSpec("ts", out_of_orderness_ms=0, silent_after_ms=1_000), states)
    restored.operator.on_splits(["a", "b"])
    assert restored.out.watermarks() == [40_599]


def test_a_split_without_any_time_is_left_out_once_it_is_silent() -> None:
    run = Harness(WithTimestampsSpec("ts", silent_after_ms=1_000))
    run.operator.on_splits(["a", "b"])
    run.send(times(50_000), "a")
    wait(run, 1_000)
    assert run.out.watermarks() == [49_999]
    run.advance(100)
    assert run.out.watermarks() == [49_999, 50_099]
    assert ("idle", True) not in run.out.log


def test_a_paused_split_is_not_silent() -> None:
    run = Harness(WithTimestampsSpec("ts", silent_after_ms=1_000))
    run.operator.on_splits(["a"])
    run.send(times(50_000), "a")
    wait(run, 900)
    run.operator.on_pause(["a"], run.now_ms)
    wait(run, 900)
    assert run.out.watermarks() == [49_999]


def test_time_in_which_a_subtask_stands_still_is_no_silence() -> None:
    run = Harness(WithTimestampsSpec("ts", silent_after_ms=1_000))
    run.operator.on_splits(["a", "b"])
    run.send(times(50_000), "a")
    run.send(times(40_000), "b")
    run.advance(60_000)  # held up by what comes after it
    run.send(times(51_000), "a")
    assert run.out.watermarks() == [39_999]
    wait(run, 1_100)
    assert run.out.watermarks()[-1] == 40_099


class Behind(WatermarkGenerator):
    """As far behind the latest time as the times of the split have ever been out of order."""

    def __init__(self) -> None:
        self.latest, self.behind = 0, 0

    def on_batch(self, times: Any) -> int | None:
        for ms in times.tolist():
            self.behind = max(self.behind, self.latest - ms)
            self.latest = max(self.latest, ms)
        return self.latest - self.behind - 1 if self.behind else None

    def snapshot(self) -> Any:
        return [self.latest, self.behind]

    def restore(self, state: Any) -> None:
        self.latest, self.behind = state


def test_a_generator_says_the_watermark_of_each_split() -> None:
    given = Behind()
    run = Harness(WithTimestampsSpec("ts", generator=given))
    run.operator.on_splits(["a", "b"])
    run.send(times(1_000, 990), "a")
    run.send(times(2_000), "b")  # nothing is known of b yet
    assert run.out.watermarks() == []
    run.send(times(1_900), "b")
    assert run.out.watermarks() == [989]
    run.advance(10)
    run.send(times(3_000), "a")
    assert run.out.watermarks() == [989, 1_899]
    assert given.latest == 0
    run.send(times(10), "a")  # the watermark of a does not go back
    run.operator.on_split_finished("b")
    run.advance(10)
    assert run.out.watermarks() == [989, 1_899, 2_989]


@pytest.mark.parametrize("answer", [1.5, True, "x"])
def test_a_generator_that_returns_no_milliseconds_is_refused(answer: Any) -> None:
    class Wrong(WatermarkGenerator):
        def on_batch(self, times: Any) -> int | None:
            return answer  # type: ignore[no-any-return]

    with pytest.raises(UsageError, match=r"Wrong.on_batch must return milliseconds since 1970 as an int, or None"):
        Harness(WithTimestampsSpec("ts", generator=Wrong())).send(times(1))


@pytest.mark.parametrize("seed", range(8))
def test_generators_are_restored_wherever_their_splits_go(seed: int) -> None:
    """Runs that are stopped and rescaled have the watermark of one that never was."""
    random_ = random.Random(seed)
    splits = [f"split {index}" for index in range(5)]
    spec = WithTimestampsSpec("ts", generator=Behind())
    sent: dict[str, list[list[int]]] = {split: [] for split in splits}
    runs, owners = [Harness(spec)], dict.fromkeys(splits, 0)
    runs[0].operator.on_splits(splits)
    for _ in range(30):
        for _ in range(random_.randrange(4)):
            split = random_.choice(splits)
            batch = [1_000_000 + 10 * len(sent[split]) + random_.randrange(200) for _ in range(random_.randrange(1, 4))]
            sent[split].append(batch)
            runs[owners[split]].send(times(*batch), split)
        if random_.random() < 0.3:
            parallelism = random_.choice([1, 2, 3, 5])
            states = [run.snapshot() for run in runs]
            runs = [Harness(spec, states, subtask=(index, parallelism)) for index in range(parallelism)]
            owners = {split: random_.randrange(parallelism) for split in splits}
            for index, run in enumerate(runs):
                run.operator.on_splits([split for split in splits if owners[split] == index])
    for index, run in enumerate(runs):
        assert isinstance(run.operator, WithTimestampsOperator)
        for split, (watermark_ms, _) in run.operator.origins().items():
            expected = Behind()
            said = [expected.on_batch(np.array(batch)) for batch in sent[str(split)]]
            assert watermark_ms == max((ms for ms in said if ms is not None), default=None), (index, split)
