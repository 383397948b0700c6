"""The state of reader groups in the form of Pravega's Java client, without a server."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from headgate.connectors.pravega.controller import ReaderGroup, StreamName
from headgate.connectors.pravega.group_state import (
    GroupMark,
    GroupState,
    newest_mark,
    numbers_in,
    record_of,
    state_after,
)
from headgate.errors import ProtocolViolation

HISTORY = [bytes.fromhex(line) for line in Path(__file__).with_name("reader_group_history.txt").read_text().split()]
"""What Java 0.13 wrote while one reader read a stream of three epochs: a segment, two in place of it, one again."""

STREAM = StreamName("tests", "t-cfe0533c0114")
FIRST, LEFT, RIGHT, LAST = 0, (1 << 32) + 1, (1 << 32) + 2, (2 << 32) + 3

GROUP = ReaderGroup("tests", "g", UUID("0123456789abcdef0123456789abcdef"), 7, True)
MARK = GroupMark("life", 3, 12)

WRITTEN_AGAIN = bytes.fromhex(
    "0001000300000001187f000003000000002800000000000075300000000000000bb801000874657374732f73310001000874657374732f7331"
    "00010000002c00000000000075300000000000000bb801000874657374732f73310001000874657374732f7331000000000302000000190100"
    "000000000000070123456789abcdef0123456789abcdef75000002000000006701001268656164676174652f6c6966652f332f313200010012"
    "68656164676174652f6c6966652f332f313201001374657374732f73312f322e2365706f63682e310000010000000000010013746573747"
    "32f73312f322e2365706f63682e31000001000000000001000000010100000001001374657374732f73312f322e2365706f63682e310000"
    "01000000000000010000004401001374657374732f73312f322e2365706f63682e31000001000000000001001374657374732f73312f322e"
    "2365706f63682e31bff0000000000000bff0000000000000020000000100"
)
"""The state of ``test_a_state_is_written_as_java_writes_it`` as Java's serializer wrote it again."""


def state(count: int) -> GroupState:
    found = state_after(HISTORY[:count])
    assert found is not None
    return found


def test_a_log_without_a_whole_state_says_nothing() -> None:
    """PV14: a log may begin, after it was truncated, with changes of what is gone."""
    assert state_after([]) is None
    assert state_after(HISTORY[1:]) is None
    assert state_after([*HISTORY[1:4], *HISTORY[:1]]) == state(1)


def test_segments_pass_from_the_group_to_a_reader() -> None:
    assert numbers_in(STREAM, state(1).unassigned) == {FIRST: 0}
    assert state(2).assigned == {"r": {}}
    assert numbers_in(STREAM, state(5).assigned["r"]) == {FIRST: 0}
    assert not state(5).unassigned
    assert numbers_in(StreamName("tests", "another"), state(1).unassigned) == {}


def test_a_checkpoint_counts_when_its_readers_have_come_to_it() -> None:
    assert numbers_in(STREAM, state(7).last) == {FIRST: 0}
    assert list(state(7).waiting.values()) == [["r"]]
    assert numbers_in(STREAM, state(9).last) == {FIRST: -1}
    assert not state(9).waiting
    assert len(state(11).checkpoints) == 2
    assert len(state(12).checkpoints) == len(state(12).positions) == 1, "the first one was cleared"


def test_what_follows_a_segment_waits_for_all_in_front_of_it() -> None:
    assert numbers_in(STREAM, state(10).unassigned) == {LEFT: 0, RIGHT: 0}
    found = state(16)
    assert numbers_in(STREAM, found.assigned["r"]) == {LEFT: -1}
    assert list(found.future.values()) == [{LEFT}]
    assert numbers_in(STREAM, state(17).unassigned) == {LAST: 0}
    assert not state(17).future


def test_a_state_is_written_as_java_writes_it() -> None:
    """PV15."""
    cut = {RIGHT: 1 << 40}
    record = record_of(StreamName("tests", "s1"), GROUP, MARK, cut)
    assert record[4:] == WRITTEN_AGAIN
    found = state_after([*HISTORY, record])
    assert found is not None
    assert found.assigned == found.waiting == found.future == {}
    assert numbers_in(StreamName("tests", "s1"), found.unassigned) == cut
    assert found.last == found.unassigned


def test_long_positions_are_read_as_they_were_written() -> None:
    cut = {segment: segment * 1_000_000_007 for segment in range(20_000)}
    found = state_after([record_of(STREAM, GROUP, MARK, cut)])
    assert found is not None
    assert numbers_in(STREAM, found.unassigned) == cut


def test_a_mark_is_found_under_what_others_wrote_later() -> None:
    """PV16."""
    assert newest_mark(HISTORY) is None
    own = [record_of(STREAM, GROUP, GroupMark("a/b", 2, number), {0: number}) for number in (5, 6)]
    assert newest_mark([*HISTORY, *own, *HISTORY]) == GroupMark("a/b", 2, 6)


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([HISTORY[0][:60]], "cut off"),
        ([HISTORY[0], b"\0\0\0\7"], "a record of kind 00000007"),
        ([HISTORY[0], HISTORY[4]], "a change of kind 5 that does not fit"),
        ([HISTORY[0], b"\0\0\0\2\0\0\0\4\0\x63\0\1"], "cut off"),
        ([HISTORY[0], b"\0\0\0\2\0\0\0\x0b\0\x63\0\1\0\0\0\0\2xx"], "cut off|a change of kind 99"),
        ([HISTORY[0], b"\0\0\0\2\0\0\0\4\0\2\1\1"], "an object of version 1"),
        ([HISTORY[0], b"\0\0\0\2\0\0\0\4\1\2\0\1"], "an object in format 1"),
    ],
)
def test_what_is_no_log_of_a_group_is_refused(records: list[bytes], problem: str) -> None:
    with pytest.raises(ProtocolViolation, match=problem):
        state_after(records)
