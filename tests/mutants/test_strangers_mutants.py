"""Mutants that take files of others for our own. Each is caught."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.codec import test_log_entry as hints
from tests.connectors.files import test_files_of_strangers as strangers
from tests.mutants.harness import assert_caught, patched
from tests.runtime.checkpoints import test_log_outcomes as outcomes

from headgate.connectors.files import commit as file_commit
from headgate.connectors.files import ledger as file_ledger
from headgate.connectors.files import owner as file_owner
from headgate.runtime.checkpoints import entries, snapshot_files
from headgate.storage.base import Storage

Listing = Callable[[Storage, str], dict[int, str]]


def by_the_last_component(storage: Storage, directory: str) -> dict[int, str]:
    names = {path: path.rsplit("/", 1)[1] for path in storage.list(directory)}
    return {int(name): path for path, name in names.items() if re.fullmatch("[0-9]{10,}", name)}


def by_the_last_characters(storage: Storage, directory: str) -> dict[int, str]:
    return {int(path[-10:]): path for path in storage.list(directory) if path[-10:].isdigit()}


def a_claim_is_known_by_its_last_component() -> AbstractContextManager[None]:
    return patched(file_commit, "numbered", by_the_last_component)


def an_owner_is_known_by_its_last_component() -> AbstractContextManager[None]:
    return patched(file_owner, "numbered", by_the_last_component)


def an_owner_is_known_by_its_last_characters() -> AbstractContextManager[None]:
    return patched(file_owner, "numbered", by_the_last_characters)


def an_entry_or_id_is_known_by_its_last_component() -> AbstractContextManager[None]:
    return patched(entries, "numbered", by_the_last_component)


def a_number_may_be_written_in_many_ways() -> AbstractContextManager[None]:
    def found(storage: Storage, directory: str) -> dict[int, str]:
        names = {path: path.removeprefix(f"{directory}/") for path in storage.list(directory)}
        return {int(name): path for path, name in names.items() if re.fullmatch(r"\d{10,}", name)}

    return patched(file_commit, "numbered", found)


def a_manifest_is_known_by_its_last_component() -> AbstractContextManager[None]:
    return patched(file_ledger, "_PATH", re.compile(r"(?:.+/)(?:merged-)?([0-9]{10,})-[0-9a-f]{16}\.json"))


def what_is_kept_aside_is_looked_for_anywhere() -> AbstractContextManager[None]:
    return patched(snapshot_files, "_ASIDE", re.compile(r".+/aside/(\d{10,})-(\d{10,})/.+"))


def whatever_looks_like_a_digit_is_a_hint() -> AbstractContextManager[None]:
    def decode(data: bytes, path: str) -> int:
        text = data.decode("latin-1").strip()
        if not text.isdigit():
            raise hints.CorruptionError(path, 0, "a number", text)
        return int(text)

    return patched(hints, "decode_hint", decode)


CAUGHT = [
    (a_claim_is_known_by_its_last_component, strangers.test_a_copy_of_a_claim_fences_nobody, "old/0000000099"),
    (a_number_may_be_written_in_many_ways, strangers.test_a_copy_of_a_claim_fences_nobody, "٠٠٠٠٠٠٠٠٩٩"),
    (a_number_may_be_written_in_many_ways, strangers.test_a_copy_of_a_claim_fences_nobody, "00000000099"),
    (an_owner_is_known_by_its_last_component, strangers.test_a_copy_of_an_owner_owns_nothing, "old/0000000099"),
    (an_owner_is_known_by_its_last_characters, strangers.test_a_copy_of_an_owner_owns_nothing, "copy-0000000099"),
    (an_owner_is_known_by_its_last_characters, strangers.test_a_copy_of_an_owner_owns_nothing, "000000009²"),
]


@pytest.mark.parametrize(("mutant", "test", "name"), CAUGHT, ids=lambda value: getattr(value, "__name__", "x"))
def test_who_takes_a_copy_for_the_original_is_caught(mutant: Any, test: Any, name: str, tmp_path: Path) -> None:
    test(tmp_path / "sound", name)
    assert_caught(mutant, test, tmp_path / "mutant", name)


def test_who_takes_a_copy_of_a_manifest_for_it_is_caught(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test = strangers.test_copies_of_manifests_are_left_alone_and_list_nothing
        assert_caught(a_manifest_is_known_by_its_last_component, test, tmp_path, patch)


def test_who_takes_a_copy_of_an_entry_or_an_id_for_it_is_caught() -> None:
    assert_caught(an_entry_or_id_is_known_by_its_last_component, outcomes.test_files_that_are_not_ours_are_passed_over)


def test_who_takes_notes_for_what_is_kept_aside_is_caught() -> None:
    test = outcomes.test_notes_beside_what_is_kept_aside_count_for_nothing_and_stay
    assert_caught(what_is_kept_aside_is_looked_for_anywhere, test, outcomes.OTHERS_COPY)


def test_who_reads_a_damaged_hint_as_a_number_is_caught() -> None:
    assert_caught(whatever_looks_like_a_digit_is_a_hint, hints.test_hints_of_version_0_1_are_read)
