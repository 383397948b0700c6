"""``format("headgate")`` without a JVM, over a served store: what is different there than in a directory."""

import pytest

pytest.importorskip("pyspark")

from tests.spark.test_stream_format import (
    micro_batch,
    store,
    stream,
    test_a_late_task_of_a_decided_write_can_do_nothing,
    test_a_micro_batch_that_is_repeated_is_written_once,
    test_a_query_holds_what_it_has_not_processed,
    test_a_write_creates_the_stream,
    test_a_write_that_failed_leaves_nothing,
    test_all_rows_of_a_write_become_visible_at_once,
    test_all_tasks_read_between_the_cuts_of_the_load,
    test_an_answer_that_was_lost_is_no_second_commit,
    test_keys_choose_segments_and_events,
    test_micro_batches_take_so_many_rows_and_all_of_them_in_the_end,
    test_of_two_drivers_one_commits_a_micro_batch,
    test_what_was_truncated_is_missed_and_not_skipped,
    test_wrong_options_of_a_stream_are_one_sentence,
)

__all__ = [
    "micro_batch",
    "store",
    "stream",
    "test_a_late_task_of_a_decided_write_can_do_nothing",
    "test_a_micro_batch_that_is_repeated_is_written_once",
    "test_a_query_holds_what_it_has_not_processed",
    "test_a_write_creates_the_stream",
    "test_a_write_that_failed_leaves_nothing",
    "test_all_rows_of_a_write_become_visible_at_once",
    "test_all_tasks_read_between_the_cuts_of_the_load",
    "test_an_answer_that_was_lost_is_no_second_commit",
    "test_keys_choose_segments_and_events",
    "test_micro_batches_take_so_many_rows_and_all_of_them_in_the_end",
    "test_of_two_drivers_one_commits_a_micro_batch",
    "test_what_was_truncated_is_missed_and_not_skipped",
    "test_wrong_options_of_a_stream_are_one_sentence",
]
