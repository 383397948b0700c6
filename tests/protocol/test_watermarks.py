"""Rules W1–W15 of docs/spec/watermarks.md.

Rules W20 to W25 of docs/spec/watermarks.md.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.model.ids import ChannelIndex, SubtaskId, VertexId
from headgate.protocol.watermarks import (
    DRIFT_MS_MIN,
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    ChannelOrigin,
    EmitIdle,
    EmitWatermark,
    GroupAligner,
    IdleReceived,
    InputEnded,
    OriginFinished,
    OriginLimited,
    OriginsAssigned,
    OriginsPaused,
    RecordsSeen,
    SplitAligner,
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


NOTHING_MORE = lambda split: False  # noqa: E731
ONE, TWO = (SubtaskId(VertexId("source"), index) for index in range(2))


def aligner(*splits: str, has_others: bool = False) -> SplitAligner:
    made = SplitAligner(has_others=has_others, period_ms=5)
    made.assign(splits)
    return made


def test_the_split_that_is_farthest_behind_is_read_next() -> None:  # W20
    made = aligner("a", "b", "c")
    assert made.paused() == frozenset()
    made.read("a", 100)
    assert made.paused() == {"a"}, "the others have not been read yet"
    made.read("b", 50)
    made.read("c", 50)
    assert made.paused() == {"a"}
    made.read("b", 200)
    assert made.paused() == {"a", "b"}
    made.finish("c")
    assert made.paused() == {"b"}


def test_only_a_look_in_vain_lets_others_go_on_without_a_split() -> None:  # W22
    made = aligner("a", "b")
    made.read("a", 100)
    made.read("b", 50)
    made.paused()
    assert not made.found_nothing(lambda split: split == "b"), "more of it is on its way"
    assert made.paused() == {"a"}
    assert made.found_nothing(NOTHING_MORE)
    assert made.paused() == frozenset()
    made.read("b", 60)
    assert made.paused() == {"a"}, "it delivers again"


def test_nothing_passes_the_limit_and_each_split_is_read_once_before_there_is_one() -> None:  # W21
    made = aligner("a", "b", has_others=True)
    made.read("a", 100)
    assert made.paused() == {"a"}
    made.read("b", 50)
    assert made.paused() == {"a", "b"}
    assert made.is_waiting
    made.limit_ms = 50
    assert made.paused() == {"a"}
    made.read("b", 51)
    assert made.is_waiting
    made.limit_ms = WATERMARK_MAX_MS
    assert made.paused() == {"a"}


def test_a_subtask_reports_what_is_new_but_not_while_it_reads_what_is_just_written() -> None:  # W23
    made = aligner("a", "b", has_others=True)
    assert made.report(0, is_over=False) is None
    made.read("a", 100)
    assert made.report(1, is_over=False) is None, "one split was never read"
    made.read("b", 50)
    assert made.report(2, is_over=False) == (50,)
    made.read("b", 60)
    assert made.report(6, is_over=False) is None
    assert made.report(7, is_over=False) == (60,)
    made.limit_ms = WATERMARK_MAX_MS
    made.paused()
    made.found_nothing(NOTHING_MORE)
    made.paused()
    made.found_nothing(NOTHING_MORE)
    assert made.report(12, is_over=False) == (None,)
    made.read("a", 200)
    assert made.report(16, is_over=False) is None
    assert made.report(17, is_over=False) == (200,)
    assert made.report(22, is_over=True) == (None,)
    assert aligner("a").report(0, is_over=True) is None, "there are no others"


def test_the_limit_is_that_of_the_subtask_that_is_farthest_behind() -> None:  # W21, W24
    group = GroupAligner((ONE, TWO), 1_000)
    assert group.limit_ms == WATERMARK_MIN_MS
    group.report(ONE, 5_000)
    assert group.limit_ms == WATERMARK_MIN_MS, "the other one may be anywhere"
    group.report(TWO, 3_000)
    assert group.limit_ms == 4_000
    group.report(TWO, None)
    assert group.limit_ms == 6_000
    group.report(ONE, None)
    assert group.limit_ms == WATERMARK_MAX_MS


def test_without_a_bound_it_is_two_steps_of_the_last_one() -> None:  # W24
    group = GroupAligner((ONE, TWO), None)
    group.report(ONE, 0)
    group.report(TWO, 0)
    assert group.bound_ms == DRIFT_MS_MIN
    group.report(ONE, 24_000)
    group.report(TWO, 20_000)
    assert (group.bound_ms, group.limit_ms) == (40_000, 60_000)
    group.report(TWO, 23_000)
    assert group.bound_ms == 40_000
    for lowest_ms in range(24_000, 24_004):
        group.report(ONE, lowest_ms + 1)
        group.report(TWO, lowest_ms + 1)
    assert group.bound_ms < 40_000


def test_a_split_that_waits_does_not_become_idle() -> None:  # W6
    tracker = WatermarkTracker(0, 100)
    tracker.handle(OriginsAssigned(("a", "b"), 0))
    tracker.handle(RecordsSeen("a", 1_000, 0))
    tracker.handle(RecordsSeen("b", 500, 0))
    tracker.handle(OriginsPaused(frozenset({"a", "gone"}), 90))
    assert tracker.handle(TimePassed(110)) == [EmitWatermark(999)], "b is idle, a is not"
    tracker.handle(RecordsSeen("b", 600, 120))
    tracker.handle(OriginsPaused(frozenset({"a"}), 180))
    assert tracker.handle(TimePassed(220)) == [], "a is not idle"
