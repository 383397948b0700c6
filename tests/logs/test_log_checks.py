"""Each anomaly that is planted in a history is found by its check, and nothing is found in a sound one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.logs.checks import Kind, anomalies
from tests.logs.history import Operation, Outcome, Place, Poll, Recorder, Seek, Send, history
from tests.logs.sound import Choose, sound_history


def sent(process: str, at: int, *values: str, first: int | None = 0, segment: int = 0, **more: object) -> Operation:
    """An append of ``values``, of one key each, from ``at`` to ``at + 1``, which got positions from ``first`` on."""
    places = [None if first is None else Place(segment, first + n) for n in range(len(values))]
    sends = tuple(Send(value[0], value, place) for value, place in zip(values, places, strict=True))
    found = Operation(process, at, at + 1, Outcome.OK, sends)
    return replace(found, **more)  # type: ignore[arg-type]


def read(
    process: str, at: int, *values: str, first: int = 0, segment: int = 0, is_end: bool = True, **more: object
) -> Operation:
    """A read of ``values`` from ``first`` on, from ``at`` to ``at + 1``."""
    events = tuple((first + n, value) for n, value in enumerate(values))
    poll = Poll(segment, events, first + len(values) if is_end else None)
    return replace(Operation(process, at, at + 1, Outcome.OK, (poll,)), **more)  # type: ignore[arg-type]


def kinds(*operations: Operation, **how: bool) -> set[Kind]:
    return {anomaly.kind for anomaly in anomalies(operations, **how)}


BY_HAND: dict[str, tuple[set[Kind], list[Operation]]] = {
    "nothing": (set(), []),
    "a write and its read": (set(), [sent("w", 1, "a1", "b1"), read("r", 3, "a1", "b1")]),
    "two at once, in either order": (
        set(),
        [sent("v", 1, "a1", first=1), sent("w", 1, "b1"), read("r", 3, "b1", "a1")],
    ),
    "a read that came before": (set(), [read("r", 1), sent("w", 3, "a1"), read("r", 5, "a1")]),
    "what nobody was told of, there": (
        set(),
        [sent("w", 1, "a1", first=None, outcome=Outcome.UNKNOWN, ended_ns=None), read("r", 3, "a1")],
    ),
    "what nobody was told of, not there": (
        set(),
        [sent("w", 1, "a1", first=None, outcome=Outcome.UNKNOWN, ended_ns=None), read("r", 3)],
    ),
    "of an aborted one": (
        {Kind.ABORTED_READ},
        [sent("w", 1, "a1", first=None, outcome=Outcome.FAILED), read("r", 3, "a1")],
    ),
    "of nobody": ({Kind.UNWRITTEN_READ}, [read("r", 3, "a1")]),
    "a position with two values": (
        {Kind.TWO_VALUES},
        [sent("v", 1, "a1"), sent("w", 1, "b1", first=None), read("r", 3, "a1"), read("s", 3, "b1")],
    ),
    "a position that its writer knows otherwise": (
        {Kind.TWO_PLACES, Kind.TWO_VALUES},
        [sent("w", 1, "a1", first=1), sent("v", 1, "b1", first=1), read("r", 3, "b1", "a1", first=1)],
    ),
    "a value twice": ({Kind.TWO_PLACES}, [sent("w", 1, "a1"), read("r", 3, "a1", "a1")]),
    "lost": (
        {Kind.LOST_WRITE},
        [sent("v", 1, "a1"), sent("w", 3, "b1", first=1), read("r", 5, "b1", first=1)],
    ),
    "lost without a position": ({Kind.LOST_WRITE}, [sent("v", 1, "a1", first=None), read("r", 5)]),
    "skipped": (
        {Kind.SKIPPED},
        [
            sent("v", 1, "a1", "b1", "c1"),
            read("s", 3, "a1", "b1", "c1"),
            read("r", 3, "a1", is_end=False),
            read("r", 5, "c1", first=2),
        ],
    ),
    "read again": ({Kind.BACKWARDS}, [sent("v", 1, "a1"), read("r", 3, "a1"), read("r", 5, "a1")]),
    "scattered": (
        {Kind.SCATTERED_WRITE, Kind.CYCLE},
        [sent("v", 1, "a1", "c1", first=None), sent("w", 1, "b1", first=1), read("r", 3, "a1", "b1", "c1")],
    ),
    "swapped by its writer": ({Kind.SENT_BACKWARDS}, [sent("v", 1, "a1", "b1", first=None), read("r", 3, "b1", "a1")]),
    "a later one in front": (
        {Kind.SENT_BACKWARDS, Kind.CYCLE},
        [sent("v", 1, "a1", first=1), sent("v", 3, "a2", first=0), read("r", 5, "a2", "a1")],
    ),
    "torn at the end of a read": (
        {Kind.TORN_READ, Kind.CYCLE},
        [sent("v", 1, "a1", "b1"), read("r", 3, "a1"), read("s", 5, "a1", "b1")],
    ),
    "torn for ever": (
        {Kind.TORN_READ},
        [sent("v", 1, "a1", "b1", first=None, outcome=Outcome.UNKNOWN, ended_ns=None), read("r", 3, "a1")],
    ),
    "before it was committed": (
        {Kind.PRECOMMITTED_READ, Kind.CYCLE},
        [sent("v", 1, "a1", shown_ns=5, ended_ns=6), read("r", 3, "a1")],
    ),
    "of its own transaction": (
        {Kind.PRECOMMITTED_READ},
        [replace(sent("v", 1, "a1"), steps=(Send("a", "a1", Place(0, 0)), Poll(0, ((0, "a1"),))))],
    ),
    "not there any more": ({Kind.CYCLE}, [sent("w", 1, "a1"), read("r", 3), read("s", 3, "a1")]),
}
"""What is in a history, and which anomalies are."""


@pytest.mark.parametrize(("expected", "history"), BY_HAND.values(), ids=BY_HAND.keys())
def test_each_anomaly_is_found_in_a_small_history(expected: set[Kind], history: list[Operation]) -> None:
    assert kinds(*history) == expected


def test_a_part_of_an_operation_in_another_segment_is_seen_with_it() -> None:
    whole = Operation("w", 1, 2, Outcome.OK, (Send("a", "a1", Place(0, 0)), Send("b", "b1", Place(1, 0))))
    seen = [read("r", 3, "a1"), read("r", 5, segment=1)]
    assert kinds(whole, *seen, is_complete=False, is_real_time=False) == {Kind.TORN_READ, Kind.CYCLE}
    late = [read("r", 3, segment=1), read("r", 5, "a1")]
    assert kinds(replace(whole, ended_ns=9), *late, is_complete=False) == set()


def test_what_was_acknowledged_is_seen_by_whoever_looks_then_unless_that_is_not_promised() -> None:
    history = [sent("w", 1, "a1"), read("r", 3), read("r", 5, "a1")]
    assert kinds(*history) == {Kind.CYCLE}
    assert kinds(*history, is_real_time=False) == set()


def test_an_order_that_nobody_can_have_seen_is_a_cycle() -> None:
    """Two that wrote to two segments, each in front of the other."""
    first = Operation("v", 1, 2, Outcome.OK, (Send("a", "a1", Place(0, 0)), Send("b", "b1", Place(1, 1))))
    second = Operation("w", 1, 2, Outcome.OK, (Send("a", "a2", Place(0, 1)), Send("b", "b2", Place(1, 0))))
    assert kinds(first, second, is_complete=False, is_real_time=False) == {Kind.CYCLE}


def test_two_readers_that_see_two_writers_in_opposite_order_are_a_cycle() -> None:
    writers = [sent("v", 1, "a1", ended_ns=9), sent("w", 1, "b1", segment=1, ended_ns=9)]
    readers = [read("r", 3, "a1"), read("r", 5, segment=1), read("s", 3, "b1", segment=1), read("s", 5)]
    assert kinds(*writers, *readers, is_complete=False, is_real_time=False) == {Kind.CYCLE}
    assert kinds(*writers, *readers[:3], is_complete=False, is_real_time=False) == set()


def member(process: str, at: int, *values: str, first: int = 0, outcome: Outcome = Outcome.OK) -> Operation:
    """A member of a group reads, and commits."""
    found = read(process, at, *values, first=first, is_end=False, group="g", outcome=outcome, read_ns=at)
    return replace(found, steps=(Seek(0), *found.steps), ended_ns=None if outcome is Outcome.UNKNOWN else at + 1)


GROUPS: dict[str, tuple[set[Kind], list[Operation]]] = {
    "all": (set(), [member("m", 3, "a1"), member("n", 5, "a2", "a3", first=1)]),
    "again behind a refused commit": (
        set(),
        [member("m", 3, "a1", "a2", outcome=Outcome.FAILED), member("n", 5, "a1", "a2", "a3")],
    ),
    "a commit that nobody answered": (
        set(),
        [member("m", 3, "a1", "a2", outcome=Outcome.UNKNOWN), member("n", 5, "a3", first=2)],
    ),
    "twice": (
        {Kind.PROCESSED_TWICE, Kind.OUT_OF_ORDER},
        [member("m", 3, "a1", "a2"), member("n", 5, "a2", "a3", first=1)],
    ),
    "never": ({Kind.NOT_PROCESSED}, [member("m", 3, "a1"), member("n", 5, "a3", first=2)]),
    "read in vain only": (
        {Kind.NOT_PROCESSED},
        [member("m", 3, "a1", outcome=Outcome.FAILED), member("n", 5, "a2", "a3", first=1)],
    ),
    "a later one first": ({Kind.OUT_OF_ORDER}, [member("n", 3, "a2", "a3", first=1), member("m", 5, "a1")]),
}


@pytest.mark.parametrize(("expected", "history"), GROUPS.values(), ids=GROUPS.keys())
def test_a_group_processes_each_event_once_and_keys_in_order(expected: set[Kind], history: list[Operation]) -> None:
    written = [sent("w", 1, "a1", "a2", "a3"), read("last", 9, "a1", "a2", "a3")]
    assert kinds(*written, *history) == expected


def choices(data: st.DataObject) -> Choose:
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    return rng.randrange


@given(st.data())
def test_nothing_is_found_in_a_sound_history(data: st.DataObject) -> None:
    assert anomalies(sound_history(choices(data))) == []


# -- planted in histories that are sound but for that ------------------------------------------------------------------

History = list[Operation]
Plant = Callable[[History, Choose], History | None]


def _one(history: History, choose: Choose, is_fit: Callable[[Operation], bool]) -> int | None:
    """Return the number of some operation that fits, which the last reader has seen."""
    fit = [number for number, operation in enumerate(history) if is_fit(operation)]
    return fit[choose(len(fit))] if fit else None


def _changed(history: History, number: int, operation: Operation) -> History:
    return [*history[:number], operation, *history[number + 1 :]]


def _values_of(operation: Operation) -> set[str]:
    return {send.value for send in operation.sends}


def _everywhere(history: History, change: Callable[[Poll], Poll]) -> History:
    """Change what all readers saw."""
    return [
        replace(x, steps=tuple(change(step) if isinstance(step, Poll) else step for step in x.steps)) for x in history
    ]


def an_aborted_one_was_acknowledged(history: History, choose: Choose) -> History | None:
    at = _one(history, choose, lambda x: bool(x.sends) and x.outcome is Outcome.OK)
    return None if at is None else _changed(history, at, replace(history[at], outcome=Outcome.FAILED))


def a_value_changed_for_one_reader(history: History, choose: Choose) -> History | None:
    at = _one(history, choose, lambda x: x.process != "last" and any(poll.events for poll in x.polls))
    if at is None:
        return None
    (poll,) = history[at].polls
    events = ((poll.events[0][0], "w1-999"), *poll.events[1:])
    steps = tuple(replace(step, events=events) if step is poll else step for step in history[at].steps)
    made_up = Operation("w1.9", 0, 1, Outcome.UNKNOWN, (Send("k", "w1-999"),))
    return [*_changed(history, at, replace(history[at], steps=steps)), made_up]


def an_acknowledged_one_is_nowhere(history: History, choose: Choose) -> History | None:
    at = _one(history, choose, lambda x: bool(x.sends) and x.outcome is Outcome.OK)
    if at is None:
        return None
    gone = _values_of(history[at])
    return _everywhere(history, lambda p: replace(p, events=tuple(e for e in p.events if e[1] not in gone)))


def a_reader_skips_one(history: History, choose: Choose) -> History | None:
    at = _one(history, choose, lambda x: x.process != "last" and any(len(poll.events) > 2 for poll in x.polls))
    if at is None:
        return None
    (poll,) = history[at].polls
    skips = replace(poll, events=(poll.events[0], *poll.events[2:]))
    return _changed(
        history, at, replace(history[at], steps=tuple(skips if s is poll else s for s in history[at].steps))
    )


def a_reader_reads_again(history: History, choose: Choose) -> History | None:
    at = _one(history, choose, lambda x: any(poll.events for poll in x.polls))
    if at is None:
        return None
    again = replace(history[at], steps=tuple(x for x in history[at].steps if isinstance(x, Poll)))
    assert again.ended_ns is not None
    return [*history, replace(again, begun_ns=again.ended_ns, ended_ns=again.ended_ns)]


def two_of_one_operation_change_places(history: History, choose: Choose) -> History | None:
    def pair(operation: Operation) -> tuple[Send, Send] | None:
        of: dict[int, Send] = {}
        for send in operation.sends:
            if send.place is not None and send.place.segment in of:
                return of[send.place.segment], send
            of |= {send.place.segment: send} if send.place is not None else {}
        return None

    at = _one(history, choose, lambda x: x.outcome is Outcome.OK and pair(x) is not None)
    if at is None:
        return None
    first, second = pair(history[at]) or (None, None)
    assert first is not None
    assert second is not None
    other = {first.value: second.value, second.value: first.value}
    steps = tuple(replace(s, place=None) if isinstance(s, Send) else s for s in history[at].steps)
    untold = _changed(history, at, replace(history[at], steps=steps))
    return _everywhere(untold, lambda p: replace(p, events=tuple((at, other.get(v, v)) for at, v in p.events)))


def what_was_there_is_not_seen(history: History, choose: Choose) -> History | None:
    """A reader that comes last finds the end of a segment in front of its last event, which others have read."""
    polls = [poll for x in history if x.process == "last" for poll in x.polls if poll.events]
    if not polls:
        return None
    poll = polls[choose(len(polls))]
    now_ns = max(x.ended_ns or 0 for x in history) + 1
    stale = replace(poll, events=poll.events[:-1], end=poll.events[-1][0])
    return [*history, Operation("stale", now_ns, now_ns + 1, Outcome.OK, (stale,))]


def it_was_seen_before_it_was_asked_for(history: History, choose: Choose) -> History | None:
    seen = {v: x.ended_ns for x in history for p in x.polls for _, v in p.events if x.ended_ns is not None}
    at = _one(history, choose, lambda x: x.outcome is Outcome.OK and any(v in seen for v in _values_of(x)))
    if at is None:
        return None
    late_ns = max(seen[v] or 0 for v in _values_of(history[at]) if v in seen) + 1
    return _changed(history, at, replace(history[at], shown_ns=late_ns, ended_ns=late_ns + 1))


def one_half_of_an_operation_is_missing(history: History, choose: Choose) -> History | None:
    at = _one(history, choose, lambda x: len(x.sends) > 1 and x.outcome is Outcome.OK)
    if at is None:
        return None
    gone = history[at].sends[-1].value
    steps = tuple(replace(s, place=None) if isinstance(s, Send) else s for s in history[at].steps)
    untold = _changed(history, at, replace(history[at], outcome=Outcome.UNKNOWN, steps=steps))
    return _everywhere(untold, lambda p: replace(p, events=tuple(e for e in p.events if e[1] != gone)))


PLANTED: dict[Plant, set[Kind]] = {
    an_aborted_one_was_acknowledged: {Kind.ABORTED_READ},
    a_value_changed_for_one_reader: {Kind.TWO_VALUES},
    an_acknowledged_one_is_nowhere: {Kind.LOST_WRITE},
    a_reader_skips_one: {Kind.SKIPPED},
    a_reader_reads_again: {Kind.BACKWARDS},
    two_of_one_operation_change_places: {Kind.SENT_BACKWARDS},
    what_was_there_is_not_seen: {Kind.CYCLE},
    it_was_seen_before_it_was_asked_for: {Kind.PRECOMMITTED_READ},
    one_half_of_an_operation_is_missing: {Kind.TORN_READ},
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@given(data=st.data())
def test_what_is_planted_in_a_sound_history_is_found(plant: Plant, data: st.DataObject) -> None:
    choose = choices(data)
    history = plant(sound_history(choose), choose)
    assume(history is not None)
    assert history is not None
    assert PLANTED[plant] <= kinds(*history)


def test_what_a_kill_cut_off_is_unknown_until_a_later_life_says_what_became_of_it(tmp_path: Path) -> None:
    first = Recorder(tmp_path, "append1", 1)
    done = first.begin([Send("k", "v1")], sequence=1)
    first.end(done, places=[Place(2, 7)])
    for value in ("v2", "v3", "v4"):
        first.begin([Send("k", value)], sequence=int(value[1]))
    with (tmp_path / "append1.1.jsonl").open("a") as file:
        file.write('{"n": 2, "end": 17, "outc')
    second = Recorder(tmp_path, "append1", 2)
    assert [(process, line["sequence"]) for process, _, line in second.unanswered()] == [
        ("append1.1", 2),
        ("append1.1", 3),
        ("append1.1", 4),
    ]
    second.resolve("append1.1", 2, Outcome.OK)
    second.resolve("append1.1", 3, Outcome.FAILED)
    second.shows_of("append1.1", 2)
    found = history(tmp_path, {})
    assert [x.outcome for x in found] == [Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN]
    assert found[0].sends == (Send("k", "v1", Place(2, 7)),)
    assert [x.ended_ns is None for x in found] == [False, True, True, True]
    assert found[1].shown_ns is not None


def test_what_was_read_is_there_though_nobody_was_told_what_came_of_it(tmp_path: Path) -> None:
    member = Recorder(tmp_path, "member1", 1)
    number = member.begin(group="g")
    member.has_read(number, [Seek(1), Poll(1, ((4, "v"),), 5)])
    (found,) = history(tmp_path, {})
    assert (found.group, found.outcome, found.ended_ns) == ("g", Outcome.UNKNOWN, None)
    assert found.steps == (Seek(1), Poll(1, ((4, "v"),), 5))
    assert found.read_ns is not None


def test_what_several_wrote_in_one_transaction_is_one_operation(tmp_path: Path) -> None:
    writers = [Recorder(tmp_path, name, 1) for name in ("share1", "participate1")]
    for writer, value in zip(writers, ("a", "b"), strict=True):
        writer.end(writer.begin([Send("k", value)], transaction="t"))
    writers[1].begin([Send("k", "seen")], transaction="t")
    writers[1].begin([Send("k", "never seen")], transaction="t")
    writers[0].of_transaction("t", "asked")
    writers[0].of_transaction("t", "committed")
    reader = Recorder(tmp_path, "observe1", 1)
    number = reader.begin()
    reader.has_read(number, [Poll(0, ((0, "a"), (1, "b"), (2, "seen")))])
    reader.end(number)
    (_, committed) = history(tmp_path, {"t": Outcome.OK})
    assert {(x.value, x.author) for x in committed.sends} == {
        ("a", "share1"),
        ("b", "participate1"),
        ("seen", "participate1"),
    }
    assert committed.shown_ns is not None
    assert committed.ended_ns is not None
    (_, aborted) = history(tmp_path, {"t": Outcome.FAILED})
    assert len(aborted.sends) == 4
    assert aborted.outcome is Outcome.FAILED


def test_numbers_that_a_later_life_gave_anew_do_not_count_for_the_former_one(tmp_path: Path) -> None:
    """It was stopped, and went on beside its next life: what it began then was refused."""
    zombie = Recorder(tmp_path, "append1", 1)
    zombie.opens(1)
    Recorder(tmp_path, "append1", 2)  # died before it had opened anything
    Recorder(tmp_path, "append1", 3).opens(7)
    zombie.begin([Send("k", "late")], sequence=7)
    last = Recorder(tmp_path, "append1", 4)
    last.opens(20)
    assert [process for process, _, _ in last.unanswered()] == ["append1.1"]
    assert last.next_began_with("append1.1") == 7
