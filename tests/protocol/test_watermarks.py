"""Rules W1–W15 of docs/spec/watermarks.md."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.model.ids import ChannelIndex
from headgate.protocol.watermarks import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    ChannelOrigin,
    EmitIdle,
    EmitWatermark,
    IdleReceived,
    InputEnded,
    OriginFinished,
    OriginLimited,
    OriginsAssigned,
    RecordsSeen,
    TimePassed,
    WatermarkMerger,
    WatermarkReceived,
    WatermarkTracker,
)

CHANNELS = [ChannelOrigin(ChannelIndex(index)) for index in range(3)]


def seen(origin: str, max_ms: int, now_ms: int = 0) -> RecordsSeen:
    return RecordsSeen(origin, max_ms, now_ms)


def test_the_watermark_is_the_latest_time_minus_out_of_orderness_minus_one() -> None:  # W2
    tracker = WatermarkTracker(100, None)
    assert tracker.handle(seen("a", 1_000)) == [EmitWatermark(899)]


def test_the_watermark_never_goes_back() -> None:  # W3
    tracker = WatermarkTracker(0, None)
    tracker.handle(seen("a", 1_000))
    assert tracker.handle(seen("a", 500)) == []
    assert tracker.handle(seen("a", 1_000)) == []
    assert tracker.handle(seen("a", 1_001)) == [EmitWatermark(1_000)]


def test_an_origin_that_has_not_delivered_holds_event_time_back() -> None:  # W4
    tracker = WatermarkTracker(0, None)
    tracker.handle(OriginsAssigned(("a", "b"), 0))
    assert tracker.handle(seen("a", 1_000)) == []
    assert tracker.handle(seen("b", 500)) == [EmitWatermark(499)]


def test_a_finished_origin_no_longer_counts_and_with_the_last_one_the_subtask_is_idle() -> None:  # W5, W7
    tracker = WatermarkTracker(0, None)
    tracker.handle(OriginsAssigned(("a", "b"), 0))
    tracker.handle(seen("a", 1_000))
    assert tracker.handle(OriginFinished("b", 0)) == [EmitWatermark(999)]
    assert tracker.handle(OriginFinished("a", 0)) == [EmitIdle(True)]
    assert tracker.handle(OriginsAssigned(("c",), 0)) == [EmitIdle(False)]


def test_a_channel_that_ended_no_longer_counts_but_makes_nobody_idle() -> None:  # W5, W7
    tracker = WatermarkTracker(0, 50)
    tracker.handle(seen(CHANNELS[0], 1_000))
    tracker.handle(seen(CHANNELS[1], 400))
    assert tracker.handle(seen(CHANNELS[0], 2_000)) == []
    assert tracker.handle(OriginFinished(CHANNELS[1], 0)) == [EmitWatermark(1_999)]
    assert tracker.handle(OriginFinished(CHANNELS[0], 0)) == [], "channel-2 may deliver for the first time"
    assert tracker.handle(seen(CHANNELS[2], 5_000)) == [EmitWatermark(4_999)]
    assert tracker.handle(TimePassed(50)) == [EmitIdle(True)]
    assert tracker.handle(OriginFinished(CHANNELS[2], 60)) == [], "it is idle until somebody delivers"


def test_a_subtask_without_splits_is_idle_at_once() -> None:  # W7
    assert WatermarkTracker(0, None).handle(OriginsAssigned((), 0)) == [EmitIdle(True)]


def test_a_silent_origin_stops_counting_after_the_timeout_and_counts_again_when_it_delivers() -> None:  # W6
    tracker = WatermarkTracker(0, 50)
    tracker.handle(OriginsAssigned(("a", "b"), 0))
    tracker.handle(seen("a", 1_000, 10))
    assert tracker.next_idle_ms == 50
    assert tracker.handle(TimePassed(49)) == []
    assert tracker.handle(TimePassed(50)) == [EmitWatermark(999)]
    assert tracker.handle(seen("b", 700, 55)) == []
    assert tracker.handle(TimePassed(60)) == []
    assert tracker.handle(TimePassed(105)) == [EmitIdle(True)]
    assert tracker.next_idle_ms is None
    assert tracker.handle(seen("b", 2_000, 200)) == [EmitIdle(False), EmitWatermark(1_999)]
    assert tracker.handle(seen("a", 1_500, 201)) == []  # W8: behind, holds back without going back
    assert tracker.handle(seen("b", 3_000, 202)) == []


def test_a_restored_origin_continues_where_it_was_and_its_owner_alone_keeps_it() -> None:  # W9
    tracker = WatermarkTracker(0, None)
    tracker.handle(seen("a", 1_000))
    tracker.handle(seen("b", 2_000))
    restored = WatermarkTracker(0, None)
    restored.restore(tracker.snapshot())
    assert restored.snapshot() == {"a": 1_000, "b": 2_000}, "nobody has said yet who owns what"
    assert restored.handle(OriginsAssigned(("a",), 0)) == [EmitWatermark(999)]
    assert restored.snapshot() == {"a": 1_000}


def watermark(channel: int, ms: int) -> WatermarkReceived:
    return WatermarkReceived(ChannelIndex(channel), ms)


def idle(channel: int, is_idle: bool = True) -> IdleReceived:
    return IdleReceived(ChannelIndex(channel), is_idle)


def test_the_merged_watermark_is_the_least_of_the_channels() -> None:  # W10
    merger = WatermarkMerger(2)
    assert merger.handle(watermark(0, 10)) == []
    assert merger.handle(watermark(1, 5)) == [EmitWatermark(5)]
    assert merger.handle(watermark(1, 4)) == []
    assert merger.handle(watermark(1, 20)) == [EmitWatermark(10)]


def test_an_idle_channel_does_not_hold_back() -> None:  # W11
    merger = WatermarkMerger(2)
    merger.handle(watermark(0, 10))
    assert merger.handle(idle(1)) == [EmitWatermark(10)]
    assert merger.handle(watermark(0, 30)) == [EmitWatermark(30)]


def test_with_all_channels_idle_the_latest_watermark_counts_before_the_output_is_idle() -> None:  # W12
    merger = WatermarkMerger(2)
    merger.handle(watermark(0, 10))
    merger.handle(watermark(1, 5))
    merger.handle(idle(1))
    assert merger.handle(watermark(0, 12)) == [EmitWatermark(12)]
    assert merger.handle(idle(0)) == [EmitIdle(True)]
    assert merger.is_idle
    assert merger.handle(idle(0)) == []
    assert merger.handle(idle(1, False)) == [EmitIdle(False)]
    late = WatermarkMerger(2)
    late.handle(watermark(0, 10))
    late.handle(watermark(1, 5))
    late.handle(idle(0))
    assert late.handle(idle(1)) == [EmitWatermark(10), EmitIdle(True)]


def test_subtasks_that_hear_of_an_end_and_of_idleness_in_another_order_agree() -> None:  # W12
    for order in ((idle(0), InputEnded(ChannelIndex(1))), (InputEnded(ChannelIndex(1)), idle(0))):
        merger = WatermarkMerger(2)
        merger.handle(watermark(0, 10))
        merger.handle(watermark(1, 90))
        for event in order:
            merger.handle(event)
        assert merger.is_idle
        assert merger.watermark_ms == 90


def test_a_channel_that_comes_back_behind_the_output_is_ignored_until_it_has_caught_up() -> None:  # W13
    merger = WatermarkMerger(2)
    merger.handle(idle(1))
    merger.handle(watermark(0, 100))
    merger.handle(idle(1, False))
    assert merger.handle(watermark(1, 50)) == []
    assert merger.handle(watermark(0, 200)) == [EmitWatermark(200)]
    assert merger.handle(watermark(1, 300)) == []
    assert merger.handle(watermark(0, 400)) == [EmitWatermark(300)]


def test_an_ended_channel_counts_as_at_the_last_watermark() -> None:  # W14
    merger = WatermarkMerger(2)
    merger.handle(watermark(0, 7))
    assert merger.handle(InputEnded(ChannelIndex(1))) == [EmitWatermark(7)]
    assert merger.handle(InputEnded(ChannelIndex(0))) == [EmitWatermark(WATERMARK_MAX_MS)]


def test_the_end_of_one_channel_does_not_end_the_event_time_of_an_idle_one() -> None:  # W19
    merger = WatermarkMerger(2)
    merger.handle(idle(1))
    assert merger.handle(watermark(0, 7)) == [EmitWatermark(7)]
    assert merger.handle(InputEnded(ChannelIndex(0))) == [EmitIdle(True)]
    assert merger.handle(idle(1, False)) == [EmitIdle(False)]
    assert merger.handle(watermark(1, 9)) == [EmitWatermark(9)]
    assert merger.handle(idle(1)) == [EmitIdle(True)]
    assert merger.handle(InputEnded(ChannelIndex(1))) == [EmitIdle(False), EmitWatermark(WATERMARK_MAX_MS)]


STEP = st.tuples(st.integers(0, 2), st.sampled_from(["watermark", "idle", "active", "end"]), st.integers(0, 99))


@given(st.lists(STEP, max_size=40))
def test_any_history_only_advances_and_never_passes_an_active_channel_in_step(
    steps: list[tuple[int, str, int]],
) -> None:
    merger = WatermarkMerger(3)
    marks, idles, was_idle, last = [WATERMARK_MIN_MS] * 3, [False] * 3, False, WATERMARK_MIN_MS
    highest = WATERMARK_MIN_MS
    for channel, kind, value in steps:
        before = last
        match kind:
            case "watermark":
                marks[channel] = max(marks[channel], value)
                highest = max(highest, value)
                effects = merger.handle(watermark(channel, value))
            case "end":
                marks[channel], idles[channel] = WATERMARK_MAX_MS, False
                effects = merger.handle(InputEnded(ChannelIndex(channel)))
            case _:
                idles[channel] = kind == "idle"
                effects = merger.handle(idle(channel, kind == "idle"))
        for effect in effects:
            match effect:
                case EmitWatermark(watermark_ms):
                    assert watermark_ms > last  # W1, W3
                    last = watermark_ms
                case EmitIdle(is_idle):
                    assert is_idle != was_idle
                    was_idle = is_idle
        open_ = [(m, i) for m, i in zip(marks, idles, strict=True) if m < WATERMARK_MAX_MS]
        assert was_idle == (bool(open_) and all(i for _, i in open_))
        assert (last == WATERMARK_MAX_MS) == (not open_)  # W19
        active = [m for m, i in open_ if not i]
        in_step = [m for m in active if m >= before]
        if last != before and open_:
            assert last <= min(in_step) if active else last == highest
        assert not was_idle or last == highest, "whatever came last: the end of a channel, or that one is idle"


def test_what_its_writers_say_of_an_origin_decides_and_with_a_guess_the_lower_one() -> None:  # W26
    for guess, latest in ((None, [EmitWatermark(400)]), (1_000, [])):
        tracker = WatermarkTracker(guess, None)
        tracker.handle(OriginsAssigned(("a",), 0))
        assert tracker.handle(OriginLimited("a", WATERMARK_MIN_MS, 0)) == []
        assert tracker.handle(seen("a", 1_000)) == [], "an earlier one may follow"
        assert tracker.handle(OriginLimited("a", 400, 0)) == (latest or [EmitWatermark(-1)])
        assert tracker.limits() == {"a": 400}
        again = WatermarkTracker(guess, None)
        again.restore(tracker.snapshot(), None, tracker.limits())
        assert again.handle(OriginsAssigned(("a",), 0)) == (latest or [EmitWatermark(-1)])
        assert again.handle(OriginLimited("a", 300, 0)) == [], "it does not go back"
        assert again.is_limited("a")


def test_an_origin_whose_writers_say_nothing_any_more_goes_by_its_records() -> None:  # W26
    tracker = WatermarkTracker(None, None)
    tracker.handle(OriginLimited("a", 400, 0))
    tracker.handle(OriginLimited("a", None, 0))
    assert not tracker.is_limited("a")
    assert tracker.handle(seen("a", 1_000)) == [EmitWatermark(999)]
