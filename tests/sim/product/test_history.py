"""The observer rejects hand-made bad histories, and accepts the good ones beside them."""

from __future__ import annotations

import pytest

from headgate.codec.json_files import encode_log_entry
from headgate.connectors.files.publish_log import StagedFile, encode_files
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Claim, Committable, Manifest, SnapshotPart, SubtaskEntry
from headgate.sim.product.history import History


def claim(history: History, sequence: int, generation: int, owner: str = "somebody") -> None:
    entry = Claim(Generation(generation), owner, 0, follows=sequence - 1)
    history.on_checkpoints_disk(f"p/log/{sequence:010d}", encode_log_entry(entry))


def file(checkpoint: int, generation: int, number: int = 0) -> StagedFile:
    return StagedFile(f"part-p.out-{checkpoint:010d}-00000-{generation:010d}-{number:05d}.jsonl", 1, 1, "00")


def complete(history: History, sequence: int, checkpoint: int, generation: int, *files: StagedFile) -> None:
    write(history, sequence, checkpoint, generation, *files)
    history.on_completed(checkpoint)


def write(history: History, sequence: int, checkpoint: int, generation: int, *files: StagedFile) -> None:
    payload = encode_files(files)
    promised = (Committable("out", CheckpointId(checkpoint), 0, Generation(generation), payload),) if files else ()
    manifest = Manifest(
        CheckpointId(checkpoint),
        Generation(generation),
        1,
        8,
        (),
        carried=promised,
        follows=sequence - 1,
        log_start=1,
    )
    history.on_checkpoints_disk(f"p/log/{sequence:010d}", encode_log_entry(manifest))


def found(history: History) -> str | None:
    return None if history.finding is None else history.finding.invariant


def test_a_good_history_is_accepted() -> None:
    history = History(retained=1)
    claim(history, 1, 1)
    complete(history, 2, 1, 1, file(1, 1))
    history.on_sink_disk("out", "_committed/p.out/0000000001-00.json", encode_files([file(1, 1)]))
    history.on_read("out", [file(1, 1).name])
    claim(history, 3, 2)
    history.on_restored(2, 1)
    complete(history, 4, 2, 2)
    history.on_checkpoints_disk("p/chk-0000000001/v-0.g1", None)
    assert history.finding is None


def test_a_checkpoint_that_completes_twice_is_rejected() -> None:
    history = History(retained=1)
    complete(history, 2, 1, 1)
    history.on_completed(1)
    assert found(history) == "I7"


def test_a_checkpoint_of_an_older_generation_behind_one_of_a_newer_is_rejected() -> None:
    history = History(retained=1)
    complete(history, 2, 3, 1)
    complete(history, 4, 2, 2)
    assert found(history) == "I7"


def test_a_checkpoint_that_is_not_in_the_log_is_rejected() -> None:
    history = History(retained=1)
    history.on_completed(1)
    assert found(history) == "I4"


def test_a_checkpoint_of_a_replaced_generation_is_rejected() -> None:
    history = History(retained=1)
    claim(history, 1, 1)
    claim(history, 2, 2)
    complete(history, 3, 1, 1)
    assert found(history) == "I8"


@pytest.mark.parametrize(("damaged", "verdict"), [(False, "I4"), (True, None)])
def test_only_damage_lets_a_start_go_back(damaged: bool, verdict: str | None) -> None:
    history = History(retained=2)
    complete(history, 2, 1, 1)
    complete(history, 3, 2, 1)
    claim(history, 4, 2)
    if damaged:
        history.damaged.add(2)
    history.on_restored(2, 1)
    assert found(history) == verdict
    assert history.is_repeated(file(2, 1).name)
    assert not history.is_repeated(file(1, 1).name)


def test_a_snapshot_that_may_still_be_restored_must_stay() -> None:
    history = History(retained=2)
    complete(history, 2, 1, 1)
    complete(history, 3, 2, 1)
    history.on_checkpoints_disk("p/chk-0000000001/v-0.g1", None)
    assert found(history) == "I4"


def test_a_commit_that_nothing_promised_is_rejected() -> None:
    history = History(retained=1)
    complete(history, 2, 1, 1, file(1, 1))
    history.on_sink_disk("out", "_committed/p.out/0000000001-00.json", encode_files([file(2, 1)]))
    assert found(history) == "I1"


@pytest.mark.parametrize("after", [None, b"other"])
def test_what_was_published_neither_changes_nor_goes(after: bytes | None) -> None:
    history = History(retained=1)
    history.on_sink_disk("out", file(1, 1).name, b"one")
    history.on_sink_disk("out", file(1, 1).name, after)
    assert found(history) == "I2"


@pytest.mark.parametrize(("damaged", "is_listed", "verdict"), [(1, False, None), (2, False, "I2"), (1, True, "I2")])
def test_what_nobody_lists_may_be_taken_back_behind_damage(damaged: int, is_listed: bool, verdict: str | None) -> None:
    history = History(retained=1)
    complete(history, 2, 1, 1, file(1, 1))
    history.on_sink_disk("out", file(1, 1).name, b"one")
    if is_listed:
        history.on_sink_disk("out", "_committed/p.out/0000000001-00.json", encode_files([file(1, 1)]))
    history.damaged.add(damaged)
    history.on_sink_disk("out", file(1, 1).name, None)
    assert found(history) == verdict


@pytest.mark.parametrize(("is_merged", "verdict"), [(True, None), (False, "I2")])
def test_what_is_listed_may_move_to_another_manifest_and_no_further(is_merged: bool, verdict: str | None) -> None:
    history = History(retained=1)
    complete(history, 2, 1, 1, file(1, 1), file(1, 1, 1))
    for number in range(2):
        path = f"_committed/p.out/000000000{number}-00.json"
        history.on_sink_disk("out", path, encode_files([file(1, 1, number)]))
    if is_merged:
        merged = "_committed/p.out/merged-0000000001-00.json"
        history.on_sink_disk("out", merged, encode_files([file(1, 1), file(1, 1, 1)]))
    history.on_sink_disk("out", "_committed/p.out/0000000000-00.json", None)
    assert found(history) == verdict


def test_what_readers_saw_stays() -> None:
    history = History(retained=1)
    history.on_read("out", [file(1, 1).name])
    history.on_read("out", [])
    assert found(history) == "I2"


def test_readers_see_whole_checkpoints() -> None:
    history = History(retained=1)
    complete(history, 2, 1, 1, file(1, 1), file(1, 1, 1))
    history.on_read("out", [file(1, 1).name])
    assert found(history) == "I3"


def test_a_driver_that_was_replaced_stays_away() -> None:
    history = History(retained=1)
    claim(history, 1, 1, "first")
    complete(history, 2, 1, 1)
    claim(history, 3, 2, "first")
    claim(history, 4, 3, "second")
    claim(history, 3, 2, "first")
    assert history.finding is None, "what it put while it did not know is taken back"
    claim(history, 5, 4, "first")
    assert found(history) == "I5"


@pytest.mark.parametrize(("generation", "verdict"), [(2, None), (3, "I4")])
def test_what_was_given_up_is_not_restored_by_whoever_claims_later(generation: int, verdict: str | None) -> None:
    history = History(retained=1)
    claim(history, 1, 1)
    complete(history, 2, 1, 1)
    claim(history, 3, 2)
    history.on_checkpoints_disk("p/resets/token", b"")
    step = Claim(Generation(3), "start over", 0, life=4, order="token")
    history.on_checkpoints_disk("p/log/0000000004", encode_log_entry(step))
    history.on_restored(generation, 1)
    assert found(history) == verdict, "a driver may say late what it chose before"


@pytest.mark.parametrize(("claimed_meanwhile", "verdict"), [(False, None), (True, "SO2")])
def test_nobody_starts_over_behind_a_claim_that_nobody_looked_at(claimed_meanwhile: bool, verdict: str | None) -> None:
    history = History(retained=1)
    claim(history, 1, 1)
    history.on_checkpoints_disk("p/resets/token", b"")
    if claimed_meanwhile:
        claim(history, 2, 2)
    step = Claim(Generation(3), "start over", 0, life=3, order="token")
    history.on_checkpoints_disk("p/log/0000000003", encode_log_entry(step))
    assert found(history) == verdict


def test_a_claim_at_a_number_that_was_pruned_replaces_nobody() -> None:
    """Its driver looked before the number was used; it looks again, and takes the claim back."""
    history = History(retained=1)
    claim(history, 1, 1, "first")
    complete(history, 2, 1, 1)
    complete(history, 3, 2, 1)
    history.on_checkpoints_disk("p/log/0000000002", None)
    late = encode_log_entry(Claim(Generation(2), "second", 0))
    history.on_checkpoints_disk("p/log/0000000002", late, ["p/log/0000000003", "p/log/0000000002"])
    complete(history, 4, 3, 1)
    assert history.finding is None
    history.on_restored(2, 2)
    assert found(history) == "I7", "but its driver may not run"


@pytest.mark.parametrize(
    ("subtasks", "path", "verdict"),
    [
        ([0, 1], "chk-0000000001/v.g1", None),
        ([0, 1], "", None),
        ([0], "chk-0000000001/v.g1", "I4"),
        ([0, 1, 1], "chk-0000000001/v.g1", "I4"),
        ([0, 1], "chk-0000000001/v.g2", "I8"),
        ([0, 1], "chk-0000000002/v.g1", "I8"),
    ],
)
def test_a_checkpoint_has_every_subtask_once_with_a_snapshot_of_its_own(
    subtasks: list[int], path: str, verdict: str | None
) -> None:
    history = History(retained=1)
    part = SnapshotPart(1, 1, path, b"" if path else b"x")
    entries = tuple(SubtaskEntry(SubtaskId(VertexId("v"), index), (part,)) for index in subtasks)
    manifest = Manifest(CheckpointId(1), Generation(1), 2, 8, entries, follows=1, log_start=1)
    history.on_checkpoints_disk("p/log/0000000002", encode_log_entry(manifest))
    assert found(history) == verdict


def test_rounds_are_not_left_out() -> None:
    history = History(retained=1)
    for number in (0, 1, 0, 1, 2):
        history.on_round("d0", "loop", number)
    assert history.finding is None
    history.on_round("d0", "loop", 4)
    assert found(history) == "I7"


def test_a_log_that_nobody_can_read_is_rejected() -> None:
    history = History(retained=1)
    history.on_checkpoints_disk("p/log/0000000001", b"nonsense")
    assert found(history) == "I4"
