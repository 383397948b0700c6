"""Mutants of the base classes of sinks that users write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tests.api.test_possible_guarantees as possible
import tests.codec.test_log_entry as entries
import tests.connectors.custom.test_ledger_pieces as pieces
import tests.connectors.custom.test_own_sinks as sinks
import tests.runtime.driver.test_sink_commits as commits
from examples.sqlite_sink import SqliteLedgerSink, SqliteSink
from tests.mutants.harness import Mutant, assert_caught, patched

import headgate as hg
from headgate.api import guarantees
from headgate.api import pipeline as pipelines
from headgate.codec import log_entry
from headgate.connectors.custom import ledger, two_phase
from headgate.connectors.custom.fence import OutputName
from headgate.connectors.custom.output import LedgerOutput
from headgate.connectors.custom.pieces import PieceBuffer
from headgate.errors import HeadgateError, OutputDenied, StorageError
from headgate.model.manifest import Committable
from headgate.runtime.checkpoints import losses
from headgate.runtime.checkpoints.losses import Losses
from headgate.runtime.checkpoints.uploads import SnapshotWriter
from headgate.runtime.driver import sink_commits
from headgate.testing.sinks.kills import KillPoint, check_kill
from headgate.testing.sinks.rivals import check_stale_generation


@contextmanager
def recovery_aborts_nothing() -> Iterator[None]:
    """CS3, K6."""
    with patched(two_phase._Committer, "recover", lambda self, keep: self._sink.claim(self._fence)):
        yield


@contextmanager
def recovery_aborts_what_is_kept() -> Iterator[None]:
    """CS3: a completed checkpoint promised it."""
    recover = two_phase._Committer.recover
    with patched(two_phase._Committer, "recover", lambda self, keep: recover(self, [])):
        yield


@contextmanager
def recovery_aborts_what_an_heir_prepared() -> Iterator[None]:
    """CS3."""
    with patched(two_phase._Committer, "_is_mine", lambda self, name: True):
        yield


@contextmanager
def a_ledger_is_not_claimed() -> Iterator[None]:
    """K14: an older generation goes on."""
    with patched(SqliteLedgerSink, "claim", lambda self, fence: None):
        yield


@contextmanager
def permits_are_not_looked_at() -> Iterator[None]:
    """K1."""

    def beyond(self: Any, permit: Any, committables: Any) -> None:
        names = [two_phase._name_of(committable) for committable in committables]
        self._sink.commit(names, self._fence)

    with patched(two_phase._Committer, "commit", beyond):
        yield


@contextmanager
def a_ledger_publishes_nothing_that_comes_late() -> Iterator[None]:
    """K7: what an earlier checkpoint left is older than the permit, and not published for that."""

    def newest_only(self: Any, permit: Any, committables: Any) -> None:
        commit(self, permit, [c for c in committables if c.checkpoint == permit.checkpoint])

    commit = ledger._Committer.commit
    with patched(ledger._Committer, "commit", newest_only):
        yield


@contextmanager
def pieces_are_written_anew() -> Iterator[None]:
    """SF13: what was durable before a failure is written again, and the former files are in nobody's way."""
    store = SnapshotWriter._store_pieces

    def from_the_start(self: Any, checkpoint: Any, sealed: Any) -> None:
        self._pieces = []
        store(self, checkpoint, sealed)

    with patched(SnapshotWriter, "_store_pieces", from_the_start):
        yield


@contextmanager
def a_piece_that_failed_is_left_out() -> Iterator[None]:
    """SF13: another try goes on behind it."""

    def skipping(self: Any, checkpoint: Any, sealed: Any) -> None:
        at = getattr(sealed, "at", len(self._pieces))
        for number in range(at, sealed.pieces_count):
            sealed.at = number + 1
            self._pieces.append(self._stored(checkpoint, sealed.piece(number)))

    with patched(SnapshotWriter, "_store_pieces", skipping):
        yield


@contextmanager
def nobody_needs_the_files_of_pieces() -> Iterator[None]:
    """SF4, SF13: they are deleted before they are committed."""
    with patched(Committable, "parts", property(lambda self: ())):
        yield


@contextmanager
def pieces_stay_in_memory() -> Iterator[None]:
    """SF13."""
    with patched(PieceBuffer, "_close_piece", lambda self: None):
        yield


@contextmanager
def all_pieces_are_read_first() -> Iterator[None]:
    """CS8."""
    read = LedgerOutput.__iter__
    with patched(LedgerOutput, "__iter__", lambda self: iter(list(read(self)))):
        yield


@contextmanager
def missing_pieces_are_not_missed() -> Iterator[None]:
    """CS8."""
    with patched(LedgerOutput, "_refuse_other_count", lambda self, said: None):
        yield


@contextmanager
def pieces_are_in_a_manifest_of_version_2() -> Iterator[None]:
    """SF14: an earlier release deletes their files."""
    with patched(log_entry, "_version", lambda entry: 2):
        yield


@contextmanager
def targets_that_end_transactions_are_not_asked() -> Iterator[None]:
    """CS9."""
    with patched(pipelines, "check_transactions", lambda graph, checkpoints, restart: None):
        yield


@contextmanager
def what_retained_checkpoints_promise_is_forgotten() -> Iterator[None]:
    """CS24, K20."""
    forget = two_phase._ForgettingCommitter.forget_all_but
    with patched(
        two_phase._ForgettingCommitter, "forget_all_but", lambda self, before, promised: forget(self, before, [])
    ):
        yield


@contextmanager
def what_was_committed_meanwhile_is_forgotten() -> Iterator[None]:
    """CS24: a checkpoint completed after somebody looked what is promised."""

    def is_over(self: Any, name: str, before: Any, kept: set[str]) -> bool:
        return name not in kept and self._is_mine(name)

    with patched(two_phase._ForgettingCommitter, "_is_over", is_over):
        yield


@contextmanager
def only_what_this_generation_committed_is_forgotten() -> Iterator[None]:
    """CS24: what others left stays for ever."""

    def is_over(self: Any, name: str, before: Any, kept: set[str]) -> bool:
        return name not in kept and self._checkpoints.get(name, before) < before

    with patched(two_phase._ForgettingCommitter, "_is_over", is_over):
        yield


@contextmanager
def what_other_sinks_committed_is_forgotten() -> Iterator[None]:
    """CS2, CS24."""

    def is_over(self: Any, name: str, before: Any, kept: set[str]) -> bool:
        found = OutputName.parse(name)
        return name not in kept and found is not None and found.generation < self._fence.generation

    with patched(two_phase._ForgettingCommitter, "_is_over", is_over):
        yield


@contextmanager
def half_of_what_forgetting_takes_is_taken_for_none() -> Iterator[None]:
    """CS24."""
    with patched(two_phase, "can_forget", lambda sink: False):
        yield


@contextmanager
def all_is_lost_with_what_is_denied() -> Iterator[None]:
    """K26."""

    def commit(self: Any, committer: Any, permit: Any, committables: Any) -> None:
        try:
            committer.commit(permit, committables)
        except HeadgateError as error:
            if self._lose is None or not error.is_output_gone:
                raise
            for committable in committables:
                self._lose(committable, str(error))

    with patched(sink_commits.SinkCommits, "_commit", commit):
        yield


@contextmanager
def what_is_refused_is_lost() -> Iterator[None]:
    """K26."""
    with patched(HeadgateError, "is_output_gone", True):
        yield


@contextmanager
def any_file_is_a_loss() -> Iterator[None]:
    with patched(losses, "_RECORD", re.compile(".*")):
        yield


@contextmanager
def losses_are_told_and_not_recorded() -> Iterator[None]:
    """K26."""
    with patched(Losses, "_recorded", lambda self, lost, why, wall_ms: ""):
        yield


NOT_ALLOWED = StorageError("put", "f", "not allowed", is_transient=False)


def half(path: Path) -> None:
    sinks.test_a_sink_with_half_of_what_forgetting_takes_is_told_so(path, sinks.ForgetsOnly, "forget", "committed")


@contextmanager
def restarts_take_no_time() -> Iterator[None]:
    """CS9."""
    with patched(guarantees, "longest_outage_ms", lambda strategy: 0):
        yield


@contextmanager
def whoever_comes_may_write() -> Iterator[None]:
    """LV8."""
    with patched(pipelines, "check_owners", lambda graph: None):
        yield


def in_pieces(test: Any) -> Any:
    def run(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            worker = pieces.worker_of(patch)
            try:
                test(worker, path) if "tmp_path" in inspect.signature(test).parameters else test(worker)
            finally:
                worker.pool.shutdown()

    return run


def killed(kind: Any) -> Any:
    def test(path: Path) -> None:
        for point in KillPoint:
            for overlap in (1, 3):
                file = path / f"{point.name}-{overlap}.db"
                check_kill(sinks.target_at(file, kind), point, 2, 1, overlap, 4)

    return test


def stale(path: Path) -> None:
    check_stale_generation(sinks.target_at(path / "t.db", SqliteLedgerSink))


CASES = [
    (recovery_aborts_nothing, killed(SqliteSink)),
    (recovery_aborts_what_is_kept, killed(SqliteSink)),
    (recovery_aborts_what_an_heir_prepared, sinks.test_what_an_heir_prepared_is_not_aborted),
    (a_ledger_is_not_claimed, stale),
    (a_ledger_publishes_nothing_that_comes_late, killed(SqliteLedgerSink)),
    (pieces_are_written_anew, in_pieces(pieces.test_a_failure_between_two_pieces_goes_on_there)),
    (a_piece_that_failed_is_left_out, in_pieces(pieces.test_a_failure_between_two_pieces_goes_on_there)),
    (nobody_needs_the_files_of_pieces, in_pieces(pieces.test_pieces_stay_until_they_are_committed)),
    (pieces_stay_in_memory, in_pieces(pieces.test_one_piece_is_in_memory_at_a_time)),
    (all_pieces_are_read_first, in_pieces(pieces.test_one_piece_is_in_memory_at_a_time)),
    (missing_pieces_are_not_missed, in_pieces(pieces.test_a_piece_that_is_gone_or_not_named_is_a_denial)),
    (
        pieces_are_in_a_manifest_of_version_2,
        lambda _: entries.test_a_manifest_with_output_in_pieces_is_of_a_version_of_its_own("carried"),
    ),
    (
        targets_that_end_transactions_are_not_asked,
        lambda _: possible.test_a_target_that_may_end_what_a_checkpoint_still_needs_is_refused(
            possible.hg.Checkpointing(), "and a restart behind it may take"
        ),
    ),
    (
        restarts_take_no_time,
        lambda _: possible.test_restarts_and_takeovers_count_against_what_a_target_waits(hg.FixedDelay(), None),
    ),
    (whoever_comes_may_write, lambda _: possible.test_a_sink_that_cannot_say_whose_its_target_is_is_refused()),
    (
        what_retained_checkpoints_promise_is_forgotten,
        sinks.test_a_sink_of_two_phases_forgets_what_no_retained_checkpoint_promises,
    ),
    (
        what_was_committed_meanwhile_is_forgotten,
        sinks.test_a_sink_of_two_phases_forgets_what_no_retained_checkpoint_promises,
    ),
    (
        what_was_committed_meanwhile_is_forgotten,
        sinks.test_what_an_heir_has_committed_is_not_forgotten_by_whom_it_replaced,
    ),
    (
        only_what_this_generation_committed_is_forgotten,
        sinks.test_a_sink_of_two_phases_forgets_what_no_retained_checkpoint_promises,
    ),
    (what_other_sinks_committed_is_forgotten, sinks.test_other_sinks_at_the_target_forget_for_themselves),
    (half_of_what_forgetting_takes_is_taken_for_none, half),
    (
        all_is_lost_with_what_is_denied,
        lambda path: commits.test_what_a_target_denies_is_lost_alone_if_its_user_said_so(path, hg.UsageError("gone")),
    ),
    (
        what_is_refused_is_lost,
        lambda path: commits.test_what_a_target_refuses_otherwise_is_not_lost(path, NOT_ALLOWED, OutputDenied),
    ),
    (any_file_is_a_loss, lambda _: commits.test_only_records_of_losses_are_counted()),
    (losses_are_told_and_not_recorded, lambda _: commits.test_a_loss_is_recorded_once_and_told_each_time()),
    (permits_are_not_looked_at, lambda path: sinks.test_output_beyond_the_permit_is_refused(path, SqliteSink)),
]


@pytest.mark.parametrize(("mutant", "test"), CASES, ids=[mutant.__name__ for mutant, _ in CASES])
def test_a_mutant_is_caught(tmp_path: Path, mutant: Mutant, test: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinks.sqlite_sink, "TABLES", f"pragma synchronous = off; {sinks.sqlite_sink.TABLES}")
        assert_caught(mutant, test, tmp_path)
