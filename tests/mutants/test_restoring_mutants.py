"""Mutants of the barrier and of the restore: sinks sealed too early, rounds and ends that no snapshot vouches for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.mutants.harness import assert_caught, patched
from tests.runtime.checkpoints import test_restoring
from tests.runtime.worker import test_subtask_runner

from headgate.codec.snapshot import FINISHED_PREFIX, ROUNDS_PREFIX
from headgate.protocol.loops.part import NO_ROUNDS
from headgate.runtime.checkpoints.restoring import NotRestorable, RestoredSnapshots
from headgate.runtime.worker.subtask_runner import SubtaskRunner


@contextmanager
def sinks_are_sealed_before_operators_flush() -> Iterator[None]:
    def early(self: Any, checkpoint: Any, **options: Any) -> None:
        sinks = self._freezing.sinks
        sealed = {node: sink.seal(checkpoint) for node, sink in sinks.items()}
        self._freezing.sinks = {node: SimpleNamespace(seal=lambda _, s=one: s) for node, one in sealed.items()}
        try:
            original(self, checkpoint, **options)
        finally:
            self._freezing.sinks = sinks

    original = SubtaskRunner._take_snapshot
    with patched(SubtaskRunner, "_take_snapshot", early):
        yield


@contextmanager
def rounds_go_on_from_the_highest_head() -> Iterator[None]:
    def rounds(self: Any, vertex: Any) -> Any:
        found = original(self, vertex)
        name = f"{ROUNDS_PREFIX}{vertex.head.name}"
        stored = [s[name] for _, s in self._seen_by(vertex) if name in s]
        started = max((msgspec.msgpack.decode(one, type=type(found)).started for one in stored), default=-1)
        return dataclasses.replace(found, started=started)

    original = RestoredSnapshots.rounds
    with patched(RestoredSnapshots, "rounds", rounds):
        yield


@contextmanager
def a_node_that_the_snapshot_does_not_know_has_finished() -> Iterator[None]:
    def is_finished(self: Any, vertex: Any) -> bool:
        known = [
            node
            for node in vertex.nodes
            if any(f"{FINISHED_PREFIX}{node.name}" in sections for sections in self._formers.values())
        ]
        return original(self, dataclasses.replace(vertex, nodes=tuple(known)))

    original = RestoredSnapshots.is_finished
    with patched(RestoredSnapshots, "is_finished", is_finished):
        yield


def test_sinks_that_are_sealed_too_early_are_caught() -> None:
    named = test_subtask_runner.test_sinks_are_sealed_after_operators_have_sent_what_belongs_before_the_barrier
    assert_caught(sinks_are_sealed_before_operators_flush, named)


@pytest.mark.parametrize("after", [1, 3])
def test_rounds_that_go_on_from_the_highest_head_are_caught(after: int) -> None:
    named = test_restoring.test_after_a_rescale_rounds_go_on_from_the_lowest_round_of_any_head
    assert_caught(rounds_go_on_from_the_highest_head, named, after)
    assert_caught(
        rounds_go_on_from_the_highest_head,
        test_restoring.test_heads_that_have_not_started_hold_the_rounds_of_all_back,
    )


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_unknown_node_that_counts_as_finished_is_caught(after: int) -> None:
    named = test_restoring.test_a_vertex_with_an_operator_that_the_snapshot_does_not_know_has_not_finished
    assert_caught(a_node_that_the_snapshot_does_not_know_has_finished, named, after)


@contextmanager
def both_sides_of_the_end_of_a_round_are_merged() -> Iterator[None]:
    def rounds(self: Any, vertex: Any) -> Any:
        try:
            return original(self, vertex)
        except NotRestorable:
            return NO_ROUNDS

    original = RestoredSnapshots.rounds
    with patched(RestoredSnapshots, "rounds", rounds):
        yield


def test_operators_that_are_merged_over_the_end_of_a_round_are_caught() -> None:
    assert_caught(
        both_sides_of_the_end_of_a_round_are_merged,
        test_restoring.test_operators_on_both_sides_of_the_end_of_a_round_are_not_merged,
    )
