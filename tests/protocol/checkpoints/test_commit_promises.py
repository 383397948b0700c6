"""Which of what a checkpoint promised is committed, by a newer checkpoint of the same life."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.protocol.making import cp, gen, inline_part, sub

from headgate.model.manifest import Committable, Left, Manifest, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.commit import (
    among,
    given_up,
    is_in_line,
    left_by_giving_up,
    left_since,
    settled,
    still_promised,
    without,
)


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
