"""What sinks hold until it is decided, and in which order it is committed (docs/spec/two-phase-commit.md)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.making import committable, cp, gen, inline_part, sub

from headgate.model.manifest import Committable, Left, Manifest, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.commit import (
    Commit,
    CommitPermit,
    CommitQueue,
    Precommit,
    among,
    given_up,
    is_in_line,
    left_by_giving_up,
    left_since,
    oldest_promised,
    settled,
    still_promised,
    without,
)


def commit(checkpoint: int, *committables: Committable) -> Commit:
    return Commit(CommitPermit(cp(checkpoint), gen(7)), committables)


def test_the_acknowledgement_of_a_checkpoint_carries_everything_up_to_it() -> None:  # K3
    held = Precommit()
    held.prepared((committable(1), committable(2)))
    held.prepared((committable(3),))
    assert held.covered_by(cp(2)) == (committable(1), committable(2))
    assert held.pending == (committable(1), committable(2), committable(3))


def test_a_completed_checkpoint_takes_over_everything_up_to_it() -> None:  # K3, C16
    held = Precommit()
    held.prepared((committable(1), committable(2), committable(3)))
    held.completed(cp(2))
    assert held.pending == (committable(3),)


def test_output_that_its_own_acknowledgement_missed_is_refused() -> None:  # K3
    held = Precommit()
    held.covered_by(cp(2))
    with pytest.raises(AssertionError, match="acknowledged without it"):
        held.prepared((committable(1),))


def test_output_is_prepared_in_checkpoint_order() -> None:  # K2
    held = Precommit()
    held.prepared((committable(2),))
    with pytest.raises(AssertionError):
        held.prepared((committable(1),))


def test_commits_follow_each_other_in_order() -> None:  # K1, K2
    queue = CommitQueue(gen(7))
    assert queue.completed(cp(1), (committable(1),)) == [commit(1, committable(1))]
    assert queue.completed(cp(2), (committable(2),)) == []
    assert queue.completed(cp(3), (committable(3),)) == []
    assert queue.unconfirmed == (committable(1), committable(2), committable(3))
    assert queue.succeeded(cp(1)) == [commit(2, committable(2))]
    assert queue.succeeded(cp(2)) == [commit(3, committable(3))]
    assert queue.succeeded(cp(3)) == []
    assert queue.is_empty


def test_a_failed_commit_is_repeated_before_any_later_one() -> None:  # K2
    queue = CommitQueue(gen(7))
    queue.completed(cp(1), (committable(1),))
    queue.completed(cp(2), (committable(2),))
    assert queue.retry() == [commit(1, committable(1))]
    assert queue.unconfirmed == (committable(1), committable(2))


def test_a_checkpoint_without_output_commits_nothing() -> None:  # K4
    queue = CommitQueue(gen(7))
    assert queue.completed(cp(1), ()) == []
    assert queue.is_empty


def test_output_that_an_earlier_checkpoint_still_has_to_commit_is_left_to_it() -> None:  # K7
    queue = CommitQueue(gen(7))
    queue.completed(cp(1), (committable(1),))
    queue.completed(cp(2), (committable(1), committable(2)))
    assert queue.succeeded(cp(1)) == [commit(2, committable(2))]


def test_older_output_that_nobody_committed_yet_is_committed_whatever_its_number() -> None:  # K7
    queue = CommitQueue(gen(7))
    queue.completed(cp(3), (committable(3),))
    queue.succeeded(cp(3))
    assert queue.completed(cp(5), (committable(2), committable(5))) == [commit(5, committable(2), committable(5))]


def test_a_permit_names_the_generation_that_uses_it() -> None:  # K14
    (order,) = CommitQueue(gen(9)).completed(cp(1), (committable(1),))
    assert order.permit == CommitPermit(cp(1), gen(9))


def test_what_differs_in_any_part_of_its_identity_is_another_committable() -> None:  # K8
    first = committable(1)
    others = [
        committable(2),
        committable(1, sink="audit"),
        committable(1, subtask_index=1),
        Committable("out", cp(1), 0, gen(2), b"p"),
    ]
    assert len({first, *others}) == 5


def test_a_manifest_promises_its_own_and_the_carried_output_once_and_in_order() -> None:  # K2

    late, early = committable(2), committable(1)
    entries = (SubtaskEntry(sub("out"), inline_part(), (late, early)),)
    manifest = Manifest(cp(2), gen(1), 1, 128, entries, carried=(early,))
    assert manifest.committables == (early, late)


@given(st.lists(st.sampled_from(["complete", "succeed", "fail"]), max_size=40))
def test_every_committable_is_committed_in_order_whatever_fails(steps: list[str]) -> None:  # K1, K2
    queue, in_flight, checkpoint = CommitQueue(gen(7)), [], 0
    promised: list[Committable] = []
    committed: list[Committable] = []
    for step in [*steps, *["succeed"] * len(steps)]:
        if step == "complete":
            checkpoint += 1
            promised.append(committable(checkpoint))
            orders = queue.completed(cp(checkpoint), (committable(checkpoint),))
        elif not in_flight:
            continue
        elif step == "succeed":
            (done,) = in_flight
            committed += done.committables
            in_flight = []
            orders = queue.succeeded(done.permit.checkpoint)
        else:
            in_flight = []
            orders = queue.retry()
        in_flight += orders
        assert len(in_flight) <= 1, "one at a time"
    assert committed == promised


def test_targets_forget_below_what_any_retained_manifest_promises() -> None:  # K20
    def manifest(checkpoint: int, own: tuple[int, ...], carried: tuple[int, ...] = ()) -> Manifest:
        entry = SubtaskEntry(sub("sink"), inline_part(), tuple(committable(c) for c in own))
        return Manifest(cp(checkpoint), gen(7), 1, 128, (entry,), tuple(committable(c) for c in carried))

    assert oldest_promised([]) is None
    assert oldest_promised([manifest(9, (9,)), manifest(7, (7,)), manifest(8, (8,))]) == 7
    assert oldest_promised([manifest(9, (6, 9))]) == 6  # the output of an aborted checkpoint travels with a later one
    assert oldest_promised([manifest(9, (9,), (4, 5))]) == 4  # its commit was not confirmed
    assert oldest_promised([manifest(9, ())]) == 9


def output(checkpoint: int, sink: str = "out") -> Committable:
    return Committable(sink, cp(checkpoint), 0, gen(1), b"x")


def manifest(
    checkpoint: int, *carried: Committable, own: Committable | None = None, left: tuple[Left, ...] = ()
) -> Manifest:
    entry = SubtaskEntry(sub("a"), inline_part(), (own or output(checkpoint),))
    return Manifest(cp(checkpoint), gen(1), 1, 128, (entry,), carried, {"out": "", "other": ""}, left=left)


def test_what_a_newer_checkpoint_no_longer_promises_is_committed() -> None:  # SV26
    old, carried = manifest(2, output(1)), output(2)
    assert settled(old, manifest(4)) == {output(1), output(2)}
    assert settled(old, manifest(4, carried)) == {output(1)}
    assert settled(old, old) == frozenset()
    assert settled(manifest(5), manifest(4)) == frozenset(), "an older one says nothing"


def test_output_is_known_by_its_identity_wherever_it_is_stored() -> None:  # K8, WS10
    moved = replace(output(2), payload=b"", stored=SnapshotPart(1, 2, "files/x"))
    assert settled(manifest(2, own=moved), manifest(4, output(2))) == frozenset()
    assert among({moved, output(3)}, {output(2)}) == {moved}
    assert without(manifest(2, output(1)), {output(1), output(2)}).committables == ()


def test_output_of_a_sink_that_was_given_up_is_not_committed() -> None:  # SV26, SV30
    assert settled(manifest(2, output(1, "gone")), manifest(4)) == {output(2)}


def test_a_sink_that_is_back_is_no_witness_of_what_was_given_up() -> None:  # SV26, SV30
    base = manifest(3, output(2), output(2, "other"), own=output(3))
    left = left_by_giving_up(base, [output(3), output(2)])
    assert left == (Left(cp(1), cp(4), "out"),)
    newer = manifest(5, left=left)
    assert settled(base, newer) == {output(2, "other")}
    assert settled(manifest(1), newer) == {output(1)}, "what was committed before"
    assert settled(manifest(4), newer) == {output(4)}
    assert is_in_line(cp(3), newer), "the checkpoint was not left"


def test_nothing_is_known_of_checkpoints_that_were_left() -> None:  # SV26
    base = manifest(2, left=(Left(cp(0), cp(1)),))
    newer = manifest(7, left=left_since(base, cp(5)))
    assert newer.left == (Left(cp(0), cp(1)), Left(cp(2), cp(5)))
    assert [one for one in range(1, 9) if is_in_line(cp(one), newer)] == [1, 2, 5, 6, 7]
    assert settled(manifest(4), newer) == frozenset()
    assert left_since(manifest(4), cp(8)) == (Left(cp(4), cp(8)),), "who goes on from it has it in line again"


def test_who_goes_on_with_the_next_id_leaves_nothing() -> None:  # SV26
    base = manifest(2, left=(Left(cp(0), cp(1)),))
    assert left_since(base, cp(3)) == base.left


def test_what_a_sink_promised_that_was_removed_by_name_is_given_up() -> None:  # SV30
    restored = manifest(3, output(2), output(2, "other"), own=output(3))
    definition: Any = SimpleNamespace(
        plan=SimpleNamespace(state_texts=lambda: {"out": ""}),
        config=SimpleNamespace(start=SimpleNamespace(allow_unclaimed_state=("other", "out"))),
    )
    assert still_promised(restored, definition) == (output(2), output(3))
    assert given_up(restored, definition) == (Left(cp(1), cp(4), "other"),)
