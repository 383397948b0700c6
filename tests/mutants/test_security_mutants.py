"""Ways to leave files and connections open to those who should not read, hold or change them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.mutants.harness import assert_caught, patched
from tests.store import test_access

from headgate.model.security import Access
from headgate.store import access


@pytest.fixture(autouse=True)
def _permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@contextmanager
def files_are_world_readable() -> Iterator[None]:
    with patched(access, "FILE_MODES", dict.fromkeys(Access, 420)):
        yield


@contextmanager
def directories_are_world_readable() -> Iterator[None]:
    with patched(access, "DIRECTORY_MODES", dict.fromkeys(Access, 493)):
        yield


@contextmanager
def the_umask_cuts_the_group_off() -> Iterator[None]:
    with patched(os, "fchmod", lambda descriptor, mode: None):
        yield


# SE1
@pytest.mark.parametrize("mutant", [files_are_world_readable, directories_are_world_readable])
def test_wider_modes_are_caught(mutant: object, tmp_path: Path) -> None:
    assert_caught(mutant, test_access.test_objects_are_their_owners_alone_under_a_permissive_umask, tmp_path / "a")  # type: ignore[arg-type]
    test_access.test_objects_are_their_owners_alone_under_a_permissive_umask(tmp_path / "b")


# SE1
def test_a_write_ahead_log_for_everybody_is_caught(tmp_path: Path) -> None:
    test = test_access.test_a_store_is_private_with_its_write_ahead_log
    assert_caught(files_are_world_readable, test, tmp_path / "a", "owner", 0o600, 0o700)
    test(tmp_path / "b", "owner", 0o600, 0o700)


# SE2
def test_a_group_that_the_umask_cuts_off_is_caught(tmp_path: Path) -> None:
    test = test_access.test_a_directory_that_is_shared_with_its_group_says_so_to_all_that_write_there
    (tmp_path / "a").mkdir()
    assert_caught(the_umask_cuts_the_group_off, test, tmp_path / "a", 0o022)


# SE4
def test_a_lock_that_stays_readable_is_caught(tmp_path: Path) -> None:
    assert_caught(
        the_umask_cuts_the_group_off, test_access.test_a_lock_that_everybody_could_read_is_closed_to_them, tmp_path
    )
