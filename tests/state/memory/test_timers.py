"""How many timers there are, told from a former snapshot and what was done since."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.state.memory import change_tracking, timers
from headgate.state.memory.change_tracking import Interval
from headgate.state.memory.timers import CountedTimers, MemoryColumnTimers, TimerOps, count_timers, latest_changes

Timer = tuple[int, int]
TIMERS = st.tuples(st.integers(-2, 3), st.integers(0, 15))
"""When, and the slot."""


def changes_of(done: list[tuple[Timer, bool]]) -> TimerOps:
    """``done``: what was done to timers, and whether they are there since."""
    times = np.array([time for (time, _), _ in done], np.int64)
    return times, np.array([slot << 1 | (not is_there) for (_, slot), is_there in done], np.int64)


def timers_of(found: CountedTimers) -> list[Timer]:
    times, changes = found.whole()
    assert not (changes & 1).any()
    return list(zip(times.tolist(), (changes >> 1).tolist(), strict=True))


@given(
    st.sets(TIMERS), st.lists(st.lists(st.lists(st.tuples(TIMERS, st.booleans()), min_size=1), max_size=3), max_size=6)
)
def test_any_history_of_counted_timers_is_that_of_a_set(
    base: set[Timer], history: list[list[list[tuple[Timer, bool]]]]
) -> None:
    there = set(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers, "_MERGE_SHARE", 2)
        found = count_timers(latest_changes([changes_of([(timer, True) for timer in base])]))
        for since in history:
            before, was = found, timers_of(found)
            found = found.after([changes_of(done) for done in since])
            for timer, is_there in (one for done in since for one in done):
                (there.add if is_there else there.discard)(timer)
            assert (found.count, timers_of(found)) == (len(there), sorted(there))
            assert timers_of(before) == was, "what a snapshot refers to stays as it is"


def test_timers_are_counted_from_the_start_after_so_much_that_it_was_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 4)
    interval = Interval()
    held = MemoryColumnTimers(lambda slots: slots.astype(np.uint64), interval)
    counted = []
    for number, (first, count) in enumerate([(0, 10), (10, 20), (30, 1)]):
        interval.number = number
        held.register(np.arange(first, first + count), np.arange(first, first + count))
        counted.append(held.freeze())
        if number != 1:  # that snapshot is never written
            assert counted[-1].count() == first + count
    assert [frozen.count() for frozen in counted] == [10, 30, 31]


def test_the_next_time_is_that_of_the_first_timer_wherever_it_is_held() -> None:
    held = MemoryColumnTimers(lambda slots: slots.astype(np.uint64))
    assert held.next_ms() is None
    held.register(np.array([0, 1]), np.array([5, 3]))
    assert held.next_ms() == 3
    assert [part.tolist() for part in held.take(3, 10)] == [[1], [3]]
    assert held.next_ms() == 5
    held.register(np.array([2]), np.array([4]))
    assert held.next_ms() == 4
    held.register(np.array([3]), np.array([6]))
    assert held.next_ms() == 4
    assert [part.tolist() for part in held.take(6, 10)] == [[2, 0, 3], [4, 5, 6]]
    assert held.next_ms() is None
