"""Sources that set their own barrier: when a subtask is cut, and what its markers do (EI20–EI33)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.making import ch, cp

from headgate.errors import ProtocolViolation
from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.subtasks.alignment import AbortReceived, Decline, EmitBarrier, EmitCancel, TakeSnapshot
from headgate.protocol.subtasks.externally_induced import Cut, DeclineCut, InducedCut, ReadOn
from headgate.protocol.subtasks.externally_induced import ReadOn as SubtaskReadOn
from headgate.protocol.subtasks.subtask import (
    CheckpointAnnounced,
    EmitEnd,
    FinishOperators,
    MarkerMet,
    ReportFinished,
    SourceEnded,
    SplitsSeen,
    Subtask,
    TriggerReceived,
)


def cut_of(*splits: str, first: int = 5) -> InducedCut:
    made = InducedCut(cp(first))
    assert made.splits(splits, is_read=True) == []
    return made


def announced(machine: InducedCut, checkpoint: int) -> object:
    return machine.announced(cp(checkpoint), ORDINARY)


def test_every_split_stands_still_until_all_have_met_their_marker() -> None:  # EI21
    machine = cut_of("a", "b")
    assert announced(machine, 5) == []
    assert machine.met("a", cp(5)) == []
    assert machine.held == ("a",)
    assert machine.met("b", cp(5)) == [Cut(cp(5), ORDINARY), ReadOn(("a", "b"))]
    assert machine.held == ()


def test_a_marker_that_comes_before_its_checkpoint_was_heard_of_waits() -> None:  # EI22
    machine = cut_of("a")
    assert machine.met("a", cp(6)) == []
    assert machine.held == ("a",)
    options = CheckpointOptions(is_last=True)
    assert machine.announced(cp(6), options) == [Cut(cp(6), options), ReadOn(("a",))]
    assert machine.announced(cp(6), options) == [], "the trigger of the others says it again"


def test_a_marker_of_a_checkpoint_that_is_over_is_read_past() -> None:  # EI23
    machine = cut_of("a", "b")
    assert machine.met("a", cp(4)) == [ReadOn(("a",))], "of a generation that is over"
    announced(machine, 7)
    assert machine.met("a", cp(6)) == [ReadOn(("a",))], "it never began here: numbers rise"
    machine.met("a", cp(7))
    assert machine.aborted(cp(7)) == [ReadOn(("a",))]
    assert machine.met("b", cp(7)) == [ReadOn(("b",))], "its abort was heard first"
    assert announced(machine, 8) == []
    machine.met("a", cp(8))
    assert machine.met("b", cp(8))[0] == Cut(cp(8), ORDINARY)
    assert machine.met("a", cp(8)) == [ReadOn(("a",))], "the same marker twice"


def test_a_split_that_has_ended_counts_as_cut() -> None:  # EI25
    machine = cut_of("a", "b")
    announced(machine, 5)
    machine.met("a", cp(5))
    assert machine.splits(("a",), is_read=True) == [Cut(cp(5), ORDINARY), ReadOn(("a",))]
    assert machine.splits((), is_read=True) == []
    assert announced(machine, 6) == [Cut(cp(6), ORDINARY)], "nothing is left to read"


def test_a_split_that_came_late_is_waited_for() -> None:  # EI25
    machine = cut_of("a")
    announced(machine, 5)
    machine.splits(("a", "b"), is_read=True)
    assert machine.met("a", cp(5)) == []
    assert machine.met("b", cp(5)) == [Cut(cp(5), ORDINARY), ReadOn(("a", "b"))]


def test_a_source_that_is_not_read_on_is_cut_where_it_is() -> None:
    machine = cut_of("a", "b")
    announced(machine, 5)
    machine.met("a", cp(5))
    assert machine.splits(("a", "b"), is_read=False) == [Cut(cp(5), ORDINARY), ReadOn(("a",))]
    machine = cut_of("a")
    machine.stop()
    assert announced(machine, 5) == [Cut(cp(5), ORDINARY)]


def test_a_checkpoint_whose_marker_was_passed_is_given_up() -> None:  # EI24
    machine = cut_of("a", "b")
    announced(machine, 5)
    machine.met("b", cp(5))
    assert machine.met("a", cp(6)) == [DeclineCut(cp(5)), ReadOn(("b",))], "a has lost the marker of 5"
    assert machine.held == ("a",)
    assert announced(machine, 6) == []
    assert machine.met("b", cp(6)) == [Cut(cp(6), ORDINARY), ReadOn(("a", "b"))]


def test_checkpoints_that_overlap_are_cut_one_after_another() -> None:  # EI28
    machine = cut_of("a", "b")
    announced(machine, 5)
    announced(machine, 6)
    machine.met("a", cp(5))
    assert machine.met("b", cp(5)) == [Cut(cp(5), ORDINARY), ReadOn(("a", "b"))]
    machine.met("b", cp(6))
    assert machine.met("a", cp(6)) == [Cut(cp(6), ORDINARY), ReadOn(("b", "a"))]


# -- in a subtask -----------------------------------------------------------------------------------------------------


def induced(*splits: str, alignment: Alignment = Alignment.ALIGNED) -> Subtask:
    made = Subtask(0, induced_from=cp(5), alignment=alignment)
    made.handle(SplitsSeen(splits))
    return made


def test_a_source_that_sets_its_own_barrier_ignores_triggers() -> None:  # C47, EI20
    machine = induced("a")
    machine.handle(TriggerReceived(cp(5)))
    assert machine.handle(MarkerMet("a", cp(5))) == [
        TakeSnapshot(cp(5)),
        EmitBarrier(cp(5)),
        SubtaskReadOn(("a",)),
    ]


def test_an_announced_checkpoint_is_cut_at_the_marker_before_any_trigger() -> None:  # EI20
    machine = induced("a")
    machine.handle(CheckpointAnnounced(cp(5)))
    assert machine.handle(MarkerMet("a", cp(5)))[:2] == [TakeSnapshot(cp(5)), EmitBarrier(cp(5))]
    assert [type(effect).__name__ for effect in machine.handle(TriggerReceived(cp(5)))] == ["Ignored"]


@pytest.mark.parametrize("alignment", [Alignment.ALIGNED, Alignment.TRACKED, Alignment.TIMED])
def test_a_checkpoint_that_cannot_be_cut_any_more_is_declined(alignment: Alignment) -> None:  # EI24, EI29
    machine = induced("a", "b", alignment=alignment)
    options = CheckpointOptions(alignment=alignment)
    machine.handle(CheckpointAnnounced(cp(5), options))
    assert machine.handle(MarkerMet("a", cp(6))) == [EmitCancel(cp(5)), Decline(cp(5), AbortReason.MARKER_MISSED)]
    machine.handle(CheckpointAnnounced(cp(6), options))
    effects = machine.handle(MarkerMet("b", cp(6)))
    assert effects == [TakeSnapshot(cp(6), options), EmitBarrier(cp(6), options), SubtaskReadOn(("a", "b"))]


def test_an_abort_releases_the_splits_and_no_snapshot_is_taken() -> None:  # EI27
    machine = induced("a", "b")
    machine.handle(CheckpointAnnounced(cp(5)))
    machine.handle(MarkerMet("a", cp(5)))
    assert (machine.held_splits, Subtask(0).held_splits) == (("a",), ())
    assert machine.handle(AbortReceived(cp(5)))[-1] == SubtaskReadOn(("a",))
    assert machine.held_splits == ()
    assert machine.handle(MarkerMet("b", cp(5))) == [SubtaskReadOn(("b",))]
    machine.handle(CheckpointAnnounced(cp(6)))
    machine.handle(MarkerMet("a", cp(6)))
    assert machine.handle(MarkerMet("b", cp(6)))[:2] == [TakeSnapshot(cp(6)), EmitBarrier(cp(6))]


def test_a_source_at_its_end_is_cut_behind_its_end() -> None:  # EI25
    machine = induced("a")
    machine.handle(CheckpointAnnounced(cp(5)))
    assert machine.handle(SourceEnded()) == [FinishOperators(), EmitEnd(), ReportFinished()]
    assert machine.handle(SplitsSeen(())) == [TakeSnapshot(cp(5)), EmitBarrier(cp(5))]
    assert machine.handle(TriggerReceived(cp(6))) == [TakeSnapshot(cp(6)), EmitBarrier(cp(6))], "the final one"


def test_behind_the_last_barrier_before_a_stop_a_retry_is_cut_at_once() -> None:  # EI26
    machine = induced("a")
    last = CheckpointOptions(is_last=True)
    machine.handle(CheckpointAnnounced(cp(5), last))
    assert not machine.is_suspended, "it reads on to the marker"
    machine.handle(MarkerMet("a", cp(5)))
    assert machine.is_suspended
    machine.handle(AbortReceived(cp(5)))
    assert machine.handle(CheckpointAnnounced(cp(6), last)) == [TakeSnapshot(cp(6), last), EmitBarrier(cp(6), last)]


def test_a_reader_that_goes_on_too_soon_is_a_violation() -> None:  # EI21
    machine = induced("a", "b")
    machine.handle(MarkerMet("a", cp(5)))
    with pytest.raises(ProtocolViolation, match="before its release"):
        machine.handle(MarkerMet("a", cp(6)))
    with pytest.raises(ProtocolViolation, match="sets its own barrier"):
        Subtask(2).handle(SplitsSeen(("a",)))
    with pytest.raises(ProtocolViolation, match="sets its own barrier"):
        Subtask(0).handle(MarkerMet("a", cp(5)))
    assert ch(0) == 0


@pytest.mark.long
@given(st.data(), st.integers(1, 3))
def test_any_history_cuts_each_checkpoint_once_behind_its_marker_in_every_split(
    data: st.DataObject, count: int
) -> None:
    """Splits are logs with markers, some of them lost or twice; announcements and aborts come whenever they like."""
    ids = range(5, 11)
    names = [f"s{i}" for i in range(count)]
    logs = {name: [n for n in ids for _ in range(data.draw(st.sampled_from((1, 1, 1, 0, 2))))] for name in names}
    lengths = {name: len(log) for name, log in logs.items()}
    machine = InducedCut(cp(5))
    machine.splits(names, is_read=True)
    at = dict.fromkeys(names, 0)
    held: dict[str, int] = {}
    told: list[int] = []
    aborted: set[int] = set()
    cuts: list[int] = []
    given_up: list[int] = []
    coming = list(ids)

    def run(effects: list[object]) -> None:
        for effect in effects:
            match effect:
                case Cut():
                    live = [name for name in names if at[name] < lengths[name] or name in held]
                    assert all(held.get(name) == effect.checkpoint for name in live), "exactly behind the marker"
                    cuts.append(int(effect.checkpoint))
                case DeclineCut():
                    given_up.append(int(effect.checkpoint))
                case ReadOn():
                    for split in effect.splits:
                        del held[split]

    while coming or any(at[name] < lengths[name] and name not in held for name in names):
        readable = [name for name in names if at[name] < lengths[name] and name not in held]
        acts = ["announce"] * bool(coming) + ["read"] * bool(readable) + ["abort"] * bool(told)
        match data.draw(st.sampled_from(acts)):
            case "announce":
                told.append(coming.pop(0))
                run(machine.announced(cp(told[-1]), ORDINARY))
            case "abort":
                checkpoint = data.draw(st.sampled_from(told))
                aborted.add(checkpoint)
                run(machine.aborted(cp(checkpoint)))
            case _:
                name = data.draw(st.sampled_from(readable))
                checkpoint, at[name] = logs[name][at[name]], at[name] + 1
                held[name] = checkpoint
                run(machine.met(name, cp(checkpoint)))
                ended = [n for n in names if at[n] == lengths[n] and n not in held]
                run(machine.splits([n for n in names if n not in ended], is_read=True))
    run(machine.splits([], is_read=True))
    assert cuts == sorted(set(cuts))
    assert not set(cuts) & set(given_up)
    assert set(ids) <= set(cuts) | set(given_up) | aborted, "nobody waits for ever"
