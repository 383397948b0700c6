"""Mutants of ``format("headgate")``: what micro-batches take, what is read of a stream, and what is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_micro_batches as decided
from tests.sim.product.patching import around, both, skipped
from tests.spark import test_stream_format as formatted

from headgate.protocol.store import micro_batches
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.micro_batches import Turn
from headgate.spark import stream_reading, stream_writing
from headgate.spark.stream_format import StreamDataSource
from headgate.spark.stream_options import Options
from headgate.spark.stream_reading import MicroBatchReader, Selected, Span
from headgate.spark.stream_writing import MicroBatchWriter, Written
from headgate.store.cuts import StreamCut
from headgate.store.store import Store

# -- what is decided -------------------------------------------------------------------------------------------------


def segments_are_read_before_those_in_front_of_them() -> AbstractContextManager[None]:  # SP4
    return patched(micro_batches, "_ready", lambda layout, left: [piece for piece in left if piece.rows_count])


def the_first_segment_takes_all_rows() -> AbstractContextManager[None]:  # SP4
    def shares(call: Any, counts: Any, rows_max: int) -> list[int]:
        found = []
        for count in counts:
            found.append(min(count, rows_max))
            rows_max -= found[-1]
        return found

    return around(micro_batches, "_shares", shares)


def every_segment_has_a_task_of_its_own() -> AbstractContextManager[None]:  # SP5
    return patched(decided, "in_order", lambda layout, pieces: [[piece] for piece in pieces])


def all_is_read_by_one_task() -> AbstractContextManager[None]:  # SP3
    return patched(decided, "dealt", lambda pieces, rows_max, rows_min, at_once: [list(pieces)])


def each_piece_has_a_task_of_its_own() -> AbstractContextManager[None]:  # SP3
    return patched(decided, "dealt", lambda pieces, rows_max, rows_min, at_once: [[piece] for piece in pieces])


def what_was_truncated_is_not_missed() -> AbstractContextManager[None]:  # SP6
    return skipped(stream_reading, "first_missing")


# -- reading ---------------------------------------------------------------------------------------------------------


def every_action_takes_its_own_cuts() -> AbstractContextManager[None]:  # SP2
    return patched(StreamDataSource, "_loaded", lambda self: Span.of(Options(self.options, ("path", "store"))))


def keys_choose_segments_of_the_present_layout() -> AbstractContextManager[None]:  # SP3
    def with_(call: Any, info: Any, layout: Layout, keys: Any) -> Any:
        return call(info, Layout(layout.epoch, layout.present), keys)

    return around(stream_reading, "_segments_with", with_)


def the_end_is_held_and_not_what_was_processed() -> AbstractContextManager[None]:  # SP6
    return around(MicroBatchReader, "_hold", lambda call, self, cut: call(self, self._tail()))


def any_stream_of_the_name_will_do() -> AbstractContextManager[None]:  # SP6
    return patched(Selected, "find", lambda self: self.place.find())


def a_read_makes_the_store() -> AbstractContextManager[None]:  # SP1
    return patched(Store, "exists", staticmethod(lambda root: bool(Store.shared(root))))


def a_query_reads_on_in_whatever_is_there() -> AbstractContextManager[None]:  # SP6
    return skipped(StreamCut, "check")


# -- writing ---------------------------------------------------------------------------------------------------------


def nobody_looks_whether_a_micro_batch_is_written() -> AbstractContextManager[None]:  # SP9
    return patched(stream_writing, "_is_committed", lambda store, owner, batch: False)


def others_are_not_fenced() -> AbstractContextManager[None]:  # SP8, SP10
    return both(skipped(Store, "fence"), what_lost_tasks_have_prepared_stays())


def what_lost_tasks_have_prepared_stays() -> AbstractContextManager[None]:  # SP8
    return both(skipped(Store, "recover", []), skipped(Store, "abort_transaction"))


def only_the_same_micro_batch_counts() -> AbstractContextManager[None]:  # SP10
    return patched(stream_writing, "turn_of", lambda batch, committed: Turn.DONE if batch in committed else Turn.WRITE)


def tasks_commit_what_they_write() -> AbstractContextManager[None]:  # SP8
    def prepare(call: Any, self: Any, batches: Any, owner: str, epoch: int, name: str) -> Any:
        found = call(self, batches, owner, epoch, name)
        if found.name:
            self.place.store.commit_transactions([(self.place.stream, name)], owner=owner, epoch=epoch)
        return found

    return around(Written, "prepare", prepare)


def outcomes_of_micro_batches_are_kept() -> AbstractContextManager[None]:  # SP10
    return skipped(Store, "forget_outcomes")


def one_without_rows_is_the_latest() -> AbstractContextManager[None]:  # SP10
    real = MicroBatchWriter.commit

    def commit(self: Any, messages: Any, batchId: int) -> None:  # noqa: N803
        real(self, messages, batchId)
        self._written.forget("spark/query-q", lambda name: stream_writing._batch_of(name) < batchId)

    return patched(MicroBatchWriter, "commit", commit)


@contextmanager
def stream_of(root: Path) -> Iterator[Store]:
    with Store.open(root / "store") as store:
        store.create_stream("in", formatted.SCHEMA, segments=2, routing_key="key")
        formatted.append(store, range(10))
        yield store


WITH_A_STREAM: list[tuple[Mutant, Callable[..., object]]] = [
    (what_was_truncated_is_not_missed, formatted.test_what_was_truncated_is_missed_and_not_skipped),
    (every_action_takes_its_own_cuts, formatted.test_all_tasks_read_between_the_cuts_of_the_load),
    (keys_choose_segments_of_the_present_layout, formatted.test_keys_choose_segments_and_events),
    (the_end_is_held_and_not_what_was_processed, formatted.test_a_query_holds_what_it_has_not_processed),
    (a_query_reads_on_in_whatever_is_there, formatted.test_a_query_does_not_go_on_in_another_stream),
    (any_stream_of_the_name_will_do, formatted.test_a_stream_that_was_created_anew_is_another_one),
    (what_lost_tasks_have_prepared_stays, formatted.test_all_rows_of_a_write_become_visible_at_once),
    (tasks_commit_what_they_write, formatted.test_a_write_that_failed_leaves_nothing),
]
OF_MICRO_BATCHES: list[tuple[Mutant, Callable[..., object]]] = [
    (nobody_looks_whether_a_micro_batch_is_written, formatted.test_a_micro_batch_that_is_repeated_is_written_once),
    (others_are_not_fenced, formatted.test_of_two_drivers_one_commits_a_micro_batch),
    (what_lost_tasks_have_prepared_stays, formatted.test_a_micro_batch_that_failed_is_tried_again),
    (only_the_same_micro_batch_counts, formatted.test_a_driver_that_comes_late_writes_nothing_again),
    (one_without_rows_is_the_latest, formatted.test_a_micro_batch_without_rows_lets_no_late_driver_in),
    (outcomes_of_micro_batches_are_kept, formatted.test_outcomes_of_earlier_micro_batches_are_forgotten),
]
DECIDED: list[tuple[Mutant, Callable[..., object]]] = [
    (
        segments_are_read_before_those_in_front_of_them,
        decided.test_nothing_is_taken_of_a_segment_before_those_in_front_of_it,
    ),
    (all_is_read_by_one_task, decided.test_as_many_tasks_read_as_run_at_one_time),
    (each_piece_has_a_task_of_its_own, decided.test_as_many_tasks_read_as_run_at_one_time),
    (the_first_segment_takes_all_rows, decided.test_a_backlog_keeps_no_other_segment_waiting),
    (every_segment_has_a_task_of_its_own, decided.test_segments_with_keys_in_common_are_read_in_order_by_one_task),
]


def _name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("mutant", "test"), DECIDED, ids=_name)
def test_a_named_test_of_micro_batches_finds_it(mutant: Mutant, test: Callable[..., object]) -> None:
    test()
    assert_caught(mutant, test)


@pytest.mark.parametrize(("mutant", "test"), WITH_A_STREAM, ids=_name)
def test_a_named_test_of_the_format_finds_it(mutant: Mutant, test: Callable[..., object], tmp_path: Path) -> None:
    with stream_of(tmp_path / "sound") as store:
        test(store)
    with stream_of(tmp_path / "mutant") as store:
        assert_caught(mutant, test, store)


@pytest.mark.parametrize(("mutant", "test"), OF_MICRO_BATCHES, ids=_name)
def test_a_named_test_of_written_micro_batches_finds_it(
    mutant: Mutant, test: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = formatted.Context("q", "0")
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    with stream_of(tmp_path / "sound") as store:
        test(store, context)
    formatted.number(context, 0)
    with stream_of(tmp_path / "mutant") as store:
        assert_caught(mutant, test, store, context)


def test_a_read_that_makes_the_store_is_found(tmp_path: Path) -> None:
    test = formatted.test_a_store_that_is_not_there_is_not_made_by_a_read
    (tmp_path / "mutant").mkdir()
    test(tmp_path)
    assert_caught(a_read_makes_the_store, test, tmp_path / "mutant")
