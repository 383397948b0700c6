"""Mutants of how Spark's JVM is begun ahead, and of the file of classes that it starts from."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.cli import test_entry as entry_tests
from tests.cli import test_tips as tip_tests
from tests.cli.test_entry import launches, program
from tests.mutants.harness import assert_caught, patched
from tests.sim.product.patching import around
from tests.spark import test_class_archive as archive_tests
from tests.spark import test_jvm as jvm_tests
from tests.spark import test_jvm_process as process_tests
from tests.spark.test_class_archive import place
from tests.spark.test_jvm import Java, java, no_jvm
from tests.spark.test_jvm_process import home, launch

from headgate.cli import entry, tips
from headgate.spark import archiving, class_archive, jvm, jvm_process, session
from headgate.spark.jvm_process import JvmProcess, Launch

__all__ = ["home", "java", "launch", "launches", "no_jvm", "place", "program"]
"""Fixtures of the tests."""


def whatever_was_begun_is_taken() -> AbstractContextManager[None]:
    return patched(Launch, "__eq__", lambda self, other: True)


def a_dead_one_is_taken() -> AbstractContextManager[None]:
    def begun(wanted: Launch) -> JvmProcess:
        while jvm_process._ahead:
            found = jvm_process._ahead.pop()
            if found.is_mine and found.launch == wanted:
                return found
            found.end()
        return JvmProcess(wanted)

    return patched(process_tests, "begun", begun)


def a_fork_takes_it_for_its_own() -> AbstractContextManager[None]:
    return patched(JvmProcess, "is_mine", True)


def nobody_ends_it_for_a_session_of_the_programs_own() -> AbstractContextManager[None]:
    return patched(session, "end_ahead", lambda: None)


def the_mask_of_files_does_not_count() -> AbstractContextManager[None]:
    return patched(jvm_process, "_surroundings", lambda: ())


@pytest.mark.parametrize(
    ("mutant", "change"),
    [
        (whatever_was_begun_is_taken, process_tests.changed_environment),
        (the_mask_of_files_does_not_count, process_tests.changed_mask),
        (the_mask_of_files_does_not_count, process_tests.changed_directory),
    ],
)
def test_a_jvm_that_is_not_the_right_one_is_found(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Any, change: Any
) -> None:
    named = process_tests.test_what_a_program_changes_while_it_is_loaded_counts
    assert_caught(mutant, named, launch, tmp_path, monkeypatch, change)


def test_a_dead_jvm_that_is_taken_is_found(launch: Any) -> None:
    assert_caught(a_dead_one_is_taken, process_tests.test_a_jvm_that_died_before_it_was_needed_is_replaced, launch)


def test_a_fork_that_ends_the_jvm_of_its_parent_is_found(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(
        a_fork_takes_it_for_its_own, process_tests.test_a_fork_leaves_the_jvm_to_its_parent, launch, monkeypatch
    )


def test_a_jvm_that_is_left_running_is_found(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named = process_tests.test_a_session_of_the_programs_own_ends_the_jvm_that_was_begun_ahead
    assert_caught(nobody_ends_it_for_a_session_of_the_programs_own, named, launch, monkeypatch)


def what_is_for_the_command_goes_to_its_workers() -> AbstractContextManager[None]:
    def environment_of(call: Any, program: str, environ: Mapping[str, str], *, has_page: bool) -> dict[str, str]:
        return {**environ, **call(program, environ, has_page=has_page)}

    return around(entry, "environment_of", environment_of)


def test_a_token_that_workers_get_is_found(program: str) -> None:
    def named() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entry_tests, "environment_of", entry.environment_of)
            entry_tests.test_what_is_for_the_command_alone_is_not_in_the_environment(program)

    named()
    assert_caught(what_is_for_the_command_goes_to_its_workers, named)


def the_last_of_an_options_values_is_forgotten() -> AbstractContextManager[None]:
    return around(entry, "values_of", lambda call, option, words: call(option, words)[:1])


def test_settings_that_are_forgotten_are_found(program: str, launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named = entry_tests.test_the_words_of_a_command_say_which_jvm_it_needs
    words = ["--conf", "spark.a=1", "--conf=spark.b=2"]
    given = {"spark.a": "1", "spark.b": "2"}
    assert_caught(the_last_of_an_options_values_is_forgotten, named, program, launches, monkeypatch, words, given)


def anybodys_archive_is_used() -> AbstractContextManager[None]:
    return patched(class_archive, "is_own", lambda file: file.exists())


def test_an_archive_of_somebody_else_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = archive_tests.test_an_archive_that_others_could_have_written_is_not_used
    assert_caught(anybodys_archive_is_used, named, monkeypatch)


def test_half_an_archive_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant() -> AbstractContextManager[None]:
        return patched(archiving, "OwnDirectory", InPlace)

    class InPlace:
        """Everybody writes where the file belongs."""

        def __init__(self, path: Path) -> None:
            self.path = path.parent

        def remove(self) -> None:
            """Nothing is there to be removed."""

    assert_caught(mutant, archive_tests.test_an_archive_gets_its_name_when_it_is_whole, place, monkeypatch)


def warnings_of_the_start_are_lost() -> AbstractContextManager[None]:
    return patched(jvm, "START_LOG", "nothing")


def they_are_told_again() -> AbstractContextManager[None]:
    return patched(jvm, "START_LOG", "spark.log")


def test_warnings_that_are_lost_or_told_again_are_found(java: Java, tmp_path: Path) -> None:
    first, second = (
        jvm_tests.test_warnings_of_the_start_go_to_the_log_of_the_pipeline,
        jvm_tests.test_a_second_pipeline_has_a_log_of_its_own,
    )
    assert_caught(warnings_of_the_start_are_lost, first, java, tmp_path)
    assert_caught(they_are_told_again, second, java, tmp_path)


def a_jvm_knows_its_pipeline() -> AbstractContextManager[None]:
    return patched(jvm_tests, "jvm_settings", lambda options: dict(options))


def test_a_jvm_that_knows_its_pipeline_is_found() -> None:
    assert_caught(a_jvm_knows_its_pipeline, jvm_tests.test_a_jvm_is_told_nothing_of_its_pipeline)


PATIENCE_S = 60
TOGETHER = threading.Barrier(8)


def looked_at_before_it_is_made(name: str) -> bool:
    directory = tips.user_state_directory()
    if (directory / name).exists():
        return False
    directory.mkdir(parents=True, exist_ok=True)
    TOGETHER.wait(PATIENCE_S)
    (directory / name).touch()
    return True


def everywhere(call: Any, master: Any, environ: Any, *, is_terminal: bool) -> Any:
    return call(None, {**environ, "HEADGATE_MASTER": "local"}, is_terminal=is_terminal)


def test_a_tip_that_is_told_twice_or_where_it_does_not_help_is_found(tmp_path: Path) -> None:  # OM17
    def at_home(test: Any) -> Any:
        def run(number: int) -> None:
            with pytest.MonkeyPatch.context() as patch:
                root = tmp_path / f"{test.__name__}{number}"
                root.mkdir(exist_ok=True)
                patch.setenv("XDG_STATE_HOME", str(root / "state"))
                patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
                test(*((root, patch) if test.__code__.co_argcount == 2 else ()))

        return run

    together = at_home(tip_tests.test_of_commands_that_end_at_one_moment_one_tells_it)
    together(0)
    assert_caught(lambda: patched(tips, "_is_first", looked_at_before_it_is_made), together, 1)
    helping = at_home(tip_tests.test_it_is_told_only_where_it_helps)
    helping(2)
    assert_caught(lambda: patched(tips, "is_own", lambda file: False), helping, 3)
    assert_caught(lambda: around(tip_tests, "prepare_tip", everywhere), helping, 4)
