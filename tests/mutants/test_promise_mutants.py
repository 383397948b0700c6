"""Mutants of what an old checkpoint promises once more: all of it, nothing, or without a question. Each is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.codec import test_log_entry as entries
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_old_promises as old

from headgate.codec import log_entry
from headgate.model.manifest import MANIFEST_VERSION, Committable, Left, Manifest
from headgate.protocol.checkpoints import promises
from headgate.runtime.driver import claims
from headgate.runtime.driver.adopting import Adoption
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.runtime.stored_state.places import StoredCheckpoint
from headgate.runtime.written_state import writing

Context = AbstractContextManager[None]


def what_was_promised_is_promised_for_ever() -> Context:  # SV26
    return patched(promises, "settled", lambda found, newer: frozenset())


def nothing_is_promised_once_more() -> Context:  # SV26
    return patched(promises, "settled", lambda found, newer: frozenset(found.committables))


def nobody_is_asked() -> Context:  # SV20
    return patched(Adoption, "ask", lambda self, adoptable: None)


def whatever_is_older_is_in_line() -> Context:  # SV26
    return patched(promises, "is_in_line", lambda checkpoint, newer: checkpoint <= newer.checkpoint)


def what_a_start_could_not_use_is_in_line() -> Context:  # SV26
    return patched(claims, "leaving", lambda base, first: base.left)


def a_start_gives_up_without_a_word() -> Context:  # SV26, SV30
    return patched(claims, "given_up", lambda restored, definition: ())


def a_savepoint_gives_up_without_a_word() -> Context:  # SV26, WS10
    return patched(writing, "giving_up", lambda base, promised: ())


def who_gives_a_sink_up_leaves_the_checkpoint() -> Context:  # SV30
    giving_up = promises.giving_up

    def whole(base: Manifest, promised: Iterable[Committable]) -> tuple[Left, ...]:
        return tuple(replace(left, sink=None) for left in giving_up(base, promised))

    return patched(promises, "giving_up", whole)


def who_knows_of_nothing_left_reads_on() -> Context:  # SV26
    return patched(log_entry, "LEFT_VERSION", MANIFEST_VERSION)


def one_life_is_as_good_as_another() -> Context:  # SV26
    return patched(Adoption, "_is_own_life", lambda self, found, observed: True)


def targets_remember_everything() -> Context:  # K20
    ask = SinkCommits.denial

    def denial(self: SinkCommits, committables: list[object], remembered: object, *, may_lose: bool) -> str:
        return ask(self, committables, committables, may_lose=may_lose)  # type: ignore[arg-type]

    return patched(SinkCommits, "denial", denial)


def a_changed_savepoint_promises_what_its_source_did() -> Context:  # WS10
    return patched(StoredCheckpoint, "standing", lambda self: ("", frozenset()))


TWICE = old.test_going_back_to_a_copy_commits_nothing_twice_and_loses_nothing
LEFT = old.test_a_checkpoint_that_was_left_with_its_output_undecided_is_not_adopted
BACK = old.test_output_of_a_sink_that_was_given_up_and_is_back_is_asked_for
CASES: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (what_was_promised_is_promised_for_ever, TWICE, ("streams", old.copied)),
    (
        nothing_is_promised_once_more,
        old.test_what_the_newest_checkpoint_still_promises_is_committed,
        ("two phases", old.copied),
    ),
    (nobody_is_asked, LEFT, ("streams", "own")),
    (whatever_is_older_is_in_line, LEFT, ("files", "copy")),
    (what_a_start_could_not_use_is_in_line, old.test_a_checkpoint_that_a_start_could_not_use_is_left_too, ()),
    (a_start_gives_up_without_a_word, BACK, ("files", old.given_up_by_a_start)),
    (a_savepoint_gives_up_without_a_word, BACK, ("streams", old.given_up_in_a_savepoint)),
    (
        who_gives_a_sink_up_leaves_the_checkpoint,
        old.test_a_sink_that_is_given_up_leaves_the_checkpoint_in_line,
        (),
    ),
    (one_life_is_as_good_as_another, old.test_numbers_of_another_life_say_nothing_about_ones_own, ()),
    (targets_remember_everything, old.test_a_target_that_may_have_forgotten_and_cannot_be_asked_publishes_nothing, ()),
    (
        a_changed_savepoint_promises_what_its_source_did,
        old.test_an_old_checkpoint_of_a_log_that_went_on_promises_no_more_when_it_is_changed,
        (),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CASES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_promise_that_is_kept_twice_or_not_is_caught(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...], tmp_path: Path
) -> None:
    assert_caught(mutant, test, tmp_path, *arguments)


def test_a_format_that_others_misread_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test = entries.test_a_manifest_that_says_what_was_left_is_of_a_version_of_its_own
    assert_caught(who_knows_of_nothing_left_reads_on, test, None, monkeypatch)
