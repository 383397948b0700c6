"""Rules W20 to W25 of docs/spec/watermarks.md."""

from __future__ import annotations

from headgate.model.ids import SubtaskId, VertexId
from headgate.protocol.source_alignment import DRIFT_MS_MIN, GroupAligner, SplitAligner
from headgate.protocol.watermarks import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    EmitWatermark,
    OriginsAssigned,
    OriginsPaused,
    RecordsSeen,
    TimePassed,
    WatermarkTracker,
)

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
