"""One subtask's part in a nest of loops (docs/spec/loops.md)."""

from __future__ import annotations

import pytest
from tests.protocol.making import ch

from headgate.errors import ProtocolViolation
from headgate.protocol.loop_prober import CloseRound, PassProbe, Probe, ProbeReceived
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.loops import (
    AdvanceToEnd,
    FeedbackForwarded,
    LoopParticipant,
    LoopPlace,
    OutsideEnded,
    ParticipantEvent,
    ProbeOrdered,
    ReportEntranceEnded,
    ReportProbe,
    RoundProgress,
)

REGULAR, BACK, OTHER_BACK = ch(0), ch(1), ch(2)
OUTER = LoopPlace(outside=frozenset({REGULAR}), feedback=frozenset({BACK, OTHER_BACK}))
INNER = LoopPlace(inside=frozenset({REGULAR}), feedback=frozenset({BACK}))
COUNTED = [Ignored("counted")]
NOT_YET = [Ignored("other feedback channels have not brought the probe back")]
EARLY = [Ignored("the probe came back before it passed this head")]


def ordered(
    number: int, round_: int = -1, *, is_closing: bool = False, is_last_watermark: bool = False
) -> ParticipantEvent:
    return ProbeOrdered(Probe(number, round_, is_closing, is_last_watermark))


def back(number: int, channel: int = BACK) -> ParticipantEvent:
    return ProbeReceived(ch(channel), Probe(number))


def part(place: LoopPlace, *events: ParticipantEvent, restored: RoundProgress | None = None) -> LoopParticipant:
    made = LoopParticipant(place) if restored is None else LoopParticipant(place, restored)
    for event in events:
        made.handle(event)
    return made


def test_a_head_counts_from_passing_a_probe_to_having_it_back_everywhere() -> None:  # L34
    outer = part(OUTER, FeedbackForwarded())
    assert outer.handle(ordered(1)) == [PassProbe(Probe(1))]
    assert outer.handle(FeedbackForwarded()) == COUNTED
    assert outer.handle(back(1, BACK)) == NOT_YET
    assert outer.handle(FeedbackForwarded()) == COUNTED
    assert outer.handle(back(1, OTHER_BACK)) == [ReportProbe(1, 2, -1)]


def test_every_probe_is_counted_anew() -> None:  # L34
    outer = part(OUTER, ordered(1), FeedbackForwarded(), back(1, 1), back(1, 2), FeedbackForwarded(), ordered(2))
    assert outer.handle(back(2, 1)) == NOT_YET
    assert outer.handle(back(2, 2)) == [ReportProbe(2, 0, -1)]


def test_a_probe_may_come_back_before_it_passes_the_head() -> None:  # L33, L34
    outer = part(OUTER)
    assert outer.handle(back(1, BACK)) == EARLY
    outer.handle(FeedbackForwarded())
    assert outer.handle(ordered(1)) == [PassProbe(Probe(1))]
    assert outer.handle(back(1, OTHER_BACK)) == [ReportProbe(1, 0, -1)]
    assert outer.handle(back(2, OTHER_BACK)) == EARLY


@pytest.mark.parametrize(
    "unasked",
    [
        pytest.param((back(2),), id="two ahead"),
        pytest.param((back(1), back(2)), id="two ahead, one after another"),
        pytest.param((ordered(1), back(1), back(1)), id="twice on one channel"),
        pytest.param((ordered(1), ordered(3)), id="ordered out of turn"),
        pytest.param((ProbeReceived(ch(7), Probe(1)),), id="on a channel that carries none"),
    ],
)
def test_a_probe_that_nobody_can_have_sent_is_refused(unasked: tuple[ParticipantEvent, ...]) -> None:  # L33
    with pytest.raises(ProtocolViolation):
        part(OUTER, *unasked)


def test_an_inner_head_passes_a_probe_that_came_on_its_regular_inputs() -> None:  # L33
    inner = part(INNER)
    assert inner.handle(ProbeReceived(REGULAR, Probe(1))) == [PassProbe(Probe(1))]
    inner.handle(FeedbackForwarded())
    assert inner.handle(back(1)) == [ReportProbe(1, 1, -1)]


def test_a_subtask_of_the_body_passes_probes_on_and_reports_nothing() -> None:  # L33
    inside = part(LoopPlace(inside=frozenset({ch(0), ch(1)})))
    assert inside.handle(ProbeReceived(ch(1), Probe(1))) == [Ignored("the probe is missing on other channels")]
    assert inside.handle(ProbeReceived(ch(0), Probe(1))) == [PassProbe(Probe(1))]


def test_a_probe_ends_at_a_leaf() -> None:  # L33, L35
    leaf = part(LoopPlace(inside=frozenset({REGULAR}), is_leaf=True))
    closing = Probe(1, 0, is_closing=True)
    assert leaf.handle(ProbeReceived(REGULAR, closing)) == [CloseRound(0), PassProbe(closing), ReportProbe(1, 0, -1)]


def test_the_last_watermark_goes_in_front_of_its_probe() -> None:  # L37
    flush = Probe(1, is_last_watermark=True)
    assert part(OUTER).handle(ProbeOrdered(flush)) == [AdvanceToEnd(), PassProbe(flush)]
    assert part(INNER).handle(ProbeReceived(REGULAR, flush)) == [AdvanceToEnd(), PassProbe(flush)]
    inside = part(LoopPlace(inside=frozenset({REGULAR})))
    assert inside.handle(ProbeReceived(REGULAR, flush)) == [PassProbe(flush)]  # it gets the watermark itself


def test_an_entrance_has_ended_when_all_channels_from_outside_have() -> None:  # L34
    entrance = part(LoopPlace(inside=frozenset({ch(2)}), outside=frozenset({ch(0), ch(1)})))
    assert entrance.handle(OutsideEnded(ch(1))) == [Ignored("records may still enter on other channels")]
    assert entrance.handle(OutsideEnded(ch(0))) == [ReportEntranceEnded(-1, -1)]


# -- rounds ---------------------------------------------------------------------------------------------------------


def test_operators_see_the_end_of_a_round_before_the_probe_passes() -> None:  # L35
    outer = part(OUTER)
    closing = Probe(1, 0, is_closing=True)
    assert outer.handle(ProbeOrdered(closing)) == [CloseRound(0), PassProbe(closing)]
    assert outer.progress == RoundProgress(closed=0, started=0, highest=-1)


def test_progress_is_what_was_closed_started_and_forwarded() -> None:  # L36
    outer = part(OUTER, ordered(1, 0, is_closing=True), FeedbackForwarded(1), FeedbackForwarded(4), back(1, 1))
    assert outer.handle(back(1, 2)) == [ReportProbe(1, 2, 4)]
    outer.handle(ordered(2, 1))
    assert outer.progress == RoundProgress(closed=0, started=1, highest=4)


def test_a_restored_entrance_reports_what_its_snapshot_held_and_what_was_replayed() -> None:  # L36
    restored = RoundProgress(closed=2, started=3, highest=3)
    assert part(OUTER, restored=restored).handle(OutsideEnded(REGULAR)) == [ReportEntranceEnded(3, 3)]
    replayed = part(OUTER, FeedbackForwarded(5), restored=restored)
    assert replayed.handle(OutsideEnded(REGULAR)) == [ReportEntranceEnded(3, 5)]


def test_restored_operators_do_not_see_the_end_of_a_round_again() -> None:  # L36
    restored = part(OUTER, restored=RoundProgress(closed=2, started=2, highest=3))
    again, next_ = Probe(1, 2, is_closing=True), Probe(2, 3, is_closing=True)
    assert restored.handle(ProbeOrdered(again)) == [PassProbe(again)]
    restored.handle(back(1, 1))
    restored.handle(back(1, 2))
    assert restored.handle(ProbeOrdered(next_)) == [CloseRound(3), PassProbe(next_)]
    assert restored.progress == RoundProgress(closed=3, started=3, highest=3)
