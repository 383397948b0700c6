"""Mutants of the file sink and of the commits around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tests.connectors.files.test_file_commit as committing
import tests.connectors.files.test_file_rolling as rolling
import tests.connectors.files.test_file_sink_storage as kept
import tests.runtime.driver.test_sink_commits as sinks
import tests.test_names as names
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.sim.product.patching import around

from headgate.api import builder
from headgate.connectors.files import commit as file_commit
from headgate.connectors.files import ledger as file_ledger
from headgate.connectors.files import sink as file_sink
from headgate.connectors.files import writer as file_writer
from headgate.connectors.files.buffer import RowBuffer
from headgate.connectors.files.commit import FileCommitter
from headgate.connectors.files.ledger import Ledger
from headgate.connectors.files.writer import FileWriter, SealedFiles
from headgate.errors import FencedError, StorageError
from headgate.protocol.checkpoints import recovery
from headgate.runtime.driver import sink_commits
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.storage.base import AlreadyExists
from headgate.storage.faulty import FaultKind
from headgate.store import streams


@contextmanager
def newest_first() -> Iterator[None]:
    """K2."""
    commit = SinkCommits.commit

    def change(self: SinkCommits, permit: Any, committables: Sequence[Any]) -> None:
        backwards = lambda found, key: sorted(found, key=key, reverse=True)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sink_commits, "sorted", backwards, raising=False)
            commit(self, permit, committables)

    with patched(SinkCommits, "commit", change):
        yield


@contextmanager
def a_checkpoint_at_a_time() -> Iterator[None]:
    """K19."""
    commit = SinkCommits.commit

    def change(self: SinkCommits, permit: Any, committables: Sequence[Any]) -> None:
        for checkpoint in sorted({c.checkpoint for c in committables}):
            commit(self, permit, [c for c in committables if c.checkpoint == checkpoint])

    with patched(SinkCommits, "commit", change):
        yield


@contextmanager
def denials_look_transient() -> Iterator[None]:
    """K5."""

    @contextmanager
    def change(sink: str, checkpoint: int) -> Iterator[None]:
        try:
            yield
        except FencedError:
            raise
        except Exception as error:
            raise StorageError("commit", sink, str(error)) from error

    with patched(sink_commits, "_denials", change):
        yield


@contextmanager
def no_second_look() -> Iterator[None]:
    """D8."""
    looks = []
    refuse = FileCommitter._refuse_if_fenced

    def change(self: FileCommitter) -> None:
        looks.append(self)
        if looks.count(self) == 1:
            refuse(self)

    with patched(FileCommitter, "_refuse_if_fenced", change):
        yield


@contextmanager
def a_name_is_enough() -> Iterator[None]:
    """D5: another file under the final name is accepted and ours deleted."""

    def change(self: FileCommitter, file: Any) -> None:
        staged = self._identity.staged(file.name)
        try:
            self._storage.rename_if_absent(staged, file.name)
        except AlreadyExists:
            self._storage.delete(staged)

    with patched(FileCommitter, "_publish", change):
        yield


@contextmanager
def presence_decides() -> Iterator[None]:
    """D5: the manifest is not asked."""
    with patched(Ledger, "listed", lambda self, files, oldest: set()):
        yield


@contextmanager
def manifests_are_found_by_the_checkpoint_of_their_name_alone() -> Iterator[None]:
    """D5: merged manifests are not looked into."""
    read_all = file_ledger._read_all

    def change(storage: Any, directory: str, oldest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            manifests = file_ledger._manifests
            patch.setattr(file_ledger, "_manifests", lambda s, d: file_ledger._unmerged(manifests(s, d)))
            return read_all(storage, directory, oldest)

    with patched(file_ledger, "_read_all", change):
        yield


@contextmanager
def no_intents() -> Iterator[None]:
    """D11."""
    with patched(Ledger, "intended", lambda self: {}):
        yield


@contextmanager
def intents_outlive_what_recovery_aborts() -> Iterator[None]:
    """D11, K6."""
    withdraw = Ledger.withdraw
    recovering: list[Ledger] = []
    recover = FileCommitter.recover

    def in_recovery(self: FileCommitter, keep: Any) -> None:
        recovering.append(self._ledger)
        recover(self, keep)
        recovering.remove(self._ledger)

    def change(self: Ledger, intents: Any) -> None:
        if self not in recovering:
            withdraw(self, intents)

    with patched(FileCommitter, "recover", in_recovery), patched(Ledger, "withdraw", change):
        yield


@contextmanager
def published_without_a_look_at_all_files() -> Iterator[None]:
    """D11: what is missing is found half-way, or never."""
    with patched(
        FileCommitter, "_decide", lambda self, checkpoint, files: self._ledger.intend(checkpoint, files) and None
    ):
        yield


@contextmanager
def intents_stay_when_fenced() -> Iterator[None]:
    """D11: no look after the intent."""
    decide, looks = FileCommitter._decide, FileCommitter._refuse_if_fenced

    def change(self: FileCommitter, *args: Any) -> None:
        with patched(FileCommitter, "_refuse_if_fenced", lambda self: None):
            decide(self, *args)

    assert looks is not None
    with patched(FileCommitter, "_decide", change):
        yield


@contextmanager
def merged_manifests_grow_without_end() -> Iterator[None]:
    """D9."""
    merge = Ledger._merge

    def change(self: Ledger) -> None:
        with patched(file_ledger, "MANIFEST_FILES_MAX", 1_000_000):
            merge(self)

    with patched(Ledger, "_merge", change):
        yield


@contextmanager
def sources_deleted_before_they_are_merged() -> Iterator[None]:
    """D9."""

    def change(self: Ledger) -> None:
        paths = file_ledger._unmerged(file_ledger._manifests(self._storage, self._identity.committed))
        files = [file for path in paths for file in file_ledger.read_manifest(self._storage, path)]
        for path in paths:
            self._storage.delete(path)
        path, content = self._named(self._identity.committed, f"merged-{file_ledger._number(paths[-1]):010d}", files)
        self._storage.put_if_absent(path, [content])

    with patched(Ledger, "_merge", change):
        yield


@contextmanager
def taken_files_are_listed() -> Iterator[None]:
    """D12."""
    with patched(
        file_commit, "committed_files", lambda url: sorted(file_ledger.all_listed(file_commit.open_storage(url)))
    ):
        yield


@contextmanager
def what_is_held_is_in_no_state() -> Iterator[None]:
    """D13: lost by every restart."""
    with patched(FileWriter, "freeze", lambda self: None):
        yield


@contextmanager
def what_was_written_stays_in_the_state() -> Iterator[None]:
    """D13: in the output and in the state."""
    seal = FileWriter.seal

    def change(self: FileWriter, checkpoint: Any) -> Any:
        held = self._held
        sealed = seal(self, checkpoint)
        self._held = self._held or held
        return sealed

    with patched(FileWriter, "seal", change):
        yield


@contextmanager
def what_was_restored_waits_on() -> Iterator[None]:
    """D14."""
    due = FileWriter._is_due

    def change(self: FileWriter) -> bool:
        restored, self._restored = self._restored, []
        is_due = due(self)
        self._restored = restored
        return is_due

    with patched(FileWriter, "_is_due", change):
        yield


@contextmanager
def every_subtask_takes_what_all_held() -> Iterator[None]:
    """D14."""

    def change(self: FileWriter, states: Any) -> None:
        for state in states:
            self._restored += file_writer.held_in(state, "out")

    with patched(FileWriter, "restore", change):
        yield


@contextmanager
def the_end_is_ignored() -> Iterator[None]:
    """D14."""
    with patched(FileWriter, "finish", lambda self: None):
        yield


@contextmanager
def the_wait_begins_anew_with_every_record() -> Iterator[None]:
    """D13."""
    write = FileWriter.write

    def change(self: FileWriter, batch: Any) -> None:
        self._first_ms = None
        write(self, batch)

    with patched(FileWriter, "write", change):
        yield


@contextmanager
def slices_are_held_as_they_are() -> Iterator[None]:
    """D13."""
    with patched(RowBuffer, "compact", lambda self: tuple(self._batches)):
        yield


@contextmanager
def a_second_prepare_finds_nothing() -> Iterator[None]:
    """D2."""
    prepare = SealedFiles.prepare

    def change(self: SealedFiles) -> bytes | None:
        self._prepared = None
        return prepare(self)

    with patched(SealedFiles, "prepare", change):
        yield


@contextmanager
def held_records_of_a_sink_that_is_gone_are_dropped() -> Iterator[None]:
    """D15."""
    with patched(recovery, "_held", lambda manifest: {}):
        yield


def matching_to_a_line_end(module: Any, name: str) -> Mutant:
    pattern = getattr(module, name).pattern

    @contextmanager
    def lines() -> Iterator[None]:
        with patched(module, name, SimpleNamespace(fullmatch=re.compile(f"{pattern}$").match, pattern=pattern)):
            yield

    return lines


Case = tuple[Mutant, Callable[..., object], tuple[Any, ...]]

WITH_PATCH: list[Case] = [
    (
        sources_deleted_before_they_are_merged,
        committing.test_a_merge_that_is_cut_short_anywhere_loses_nothing,
        ("put_if_absent", FaultKind.IO_ERROR),
    ),
    (no_second_look, committing.test_a_generation_that_is_replaced_while_it_claims_aborts_nothing, ()),
    (presence_decides, committing.test_a_committed_file_that_is_prepared_again_does_not_come_back, (256,)),
    (
        manifests_are_found_by_the_checkpoint_of_their_name_alone,
        committing.test_a_committed_file_that_is_prepared_again_does_not_come_back,
        (1,),
    ),
    (no_intents, committing.test_a_file_taken_before_its_commit_is_listed_is_not_missed, ()),
    (
        intents_outlive_what_recovery_aborts,
        committing.test_what_was_never_published_is_denied_even_after_other_files_of_its_commit_were,
        (),
    ),
    (intents_stay_when_fenced, committing.test_a_generation_that_is_replaced_before_it_publishes_leaves_no_intent, ()),
    (merged_manifests_grow_without_end, committing.test_manifests_are_merged_in_bounded_size, ()),
    (a_checkpoint_at_a_time, sinks.test_output_of_an_aborted_checkpoint_is_shown_together_with_its_successors, ()),
]

PLAIN: list[Case] = [
    (what_is_held_is_in_no_state, rolling.test_every_record_is_shown_once_whatever_rolls_aborts_and_dies, (1,)),
    (what_was_written_stays_in_the_state, rolling.test_every_record_is_shown_once_whatever_rolls_aborts_and_dies, (1,)),
    (
        what_was_restored_waits_on,
        rolling.test_what_was_held_back_is_shown_by_the_first_checkpoint_after_a_restart_once,
        (3, 3),
    ),
    (
        every_subtask_takes_what_all_held,
        rolling.test_what_was_held_back_is_shown_by_the_first_checkpoint_after_a_restart_once,
        (3, 2),
    ),
    (the_end_is_ignored, rolling.test_the_end_of_the_input_shows_everything, ()),
    (
        the_wait_begins_anew_with_every_record,
        rolling.test_records_wait_for_the_interval_from_the_oldest_one_on,
        (),
    ),
    (slices_are_held_as_they_are, rolling.test_records_held_back_keep_no_larger_buffers_alive, ()),
    (
        a_second_prepare_finds_nothing,
        rolling.test_a_prepare_that_is_repeated_after_it_succeeded_returns_the_same,
        (),
    ),
    (newest_first, sinks.test_a_sink_is_given_what_a_permit_covers_at_once_and_oldest_first, ()),
    (
        denials_look_transient,
        sinks.test_what_a_repetition_cannot_cure_is_a_denial_that_names_the_sink,
        (StorageError("put", "f", "no", is_transient=False),),
    ),
    (a_name_is_enough, committing.test_another_file_under_the_final_name_stops_the_commit_and_ours_stays, ()),
    (
        presence_decides,
        committing.test_what_the_manifest_lists_is_committed_whatever_a_consumer_did_to_the_file,
        (Path.unlink,),
    ),
    (
        published_without_a_look_at_all_files,
        committing.test_a_lost_file_is_denied_before_anything_of_its_commit_is_published,
        (),
    ),
    (
        matching_to_a_line_end(file_sink, "_PREFIX"),
        names.test_a_name_that_ends_in_a_line_end_is_refused,
        (names.named_files,),
    ),
    (
        matching_to_a_line_end(builder, "_NAME"),
        names.test_a_name_that_ends_in_a_line_end_is_refused,
        (names.named_node,),
    ),
    (
        matching_to_a_line_end(streams, "_NAME"),
        names.test_a_name_that_ends_in_a_line_end_is_refused,
        (names.named_stream,),
    ),
]


def label(case: Any) -> str:
    return case.__name__ if callable(case) else ""


@pytest.mark.parametrize(("mutant", "test", "args"), PLAIN, ids=label)
def test_a_mutant_is_caught(tmp_path: Path, mutant: Mutant, test: Callable[..., object], args: tuple[Any, ...]) -> None:
    assert_caught(mutant, test, tmp_path, *args)


@pytest.mark.parametrize(("mutant", "test", "args"), WITH_PATCH, ids=label)
def test_a_mutant_is_caught_by_a_test_that_interferes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Mutant,
    test: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    assert_caught(mutant, test, tmp_path, monkeypatch, *args)


@contextmanager
def published_output_of_a_given_up_commit_stays() -> Iterator[None]:
    """D16."""
    with patched(FileCommitter, "_published", lambda self, files: iter(())):
        yield


@contextmanager
def nobody_looks_for_a_slow_commit() -> Iterator[None]:
    """D16: what it published behind the first look stays."""

    def published(call: Any, self: FileCommitter, files: Any) -> Any:
        return call(self, files) if self._ledger.intended() else iter(())

    with around(FileCommitter, "_published", published):
        yield


@contextmanager
def what_is_gone_is_taken_for_emptied() -> Iterator[None]:
    """SO6: it may have been merged."""
    with around(Ledger, "_is_emptied", lambda call, self, path: call(self, path) or True):
        yield


@contextmanager
def what_is_taken_back_is_deleted() -> Iterator[None]:
    """D16: cut short, it would be taken for published and taken away."""

    def delete(self: FileCommitter, files: set[Any]) -> None:
        for file in files:
            self._storage.delete(file.name)

    with patched(FileCommitter, "_take_back", delete):
        yield


def test_leaving_what_a_given_up_commit_had_published_is_caught(tmp_path: Path) -> None:
    def test(root: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            committing.test_what_a_given_up_commit_had_published_is_taken_back(root, patch)

    assert_caught(published_output_of_a_given_up_commit_stays, test, tmp_path)


def test_not_looking_for_a_slow_commit_is_caught(tmp_path: Path) -> None:
    test = committing.test_what_a_slow_commit_publishes_while_its_heir_recovers_is_not_left_there
    assert_caught(nobody_looks_for_a_slow_commit, test, tmp_path)


def test_not_looking_for_what_was_merged_is_caught(tmp_path: Path) -> None:
    test = committing.test_what_a_slow_commit_merges_while_a_directory_is_emptied_goes_too
    assert_caught(what_is_gone_is_taken_for_emptied, test, tmp_path)


def test_deleting_it_at_once_is_caught(tmp_path: Path) -> None:
    def test(root: Path) -> None:
        for number in range(1, 5):
            with pytest.MonkeyPatch.context() as patch:
                arguments = ("delete", FaultKind.TIMEOUT_AFTER_EFFECT, number)
                (root / str(number)).mkdir()
                committing.test_taking_back_may_be_cut_short_anywhere(root / str(number), patch, *arguments)

    assert_caught(what_is_taken_back_is_deleted, test, tmp_path)


def test_listing_what_was_taken_away_is_caught(tmp_path: Path) -> None:
    def reads(root: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(committing, "committed_files", file_commit.committed_files)
            committing.test_readers_of_manifests_leave_out_what_was_taken_away(root)

    assert_caught(taken_files_are_listed, reads, tmp_path)


def test_dropping_what_a_sink_holds_is_caught() -> None:
    assert_caught(
        held_records_of_a_sink_that_is_gone_are_dropped,
        rolling.test_a_checkpoint_with_records_of_a_sink_that_is_gone_does_not_fit,
    )


@contextmanager
def the_storage_of_a_sink_is_trusted() -> Iterator[None]:
    """O12."""
    with patched(file_commit, "refuse_unless_exclusive", lambda storage, directory: None):
        yield


def test_trusting_the_storage_of_a_sink_is_caught() -> None:
    test = kept.test_a_sink_in_a_storage_that_ignores_the_condition_of_a_put_is_refused
    assert_caught(the_storage_of_a_sink_is_trusted, test)


@contextmanager
def every_checkpoint_makes_a_file() -> Iterator[None]:
    """D13."""
    with patched(FileWriter, "_is_due", lambda self: True):
        yield


def test_a_file_per_checkpoint_is_caught(tmp_path: Path) -> None:
    test = rolling.test_twenty_minutes_of_checkpoints_every_second_make_a_file_a_minute
    assert_caught(every_checkpoint_makes_a_file, test, tmp_path)
