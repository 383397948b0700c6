"""Mutants of who is told of checkpoints: sources, sinks, who hears of rounds, and who would never be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.api import test_listening_objects as object_tests
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_looping as looping_tests
from tests.runtime.driver import test_round_listeners as round_tests
from tests.runtime.driver import test_sink_commits as commit_tests
from tests.runtime.worker import test_hooks as hook_tests

import headgate as hg
from headgate.api import loop_checks, pipeline, stream
from headgate.operators import catalog
from headgate.operators.checkpointed import exploring
from headgate.runtime.driver import sink_commits
from headgate.runtime.driver.coordination import Coordination
from headgate.runtime.driver.looping import Looping, RoundCallbacks
from headgate.runtime.worker import hooks

Test = Callable[..., object]


def only_what_open_returns_is_told() -> AbstractContextManager[None]:  # HL18
    return patched(hooks, "_objects_of", lambda link: [link.operator.user_object])


def a_sink_is_told_behind_its_writer() -> AbstractContextManager[None]:  # HL18, HL4
    usual = hooks._objects_of
    return patched(hooks, "_objects_of", lambda link: usual(link)[::-1])


def a_sink_that_is_its_own_writer_is_told_twice() -> AbstractContextManager[None]:  # HL18
    def objects(link: Any) -> list[object]:
        return [link.operator.opened_by, link.operator.user_object]

    return patched(hooks, "_objects_of", objects)


def methods_of_readers_and_writers_are_not_looked_at() -> AbstractContextManager[None]:  # HL20
    return patched(hooks, "unheard", lambda found: None)


def who_hears_of_rounds_is_not_told() -> AbstractContextManager[None]:  # HL19
    return patched(RoundCallbacks, "tell", lambda self, *arguments: None)


@contextmanager
def who_failed_has_confirmed() -> Iterator[None]:  # HL19
    usual = Looping.tell

    def tell(self: Any, tell: Any, failed: Any, told: Any) -> None:
        usual(self, tell, failed, lambda: None)
        self._callbacks.when_done(told)

    with patched(Looping, "tell", tell):
        yield


def sources_and_sinks_that_listen_owe_nothing() -> AbstractContextManager[None]:  # HL18, C75
    def is_listening(spec: object) -> bool:
        called = (catalog.function_in(spec), getattr(spec, "on_round", None))
        return any(isinstance(found, hg.CheckpointListener) for found in called)

    return patched(catalog, "is_listening", is_listening)


def who_hears_of_rounds_owes_nothing() -> AbstractContextManager[None]:  # HL19, C75
    def is_listening(spec: object) -> bool:
        found = isinstance(catalog.function_in(spec), hg.CheckpointListener)
        return found or bool(getattr(spec, "is_listening", isinstance(spec, hg.CheckpointListener)))

    return patched(catalog, "is_listening", is_listening)


def methods_of_objects_are_taken() -> AbstractContextManager[None]:  # HL20
    return patched(exploring, "hidden", lambda function: None)


def lists_in_the_driver_are_taken() -> AbstractContextManager[None]:  # HL20
    return patched(loop_checks, "refuse_lists", lambda where, found: None)


def deaf_sources_and_hooks_are_taken() -> AbstractContextManager[None]:  # HL20
    return patched(pipeline, "refuse_unheard", lambda where, found: None)


def deaf_sinks_are_taken() -> AbstractContextManager[None]:  # HL20
    return patched(stream, "refuse_unheard", lambda where, found: None)


def listening_committers_are_taken() -> AbstractContextManager[None]:  # HL20
    return patched(sink_commits, "_refuse_listening", lambda name, sink, committer: None)


@contextmanager
def the_end_does_not_wait_for_who_hears_of_rounds() -> Iterator[None]:  # HL19
    usual = Coordination.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        usual(self, *arguments, **options)
        self.machine._told.clear()

    with patched(Coordination, "__init__", init):
        yield


def _refused(**places: Callable[[], object]) -> None:
    for write in places.values():
        object_tests.test_an_object_that_would_never_be_told_is_refused(write, "")


def _deaf_source() -> None:
    _refused(source=lambda: hg.Pipeline("p").source(object_tests.DeafSource([{"n": 1}])))


def _deaf_sink() -> None:
    _refused(sink=lambda: object_tests.rows().sink(object_tests.DeafSink()))


def _method() -> None:
    _refused(method=lambda: object_tests.rows().map(object_tests.Listening().step))


def _keeping_rounds() -> None:
    _refused(rounds=lambda: object_tests.looped(object_tests.rows(), object_tests.Keeping()))


MUTANTS: list[tuple[Mutant, Test]] = [
    (only_what_open_returns_is_told, hook_tests.test_a_source_is_told_before_its_reader_and_a_sink_before_its_writer),
    (a_sink_is_told_behind_its_writer, hook_tests.test_a_source_is_told_before_its_reader_and_a_sink_before_its_writer),
    (a_sink_that_is_its_own_writer_is_told_twice, hook_tests.test_a_sink_that_is_its_own_writer_is_told_once),
    (
        methods_of_readers_and_writers_are_not_looked_at,
        lambda: hook_tests.test_a_reader_or_writer_with_a_method_that_nobody_would_call_is_refused("out"),
    ),
    (who_hears_of_rounds_is_not_told, looping_tests.test_who_hears_of_rounds_hears_of_checkpoints_in_turn),
    (who_failed_has_confirmed, looping_tests.test_one_of_several_who_fails_is_named_and_nothing_is_confirmed),
    (
        sources_and_sinks_that_listen_owe_nothing,
        lambda: object_tests.test_what_sources_sinks_and_loops_have_yet_to_do_is_not_removed(object_tests.with_sink),
    ),
    (
        who_hears_of_rounds_owes_nothing,
        lambda: object_tests.test_what_sources_sinks_and_loops_have_yet_to_do_is_not_removed(object_tests.with_loop),
    ),
    (methods_of_objects_are_taken, _method),
    (lists_in_the_driver_are_taken, _keeping_rounds),
    (deaf_sources_and_hooks_are_taken, _deaf_source),
    (deaf_sinks_are_taken, _deaf_sink),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda x: getattr(x, "__name__", None))
def test_the_mutant_is_caught(mutant: Mutant, test: Test) -> None:
    assert_caught(mutant, test)


def test_a_committer_that_listens_and_is_taken_is_caught(tmp_path: Path) -> None:
    test = commit_tests.test_a_committer_that_listens_is_refused_unless_it_is_the_sink
    assert_caught(listening_committers_are_taken, test, tmp_path)


def test_an_end_that_does_not_wait_for_who_hears_of_rounds_is_caught(tmp_path: Path) -> None:
    test = round_tests.test_the_end_waits_for_who_hears_of_rounds
    assert_caught(the_end_does_not_wait_for_who_hears_of_rounds, test, tmp_path)
