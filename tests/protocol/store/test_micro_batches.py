"""What micro-batches take of a stream: each event once, those of a key in order, however it is scaled and limited."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headgate.protocol.store.layouts import KEY_SPACE, Change, Plan, first_layout, merge, scale, split
from headgate.protocol.store.micro_batches import (
    Piece,
    Turn,
    cut_up,
    distribute,
    first_missing,
    in_order,
    pieces_between,
    taken,
    turn_of,
)
from headgate.protocol.store.truncation import Extent

HALF, QUARTER = KEY_SPACE // 2, KEY_SPACE // 4
KEYS = [number * KEY_SPACE // 16 for number in range(16)]


class MicroBatches(RuleBasedStateMachine):
    """A stream that is written and scaled, and read in micro-batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = first_layout(2)
        self.events: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.written: dict[int, int] = defaultdict(int)
        self.read: dict[int, list[int]] = defaultdict(list)
        self.cut: dict[int, int] = {}

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=12))
    def write(self, keys: list[int]) -> None:
        for key in keys:
            home = next(x for x in self.layout.present if x.key_low <= key < x.key_high)
            self.events[home.segment_id].append((key, self.written[key]))
            self.written[key] += 1

    @rule(at=st.integers(0, 15), is_split=st.booleans())
    def scaled(self, at: int, is_split: bool) -> None:
        present = [segment.segment_id for segment in self.layout.present]
        at %= len(present)
        plan = split(self.layout, present[at], 2) if is_split else merge(self.layout, present[at : at + 2])
        change = scale(self.layout, plan) if isinstance(plan, Plan) else None
        if isinstance(change, Change):
            self.layout = change.layout

    @rule(rows_max=st.one_of(st.none(), st.integers(1, 8)))
    def read_some(self, rows_max: int | None) -> None:
        extents = {x.segment_id: Extent(0, len(self.events[x.segment_id])) for x in self.layout.segments}
        unread = pieces_between(extents, self.cut, {number: extent.end for number, extent in extents.items()})
        found = unread if rows_max is None else taken(self.layout, unread, rows_max)
        rows = sum(piece.rows_count for piece in found)
        assert rows_max is None or rows == min(rows_max, sum(piece.rows_count for piece in unread))
        groups = in_order(self.layout, found)
        assert sorted(piece for group in groups for piece in map(_key, group)) == sorted(map(_key, found))
        by_group = [self._keys_of(group) for group in groups]
        assert sum(map(len, by_group)) == len(set().union(*by_group)), "a key is read by one task"
        for piece in found:
            self.cut[piece.segment] = piece.end

    def _keys_of(self, group: list[Piece]) -> set[int]:
        keys = set()
        for piece in group:
            for key, number in self.events[piece.segment][piece.begin : piece.end]:
                self.read[key].append(number)
                keys.add(key)
        return keys

    @invariant()
    def keys_are_in_order(self) -> None:
        for key, numbers in self.read.items():
            assert numbers == list(range(len(numbers))), key

    def teardown(self) -> None:
        self.read_some(None)
        assert {key: len(numbers) for key, numbers in self.read.items()} == dict(self.written)


def _key(piece: Piece) -> tuple[int, int, int]:
    return piece.segment, piece.begin, piece.end


TestMicroBatches = MicroBatches.TestCase


def test_nothing_is_taken_of_a_segment_before_those_in_front_of_it() -> None:  # SP4
    layout = first_layout(2)
    for plan in (split(layout, 0, 2),):
        assert isinstance(plan, Plan)
        change = scale(layout, plan)
        assert isinstance(change, Change)
        layout = change.layout
    unread = [Piece(0, 0, 4), Piece(1, 0, 0), Piece(2, 0, 6), Piece(3, 0, 2)]
    assert taken(layout, unread, 3) == [Piece(0, 0, 3)]
    assert taken(layout, unread, 8) == [Piece(0, 0, 4), Piece(2, 0, 3), Piece(3, 0, 1)]
    assert taken(layout, unread, 100) == [Piece(0, 0, 4), Piece(2, 0, 6), Piece(3, 0, 2)]


def test_a_backlog_keeps_no_other_segment_waiting() -> None:  # SP4
    unread = [Piece(0, 100, 1_000_100), Piece(1, 0, 1_000), Piece(2, 7, 7), Piece(3, 0, 3)]
    found = taken(first_layout(4), unread, 10_010)
    assert [piece.rows_count for piece in found] == [9_999, 10, 1]
    assert taken(first_layout(4), unread[2:], 10_000) == [Piece(3, 0, 3)]


def test_segments_with_keys_in_common_are_read_in_order_by_one_task() -> None:  # SP5
    layout = first_layout(4)
    for close in ((1, 2), (4, 3)):  # 4 follows 1 and 2; 5 follows 4 and 3
        plan = merge(layout, close)
        assert isinstance(plan, Plan)
        change = scale(layout, plan)
        assert isinstance(change, Change)
        layout = change.layout
    pieces = {number: Piece(number, 0, 1) for number in range(6)}
    assert in_order(layout, pieces.values()) == [[pieces[0]], [pieces[x] for x in (1, 2, 3, 4, 5)]]
    assert in_order(layout, [pieces[3], pieces[2], pieces[1]]) == [[pieces[1]], [pieces[2]], [pieces[3]]]


def test_what_lies_between_two_cuts_is_found_by_segment() -> None:  # SP4
    extents = {0: Extent(0, 10), 1: Extent(5, 20), 2: Extent(0, 3), 3: Extent(0, 0)}
    assert pieces_between(extents, {0: 4, 1: 2}, {0: 10, 1: 15, 2: 3, 3: 0}) == [
        Piece(0, 4, 10),
        Piece(1, 5, 15),
        Piece(2, 0, 3),
    ]
    assert pieces_between(extents, {}, {1: 5}) == []
    assert cut_up([Piece(0, 4, 10), Piece(2, 0, 3)], 4) == [Piece(0, 4, 8), Piece(0, 8, 10), Piece(2, 0, 3)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=6),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_pieces_are_dealt_out_in_equal_shares(
    ranges: list[tuple[int, int]], rows_max: int, rows_min: int, at_once: int
) -> None:  # SP3
    pieces = [Piece(number, begin, begin + rows) for number, (begin, rows) in enumerate(ranges)]
    tasks = distribute(pieces, rows_max, rows_min, at_once)
    events = [(x.segment, at) for some in tasks for x in some for at in range(x.begin, x.end)]
    assert events == [(x.segment, at) for x in pieces for at in range(x.begin, x.end)]
    counts = [sum(x.rows_count for x in some) for some in tasks]
    assert all(0 < count <= rows_max for count in counts)
    assert len(set(counts[:-1])) <= 1
    assert counts[-1:] <= counts[:1]


def test_as_many_tasks_read_as_run_at_one_time() -> None:  # SP3
    pieces = [Piece(number, 0, 25) for number in range(4)]
    assert [len(distribute(pieces, 100, 1, at_once)) for at_once in (1, 2, 3, 8)] == [1, 2, 3, 8]
    assert distribute(pieces, 50, 1, 2) == [[Piece(0, 0, 25), Piece(1, 0, 25)], [Piece(2, 0, 25), Piece(3, 0, 25)]]
    assert len(distribute(pieces, 49, 1, 2)) == 4, "a multiple"
    assert len(distribute(pieces, 100, 40, 8)) == 2, "worth a task"
    assert len(distribute(pieces, 10, 40, 8)) == 10, "not more than one takes"
    assert distribute([Piece(0, 3, 3)], 10, 1, 2) == []


def test_what_a_cut_has_lost_is_known() -> None:
    extents = {0: Extent(0, 10), 1: Extent(5, 20)}
    assert first_missing(extents, {0: 0, 1: 5}) is None
    assert first_missing(extents, {0: 0, 1: 4}) == 1
    assert first_missing(extents, {}) == 1, "a segment that came after the cut is needed from its first event on"


def test_a_micro_batch_is_written_behind_the_latest_one_only() -> None:  # SP9, SP10
    assert turn_of(0, ()) is Turn.WRITE
    assert [turn_of(batch, {7, 9}) for batch in (6, 7, 8, 9, 10, 12)] == [
        *[Turn.LATE] * 3,
        Turn.DONE,
        *[Turn.WRITE] * 2,
    ]
