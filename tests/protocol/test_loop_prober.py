"""When a nest of loops is empty and when a round is over (docs/spec/loops.md)."""

from __future__ import annotations

import pytest
from tests.protocol.making import ch, sub

from headgate.errors import ProtocolViolation
from headgate.model.ids import SubtaskId
from headgate.protocol.loop_prober import (
    CloseRound,
    EndLoop,
    EntranceEnded,
    LoopProber,
    PassProbe,
    Phase,
    Probe,
    ProbeAligner,
    ProbeReceived,
    ProberEffect,
    ProbeReturned,
    ProberEvent,
    RoundFinished,
    StartProbe,
)
from headgate.protocol.machine import Ignored

HEAD, INNER, LEAF, SIDE = sub("head"), sub("inner"), sub("leaf"), sub("side")
UNDER_WAY = [Ignored("the probe is still under way")]
ENTERING = [Ignored("records may still come in elsewhere")]


def start(number: int, round_: int = -1, *, closes: bool = False, flushes: bool = False, pause: int = 0) -> StartProbe:
    return StartProbe(Probe(number, round_, closes, flushes), pause)


def returned(number: int, count: int = 0, *, highest_round: int = -1, by: SubtaskId = HEAD) -> ProbeReturned:
    return ProbeReturned(by, number, count, highest_round)


def prober(*inner: SubtaskId, leaves: tuple[SubtaskId, ...] = (), has_rounds: bool = False) -> LoopProber:
    return LoopProber([HEAD], [HEAD], inner, leaves, has_rounds=has_rounds)


def last(of: LoopProber, *events: ProberEvent) -> list[ProberEffect]:
    """Return the effects of the last of ``events``."""
    return [of.handle(event) for event in events][-1]


# -- probes ---------------------------------------------------------------------------------------------------------


def test_a_probe_is_passed_on_when_it_has_come_on_every_channel() -> None:  # L33
    aligner = ProbeAligner([ch(0), ch(1)])
    assert aligner.handle(ProbeReceived(ch(0), Probe(1))) == [Ignored("the probe is missing on other channels")]
    assert aligner.handle(ProbeReceived(ch(1), Probe(1))) == [PassProbe(Probe(1))]


def test_a_probe_is_the_next_one_of_its_channel() -> None:  # L33
    with pytest.raises(ProtocolViolation, match="probe 2 on channel 0, which is not the next one"):
        ProbeAligner([ch(0)]).handle(ProbeReceived(ch(0), Probe(2)))
    with pytest.raises(ProtocolViolation, match="probe 1 on channel 5"):
        ProbeAligner([ch(0)]).handle(ProbeReceived(ch(5), Probe(1)))


def test_the_end_of_a_round_is_seen_once() -> None:  # L35, L36
    aligner = ProbeAligner([ch(0)], closed_round=1)
    probes = [Probe(1, 1, is_closing=True), Probe(2, 2), Probe(3, 2, is_closing=True), Probe(4, 2, is_closing=True)]
    seen = [aligner.handle(ProbeReceived(ch(0), probe)) for probe in probes]
    assert seen == [
        [PassProbe(probes[0])],
        [PassProbe(probes[1])],
        [CloseRound(2), PassProbe(probes[2])],
        [PassProbe(probes[3])],
    ]
    assert aligner.closed_round == 2


# -- the end --------------------------------------------------------------------------------------------------------


def test_probes_start_when_nothing_enters_any_more() -> None:  # L34
    waiting = LoopProber([HEAD, SIDE], [HEAD], [], [], has_rounds=False)
    assert waiting.handle(EntranceEnded(SIDE)) == ENTERING
    assert waiting.handle(EntranceEnded(SIDE)) == [Ignored("reported before")]
    assert waiting.phase is Phase.ENTERING
    assert waiting.handle(EntranceEnded(HEAD)) == [start(1)]


def test_an_empty_loop_ends_after_the_last_watermark_went_round() -> None:  # L34, L37
    empty = prober()
    assert empty.handle(EntranceEnded(HEAD)) == [start(1)]
    assert empty.handle(returned(1)) == [start(2, pause=5)]  # the first probe decides nothing
    assert empty.handle(returned(2)) == [start(3, flushes=True)]
    assert empty.handle(returned(3)) == [EndLoop()]
    assert empty.phase is Phase.ENDED


def test_a_loop_does_not_end_while_anything_comes_back() -> None:  # L34
    busy = prober()
    assert last(busy, EntranceEnded(HEAD), returned(1), returned(2, 3)) == [start(3, pause=5)]
    assert busy.handle(returned(3, 1)) == [start(4, pause=5)]
    assert busy.phase is Phase.PROBING


def test_what_the_last_watermark_set_free_goes_round_first() -> None:  # L37
    fires = prober()
    assert last(fires, EntranceEnded(HEAD), returned(1), returned(2), returned(3, 2)) == [start(4, pause=5)]
    assert fires.handle(returned(4)) == [start(5, flushes=True)]
    assert fires.handle(returned(5)) == [EndLoop()]


def test_the_counts_of_all_heads_are_added() -> None:  # L34
    nest = LoopProber([HEAD], [HEAD], [INNER], [LEAF], has_rounds=False)
    nest.handle(EntranceEnded(HEAD))
    for by in (HEAD, INNER, LEAF):
        effects = nest.handle(returned(1, by=by))
    assert effects == [start(2, pause=5)]
    assert nest.handle(returned(2, by=HEAD)) == UNDER_WAY
    assert nest.handle(returned(2, by=LEAF)) == UNDER_WAY
    assert nest.handle(returned(2, 1, by=INNER)) == [start(3, pause=5)]


def test_answers_that_come_twice_or_late_are_ignored() -> None:  # L34
    nest = LoopProber([HEAD], [HEAD], [INNER], [], has_rounds=False)
    nest.handle(EntranceEnded(HEAD))
    nest.handle(returned(1))
    assert nest.handle(returned(1, 9)) == [Ignored("answered before")]
    assert nest.handle(returned(1, by=INNER)) == [start(2, pause=5)]
    assert nest.handle(returned(1, 9)) == [Ignored("answered before")]
    assert last(nest, returned(2), returned(2, by=INNER)) == [start(3, flushes=True)]
    assert last(nest, returned(3), returned(3, by=INNER)) == [EndLoop()]
    assert nest.handle(returned(3)) == [Ignored("answered before")]


@pytest.mark.parametrize("number", [0, 2])
def test_an_answer_to_a_probe_that_was_never_started_is_refused(number: int) -> None:  # L34
    asked = prober()
    asked.handle(EntranceEnded(HEAD))
    with pytest.raises(ProtocolViolation, match=f"answered probe {number}, which was never started"):
        asked.handle(returned(number))


# -- rounds ---------------------------------------------------------------------------------------------------------


def test_rounds_end_one_after_another_and_then_the_loop() -> None:  # L35
    rounds = prober(has_rounds=True)
    assert rounds.handle(EntranceEnded(HEAD)) == [start(1, 0, closes=True)]
    assert rounds.handle(returned(1, 2, highest_round=1)) == [RoundFinished(0), start(2, 1, closes=True)]
    assert rounds.handle(returned(2, 1, highest_round=2)) == [RoundFinished(1), start(3, 2, closes=True)]
    assert rounds.handle(returned(3, highest_round=2)) == [RoundFinished(2), start(4, 2, flushes=True)]
    assert rounds.handle(returned(4, highest_round=2)) == [EndLoop()]


def test_a_round_with_a_loop_inside_ends_after_a_probe_that_found_that_empty() -> None:  # L35
    nest = prober(INNER, has_rounds=True)
    assert nest.handle(EntranceEnded(HEAD)) == [start(1, 0)]
    assert last(nest, returned(1), returned(1, 3, by=INNER)) == [start(2, 0)]
    assert last(nest, returned(2), returned(2, by=INNER)) == [start(3, 0, closes=True)]
    found = last(nest, returned(3, 1, highest_round=1), returned(3, by=INNER))
    assert found == [RoundFinished(0), start(4, 1)]


def test_rounds_go_on_from_the_lowest_that_any_head_was_in() -> None:  # L36
    heads = [sub("head", 0), sub("head", 1)]
    restored = LoopProber(heads, heads, [], [], has_rounds=True)
    assert restored.handle(EntranceEnded(heads[0], 5, 7)) == ENTERING
    assert restored.handle(EntranceEnded(heads[1], 4, 5)) == [start(1, 4, closes=True)]
    assert last(restored, returned(1, by=heads[0]), returned(1, by=heads[1])) == [
        RoundFinished(4),
        start(2, 5, closes=True),
    ]


def test_a_round_that_only_the_restored_log_holds_is_closed() -> None:  # L36
    restored = prober(has_rounds=True)
    restored.handle(EntranceEnded(HEAD, 1, 3))
    assert restored.handle(returned(1, highest_round=3)) == [RoundFinished(1), start(2, 2, closes=True)]
    assert restored.handle(returned(2, highest_round=3)) == [RoundFinished(2), start(3, 3, closes=True)]


def test_no_round_is_left_out_that_the_last_watermark_began() -> None:  # L35, L37
    """What it set free came back to a head before the probe passed that: in no count, but in the highest round."""
    fires = prober(has_rounds=True)
    last(fires, EntranceEnded(HEAD), returned(1, highest_round=0), returned(2, highest_round=0))
    assert fires.phase is Phase.FLUSHING
    effects = fires.handle(returned(3, highest_round=1))
    assert effects == [start(4, 0)]
    assert fires.handle(returned(4, highest_round=1)) == [start(5, 1, closes=True)]
