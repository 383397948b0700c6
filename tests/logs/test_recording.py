"""Files of lives that were killed become a history."""

from __future__ import annotations

from pathlib import Path

from tests.logs.history import Outcome, Place, Poll, Seek, Send
from tests.logs.recording import Recorder, history


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
