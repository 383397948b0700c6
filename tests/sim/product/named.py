"""Planted bugs that few seeds find: each has a named test that does, or a sentence that says why it does no harm.

Seeds need too many things at once for them: two drivers or a power cut within one step, an abort while two checkpoints
overlap, a rescale while a loop's log is not empty, a fault behind a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.files import test_file_commit, test_file_rolling, test_file_sink
from tests.mutants import test_damage_mutants
from tests.mutants.harness import Mutant
from tests.operators import test_timestamps
from tests.operators.windows import test_windows
from tests.runtime.checkpoints import (
    test_checkpoint_log,
    test_log_fencing,
    test_log_outcomes,
    test_log_takeover,
    test_restoring,
    test_uploads,
)
from tests.runtime.driver import test_claims, test_live_generation, test_replacement_watch
from tests.runtime.worker import test_loop_head_runner, test_loop_log, test_subtask_runner
from tests.sim.product import mutants, stream_mutants, test_graphs, test_product_runs
from tests.sim.product import mutants_of_checkpoints as checkpoints
from tests.sim.product import mutants_of_workers as workers
from tests.store import test_store_transactions
from tests.store.storing import KEYED, STREAM

from headgate.runtime.checkpoints import uploads
from headgate.sim.machine.faults import Fault
from headgate.storage.faulty import FaultyStorage
from headgate.storage.memory import MemoryStorage
from headgate.store.store import Store

Given = Callable[[Path, pytest.MonkeyPatch], object]
"""Makes one argument of a test."""


def directory(path: Path, patch: pytest.MonkeyPatch) -> Path:
    return path


def monkeypatch(path: Path, patch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return patch


def storage(path: Path, patch: pytest.MonkeyPatch) -> FaultyStorage:
    return FaultyStorage(MemoryStorage("named"))


def place(path: Path, patch: pytest.MonkeyPatch) -> test_claims.Place:
    return test_claims.Place(path)


def made(path: Path, patch: pytest.MonkeyPatch) -> test_uploads.Uploads:
    patch.setattr(uploads, "RETRY_PAUSES_S", (0.0, 0.0))
    return test_uploads.Uploads()


def store(path: Path, patch: pytest.MonkeyPatch) -> Store:
    opened = Store.open(path / "store")
    opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
    return opened


def just(value: Any) -> Given:
    return lambda path, patch: value


commits, heads, runners = test_file_commit, test_loop_head_runner, test_subtask_runner

NAMED: tuple[tuple[Mutant, Callable[..., object], tuple[Given, ...]], ...] = (
    # the log
    (checkpoints.one_bad_read_counts, test_damage_mutants.a_bad_read_is_survived, ()),
    (
        checkpoints.a_pruned_number_is_used_again,
        test_log_fencing.test_a_manifest_at_a_pruned_number_is_taken_back,
        (),
    ),
    (
        checkpoints.ids_are_reserved_without_a_look,
        test_log_takeover.test_two_generations_never_get_the_same_id,
        (storage,),
    ),
    (
        checkpoints.nothing_is_dropped,
        test_checkpoint_log.test_dropping_a_checkpoint_removes_its_files_and_the_entries_before_the_oldest_retained,
        (storage,),
    ),
    (
        checkpoints.ids_that_a_crash_left_stay,
        test_checkpoint_log.test_ids_that_a_crash_left_go_with_the_next_claim,
        (storage,),
    ),
    (
        checkpoints.what_a_check_of_the_storage_left_stays,
        test_log_outcomes.test_a_check_of_the_storage_that_a_crash_cut_short_leaves_nothing_behind_the_next_start,
        (),
    ),
    (
        checkpoints.an_unknown_append_counts_as_failed,
        test_checkpoint_log.test_a_write_that_cannot_be_read_back_is_unknown,
        (storage,),
    ),
    (
        checkpoints.a_replaced_driver_claims_again,
        test_log_fencing.test_a_replaced_driver_does_not_claim_again,
        (),
    ),
    # claims
    (
        checkpoints.damage_is_not_looked_for,
        test_claims.test_a_damaged_newest_checkpoint_is_told_and_the_one_before_restored,
        (place,),
    ),
    (
        checkpoints.nothing_is_fenced_in_recovery,
        test_claims.test_a_first_start_aborts_whatever_is_prepared,
        (place,),
    ),
    (
        checkpoints.a_finished_pipeline_keeps_what_it_did_not_drop,
        test_claims.test_a_finished_pipeline_keeps_no_more_checkpoints_than_it_retains,
        (place,),
    ),
    (
        checkpoints.the_newest_damage_is_skipped_unasked,
        test_graphs.test_harm_is_made_good_by_doing_what_the_error_says,
        (just(Fault.DAMAGE),),
    ),
    # uploads
    (
        checkpoints.a_cancelled_write_forgets_its_output,
        test_uploads.test_a_cancelled_write_reports_nothing_and_leaves_its_output_to_the_next_one,
        (made,),
    ),
    (
        checkpoints.a_failed_write_forgets_what_is_prepared,
        test_uploads.test_a_state_that_cannot_be_written_leaves_prepared_output_to_the_next_snapshot,
        (made,),
    ),
    (
        checkpoints.output_that_cannot_be_prepared_is_forgotten,
        test_uploads.test_a_fault_that_waiting_cannot_mend_is_reported_at_once,
        (made,),
    ),
    (
        checkpoints.only_the_own_output_is_acknowledged,
        test_uploads.test_a_cancelled_write_reports_nothing_and_leaves_its_output_to_the_next_one,
        (made,),
    ),
    # restoring
    (
        checkpoints.rounds_begin_again_at_a_restore,
        test_restoring.test_heads_that_have_not_started_hold_the_rounds_of_all_back,
        (),
    ),
    (checkpoints.event_time_is_not_restored, test_timestamps.test_event_time_continues_after_a_restore, ()),
    # commits
    (
        checkpoints.a_stopped_driver_sweeps_its_heirs_output,
        commits.test_a_driver_stopped_in_its_recovery_sweeps_nothing_that_its_heir_prepared,
        (directory, monkeypatch),
    ),
    (
        checkpoints.recovery_sweeps_nothing,
        commits.test_a_driver_stopped_in_its_recovery_sweeps_nothing_that_its_heir_prepared,
        (directory, monkeypatch),
    ),
    (
        checkpoints.commits_do_not_ask_who_owns_the_sink,
        test_file_sink.test_an_older_generation_is_fenced,
        (directory,),
    ),
    (checkpoints.prepared_output_is_not_fenced, test_file_sink.test_an_older_generation_is_fenced, (directory,)),
    (checkpoints.the_newest_claim_is_overlooked, test_file_sink.test_an_older_generation_is_fenced, (directory,)),
    (
        checkpoints.held_records_are_restored_by_everybody,
        test_file_rolling.test_what_was_held_back_is_shown_by_the_first_checkpoint_after_a_restart_once,
        (directory, just(3), just(2)),
    ),
    # subtasks
    (
        mutants.a_batch_slips_in_between_the_positions_and_the_barrier,
        runners.test_the_position_in_a_snapshot_is_exactly_what_was_sent_before_its_barrier,
        (),
    ),
    (
        workers.sinks_are_sealed_before_operators_flush,
        runners.test_sinks_are_sealed_after_operators_have_sent_what_belongs_before_the_barrier,
        (),
    ),
    (
        workers.operators_keep_back_what_belongs_before_the_barrier,
        runners.test_sinks_are_sealed_after_operators_have_sent_what_belongs_before_the_barrier,
        (),
    ),
    (
        workers.partial_windows_are_forgotten_at_the_end,
        test_windows.test_what_combine_holds_goes_out_at_the_end_whatever_the_watermark,
        (),
    ),
    (
        workers.a_finished_source_is_never_asked_again,
        runners.test_a_source_restored_as_finished_reads_what_was_added,
        (),
    ),
    (workers.a_drain_drops_what_was_read, runners.test_a_drained_source_ends_where_it_is_and_keeps_its_position, ()),
    (workers.a_drain_is_not_heard, runners.test_a_drained_source_ends_where_it_is_and_keeps_its_position, ()),
    (
        workers.the_barrier_follows_one_more_batch,
        runners.test_operators_restored_as_finished_go_on_with_the_first_records,
        (),
    ),
    (
        workers.the_end_of_one_channel_ends_an_idle_one,
        test_product_runs.test_the_end_of_one_input_does_not_close_the_windows_of_an_idle_one,
        (),
    ),
    # loops
    (workers.only_the_newest_log_is_written, heads.test_overlapping_checkpoints_have_a_log_each, ()),
    (
        workers.an_abort_empties_the_other_logs,
        test_loop_log.test_overlapping_checkpoints_share_one_copy_of_a_batch,
        (),
    ),
    (workers.an_old_log_is_never_released, heads.test_a_snapshot_is_not_written_before_its_log_is_complete, ()),
    (
        workers.what_came_back_is_never_given_back,
        heads.test_closing_with_an_open_log_gives_its_memory_back,
        (),
    ),
    (
        workers.output_of_a_dropped_log_is_lost,
        heads.test_the_sealed_output_of_a_dropped_checkpoint_goes_into_the_next_snapshot,
        (),
    ),
    (
        workers.new_input_overtakes_the_replay,
        heads.test_the_restored_log_is_processed_before_feedback_and_regular_input,
        (),
    ),
    (
        workers.heads_pass_event_time_on,
        heads.test_the_last_watermark_goes_in_front_of_its_probe_and_no_other_one_before,
        (),
    ),
    (
        workers.a_head_replays_its_own_former_log_only,
        test_loop_log.test_one_head_replays_the_logs_of_all_former_heads_of_a_loop_with_keys,
        (),
    ),
    (
        workers.probes_overtake_what_operators_keep_back,
        heads.test_what_operators_hold_back_goes_in_front_of_a_probe,
        (),
    ),
    (
        workers.a_sentinel_goes_out_before_the_snapshot,
        heads.test_what_operators_hold_back_goes_in_front_of_the_sentinel,
        (),
    ),
    # the driver
    (
        workers.nobody_watches_for_a_newer_driver,
        test_replacement_watch.test_an_idle_driver_hears_of_the_one_that_replaced_it,
        (),
    ),
    (
        workers.a_drained_pipeline_reads_on_after_a_restart,
        test_live_generation.test_sources_of_a_drained_checkpoint_are_told_so_before_they_can_read,
        (just(True),),
    ),
    # the stream store: the log of the checkpoints fences a pipeline as well
    (
        stream_mutants.fences_are_not_looked_at,
        test_store_transactions.test_a_fenced_epoch_can_do_nothing_any_more,
        (store,),
    ),
)

HARMLESS: dict[str, str] = {
    "what_can_be_read_counts_as_durable": (
        "whoever appends looks behind its entry, and a listing syncs what it shows (O14): an entry that counts is "
        "durable all the same, or the look fails and the outcome is unknown"
    ),
}
"""Planted bugs that change nothing that anybody can see, and why."""
