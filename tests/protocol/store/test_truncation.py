"""How far a stream may be truncated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.store.truncation import Extent, Held, Hold, Move, Outside, needed_by, retain, truncate

EXTENTS = {0: Extent(10, 100), 1: Extent(0, 50)}


def test_heads_move_forward_and_never_back() -> None:  # S65
    assert truncate({0: 40, 1: 50}, EXTENTS, [], anyway=False) == Move({0: 40, 1: 50})
    assert truncate({0: 5, 1: 0}, EXTENTS, [], anyway=False) == Move({})
    assert truncate({1: 7}, EXTENTS, [], anyway=False) == Move({1: 7})


def test_a_cut_that_names_what_is_not_there_is_refused() -> None:  # S65
    assert truncate({0: 101}, EXTENTS, [], anyway=True) == Outside(0, 101, EXTENTS[0])
    assert truncate({2: 0}, EXTENTS, [], anyway=True) == Outside(2, 0, None)


def test_what_somebody_holds_stays_unless_it_is_to_go_anyway() -> None:
    holds = [Hold("far", {0: 90, 1: 50}), Hold("near", {0: 30, 1: 50})]
    assert truncate({0: 30, 1: 50}, EXTENTS, holds, anyway=False) == Move({0: 30, 1: 50})
    assert truncate({0: 31, 1: 50}, EXTENTS, holds, anyway=False) == Held("near", 0, 30, 31)
    assert truncate({0: 31, 1: 50}, EXTENTS, holds, anyway=True) == Move({0: 31, 1: 50})


def test_of_a_segment_that_a_hold_does_not_name_everything_is_needed() -> None:
    assert truncate({1: 1}, EXTENTS, [Hold("older", {0: 90})], anyway=False) == Held("older", 1, 0, 1)


def test_whoever_has_not_read_to_the_end_needs_the_stream() -> None:
    done, behind = Hold("done", {0: 100, 1: 50}), Hold("behind", {0: 100, 1: 49})
    assert needed_by(EXTENTS, [done]) == ()
    assert needed_by(EXTENTS, [behind, done, Hold("begins", {})]) == ("behind", "begins")
    assert needed_by({0: Extent(7, 7)}, [Hold("begins", {})]) == (), "nothing is there"


def test_a_generation_that_was_replaced_holds_nothing() -> None:
    late = Hold("p/source", {}, "life", 1)
    assert late.is_replaced_by("life", 2)
    assert not late.is_replaced_by("life", 1)
    assert not late.is_replaced_by("another", 2)


def test_retention_goes_as_far_as_nobody_needs_what_would_go() -> None:  # S71
    holds = [Hold("a", {0: 30, 1: 50}), Hold("b", {0: 60, 1: 20})]
    assert retain({0: 100, 1: 50}, EXTENTS, holds) == Move({0: 30, 1: 20})
    assert retain({0: 100, 1: 50}, EXTENTS, [*holds, Hold("c", {0: 4, 1: 0})]) == Move({})


positions = st.dictionaries(st.integers(0, 2), st.integers(0, 60), max_size=3)


@given(positions, st.lists(positions, max_size=3), st.booleans())
def test_no_answer_takes_what_is_held_or_not_there(
    cut: dict[int, int], held: list[dict[int, int]], anyway: bool
) -> None:  # S65
    holds = [Hold(f"holder-{number}", at) for number, at in enumerate(held)]
    for answer in (truncate(cut, EXTENTS, holds, anyway=anyway), retain(cut, EXTENTS, holds)):
        moved = answer.heads if isinstance(answer, Move) else {}
        for segment, head in moved.items():
            assert EXTENTS[segment].head < head <= max(EXTENTS[segment].end, cut[segment])
            assert head <= cut[segment]
        if not anyway:
            assert all(head <= hold.position(s, EXTENTS[s]) for s, head in moved.items() for hold in holds)
